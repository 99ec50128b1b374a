"""``uneven="join"``: ranks that ran out go on with empty batches, and the gradients are those of one process; or the same error on all."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    DDPLossStrategy,
    GlobalBatchLoss,
    differentiable,
    global_mean,
)
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.doors import without_rows
from tests.fits import listed, make_trainer
from tests.oracle import assert_close
from tests.refusals import assert_same_error
from tests.strategies.test_uneven_ends import (
    CLASSES,
    LOADERS,
    SHORT,
    UNEVEN,
    Plan,
    Rows,
    batches_of,
    joined,
    one_process,
    part,
    train,
)


def random_plan(seed: int, world_size: int, most: int = 5) -> list[list[int]]:
    """Numbers of batches and of rows that divide nothing; each rank has one batch or more."""
    draw = random.Random(seed)
    return [[draw.randint(1, 4) for _ in range(draw.randint(1, most))] for _ in range(world_size)]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_join_trains_on_every_row_as_one_process_does(pool: RankPool, world_size: int, kind: str) -> None:
    plan: Plan = [*UNEVEN, (1,), (2, 1, 2, 1)][:world_size]
    steps = max(map(len, plan))
    options = {"max_epochs": 2, "limit_val_batches": 1}
    results = pool.run(world_size, train, Rows, partial(part, plan, kind=kind), "join", **options)
    # every row once in each epoch
    ids = [id_ for result in results for step in result["seen"] for id_ in step]
    assert sorted(ids) == sorted(2 * list(range(sum(map(sum, plan)))))
    for result in results:
        assert result["ends"] == ([False] * (steps - 1) + [True]) * 2
        assert result["validated"] == [steps, 2 * steps]
        assert_close(result["state"], one_process(plan, steps, epochs=2))


def many_fits(plans: Sequence[Plan], kinds: Sequence[str]) -> list[dict[str, Tensor]]:
    states = []
    for plan, kind in zip(plans, kinds, strict=True):
        states.append(train(Rows, partial(part, plan, kind=kind), "join")["state"])
    return states


@pytest.mark.slow
def test_join_of_many_splits(pool: RankPool) -> None:
    plans = [random_plan(seed, 3) for seed in range(24)]
    by_rank = pool.run(3, many_fits, plans, ["known", "unknown"] * 12)
    for number, plan in enumerate(plans):
        truth = one_process(plan, max(map(len, plan)))
        for states in by_rank:
            assert_close(states[number], truth)


class Twins(Rows):  # two towers, from halves of the embeddings
    def __init__(self) -> None:
        super().__init__(ClipLoss().double())

    def training_step(self, batch: Any, index: int) -> Tensor:
        embeddings = self.encoder(batch[1])
        return self.loss(embeddings[:, :2], embeddings[:, 2:])


class Totals(Rows):  # a formula of the user's own, beside a regulariser without rows
    def training_step(self, batch: Any, index: int) -> Tensor:
        errors = self.encoder(batch[1]).square().sum(1)
        weight = self.encoder[0].weight
        return global_mean(errors.sum(), len(errors)) + global_mean(weight.square().sum(), 1, name="weight")


class Metric(Rows):
    def __init__(self) -> None:
        super().__init__(differentiable(MeanSquaredError)())

    def training_step(self, batch: Any, index: int) -> Tensor:
        embeddings = self.encoder(batch[1])
        return self.loss(embeddings[:, :2].contiguous(), embeddings[:, 2:].contiguous())


class Normed(Rows):  # batch norm, which Lightning synchronises
    def __init__(self) -> None:
        super().__init__()
        self.encoder.insert(1, nn.BatchNorm1d(5, dtype=torch.float64))


def pml_loss(name: str, *, is_global: bool = True) -> nn.Module:
    torch.manual_seed(2)
    has_classes = name in ("ArcFaceLoss", "ProxyAnchorLoss")
    options = {"num_classes": CLASSES, "embedding_size": CLASSES} if has_classes else {}
    loss: nn.Module = getattr(pml, name)(**options).double()
    return GlobalBatchLoss(loss) if is_global else loss


def sharded_arcface() -> nn.Module:
    return ClassShardedLoss(pml_loss("ArcFaceLoss", is_global=False))


@pytest.mark.parametrize("name", ["ArcFaceLoss", "NTXentLoss", "ProxyAnchorLoss"])
def test_join_with_losses_over_all_rows(pool: RankPool, name: str) -> None:
    results = pool.run(2, train, partial(rows_with, partial(pml_loss, name)), partial(part, SHORT), "join")
    truth = one_process(SHORT, 4, loss=pml_loss(name, is_global=False))
    assert_states(results, truth)


def rows_with(make_loss: Callable[[], nn.Module]) -> Rows:
    return Rows(make_loss())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Twins, {}),
        (Totals, {}),
        (Metric, {}),
        (partial(rows_with, sharded_arcface), {}),
        (Normed, {"sync_batchnorm": True}),
    ],
    ids=["twins", "totals", "metric", "shards", "synchronised batch norm"],
)
def test_join_with_other_values_over_all_rows(
    pool: RankPool, make: Callable[[], Rows], options: dict[str, Any]
) -> None:
    """The one rank of a world of one has each step's rows together."""
    (truth,) = pool.run(1, train, make, whole_steps, distributed=True)
    results = pool.run(2, train, make, partial(part, SHORT), "join", **options)
    whole_weight = truth["state"].pop("loss.W", None)
    if whole_weight is not None:  # of which each rank holds its classes
        assert_close({"W": torch.cat([result["state"].pop("loss.W") for result in results], 1)}, {"W": whole_weight})
    assert_states(results, truth["state"])


