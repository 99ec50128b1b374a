"""Every check over parameters and buffers of every kind: a healthy fit is as without checks, a sick one is reported by name."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import CLASSES, WIDTH, ComplexFilter, SparseTable, Validated
from tests.doors import DEFAULT_CHECKS
from tests.fits import make_trainer


class Kind(Validated):
    """Saves a checkpoint behind each epoch, so that every stage of a fit comes. A sick one moves `odd_one` on the last rank."""

    odd_one = "head.weight"

    def on_train_epoch_end(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_checkpoint(f"{folder}/last.ckpt")

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 2:
            with torch.no_grad():
                self.get_parameter(self.odd_one).data[-1] += 0.5


def every_subclass(kind: type[Kind]) -> list[type[Kind]]:
    found = []
    for each in kind.__subclasses__():
        found += [each, *every_subclass(each)]
    return found


class SparseGradient(SparseTable, Kind):  # the gradient is a sparse tensor
    odd_one = "table.weight"


class SparseBag(SparseGradient):  # a sparse gradient of a bag, and another optimizer for it
    def build(self) -> None:
        self.table = nn.EmbeddingBag(CLASSES, WIDTH, sparse=True, dtype=torch.float64)  # type: ignore[assignment]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super(SparseTable, self).objective(features + self.table(labels[:, None]), labels, index)


class Complex(ComplexFilter, Kind):
    odd_one = "filter"


class ComplexHalf(Complex):  # half the precision, and a conjugated view in the graph
    dtype_of_filter = torch.complex64

    def filtered(self, features: Tensor) -> Tensor:
        return features.to(self.filter.dtype) @ self.filter.mH

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        filtered = self.filtered(features)
        return super(ComplexFilter, self).objective(filtered.real.double() + filtered.imag.double(), labels, index)


class ComplexBuffer(Kind):
    def build(self) -> None:
        self.register_buffer("carrier", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float()))
        self.register_buffer("queue", torch.randn(4, WIDTH, dtype=torch.complex64))
        self.register_buffer("conjugated", self.carrier.conj())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective((features * self.carrier).real.double(), labels, index)


class Quantised(Kind):
    """A quantised queue that a loss makes once DDP is built (it cannot broadcast one), and frozen parameters of small dtypes."""

    def build(self) -> None:
        self.codes = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
        self.small = nn.Parameter(torch.randn(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.words = nn.Parameter(torch.arange(WIDTH).to(torch.uint16), requires_grad=False)
        self._ddp_params_and_buffers_to_ignore = ["small", "words"]
        self.memory = MemoryLoss()

    def on_train_start(self) -> None:
        scales, zeros = torch.full((WIDTH,), 0.1), torch.zeros(WIDTH).long()
        torch.manual_seed(0)
        queue = torch.quantize_per_tensor(torch.randn(4, WIDTH), 0.1, 0, torch.qint8)
        channels = torch.quantize_per_channel(torch.randn(WIDTH, WIDTH), scales, zeros, 0, torch.qint8)
        self.memory.register_buffer("queue", queue)
        self.memory.register_buffer("channels", channels)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        shift = self.memory.queue.dequantize()[0].double() + self.codes.double() + self.small.double()
        return super().objective(features + shift, labels, index)


class MemoryLoss(nn.Module):
    """Its buffers are compared, by the name of its class."""


class QuantisedParameter(Kind):  # a frozen parameter that is quantised itself
    def build(self) -> None:
        codes = torch.quantize_per_tensor(torch.randn(WIDTH), 0.1, 0, torch.quint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self._ddp_params_and_buffers_to_ignore = ["codes"]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features + self.codes.dequantize().double(), labels, index)


class Lazy(Kind):  # a layer that nobody has called yet, and that DDP leaves alone (it refuses one)
    def build(self) -> None:
        self.later = nn.LazyLinear(CLASSES)
        self.norm = nn.LazyBatchNorm1d()
        names = [f"later.{name}" for name, _ in self.later.named_parameters()]
        names += [f"norm.{name}" for name, _ in self.norm.named_parameters()]
        names += [f"norm.{name}" for name, _ in self.norm.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = names

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class LazyInOptimizer(Lazy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Parametrised(Kind):
    odd_one = "head.parametrizations.weight.original1"

    def build(self) -> None:
        self.head = parametrizations.weight_norm(self.head)
        self.encoder = parametrizations.spectral_norm(self.encoder)


class Orthogonal(Kind):
    odd_one = "encoder.parametrizations.weight.original"

    def build(self) -> None:
        self.encoder = parametrizations.orthogonal(self.encoder)


class Tied(Kind):  # one weight under two names, and one module under two
    odd_one = "encoder.weight"

    def build(self) -> None:
        self.mirror = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.mirror.weight = self.encoder.weight
        self.again = self.head

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.mirror(features), labels, index)


class Odd(Kind):  # empty, 0-dim and transposed parameters, and an expanded buffer
    odd_one = "turned"

    def build(self) -> None:
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.turned = nn.Parameter(torch.eye(WIDTH, dtype=torch.float64).t() + 0.5)
        self.register_buffer("wide", torch.ones(1, dtype=torch.float64).expand(WIDTH))
        self._ddp_params_and_buffers_to_ignore = ["wide"]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        moved = features @ self.turned * self.number + self.wide
        return super().objective(moved, labels, index) + self.nothing.sum()


class OwnTensor(Tensor):
    """What a library derives from torch's tensor."""


