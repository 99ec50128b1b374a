"""The fix that a fault's page advises is made: the weights after it are those of one process, and before it they are not.

| faults | where their fix is run |
|---|---|
| F20 to F23, F26 to F30, F37, F59 | here |
| F01, F02, F04 to F06, F08 to F10, F12, F13, F17, F32, F35, F36, F41 | `test_advised_fixes_of_training.py` |
| F49, F67 to F71, F79, F81, F84 | `test_advised_fixes_of_training.py` |
| F83, F85 | `tests/strategies/test_resuming.py`: runs killed after any step, with both advised samplers |
| F38, F64 | `tests/callbacks/test_absent_gradients.py`, `tests/callbacks/data_cases.py` |
| F46, F53, F55, F56 | `tests/callbacks/test_advice.py` |
| F51, F54 | `tests/metrics/test_synced.py`, `tests/strategies/test_evaluation.py` |
| other errors that have a case | the healthy twins of `tests/callbacks/test_cases.py`, whose value is not compared |
| F31, F33 | `tests/samplers/test_global_batch.py`, `tests/test_microbatch.py` |
| F60, F61 | `tests/layers/test_lightning.py` |
| F82 | `tests/strategies/test_logged_means.py` |
| F14, F15 | `tests/strategies/test_overflow.py` |
| F16 | `tests/strategies/test_shards.py` |
| F52 | `tests/metrics/test_parity.py` |
| F65 | `tests/losses/test_memory.py` |
| F72 | `tests/randomness`, `tests/cli/test_augmentation_recipe.py` |
| F75, F77 | `tests/strategies/test_checkpoints.py` |
| F76 | `tests/strategies/test_resuming.py` |
| F50, F62, F78, F80 | need a device, or compiled code |
| F42, F43, F44, F57, F73 | advise to look at a machine, not a change of code |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_ddp_losses import GlobalBatchLoss, SyncBatchNorm, differentiable, global_mean
from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.testing import RankPool
from tests.fits import listed, make_trainer

EVEN, UNEVEN = (4, 4), (3, 5)
STEPS, WIDTH, CLASSES = 3, 4, 3
Objective = Callable[["Trained", Tensor, Tensor], Tensor]
cross_entropy = nn.functional.cross_entropy


class Trained(LightningModule):
    """An encoder, a layer `part` and a loss, which a row of the table makes."""

    def __init__(
        self, objective: Objective, loss: Any, part: Callable[[], nn.Module], rows: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = nn.Linear(WIDTH, CLASSES)
        self.part = part()
        self.double()
        self.loss, self.objective, self.rows = loss(), objective, rows

    def outputs(self, features: Tensor) -> Tensor:
        return self.part(self.encoder(features))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.objective(self, *batch)

    def train_dataloader(self) -> Any:
        return listed(self.rows)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


def called(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    return model.loss(model.outputs(features), labels)  # type: ignore[no-any-return]


def squared_error(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    return model.loss(model.outputs(features)[:, 0], labels.double())  # type: ignore[no-any-return]


def similarity(rows: Tensor) -> Tensor:
    return (rows @ rows.T).square().mean()


def gathered_without_gradient(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    own = model.outputs(features)
    rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own.detach())
    return similarity(torch.cat([*rows[: dist.get_rank()], own, *rows[dist.get_rank() + 1 :]]))


def times_world_size(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    return dist.get_world_size() * called(model, features, labels)


def reduced_in_place(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    total = cross_entropy(model.outputs(features), labels, reduction="sum")
    count = torch.tensor(float(len(labels)))
    with torch.no_grad():
        dist.all_reduce(total)
        dist.all_reduce(count)
    return total / count


def counted(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    return global_mean(cross_entropy(model.outputs(features), labels, reduction="sum"), len(labels))


def of_first_class(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    """Only rows of class 0, which a rank may not have."""
    chosen = labels == 0
    return global_mean(model.outputs(features)[chosen].square().sum(), int(chosen.sum()))


def mean_of_first_class(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    chosen = labels == 0
    outputs = model.outputs(features)
    return outputs[chosen].square().sum(1).mean() if chosen.any() else outputs.sum() * 0


def by_place(rows: Tensor) -> Tensor:
    """A loss that depends on the order of rows, as that of a queue or of offset targets."""
    return (rows * torch.arange(1.0, 1 + len(rows), dtype=rows.dtype)[:, None]).square().mean()


def own_rows_first(model: Trained, features: Tensor, labels: Tensor) -> Tensor:
    rows = all_gather_with_grad(model.outputs(features))
    return by_place(rows.roll(-dist.get_rank() * len(features), 0))


class Row(NamedTuple):
    """A fault, its fix, and the same in one process.

    Attributes:
        sick: Objective with the fault.
        mended: Objective after the fix.
        whole: Objective in one process.
        sizes: Rows of each rank.
        losses: Losses of the three.
        part: Makes the layer behind the encoder.
        plugins: Makes plugins of the trainer, after the fix.
    """

    sick: Objective
    mended: Objective
    whole: Objective
    sizes: tuple[int, int] = EVEN
    losses: tuple[Any, Any, Any] = (nn.CrossEntropyLoss, nn.CrossEntropyLoss, nn.CrossEntropyLoss)
    part: Callable[[], nn.Module] = nn.Identity
    plugins: Callable[[], list[Any]] = list


ROWS: dict[str, Row] = {
    "F20": Row(
        gathered_without_gradient,
        lambda model, x, y: similarity(all_gather_with_grad(model.outputs(x))),
        lambda model, x, y: similarity(model.outputs(x)),
    ),
    "F21": Row(
        times_world_size,
        called,
        called,
        UNEVEN,
        (
            lambda: GlobalBatchLoss(nn.CrossEntropyLoss()),
            lambda: GlobalBatchLoss(nn.CrossEntropyLoss()),
            nn.CrossEntropyLoss,
        ),
    ),
    "F22": Row(times_world_size, called, called),
    "F23": Row(reduced_in_place, counted, called, UNEVEN),
    "F26": Row(
        own_rows_first,
        lambda model, x, y: by_place(all_gather_with_grad(model.outputs(x))),
        lambda model, x, y: by_place(model.outputs(x)),
    ),
    "F28": Row(
        gathered_without_gradient,
        lambda model, x, y: similarity(all_gather_with_grad(model.outputs(x))),
        lambda model, x, y: similarity(model.outputs(x)),
        UNEVEN,
    ),
    "F27": Row(
        squared_error,
        squared_error,
        squared_error,
        UNEVEN,
        (MeanSquaredError, lambda: differentiable(MeanSquaredError()), nn.MSELoss),
    ),
    "F29": Row(called, called, called, UNEVEN, (SupConLoss, lambda: GlobalBatchLoss(SupConLoss()), SupConLoss)),
    "F30, global_mean": Row(called, counted, called, UNEVEN),
    "F30, GlobalBatchLoss": Row(
        called,
        called,
        called,
        UNEVEN,
        (nn.CrossEntropyLoss, lambda: GlobalBatchLoss(nn.CrossEntropyLoss()), nn.CrossEntropyLoss),
    ),
    "F37": Row(
        mean_of_first_class,
        of_first_class,
        lambda model, x, y: model.outputs(x)[y == 0].square().sum(1).mean(),
        UNEVEN,
    ),
    "F59": Row(called, called, called, part=lambda: nn.BatchNorm1d(CLASSES), plugins=lambda: [SyncBatchNorm()]),
}
SICK, MENDED, WHOLE = range(3)


def batches(part: slice) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        features = torch.randn(sum(EVEN), WIDTH, generator=generator, dtype=torch.float64)
        # the first rank has no row of class 0 in any step
        labels = torch.tensor([1, 2, 1, 2, 0, 1, 0, 2])
        found.append((features[part], labels[part]))
    return found


def trained(row: Row, which: int, part: slice) -> Trained:
    return Trained(row[which], row.losses[which], row.part, batches(part))


def on_ranks(name: str, which: int) -> list[Tensor]:
    row, rank = ROWS[name], dist.get_rank()
    first = sum(row.sizes[:rank])
    model = trained(row, which, slice(first, first + row.sizes[rank]))
    make_trainer("ddp", plugins=row.plugins() if which == MENDED else []).fit(model)
    return [parameter.detach() for parameter in model.encoder.parameters()]


def in_one_process(name: str) -> list[Tensor]:
    """The steps of a fit, by hand."""
    model = trained(ROWS[name], WHOLE, slice(None))
    optimizer = model.configure_optimizers()
    for batch in model.rows:
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.encoder.parameters()]


def difference(ours: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_after_the_advised_fix_the_weights_are_those_of_one_process(pool: RankPool, name: str) -> None:
    assert FAULTS[name.partition(",")[0]].fix
    truth = in_one_process(name)
    for ours in pool.run(2, on_ranks, name, MENDED):
        assert difference(ours, truth) < 1e-9


# a gather of uneven rows ends in an error, or waits
@pytest.mark.parametrize("name", [name for name in ROWS if name != "F28"])
def test_with_the_fault_they_are_not(pool: RankPool, name: str) -> None:
    truth = in_one_process(name)
    for ours in pool.run(2, on_ranks, name, SICK):
        assert difference(ours, truth) > 1e-4
