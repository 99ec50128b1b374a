"""A sabotaged run and its healthy twin: one small module each, many of them in one task of the rank pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPChecks, GlobalBatchLoss, RankCheck
from tests.fits import make_trainer

ROWS, WIDTH, CLASSES, BATCHES = 4, 4, 3, 4


def drawn(rows: int, batches: int = BATCHES) -> DataLoader:
    """Return batches of so many rows, drawn by each rank for itself."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    made = []
    for _ in range(batches):
        features = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        made.append((features, torch.randint(CLASSES, (rows,), generator=generator)))
    return DataLoader(made, batch_size=None)


def slices(world_size: int, rank: int) -> DataLoader:
    """This rank's rows of each global batch."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for _ in range(BATCHES):
        features = torch.randn(ROWS * world_size, WIDTH, generator=generator, dtype=torch.float64)
        labels = torch.arange(ROWS * world_size) % CLASSES
        batches.append((features[rank::world_size], labels[rank::world_size]))
    return DataLoader(batches, batch_size=None)


class Subject(LightningModule):
    """An encoder and a head. A case overrides what it breaks, and breaks it only where ``self.sick``."""

    by_hand = False

    def __init__(self, sick: bool) -> None:
        super().__init__()
        self.sick = sick
        self.automatic_optimization = not self.by_hand
        torch.manual_seed(3)
        self.encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
        self.build()

    def build(self) -> None:
        """More modules."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.encoder(features)), labels)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        return self.objective(*batch, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return slices(dist.get_world_size(), dist.get_rank())

    @property
    def odd(self) -> bool:
        """Whether this rank is the one to break: the last."""
        return self.sick and dist.get_rank() == dist.get_world_size() - 1


class OneLoss(Subject):  # a loss of its own on what the head says: over all ranks, unless it builds another one
    def build(self) -> None:
        self.loss: nn.Module = GlobalBatchLoss(nn.CrossEntropyLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.head(self.encoder(features)), labels)


class Validated(Subject):  # validates on its training data
    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.objective(*batch, index)


class SparseTable(Subject):  # with an embedding whose gradient is sparse
    def build(self) -> None:
        self.table = nn.Embedding(CLASSES, WIDTH, sparse=True, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features + self.table(labels), labels, index)


class ComplexFilter(Subject):  # with a complex parameter
    dtype_of_filter = torch.complex128

    def build(self) -> None:
        self.filter = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=self.dtype_of_filter))

    def filtered(self, features: Tensor) -> Tensor:
        return features.to(self.filter.dtype) @ self.filter

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        filtered = self.filtered(features)
        return super().objective((filtered.abs() + filtered.imag).to(features), labels, index)


class Recorder(Logger):
    """A logger of a service, as Weights & Biases and MLflow have it: one folder for all runs. Keeps by step what it is sent."""

    name = "project"

    def __init__(self, folder: str | None = None, run: str = "first") -> None:
        super().__init__()
        self.folder, self.run = folder, run
        self.sent: dict[int, dict[str, float]] = {}

    @property
    def save_dir(self) -> str | None:
        return self.folder

    @property
    def version(self) -> str:
        return self.run

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.sent.setdefault(-1 if step is None else step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


@dataclass(frozen=True)
class Case:
    """A module that can be sick, and what must be said of it then.

    Attributes:
        subject: Called with ``sick``.
        fault: Id that a finding must have.
        check: Class of the check that must report it.
        name: Part of the finding's name or text.
        step: Step of the finding.
        ranks: Its ranks at W = 2; None: whatever.
        strategy: Of the trainer, or what makes it.
        options: Further options of the trainer; values that are callable are called with ``sick``.
        checks: Makes the checks; None: all with their defaults.
    """

    subject: Callable[[bool], LightningModule]
    fault: str
    check: str
    name: str = ""
    step: int = 0
    ranks: tuple[int, ...] | None = (1,)
    strategy: Any = "ddp"
    options: dict[str, Any] = field(default_factory=dict)
    checks: Callable[[], DDPChecks] | None = None

    @property
    def title(self) -> str:
        return f"{self.fault}-{getattr(self.subject, '__name__', 'subject')}-{getattr(self.strategy, '__name__', self.strategy)}"


@dataclass(frozen=True)
class Outcome:  # what one rank saw of one run
    error: str
    text: str
    findings: list[dict[str, Any]]


def default_checks() -> DDPChecks:
    return DDPChecks(action={"warning": "log"}, summary=False, file=False)


def run(case: Case, sick: bool) -> Outcome:
    """Train once on every rank of the pool."""
    checks = (case.checks or default_checks)()
    made = {k: v(sick) if callable(v) else v for k, v in case.options.items()}
    callbacks = [*made.pop("callbacks", []), checks]
    strategy = case.strategy if isinstance(case.strategy, str) else case.strategy()
    trainer = make_trainer(strategy, callbacks=callbacks, **made)
    error = text = ""
    findings: Sequence[Any] = ()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*find_unused_parameters.*")
        # Lightning's hint comes on rank 0 alone; as an error it would leave the others waiting
        warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")
        warnings.filterwarnings("ignore", ".*an autograd kernel was not registered.*")
        try:
            trainer.fit(case.subject(sick))
        except Exception as caught:
            error, text, findings = type(caught).__name__, str(caught), getattr(caught, "findings", ())
    return Outcome(error, text, [f.record() for f in [*findings, *checks.findings]])


def fit(
    checks: RankCheck | Sequence[RankCheck] | None = None, subject: Any = None, strategy: str = "ddp", **options: Any
) -> DDPChecks:
    """Train a module, or a sick one of a class, with checks, all of them by default; options of ``DDPChecks`` or of the trainer."""
    if isinstance(checks, RankCheck):
        checks = [checks]
    own = {name: options.pop(name) for name in ("action", "file", "log_figures", "stall_seconds") if name in options}
    callback = DDPChecks(checks, summary=options.pop("summary", False), **own)
    callbacks = [*options.pop("callbacks", []), callback]
    subject = Subject(False) if subject is None else subject
    make_trainer(strategy, callbacks=callbacks, **options).fit(subject(True) if isinstance(subject, type) else subject)
    return callback


def run_all(cases: Sequence[Case], sick: bool) -> list[Outcome]:
    """One after the other; the pool's group lives on."""
    return [run(case, sick) for case in cases]
