"""Runs the recordings of an audit: ranks, one process, counter-runs; each once, each in processes of its own."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_ddp_losses.audit import trace
from lightning_ddp_losses.audit.ablations import unit_roundoff
from lightning_ddp_losses.audit.compare import Comparison, compare, is_mean, tolerances
from lightning_ddp_losses.audit.context import Case, Counters
from lightning_ddp_losses.audit.processes import Failure, run_processes
from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.audit.replay import Run, Subject, plan_of
from lightning_ddp_losses.audit.rows import Tolerances
from lightning_ddp_losses.audit.worker import perform
from lightning_ddp_losses.errors import AuditError, ConfigurationError, InputError, error_class, format_error

_NUDGES = (1, 2)  # seeds of the perturbed runs
_FLOAT64 = 1e-9  # what differs by less than this in float64 is equal
_SYMPTOM = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|[Tt]imeout")  # of another rank's failure

HINTS: tuple[tuple[str, str], ...] = (
    (
        r"[Ee]xpected to have finished reduction|were not used in producing the loss",
        "F38: a parameter without gradient on a step (idle or frozen after the wrap). "
        "Take strategy='ddp_losses', or 'ddp_find_unused_parameters_true'.",
    ),
    (
        r"SyncBatchNorm expected input tensor to be on",
        "torch's SyncBatchNorm does not run on the CPU: take plugins=[lightning_ddp_losses.SyncBatchNorm()], or audit on GPUs "
        "(trainer_kwargs=dict(accelerator='gpu')).",
    ),
    (
        r"returning None in distributed training",
        "F35: training_step returned None on a rank. Return a loss of zero that keeps the graph instead.",
    ),
    (
        r"No CUDA|CUDA driver|not compiled with CUDA|NVIDIA driver|Torch not compiled with",
        "The model asks for a GPU and this machine has none: use self.device in the module, or audit where there is one.",
    ),
    (r"dataloader_iter", "A training_step that takes dataloader_iter cannot be replayed; take (batch, batch_idx)."),
    (
        r"Timed out|timed out|Connection (closed|reset)|took more than",
        "A rank waits for another: do all ranks run the same collectives, and have the same number of batches?",
    ),
)
"""What to do about errors that users of DDP meet."""


class Auditor:
    """Makes and keeps the recordings of one audit.

    Args:
        subject: What is audited.
        devices: Number of ranks.
        steps: Optimizer steps.
        tolerance: The user's own; None: estimated.
        seconds: Time limit of each run.
    """

    def __init__(self, subject: Subject, devices: int, steps: int, tolerance: float | None, seconds: float) -> None:
        self.subject, self.devices, self.steps, self.seconds = subject, devices, steps, seconds
        self.tolerance = tolerance
        self.needs_group = False
        self._made: dict[str, Recording] = {}
        self._calls = 0

    # ------------------------------------------------------------------ runs

    def make(self, *runs: Run) -> list[Recording]:
        """Recordings of the runs; those that do not exist yet run side by side."""
        new = [run for run in runs if run.name not in self._made]
        if new:
            self._run(new)
        return [self._made[run.name] for run in runs]

    def _run(self, runs: Sequence[Run]) -> None:
        places = [(run, rank) for run in runs for rank in range(run.processes)]
        self._calls += 1
        output = self.subject.scratch / f"output-{self._calls}"
        for folder in (output, *map(self._folder, runs)):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that failed before
            folder.mkdir(parents=True)

        def work(index: int) -> None:
            run, rank = places[index]
            perform(self.subject, run, self._folder(run), rank)

        title = " and ".join(run.name for run in runs)
        failures = run_processes(len(places), work, title=title, folder=output, seconds=self.seconds)
        if failures:
            raise _error({places[i]: failure for i, failure in failures.items()})
        self._made |= {run.name: Recording(self._folder(run), run.processes) for run in runs}

    def _folder(self, run: Run) -> Path:
        return self.subject.scratch / run.name.replace(" ", "-").replace(",", "")

    def _replay(self, name: str, deal: str, **options: object) -> Run:
        """A run on the batches that the ranks had, from the weights that they started with."""
        first = self._made["ranks"]
        rank = int(options.pop("rank", 0))  # type: ignore[call-overload]
        steps = int(options.pop("steps", self.steps))  # type: ignore[call-overload]
        plans = plan_of(first, deal, steps=steps, rank=rank)
        ranks = self.devices if len(plans) > 1 else 0
        return Run(name, ranks, plans, str(first.folder), steps, group=self.needs_group and not ranks, **options)  # type: ignore[arg-type]

    def _pair(self, off: frozenset[str]) -> tuple[Recording, Recording]:
        """Ranks and one process without ``off``, on the same batches."""
        label = ", ".join(["", *(f"no {name}" for name in sorted(off))])
        even = "even" if "uneven" in off else "same"
        joined = "even joined" if "uneven" in off else "joined"
        if not off:
            (ranks,) = self.make(Run("ranks", self.devices, steps=self.steps))
        runs = [self._replay(f"one{label}", joined, without=off)]
        if off:
            runs.append(self._replay(f"ranks{label}", even, without=off))
        elif self.tolerance is None:
            runs += [self._replay(f"one nudged {seed}", "joined", perturb=seed) for seed in _NUDGES]
        try:
            made = self.make(*runs)
        except AuditError as error:
            if self.needs_group or off:
                raise
            return self._with_group(off, error)
        return (made[1], made[0]) if off else (ranks, made[0])

    def _with_group(self, off: frozenset[str], error: AuditError) -> tuple[Recording, Recording]:
        """What ran on ranks and fails in a process without a group may be calling torch.distributed itself."""
        self.needs_group = True
        try:
            return self._pair(off)
        except AuditError:
            self.needs_group = False
            raise error from None

    # ------------------------------------------------------------------ comparisons

    @functools.cached_property
    def unit(self) -> float:
        """The rounding unit of the runs."""
        return unit_roundoff(self.subject.model, str(self._made["ranks"].facts[0]["precision"]))

    @functools.cached_property
    def allowed(self) -> Tolerances:
        """What counts as rounding."""
        nudged = [self._made[name] for seed in _NUDGES if (name := f"one nudged {seed}") in self._made]
        return tolerances(self._made["one"], nudged, self.unit, self.tolerance)

    def case(self, off: frozenset[str] = frozenset()) -> Case:
        """Ranks against one process, without ``off``, with its counter-runs."""
        self._pair(frozenset())  # tolerances come from the runs as they are
        ranks, one = self._pair(off)
        counters = Counters(
            without=lambda *more: self.case(off | set(more)).comparison,
            local=lambda step: self._local(off, ranks, step),
            backwards=lambda: compare(self._alone_process(off, "reversed"), one, self._allow(off)),
            whole=lambda: compare(self._alone_process(off, "whole", accumulate=0), one, self._allow(off)),
            reseeded=lambda: compare(self._alone_process(off, "joined", seed=12345), one, self._allow(off)),
            alone=lambda: self._each(off),
            part=lambda: self._part(off, compare(ranks, one, self._allow(off))),
        )
        return Case(
            self._made["ranks"],
            ranks,
            one,
            compare(ranks, one, self._allow(off)),
            counters,
            self.unit,
            tuple(sorted(off)),
        )

    def _allow(self, off: frozenset[str]) -> Tolerances:
        return Tolerances(_FLOAT64) if "precision" in off else self.allowed

    def _alone_process(self, off: frozenset[str], deal: str, **options: object) -> Recording:
        label = ", ".join([deal, *map(str, options), *sorted(off)])
        if "uneven" in off:
            deal = "even joined" if deal == "joined" else deal
        return self.make(self._replay(f"one {label}", deal, without=off, **options))[0]

    def _local(self, off: frozenset[str], ranks: Recording, step: int) -> bool:
        """One process that takes the ranks' batches one after the other has the mean of their gradients."""
        if not ranks.facts[0]["automatic"]:  # it cannot be made to accumulate
            return step == 1 and is_mean(self._each(off), ranks, self._allow(off))
        averaged = self._alone_process(off, "local", accumulate=self.devices)
        rows = compare(ranks, averaged, self._allow(off)).rows
        return all(row.exact for row in rows if row.step <= step)

    def _each(self, off: frozenset[str]) -> Sequence[Recording]:
        runs = [
            self._replay(f"rank {r} alone {sorted(off)}", "one rank", rank=r, steps=1, without=off)
            for r in range(self.devices)
        ]
        return self.make(*runs)

    def _part(self, off: frozenset[str], comparison: Comparison) -> str:
        step = comparison.first_step or 1
        label = " ".join(sorted(off))
        ranks, one = self.make(
            self._replay(f"traced ranks {label}", "same", without=off, trace=step, steps=step),
            self._replay(f"traced one {label}", "joined", without=off, trace=step, steps=step),
        )
        return trace.part(ranks, one, min(0.1, 256 * self.unit))


