"""Random numbers of W ranks that are those of one process.

* ``places``: where the rows of a batch are in a tensor, and the tensor's shape in one process
* ``row_table``: what is known of each tensor, by its memory
* ``rules``: where the rows are in the results of an operator
* ``row_sizes``: sizes that were read from a tensor with rows
* ``size_rules``: what such sizes say of the rows in a result
* ``row_orders``: orders of rows whose partners are on other ranks, and the exchange of the rows
* ``whole_draws``: draws for all rows, of which a rank keeps its own
* ``notes``: what a rank notes of a step, for the comparison at its end
* ``row_draws``: the mode that sees the operators of a step
* ``one_row``, ``twin_table``: the mode of a rank with one row, which does not show where it is
* ``state_watch``: draws that no operator has made
* ``shared_states``: generators of all ranks in one state
* ``step``: a step from its beginning to the comparison at its end
* ``training_steps``: the steps of a run, with generators of their own
* ``block``: ``global_randomness``, for loops written by hand

An operator that draws is one row in ``whole_draws``, an operator that keeps rows in their places one row in ``rules``.
"""

from lightning_ddp_losses.randomness.block import global_randomness, shared_draws, with_rows, without_rows

__all__ = ["global_randomness", "shared_draws", "with_rows", "without_rows"]
