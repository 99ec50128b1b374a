"""The plan of a run: on how many processes, on which recorded batches, without what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_ddp_losses.audit import batches
from lightning_ddp_losses.audit.rank_record import Recording


@dataclass(frozen=True)
class Micro:
    """One batch of a replay: recorded batches joined in this order, or a part of what they make.

    Attributes:
        files: The recorded batches.
        hints: Rows in each, as the data loader meant.
        part: (start, stop, W): equal parts ``start`` to ``stop`` of W; what does not divide is left out. None: all rows.
    """

    files: tuple[str, ...]
    hints: tuple[int | None, ...]
    part: tuple[int, int, int] | None = None

    def load(self) -> Any:
        """The batch."""
        whole = batches.concatenate([batches.load(file) for file in self.files], self.hints)
        if self.part is None:
            return whole
        start, stop, W = self.part
        rows = batches.rows_of(whole, sum(h or 0 for h in self.hints)) or 0
        return batches.take(whole, slice(rows // W * start, rows // W * stop), rows)


Plan = list[list[Micro]]
"""Batches by epoch."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one run is.

    Attributes:
        name: Its folder.
        ranks: Number of processes with a process group; 0 is one process without.
        plans: Batches for each process; empty: the user's own data.
        start: Folder of the run whose rank 0 gives the initial weights; empty: the module as it is.
        steps: Optimizer steps.
        accumulate: Multiple of the user's own accumulation; 0: none at all.
        without: What is switched off (``SWITCHES``).
        perturb: Seed of a perturbation by one rounding unit; None: none.
        seed: Random numbers from this seed; None: from the state that the process was forked with.
        trace: Also follow activations and their gradients at this step; 0: at none.
        group: Give the one process a group of its own, for a module that asks for one.
    """

    name: str
    ranks: int
    plans: tuple[Plan, ...] = ()
    start: str = ""
    steps: int = 3
    accumulate: int = 1
    without: frozenset[str] = frozenset()
    perturb: int | None = None
    seed: int | None = None
    trace: int = 0
    group: bool = False

    @property
    def processes(self) -> int:
        """How many processes."""
        return max(1, self.ranks)


@dataclass
class Subject:
    """What is audited: the same in every process, since processes are forked.

    Attributes:
        model: The LightningModule.
        data: Data module, data loaders, or None for the module's own.
        strategy: Lightning's name or object.
        options: Further options of the Trainer.
        deterministic: Ask torch for deterministic algorithms.
        ckpt_path: A checkpoint to start from.
        scratch: A folder that goes when the audit ends.
        seconds: How long a rank waits for another.
    """

    model: Any
    data: Any
    strategy: Any
    options: dict[str, Any]
    deterministic: bool
    scratch: Path
    seconds: float
    ckpt_path: Any = None


Logged = dict[str, Any]
"""What the recorder notes of a batch: epoch, step, file, hint, rows."""


def _micro(logged: Sequence[Logged], part: tuple[int, int, int] | None = None) -> Micro:
    return Micro(tuple(each["file"] for each in logged), tuple(each["hint"] for each in logged), part)


_DEALS: dict[str, Callable[[list[Logged], int], list[list[Micro]]]] = {
    "same": lambda column, _: [[_micro([each])] for each in column],
    "joined": lambda column, _: [[_micro(column)]],
    "reversed": lambda column, _: [[_micro(column[::-1])]],
    "local": lambda column, _: [[_micro([each]) for each in column]],
    "even": lambda column, _: [[_micro(column, (r, r + 1, len(column)))] for r in range(len(column))],
    "even joined": lambda column, _: [[_micro(column, (0, len(column), len(column)))]],
    "one rank": lambda column, rank: [[_micro([column[rank]])]],
}


def plan_of(recording: Recording, deal: str, *, steps: int, rank: int = 0) -> tuple[Plan, ...]:
    """Batches of a replay from those that the ranks had, one plan for each process.

    Args:
        recording: Of the ranks.
        deal: ``"same"``: each rank its own. ``"joined"``: one process, in rank order. ``"reversed"``: the other way round.
            ``"local"``: one process, the ranks' batches one after the other. ``"even"``: joined rows, dealt evenly.
            ``"even joined"``: those rows for one process. ``"one rank"``: the batches of ``rank`` alone. ``"whole"``: one
            process, all batches of an optimizer step joined.
        steps: Only the batches of the first so many optimizer steps.
        rank: For ``"one rank"``.
    """
    logs: list[list[Logged]] = [page["batches"] for page in recording.facts]
    columns = [list(column) for column in zip(*logs, strict=False) if column[0]["step"] <= steps]
    if deal == "whole":  # the batches of a step as one column, as if there were more ranks
        groups = groupby(columns, key=lambda column: column[0]["step"])
        columns, deal = [[each for column in group for each in column] for _, group in groups], "joined"
    epochs = [list(group) for _, group in groupby(columns, key=lambda column: column[0]["epoch"])]
    dealt = [[_DEALS[deal](column, rank) for column in epoch] for epoch in epochs]
    processes = len(dealt[0][0]) if dealt else 1
    return tuple([[micro for column in epoch for micro in column[p]] for epoch in dealt] for p in range(processes))
