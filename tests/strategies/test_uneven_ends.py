"""Ranks with different numbers of training batches: the same error on all, or an end with the first (``test_joined_ends``: with the last).

A *plan* says how many rows each batch of each rank has. The one process trains on the rows of all ranks, step by step.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ddp_losses import DDPChecks, DDPLossStrategy, GlobalBatchLoss
from lightning_ddp_losses.testing import RankError, RankPool
from tests.doors import CommonEnds, UnevenEnds, as_combined, handshake, process_groups
from tests.fits import Trained, listed, make_trainer, said_on_rank_zero
from tests.oracle import assert_close
from tests.refusals import assert_same_error

Plan = Sequence[Sequence[int]]
WIDTH, CLASSES = 3, 4
UNEVEN: Plan = [(4, 4, 3, 2, 1), (3, 3, 5)]  # 5 and 3 batches
SHORT: Plan = [(4, 4, 3, 2), (3, 3)]


def batches_of(plan: Plan) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """The batches (ids, features, labels) of each rank; no two rows are the same."""
    sizes = [size for of_rank in plan for size in of_rank]
    ids = torch.arange(sum(sizes))
    features = torch.sin(torch.arange(1.0, WIDTH * len(ids) + 1, dtype=torch.float64) ** 2).reshape(-1, WIDTH)
    parts = [slice(*ends) for ends in pairwise([0, *accumulate(sizes)])]
    cut = iter([(ids[part], features[part], ids[part] * 7 % CLASSES) for part in parts])
    return [[next(cut) for _ in of_rank] for of_rank in plan]


class Stream(IterableDataset[Any]):  # batches without a length
    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Claims(Stream):  # four batches, as it says
    def __len__(self) -> int:
        return 4


class Fails(Stream):  # gives one batch, and raises at the next; in a worker it dies
    def __iter__(self) -> Iterator[Any]:
        yield self.batches[0]
        if get_worker_info() is not None:
            os._exit(3)
        raise ArithmeticError("no more disk")


def stream(batches: Sequence[Any], workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Stream(batches), batch_size=None, num_workers=workers)


LOADERS: dict[str, Callable[[Sequence[Any]], Any]] = {"known": listed, "unknown": stream}


class Rows(Trained):  # an encoder and a loss over all rows; notes what it sees
    lr = 0.3
    momentum = 0.9

    def __init__(self, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
        self.loss = GlobalBatchLoss(nn.CrossEntropyLoss()) if loss is None else loss
        self.seen: list[list[int]] = []
        self.ends: list[bool] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        ids, features, labels = batch
        self.seen.append(ids.tolist())
        self.ends.append(self.trainer.is_last_batch)
        return self.loss(self.encoder(features), labels)

    def val_dataloader(self) -> Any:
        return DataLoader([0], batch_size=None)

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(len(self.seen))


def train(
    make: Callable[[], Rows],
    load: Callable[[int], Any],
    uneven: str = "error",
    *,
    strategy: dict[str, Any] | None = None,
    checks: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Fit on this rank's loader; returns what it saw, and the state."""
    module = make()
    callbacks = [DDPChecks()] if checks else []
    options = {"limit_val_batches": 0} | options
    trainer = make_trainer(DDPLossStrategy(uneven=uneven, **strategy or {}), callbacks=callbacks, **options)
    trainer.fit(module, load(dist.get_rank()))
    return {
        "seen": module.seen,
        "ends": module.ends,
        "validated": module.validated,
        "state": dict(module.state_dict()),
        "steps": trainer.global_step,
        "batches": trainer.num_training_batches,
    }


def part(plan: Plan, rank: int, kind: str = "known") -> Any:
    batches = batches_of(plan)[rank]
    return stream(batches, workers=1) if kind == "worker" else LOADERS[kind](batches)


def joined(plan: Plan) -> list[tuple[Tensor, ...]]:
    """The batches of one process."""
    by_rank = batches_of(plan)
    steps = []
    for step in range(max(map(len, plan))):
        of_ranks = [batches[step] for batches in by_rank if step < len(batches)]
        steps.append(tuple(torch.cat(tensors) for tensors in zip(*of_ranks, strict=True)))
    return steps


def one_process(
    plan: Plan,
    steps: int,
    *,
    epochs: int = 1,
    window: int = 1,
    loss: nn.Module | None = None,
    whole_window: bool = False,
) -> dict[str, Tensor]:
    """The parameters of a plain loop over the ranks' batches, joined step by step."""
    module = Rows(nn.CrossEntropyLoss() if loss is None else loss)
    optimizer = module.configure_optimizers()
    batches = joined(plan)[:steps]
    for _ in range(epochs):
        for first in range(0, steps, window):
            micro_batches = batches[first : first + window]
            if whole_window:
                micro_batches = [tuple(map(torch.cat, zip(*micro_batches, strict=True)))]
            optimizer.zero_grad()
            for _, features, labels in micro_batches:
                divisor = 1 if whole_window else window
                (module.loss(module.encoder(features), labels) / divisor).backward()
            optimizer.step()
    return dict(module.state_dict())


