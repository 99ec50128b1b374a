"""Training over accumulation windows: micro-batches cut for ranks, and one process on all rows of a window, without our code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers, regularizers
from torch import Tensor, nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError

from lightning_ddp_losses import ClassShardedLoss, DDPLossStrategy, GlobalBatchLoss, differentiable, global_mean
from tests.fits import grads_of, listed, make_trainer, trainer_alone

FEATURES, DIM, CLASSES, IGNORED = 5, 4, 5, -100
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Rows and labels: in a world, a rank has ``numbers[world][micro_batch][rank]`` of them in a micro-batch."""

    numbers: Mapping[int, Sequence[Sequence[int]]]
    features: int = 3
    lowest_label: int = 0

    def of(self, micro_batch: int, rank: int, world: int) -> Batch:
        generator = torch.Generator().manual_seed(10 * micro_batch + rank)
        number = self.numbers[world][micro_batch][rank]
        features = torch.randn(number, self.features, generator=generator, dtype=torch.float64)
        return features, torch.randint(self.lowest_label, 3, (number,), generator=generator)

    def own(self, window: Sequence[int] | None = None) -> list[Batch]:
        """This rank's part of each micro-batch of a window, of all by default."""
        rank, world = dist.get_rank(), dist.get_world_size()
        return [self.of(i, rank, world) for i in window or range(len(self.numbers[world]))]

    def whole(self, world: int, window: Sequence[int] | None = None, left_out: Container[Any] = ()) -> Batch:
        """The rows of all ranks in a window, but for some places: a micro-batch and a rank."""
        places = itertools.product(window or range(len(self.numbers[world])), range(world))
        parts = [self.of(*place, world) for place in places if place not in left_out]
        features, labels = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(labels)


class Net(nn.Module):  # an encoder whose seed is the same on every rank
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, DIM)).double()
        self.head = nn.Linear(DIM, CLASSES).double()

    def forward(self, rows: Tensor) -> Tensor:
        embeddings: Tensor = self.layers(rows)
        return embeddings


def micro_batches(count: int, *, without_labels: bool = False) -> list[Batch]:
    """Global micro-batches of different sizes: features [G, F] float64, labels [G], some ignored; of the second all, where asked."""
    generator = torch.Generator().manual_seed(50)
    found = []
    for i in range(count):
        rows = 6 + 3 * (i % 3)
        labels = torch.randint(CLASSES, (rows,), generator=generator)
        ignored = torch.rand(rows, generator=generator) < (1.0 if i == 1 and without_labels else 0.3)
        features = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        found.append((features, torch.where(ignored, IGNORED, labels)))
    return found


def own_rows(rows: int, index: int, world_size: int, rank: int) -> slice:
    """The rows of a global micro-batch that a rank gets: uneven, and none on one rank of the third micro-batch."""
    shares = [(r + index) % world_size + 1 for r in range(world_size)]
    if index == 2 and world_size > 1:
        shares[0] = 0
    ends = [round(rows * sum(shares[: r + 1]) / sum(shares)) for r in range(world_size)]
    return slice(ends[rank - 1] if rank else 0, ends[rank])


@dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        make: Its module on the ranks.
        make_alone: The same in one process; None: as `make`.
        value: Of a rank's rows.
        value_alone: Of all rows of a window, in one process; None: as `value`.
        labelled: Only rows with labels take part.
        expects: This rank's counts over a window, from all its batches, by name.
    """

    make: Callable[[], nn.Module]
    value: Callable[[Any, Tensor, Tensor], Tensor]
    make_alone: Callable[[], nn.Module] | None = None
    value_alone: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    labelled: bool = False
    expects: Callable[[Sequence[Batch]], dict[str, Any]] | None = None


def cross_entropy_of(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = job.loss(job.net.head(job.net(rows)), labels)
    return loss


def _embeddings(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = job.loss(job.net(rows), labels)
    return loss


def _regression(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = job.loss(job.net(rows), rows[:, :DIM].contiguous())
    return loss


def _regression_alone(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    error = job.net(rows) - rows[:, :DIM]
    return error.abs().mean() if isinstance(job.loss, MeanAbsoluteError) else error.square().mean()


def _cross_entropy(**options: Any) -> nn.Module:
    return nn.CrossEntropyLoss(ignore_index=IGNORED, **options)


def _weights() -> Tensor:
    return torch.linspace(0.2, 2.0, CLASSES, dtype=torch.float64)


def _pml(name: str, reducer: Any = None, *, regularized: bool = False) -> nn.Module:
    torch.manual_seed(11)
    options: dict[str, Any] = {"num_classes": CLASSES, "embedding_size": DIM, "reducer": reducer}
    if regularized:
        options |= {"weight_regularizer": regularizers.LpRegularizer(), "weight_reg_weight": 0.3}
    loss: nn.Module = getattr(pml, name)(**options).double()
    return loss


def _tokens(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    """A hand-written mean over the rows that count."""
    counted = labels != IGNORED
    return global_mean(job.net(rows).square().sum(1)[counted].sum(), int(counted.sum()), name="tokens")


def _tokens_alone(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return job.net(rows).square().sum(1)[labels != IGNORED].mean()


def _two_means(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    """Two means whose counts are not in proportion."""
    embeddings, counted = job.net(rows), labels != IGNORED
    every = embeddings.abs().sum()
    some = (embeddings.square().sum(1) * counted).sum()
    means = global_mean(torch.stack([every, some]), torch.tensor([len(rows), int(counted.sum())]), name="pair")
    return means[0] + 0.5 * means[1]


def _two_means_alone(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    embeddings, counted = job.net(rows), labels != IGNORED
    return embeddings.abs().sum() / len(rows) + 0.5 * embeddings.square().sum(1)[counted].mean()


def _pair_counts(batches: Sequence[Batch]) -> dict[str, Any]:
    labels = torch.cat([batch[1] for batch in batches])
    return {"pair": [len(labels), int((labels != IGNORED).sum())]}


def _wrapped(make: Callable[[], nn.Module], value: Callable[[Any, Tensor, Tensor], Tensor]) -> Case:
    """A loss of somebody else's, inside `GlobalBatchLoss` on the ranks."""
    return Case(lambda: GlobalBatchLoss(make()), value, make, labelled=value is _embeddings)


CASES = {
    "cross entropy, ignored": _wrapped(_cross_entropy, cross_entropy_of),
    "cross entropy, weights and smoothing": _wrapped(
        lambda: _cross_entropy(weight=_weights(), label_smoothing=0.1), cross_entropy_of
    ),
    "cross entropy, sum": _wrapped(lambda: _cross_entropy(reduction="sum"), cross_entropy_of),
    "ArcFace": _wrapped(lambda: _pml("ArcFaceLoss"), _embeddings),
    "ArcFace, non-zero, regularised": _wrapped(
        lambda: _pml("ArcFaceLoss", reducers.AvgNonZeroReducer(), regularized=True), _embeddings
    ),
    "CosFace, threshold": _wrapped(lambda: _pml("CosFaceLoss", reducers.ThresholdReducer(low=20.0)), _embeddings),
    "ArcFace, sum, regularised": _wrapped(
        lambda: _pml("ArcFaceLoss", reducers.SumReducer(), regularized=True), _embeddings
    ),
    "ArcFace, nothing passes, regularised": _wrapped(
        lambda: _pml("ArcFaceLoss", reducers.ThresholdReducer(low=1e9), regularized=True), _embeddings
    ),
    "class shards": Case(
        lambda: ClassShardedLoss(_pml("ArcFaceLoss", reducers.AvgNonZeroReducer(), regularized=True)),
        _embeddings,
        lambda: _pml("ArcFaceLoss", reducers.AvgNonZeroReducer(), regularized=True),
        labelled=True,
    ),
    "MeanSquaredError": Case(
        lambda: differentiable(MeanSquaredError()), _regression, MeanSquaredError, _regression_alone
    ),
    "MeanAbsoluteError": Case(
        lambda: differentiable(MeanAbsoluteError()), _regression, MeanAbsoluteError, _regression_alone
    ),
    "global_mean": Case(nn.Identity, _tokens, None, _tokens_alone),
    "global_mean, two divisors": Case(nn.Identity, _two_means, None, _two_means_alone, expects=_pair_counts),
}
# not global by itself: the strategy makes it so
PLAIN = {"ArcFace, plain": Case(lambda: _pml("ArcFaceLoss"), _embeddings, labelled=True)}


