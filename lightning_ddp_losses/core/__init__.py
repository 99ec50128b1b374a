"""Functions of one rank, without its peers (torch only).

* ``precision``: the precision of a loss. Parameters that a precision plugin would halve
* ``autograd_graph``: one walk over the autograd graph, parameters that a loss does not reach, how a loss is run
* ``inputs``: nests of tensors by path, changed, rebuilt. Inputs of a call, refused with a message before the call fails on them
* ``modules``: another method in a module's place, modules that are not registered, what is registered inside a module
* ``configuration``, ``option_values``: the options of a module, as ranks compare them
* ``signature``: what decides how a call is computed, and plans that are stored by it
* ``host_copy``: values of an accelerator on their way to the host, read when they have arrived
* ``random_state``: random generators, saved, seeded and put back
* ``launch_variables``: environment variables of a launcher, which another job may have left behind
* ``faults``: the one table of known faults. A new fault is one row there, and the check that finds it
* ``compat``: every read of a private name of torch, Lightning, torchmetrics and pytorch-metric-learning
"""