class Grows(DataLoader[Any]):  # has a batch less on rank 1 in its second epoch
    epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        return super().__iter__()

    def __len__(self) -> int:
        return 4 - (self.epochs > 1 and dist.get_rank() == 1)


def growing(rank: int) -> DataLoader[Any]:
    return Grows(batches_of([(2, 2, 2, 2)] * 2)[rank], batch_size=None)  # type: ignore[arg-type]


def claiming(plan: Plan, rank: int) -> DataLoader[Any]:
    return DataLoader(Claims(batches_of(plan)[rank]), batch_size=None)


def one_without_length(rank: int) -> Any:
    return part([(2, 2), (2, 2)], rank, "known" if rank else "unknown")


class FetchesItself(Rows):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        raise AssertionError("never called")


LENGTHS = ("training batches of this epoch", "rank 0: 5 batches", "rank 1: 3 batches", "uneven='stop'")
EARLY = ("training batches of this epoch", "rank 0: more than 3", "rank 1: 3 batches", "uneven='stop'")
NONE = ("a batch on every rank", "rank 1: 0 batches")
SOME = ("length of the training loader (DataLoader)", "rank 0: unknown", "rank 1: 2 batches")
LIES = ("training loader", "expected 4 batches, as its len() says, got 2", "rank")
known, unknown = partial(part, UNEVEN), partial(part, UNEVEN, kind="unknown")
third = partial(part, [*UNEVEN, (2, 2, 2, 2)], kind="unknown")
even, empty = partial(part, [(2, 2), (2, 2)]), partial(part, [(2, 2), ()])
one_lies, all_lie = (partial(claiming, [(2,) * most, (2, 2)]) for most in (4, 2))
REFUSED: dict[str, tuple[int, Callable[[int], Any], dict[str, Any], Sequence[str]]] = {
    "lengths": (2, known, {}, LENGTHS),
    "lengths, with checks": (2, known, {"checks": True}, LENGTHS),
    "lengths, without checks of calls": (2, known, {"strategy": {"check_calls": False}}, LENGTHS),
    "lengths, of which one suffices": (2, known, {"max_steps": 4, "max_epochs": -1}, LENGTHS),
    "a stream that ends early": (2, unknown, {}, EARLY),
    "a stream that ends early, with checks": (2, unknown, {"checks": True}, EARLY),
    "a stream on 3 ranks": (3, third, {}, EARLY),
    "a stream on 3 ranks, with checks": (3, third, {"checks": True}, EARLY),
    "lengths of a later epoch": (2, growing, {"max_epochs": 3}, ("rank 0: 4 batches", "rank 1: 3 batches")),
    "one lies": (2, one_lies, {}, LIES),
    "one lies, stop": (2, one_lies, {"uneven": "stop"}, LIES),
    "all lie": (2, all_lie, {}, LIES),
    "all lie, stop": (2, all_lie, {"uneven": "stop"}, LIES),
    "a length on some ranks only": (2, one_without_length, {}, SOME),
    "no batches": (2, empty, {}, NONE),
    "no batches, stop": (2, empty, {"uneven": "stop"}, NONE),
    "a step that fetches": (2, even, {"make": FetchesItself}, ("dataloader_iter",)),
    "a step that fetches alone": (1, even, {"make": FetchesItself}, ("dataloader_iter",)),
    "windows": (2, unknown, {"accumulate_grad_batches": 2}, EARLY),
    "whole windows": (2, unknown, {"accumulate_grad_batches": 2, "strategy": {"accumulation": "window"}}, EARLY),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined", "ignore:.*dataloader_iter")
@pytest.mark.parametrize("case", REFUSED)
def test_uneven_ends_are_the_same_error_on_every_rank(pool: RankPool, case: str) -> None:
    world_size, load, options, words = REFUSED[case]
    assert_same_error(pool.errors(world_size, train, load=load, **{"make": Rows, **options}), *words)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    "options",
    [{"limit_train_batches": 3}, {"max_steps": 3, "max_epochs": -1}, {"max_steps": 1, "accumulate_grad_batches": 3}],
    ids=str,
)
def test_ends_that_the_fit_does_not_reach_may_differ(pool: RankPool, kind: str, options: dict[str, Any]) -> None:
    results = pool.run(2, train, Rows, partial(part, UNEVEN, kind=kind), **options)
    window = options.get("accumulate_grad_batches", 1)
    for result in results:
        assert len(result["seen"]) == 3
        assert_close(result["state"], one_process(UNEVEN, 3, window=window))


def failing(dies: bool, rank: int) -> DataLoader[Any]:
    kind = Fails if rank == 1 else Stream
    return DataLoader(kind(batches_of([(2,) * 4] * 3)[rank]), batch_size=None, num_workers=int(dies))


