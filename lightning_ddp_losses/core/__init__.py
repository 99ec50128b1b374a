"""Functions of one rank, without its peers (torch only).

* ``precision``: the precision of a loss. Parameters that a precision plugin would halve
* ``host_copy``: numbers on their way from an accelerator to the host
* ``nests``: tensors in nested containers: by path, changed, rebuilt
* ``autograd_graph``: one walk over the autograd graph, parameters that a loss does not reach, how a loss is run
* ``inputs``: inputs of a loss, refused with a message before the loss fails on an index
* ``forward_patch``: another method in a module's place for the length of a fit
* ``module_search``: modules that a module holds without having registered them
* ``configuration``: a loss's configuration as text, to compare between ranks
* ``random_state``: random generators, saved, seeded and put back
* ``safe_payload``: values of other processes as bytes, read without running their content
* ``faults``: the one table of known faults. A new fault is one row there, and the check that finds it
* ``compat``: every read of a private name of torch, Lightning, torchmetrics and pytorch-metric-learning
"""
