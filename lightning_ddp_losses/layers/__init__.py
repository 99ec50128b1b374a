"""Layers whose result depends on the other rows of a batch, computed over the rows of all ranks.

* ``sync_batch_norm``: the plugin ``SyncBatchNorm``, what it puts into each layer's place, and what ranks compare before backward.
* ``batch_norm_function``: statistics of all ranks' rows, and the autograd function that normalises with them.

Beside torch's own ``SyncBatchNorm`` (2.13, measured 2026):

| situation | torch's | this one |
|---|---|---|
| CPU | ``ValueError`` in the first step | exact |
| a rank with no rows under mixed precision | statistics of two dtypes in one gather | exact |
| ranks that disagree on channels, dtype, number of calls; a layer that one rank leaves out | hang or abort | the same error on all ranks |
| one value per channel over all ranks | trained on without a word | the error of one process, on all ranks |
| converted twice, or after the wrap; a batch norm in a list | converted anyway; missed | error by name |
| a subclass of ``BatchNorm2d`` that does more in ``forward`` | replaced, and the more is lost | works, or error by name |

A batch norm inside ``GlobalBatchLoss`` sees all rows already and stays as it is.

A new layer of this kind is one autograd function in a file of its own, and a ``ForwardPatch`` that calls it.
"""

from lightning_ddp_losses.layers.sync_batch_norm import SyncBatchNorm, batch_norms

__all__ = ["SyncBatchNorm", "batch_norms"]
