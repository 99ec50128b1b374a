"""A fit that is killed goes on, on another number of ranks, with the batches and parameters of one process that was never killed."""

from __future__ import annotations

import contextlib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.fits import make_trainer
from tests.oracle import assert_close
from tests.samplers.cases import seed_all
from tests.samplers.test_global_batch import together

ROWS, G, SEED, EPOCHS = 52, 12, 3, 3
BATCHES = 5  # of an epoch; the last has 4 rows, which 3 ranks share unevenly
X = torch.sin(torch.arange(3.0 * ROWS, dtype=torch.float64)).reshape(ROWS, 3)


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS), X)


class Line(LightningModule):  # a sum over rows with a fixed divisor: its gradient is that of one process for any cut
    asks_for_steps = False

    def __init__(self, ranks: int, workers: int = 0, size: int = G) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 1).double()
        self.ranks, self.workers, self.size = ranks, workers, size
        self.seen: list[list[int]] = []
        self.validated = 0

    def train_dataloader(self) -> DataLoader:
        if self.size == 0:
            return DataLoader(rows(), batch_size=4)
        sampler = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), self.size, seed=SEED)
        return DataLoader(rows(), batch_sampler=sampler, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(rows(), batch_size=ROWS)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return (self.layer(batch[1])[:, 0] - batch[0] / ROWS).square().sum() * self.ranks / G

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:  # as for a schedule: Lightning makes the loaders before it loads the checkpoint
            assert self.trainer.estimated_stepping_batches == EPOCHS * BATCHES
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Killed(Exception):
    pass


class Kill(Callback):  # saves and ends the run in a hook, when so many batches have begun in this run
    def __init__(self, hook: str, batches: int, path: str) -> None:
        self.batches, self.path = batches, path
        setattr(self, hook, self.kill)

    def kill(self, trainer: Any, module: Any, *args: Any) -> None:
        if len(module.seen) >= self.batches:
            trainer.save_checkpoint(self.path)
            raise Killed


def train(module: Line, kill: tuple[str, int] | None, save: str, load: str | None, **options: Any) -> Trainer:
    """Train from a checkpoint on until the end or until the run is killed, and save then.

    Args:
        module: Anything that notes in ``seen`` what it trains on.
        kill: Hook and number of batches; None for the end.
        save: Path of the checkpoint; empty to save none at the end.
        load: Path of the checkpoint that is resumed; None to begin.
        options: Of the trainer, and ``strategy``, those of ``DDPLossStrategy``.
    """
    strategy, callbacks = options.pop("strategy", {}), [] if kill is None else [Kill(*kill, save)]
    options = {"max_epochs": EPOCHS, "callbacks": callbacks, "limit_val_batches": 0} | options
    trainer = make_trainer(DDPLossStrategy(**strategy), **options)
    with contextlib.suppress(Killed):
        trainer.fit(module, ckpt_path=load)
        if save and kill is None:
            trainer.save_checkpoint(save)
    return trainer


def leg(
    kill: tuple[str, int] | None,
    save: str,
    load: str | None,
    workers: int,
    *,
    size: int = G,
    adopt: bool = False,
    accumulation: Any = "mean",
    kind: type[Line] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train on this number of ranks until the end, or until it is killed."""
    module = (kind or Line)(dist.get_world_size(), workers, size)
    module.asks_for_steps = adopt
    trainer = train(module, kill, save, load, strategy={"adopt": adopt, "accumulation": accumulation}, **options)
    return {"seen": module.seen, "state": dict(module.state_dict()), "steps": trainer.global_step}


def by_hand(batches: list[list[int]], window: int = 1) -> dict[str, Tensor]:
    """The parameters of a plain loop over these batches."""
    module = Line(1)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        (module.training_step([torch.tensor(batch), X[batch]], 0) / window).backward()
        number = index % BATCHES + 1
        if number % window == 0 or number == BATCHES:
            optimizer.step()
            optimizer.zero_grad()
    return dict(module.state_dict())


def one_process(batches: int, window: int = 1, epochs: int = EPOCHS) -> tuple[list[list[int]], dict[str, Tensor]]:
    """So many batches and the parameters of a plain loop."""
    seen: list[list[int]] = []
    for epoch in range(epochs):
        sampler = RandomSampler(range(ROWS))
        seed_all(SEED + epoch, sampler)
        seen += BatchSampler(sampler, G, drop_last=False)
    return seen[:batches], by_hand(seen[:batches], window)


def resumed(
    pool: RankPool, folder: Path, kills: list[tuple[str, int]], workers: int = 0, **options: Any
) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """The global batches of each leg (2, 3, then 1 ranks), and what the last one ended with."""
    load, seen = None, []
    places: list[tuple[str, int] | None] = [*kills, None]
    ranks: list[dict[str, Any]] = []
    for number, (world_size, kill) in enumerate(zip([2, 3, 1], places, strict=False)):
        save = str(folder / f"{number}.ckpt")
        ranks = pool.run(world_size, leg, kill, save, load, workers, **options)
        seen += together([[rank["seen"]] for rank in ranks])
        load = save
    return seen, ranks


AFTER = "on_train_batch_end"


STEPS, LONG = 20, 5  # steps to be killed after, and epochs that have more of them


def leg_for_each_step(number: int, folder: str) -> list[dict[str, Any]]:
    """One leg of the runs that are killed after 1, 2, ... 20 steps, all in one task; the second leg trains on 4 batches."""
    replies = []
    for step in range(1, STEPS + 1):
        kills = [(AFTER, step), (AFTER, 4), None]
        load = f"{folder}/{step}.{number - 1}.ckpt" if number else None
        save = f"{folder}/{step}.{number}.ckpt"
        replies.append(leg(kills[number], save, load, 0, max_epochs=LONG))
    return replies


@pytest.mark.slow
def test_killed_after_any_of_20_steps(pool: RankPool, tmp_path: Path) -> None:
    """On 2 ranks; resumed on 3, killed again, and resumed on 1."""
    seen: list[list[list[int]]] = [[] for _ in range(STEPS)]
    ends: list[dict[str, Any]] = []
    for number, world_size in enumerate([2, 3, 1]):
        ranks = pool.run(world_size, leg_for_each_step, number, str(tmp_path), seconds=120.0)
        for step in range(STEPS):
            seen[step] += together([[rank[step]["seen"]] for rank in ranks])[0]
        ends = ranks[0]
    batches, state = one_process(LONG * BATCHES, epochs=LONG)
    for step in range(STEPS):
        assert seen[step] == batches
        assert_close(ends[step]["state"], state)
        assert ends[step]["steps"] == LONG * BATCHES


WAYS: dict[str, tuple[list[tuple[str, int]], dict[str, Any]]] = {
    "before the last batch": ([("on_train_batch_start", 4), ("on_train_batch_start", 1)], {}),
    "in validation": (
        [("on_validation_end", 5), ("on_validation_end", 2)],
        {"limit_val_batches": 1, "val_check_interval": 2},
    ),
    "in validation at the end": ([("on_validation_end", 5), ("on_validation_end", 5)], {"limit_val_batches": 1}),
    "at the end of an epoch": ([("on_train_epoch_end", 5), ("on_train_epoch_end", 5)], {}),
    "at the end of an epoch, counting steps": (
        [("on_train_epoch_end", 5), ("on_train_epoch_end", 5)],
        {"max_steps": EPOCHS * BATCHES},
    ),
    "counting steps": ([(AFTER, 5), (AFTER, 3)], {"max_steps": EPOCHS * BATCHES}),
    "loaders made before the checkpoint is loaded": ([(AFTER, 7), (AFTER, 2)], {"adopt": True}),
    "at the start of an epoch": ([("on_train_epoch_start", 5), (AFTER, 1)], {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_killed_elsewhere(pool: RankPool, tmp_path: Path, way: str) -> None:
    kills, options = WAYS[way]
    seen, ranks = resumed(pool, tmp_path, kills, **options)
    batches, state = one_process(EPOCHS * BATCHES)
    assert list(chain(*seen)) == batches
    for rank in ranks:
        assert_close(rank["state"], state)


@pytest.mark.slow
def test_rows_that_workers_had_drawn(pool: RankPool, tmp_path: Path) -> None:
    """They read ahead when the first run is saved, and before Lightning says the epoch when the second begins."""
    seen, _ = resumed(pool, tmp_path, [(AFTER, 6)], workers=1, max_epochs=2)
    assert list(chain(*seen)) == one_process(2 * BATCHES)[0]


def until_steps(pool: RankPool, folder: Path, **options: Any) -> list[list[int]]:
    """Stopped by max_steps in an epoch; resumed with more of them, or with epochs."""
    save = str(folder / "stopped.ckpt")
    first = pool.run(2, leg, None, save, None, 0, max_epochs=None, max_steps=7)
    second = pool.run(3, leg, None, str(folder / "end.ckpt"), save, 0, **options)
    return list(chain(*(together([[rank["seen"]] for rank in ranks])[0] for ranks in (first, second))))


@pytest.mark.parametrize("options", [{"max_steps": 15}, {"max_epochs": 3}], ids=["steps", "epochs"])
def test_stopped_by_max_steps(pool: RankPool, tmp_path: Path, options: dict[str, Any]) -> None:
    assert until_steps(pool, tmp_path, **options) == one_process(EPOCHS * BATCHES)[0]


@pytest.mark.parametrize("step", [1, 3, 4, 5])
def test_a_window_begins_again(pool: RankPool, tmp_path: Path, step: int) -> None:
    """The gradients of its first micro-batches are in no checkpoint."""
    seen, ranks = resumed(pool, tmp_path, [(AFTER, step), (AFTER, 3)], accumulate_grad_batches=2)
    batches, state = one_process(EPOCHS * BATCHES, window=2)
    for rank in ranks:
        assert_close(rank["state"], state)
        assert rank["steps"] == 3 * EPOCHS
    # only what the window had is trained on again
    place = 0
    for run in seen:
        assert run == batches[place : place + len(run)]
        trained = place + len(run)
        in_epoch = trained % BATCHES
        place = trained - in_epoch % 2


class Resumable(DataLoader[Any]):  # a loader that skips batches by itself, as torchdata's does
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it would skip batches a second time")


class Other(Line):  # another sampler or loader than that of ``Line``
    rows, seed, loader = ROWS, SEED, DataLoader

    def train_dataloader(self) -> DataLoader:
        sampler = GlobalBatchSampler.batches(RandomSampler(range(self.rows)), G, seed=self.seed)
        return self.loader(TensorDataset(torch.arange(self.rows), torch.ones(self.rows, 3)), batch_sampler=sampler)


class OtherSeed(Other):
    seed = SEED + 1


class Grown(Other):
    rows = ROWS + 1


class SkipsTwice(Other):
    loader = Resumable


SKIPS = "Resumable around GlobalBatchSampler, resumed under DDPLossStrategy: expected torch's DataLoader"
OTHERS: list[tuple[int, dict[str, Any], str]] = [
    (2, {"size": 6}, "global batch size: expected 12, as saved, got 6"),
    (2, {"size": 0}, "2 batches into epoch 0: expected 1 training loaders with a GlobalBatchSampler, got 0"),
    (3, {"kind": OtherSeed}, f"seed: expected {SEED}, got {SEED + 1}"),
    (3, {"kind": Grown}, f"length: expected {ROWS}, as saved, got {ROWS + 1}"),
    (2, {"kind": SkipsTwice}, SKIPS),
]


def test_another_sampler_is_refused_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    save = str(tmp_path / "half.ckpt")
    pool.run(2, leg, (AFTER, 2), save, None, 0)
    for world_size, options, text in OTHERS:
        assert_errors(pool.errors(world_size, leg, None, "", save, 0, **options), text, of="InputError")
    # nothing is lost: the checkpoint resumes if the sampler is the saved one
    replies = pool.run(3, leg, None, str(tmp_path / "end.ckpt"), save, 0)
    assert together([[reply["seen"]] for reply in replies])[0] == one_process(EPOCHS * BATCHES)[0][2:]


class Two(Line):  # trains on two loaders, of 5 and of 3 batches
    mode: Any = "max_size_cycle"

    def train_dataloader(self) -> Any:
        shuffled = GlobalBatchSampler.shuffled(20, 8, seed=SEED)
        short = DataLoader(TensorDataset(torch.arange(20)), batch_sampler=shuffled)
        return CombinedLoader([super().train_dataloader(), short], self.mode)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append([part[0].tolist() for part in batch])
        return self.layer(X[:1]).sum()


def two_loaders(mode: str, batches: int, folder: str) -> list[bool]:
    """Whether runs that are killed after each number of batches see what one does that is not."""
    kept = []
    whole: list[Any] = []
    for kill in range(batches + 1):
        seen: list[Any] = []
        for number, load in enumerate([None, f"{folder}/two.ckpt"][: 1 + (kill > 0)]):
            module = Two(dist.get_world_size())
            module.mode = mode
            place = ("on_train_batch_end", kill) if kill and not number else None
            train(module, place, f"{folder}/two.ckpt" if place else "", load, max_epochs=2)
            seen += module.seen
        whole = whole or seen
        kept.append(seen == whole)
    return kept


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_each_of_two_loaders_goes_on(pool: RankPool, tmp_path: Path, mode: str) -> None:
    for kept in pool.run(2, two_loaders, mode, 5, str(tmp_path)):
        assert all(kept), kept


class ReadsAhead(DataLoader[Any]):
    """Asks for all indices of an epoch when an iterator is made, as workers do whose number times what each reads ahead is as large."""

    def __iter__(self) -> Any:
        torch.empty((), dtype=torch.int64).random_()  # the seed of the workers
        batches = list(self.batch_sampler)
        return (self.collate_fn([self.dataset[row] for row in batch]) for batch in batches)


class FewBatches(Line):  # each form of a global sampler, read ahead to the end of an epoch
    form = ""

    def train_dataloader(self) -> Any:
        if self.form == "option":
            return ReadsAhead(rows(), batch_size=G // self.ranks, shuffle=True)
        sampler = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), G, seed=SEED)
        if self.form == "shuffled":
            sampler = GlobalBatchSampler.shuffled(ROWS, G, seed=SEED)
        return ReadsAhead(rows(), batch_sampler=sampler)


def resumes_after(steps: int, form: str, folder: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """What a run sees that stops after some steps and goes on, and what one does that does not stop."""
    seen = []
    for number, limit in enumerate([steps, -1, -1]):
        module = FewBatches(dist.get_world_size())
        module.form = form
        given = {"strategy": {"use_global_sampler": form == "option"}, "use_distributed_sampler": True} | options
        save, load = f"{folder}/{form}{steps}.ckpt", f"{folder}/{form}{steps}.ckpt" if number == 1 else None
        train(module, None, save if not number else "", load, max_steps=limit, **given)
        seen.append(module.seen)
    return seen[0] + seen[1], seen[2]


@pytest.mark.parametrize("form", ["shuffled", "batches", "option"])
def test_indices_that_workers_read_ahead_end_no_epoch(pool: RankPool, tmp_path: Path, form: str) -> None:
    for world_size in (1, 2):
        for steps in (BATCHES - 1, BATCHES, 2 * BATCHES):
            for seen, whole in pool.run(world_size, resumes_after, steps, form, str(tmp_path)):
                assert seen == whole


def test_loaders_made_anew_and_read_ahead_begin_their_epoch(pool: RankPool, tmp_path: Path) -> None:
    once = pool.run(2, resumes_after, BATCHES, "shuffled", str(tmp_path))
    anew = pool.run(2, resumes_after, BATCHES, "shuffled", str(tmp_path), reload_dataloaders_every_n_epochs=1)
    assert anew == once


class Shuffled(Line):  # Lightning puts in its `DistributedSampler`
    def train_dataloader(self) -> DataLoader:
        return (ReadsAhead if self.workers else DataLoader)(rows(), batch_size=4, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.02)


@pytest.mark.parametrize("early", [False, True], ids=["", "loaders before the checkpoint"])
@pytest.mark.parametrize("workers", [0, 2])
def test_lightnings_sampler_goes_on_with_the_next_epoch(
    pool: RankPool, tmp_path: Path, workers: int, early: bool
) -> None:
    """Lightning issue 21938: with workers the first epoch after a resume had the order of epoch 0."""
    path = str(tmp_path / "one.ckpt")
    whole = pool.run(2, leg, None, "", None, workers, adopt=early, kind=Shuffled)
    first = pool.run(2, leg, None, path, None, workers, adopt=early, kind=Shuffled, max_epochs=1)
    then = pool.run(2, leg, None, "", path, workers, adopt=early, kind=Shuffled)
    for expected, before, after in zip(whole, first, then, strict=True):
        assert before["seen"] + after["seen"] == expected["seen"]
        assert_close(after["state"], expected["state"])
