"""Metrics over all ranks that can be trained on, and the derivation of their gradient.

Legend: ``W`` ranks, s_r the state of rank r. A metric is L = f(s_0 + ... + s_{W-1}) (or with min, max, or the concatenated rows
...). After the states were exchanged, every rank computes the same L from the same bytes. In its backward, rank r propagates
W * dL/ds_r through its own state. The states of its peers are constants on this rank. DDP's mean over ranks,
(1/W) * sum_r W * dL/ds_r * ds_r/dtheta, is then the gradient of one process. This holds if the same factor is propagated
back into L on every rank.

* ``metric``: ``DifferentiableMetric`` and its forward, individually or with other metrics in one exchange.
* ``states``: the handling of a metric's states, and the table of metrics that need the rows of all ranks.
* ``exchange``: the states of all ranks in one exchange: packets, and plans that are computed once for them.
* ``buffer_plan``: the position of each rank's tensors in one buffer, and ranks that hold different states.
* ``composites``: compositions, wrappers and collections.
* ``conversion``: ``differentiable`` and ``synced``, the metrics that the latter returns, and the table of metrics without a gradient.
* ``retrieval``: ``EmbeddingRetrieval``, which is not differentiable, and whose rows stay on their ranks. ``retrieval_value`` has the
  search, ``nearest`` the nearest rows, ``retrieval_rows`` the plan of the rows of all ranks, ``retrieval_measures`` the definitions.

A metric of torchmetrics that depends on the whole batch gets a line in ``states._WHOLE_BATCH``, a metric without gradient a line in
``conversion.WITHOUT_GRADIENT``, and a wrapper a class and a line in ``composites``. Each gets a row in ``tests/metrics/cases.py``.
"""

from lightning_ddp_losses.metrics.conversion import differentiable, synced
from lightning_ddp_losses.metrics.metric import DifferentiableMetric
from lightning_ddp_losses.metrics.retrieval import EmbeddingRetrieval

__all__ = ["DifferentiableMetric", "EmbeddingRetrieval", "differentiable", "synced"]
