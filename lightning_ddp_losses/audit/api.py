"""`audit`: N real ranks, one real process, the same batches; every gradient compared, and the difference explained."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_ddp_losses.audit.ablations import ABLATIONS, product_choices
from lightning_ddp_losses.audit.compare import MULTIPLE, compare_losses
from lightning_ddp_losses.audit.context import AuditContext
from lightning_ddp_losses.audit.diagnosis import diagnose, notes
from lightning_ddp_losses.audit.replay import AuditTarget
from lightning_ddp_losses.audit.report import AuditReport
from lightning_ddp_losses.audit.runs import Runs, joins_windows
from lightning_ddp_losses.audit.worker import perform
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import expect, expect_count


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
    with scratch_folder() as scratch:
        target = AuditTarget(model, data, strategy, options, deterministic, scratch, timeout_seconds, ckpt_path)
        return compare_with_one(Runs(target, devices, steps, tolerance, perform), off)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder that goes with the context."""
    folder = Path(tempfile.mkdtemp(prefix="ddp-losses-audit-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare_with_one(runs: Runs, off: frozenset[str]) -> AuditReport:
    """Record ranks and one process, compare them, and explain the difference.

    Args:
        runs: Makes the recordings.
        off: Names out of ``ABLATIONS`` that are switched off on both sides.
    """
    started = time.monotonic()
    context = AuditContext.of(runs, off)
    # explain what differs, with counterfactual runs
    found = diagnose(context)
    report = AuditReport(
        equal=context.comparison.equal and not found,
        rows=context.comparison.rows,
        updates=context.comparison.updates,
        losses=compare_losses(context.ranks, context.one),
        diagnoses=found,
        notes=notes(context),
        settings=_report_settings(context, runs.target.strategy),
        accumulation=context.accumulation(),
    )
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
    report.raise_if_different()
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
    allowed = f"some of {', '.join(ABLATIONS)}"
    expect(off <= set(ABLATIONS), "audit(without=...)", expected=allowed, got=sorted(map(str, off)))
    if "uneven" in off:
        expected = "accumulation='mean', whose micro-batches can be divided evenly"
        what, got = "audit(without=('uneven',))", "accumulation='window'"
        expect(not joins_windows(strategy), what, expected=expected, got=got)
    got, fix = "dataloader_iter, which no other run can replay", "Take (batch, batch_idx)."
    arguments = inspect.signature(model.training_step).parameters
    expect("dataloader_iter" not in arguments, "training_step", expected="a batch", got=got, fix=fix)


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


# ---------------------------------------------------------------------- what the report says of the runs


def _report_settings(context: AuditContext, strategy: Any) -> dict[str, Any]:
    info, runs = context.info, context.runs
    tolerance: Any = runs.tolerance
    if tolerance is None:
        tolerance = f"{MULTIPLE:g} x estimated rounding"
        choices = product_choices(runs.target.model)
        if choices:
            tolerance += f", that of products={', '.join(map(repr, choices))} included"
    return {
        "devices": context.W,
        "steps": min(context.ranks.steps, context.one.steps),
        "strategy": strategy if isinstance(strategy, str) else type(strategy).__name__,
        "precision": info.precision,
        "accumulate_grad_batches": info.accumulate,
        "gradient_clip_val": info.clip,
        "parameters": context.record.parameter_count,
        "optimizers": info.optimizers,
        "without": sorted(context.off),
        "rounding_unit": context.unit,
        "tolerance": tolerance,
        "aliases": context.aliases,
        "seconds": 0.0,
    }
