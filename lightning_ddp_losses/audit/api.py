"""`audit` compares every gradient of N real ranks with one real process on the same batches, and explains the difference.

Causes are determined in `diagnosis`. This file adds the notes, which apply to both runs.
"""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_ddp_losses.audit.compare import COARSE, EQUAL_SPREAD, MULTIPLE
from lightning_ddp_losses.audit.context import AuditContext, Diagnosis, comma_list, quoted
from lightning_ddp_losses.audit.diagnosis import ask, diagnose
from lightning_ddp_losses.audit.fit_run import FitTarget
from lightning_ddp_losses.audit.recorder import ABLATIONS
from lightning_ddp_losses.audit.replay import Target
from lightning_ddp_losses.audit.report import AuditReport
from lightning_ddp_losses.audit.rules import not_finite_anywhere
from lightning_ddp_losses.audit.runs import Runs, joins_windows
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import DDPLossError, expect, expect_count, expect_option


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
    randomness: Literal["rank", "global", "by_row"] | None = None,
    without: Iterable[str] = (),
    ckpt_path: str | None = None,
    timeout_seconds: float = 300.0,
    datamodule: LightningDataModule | None = None,
    train_dataloaders: Any = None,
) -> AuditReport:
    """Train a few steps on N ranks and in one process, and compare every gradient.

    Equivalent to: ``Trainer(devices=N, strategy=strategy).fit(model, data)`` compared with ``Trainer(devices=1).fit(model, batches)``. The
    ``batches`` are the batches of all ranks joined in rank order, from the same weights. The model itself is not changed. If a step
    accumulates micro-batches, the one process accumulates too, and under ``DDPLossStrategy(accumulation="window")`` it uses all rows of a
    window as one batch. The report's ``accumulation`` states which of the two the ranks equal.

    Args:
        model: Any LightningModule, including modules defined in ``__main__``, a notebook or a function.
        data: Data module or data loaders. If None, the module's own loaders.
        devices: Number of ranks.
        steps: Number of optimizer steps, with ``ckpt_path`` after the checkpoint.
        strategy: Name or object of a Lightning strategy, for example ``"ddp"``.
        trainer_kwargs: Further options of the Trainer (precision, accumulation, clipping, callbacks, plugins). The
            accelerator is the CPU by default.
        tolerance: Largest relative error of a gradient that is not a finding. If None, ``MULTIPLE`` times the rounding error of each
            gradient, estimated by perturbing parameters and inputs of the one process by one rounding unit. In 16 bits, a gradient is equal
            up to ``EQUAL_SPREAD`` times the spread of such runs, and up to a few times more the verdict is "cannot tell".
        deterministic: Use only deterministic algorithms.
        randomness: ``"global"``: training steps on the ranks draw the random numbers that one process draws (dropout, noise), under any
            strategy. A draw for which this is impossible is an error that names operator and line. ``"by_row"``: the same, with the numbers
            of that option in the one process too. ``"rank"``: each rank draws from its own generators, and the report states whether
            that explains the difference. If None, the strategy's option is used.
        without: Parts to switch off in both runs: ``"batch_norm"``, ``"precision"``, ``"uneven"``.
        ckpt_path: Checkpoint to start from.
        timeout_seconds: Time limit of each run.
        datamodule: The data, under its name in ``Trainer.fit``.
        train_dataloaders: The data, under its alternative name in ``Trainer.fit``.

    Returns:
        The report with differences, causes and fixes.

    Raises:
        AuditError: a run failed, died or took too long. Its traceback is in the text, and all processes have ended.
        ConfigurationError: options that cannot work, and draws that one process cannot reproduce.
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
    _validate(model, devices, off, strategy)
    draws = _choose_randomness(randomness, strategy)
    options["accelerator"] = _choose_accelerator(options.get("accelerator"), devices)

    target = FitTarget(strategy, timeout_seconds, draws, model, data, options, deterministic, ckpt_path)
    return compare_with_one("audit", target, devices, steps, tolerance, off)


def compare_with_one(
    what: str,
    target: Target,
    ranks: int,
    steps: int,
    tolerance: float | None = None,
    off: frozenset[str] = frozenset(),
) -> AuditReport:
    """Record ranks and one process, compare them, and explain the difference.

    Args:
        what: Function that the user called.
        target: Training.
        ranks: Number of ranks.
        steps: Number of optimizer steps.
        tolerance: Largest error that is not a finding. If None, it is estimated.
        off: Names in ``ABLATIONS`` that are switched off on both sides.
    """
    fix = "Call it from one plain process (not under torchrun, not inside a fit): it starts its own ranks."
    running = process_groups.is_distributed()
    expect(not running, what, expected="no process group", got="one that is running", fix=fix)
    expect_count(f"{what}(steps=...)", steps)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp-losses-audit-", ignore_cleanup_errors=True) as folder:
        context = AuditContext(Runs(target, Path(folder), ranks, steps, tolerance), off)
        # explain differences, with counterfactual runs
        found = diagnose(context)
        report = AuditReport(
            equal=context.comparison.equal and not found,
            rows=context.comparison.rows,
            updates=[*context.comparison.updates, *context.comparison.buffers],
            losses=context.losses,
            diagnoses=found,
            notes=notes(context),
            settings=_report_settings(context),
            accumulation=context.accumulation(),
            loss_verdicts=context.one.records[0].verdicts,
        )
        report.settings["seconds"] = round(time.monotonic() - started, 2)
        return report


def assert_parity(model: LightningModule, data: Any = None, devices: int = 2, **options: Any) -> AuditReport:
    """Fail a test if N ranks do not train like one process.

    Args:
        model: The LightningModule.
        data: Data of ``audit``.
        devices: Number of ranks.
        **options: Options of ``audit``, including ``datamodule=`` and ``train_dataloaders=``.

    Returns:
        The report of an equal run.

    Raises:
        AssertionError: with the report as its text.

    Example:
        >>> assert_parity(MyModule(), MyDataModule(), devices=3)  # doctest: +SKIP
    """
    __tracebackhide__ = True
    report = audit(model, data, devices=devices, **options)
    report.raise_if_different()
    return report


# ---------------------------------------------------------------------- refusals


def _validate(model: Any, devices: int, off: frozenset[str], strategy: Any) -> None:
    is_module = isinstance(model, LightningModule)
    expect(
        is_module,
        "audit",
        expected="a LightningModule",
        got=type(model).__name__,
        fix="Pass the module that Trainer.fit trains. For any other loop use parity(build, step, batches).",
    )
    expect_count("audit(devices=...)", devices, at_least=2)
    allowed = f"some of {', '.join(ABLATIONS)}"
    fix = ""
    if "randomness" in off:
        fix = "Take audit(randomness='global'): all ranks draw what one process draws."
    expect(off <= set(ABLATIONS), "audit(without=...)", expected=allowed, got=sorted(map(str, off)), fix=fix)
    if "uneven" in off:
        expected = "accumulation='mean', whose micro-batches can be divided evenly"
        what, got = "audit(without=('uneven',))", "accumulation='window'"
        expect(
            not joins_windows(strategy),
            what,
            expected=expected,
            got=got,
            fix="Leave 'uneven' out of `without`, or pass accumulation='mean' to the strategy.",
        )
    got, fix = "dataloader_iter, which no other run can replay", "Take (batch, batch_idx)."
    arguments = inspect.signature(model.training_step).parameters
    expect("dataloader_iter" not in arguments, "training_step", expected="a batch", got=got, fix=fix)


def _single_source(**sources: Any) -> Any:
    """Return the data, whichever name it was given under, or None without data."""
    given = {name: source for name, source in sources.items() if source is not None}
    expect(
        len(given) <= 1,
        "audit",
        expected=f"one of {', '.join(sources)}",
        got=" and ".join(given),
        fix="Give the data once.",
    )
    return next(iter(given.values()), None)


def _choose_randomness(asked: Any, strategy: Any) -> str:
    """Return the user's option for random numbers, or the strategy's option by default."""
    of_strategy: str = getattr(strategy, "randomness", "rank")
    if asked is None:
        return of_strategy
    expect_option("audit(randomness=...)", asked, ("rank", "global", "by_row", None))
    is_possible = of_strategy in ("rank", asked)
    expected, got = "what the strategy does", f"{asked!r} under a strategy with {of_strategy!r}"
    fix = f"Leave it out, or audit under a strategy without randomness={of_strategy!r}."
    expect(is_possible, "audit(randomness=...)", expected=expected, got=got, fix=fix)
    return str(asked)


def _choose_accelerator(asked: Any, devices: int) -> Any:
    """Return the user's accelerator if it is available, or the CPU by default."""
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


