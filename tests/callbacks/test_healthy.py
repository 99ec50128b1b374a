"""What differs for good reason finds nothing: accumulation, clipping, half precision, copies, several optimizers, uneven rows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.callbacks import scale
from tests.callbacks.flow import ZeroStart
from tests.callbacks.harness import CLASSES, WIDTH, Case, Outcome, Subject, run_all
from tests.callbacks.optimizers import Half, scaler
from tests.callbacks.test_cases import assert_silent
from tests.rank_pool import RankPool


class Uneven(Subject):
    """Ranks with different numbers of rows, each of which weighs the same."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        mean_rows = 2 + 3 * (dist.get_world_size() - 1) / 2
        return nn.functional.cross_entropy(self.head(self.encoder(features)), labels, reduction="sum") / mean_rows

    def train_dataloader(self) -> Any:
        rows = 2 + 3 * dist.get_rank()
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [
            (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), torch.arange(rows) % CLASSES)
            for _ in range(5)
        ]
        return DataLoader(batches, batch_size=None)


class Frozen(Subject):
    def build(self) -> None:
        self.encoder.requires_grad_(False)


class Ema(Subject):
    """A trainable copy that nobody optimises, and a frozen average."""

    def build(self) -> None:
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        self.spare = copy.deepcopy(self.head)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                a.lerp_(p, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class Adversaries(Subject):
    """Two optimizers in turn, manual, with toggles; one of them every second batch."""

    def __init__(self, sick: bool) -> None:
        super().__init__(sick)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        first, second = self.optimizers()
        for number, optimizer in enumerate((first, second)):
            if number and index % 2:
                continue
            self.toggle_optimizer(optimizer)
            loss = self.objective(*batch, index) * (1 - 2 * number)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.encoder, self.head)]


class InTurn(Subject):
    """Two losses that alternate."""

    def build(self) -> None:
        torch.manual_seed(0)
        self.losses = nn.ModuleList(pml.ArcFaceLoss(CLASSES, WIDTH).double() for _ in range(2))
        del self.head

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.losses[index % 2](self.encoder(features), labels)


class Scheduled(Subject):
    """A warm-up from zero, two epochs with validation, a plateau on a synchronised value."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        return [optimizer], [{"scheduler": warm, "interval": "step"}]

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.objective(*batch, index), sync_dist=True)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Overflows(Half):
    """Gradients that overflow on every rank at once: the scaler skips the step everywhere."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) * (1e38 if index == 1 else 1.0)


class Lbfgs(Subject):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnReduction(Subject):
    """A parameter that DDP is told to ignore and that the user averages in his own hook, before the optimizer."""

    def build(self) -> None:
        self.own = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features * self.own, labels, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        dist.all_reduce(self.own.grad)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(use_buffers=False)


def averages(sick: bool) -> list[Average]:
    return [Average()]


def static() -> DDPStrategy:
    return DDPStrategy(static_graph=True)


def views() -> DDPStrategy:
    return DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=True)


UNUSED = "ddp_find_unused_parameters_true"
CLIP = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
FP16 = {"plugins": scaler}
TWO = {"max_epochs": 2}

CASES = [
    *(Case(each, "", "", strategy=s) for each in (Subject, Uneven, ZeroStart) for s in ("ddp", "ddp_losses")),
    *(Case(each, "", "") for each in scale.HEALTHY),
    *(
        Case(Subject, "", "", options=o, strategy=s)
        for o in (CLIP, {"precision": "bf16-true"}, TWO)
        for s in ("ddp", "ddp_losses")
    ),
    Case(Half, "", "", options={"precision": "bf16-mixed"}),
    Case(Half, "", "", options=FP16),
    Case(Overflows, "", "", options=FP16),
    Case(Frozen, "", ""),
    Case(Frozen, "", "", strategy="ddp_losses"),
    Case(Ema, "", "", strategy=UNUSED),
    Case(Adversaries, "", "", strategy=UNUSED),
    Case(Adversaries, "", "", strategy=views),
    Case(InTurn, "", "", strategy="ddp_losses"),
    Case(InTurn, "", "", strategy=UNUSED),
    Case(Scheduled, "", "", options=TWO),
    Case(Scheduled, "", "", options=TWO, strategy="ddp_losses"),
    Case(Lbfgs, "", ""),
    Case(OwnReduction, "", ""),
    Case(Subject, "", "", strategy=static),
    Case(Subject, "", "", options={"callbacks": averages}),
]
IDS = [
    f"{i}-{case.subject.__name__}-{getattr(case.strategy, '__name__', case.strategy)}" for i, case in enumerate(CASES)
]


# all cases on three ranks; of two neighbours, which differ in the strategy often, every second pair on two ranks and the others on one
TRIED = {
    3: list(range(len(CASES))),
    2: [index for index in range(len(CASES)) if index // 2 % 2 == 0],
    1: [index for index in range(len(CASES)) if index // 2 % 2 == 1],
}


@pytest.fixture(scope="module")
def outcomes(pool: RankPool) -> dict[tuple[int, int], list[Outcome]]:
    """By world size and case, the outcome of each rank."""
    found = {}
    for world_size, indices in TRIED.items():
        per_rank = pool.run(world_size, run_all, [CASES[i] for i in indices], False, seconds=600.0)
        for index, outcomes in zip(indices, zip(*per_rank, strict=True), strict=True):
            found[world_size, index] = list(outcomes)
    return found


@pytest.mark.parametrize(
    ("world_size", "index"),
    [pytest.param(W, index, id=f"{IDS[index]}-{W}") for W, indices in TRIED.items() for index in indices],
)
def test_healthy_runs_are_silent(outcomes: dict[tuple[int, int], list[Outcome]], world_size: int, index: int) -> None:
    assert_silent(CASES[index], outcomes[world_size, index])
