"""Losses over the global batch, and the one statement of their gradient.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` = sum of B. DDP divides the sum of the ranks' gradients by W. Three exact
ways to evaluate a global loss L = S / N:

| mode | each rank computes | gather's backward | backward communication | exact for |
|---|---|---|---|---|
| ``replicated`` | the whole L on all G rows | own slice times W | none | every loss that is deterministic given its inputs |
| ``rows`` | S_r: elements whose anchor is on this rank, against all G rows | sum over ranks | 1 | sums over anchors |
| ``rows``, symmetric tiles | S_r, and later all that its own rows take part in | never asked | none | four losses (``tiled``) |
| ``elements`` | S_r: elements of its own rows | nothing is gathered | none | sums over samples |

Beside them: ``ClassShardedLoss``, whose class weight is divided over the ranks (``class_softmax``: statistics over each rank's classes
make every row's loss known to all), and two-tower losses in tiles (``two_towers``).

What is said to cost a frame and a gather costs the frame alone where the rows are few (``handshake.inline_capacity``, on the CPU): from the
second call on they travel in it.

In ``rows`` and ``elements`` each rank back-propagates ``W * S_r / N`` and reports ``L`` (``reduction``); symmetric tiles give its rows W
times their gradient of the whole ``L``, from one statistic per row of every rank. A ``replicated`` loss needs no
factor for its own parameters: every rank holds the full gradient and DDP's mean leaves it alone.
"""

from lightning_ddp_losses.losses.class_sharded import ClassShardedLoss
from lightning_ddp_losses.losses.clip import ClipLoss
from lightning_ddp_losses.losses.global_batch import GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.losses.pml_registry import register_element_wise, register_row_separable
from lightning_ddp_losses.losses.separable import check_separable
from lightning_ddp_losses.losses.siglip import SigLipLoss

__all__ = [
    "ClassShardedLoss",
    "ClipLoss",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "SigLipLoss",
    "check_separable",
    "register_element_wise",
    "register_row_separable",
]