class Job(LightningModule):  # a net and a loss; the loader gives a rank's part of each micro-batch
    def __init__(self, case: str, *, alone: bool = False, window: int = 1) -> None:
        super().__init__()
        self.case = (CASES | PLAIN)[case]
        self.net = Net()
        self.net.head.requires_grad_(self.case.value is cross_entropy_of)
        self.loss = (self.case.make_alone or self.case.make)() if alone else self.case.make()
        self.alone, self.size = alone, window
        self.batches: list[Batch] = []
        self.logged: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.whole_state: dict[str, Tensor] = {}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if self.case.expects is not None and not self.alone and index % self.size == 0 and self.size > 1:
            window = self.batches[index : index + self.size]
            self.trainer.strategy.expect_counts(self.case.expects(window))  # type: ignore[attr-defined]
        value = (self.case.value_alone or self.case.value) if self.alone else self.case.value
        loss = value(self, *batch)
        self.logged.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: grad.clone() for name, grad in grads_of(self).items()})

    def on_train_end(self) -> None:
        self.whole_state = dict(self.trainer.strategy.lightning_module_state_dict())

    def found(self) -> dict[str, Any]:
        return {"state": self.whole_state, "gradients": self.gradients, "logged": self.logged}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def rows_of(self, batches: Sequence[Batch]) -> list[Batch]:
        if not self.case.labelled:
            return list(batches)
        return [(x[y != IGNORED], y[y != IGNORED]) for x, y in batches]

    def global_batches(self, count: int, window: int) -> list[Batch]:
        """All micro-batches; one has no row that counts, where a loss can take that and the window has others."""
        return self.rows_of(micro_batches(count, without_labels=window > 1 and not self.case.labelled))


def own_batches(batches: Sequence[Batch]) -> list[Batch]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    cut = [own_rows(len(labels), i, world_size, rank) for i, (_, labels) in enumerate(batches)]
    return [(rows[own], labels[own]) for (rows, labels), own in zip(batches, cut, strict=True)]


def train(
    module: LightningModule, batches: Sequence[Any], strategy: dict[str, Any] | None = None, **options: Any
) -> None:
    """Fit on this rank's batches, in windows unless the strategy's options say otherwise."""
    made = DDPLossStrategy(**{"accumulation": "window", **(strategy or {})})
    make_trainer(made, **options).fit(module, listed(batches))


def sizes_of(windows: int | Sequence[int]) -> list[int]:
    """The sizes of windows, by epoch."""
    return [windows] if isinstance(windows, int) else list(windows)


def fit(
    case: str, windows: int | Sequence[int], count: int, options: dict[str, Any] | None = None, **strategy: Any
) -> dict[str, Any]:
    """Train on this rank's part; returns state, gradients before each step and the values of the micro-batches.

    Args:
        case: Of `CASES`.
        windows: Micro-batches per window; several: one for each epoch.
        count: Micro-batches per epoch.
        options: Of the trainer.
        strategy: Options of the strategy.
    """
    sizes = sizes_of(windows)
    job = Job(case, window=sizes[0])
    job.batches = own_batches(job.global_batches(count, min(sizes)))
    schedule = GradientAccumulationScheduler(dict(enumerate(sizes)))
    options = {"callbacks": [schedule], "max_epochs": len(sizes)} | (options or {})
    train(job, job.batches, strategy, **options)
    return job.found()


def fit_alone(
    case: str, windows: int | Sequence[int], count: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train in one process on all rows of each window at once, with plain Lightning."""
    sizes = sizes_of(windows)
    job = Job(case, alone=True)
    batches = job.global_batches(count, min(sizes))
    for size in sizes:
        for start in range(0, count, size):
            rows, labels = zip(*batches[start : start + size], strict=True)
            job.batches.append((torch.cat(rows), torch.cat(labels)))
    trainer_alone(**(options or {})).fit(job, listed(job.batches))
    return job.found()
