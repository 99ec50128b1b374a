"""Several fits at once in the same processes, one training step at a time: the pairs that a noisy machine needs.

Each fit runs in a thread of its own and rests whenever its trainer asks for the next batch. Only the thread that holds the
turn runs, on all ranks the same one, so collectives never mix. A step is what lies between two requests for a batch:
forward, backward, reduction, optimizer, and everything Lightning does around them. Steps of the competitors lie
milliseconds apart, so a machine that slows down slows them all, and a difference of neighbours is a difference of theirs.

Batches without a length cost our strategies one handshake more each, as ranks agree on every end; most users' loaders know their length.
``SizedBatches`` do too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

__all__ = ["Fit", "Round", "SizedBatches", "time_in_turns", "timed_rounds"]


class SizedBatches(Callback):
    """Batches of a known number, far more than are asked for; as a callback of the trainer, what ends the fit after one of them.

    Attributes:
        last: Whether the trainer stops after the batch that it has.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.last = False

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """Stop, where this was the last one."""
        if self.last:
            trainer.should_stop = True


class Fit:
    """One ``Trainer.fit`` that stops before every step.

    Args:
        start: Runs the whole fit on the batches it is given.
        batch: The batch of step i.
        sized: Whether it is given ``SizedBatches``, which are to be a callback too.
    """

    def __init__(self, start: Callable[[Any], object], batch: Callable[[int], Any], *, sized: bool = False) -> None:
        self._batch = batch
        self._sized = SizedBatches(self._batches()) if sized else None
        self._go, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._ended, self._error = False, None
        self._thread = threading.Thread(target=self._run, args=(start,), daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Give it the turn until it asks for the next batch."""
        self._go.release()
        self._rests.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """No more batches: let the trainer finish and tear down."""
        self._ended = True
        self.step()
        self._thread.join()

    def _run(self, start: Callable[[Any], object]) -> None:
        torch.set_num_threads(1)
        self._go.acquire()
        try:
            start(self._batches() if self._sized is None else self._sized)
        except BaseException as error:  # raised where the turn was given
            self._error = error
        self._rests.release()

    def _batches(self) -> Iterator[Any]:
        index = 0
        while True:
            self._rests.release()
            self._go.acquire()
            if self._ended and self._sized is None:
                return
            if self._ended and self._sized is not None:
                self._sized.last = True
            yield self._batch(index)
            index += 1


@dataclass(frozen=True)
class Round:
    """One step of each fit.

    Attributes:
        wall_ms: From the moment all ranks are ready.
        cpu_ms: Of this process, all its threads: what a busy machine adds to the wall time is not in it.
    """

    wall_ms: tuple[float, ...]
    cpu_ms: tuple[float, ...]


def timed_rounds(fits: Sequence[Fit], rounds: int, seconds: float = math.inf) -> list[Round]:
    """Steps of all fits, ``rounds`` times; a round starts one place further each time.

    The ranks meet before every step, so that nobody pays for what a neighbour's step left behind. After ``seconds`` on any
    rank, all of them stop together at the end of the round.
    """
    meeting = dist.new_group(backend="gloo")
    late, ended = torch.zeros(1), time.monotonic() + seconds
    table = []
    for number in range(rounds):
        wall, cpu = [0.0] * len(fits), [0.0] * len(fits)
        late.fill_(time.monotonic() > ended)
        for place in range(len(fits)):
            index = (number + place) % len(fits)
            dist.all_reduce(late, group=meeting)
            started, worked = time.perf_counter(), time.process_time()
            fits[index].step()
            wall[index] = (time.perf_counter() - started) * 1e3
            cpu[index] = (time.process_time() - worked) * 1e3
        table.append(Round(tuple(wall), tuple(cpu)))
        if late.item():
            break
    dist.destroy_process_group(meeting)
    return table


def time_in_turns(
    steps: Sequence[Callable[[], object]],
    rounds: int,
    seconds: float,
    *,
    warm_up: int = 0,
    least: int = 0,
    after: Callable[[int], object] | None = None,
) -> list[list[float]]:
    """Return milliseconds of each step for each round; steps take turns, and every rank runs the same one.

    Args:
        steps: What is timed; the next one begins each round.
        rounds: How many are returned at most.
        seconds: After which no further round begins, as the slowest rank counts.
        warm_up: Rounds before the first that is returned.
        least: Rounds, those to warm up among them, that run however long they take.
        after: Called with the number of a step that was timed.
    """
    token, table, started = torch.zeros(1), list[list[float]](), time.perf_counter()
    for number in range(rounds + warm_up):
        row = [0.0] * len(steps)
        for place in range(len(steps)):
            index = (number + place) % len(steps)
            dist.all_reduce(token)
            before = time.perf_counter()
            steps[index]()
            row[index] = (time.perf_counter() - before) * 1e3
            if after is not None:
                after(index)
        table.append(row)
        spent = torch.tensor([time.perf_counter() - started])
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if float(spent) > seconds and number + 1 >= least:
            break
    return table[warm_up:]