@pytest.mark.slow
def test_a_worker_that_dies_on_one_rank(pool: RankPool) -> None:
    errors = pool.errors(2, train, Rows, partial(failing, True))
    # torch finds the worker gone, or its batch cut off on the way
    cut_off = "Connection reset" in errors[1].message
    assert_told_of(errors, "Connection reset" if cut_off else "exited unexpectedly", "fetching a training batch")


def assert_told_of(errors: list[RankError], text: str, where: str) -> None:
    """Rank 1 raised its own error, the others one that names it."""
    for error in errors:
        assert text in error.message
        assert not error.timed_out
        assert error.is_a("DDPLossError") == (error.rank != 1), error
        assert error.rank == 1 or ("rank 1" in error.message and where in error.message), error


def test_the_command_line_knows_its_values() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(DDPLossStrategy, "strategy")
    assert "uneven: error" in parser.dump(parser.get_defaults())
    assert parser.parse_args(["--strategy.uneven=join"]).strategy.uneven == "join"
    with pytest.raises(ArgumentError, match="uneven"):
        parser.parse_args(["--strategy.uneven=both"])


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("window", [1, 2])
def test_stop_ends_every_rank_with_the_first(pool: RankPool, kind: str, window: int) -> None:
    options = {"max_epochs": 2, "limit_val_batches": 1, "accumulate_grad_batches": window}
    results = pool.run(2, train, Rows, partial(part, UNEVEN, kind=kind), "stop", **options)
    for result in results:
        assert result["validated"] == [3, 6]
        assert result["ends"] == [False, False, True] * 2
        assert result["steps"] == 2 * -(-3 // window)
        assert_close(result["state"], one_process(UNEVEN, 3, epochs=2, window=window))


def said_of_the_end(kind: str) -> list[str]:
    with said_on_rank_zero() as said:
        train(Rows, partial(part, UNEVEN, kind=kind), "stop", max_epochs=2)
    return [text for text in said if text.startswith("uneven='stop'")]


@pytest.mark.parametrize(
    ("kind", "left"), [("known", "rank 0: 2, rank 1: 0"), ("unknown", "rank 0: 1 or more, rank 1: none")]
)
def test_stop_says_once_what_is_left_out(pool: RankPool, kind: str, left: str) -> None:
    text = f"uneven='stop': epochs end with the first rank that runs out. Batches left out of this one: {left}."
    assert pool.run(2, said_of_the_end, kind) == [[text], []]


class Meeting:  # ranks that are threads: what they hand in meets, in rank order
    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.payloads = [b""] * world_size
        self.own = threading.local()

    def all_gather(self, what: str, must_match: Any, payload: bytes = b"", *, group: Any = None) -> list[bytes]:
        self.payloads[self.own.rank] = payload
        self.barrier.wait()
        payloads = list(self.payloads)
        self.barrier.wait()
        return payloads


def steps_of(meeting: Meeting, rank: int, plan: Plan, kind: str, mode: str) -> list[int]:
    """How many rows each batch has that a rank trains on."""
    meeting.own.rank = rank
    progress = SimpleNamespace(current=SimpleNamespace(ready=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), restarting=False)
    module = SimpleNamespace(training_step=Rows.training_step, allow_zero_length_dataloader_with_multiple_devices=True)
    trainer = SimpleNamespace(fit_loop=loop, lightning_module=module)
    fit = SimpleNamespace(
        trainer=trainer, options=SimpleNamespace(uneven=mode), raise_on_all_ranks=lambda where: nullcontext()
    )
    ends = UnevenEnds(fit)  # type: ignore[arg-type]
    batches = [torch.zeros(size, 1) for size in plan[rank]]
    loader = as_combined(listed(batches) if kind == "known" else Stream(batches), CommonEnds, ends=ends)
    loader.limits = math.inf
    return [len(batch) for batch, _, _ in loader]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["join", "stop"])
def test_a_thousand_splits_end_together(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    draw = random.Random(5)
    for number in range(500):  # in each of two modes
        world_size = draw.randint(2, 6)
        plan = [[draw.randint(1, 3) for _ in range(draw.randint(0, 6))] for _ in range(world_size)]
        plan[draw.randrange(world_size)].append(1)  # else there is nothing to train on
        meeting = Meeting(world_size)
        monkeypatch.setattr(handshake, "all_gather_between_steps", meeting.all_gather)
        monkeypatch.setattr(process_groups, "rank", lambda meeting=meeting: meeting.own.rank)
        kind = "known" if number % 2 else "unknown"
        run = partial(steps_of, meeting, plan=plan, kind=kind, mode=mode)
        with ThreadPoolExecutor(world_size) as threads:
            trained = list(threads.map(run, range(world_size)))
        common = max(map(len, plan)) if mode == "join" else min(map(len, plan))
        expected = [(sizes + [0] * common)[:common] for sizes in plan]
        assert trained == expected, (plan, kind)
