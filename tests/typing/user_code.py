"""What a user writes against the public names: mypy --strict and pyright (`nox -s types`) read it, nothing runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import PearsonCorrCoef

import lightning_ddp_losses as ddl
from lightning_ddp_losses.callbacks import CheckStage, Finding
from lightning_ddp_losses.collectives import all_gather_with_grad


class Embedder(pl.LightningModule):
    """Uses each loss as its documentation says."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.pairs = ddl.GlobalBatchLoss(losses.SupConLoss())
        self.miner = ddl.GlobalBatchMiner(miners.MultiSimilarityMiner())
        self.classes = ddl.ClassShardedLoss(losses.ArcFaceLoss(num_classes=10, embedding_size=4))
        self.towers: tuple[nn.Module, nn.Module] = (ddl.ClipLoss(), ddl.SigLipLoss())
        self.correlation = ddl.differentiable(PearsonCorrCoef())
        self.embed = ddl.microbatched(self.encoder, 16)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, labels = batch
        embeddings: Tensor = self.embed(rows)
        loss: Tensor = self.pairs(embeddings, labels, self.miner(embeddings, labels)) + self.classes(embeddings, labels)
        for tower in self.towers:
            loss = loss + tower(embeddings, embeddings)
        error = (embeddings - embeddings.mean()).square()
        gathered: Tensor = all_gather_with_grad(embeddings)
        return loss + ddl.global_mean(error.sum(), torch.tensor(error.numel())) + gathered.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class EpochCheck(ddl.RankCheck):
    """Compares the epoch that ranks are in."""

    stages = (CheckStage.EPOCH_START,)

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> list[int]:
        return [trainer.current_epoch]

    def judge(
        self, table: Sequence[Sequence[int]], trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> list[Finding]:
        if len({row[0] for row in table}) == 1:
            return []
        return [Finding("F36", "epochs differ", name="epoch")]


def loader() -> DataLoader[tuple[Tensor, ...]]:
    data = TensorDataset(torch.randn(64, 8), torch.arange(64) % 10)
    return DataLoader(data, batch_sampler=ddl.GlobalBatchSampler.batches(range(64), 16, drop_last=True))


def trainer() -> pl.Trainer:
    checks = ddl.DDPChecks([EpochCheck(), ddl.LossCheck(bias=1.2)])
    strategy = ddl.DDPLossStrategy(accumulation="window")
    return pl.Trainer(devices=2, strategy=strategy, callbacks=[checks], plugins=[ddl.SyncBatchNorm()])


def main() -> None:
    try:
        fit = trainer()
        fit.fit(Embedder(), loader())
    except ddl.DDPLossError as error:
        print(error)
    report: ddl.AuditReport = ddl.audit(Embedder(), train_dataloaders=loader(), devices=2)
    equal: bool = report.equal
    options: dict[str, Any] = {"devices": 2}
    print(equal, options)
