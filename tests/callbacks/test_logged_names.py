"""Names that are reduced over ranks, in every hook that may log: where ranks log others, all of them say so before values are mixed.

Under ``"ddp"`` Lightning reduces one value after the other, whatever their names are.
"""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.fits import MeanSquare, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use")

HOOKS = {
    "fit": [
        *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "training_step", "on_train_batch_end"),
        *("on_before_zero_grad", "on_train_epoch_end"),
        *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "validation_step"),
        *("on_validation_batch_end", "on_validation_epoch_end"),
    ],
    "validate": ["validation_step", "on_validation_epoch_end"],
    "test": ["on_test_start", "on_test_batch_start", "test_step", "on_test_batch_end", "on_test_epoch_end"],
}


class Logs(MeanSquare):
    """Logs in one hook: names by rank, or one more on rank 0, or the same on all ranks."""

    features = 2

    def __init__(self, hook: str, names: str) -> None:
        super().__init__()
        self.names, self.calls = names, 0
        given = getattr(self, hook)

        def log_in_hook(*args: Any) -> Any:
            self.log_names()
            return given(*args)

        setattr(self, hook, log_in_hook)

    def log_names(self) -> None:
        rank = dist.get_rank()
        self.calls += 1
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": 1}
        self.log(f"class_{rank}" if self.names == "others" else "class", 0.5 + rank, **options)
        if self.names == "one more" and rank == 0:
            self.log("only", 1.0, **options)
        self.log("alone", float(rank), on_step=False, on_epoch=True, batch_size=1)

    def validation_step(self, batch: list[Tensor], index: int) -> None: ...

    def test_step(self, batch: list[Tensor], index: int) -> None: ...


def play(trainer: Trainer, stage: str, module: LightningModule, rows: Any = None, loaders: int = 1) -> None:
    """Fit or evaluate on rows of this rank, which has the same loaders for validation."""
    rows = torch.randn(4, 2) + dist.get_rank() if rows is None else rows
    loader = DataLoader(TensorDataset(rows), batch_size=2)
    if stage == "fit":
        trainer.fit(module, loader, [loader] * loaders)
    else:
        getattr(trainer, stage)(module, [loader] * loaders, verbose=False)


def run(hook: str, names: str, stage: str, strategy: str) -> tuple[int, dict[str, float], list[str]]:
    checks = DDPChecks(file=False, summary=False)
    trainer = make_trainer(strategy, callbacks=[checks])
    module = Logs(hook, names)
    play(trainer, stage, module)
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if name == "class"}
    return module.calls, values, [finding.fault for finding in checks.findings if finding.fault == "F46"]


CASES = [(stage, hook) for stage, hooks in HOOKS.items() for hook in hooks]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("names", ["others", "one more"])
def test_other_names_are_named_on_every_rank(pool: RankPool, names: str, strategy: str) -> None:
    for stage, hook in CASES:
        errors = pool.errors(2, run, hook, names, stage, strategy)
        name = "class_1" if names == "others" else "only"
        assert_errors(errors, "LossCheck, F46", name, f"({hook}), logged at test_logged_names.py:", "self.log(")
        if stage == "test":  # which has the stages of a validation
            assert not any("validation" in error.message for error in errors)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
def test_the_same_names_are_silent(pool: RankPool, strategy: str) -> None:
    for stage, hook in CASES:
        for calls, values, found in pool.run(2, run, hook, "same", stage, strategy):
            assert calls > 0
            assert values == {"class": 1.0}
            assert found == []


class Copied(MeanSquare):
    """Copies and pickles itself while the checks run. One hook is the object's own."""

    features = 2

    def __init__(self) -> None:
        super().__init__()
        self.own = 0
        self.on_train_epoch_end = self.count  # type: ignore[method-assign]

    def count(self) -> None:
        self.own += 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for twin in (deepcopy(self), pickle.loads(pickle.dumps(self))):
            assert twin.on_validation_epoch_end == twin.__class__.on_validation_epoch_end.__get__(twin)
            assert twin.on_train_epoch_end == twin.count
        return super().training_step(batch, index)


