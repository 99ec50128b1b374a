"""Layers that depend on the other rows of a batch, computed over the rows of all ranks.

* ``sync_batch_norm``: the plugin ``SyncBatchNorm``, the forward that it installs in each layer, and the comparison before backward.
* ``batch_norm_function``: statistics of all ranks' rows, and the autograd function that normalises with them.
* ``forward_plan``: one handshake for all batch norms of a forward on accelerators.

Compared to torch's own ``SyncBatchNorm`` (2.13, measured 2026):

| situation | torch's | this one |
|---|---|---|
| CPU | ``ValueError`` in the first step | exact |
| a rank without rows under mixed precision | statistics of two dtypes in one gather | exact |
| ranks that disagree on channels, dtype or number of calls, or of which one skips a layer | hang or abort | the same error on all ranks |
| one value per channel over all ranks | silently trained on | the error of one process, on all ranks |
| converted twice, or after the wrap | converted again | error by name |
| a batch norm in a list | missed | error by name |
| a subclass of ``BatchNorm2d`` with more operations in ``forward`` | replaced, without these operations | works, or error by name |

A batch norm inside ``GlobalBatchLoss`` is already computed on all rows and is not changed.

A new layer of this kind is one autograd function in a separate file, and a ``MethodPatch`` that calls it.
"""

from lightning_ddp_losses.layers.sync_batch_norm import SyncBatchNorm, batch_norms

__all__ = ["SyncBatchNorm", "batch_norms"]
