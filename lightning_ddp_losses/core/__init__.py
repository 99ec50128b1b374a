"""Functions that run on one rank without communication (torch only).

* ``precision``: the precision of a loss, and parameters whose precision a plugin would reduce
* ``autograd_graph``: walks over the autograd graph, parameters that a loss does not reach, how a loss is run
* ``inputs``: nests of tensors by path, changed or rebuilt, and validation of a call's inputs before the call fails on them
* ``modules``: patched methods of a module, modules that are not registered, contents of a module
* ``configuration``, ``option_values``: the options of a module, as ranks compare them
* ``signature``: what determines how a call is computed, and plans stored by signature
* ``host_copy``: asynchronous copies from an accelerator to the host, read after they have completed
* ``safe_values``: values as bytes for other ranks, read without running code
* ``random_state``: save, seed and restore random generators
* ``launch_variables``: environment variables of a launcher that another job may have left behind
* ``faults``: the table of known faults. A new fault is one row in it, and the check that finds it
* ``torch_compat``, ``lightning_compat``, ``metrics_compat``: every access to a private name of torch, Lightning, and torchmetrics or
  pytorch-metric-learning
"""