# ---------------------------------------------------------------------- settings of the report


def _report_settings(context: AuditContext) -> dict[str, Any]:
    info, runs, strategy = context.info, context.runs, context.runs.target.strategy
    tolerance: Any = runs.tolerance
    if tolerance is None:
        tolerance = f"{MULTIPLE:g} x estimated rounding"
        if runs.unit > COARSE:
            tolerance = f"{EQUAL_SPREAD:g} x the spread of one process's runs, moved by up to one rounding unit"
        if info.products:
            tolerance += f", that of products={', '.join(map(repr, info.products))} included"
    return {
        "devices": context.W,
        "steps": min(context.ranks.steps, context.one.steps),
        "strategy": strategy if isinstance(strategy, str) else type(strategy).__name__,
        "precision": info.precision,
        "accumulate_grad_batches": info.accumulate,
        "gradient_clip_val": info.clip,
        "parameters": context.record.parameter_count,
        "optimizers": info.optimizers,
        "randomness": runs.target.randomness,
        "without": sorted(context.off),
        "rounding_unit": runs.unit,
        "tolerance": tolerance,
        "aliases": context.aliases,
    }


# ---------------------------------------------------------------------- notes


def notes(context: AuditContext) -> list[Diagnosis]:
    """List notes on both runs, which are worth knowing but are not differences."""
    found = ask(
        (_without_optimizer, _without_gradient, _accumulated_rows, _changed_dtype, _repeated_in_validation), context
    )
    if not context.comparison.equal:  # for equal runs it is a diagnosis instead
        found += ask((not_finite_anywhere,), context)
    if context.runs.needs_group:
        found.append(context.diagnosis("F09", "group", severity="note"))
    if context.by_trainer:
        found.append(_meaning_of_a_batch(context))
    return found