def assert_states(results: Sequence[dict[str, Any]], truth: dict[str, Tensor]) -> None:
    assert_all_close([result["state"] for result in results], truth)


def whole_steps(rank: int) -> Any:
    return listed(joined(SHORT))


@pytest.mark.parametrize("accumulation", ["mean", "window"])
@pytest.mark.parametrize("kind", LOADERS)
def test_join_of_accumulation_windows_that_end_early(pool: RankPool, kind: str, accumulation: str) -> None:
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "strategy": {"accumulation": accumulation}}
    results = pool.run(2, train, Rows, partial(part, UNEVEN, kind=kind), "join", **options)
    truth = one_process(UNEVEN, 5, epochs=2, window=2, whole_window=accumulation == "window")
    assert [result["steps"] for result in results] == [6, 6]
    assert_states(results, truth)


@pytest.mark.parametrize("options", [{"val_check_interval": 2}, {"val_check_interval": 0.4}], ids=str)
def test_join_validates_on_every_rank_at_the_same_batch(pool: RankPool, options: dict[str, Any]) -> None:
    results = pool.run(2, train, Rows, partial(part, UNEVEN), "join", limit_val_batches=1, **options)
    assert [result["validated"] for result in results] == [[2, 4]] * 2


ALIKE: dict[str, tuple[Plan, dict[str, Any], dict[str, int]]] = {
    "under all checks": (SHORT, {"checks": True, "max_epochs": 2}, {"steps": 4, "epochs": 2}),
    # a fraction is one of the longest rank's batches, as of one process's
    "4 batches": (UNEVEN, {"limit_train_batches": 4}, {"steps": 4}),
    "a fraction": (UNEVEN, {"limit_train_batches": 0.6}, {"steps": 3}),
    "new loaders": (UNEVEN, {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}, {"steps": 5, "epochs": 2}),
    "a worker": (UNEVEN, {}, {"steps": 5}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "a worker")) for name in ALIKE]
)
def test_join_with_options_of_the_trainer(pool: RankPool, name: str) -> None:
    plan, options, truth = ALIKE[name]
    load = partial(part, plan, kind="worker" if name == "a worker" else "known")
    for result in pool.run(2, train, Rows, load, "join", **options):
        assert result["batches"] == truth["steps"] or name == "a worker"
        assert_close(result["state"], one_process(plan, **truth))


