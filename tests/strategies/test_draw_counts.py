"""Sampled classes and random miners of a resumed run are those that would have come: draws are counted on, not anew."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, DDPLossStrategy, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.lightning_ranks import make_trainer
from tests.strategies.test_resuming import AFTER, Kill, Killed, Line

CLASSES = 12


class Embeds(Line):
    def embed(self, batch: list[Tensor]) -> Tensor:
        return batch[1] * self.layer.weight + self.layer.bias


class Sampling(Embeds):  # classes of which a step samples a half
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        torch.manual_seed(5)
        self.loss = ClassShardedLoss(pml.ArcFaceLoss(CLASSES, 3).double(), sample_rate=0.5)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.loss(self.embed(batch), batch[0] % CLASSES)


class Mining(Embeds):  # pairs of which a miner takes some at random
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.loss = GlobalBatchLoss(pml.ContrastiveLoss())
        self.miner = GlobalBatchMiner(miners.UniformHistogramMiner(num_bins=4, pos_per_bin=2, neg_per_bin=2))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        embeddings, labels = self.embed(batch), batch[0] % 3
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


def weights(kind: type[Line], kill: Any, save: str, load: str | None) -> list[Tensor]:
    torch.manual_seed(17)
    module = kind(dist.get_world_size())
    callbacks = [] if kill is None else [Kill(*kill, save)]
    trainer = make_trainer(DDPLossStrategy(), max_epochs=2, limit_val_batches=0, callbacks=callbacks)
    with contextlib.suppress(Killed):
        trainer.fit(module, ckpt_path=load)
    return [parameter.detach().clone() for parameter in module.parameters()]


def is_undisturbed(kind: type[Line], folder: str) -> list[bool]:
    """Whether runs that are killed after some steps and resumed end with the weights of one that is not, bit for bit."""
    whole = weights(kind, None, "", None)
    found = []
    for steps in (1, 5, 7):
        save = f"{folder}/{steps}.ckpt"
        weights(kind, (AFTER, steps), save, None)
        found.append(all(map(torch.equal, weights(kind, None, "", save), whole)))
    return found


@pytest.mark.parametrize("kind", [Sampling, Mining])
def test_draws_go_on(pool: RankPool, tmp_path: Path, kind: type[Line]) -> None:
    assert pool.run(2, is_undisturbed, kind, str(tmp_path)) == [[True] * 3] * 2
