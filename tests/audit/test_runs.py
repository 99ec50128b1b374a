"""What can be audited: models from anywhere, steps of any kind, batches of any nest, data of any kind."""

from __future__ import annotations

import dataclasses
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from pytorch_metric_learning.losses import ArcFaceLoss, ContrastiveLoss
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses import (
    ClipLoss,
    GlobalBatchLoss,
    ModelParallelLossStrategy,
    SyncBatchNorm,
    assert_parity,
    audit,
)
from tests.audit import modules as m
from tests.audit.modules import CLASSES, Module, even, learned, rows
from tests.doors import MULTIPLE
from tests.processes import run_python
from tests.slow_parameters import slow_parameters

ACCUMULATED: dict[str, Any] = {"trainer_kwargs": {"accumulate_grad_batches": 2}}
GIVEN = {"tolerance": 1e-5}  # for tests about something else: what rounding does is measured by two runs more


def test_the_model_and_the_process_stay_as_they_were() -> None:
    module = Module(learned())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state, keys = torch.get_rng_state(), set(vars(module))
    report = audit(module, even(), steps=2)
    assert report.equal
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(module)) == keys
    assert not dist.is_initialized()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_model_from_a_closure_with_batches_of_a_local_class() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        extra: Any

    Pair = namedtuple("Pair", "y names")

    class Local(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            assert batch.extra["pair"].names is None or len(batch.extra["pair"].names) == len(batch.x)
            assert batch.extra["weights"].shape == (m.CLASSES,)
            assert batch.extra["temperature"] == 0.5
            return self.objective(self.encoder(batch.x), batch.extra["pair"].y)

    def collate(samples: list[Any]) -> Batch:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        pair = Pair(y, [f"row {value}" for value in y])
        return Batch(x, {"pair": pair, "weights": torch.ones(m.CLASSES), "temperature": 0.5, "nothing": None})

    report = audit(Local(), even(collate_fn=collate), strategy="ddp", steps=2, **GIVEN)
    assert report.equal, str(report)
    assert report.losses[0].rows == (8, 8)


class Stepping(Module):  # steps behind Lightning's back, with two optimizers, in manual optimisation
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(m.CLASSES, m.CLASSES)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.encoder, self.head)]

    def training_step(self, batch: Any, index: int) -> Any:
        optimizers = self.optimizers(use_pl_optimizer=False)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.objective(self.head(self.encoder(batch[0])), batch[1])
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return {"loss": loss, "extra": 1}


class Dict(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        self.log("train_loss", 1.0)
        self.logger.experiment.add_scalar("x", 1.0)
        return {"loss": super().training_step(batch, index), "world": self.trainer.world_size}


class CallsDist(Module):
    def objective(self, z: Any, y: Any) -> Any:
        total = torch.tensor(float(len(y)))
        dist.all_reduce(total)
        return torch.nn.functional.cross_entropy(z, y, reduction="sum") / total * dist.get_world_size()


class Doubled(Module):  # changes the gradient in its own hook, which runs after the callbacks'
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad *= 1 + m.rank()


class Augmented(Module):
    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return batch[0] + torch.randn_like(batch[0]), batch[1]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        x, y = rows().tensors
        part = slice(m.rank(), None, m.world())
        return iter(zip(x[part], y[part], strict=True))


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return even(batch_size=16 // self.trainer.world_size)


@pytest.mark.parametrize("run", slow_parameters([audit, assert_parity], {assert_parity}))
def test_data_is_given_as_trainer_fit_spells_it(run: Any) -> None:
    for data in ({"datamodule": Data()}, {"train_dataloaders": even()}):
        report = run(Module(learned()), steps=1, **data, **GIVEN)
        assert report.losses[0].rows == (8, 8)


class OwnData(Module):
    def train_dataloader(self) -> Any:
        return even()


class Monitored(Module):  # its scheduler and its callback wait for a validation that an audit does not run
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss")]

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", 0.0)


class Listed(Module):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch[0], index)


SUPPORTED: dict[str, tuple[m.Make, Any, dict[str, Any]]] = {
    "raw optimizers": (Stepping, even, {"steps": 4}),
    "a dict, a logger, self.trainer": (Dict, even, {"trainer_kwargs": {"logger": CSVLogger("nowhere")}}),
    "an iterable dataset without length": (Module, lambda: DataLoader(Stream(), batch_size=4), {}),
    "a data module": (Module, Data, {}),
    "the module's own data": (OwnData, lambda: None, {}),
    "augmented on the way": (Augmented, even, {}),
    "epochs shorter than the audit, accumulated": (Module, partial(even, 16), ACCUMULATED | {"steps": 4}),
    "a list of loaders": (Listed, lambda: [even()], {}),
    "what monitors a validation": (Monitored, partial(even, 16), {"steps": 3}),
    "a limited epoch": (Module, even, {"steps": 3, "trainer_kwargs": {"limit_train_batches": 2}}),
    "workers": (Module, lambda: even(num_workers=1), {"steps": 1}),
}


def large_and_small() -> list[DataLoader[Any]]:
    return [even(8), even(4)]


def exhausted() -> CombinedLoader:
    small = DataLoader(rows(8), batch_size=4)
    return CombinedLoader({"large": even(8), "small": small}, "max_size")


LOADERS: dict[str, tuple[Callable[[], Any], list[tuple[int, int]]]] = {
    "a list": (large_and_small, [(12, 12)] * 2),
    "a dict": (lambda: dict(zip("ab", large_and_small(), strict=True)), [(12, 12)] * 2),
    "the shortest ends": (lambda: CombinedLoader(large_and_small(), "min_size"), [(12, 12)] * 2),
    "one is exhausted": (exhausted, [(12, 12), (8, 8)]),
}


# Lightning 2.6 asks torch 2.13 in a way that torch deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize(
    ("name", "without"),
    [
        *((name, ()) for name in LOADERS),
        *((name, ("uneven",)) for name in ("the shortest ends", "one is exhausted")),
        *(pytest.param(name, ("uneven",), marks=pytest.mark.slow) for name in ("a list", "a dict")),
    ],
    ids=str,
)
def test_rows_are_counted_for_each_of_two_loaders(name: str, without: tuple[str, ...]) -> None:
    data, expected = LOADERS[name]
    report = audit(m.TwoLoaders(), data(), strategy="ddp", without=without, steps=2, **GIVEN)
    assert report.equal, str(report)
    assert [loss.rows for loss in report.losses] == expected


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported(name: str) -> None:
    make, data, options = SUPPORTED[name]
    options = {"strategy": "ddp", "steps": 2} | GIVEN | options
    report = audit(make(), data(), **options)
    assert report.equal, str(report)
    assert {row.step for row in report.rows} == set(range(1, options["steps"] + 1))


