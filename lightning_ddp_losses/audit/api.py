"""`audit`: N real ranks, one real process, the same batches; every gradient compared, and the difference explained."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_ddp_losses.audit.ablations import SWITCHES, unit_roundoff
from lightning_ddp_losses.audit.compare import MULTIPLE, Comparison, Tolerances, compare, is_mean, tolerances
from lightning_ddp_losses.audit.context import Case, Counters
from lightning_ddp_losses.audit.diagnosis import diagnose, notes
from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.audit.recorder import part
from lightning_ddp_losses.audit.replay import Run, Subject, plan_of
from lightning_ddp_losses.audit.report import AuditReport, StepLoss
from lightning_ddp_losses.audit.worker import Failure, perform, run_processes
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import AuditError, ConfigurationError, InputError, error_class, format_error


def audit(
    model: LightningModule,
    data: Any = None,
    *,
    devices: int = 2,
    steps: int = 3,
    strategy: Any = "ddp_losses",
    trainer_kwargs: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    deterministic: bool = True,
    without: Iterable[str] = (),
    ckpt_path: str | None = None,
    timeout_seconds: float = 300.0,
) -> AuditReport:
    """Train a few steps on N ranks and in one process, and compare every gradient.

    Equivalent to: ``Trainer(devices=N, strategy=strategy).fit(model, data)`` beside ``Trainer(devices=1).fit(model, batches)``, the
    batches being those of all ranks joined in rank order, from the same weights. The model itself is not changed.

    Args:
        model: Any LightningModule, also one defined in ``__main__``, a notebook or a function.
        data: Data module, data loaders, or None for the module's own.
        devices: Number of ranks.
        steps: Optimizer steps.
        strategy: A name or object of Lightning's, ``"ddp"`` for example; it must keep whole parameters on every rank.
        trainer_kwargs: Further options of the Trainer (precision, accumulation, clipping, callbacks, plugins). The
            accelerator is the CPU unless it says otherwise.
        tolerance: Largest relative error of a gradient that is no finding. None: ``MULTIPLE`` times the rounding error of
            each gradient, estimated by moving parameters and inputs of the one process by one rounding unit.
        deterministic: Use deterministic algorithms only.
        without: What to switch off in both runs: ``"randomness"``, ``"batch_norm"``, ``"precision"``, ``"uneven"``.
        ckpt_path: A checkpoint to start from.
        timeout_seconds: Time limit of each run.

    Returns:
        The report; it says what differs, why, and what to change.

    Raises:
        AuditError: a run failed, died or took too long; its traceback is in the text, and nothing is left running.
        ConfigurationError: options that cannot work.
        InputError: batches that cannot be joined, or no data.

    Example:
        >>> import lightning_ddp_losses
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> report = lightning_ddp_losses.audit(BoringModel(), strategy="ddp", steps=1)
        >>> report.equal
        True
    """
    off = frozenset(without)
    options = dict(trainer_kwargs or {})
    _check(model, devices, steps, off)
    options["accelerator"] = _accelerator(options.get("accelerator"), devices)
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="ddp-losses-audit-"))
    try:
        subject = Subject(model, data, strategy, options, deterministic, scratch, timeout_seconds, ckpt_path)
        auditor = Auditor(subject, devices, steps, tolerance, timeout_seconds)
        case = auditor.case(off)
        found = diagnose(case, auditor.case)
        report = AuditReport(
            equal=case.comparison.equal and not found,
            rows=case.comparison.rows,
            updates=case.comparison.updates,
            losses=_losses(case),
            diagnoses=found,
            notes=notes(case, needs_group=auditor.needs_group),
            settings=_settings(case, auditor, strategy),
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report.settings["seconds"] = round(time.monotonic() - started, 2)
    return report


def assert_parity(model: LightningModule, data: Any = None, devices: int = 2, **options: Any) -> AuditReport:
    """Fail a test where N ranks do not train as one process.

    Args:
        model: The LightningModule.
        data: As for ``audit``.
        devices: Number of ranks.
        **options: As for ``audit``.

    Returns:
        The report, where all is equal.

    Raises:
        AssertionError: with the report as its text.
    """
    __tracebackhide__ = True
    report = audit(model, data, devices=devices, **options)
    if not report.equal:
        raise AssertionError(str(report))
    return report


def _check(model: Any, devices: int, steps: int, off: frozenset[str]) -> None:
    if process_groups.is_distributed():
        fix = "Call it from one plain process (not under torchrun, not inside a fit): it starts its own ranks."
        raise ConfigurationError("audit", expected="no process group", got="one that is running", fix=fix)
    if not isinstance(model, LightningModule):
        raise ConfigurationError("audit", expected="a LightningModule", got=type(model).__name__)
    for name, value, least in (("devices", devices, 2), ("steps", steps, 1)):
        if not isinstance(value, int) or value < least:
            raise ConfigurationError(f"audit({name}=...)", expected=f"{least} or more", got=repr(value))
    if not off <= set(SWITCHES):
        raise ConfigurationError("audit(without=...)", expected=f"some of {', '.join(SWITCHES)}", got=sorted(off))
    if "dataloader_iter" in inspect.signature(model.training_step).parameters:
        fix = "Take (batch, batch_idx)."
        raise ConfigurationError(
            "training_step", expected="a batch", got="dataloader_iter, which no other run can replay", fix=fix
        )


def _accelerator(asked: Any, devices: int) -> Any:
    if asked in (None, "cpu"):
        return "cpu"
    if asked == "auto":
        return "gpu" if torch.cuda.device_count() >= devices else "cpu"
    if asked in ("gpu", "cuda") and torch.cuda.device_count() < devices:
        fix = "Audit on the CPU (accelerator='cpu'): the mathematics is the same."
        raise ConfigurationError(
            "accelerator", expected=f"{devices} GPUs", got=f"{torch.cuda.device_count()} on this machine", fix=fix
        )
    return asked


def _losses(case: Case) -> list[StepLoss]:
    found = []
    pages, alone = case.ranks.facts, case.one.facts[0]
    for at, logged in enumerate(zip(*(page["batches"] for page in pages), strict=False)):
        values = tuple(page["losses"][at] if at < len(page["losses"]) else None for page in pages)
        known = [value for value in values if value is not None]
        one = alone["losses"][at] if at < len(alone["losses"]) else None
        rows = tuple(each["rows"] or 0 for each in logged)
        found.append(StepLoss(logged[0]["step"], values, sum(known) / len(known) if known else None, one, rows))
    return found


def _settings(case: Case, auditor: Auditor, strategy: Any) -> dict[str, Any]:
    facts = case.facts
    return {
        "devices": case.W,
        "steps": min(case.ranks.steps, case.one.steps),
        "strategy": strategy if isinstance(strategy, str) else type(strategy).__name__,
        "precision": facts["precision"],
        "accumulate_grad_batches": facts["accumulate"],
        "gradient_clip_val": facts["clip"],
        "parameters": facts["parameters"],
        "optimizers": facts["optimizers"],
        "without": list(case.switched_off),
        "rounding_unit": auditor.unit,
        "tolerance": f"{MULTIPLE:g} x estimated rounding" if auditor.tolerance is None else auditor.tolerance,
        "aliases": case.one.facts[0]["aliases"] | facts["aliases"],
        "seconds": 0.0,
    }


# ----------------------------------------------------------------------

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
        return part(ranks, one, min(0.1, 256 * self.unit))


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
