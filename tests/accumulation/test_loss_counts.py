"""Counts first: with ``loss_counts`` a window is divided by what all its batches count, from its first backward on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import Batch, Rows, train
from tests.answers import as_one_process, assert_all_close, assert_errors
from tests.fits import Trained, listed, make_trainer, weights_of
from tests.strategies.test_loader_states import Streaming, differing
from tests.strategies.test_resuming import AFTER, Line, leg, resumed
from tests.strategies.test_uneven_ends import stream

# some ranks have no rows; labels of -1 do not count
NUMBERS = {
    1: [(3,), (2,), (4,), (1,), (5,)],
    2: [(1, 4), (5, 1), (0, 3), (2, 2), (3, 1)],
    3: [(1, 4, 2), (5, 1, 0), (0, 3, 6), (2, 2, 1), (3, 1, 1)],
}
ROWS = Rows(NUMBERS, lowest_label=-1)


def own_rows(window: Sequence[int] | None = None) -> list[dict[str, Tensor]]:
    """This rank's micro-batches, as a data set has them before a hook unpacks them."""
    return [{"features": features, "labels": labels} for features, labels in ROWS.own(window)]


def counts_of(*batches: dict[str, Tensor]) -> dict[str, Any]:
    labels = torch.cat([batch["labels"] for batch in batches])
    return {"ce": (labels >= 0).sum(), "square": len(labels)}


class Counted(Trained):  # two means whose counts are not in proportion, with learned weights, and a term of no row
    seed = 0
    lr = 0.3
    momentum = 0.9
    penalty = 0.01
    validated = 0

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def build(self) -> None:
        self.layer = nn.Linear(3, 3).double()
        self.ce = GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1))
        self.scales = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def loss_counts(self, batch: dict[str, Tensor]) -> Any:
        counts = counts_of(batch)
        return FAULTS[self.fault][0](self, counts) if self.fault else counts

    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        return (batch["features"], batch["labels"]) if isinstance(batch, dict) else batch

    def training_step(self, batch: Any, index: int) -> Tensor:
        features, labels = batch
        logits = self.layer(features)
        square = global_mean(logits.square().sum(), len(logits), name="square")
        return self.weighed(self.ce(logits, labels), square)

    def weighed(self, ce: Tensor, square: Tensor) -> Tensor:
        """The losses with their learned weights, as the homoscedastic uncertainty of several tasks has them."""
        if not self.penalty:
            return ce + 0.5 * square
        losses = (torch.stack([ce, square]) * torch.exp(-self.scales) + self.scales).sum()
        return losses + self.penalty * self.layer.weight.square().sum()

    def val_dataloader(self) -> Any:
        return DataLoader([0], batch_size=None)

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated += 1


class Declared(Counted):  # the same without the method: its counts are not in proportion
    loss_counts = None  # type: ignore[assignment]


def fit(make_loader: Callable[[Sequence[Any]], Any], given: dict[str, Any], fault: str = "") -> dict[str, Tensor]:
    rank = dist.get_rank()
    options = {"limit_val_batches": 0} | given
    if "callbacks" not in options:
        options = {"accumulate_grad_batches": 2} | options
    strategy = DDPLossStrategy(accumulation="window", **options.pop("strategy", {}))
    batches = own_rows()
    if "batches" in options:
        batches = batches[: options.pop("batches")[rank]]
    module = (Declared if fault == "a rank without the method" and rank else Counted)(fault)
    if "strategy" in given:
        # terms that are not over all ranks are refused where a rank has no rows
        module.penalty = 0.0
        module.scales.requires_grad_(False)
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, make_loader(batches))
    assert not options["limit_val_batches"] or module.validated
    return weights_of(module)


