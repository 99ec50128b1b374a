"""`audit`: N real ranks, one real process, the same batches; every gradient compared, and the difference explained."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_ddp_losses.audit.ablations import SWITCHES
from lightning_ddp_losses.audit.auditor import Auditor
from lightning_ddp_losses.audit.context import Case
from lightning_ddp_losses.audit.diagnosis import diagnose, notes
from lightning_ddp_losses.audit.replay import Subject
from lightning_ddp_losses.audit.report import AuditReport, StepLoss
from lightning_ddp_losses.audit.rows import MULTIPLE
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError


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
