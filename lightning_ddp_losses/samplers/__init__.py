"""Samplers that cut one process's batches over W ranks, and what puts ranks' rows back into one order.

* ``global_batch``: ``GlobalBatchSampler``, in the two forms that Lightning leaves alone
* ``seeded_draw``: the draw of an epoch, equal on all ranks, and what a sampler can be built from
* ``shuffled_order``: a random order that is computed row by row, and its draw
* ``epoch_place``: where an epoch goes on that was left in the middle, and what a saved place is compared with
* ``evaluation``: each row of an evaluation on one rank, and as many batches on every rank
* ``predictions``: ``gather_predictions``, the way back: rows of all ranks in the order of the data set
"""

from lightning_ddp_losses.samplers.global_batch import GlobalBatchSampler
from lightning_ddp_losses.samplers.predictions import gather_predictions

__all__ = ["GlobalBatchSampler", "gather_predictions"]
