"""The recordings of an audit, each made once, when it is asked for, in processes of its own.

They are the ranks on the user's data, one process on the ranks' batches joined, that process moved by one rounding unit (which measures
tolerances), and counterfactual runs when a rule asks. A run that fails is an error that says where, how, and what to do about it.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_ddp_losses.audit.ablations import unit_roundoff
from lightning_ddp_losses.audit.compare import Tolerances, measure_tolerances
from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.audit.replay import AuditTarget, Run, plan_replay
from lightning_ddp_losses.audit.worker import Failure, run_processes
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.errors import (
    AuditError,
    ConfigurationError,
    InputError,
    error_class,
    explained_by,
    format_error,
)

_PERTURBATION_SEEDS = (1, 2)
_FLOAT64_TOLERANCE = 1e-9  # what differs by less than this in float64 is equal
Perform = Callable[[Any, Run, Path, int], None]
_OF_WINDOWS = ("joined", "reversed")  # assignments that can join the micro-batches of a window


class Runs:
    """Makes and keeps the recordings of one audit.

    Args:
        target: What is audited.
        devices: Number of ranks.
        steps: Optimizer steps.
        tolerance: The user's own; None: estimated.
        perform: Does one process's part of a run: ``worker.perform`` for a LightningModule, ``loop_run.perform_loop`` for other loops.

    Attributes:
        needs_group: Whether the one process got a process group of its own, for a module that asks for one.
    """

    def __init__(
        self, target: AuditTarget, devices: int, steps: int, tolerance: float | None, perform: Perform
    ) -> None:
        self._perform = perform
        self.target, self.devices, self.steps, self.tolerance = target, devices, steps, tolerance
        self.needs_group = False
        self._made: dict[str, Recording] = {}
        self._starts = 0

    # ------------------------------------------------------------------ making a recording

    def record(self, *runs: Run) -> list[Recording]:
        """Return the recordings of the runs; those that do not exist yet run side by side."""
        new = [run for run in runs if run.name not in self._made]
        if new:
            self._start(new)
        return [self._made[run.name] for run in runs]

    def _start(self, runs: Sequence[Run]) -> None:
        # a clean folder for each run, and one for the output of all
        self._starts += 1
        output = self.target.scratch / f"output-{self._starts}"
        for folder in (output, *map(self._folder_of, runs)):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed before
            folder.mkdir(parents=True)

        # one process for each rank of each run
        parts = [(run, rank) for run in runs for rank in range(run.processes)]

        def work(index: int) -> None:
            run, rank = parts[index]
            self._perform(self.target, run, self._folder_of(run), rank)

        title = " and ".join(run.name for run in runs)
        failures = run_processes(len(parts), work, title=title, folder=output, seconds=self.target.seconds)
        if failures:
            raise _error_of({parts[index]: failure for index, failure in failures.items()})
        for run in runs:
            self._made[run.name] = Recording(self._folder_of(run), run.processes)

    def _folder_of(self, run: Run) -> Path:
        return self.target.scratch / run.name.replace(" ", "-").replace(",", "")

    def _replay(
        self, name: str, assignment: str, *, rank: int = 0, whole_windows: bool | None = None, **options: Any
    ) -> Run:
        """Plan a run on the batches that the ranks had, from the weights that they started with.

        Args:
            name: Name of the run.
            assignment: Which batches each process gets.
            rank: Rank of the assignment ``"one rank"``.
            whole_windows: The one process takes the micro-batches of a step as one batch; None: if the strategy does so.
            **options: Options of the run.
        """
        original = self.user_run
        options.setdefault("steps", self.steps)
        if whole_windows is None:
            whole_windows = assignment in _OF_WINDOWS and self.joins_windows
        if whole_windows:
            options["accumulate"] = 0
        plans = plan_replay(original, assignment, steps=options["steps"], rank=rank, whole_windows=whole_windows)
        ranks = self.devices if len(plans) > 1 else 0
        return Run(name, ranks, plans, str(original.folder), group=self.needs_group and not ranks, **options)

    # ------------------------------------------------------------------ ranks and one process

    @functools.cached_property
    def user_run(self) -> Recording:
        """The ranks on the user's own data."""
        validates = self.target.options.get("limit_val_batches") != 0
        return self.record(Run("ranks", self.devices, steps=self.steps, validates=validates))[0]

    @functools.cached_property
    def _one(self) -> tuple[Recording, ...]:
        """One process on the joined batches, then the same moved by one rounding unit unless the tolerance is given.

        A module that runs on ranks and fails in a plain process may call torch.distributed: it gets a second try, with a group of one.
        """
        assert self.user_run  # its own errors need no second try
        try:
            return self._record_one()
        except AuditError as error:
            self.needs_group = True
            try:
                return self._record_one()
            except AuditError:
                raise error from None

    def _record_one(self) -> tuple[Recording, ...]:
        runs = [self._replay("one", "joined")]
        if self.tolerance is None:
            runs += [self._replay(f"one perturbed {seed}", "joined", perturb=seed) for seed in _PERTURBATION_SEEDS]
        return tuple(self.record(*runs))

    def pair(self, off: frozenset[str]) -> tuple[Recording, Recording]:
        """Record ranks and one process without ``off``, on the same batches."""
        one = self._one[0]  # tolerances come from the runs as they are
        if not off:
            return self.user_run, one
        label = ", ".join(f"no {name}" for name in sorted(off))
        same, joined = ("even", "even joined") if "uneven" in off else ("same", "joined")
        one, ranks = self.record(
            self._replay(f"one, {label}", joined, without=off), self._replay(f"ranks, {label}", same, without=off)
        )
        return ranks, one

    @functools.cached_property
    def unit(self) -> float:
        """The rounding unit of the runs."""
        return unit_roundoff(self.target.model, self.user_run.records[0].module_info.precision)

    @functools.cached_property
    def _measured(self) -> Tolerances:
        one, *perturbed = self._one
        return measure_tolerances(one, perturbed, self.unit, self.tolerance)

    def allowed(self, off: frozenset[str]) -> Tolerances:
        """Return how large an error may be in runs without ``off``."""
        return Tolerances(_FLOAT64_TOLERANCE) if "precision" in off else self._measured

    # ------------------------------------------------------------------ counterfactual runs

    @property
    def joins_windows(self) -> bool:
        """Whether all rows of a window are one batch of the one process."""
        return joins_windows(self.target.strategy) and self.user_run.records[0].module_info.automatic

    def possible(self, ablations: Iterable[str]) -> set[str]:
        """Leave out what cannot be switched off: micro-batches of a joined window are not divided evenly."""
        return {name for name in ablations if name != "uneven" or not self.joins_windows}

    def in_one(self, off: frozenset[str], assignment: str, **options: Any) -> Recording:
        """Record one process without ``off`` on the ranks' batches, assigned in some way."""
        given = [f"{name}={value}" for name, value in options.items()]
        label = ", ".join([assignment, *given, *sorted(off)])
        if "uneven" in off and assignment == "joined":
            assignment = "even joined"
        return self.record(self._replay(f"one {label}", assignment, without=off, **options))[0]

    def single_ranks(self, off: frozenset[str]) -> Sequence[Recording]:
        """Record one process for each rank, on that rank's batches of the first step."""
        runs = []
        for rank in range(self.devices):
            name = f"rank {rank} alone {sorted(off)}"
            runs.append(self._replay(name, "one rank", rank=rank, steps=1, without=off))
        return self.record(*runs)

    def exchanged(self, off: frozenset[str]) -> Recording:
        """Record ranks with the next rank's row at every second place."""
        return self.record(self._replay(f"ranks with exchanged rows {sorted(off)}", "exchanged", without=off))[0]

    def traced(self, off: frozenset[str], step: int) -> list[Recording]:
        """Record ranks and one process again, and follow their activations at a step."""
        label = " ".join(sorted(off))
        options: dict[str, Any] = {"without": off, "trace": step, "steps": step}
        ranks = self._replay(f"traced ranks {label}", "same", **options)
        return self.record(ranks, self._replay(f"traced one {label}", "joined", **options))