def hooks_of_a_copied_module() -> tuple[int, list[str]]:
    module = Copied()
    rows = DataLoader(TensorDataset(torch.randn(4, 2) + dist.get_rank()), batch_size=2)
    make_trainer("ddp", callbacks=[DDPChecks(file=False, summary=False)]).fit(module, rows)
    assert module.on_train_epoch_end == module.count
    return module.own, [name for name in vars(module) if name.startswith("on_")]


def test_a_module_keeps_its_hooks(pool: RankPool) -> None:
    assert pool.run(2, hooks_of_a_copied_module) == [(1, ["on_train_epoch_end"])] * 2


# ---------------------------------------------------------------------- values of one rank


class Alone(MeanSquare):
    """Logs its mean row without ``sync_dist``."""

    features = 1

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log(self.name, batch[0].mean())

    test_step = validation_step


def values_of_one_rank(stage: str, strategy: str, watch: bool) -> list[tuple[str, str, list[Any]]]:
    checks = DDPChecks(file=False, summary=False, action="log")
    watching = [EarlyStopping("val_loss")] if watch else []
    trainer = make_trainer(strategy, callbacks=[checks, *watching])
    play(trainer, stage, Alone("val_loss"), torch.arange(4.0).view(4, 1) + 4 * dist.get_rank())
    found = [each.record() for each in checks.findings if each.fault in ("F55", "F56")]
    return [(each["fault"], each["severity"], each["values"]) for each in found]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
def test_a_logged_value_of_one_rank_is_found(pool: RankPool, strategy: str) -> None:
    """As a note. Where a callback watches it, it is a single error."""
    for stage in ("fit", "validate", "test"):
        note = [("F56", "note", ["1.5", "5.5"])]
        assert pool.run(2, values_of_one_rank, stage, strategy, False) == [note, note]
    error = [("F55", "error", ["1.5", "5.5"])]
    assert pool.run(2, values_of_one_rank, "fit", strategy, True) == [error, error]


# ---------------------------------------------------------------------- a reader on one rank


class ReadsOnRankZero(Callback):
    """Reads the values of the epoch on rank 0 before the module's hook, as a progress bar does."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            assert isinstance(trainer.callback_metrics, dict)

    on_validation_epoch_end = on_train_epoch_end


def run_with_a_reader(hook: str, strategy: str, reader_is_first: bool) -> dict[str, float]:
    callbacks: list[Callback] = [DDPChecks(file=False, summary=False), ReadsOnRankZero()]
    if reader_is_first:
        callbacks.reverse()
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=2)
    play(trainer, "fit", Logs(hook, "equal"))
    assert trainer.callbacks[: len(callbacks)] == callbacks  # type: ignore[attr-defined]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("reader_is_first", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_a_reader_on_one_rank(pool: RankPool, hook: str, strategy: str, reader_is_first: bool) -> None:
    """In whichever order the callbacks are listed, values of the steps are compared and reduced before any of them reads."""
    assert all(values["class"] == 1.0 for values in pool.run(2, run_with_a_reader, hook, strategy, reader_is_first))


class LogsThenReads(Callback):
    """Logs the same names on all ranks at the end of an epoch. Rank 0 reads them there, or only the callbacks after this one do."""

    def __init__(self, reads: bool) -> None:
        self.reads = reads

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log("of callback", 1.0 + dist.get_rank(), sync_dist=True)
        if self.reads and trainer.is_global_zero:
            assert float(trainer.callback_metrics["of callback"]) == 1.5

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end


class ModuleReads(Logs):
    """Logs in each hook at the end of an epoch, and reads on rank 0 there."""

    def __init__(self) -> None:
        super().__init__("training_step", "equal")

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> None:
        self.log("of batches", batch[0].mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("of module", 2.0 + dist.get_rank(), sync_dist=True)
        if self.trainer.is_global_zero:
            assert float(self.trainer.callback_metrics["of module"]) == 2.5

    on_validation_epoch_end = on_test_epoch_end = on_train_epoch_end


def run_with_logs_of_the_end(stage: str, strategy: str, reads: bool, loaders: int) -> dict[str, float]:
    # two of one callback log under one name: the mean of both
    callbacks = [ReadsOnRankZero(), LogsThenReads(reads), DDPChecks(file=False, summary=False), LogsThenReads(False)]
    trainer = make_trainer(strategy, callbacks=[*callbacks, ReadsOnRankZero()], max_epochs=2)
    module = ModuleReads()
    play(trainer, stage, module, loaders=loaders)
    # Lightning's objects have their methods back
    for each in (module, trainer.fit_loop.epoch_loop._results, trainer._logger_connector, *callbacks):
        assert {"on_train_epoch_end", "metrics", "epoch_end_reached"}.isdisjoint(vars(each))
    return {
        name: float(value) for name, value in trainer.callback_metrics.items() if name in ("of callback", "of module")
    }


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("reads", [False, True])
def test_readers_of_what_the_end_of_an_epoch_logs(pool: RankPool, strategy: str, reads: bool) -> None:
    for stage, loaders in (("fit", 1), ("fit", 2), ("validate", 1), ("validate", 2), ("test", 1)):
        for values in pool.run(2, run_with_logs_of_the_end, stage, strategy, reads, loaders):
            assert values == {"of callback": 1.5, "of module": 2.5}


class LogsOnRankZero(Callback):
    """Logs a value of all ranks on rank 0 alone, at the end of an epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            module.log("of rank 0", 1.0, sync_dist=True)

    on_validation_epoch_end = on_train_epoch_end


