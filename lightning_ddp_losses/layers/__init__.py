"""Layers whose result depends on the other rows of a batch, computed over the rows of all ranks."""

from lightning_ddp_losses.layers.sync_batch_norm import SyncBatchNorm, batch_norms

__all__ = ["SyncBatchNorm", "batch_norms"]
