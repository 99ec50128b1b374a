"""The modules, data and encoders that the included configs train. Configs refer to them as ``lightning_ddp_losses.cli.<name>``.

* ``data``: global batches over arrays, divided by rank, from the user's own arrays or the digits.
* ``tables``: csv files, as features and labels.
* ``cells``: counts of a hundred thousand cells, for large batches.
* ``module``: ``EmbeddingModule``, ``RegressionModule``, ``SelfDistillationModule``, which is trained without labels, and two encoders.
* ``evaluation``: retrieval metrics of the whole held-out set, and the module that logs them.
"""