def run_with_logs_on_rank_zero(stage: str, strategy: str, action: str) -> None:
    callbacks = [LogsOnRankZero(), DDPChecks(file=False, summary=False, action=action), ReadsOnRankZero()]
    play(make_trainer(strategy, callbacks=callbacks), stage, Logs("training_step", "equal"))


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("action", ["raise", "warn", "log"])
def test_a_log_of_a_callback_on_one_rank_is_named(pool: RankPool, stage: str, strategy: str, action: str) -> None:
    """With any action: the reduction that follows would wait for ever, or mix values of other names."""
    errors = pool.errors(2, run_with_logs_on_rank_zero, stage, strategy, action)
    assert_errors(errors, "LossCheck, F46", "of rank 0", "logged at test_logged_names.py:", "rank 1: nothing more")


class HalfLogged(Logs):
    """Reads on rank 0 in the middle of its hook, and logs another value after it."""

    def __init__(self) -> None:
        super().__init__("training_step", "equal")

    def on_train_epoch_end(self) -> None:
        options: dict[str, Any] = {"sync_dist": True, "batch_size": 1}
        self.log("first", 1.0 + dist.get_rank(), **options)
        if self.trainer.is_global_zero:
            assert isinstance(self.trainer.callback_metrics, dict)
        self.log("second", 3.0 + dist.get_rank(), **options)

    on_validation_epoch_end = on_train_epoch_end


class HalfLogging(Callback):
    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        HalfLogged.on_train_epoch_end(module)  # type: ignore[arg-type]

    on_validation_epoch_end = on_train_epoch_end


def run_half_logged(stage: str, strategy: str, where: str) -> dict[str, float]:
    callbacks: list[Callback] = [DDPChecks(file=False, summary=False)]
    if where == "callback":
        callbacks.append(HalfLogging())
    trainer = make_trainer(strategy, callbacks=callbacks)
    play(trainer, stage, HalfLogged() if where == "module" else Logs("training_step", "equal"))
    return {name: float(trainer.callback_metrics[name]) for name in ("first", "second")}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("where", ["module", "callback"])
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_hook_that_reads_on_one_rank_before_it_logs_more(
    pool: RankPool, stage: str, where: str, strategy: str
) -> None:
    for values in pool.run(2, run_half_logged, stage, strategy, where):
        assert values == {"first": 1.5, "second": 3.5}


# ---------------------------------------------------------------------- what a hook does at the end of an epoch, step by step

