"""Layers whose result depends on the other rows of a batch, computed over the rows of all ranks.

* ``sync_batch_norm``: the plugin ``SyncBatchNorm``, what it puts into each layer's place, and what ranks compare before backward.
* ``batch_norm_function``: statistics of all ranks' rows, and the autograd function that normalises with them.

A new layer of this kind is one autograd function in a file of its own, and a ``ForwardPatch`` that calls it.
"""

from lightning_ddp_losses.layers.sync_batch_norm import SyncBatchNorm, batch_norms

__all__ = ["SyncBatchNorm", "batch_norms"]
