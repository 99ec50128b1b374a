"""`GlobalBatchMiner`: a miner over the rows of all ranks, whose tuples feed `GlobalBatchLoss`."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.miners import BaseMiner
from torch import nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.configuration import digest
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.gathered_call import PML_NAMES, GlobalTuples, PMLCall, by_name
from lightning_ddp_losses.losses.randomness import Draws, same_draws


class GlobalBatchMiner(WithProcessGroup, nn.Module):
    """A pytorch-metric-learning miner over the global batch.

    Equivalent to: ``miner(torch.cat(embeddings of all ranks), torch.cat(labels of all ranks))`` in one process.

    Args:
        miner: Any miner of pytorch-metric-learning. A random one draws the same tuples on all ranks.
        group: Process group; None is the world.

    Returns:
        From ``forward``: tuples of global row numbers, equal on every rank, for ``GlobalBatchLoss(..., indices_tuple=...)``.

    Communication: one frame, and one gather of rows that are too many for it (``frames.room``); none in backward.

    Example:
        >>> import torch
        >>> from pytorch_metric_learning.miners import MultiSimilarityMiner
        >>> miner = GlobalBatchMiner(MultiSimilarityMiner())
        >>> tuples = miner(torch.randn(4, 8), torch.tensor([0, 0, 1, 1]))
    """

    sees_global_batch = True

    def __init__(self, miner: nn.Module, *, group: Group = None) -> None:
        super().__init__()
        if not isinstance(miner, BaseMiner):
            raise ConfigurationError(
                "GlobalBatchMiner: miner", expected="a miner of pytorch-metric-learning", got=repr(miner)
            )
        self.miner = miner
        self._group = group
        self._draws = Draws()
        self._fingerprint = ""

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> GlobalTuples:
        """Mine the global batch: embeddings (B, D), labels (B,), ref_emb, ref_labels."""
        return autograd_graph.run_full_precision(self, self._forward, args, kwargs)  # type: ignore[no-any-return]

    def _forward(self, *args: Any, **kwargs: Any) -> GlobalTuples:
        names = [name for name in PML_NAMES if name not in ("indices_tuple", "enqueue_mask")]
        title = f"GlobalBatchMiner({type(self.miner).__name__})"
        self._fingerprint = self._fingerprint or digest(self.miner)
        try:
            call = PMLCall(
                self.miner,
                by_name(title, names, args, kwargs),
                lambda batches: gather_batch(
                    title, batches, {"configuration": self._fingerprint}, extra=self._draws.next(), group=self._group
                ),
                process_groups.rank(self._group),
            )
            with same_draws(self.miner, call.seed, call.arguments.values()):
                return GlobalTuples.of(self.miner(**call.arguments), call.total_rows)
        except Exception as error:  # what all ranks raise alike passes through
            handshake.raise_on_all_ranks(error, title, group=self._group)
