"""Data sets and loaders with a state of their own: a fit that is killed and resumed sees the batches of one that was not, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses import global_mean
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.doors import LOADER_STATES
from tests.strategies.test_resuming import AFTER, Line, X, train

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")

ROWS = 8  # of a rank, and one more of each after the first where ranks differ


class Rows(IterableDataset[Any]):
    """This rank's rows in an order of each epoch, from the place that was loaded; the place is set back when the next epoch begins."""

    def __init__(self, uneven: bool = False) -> None:
        W, rank = dist.get_world_size(), dist.get_rank()
        self.rows = torch.arange(rank, W * (ROWS + uneven * rank), W).tolist()
        self.epoch, self.place, self.resumes = -1, 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place, self.resumes = state["epoch"], state["place"], True

    def __iter__(self) -> Iterator[Any]:
        if not self.resumes:
            self.epoch, self.place = self.epoch + 1, 0
        self.resumes = False
        while self.place < len(self.rows):
            self.place += 1
            yield self.row()

    def row(self) -> tuple[Tensor, Tensor]:
        turned = self.rows[(self.place * 3 + self.epoch) % len(self.rows)]
        return torch.tensor(turned), X[turned]


class SetBackAtItsEnd(Rows):
    """As many data sets have it: after the last row the place is that of the next epoch's first."""

    def __iter__(self) -> Iterator[Any]:
        self.epoch = max(self.epoch, 0)
        while self.place < len(self.rows):
            self.place += 1
            yield self.row()
        self.epoch, self.place = self.epoch + 1, 0


class Sized(Rows):
    def __len__(self) -> int:
        return len(self.rows)


class OwnLoader:  # makes its batches itself
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.state_dict, self.load_state_dict = rows.state_dict, rows.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.rows)
        for row in rows:
            yield [torch.stack(parts) for parts in zip(row, next(rows), strict=True)]


class Two(DataLoader[Any]):
    def __init__(self, rows: Rows, **options: Any) -> None:
        super().__init__(rows, batch_size=2, **options)


def two_lengths() -> CombinedLoader:
    short = Sized()
    short.rows = short.rows[:4]
    return CombinedLoader([Two(Sized()), Two(short)], "max_size_cycle")


KINDS: dict[str, Any] = {
    "data set": lambda: Two(Rows()),
    "set back at its end": lambda: Two(SetBackAtItsEnd()),
    "with a length": lambda: Two(Sized()),
    "loader": lambda: OwnLoader(Rows()),
    "uneven": lambda: Two(Rows(uneven=True)),
    "uneven, set back": lambda: Two(SetBackAtItsEnd(uneven=True)),
    "two loaders": two_lengths,
    "workers": lambda: Two(Rows(), num_workers=1),
    "fails to load": lambda: Two(FailsToLoad()),
    "fewer loaders": lambda: [Two(Rows()), Two(Rows())],
}


class Streaming(Line):  # a loss over the rows of all ranks, so that batches of 0 rows are exact
    kind = "data set"

    def train_dataloader(self) -> Any:
        return KINDS[self.kind]()

    def training_step(self, batch: Any, index: int) -> Tensor:
        parts = [batch] if isinstance(batch[0], Tensor) else batch
        self.seen.append([part[0].tolist() for part in parts])
        losses = [(self.layer(x)[:, 0] - ids / 50).square() for ids, x in parts]
        return sum(global_mean(loss.sum(), len(loss), name=f"loss {i}") for i, loss in enumerate(losses))


def fit(
    kind: str,
    kill: Any,
    save: str,
    load: str | None,
    *,
    uneven: Any = "error",
    accumulation: Any = "mean",
    made: type[Streaming] = Streaming,
    **options: Any,
) -> Streaming:
    module = made(dist.get_world_size())
    module.kind = kind
    train(module, kill, save, load, strategy={"uneven": uneven, "accumulation": accumulation}, **options)
    return module


def differing(kind: str, kills: list[tuple[str, int]], folder: str, again: int = 0, **options: Any) -> list[Any]:
    """The kills after which a run does not go on as one that was not killed; `again` batches of a window are trained on twice."""
    whole = fit(kind, None, "", None, **options)
    wrong = []
    for number, kill in enumerate(kills):
        save = f"{folder}/{number}.ckpt"
        first = fit(kind, kill, save, None, **options)
        second = fit(kind, None, "", save, **options)
        trained = len(whole.seen) - len(second.seen)
        is_in_place = kill[0] in ("on_train_epoch_end", "on_train_epoch_start") or trained == kill[1] - again
        same = is_in_place and first.seen[:trained] + second.seen == whole.seen
        if not same or not torch.equal(second.layer.weight, whole.layer.weight):
            wrong.append((kill, whole.seen, first.seen, second.seen))
    return wrong