ALL, FIRST, SECOND = (0, 1), (0,), (1,)
NO_VALUE = ("read", "none")
Steps = list[tuple[str, tuple[int, ...]]]  # a name that is logged, or "read" or "metrics", and the ranks that do it

# by name: the steps of each epoch, and a name that the error has. Empty for the same values on all ranks
SCRIPTS: dict[str, tuple[list[Steps], str]] = {
    "read twice": ([[("a", ALL), ("read", FIRST), ("b", ALL), ("read", FIRST), ("c", ALL)]] * 2, ""),
    "both read, at other places": ([[("a", ALL), ("read", FIRST), ("b", ALL), ("read", SECOND), ("c", ALL)]] * 2, ""),
    "another order next": ([[("a", ALL), ("b", ALL)], [("b", ALL), ("read", SECOND), ("a", ALL)]], ""),
    "read before anything": ([[("read", FIRST), ("a", ALL)]] * 2, ""),
    "read after everything": ([[("a", ALL), ("read", SECOND)]] * 2, ""),
    "a metric": ([[("metric", ALL), ("read", FIRST), ("a", ALL)]] * 2, ""),
    "a metric without a number": ([[("none", ALL), ("a", ALL)]] * 2, ""),
    "less after a read": ([[("a", ALL), ("read", FIRST), ("b", SECOND)]], "b"),
    "more after a read": ([[("a", ALL), ("read", FIRST), ("b", FIRST)]], "b"),
    "other names at reads": ([[("a", FIRST), ("b", SECOND), ("read", ALL)]], "a"),
    "the name of an earlier epoch": ([[("a", ALL), ("b", ALL)], [("a", ALL), ("b", SECOND)]], "b"),
    "nothing on a rank": ([[("a", ALL)], [("a", SECOND)]], "a"),
    "a metric on a rank": ([[("a", ALL), ("metric", FIRST)]], "metric"),
}


class WithoutNumber(MeanMetric):
    """A metric whose value Lightning never counts as read."""

    def compute(self) -> Any:
        super().compute()
        return None


class Scripted(Logs):
    def __init__(self, epochs: list[Steps]) -> None:
        super().__init__("training_step", "equal")
        self.epochs, self.found, self.nothing = epochs, MeanMetric(), WithoutNumber()

    def on_train_epoch_end(self) -> None:
        follow(self, self.epochs[self.current_epoch])


class ScriptedCallback(Callback):
    def __init__(self, epochs: list[Steps]) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        follow(module, self.epochs[module.current_epoch])


def follow(module: Any, steps: Steps) -> None:
    for what, ranks in steps:
        if dist.get_rank() not in ranks:
            continue
        if what == "read":
            assert isinstance(module.trainer.callback_metrics, dict)
        elif what == "metric":
            module.found.update(1.0 + dist.get_rank())
            module.log(what, module.found)
        elif what == "none":
            module.nothing.update(1.0)
            module.log(what, module.nothing)
        else:
            module.log(what, 1.0 + dist.get_rank(), sync_dist=True)


def run_script(name: str, strategy: str, where: str, action: str) -> dict[str, float]:
    epochs, _ = SCRIPTS[name]
    callbacks: list[Callback] = [DDPChecks(file=False, summary=False, action=action)]
    if where == "callback":
        callbacks.insert(0, ScriptedCallback(epochs))
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=len(epochs))
    play(trainer, "fit", Scripted(epochs if where == "module" else [[]] * len(epochs)))
    return {name: float(trainer.callback_metrics[name]) for name, _ in epochs[-1] if name not in NO_VALUE}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("where", ["module", "callback"])
def test_steps_of_a_hook(pool: RankPool, where: str, strategy: str) -> None:
    for name, (epochs, wrong) in SCRIPTS.items():
        for action in ("raise", "warn"):
            if wrong:
                errors = pool.errors(2, run_script, name, strategy, where, action)
                assert_errors(errors, "LossCheck, F46", f"{wrong} (on_train_epoch_end)")
            elif action == "raise":
                expected = {what: 1.5 for what, _ in epochs[-1] if what not in NO_VALUE}
                assert pool.run(2, run_script, name, strategy, where, action) == [expected] * 2, name
