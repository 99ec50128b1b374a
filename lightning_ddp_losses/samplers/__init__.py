"""Samplers that deal one process's batches to W ranks."""

from lightning_ddp_losses.samplers.global_batch import GlobalBatchSampler

__all__ = ["GlobalBatchSampler"]