def stepped_alone(module: Counted, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The state after one process has stepped with each of these batches."""
    optimizer = module.configure_optimizers()
    for features, labels in batches:
        logits = module.layer(features)
        ce = cross_entropy(logits, labels, ignore_index=-1)
        optimizer.zero_grad()
        module.weighed(ce, logits.square().sum() / len(logits)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights_of(module)


def truth_of_windows(windows: Sequence[Sequence[int]], world: int) -> dict[str, Tensor]:
    """The state after one process has stepped with all rows of each window."""
    return stepped_alone(Counted(), [ROWS.whole(world, window) for window in windows])


WHOLE = [[0, 1], [2, 3], [4]]
# loader, options of the trainer, batches of each window
RUNS: dict[str, tuple[Callable[[Any], Any], Callable[[], dict[str, Any]], list[list[int]]]] = {
    "an uneven end": (listed, dict, WHOLE),
    "without a length": (stream, dict, WHOLE),
    "workers": (partial(stream, workers=1), dict, WHOLE),
    "one window": (stream, lambda: {"accumulate_grad_batches": 9}, [[0, 1, 2, 3, 4]]),
    "limited": (listed, lambda: {"limit_train_batches": 3}, [[0, 1], [2]]),
    "limited, without a length": (stream, lambda: {"limit_train_batches": 3}, [[0, 1], [2]]),
    "some steps": (stream, lambda: {"max_steps": 2, "accumulate_grad_batches": 3}, [[0, 1, 2], [3, 4]]),
    "one step": (stream, lambda: {"max_steps": 1}, [[0, 1]]),
    "epochs": (stream, lambda: {"max_epochs": 2}, WHOLE * 2),
    "windows that grow": (
        stream,
        lambda: {"max_epochs": 2, "callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})]},
        [*WHOLE, [0, 1, 2, 3], [4]],
    ),
    "validation inside": (listed, lambda: {"val_check_interval": 1, "limit_val_batches": 1}, WHOLE),
}


def fit_run(name: str) -> dict[str, Tensor]:
    make_loader, options, _ = RUNS[name]
    return fit(make_loader, options())


test_one_process = as_one_process(fit_run, lambda name, world: truth_of_windows(RUNS[name][2], world), RUNS, [1, 2, 3])


@pytest.mark.parametrize("make_loader", [listed, stream])
@pytest.mark.parametrize(("mode", "windows"), [("join", [[0, 1, 2], [3, 4]]), ("stop", [[0, 1, 2]])])
def test_ends_that_differ(pool: RankPool, make_loader: Any, mode: str, windows: list[list[int]]) -> None:
    """Rank 1 runs out inside the first window, or after it."""
    batches = [5, 2] if mode == "join" else [5, 3]
    options = {"batches": batches, "accumulate_grad_batches": 3, "strategy": {"uneven": mode}}
    module = Counted()
    module.penalty = 0.0
    left_out = [(i, 1) for i in range(batches[1], 5)]
    truth = stepped_alone(module, [ROWS.whole(2, window, left_out) for window in windows])
    assert_all_close(pool.run(2, fit, make_loader, options), truth)


# ---------------------------------------------------------------------- resuming


class Streamed(Streaming):  # a data set with a state, and counts
    def loss_counts(self, batch: Any) -> dict[str, int]:
        return {"loss 0": len(batch[0])}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("kind", ["data set", "with a length", "loader"])
def test_states_of_loaders_are_those_of_the_batch_that_comes_next(pool: RankPool, tmp_path: Path, kind: str) -> None:
    options = {"made": Streamed, "accumulation": "window", "accumulate_grad_batches": 2}
    kills = [(AFTER, 2), (AFTER, 4), (AFTER, 6), ("on_train_epoch_end", 4)]
    for wrong in pool.run(2, differing, kind, kills, str(tmp_path), **options):
        assert not wrong
    for wrong in pool.run(2, differing, kind, [(AFTER, 3)], str(tmp_path), again=1, **options):
        assert not wrong


class CountedLine(Line):  # a global sampler, which any number of ranks takes up
    def loss_counts(self, batch: Any) -> dict[str, int]:
        return {"line": len(batch[0])}

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        super().training_step(batch, index)
        return global_mean((self.layer(batch[1])[:, 0] - batch[0] / 9).square().sum(), len(batch[0]), name="line")


@pytest.mark.parametrize("workers", [0, 1])
def test_another_number_of_ranks_goes_on(pool: RankPool, tmp_path: Path, workers: int) -> None:
    options: dict[str, Any] = {"kind": CountedLine, "accumulation": "window", "accumulate_grad_batches": 2}
    (truth,) = pool.run(1, leg, None, "", None, workers, **options)
    seen, ranks = resumed(pool, tmp_path, [(AFTER, 2), (AFTER, 5)], workers, **options)
    batches = [sorted(batch) for of_leg in seen for batch in of_leg]
    assert batches == [sorted(batch) for batch in truth["seen"]]
    assert_all_close([rank["state"] for rank in ranks], truth["state"])


# ---------------------------------------------------------------------- what is an error


def on_rank_1(given: object, other: object) -> object:
    return other if dist.get_rank() == 1 else given


def failing(module: Counted, counts: dict[str, Any]) -> Any:
    if dist.get_rank() == 1:
        raise KeyError("mask")
    return counts


def only_once(module: Counted, counts: dict[str, Any]) -> Any:
    """Counts of one loss in the first batch, of both in the second."""
    batches = vars(module).setdefault("batches", [])
    batches.append(counts)
    return {"ce": counts["ce"]} if len(batches) == 1 else counts


FAULTS: dict[str, tuple[Callable[[Counted, dict[str, Any]], Any], list[str]]] = {
    "counts that are not so": (
        lambda module, counts: counts | {"square": counts["square"] + on_rank_1(0, 1)},
        ["count in expect_counts of", "`square`", "over all ranks and micro-batches"],
    ),
    "a negative count": (
        lambda module, counts: counts | {"ce": on_rank_1(counts["ce"], -1)},
        ["loss_counts: ", "`ce`, batch 1 of the window", "finite counts, not negative", "-1"],
    ),
    "a count that is no number": (
        lambda module, counts: counts | {"ce": on_rank_1(counts["ce"], float("nan"))},
        ["finite counts, not negative", "nan"],
    ),
    "a text": (lambda module, counts: counts | {"ce": "many"}, ["finite counts, not negative", "many"]),
    "a loss without its count": (
        lambda module, counts: {"ce": counts["ce"]},
        ["global_mean `square`: expected its count, too"],
    ),
    "a count of a loss that is not called": (
        lambda module, counts: counts | {"other": 3},
        ["count in expect_counts of", "`other`", "got 0"],
    ),
    "counts in some batches": (only_once, ["loss_counts: expected counts of the same losses in each batch"]),
    "counts on some ranks": (lambda module, counts: on_rank_1(counts, None), ["rank 1: numbers="]),
    "a rank without the method": (lambda module, counts: counts, ["ranks met at different places", "expect_counts"]),
    "a method that fails": (failing, ["KeyError", "mask"]),
}


def fail(name: str) -> None:
    fit(listed, {}, name)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_one_error_on_every_rank(pool: RankPool, name: str, world: int) -> None:
    errors = pool.errors(world, fail, name)
    if name == "a method that fails":
        assert not any(error.timed_out for error in errors)
        assert all("mask" in error.message for error in errors)
    else:
        assert_errors(errors, *FAULTS[name][1])


def fit_one_window(make: type[Counted], window: Sequence[int]) -> dict[str, Tensor]:
    module = make()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` returned `None`")
        train(module, own_rows(window), accumulate_grad_batches=len(window), limit_val_batches=0)
    return weights_of(module)


class Nothing(Counted):  # no row counts on any rank
    def loss_counts(self, batch: dict[str, Tensor]) -> int:
        return 0

    def training_step(self, batch: Any, index: int) -> Tensor:
        return global_mean(self.layer(batch[0]).sum() * 2, 0)


def test_a_window_of_zero_counts_has_zero_gradients(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit_one_window, Nothing, [0, 1]), weights_of(Counted()))


class Skipping(Counted):  # leaves out a micro-batch
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch, index) if index else None


class SkippingUncounted(Skipping):  # and counts it nowhere
    loss_counts = None  # type: ignore[assignment]

    def training_step(self, batch: Any, index: int) -> Any:
        return global_mean(self.layer(batch[0]).square().sum(), len(batch[0])) if index else None


def test_a_step_without_a_loss(pool: RankPool) -> None:
    """Lightning allows it on one rank. A batch that was counted is missed then."""
    skipping = fit_one_window, Skipping, range(3)
    assert_errors(pool.errors(2, *skipping), "returning None in distributed training", of="RuntimeError")
    assert_errors(pool.errors(1, *skipping), "count in expect_counts of", "got 5")
    module = Counted()
    module.weighed = lambda ce, square: square  # type: ignore[method-assign]
    truth = stepped_alone(module, [ROWS.whole(1, [1, 2])])
    assert_all_close(pool.run(1, fit_one_window, SkippingUncounted, range(3)), truth)


class SameMemory(Dataset[dict[str, Tensor]]):  # writes each batch into the memory of the one before
    def __init__(self) -> None:
        (self.rows,) = own_rows([0])

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.rows["features"].add_(1)
        return self.rows


def fit_same_memory() -> None:
    fit(lambda _: DataLoader(SameMemory(), batch_size=None), {})
