"""`audit`: N real ranks, one real process, the same batches; every gradient compared, and the difference explained.

The auditor makes the recordings: the ranks on the user's data, one process on the ranks' batches joined, that process moved by
one rounding unit (which measures tolerances), and counterfactual runs when a rule asks; each once, each in processes of its own.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_ddp_losses.audit.ablations import ABLATIONS, product_choices, unit_roundoff
from lightning_ddp_losses.audit.compare import (
    MULTIPLE,
    AccumulationParity,
    Comparison,
    Tolerances,
    compare,
    compare_losses,
    first_traced_difference,
    is_mean_of,
    measure_tolerances,
)
from lightning_ddp_losses.audit.context import AuditContext, CounterfactualRuns
from lightning_ddp_losses.audit.diagnosis import diagnose, notes
from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.audit.replay import AuditTarget, Run, plan_replay
from lightning_ddp_losses.audit.report import AuditReport
from lightning_ddp_losses.audit.worker import Failure, perform, run_processes
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import (
    AuditError,
    ConfigurationError,
    InputError,
    error_class,
    expect,
    expect_count,
    explained_by,
    format_error,
)


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
    datamodule: LightningDataModule | None = None,
    train_dataloaders: Any = None,
) -> AuditReport:
    """Train a few steps on N ranks and in one process, and compare every gradient.

    Equivalent to: ``Trainer(devices=N, strategy=strategy).fit(model, data)`` beside ``Trainer(devices=1).fit(model, batches)``, the
    batches being those of all ranks joined in rank order, from the same weights. The model itself is not changed. Where a step accumulates
    micro-batches, the one process does so too, and under ``DDPLossStrategy(accumulation="window")`` it takes all rows of a window as
    one batch; either way the report's ``accumulation`` says which of the two the ranks equal.

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
        datamodule: The data, as ``Trainer.fit`` spells it.
        train_dataloaders: The data, likewise.

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
    data = _single_source(data=data, datamodule=datamodule, train_dataloaders=train_dataloaders)
    off = frozenset(without)
    options = dict(trainer_kwargs or {})
    _validate(model, devices, steps, off, strategy)
    options["accelerator"] = _choose_accelerator(options.get("accelerator"), devices)
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="ddp-losses-audit-"))
    try:
        # record ranks and one process, compare them
        target = AuditTarget(model, data, strategy, options, deterministic, scratch, timeout_seconds, ckpt_path)
        auditor = _Auditor(target, devices, steps, tolerance)
        context = auditor.context(off)
        # explain what differs, with counterfactual runs
        found = diagnose(context, auditor.context)
        report = AuditReport(
            equal=context.comparison.equal and not found,
            rows=context.comparison.rows,
            updates=context.comparison.updates,
            losses=compare_losses(context.ranks, context.one),
            diagnoses=found,
            notes=notes(context, auditor.context, needs_group=auditor.needs_group),
            settings=_report_settings(context, auditor, strategy),
            accumulation=auditor.accumulation(context, off),
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
        **options: As for ``audit``, ``datamodule=`` and ``train_dataloaders=`` among them.

    Returns:
        The report, where all is equal.

    Raises:
        AssertionError: with the report as its text.

    Example:
        >>> assert_parity(MyModule(), MyDataModule(), devices=3)  # doctest: +SKIP
    """
    __tracebackhide__ = True
    report = audit(model, data, devices=devices, **options)
    if not report.equal:
        raise AssertionError(str(report))
    return report


# ---------------------------------------------------------------------- what cannot be audited


def _validate(model: Any, devices: int, steps: int, off: frozenset[str], strategy: Any) -> None:
    fix = "Call it from one plain process (not under torchrun, not inside a fit): it starts its own ranks."
    running = process_groups.is_distributed()
    expect(not running, "audit", expected="no process group", got="one that is running", fix=fix)
    is_module = isinstance(model, LightningModule)
    expect(is_module, "audit", expected="a LightningModule", got=type(model).__name__)
    expect_count("audit(devices=...)", devices, at_least=2)
    expect_count("audit(steps=...)", steps)
    expect(
        off <= set(ABLATIONS),
        "audit(without=...)",
        expected=f"some of {', '.join(ABLATIONS)}",
        got=sorted(map(str, off)),
    )
    if "uneven" in off:
        expected = "accumulation='mean', whose micro-batches can be divided evenly"
        what, got = "audit(without=('uneven',))", "accumulation='window'"
        expect(not _joins_windows(strategy), what, expected=expected, got=got)
    got, fix = "dataloader_iter, which no other run can replay", "Take (batch, batch_idx)."
    arguments = inspect.signature(model.training_step).parameters
    expect("dataloader_iter" not in arguments, "training_step", expected="a batch", got=got, fix=fix)


def _joins_windows(strategy: Any) -> bool:
    """Say whether the micro-batches of a window make one batch under this strategy."""
    return getattr(strategy, "accumulation", "mean") == "window"


def _single_source(**sources: Any) -> Any:
    """Return the data under whatever name it was given, None where there is none."""
    given = {name: source for name, source in sources.items() if source is not None}
    expect(len(given) <= 1, "audit", expected=f"one of {', '.join(sources)}", got=" and ".join(given))
    return next(iter(given.values()), None)


def _choose_accelerator(asked: Any, devices: int) -> Any:
    """Choose the CPU unless the user asks for something that this machine has."""
    available = torch.cuda.device_count()
    if asked in (None, "cpu"):
        return "cpu"
    if asked == "auto":
        return "gpu" if available >= devices else "cpu"
    if asked in ("gpu", "cuda"):
        fix = "Audit on the CPU (accelerator='cpu'): the mathematics is the same."
        got = f"{available} on this machine"
        expect(available >= devices, "accelerator", expected=f"{devices} GPUs", got=got, fix=fix)
    return asked


# ---------------------------------------------------------------------- the recordings of an audit

_PERTURBATION_SEEDS = (1, 2)
_FLOAT64_TOLERANCE = 1e-9  # what differs by less than this in float64 is equal
_OF_WINDOWS = ("joined", "reversed")  # assignments that can join the micro-batches of a window
_OTHER_SEED = 12345  # of the run that shows whether random numbers matter


class _Auditor:
    """Makes and keeps the recordings of one audit.

    Args:
        target: What is audited.
        devices: Number of ranks.
        steps: Optimizer steps.
        tolerance: The user's own; None: estimated.
    """

    def __init__(self, target: AuditTarget, devices: int, steps: int, tolerance: float | None) -> None:
        self.target, self.devices, self.steps, self.tolerance = target, devices, steps, tolerance
        self.needs_group = False
        self._made: dict[str, Recording] = {}
        self._starts = 0

    # ------------------------------------------------------------------ runs

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
            perform(self.target, run, self._folder_of(run), rank)

        title = " and ".join(run.name for run in runs)
        failures = run_processes(len(parts), work, title=title, folder=output, seconds=self.target.seconds)
        if failures:
            raise _error_of({parts[index]: failure for index, failure in failures.items()})
        for run in runs:
            self._made[run.name] = Recording(self._folder_of(run), run.processes)

    def _folder_of(self, run: Run) -> Path:
        return self.target.scratch / run.name.replace(" ", "-").replace(",", "")

    @property
    def _is_automatic(self) -> bool:
        """Whether Lightning decides when an optimizer steps, so that a replay can have other windows."""
        return self._made["ranks"].records[0].module_info.automatic

    @property
    def _joins_windows(self) -> bool:
        """Whether all rows of a window are one batch of the one process."""
        return _joins_windows(self.target.strategy) and self._is_automatic

    def _replay(
        self,
        name: str,
        assignment: str,
        *,
        rank: int = 0,
        steps: int | None = None,
        whole_windows: bool | None = None,
        **options: Any,
    ) -> Run:
        """Plan a run on the batches that the ranks had, from the weights that they started with.

        Args:
            name: Of the run.
            assignment: Which batches each process gets.
            rank: For ``"one rank"``.
            steps: Optimizer steps; None: those of the audit.
            whole_windows: The one process takes the micro-batches of a step as one batch; None: where the strategy does so.
            **options: Of the run.
        """
        original = self._made["ranks"]
        steps = steps or self.steps
        if whole_windows is None:
            whole_windows = assignment in _OF_WINDOWS and self._joins_windows
        if whole_windows:
            options["accumulate"] = 0
        plans = plan_replay(original, assignment, steps=steps, rank=rank, whole_windows=whole_windows)
        ranks = self.devices if len(plans) > 1 else 0
        group = self.needs_group and not ranks
        return Run(name, ranks, plans, str(original.folder), steps, group=group, **options)

    def _replay_in_one(self, off: frozenset[str], assignment: str, **options: Any) -> Recording:
        """Record one process without ``off`` on the ranks' batches, assigned in some way."""
        given = [f"{name}={value}" for name, value in options.items()]
        label = ", ".join([assignment, *given, *sorted(off)])
        if "uneven" in off and assignment == "joined":
            assignment = "even joined"
        return self.record(self._replay(f"one {label}", assignment, without=off, **options))[0]

    def _record_pair(self, off: frozenset[str]) -> tuple[Recording, Recording]:
        """Record ranks and one process without ``off``, on the same batches."""
        if not off:
            validates = self.target.options.get("limit_val_batches") != 0
            (ranks,) = self.record(Run("ranks", self.devices, steps=self.steps, validates=validates))
            runs = [self._replay("one", "joined")]
            if self.tolerance is None:
                runs += [self._replay(name, "joined", perturb=seed) for seed, name in _perturbed_names().items()]
        else:
            label = ", ".join(f"no {name}" for name in sorted(off))
            same, joined = ("even", "even joined") if "uneven" in off else ("same", "joined")
            runs = [
                self._replay(f"one, {label}", joined, without=off),
                self._replay(f"ranks, {label}", same, without=off),
            ]
        try:
            made = self.record(*runs)
        except AuditError as error:
            if self.needs_group or off:
                raise
            return self._record_pair_in_group(error)
        if off:
            ranks = made[1]
        return ranks, made[0]

    def _record_pair_in_group(self, error: AuditError) -> tuple[Recording, Recording]:
        """Try once more with a group of one: what runs on ranks and fails in a plain process may call torch.distributed."""
        self.needs_group = True
        try:
            return self._record_pair(frozenset())
        except AuditError:
            self.needs_group = False
            raise error from None

    # ------------------------------------------------------------------ comparisons

    @functools.cached_property
    def unit(self) -> float:
        """The rounding unit of the runs."""
        return unit_roundoff(self.target.model, self._made["ranks"].records[0].module_info.precision)

    @functools.cached_property
    def _measured(self) -> Tolerances:
        perturbed = [self._made[name] for name in _perturbed_names().values() if name in self._made]
        return measure_tolerances(self._made["one"], perturbed, self.unit, self.tolerance)

    def _allowed(self, off: frozenset[str]) -> Tolerances:
        return Tolerances(_FLOAT64_TOLERANCE) if "precision" in off else self._measured

    def context(self, off: frozenset[str] = frozenset()) -> AuditContext:
        """Compare ranks with one process, both without ``off``; rules may ask for counterfactual runs."""
        self._record_pair(frozenset())  # tolerances come from the runs as they are
        ranks, one = self._record_pair(off)
        comparison = compare(ranks, one, self._allowed(off))

        def against_one(assignment: str, **options: Any) -> Comparison:
            return compare(self._replay_in_one(off, assignment, **options), one, self._allowed(off))

        runs = CounterfactualRuns(
            without=lambda *more: self.context(off | self._possible(more)).comparison,
            is_local_mean=lambda step: self._is_local_mean(off, ranks, step),
            exchanged=lambda: self._exchanged(off, ranks),
            reversed_order=lambda: against_one("reversed"),
            unaccumulated=lambda: compare(self._on_whole_windows(off, one), one, self._allowed(off)),
            reseeded=lambda: against_one("joined", seed=_OTHER_SEED),
            single_ranks=lambda: self._single_ranks(off),
            first_traced_difference=lambda: self._trace(off, comparison.first_step or 1),
        )
        switched_off = tuple(sorted(off))
        return AuditContext(self._made["ranks"], ranks, one, comparison, runs, self.unit, switched_off)

    def _possible(self, ablations: Iterable[str]) -> set[str]:
        """Leave out what cannot be switched off: micro-batches of a joined window are not divided evenly."""
        return {name for name in ablations if name != "uneven" or not self._joins_windows}

    def accumulation(self, context: AuditContext, off: frozenset[str]) -> AccumulationParity | None:
        """Compare the ranks with one process in both ways to accumulate; None where each step has one batch, or the module decides.

        Args:
            context: The audit as it ran.
            off: What is switched off in it.
        """
        by_step = Counter(batch.step for batch in context.record.batches)
        if not self._is_automatic or max(by_step.values(), default=1) == 1:
            return None
        whole = self._on_whole_windows(off, context.one)
        same = context.one
        if self._joins_windows:
            same = self._replay_in_one(off, "joined", whole_windows=False)
        of_same, of_whole = (compare(context.ranks, one, self._allowed(off)) for one in (same, whole))
        most = max(by_step.values())
        return AccumulationParity(most, of_same.equal, of_whole.equal, of_same.worst(), of_whole.worst())

    def _on_whole_windows(self, off: frozenset[str], one: Recording) -> Recording:
        """Record one process on all rows of each window at once, where ``one`` is not that already."""
        if self._joins_windows:
            return one
        return self._replay_in_one(off, "joined", whole_windows=True)

    def _is_local_mean(self, off: frozenset[str], ranks: Recording, step: int) -> bool:
        """Say whether one process that takes the ranks' batches one after the other has the mean of their gradients."""
        if not ranks.records[0].module_info.automatic:  # it cannot be made to accumulate
            return step == 1 and is_mean_of(self._single_ranks(off), ranks, self._allowed(off))
        averaged = self._replay_in_one(off, "local", accumulate=self.devices)
        rows = compare(ranks, averaged, self._allowed(off)).rows
        return all(row.exact for row in rows if row.step <= step)

    def _single_ranks(self, off: frozenset[str]) -> Sequence[Recording]:
        runs = []
        for rank in range(self.devices):
            name = f"rank {rank} alone {sorted(off)}"
            runs.append(self._replay(name, "one rank", rank=rank, steps=1, without=off))
        return self.record(*runs)

    def _exchanged(self, off: frozenset[str], ranks: Recording) -> Comparison:
        name = f"ranks with exchanged rows {sorted(off)}"
        (exchanged,) = self.record(self._replay(name, "exchanged", without=off))
        return compare(exchanged, ranks, self._allowed(off))

    def _trace(self, off: frozenset[str], step: int) -> str:
        if self._joins_windows:
            return "(Activations of micro-batches are not compared with those of whole windows.)"
        label = " ".join(sorted(off))
        options: dict[str, Any] = {"without": off, "trace": step, "steps": step}
        ranks, one = self.record(
            self._replay(f"traced ranks {label}", "same", **options),
            self._replay(f"traced one {label}", "joined", **options),
        )
        return first_traced_difference(ranks, one, min(0.1, 256 * self.unit))


def _perturbed_names() -> dict[int, str]:
    return {seed: f"one perturbed {seed}" for seed in _PERTURBATION_SEEDS}


# ---------------------------------------------------------------------- runs that failed

HINTS: tuple[tuple[str, str], ...] = (
    (
        r"[Ee]xpected to have finished reduction|were not used in producing the loss",
        "F38: a parameter without gradient on a step (idle or frozen after the wrap). "
        f"Take strategy='ddp_losses', or 'ddp_find_unused_parameters_true'. {explained_by('F38')}",
    ),
    (
        r"SyncBatchNorm expected input tensor to be on",
        "torch's SyncBatchNorm does not run on the CPU: take plugins=[lightning_ddp_losses.SyncBatchNorm()], or audit on GPUs "
        "(trainer_kwargs=dict(accelerator='gpu')).",
    ),
    (
        r"returning None in distributed training",
        "F35: training_step returned None on a rank. Return a loss of zero that keeps the graph instead. "
        f"{explained_by('F35')}",
    ),
    (
        r"No CUDA|CUDA driver|not compiled with CUDA|NVIDIA driver|Torch not compiled with|CUDA in forked",
        "The model asks for a GPU and this process has none: use self.device in the module, or audit where there is one.",
    ),
    (r"dataloader_iter", "A training_step that takes dataloader_iter cannot be replayed; take (batch, batch_idx)."),
    (
        r"Timed out|timed out|Connection (closed|reset)|took more than",
        "A rank waits for another: do all ranks run the same collectives, and have the same number of batches?",
    ),
)
"""What to do about errors that users of DDP meet."""

# texts of an error that follows from another rank's failure
_FOLLOWS = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|[Tt]imeout")


def _error_of(failures: dict[tuple[Run, int], Failure]) -> Exception:
    """Build the error of the process that failed first of itself, not because another one had."""
    (run, rank), failure = min(failures.items(), key=_blame)
    known = error_class(failure.kind)
    if known.__name__ == failure.kind and known in (ConfigurationError, InputError):
        return known(failure.text)  # it says what to do itself
    # where it failed, how, and what a user of DDP can do about it
    where = "the one process"
    if run.ranks:
        where = f"rank {rank} of {run.ranks}"
    said = failure.text
    if failure.kind:
        said = f"{failure.kind}: {failure.text}"
    hint = next((text for pattern, text in HINTS if re.search(pattern, f"{said}\n{failure.traceback}")), None)
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


# ---------------------------------------------------------------------- what the report says of the runs


def _report_settings(context: AuditContext, auditor: _Auditor, strategy: Any) -> dict[str, Any]:
    info = context.info
    tolerance: Any = auditor.tolerance
    if tolerance is None:
        tolerance = f"{MULTIPLE:g} x estimated rounding"
        choices = product_choices(auditor.target.model)
        if choices:
            tolerance += f", that of products={', '.join(map(repr, choices))} included"
    name = strategy
    if not isinstance(strategy, str):
        name = type(strategy).__name__
    return {
        "devices": context.W,
        "steps": min(context.ranks.steps, context.one.steps),
        "strategy": name,
        "precision": info.precision,
        "accumulate_grad_batches": info.accumulate,
        "gradient_clip_val": info.clip,
        "parameters": context.record.parameter_count,
        "optimizers": info.optimizers,
        "without": list(context.switched_off),
        "rounding_unit": auditor.unit,
        "tolerance": tolerance,
        "aliases": context.one.records[0].module_info.aliases | info.aliases,
        "seconds": 0.0,
    }
