"""Cooperation of the ranks over public ``torch.distributed``: groups, handshakes, collectives, shards, fingerprints (torch only).

* ``process_groups``: ranks and world size of a group, and the package's internal process groups
* ``rendezvous``: how a world starts, and how its ranks agree before they have a group
* ``liveness``: ranks that fail, stall or exit
* ``messages``: the header of a handshake, and the common error of ranks that disagree
* ``handshake``: ``all_gather`` of one header and a few bytes per rank at the start of each operation, and errors that all ranks raise
* ``ledger``: what several parts of a fit send to the other ranks at one place, in one handshake
* ``raw_collectives``: plain collectives on tensors of known shapes, and rows passed around a ring
* ``collectives``: differentiable collectives, each with a specified gradient, and exchanges in backward
* ``gathered_batch``: several tensors in one gather, with their gradients
* ``accumulation``: windows of several micro-batches, divided by the counts of all of them. ``accumulation_window`` for hand-written loops
* ``window_parts``: the parts of a loss in a window, their counts and weights. ``window_terms``: how a loss is identified in a window
* ``window_graph``: what a backward in a window runs through. ``window_gradients``: the gradients that a window corrects
* ``other_reductions``: modules whose gradients may be reduced to something other than a mean
* ``window_end``: what each rank has back-propagated, and the resulting factor of all gradients
* ``collective_trace``: collectives that cut the graph of a loss, with the user's source line
* ``global_values``: values over the rows of all ranks: how the model's gradients are reduced, the open window, upstream gradients
* ``shard``: the tag on a sharded parameter
* ``fingerprint``: 64-bit hashes of tensors and texts, to compare between ranks

A new differentiable collective is one function in ``collectives`` over ``_Exchanged``, one row in its docstring's table and one in
``tests/distributed/test_collectives.py``. Another transport replaces functions of ``raw_collectives`` and a group of ``process_groups``.
"""
