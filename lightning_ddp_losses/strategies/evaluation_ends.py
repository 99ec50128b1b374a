"""The end of an evaluation, where all ranks meet once: a rank that failed in one of its batches tells the others there.

A step of validation, test or prediction exchanges nothing, so the peers of a rank that fails would wait for it in what comes next: epoch
values of metrics, the next training step. They meet after their last batch, before any of that; what was seen of iterable data sets
(``undivided_data``) travels along. (Epoch values of several loaders in turn are reduced after each of them; ranks meet after the last.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.handshake import read_sized, sized
from lightning_ddp_losses.samplers.predictions import current_loaders
from lightning_ddp_losses.strategies.undivided_data import UndividedData


class EvaluationEnds:
    """Lets the ranks meet at the end of each evaluation of one run of a trainer.

    Attributes:
        is_inside: Whether an evaluation goes on, at the end of which the peers will listen.
    """

    def __init__(self) -> None:
        self.is_inside = False
        self._undo: Callable[[], object] | None = None
        self._data: dict[int, UndividedData] = {}  # by loader

    def install(self, trainer: pl.Trainer) -> None:
        """Meet at the ends from now on."""
        if self._undo is None and process_groups.world_size() > 1:
            self._undo = compat.around_evaluations(trainer, lambda _: self._begin(), lambda _: self._end(trainer))

    def remove(self) -> None:
        """Leave the trainer as it came."""
        if self._undo is not None:
            self._undo()
        self._undo, self.is_inside = None, False

    @contextlib.contextmanager
    def step(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> Iterator[None]:
        """Run a step inside the block; what fails in it is raised on every rank, on the peers at the end of their evaluation.

        Args:
            trainer: The trainer.
            args: The batch, its index, and that of its loader where they are several.
        """
        if not self.is_inside:
            yield
            return
        try:
            self._see(trainer, args)
            yield
        except Exception as error:
            self.fail(trainer, error)

    def fail(self, trainer: pl.Trainer, error: Exception) -> None:
        """Raise an error of this rank on every rank."""
        self.is_inside = False
        handshake.raise_in_all_groups(error, f"{_name(trainer)} step")

    def _begin(self) -> None:
        self.is_inside, self._data = True, {}

    def _see(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> None:
        loaders, index = current_loaders(trainer), 0
        if len(args) > 2 and isinstance(args[2], int):
            index = args[2]
            loaders = loaders[index : index + 1]
        if index not in self._data:
            self._data[index] = UndividedData(_name(trainer))
        self._data[index].see(loaders, args[0])

    def _end(self, trainer: pl.Trainer) -> None:
        """Meet the other ranks. Communication: one handshake.

        Raises:
            InputError: on every rank, for an iterable data set that is not divided.
            PeerError: where a peer failed.
        """
        self.is_inside = False
        indices = sorted(self._data)
        # of each loader some bytes, of which every rank has its own number
        own = b"".join(sized(self._data[index].take()) for index in indices)
        everyone = handshake.all_gather_between_steps(f"the end of {_name(trainer)}", {}, own)
        by_rank = [_parts(payload) for payload in everyone]
        for index, of_ranks in zip(indices, zip(*by_rank, strict=False), strict=False):
            self._data[index].judge(trainer, of_ranks)


def _parts(payload: bytes) -> list[bytes]:
    """Take apart what a rank sent."""
    parts, offset = list[bytes](), 0
    while offset < len(payload):
        part, offset = read_sized(payload, offset)
        parts.append(part)
    return parts


def _name(trainer: pl.Trainer) -> str:
    stage = trainer.state.stage
    return "evaluation" if stage is None else str(stage.dataloader_prefix or stage.value).replace("val", "validation")