def _without_optimizer(context: AuditContext) -> Iterator[Diagnosis]:
    names = context.info.unoptimized
    # tensors in optimizers that are not parameters of the module
    owners = context.info.owners
    foreign = [name for name in context.without_gradient if owners.get(name) == "unregistered"]
    if foreign:
        fields: dict[str, Any] = {"count": len(foreign), "first": foreign[0], "unoptimized": quoted(names) or "none"}
        yield context.diagnosis("F02", "foreign", severity="note", **fields)
    elif names:
        yield context.diagnosis("F01", severity="note", names=quoted(names))


def _repeated_in_validation(context: AuditContext) -> Iterator[Diagnosis]:
    repeated = context.runs.user_run.records[0].module_info.repeated_rows
    counts = comma_list(f"loader {index}: {rows}" for index, rows in enumerate(repeated) if rows)
    if counts:
        yield context.diagnosis("F54", severity="note", counts=counts)


def _accumulated_rows(context: AuditContext) -> Iterator[Diagnosis]:
    if context.info.accumulate <= 1 or not context.info.automatic:
        return
    # random draws and batch statistics differ in one large batch for any loss
    off = {"batch_norm"} if context.record.norms_at_wrap else set()
    quiet: AuditContext | str = context
    if context.used_rng and "randomness" not in context.off:
        quiet = context.with_same_draws(*off)
    elif off - context.off:
        quiet = context.without(*off)
    if isinstance(quiet, str) or quiet.used_rng:
        return  # it cannot be decided
    sizes = {batch.total_rows for record in context.ranks.records for batch in record.batches}
    try:
        # unequal pieces of a plain mean differ from it too
        is_needed = quiet.needs_micro_batches() and not (len(sizes) > 1 and quiet.is_local_mean)
    except DDPLossError:  # it cannot be decided either, because rows of other batches have different draws
        return
    if is_needed:
        yield context.diagnosis("F33", severity="note", accumulate=context.info.accumulate)


def _changed_dtype(context: AuditContext) -> Iterator[Diagnosis]:
    # read the record of one process, because a change on the ranks is a difference that a rule reports
    events = context.one.records[0].parameter_events
    for name, what in events.items():
        if what.startswith("changed from"):
            yield context.diagnosis("F78", "changed", severity="note", name=name, event=what)
            return


def _without_gradient(context: AuditContext) -> Iterator[Diagnosis]:
    # parameters of modules whose forward was called
    names = [name for name in context.without_gradient if name in context.record.called_parameters]
    if names:
        yield context.diagnosis("F38", "nowhere", severity="note", parameters=names, count=len(names))


def _meaning_of_a_batch(context: AuditContext) -> Diagnosis:
    # compare the rows of a step with the rows of one device, for which learning rates are tuned
    rows = context.rows_per_rank(1)
    rates = sorted(set(chain.from_iterable(context.record.learning_rates[:1])))
    return context.diagnosis(
        "F18",
        "batch",
        severity="note",
        total=sum(rows),
        summands=" + ".join(map(str, rows)),
        accumulate=context.info.accumulate,
        rates=comma_list(f"{rate:g}" for rate in rates) or "unknown",
        rows=rows[0],
        factor=sum(rows) / max(1, rows[0]),
    )