def _error(failures: dict[tuple[Run, int], Failure]) -> Exception:
    """The error of the process that failed first of itself, not because another one had."""

    def blame(item: tuple[tuple[Run, int], Failure]) -> tuple[bool, bool, int]:
        (_, rank), failure = item
        symptom = failure.kind == "PeerError" or bool(_SYMPTOM.search(failure.text))
        return (failure.text.startswith("was still waiting"), symptom, rank)

    (run, rank), failure = min(failures.items(), key=blame)
    known = error_class(failure.kind)
    if known.__name__ == failure.kind and known in (ConfigurationError, InputError):
        return known(failure.text)  # it says what to do itself
    where = f"rank {rank} of {run.ranks}" if run.ranks else "the one process"
    said = f"{failure.kind}: {failure.text}" if failure.kind else failure.text
    hint = next((text for pattern, text in HINTS if re.search(pattern, f"{said}\n{failure.traceback}")), None)
    what = f"audit, run `{run.name}` on {where}"
    text = format_error(what, expected=f"{run.steps} optimizer steps", got=said, fix=hint)
    stories = [failure.traceback]
    if failure.text.startswith("took more"):  # all that are silent: one of them hangs, the others wait for it
        stories = [f"rank {r} was here:\n{each.traceback}" for (_, r), each in failures.items()]
    return AuditError("\n\n".join([text, *stories]))
