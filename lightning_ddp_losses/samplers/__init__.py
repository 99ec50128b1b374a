"""Samplers that cut one process's batches over W ranks.

* ``global_batch``: ``GlobalBatchSampler``, in the two forms that Lightning leaves alone
* ``seeded_draw``: the draw of an epoch, equal on all ranks, and what a sampler can be built from
"""

from lightning_ddp_losses.samplers.global_batch import GlobalBatchSampler

__all__ = ["GlobalBatchSampler"]
