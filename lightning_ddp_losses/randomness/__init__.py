"""Random numbers on W ranks that equal the random numbers of one process.

* ``places``: the position of a batch's rows in a tensor, and the tensor's shape in one process
* ``row_table``: the marks of tensors, by memory
* ``rules``: the position of rows in the results of an operator
* ``row_sizes``: sizes that were read from a tensor with rows
* ``size_rules``: which rows of a result such sizes declare
* ``row_orders``: orders of rows whose partners are on other ranks, and the exchange of the rows
* ``whole_draws``: draws for all rows, of which a rank keeps its part
* ``row_blocks``: draws for the rows of this rank only, in blocks of rows
* ``notes``: what a rank records during a step, for the comparison at its end
* ``row_draws``: the mode that processes the operators of a step
* ``one_row``, ``twin_table``: the mode of a rank with one row, whose position cannot be derived from sizes
* ``state_watch``: detects draws that were not made by an operator
* ``shared_states``: sets the generators of all ranks to the same state
* ``step_draws``: the draws of a step in this process
* ``pieces``, ``piece_draws``: pieces of the rows that run one after the other (``microbatched``)
* ``step``: a step, from its beginning to the comparison at its end
* ``training_steps``: the steps of a run, with separate generators
* ``layers``: the layers of a model that drop units
* ``block``: ``global_randomness``, for custom training loops

To support an operator that draws, add a row in ``whole_draws``. For an operator that keeps rows in place, add a row in ``rules``.
"""

from lightning_ddp_losses.randomness.block import global_randomness, shared_draws, with_rows, without_rows

__all__ = ["global_randomness", "shared_draws", "with_rows", "without_rows"]