ENDS = [("on_train_epoch_end", 4), ("on_train_epoch_start", 4)]
KILLS = [(AFTER, 1), (AFTER, 2), (AFTER, 4), (AFTER, 7), *ENDS]


# each kind on two ranks, and by turns on one or three: a rank's state is its own
@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        *((kind, 2) for kind in ("data set", "set back at its end", "with a length", "loader")),
        *(("data set", 3), ("set back at its end", 1)),
        pytest.param("with a length", 3, marks=pytest.mark.slow),
        pytest.param("loader", 1, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_undisturbed_one(pool: RankPool, tmp_path: Path, world_size: int, kind: str) -> None:
    kills = KILLS if world_size == 2 else KILLS[1::2]
    for wrong in pool.run(world_size, differing, kind, kills, str(tmp_path)):
        assert not wrong


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("uneven", "stop"), ("uneven, set back", "join"), pytest.param("uneven", "join", marks=pytest.mark.slow)],
)
def test_ranks_that_have_run_out_stay_so(pool: RankPool, tmp_path: Path, kind: str, mode: str) -> None:
    """Of 4, 5 and 5 batches the last ones are those of some ranks only."""
    kills = [(AFTER, 2), (AFTER, 4), ("on_train_epoch_end", 4)]
    for wrong in pool.run(3, differing, kind, kills, str(tmp_path), uneven=mode):
        assert not wrong


def test_two_loaders_of_which_one_begins_again(pool: RankPool, tmp_path: Path) -> None:
    kills = [(AFTER, 1), (AFTER, 3), (AFTER, 4)]
    assert pool.run(2, differing, "two loaders", kills, str(tmp_path)) == [[], []]


def test_what_was_fetched_and_not_trained_on_comes_again(pool: RankPool, tmp_path: Path) -> None:
    """Before a step, and inside an accumulation window, whose gradients are in no checkpoint."""
    kills = [("on_train_batch_start", 2)]
    for wrong in pool.run(2, differing, "data set", kills, str(tmp_path)):
        assert not wrong
    for kind in ("data set", "with a length"):
        options = {"again": 1, "accumulate_grad_batches": 2}
        assert pool.run(2, differing, kind, [(AFTER, 3)], str(tmp_path), **options) == [[], []]


def saved(kind: str, kill: Any, path: str) -> None:
    fit(kind, kill, path, None)


@pytest.fixture(scope="module")
def half(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks from the middle of an epoch."""
    path = str(tmp_path_factory.mktemp("half") / "half.ckpt")
    pool.run(2, saved, "data set", (AFTER, 2), path)
    return path


def resumed(kind: str, path: str) -> list[Any]:
    return fit(kind, None, "", path).seen


def test_a_checkpoint_holds_the_state_of_each_rank(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    pool.run(2, saved, "uneven", (AFTER, 2), path)
    states = torch.load(path, weights_only=True)[LOADER_STATES]
    assert states["batches"] == 2
    assert states["states"] == [[{"epoch": 0, "place": 4}]] * 2


@pytest.mark.parametrize(
    ("kind", "world_size", "text"),
    [
        ("data set", 3, "resumed in the middle of an epoch: expected 2 ranks, whose states were saved, got 3"),
        (
            "workers",
            2,
            "Rows, resumed in the middle of an epoch: expected its state in this process, got its copies in 1 workers",
        ),
        ("fewer loaders", 2, "resumed in the middle of an epoch: expected 1, as saved, got 2"),
    ],
)
def test_states_that_cannot_be_put_back_are_refused_on_all_ranks(
    pool: RankPool, half: str, kind: str, world_size: int, text: str
) -> None:
    errors = pool.errors(world_size, warned, resumed, kind, half)
    assert {error.type for error in errors} == {"InputError"}
    assert_errors(errors, text)


def warned(job: Any, *args: Any, **options: Any) -> list[str]:
    """What a job warns of; it may."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job(*args, **options)
    return [str(warning.message) for warning in caught if "training" in str(warning.message)]


def test_between_epochs_another_number_of_ranks_is_said(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    pool.run(2, saved, "data set", ("on_train_epoch_end", 4), path)
    said = pool.run(3, warned, resumed, "data set", path)
    assert "on 2 ranks, and there are 3: they begin the next epoch as they are made" in said[0][0]
    assert said[1:] == [[], []]


def test_a_state_in_workers_is_said(pool: RankPool) -> None:
    said = pool.run(2, warned, fit, "workers", None, "", None, max_epochs=1)
    assert "The state_dict of Rows is in 1 workers and not in checkpoints" in said[0][0]


class FailsToLoad(Rows):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such shard")


def test_a_data_set_that_cannot_load_ends_all_ranks(pool: RankPool, half: str) -> None:
    errors = pool.errors(2, resumed, "fails to load", half)
    assert [error.type for error in errors] == ["PeerError", "OSError"]
    assert "no such shard" in errors[0].message