class OwnClass(Kind):
    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64).as_subclass(OwnTensor))  # type: ignore[type-var]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective((features * self.scale).as_subclass(Tensor), labels, index)


class SparseBuffer(Kind):
    """Sparse matrices as buffers of a loss, as graphs have them, that come once DDP is built (it cannot broadcast one)."""

    def build(self) -> None:
        self.memory = MemoryLoss()

    def on_train_start(self) -> None:
        eye = torch.eye(WIDTH, dtype=torch.float64)
        self.memory.register_buffer("adjacency", eye.to_sparse(), persistent=False)
        self.memory.register_buffer("memory_rows", eye.to_sparse_csr(), persistent=False)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective((self.memory.adjacency @ features.t()).t(), labels, index)


class LazyBuffer(Kind):  # a buffer of a loss that nobody has initialised yet
    def build(self) -> None:
        self.memory = MemoryLoss()

    def on_train_start(self) -> None:
        self.memory.register_buffer("queue", nn.UninitializedBuffer(), persistent=False)


class Negated(Kind):
    """Views that torch only marks as negated or conjugated: in a buffer of a loss, in the batch, in gradients."""

    def build(self) -> None:
        self.memory = MemoryLoss()
        self.shift = nn.Parameter(torch.zeros(WIDTH, dtype=torch.complex128))

    def on_train_start(self) -> None:
        torch.manual_seed(0)
        self.memory.register_buffer("queue", torch.randn(4, WIDTH, dtype=torch.complex128).conj().imag)
        self.memory.register_buffer("mirrored", torch.randn(4, dtype=torch.complex128).conj())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        moved = features + self.shift.conj().imag + self.shift.conj().real
        return super().objective(moved, labels, index)

    def train_dataloader(self) -> Any:
        batches = [(torch.complex(x, -x).conj().imag, labels) for x, labels in super().train_dataloader().dataset]
        return DataLoader(batches, batch_size=None)


KINDS = {kind.__name__: kind for kind in every_subclass(Kind)}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of one fit.

    Attributes:
        error: Type and text of what ended it.
        findings: Of the checks, as records, without notes.
        trained: The parameters afterwards.
    """

    error: str
    findings: list[dict[str, Any]]
    trained: dict[str, list[float]]


def every_check() -> list[Callback]:
    """All checks, each at every step and over everything."""
    options: dict[str, Any] = {name: {"full_every_n_steps": 1} for name in ("GradientFlowCheck", "ParameterSyncCheck")}
    options["CommunicationMonitor"] = {"every_n_steps": 1}
    checks = [check(**options.get(check.__name__, {})) for check in DEFAULT_CHECKS]
    return [DDPChecks(checks, action={"warning": "log"}, summary=False, file=False)]


def fit_kind(name: str, strategy: str, make: Callable[[], list[Callback]], sick: bool = False) -> Outcome:
    """Train one kind on every rank."""
    callbacks = make()
    error = ""
    with warnings.catch_warnings():
        # quantised and sparse tensors, lazy layers: torch has a word on each
        warnings.simplefilter("ignore")
        subject = KINDS[name](sick)
        try:
            make_trainer(strategy, callbacks=callbacks).fit(subject)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    found = [finding.record() for callback in callbacks for finding in getattr(callback, "findings", [])]
    trained: dict[str, list[float]] = {}
    for parameter_name, parameter in subject.named_parameters():
        if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
            values = parameter.detach()
            if values.is_complex():
                values = torch.view_as_real(values)
            trained[parameter_name] = values.double().flatten().tolist()
    return Outcome(error, [each for each in found if each["severity"] != "note"], trained)


WITH_A_SICK_TWIN = ["SparseGradient", "Complex", "ComplexHalf", "Parametrised", "Orthogonal", "Tied", "Odd"]
UNDER_PLAIN_DDP = ["SparseGradient", "Complex", "Quantised", "Lazy", "Tied"]
ALONE = ["SparseGradient", "Tied"]
RUNS = [(name, 2, "ddp_losses") for name in KINDS]
RUNS += [(name, 2, "ddp") for name in UNDER_PLAIN_DDP]
RUNS += [(name, 1, "ddp") for name in ALONE]


@pytest.mark.parametrize(("name", "world_size", "strategy"), RUNS)
def test_a_healthy_fit_is_as_without_checks(pool: RankPool, name: str, world_size: int, strategy: str) -> None:
    without = pool.run(world_size, fit_kind, name, strategy, list)
    assert not without[0].error, "the fit is healthy without checks"
    checked = pool.run(world_size, fit_kind, name, strategy, every_check)
    for plain, watched in zip(without, checked, strict=True):
        assert not watched.error
        assert watched.findings == []
        assert watched.trained == plain.trained


@pytest.mark.parametrize("name", WITH_A_SICK_TWIN)
def test_a_rank_that_goes_apart_is_reported_by_name(pool: RankPool, name: str) -> None:
    outcomes = pool.run(2, fit_kind, name, "ddp", every_check, True)
    assert len({outcome.error for outcome in outcomes}) == 1
    found = [each for each in outcomes[0].findings if KINDS[name].odd_one in each["name"]]
    assert found, outcomes[0]
    assert found[0]["check"] == "ParameterSyncCheck"
    assert tuple(found[0]["ranks"]) == (1,)
