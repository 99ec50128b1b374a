"""What one rank knows without its peers (torch only).

* ``precision``: in which precision a loss computes; parameters that a precision plugin would halve
* ``nests``: tensors in nested containers: by path, changed, rebuilt
* ``autograd_graph``: one walk over the autograd graph, parameters that a loss does not reach, how a loss is run
* ``inputs``: what a loss is fed, checked with words before the loss itself fails on an index
* ``forward_patch``: another method in a module's place for the length of a fit
* ``module_search``: modules that a module holds without having registered them
* ``configuration``: a loss's configuration as text, to compare between ranks
* ``random_state``: random generators, saved, seeded and put back
* ``safe_payload``: values of other processes as bytes, read without running what is in them
* ``faults``: the one table of known faults; a new fault is one row there, and the check that finds it
* ``compat``: every read of a private name of torch, Lightning, torchmetrics and pytorch-metric-learning
"""