def test_a_module_that_needs_a_process_group_gets_one_of_one_rank() -> None:
    report = audit(CallsDist(), even(), strategy="ddp", steps=2, **GIVEN)
    assert report.equal, str(report)
    assert any("process group" in note.title for note in report.notes)


def test_gradients_are_those_that_the_optimizer_sees() -> None:
    report = audit(Doubled(), even(), strategy="ddp", steps=1, **GIVEN)
    assert not any(row.ranks_agree for row in report.rows if row.step == 1)


def test_callbacks_run_in_both_runs() -> None:
    class Freeze(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.encoder[0].weight.grad.zero_()

    report = audit(Module(), even(), strategy="ddp", steps=2, trainer_kwargs={"callbacks": [Freeze()]})
    assert report.equal
    (row,) = [row for row in report.rows if row.step == 1 and row.parameter == "encoder.0.weight"]
    assert row.error == 0


def test_a_factor_is_found_in_bf16_and_rounding_is_not() -> None:
    options: dict[str, Any] = {"strategy": "ddp", "trainer_kwargs": {"precision": "bf16-mixed"}}
    assert audit(Module(), even(), **options).equal
    report = audit(m.DoubleScaling(), even(), **options)
    assert report.diagnoses[0].fault == "F21", str(report)
    assert all(row.tolerance < 0.5 for row in report.rows if row.step == 1)


class Pictures(Module):
    """A small network whose precision hides a loss over the pairs of one rank, and not a batch norm of one rank."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(m.FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, m.CLASSES))


SIXTEEN_BITS: dict[str, tuple[Callable[[], nn.Module], bool, tuple[str, ...], tuple[str, ...]]] = {
    "healthy": (lambda: GlobalBatchLoss(ContrastiveLoss()), True, ("equal", "cannot tell"), ("", "F78")),
    "a batch norm of one rank": (lambda: GlobalBatchLoss(ContrastiveLoss()), False, ("different",), ("F59",)),
    "a loss over own pairs": (ContrastiveLoss, True, ("cannot tell", "different"), ("F78", "F29")),
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_what_16_bits_can_tell_follows_from_the_model(name: str) -> None:
    loss, is_synced, verdicts, faults = SIXTEEN_BITS[name]
    plugins = [SyncBatchNorm()] if is_synced else []
    report = audit(Pictures(loss()), even(16), trainer_kwargs={"precision": "bf16-mixed", "plugins": plugins})
    assert report.verdict in verdicts, str(report)
    assert next((each.fault for each in report.diagnoses), "") in faults, str(report)
    assert "Allowed error: 0.75 x the spread of one process's runs" in str(report)
    assert report.verdict != "cannot tell" or "precision='64-true'" in report.summary()
    # no gradient of the first step that is more than rounding may be off by a factor of two
    assert all(row.certain <= 0.4 for row in report.rows if row.step == 1 and row.verdict != "zero")


class Shifted(Module):
    """A parameter whose gradient is zero but for rounding: softmax does not see what is added to all logits."""

    def __init__(self, seed: int, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(m.FEATURES, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, m.CLASSES))
        self.shift = nn.Parameter(torch.zeros(1))
        self.optimizer = optimizer

    def objective(self, z: Any, y: Any) -> Any:
        return self.loss(z + self.shift, y)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


# Adam makes whole steps of rounding, so it has each precision; and one of them with another start
ROUNDED = [("32-true", torch.optim.SGD, 1), ("32-true", torch.optim.Adam, 1), ("bf16-mixed", torch.optim.Adam, 2)]
ROUNDED_AGAIN = [("bf16-mixed", torch.optim.SGD, 2), ("32-true", torch.optim.Adam, 2), ("64-true", torch.optim.Adam, 1)]


@pytest.mark.parametrize(
    ("precision", "optimizer", "seed"),
    [*ROUNDED, *(pytest.param(*row, marks=pytest.mark.slow) for row in ROUNDED_AGAIN)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_gradient_that_is_all_rounding_is_no_finding(precision: str, optimizer: Any, seed: int) -> None:
    report = audit(Shifted(seed, optimizer), even(), strategy="ddp", trainer_kwargs={"precision": precision})
    assert report.equal, str(report)


@pytest.mark.parametrize("precision", slow_parameters(["32-true", "64-true", "bf16-mixed"], {"64-true", "bf16-mixed"}))
def test_a_bias_before_a_batch_norm_is_called_zero(precision: str) -> None:
    options: dict[str, Any] = {"plugins": [SyncBatchNorm()], "precision": precision}
    report = audit(m.BatchNorm(), even(), strategy="ddp", steps=1, trainer_kwargs=options)
    assert report.equal, str(report)
    verdicts = {row.parameter: row.verdict for row in report.rows}
    assert verdicts.pop("encoder.0.bias") == "zero"
    assert set(verdicts.values()) == {"exact"}
    (line,) = [line for line in str(report).splitlines() if "encoder.0.bias" in line]
    assert line.split()[2:5] == ["-", "-", "-"]
    assert line.split()[-1] == "zero"


def test_the_tolerance_is_a_multiple_of_the_rounding_and_can_be_given() -> None:
    report = audit(Module().double(), double(), strategy="ddp")
    assert report.equal
    assert report.settings["rounding_unit"] == 2.0**-53
    assert all(MULTIPLE * 2.0**-53 <= row.tolerance < 1e-11 for row in report.rows)
    given = audit(Module().double(), double(), strategy="ddp", tolerance=1e-9)
    assert given.equal
    assert {row.tolerance for row in given.rows} == {1e-9}


def double() -> Any:
    x, y = rows().tensors
    return DataLoader(list(zip(x.double(), y, strict=True)), batch_size=8)


def test_gradients_that_are_not_finite_in_both_runs_are_not_called_equal_at_whatever_step() -> None:
    report = audit(m.NotFiniteLater(), even(), strategy="ddp")
    assert (report.equal, report.verdict) == (False, "cannot tell")
    assert [each.fault for each in report.diagnoses] == ["F79"], str(report)
    assert "at step 2" in report.diagnoses[0].evidence


def test_notes_on_what_is_true_of_both_runs() -> None:
    report = audit(m.Forgotten(learned()), even(), strategy="ddp", steps=1, **GIVEN)
    assert (report.equal, report.notes[0].fault) == (True, "F01")
    assert "loss.W" in report.notes[0].evidence
    from pytorch_metric_learning.losses import SupConLoss

    from lightning_ddp_losses import GlobalBatchLoss

    report = audit(Module(GlobalBatchLoss(SupConLoss())), even(4), steps=1, **ACCUMULATED, **GIVEN)
    assert (report.equal, report.notes[0].fault) == (True, "F33"), str(report)
    report = audit(Module(), even(4), steps=1, **ACCUMULATED, **GIVEN)
    assert [note.fault for note in report.notes] == ["F18"], "a mean over samples is not a loss over pairs"
    assert "16 rows" in report.notes[0].evidence.replace("sees 8 rows", "16 rows")


def test_draws_and_batch_statistics_are_not_taken_for_a_loss_over_pairs() -> None:
    class Both(Module):
        def build(self) -> nn.Module:
            return nn.Sequential(nn.Linear(m.FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, m.CLASSES))

    report = audit(Both(), even(4), strategy="ddp", steps=1, **ACCUMULATED, **GIVEN)
    assert [note.fault for note in report.notes] == ["F18"], str(report)


def test_accumulated_towers_and_an_optimizer_that_holds_a_copy_are_noted() -> None:
    class Towers(Module):
        def __init__(self) -> None:
            super().__init__(ClipLoss())

        def objective(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(z, z.flip(1))

    report = audit(Towers(), even(4), steps=1, **ACCUMULATED, **GIVEN)
    assert (report.equal, report.notes[0].fault) == (True, "F33"), str(report)
    assert "microbatched" in report.notes[0].fix
    report = audit(m.StaleOptimizer(), even(), strategy="ddp", steps=1, **GIVEN)
    assert (report.equal, [note.fault for note in report.notes]) == (True, ["F02", "F18"]), str(report)
    assert "4 tensors" in report.notes[0].evidence
    assert "`encoder.0.weight`" in report.notes[0].evidence


def test_assert_parity_passes_and_fails_with_the_report() -> None:
    assert assert_parity(Module(), even(), strategy="ddp", steps=1).equal
    with pytest.raises(AssertionError, match=r"F24[\s\S]*GlobalBatchLoss"):
        assert_parity(Module(m.PMLWrapper(learned())), even(), devices=2, strategy="ddp", steps=1)


SCRIPT = """
import sys
import torch
from torch import nn
import lightning.pytorch as pl
from lightning_ddp_losses import audit

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))
model = Model()
for _ in range(3):  # threads of the parent are busy before the fork
    model.training_step((torch.randn(512, 1, 8, 8), torch.randint(10, (512,))), 0).backward()
    torch.randn(800, 800) @ torch.randn(800, 800)
