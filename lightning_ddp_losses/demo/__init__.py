"""The modules, data and encoders that the shipped configs train. Configs name them as ``lightning_ddp_losses.cli.<name>``.

* ``data``: global batches over arrays, cut by rank, from the user's own arrays or the digits.
* ``tables``: csv files, as features and labels.
* ``cells``: counts of a hundred thousand cells, for large batches.
* ``module``: ``EmbeddingModule``, ``RegressionModule``, ``SelfDistillationModule``, which learns without labels, and two encoders.
* ``evaluation``: retrieval metrics of the whole held-out set, and the module that logs them.
"""