def joins_windows(strategy: Any) -> bool:
    """Return whether the micro-batches of a window make one batch under this strategy."""
    return getattr(strategy, "accumulation", "mean") == "window"


# ---------------------------------------------------------------------- runs that failed

HINTS: tuple[tuple[str, str], ...] = (
    (r"[Ee]xpected to have finished reduction|were not used in producing the loss", "F38"),
    (r"returning None in distributed training", "F35"),
    (
        r"SyncBatchNorm expected input tensor to be on",
        "torch's SyncBatchNorm does not run on the CPU: take plugins=[lightning_ddp_losses.SyncBatchNorm()], or audit on GPUs "
        "(trainer_kwargs=dict(accelerator='gpu')).",
    ),
    (
        r"No CUDA|CUDA driver|not compiled with CUDA|NVIDIA driver|Torch not compiled with|CUDA in forked",
        "The model asks for a GPU and this process has none: use self.device in the module, or audit where there is one.",
    ),
    (
        r"must have the same dtype|expected scalar type|same dtype, but got",
        "A part of the loop stays in another dtype than its model: parity(dtype=None) leaves all as they are.",
    ),
    (
        r"Timed out|timed out|Connection (closed|reset)|took more than",
        "A rank waits for another: do all ranks run the same collectives, and have the same number of batches?",
    ),
)
"""What to do about errors that users of DDP meet: a fault of the table, or a sentence."""

# texts of an error that follows from another rank's failure
_FOLLOWS = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|[Tt]imeout")


def _error_of(failures: dict[tuple[Run, int], Failure]) -> Exception:
    """Build the error of the process that failed first of itself, not because another one had."""
    (run, rank), failure = min(failures.items(), key=_blame)
    known = error_class(failure.kind)
    if known.__name__ == failure.kind and known in (ConfigurationError, InputError):
        return known(failure.text)  # it says what to do itself
    # where it failed, how, and what a user of DDP can do about it
    where = f"rank {rank} of {run.ranks}" if run.ranks else "the one process"
    said = f"{failure.kind}: {failure.text}" if failure.kind else failure.text
    hint = next((text for pattern, text in HINTS if re.search(pattern, f"{said}\n{failure.traceback}")), "")
    if hint in FAULTS:
        hint = f"{hint}: {FAULTS[hint].title}. {FAULTS[hint].fix} {explained_by(hint)}"
    what = f"audit, run `{run.name}` on {where}"
    text = format_error(what, expected=f"{run.steps} optimizer steps", got=said, fix=hint)
    stories = [failure.traceback]
    if failure.text.startswith("took more"):  # all that are silent: one of them hangs, the others wait for it
        stories = [f"rank {r} was here:\n{each.traceback}" for (_, r), each in failures.items()]
    return AuditError("\n\n".join([text, *stories]))


def _blame(item: tuple[tuple[Run, int], Failure]) -> tuple[bool, bool, int]:
    """Sort by whether a process only waited, only met another's failure, and by rank."""
    (_, rank), failure = item
    waited = failure.text.startswith("was still waiting")
    follows = failure.kind == "PeerError" or bool(_FOLLOWS.search(failure.text))
    return waited, follows, rank