model.zero_grad()
report = audit(model, torch.utils.data.DataLoader(data, batch_size=8), strategy="ddp")
print(report.summary())
"""


@pytest.mark.slow
def test_a_script_s_main_with_threads_and_without_a_guard(tmp_path: Path) -> None:
    done = run_python("-c", SCRIPT, folder=tmp_path, OMP_NUM_THREADS=None)
    assert "Equal: 2 ranks under ddp" in done.stdout, done.stdout + done.stderr
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".coverage")] == []


class Validating(Module):  # has 9 rows to validate on, and draws when their loader is made
    def val_dataloader(self) -> Any:
        torch.rand(3)
        return DataLoader(rows(9), batch_size=4)

    def validation_step(self, batch: Any, index: int) -> None:
        raise AssertionError("an audit validates nothing")


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
def test_rows_that_validation_counts_twice_are_a_note(strategy: str) -> None:
    report = audit(Validating(), even(), devices=2, steps=1, strategy=strategy, **GIVEN)
    found = [note for note in report.notes if note.fault == "F54"]
    assert report.equal
    assert len(found) == (strategy == "ddp")
    assert all("loader 0: 1" in note.evidence and "evaluation=" in note.fix for note in found)
    options: dict[str, Any] = {"trainer_kwargs": {"limit_val_batches": 0}, "strategy": "ddp"} | GIVEN
    unasked = audit(Validating(), even(), devices=2, steps=1, **options)
    assert "F54" not in [note.fault for note in unasked.notes]


# An encoder that `fully_shard` divides is compared whole with one process.


class Divided(Module):  # its encoder in parts, where there is a mesh for that
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])


def test_ranks_with_parts_equal_one_process() -> None:
    module = Divided(GlobalBatchLoss(ArcFaceLoss(CLASSES, CLASSES)))
    report = audit(module, even(), strategy=ModelParallelLossStrategy(), steps=2)
    assert report.equal, str(report)
    assert {row.parameter.split(".")[0] for row in report.rows} == {"encoder", "loss"}


class OneAtATime(Divided):  # a rank that has two gathered parameters at the same time fails
    def configure_model(self) -> None:
        super().configure_model()
        gather, alive = DTensor.full_tensor, [0]

        def counted(self: DTensor, **options: Any) -> Tensor:
            assert not alive[0], "another one is still whole"
            whole = gather(self, **options)
            alive[0] += 1
            weakref.finalize(whole, lambda: alive.__setitem__(0, alive[0] - 1))
            return whole

        if self.device_mesh is not None:
            DTensor.full_tensor = counted  # type: ignore[method-assign]


def test_no_rank_holds_two_gathered_parameters() -> None:
    module = OneAtATime(GlobalBatchLoss(ArcFaceLoss(CLASSES, CLASSES)))
    report = audit(module, even(), strategy=ModelParallelLossStrategy(), steps=1)
    assert report.equal, str(report)