class AllowsNone(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True


@pytest.mark.filterwarnings("ignore:Total length of")
@pytest.mark.parametrize("kind", LOADERS)
def test_join_with_a_rank_that_has_no_batch_at_all(pool: RankPool, kind: str) -> None:
    plan: Plan = [(4, 3), (), (2,)]
    assert_states(pool.run(3, train, AllowsNone, partial(part, plan, kind=kind), "join"), one_process(plan, 2))


class Several(Rows):  # two loaders, of different lengths on each rank; it notes which of them had a batch
    seen: list[Any]

    def training_step(self, batch: Any, index: int) -> Tensor:
        value = torch.zeros((), dtype=torch.float64)
        for name in ("a", "b"):
            if batch[name] is not None:
                _, features, labels = batch[name]
                value = value + self.loss(self.encoder(features), labels)
        self.seen.append([name for name in ("a", "b") if batch[name] is not None])
        return value


def several(mode: str, kind: str, rank: int) -> Any:
    plans: dict[str, Plan] = {"a": [(2, 2, 1), (3,)], "b": [(2, 1), (2, 2, 2, 1, 1)]}
    return CombinedLoader({name: part(plan, rank, kind) for name, plan in plans.items()}, mode)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        ("max_size_cycle", {"join": 5, "stop": 2}),
        ("min_size", {"join": 3, "stop": 1}),
        ("max_size", {"join": 5, "stop": 2}),
    ],
)
@pytest.mark.parametrize("uneven", ["join", "stop"])
def test_combined_loaders(pool: RankPool, uneven: str, mode: str, steps: dict[str, int], kind: str) -> None:
    results = pool.run(2, train, Several, partial(several, mode, kind), uneven)
    assert len(results[0]["seen"]) == steps[uneven]
    assert results[0]["seen"] == results[1]["seen"]
    assert_close(results[0]["state"], results[1]["state"])


class SavesAfterFour(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(self.path)


def resumed(path: str) -> list[list[list[int]]]:
    """What this rank sees in a fit that saves after four batches, and in one that goes on there."""
    legs = []
    for callbacks, load in (([SavesAfterFour(path)], None), ([], path)):
        module = Rows()
        trainer = make_trainer(DDPLossStrategy(uneven="join"), limit_val_batches=0, callbacks=callbacks)
        trainer.fit(module, part(UNEVEN, dist.get_rank()), ckpt_path=load)
        legs.append(module.seen)
    return legs


@pytest.mark.filterwarnings("ignore:.*not resumable")
def test_join_resumes_inside_an_epoch_after_a_rank_ran_out(pool: RankPool, tmp_path: Path) -> None:
    """The loaders keep no place: as in one process, the fifth batch is the loader's first."""
    longest, shorter = pool.run(2, resumed, str(tmp_path / "four.ckpt"))
    assert [len(seen) for seen in longest] == [5, 1]
    assert shorter[0][3:] == [[], []]
    assert shorter[1] == [[]]


class LocalMean(Rows):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.encoder(batch[1]), batch[2])


class SomeLocal(Rows):  # looks global where there are no rows
    def training_step(self, batch: Any, index: int) -> Tensor:
        embeddings = self.encoder(batch[1])
        value = self.loss(embeddings, batch[2])
        return value + embeddings.square().mean() if len(embeddings) else value


class ByLargest(nn.Module):  # divides by the largest entry of a column. Without rows there is none
    def forward(self, rows: Tensor) -> Tensor:
        return rows / rows.max(0).values


class LargestOfBatch(Rows):  # the same in the step itself
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step([batch[0], batch[1] / batch[1].max(), batch[2]], index)


class OfHelper(Rows):  # the same in a function that knows no module
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step([batch[0], by_largest(batch), batch[2]], index)


def by_largest(batch: Any) -> Tensor:
    return batch[1] / max(row.max() for row in batch[1])


