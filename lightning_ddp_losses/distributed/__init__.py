"""Joint work of the ranks, over public ``torch.distributed``: groups, handshakes, collectives, shards, fingerprints (torch only).

* ``process_groups``: ranks and world size of a group, and the process groups of our own
* ``rendezvous``: how a world starts, and how its ranks agree before they have a group
* ``liveness``: ranks that fail, stand still or are gone
* ``messages``: the header of a handshake, the one error that ranks which disagree raise, and values that are read without running them
* ``handshake``: ``all_gather`` of one header and a few bytes per rank before anything else, and errors that all ranks raise together
* ``ledger``: what several parts of a fit tell the other ranks at one place, in one handshake
* ``raw_collectives``: plain collectives on tensors of known shapes, and rows that pass round a ring
* ``collectives``: the differentiable ones, each with the gradient that it gives, and exchanges in backward
* ``gathered_batch``: several tensors in one gather, with their gradients
* ``accumulation``: windows of several micro-batches, divided by the counts of all of them. ``accumulation_window`` for hand-written loops
* ``window_parts``: the parts of a loss in a window, their counts and weights. ``window_terms``: by which name a loss is known in a window
* ``window_graph``: what a backward in a window runs through. ``window_gradients``: the gradients that a window corrects
* ``other_reductions``: modules whose gradients may end as something else than a mean
* ``window_end``: what each rank has back-propagated, and the factor of all gradients that follows
* ``collective_trace``: collectives that cut the graph of a loss, with the user's line
* ``global_values``: values over the rows of all ranks: how the model's gradients are reduced, the open window, upstream gradients
* ``shard``: the tag on a parameter that is sharded
* ``fingerprint``: 64-bit hashes of tensors and texts, to compare between ranks

A new differentiable collective is one function in ``collectives`` over ``_Exchanged``, one row in its docstring's table and one in
``tests/distributed/test_collectives.py``. Another transport replaces functions of ``raw_collectives`` and a group of ``process_groups``.
"""