class Scaled(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.append(ByLargest())


@pytest.mark.parametrize("check_calls", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (LocalMean, ("losses over the rows of all ranks", "NllLoss", "which reaches `encoder", "global_mean")),
        # a loss that the strategy knows, and looks at itself
        (partial(rows_with, nn.CrossEntropyLoss), ("CrossEntropyLoss", "empty", "rank 1")),
        (SomeLocal, ("losses over the rows of all ranks", "rank 0: ", "MeanBackward", "rank 1: nothing else")),
        (Normed, ("norms over the rows of all ranks", "`encoder.1` (BatchNorm1d)", "sync_batchnorm")),
        (Scaled, ("uneven='join': a batch of 0 rows", "IndexError in `encoder.3` (ByLargest)")),
        (
            LargestOfBatch,
            ("uneven='join': a batch of 0 rows", "RuntimeError in training_step", "The batch of rank 1 has 0 rows"),
        ),
        (
            OfHelper,
            ("uneven='join': a batch of 0 rows", "ValueError in training_step", "The batch of rank 1 has 0 rows"),
        ),
    ],
    ids=[
        *("local mean", "local loss", "local on some", "batch norm", "a module that cannot take 0 rows"),
        *("a step that cannot take 0 rows", "a function that cannot take 0 rows"),
    ],
)
def test_join_refuses_what_is_of_one_rank(
    pool: RankPool, make: Callable[[], Rows], words: Sequence[str], kind: str, check_calls: bool
) -> None:
    options: dict[str, Any] = {"strategy": {"check_calls": check_calls}}
    plan = [(3, 3, 3), (3,)]
    assert_same_error(pool.errors(2, train, make, partial(part, plan, kind=kind), "join", **options), *words)


def numbered(rank: int) -> Any:
    batches = batches_of(UNEVEN)[rank]
    return listed([{"rows": batch, "number": 3} for batch in batches])


class Numbered(Rows):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch["rows"], index)


def test_join_refuses_a_batch_without_rows_by_name(pool: RankPool) -> None:
    assert_same_error(pool.errors(2, train, Numbered, numbered, "join"), "batch['number']", "got 3 (int)")


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


class Pair(NamedTuple):
    x: Tensor
    y: Any


def test_an_empty_batch_keeps_its_structure() -> None:
    x = torch.ones(4, 3, dtype=torch.float16)
    batch = {
        "pair": Pair(x, [x, None]),
        "sample": Sample(x, "train"),
        "texts": ["a", "b", "c", "d"],
        "array": np.ones((4, 2)),
        "flag": True,
        "tuple": (x, x.long()),
    }
    empty = without_rows(batch)
    assert list(empty) == list(batch)
    assert type(empty["pair"]) is Pair
    assert empty["pair"].x.shape == (0, 3)
    assert empty["pair"].x.dtype == torch.float16
    assert empty["pair"].y[1] is None
    assert empty["sample"].x.shape == (0, 3)
    assert empty["sample"].name == "train"
    assert empty["texts"] == []
    assert empty["array"].shape == (0, 2)
    assert empty["flag"] is True
    assert empty["tuple"][1].dtype == torch.int64
    assert x.untyped_storage().data_ptr() != empty["pair"].x.untyped_storage().data_ptr()
    assert batch["texts"] == ["a", "b", "c", "d"]
    assert batch["pair"].x is x


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((torch.ones(3), 2), "batch[1]"),
        ({"x": torch.ones(3), "scale": torch.tensor(1.0)}, "batch['scale']"),
        ((torch.ones(3), torch.ones(2)), "batch[0]: 3, batch[1]: 2"),
        ("text", "no tensor in a str"),
        ((torch.ones(3), object()), "batch[1]"),
        ((torch.ones(3), torch.ones(3, 2).to_sparse()), "not dense"),
        (nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]), "PackedSequence"),
    ],
    ids=["number", "0-dim", "lengths", "text", "object", "sparse", "packed"],
)
def test_what_has_no_rows_is_refused_by_name(batch: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        without_rows(batch)
