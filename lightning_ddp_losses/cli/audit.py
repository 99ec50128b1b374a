"""`ddp-losses audit --config X`: the config that `fit` takes, audited; exit status 0 equal, 1 different, 2 could not run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035 - read by jsonargparse at run time on every Python

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lightning_ddp_losses.audit import AuditReport, audit


@dataclass
class AuditOptions:
    """Options of the audit.

    Args:
        devices: Number of ranks; not given: the trainer's, and at least 2.
        steps: Optimizer steps.
        tolerance: Largest relative error that is no finding; not given: estimated from the precision.
        without: What to switch off on both sides: randomness, batch_norm, precision, uneven.
        deterministic: Deterministic algorithms only.
        timeout_seconds: Time limit of each run.
        output: Where report.html, report.json and ratios.png go, in a new folder for each audit.
    """

    devices: Optional[int] = None  # noqa: UP045
    steps: int = 3
    tolerance: Optional[float] = None  # noqa: UP045
    without: List[str] = field(default_factory=list)  # noqa: UP006
    deterministic: bool = True
    timeout_seconds: float = 300.0
    output: str = "logs/audit"


class AuditedTrainer(Trainer):
    """Lends the subcommand its name; an audit makes trainers of its own, one in each process."""

    def audit(self) -> None:
        """Compare every gradient of N ranks with one process, and explain the difference."""


def run_audit(
    model: LightningModule, data: Any, trainer: dict[str, Any], options: AuditOptions, ckpt_path: str | None
) -> AuditReport:
    """Audit what a config describes, print the report and write it down.

    Args:
        model: Of the config.
        data: Of the config.
        trainer: Its options of the Trainer, instantiated.
        options: Of the audit.
        ckpt_path: A checkpoint to start from.
    """
    given = {name: value for name, value in trainer.items() if value is not None}
    report = audit(
        model,
        data,
        devices=devices_of(options, trainer),
        steps=options.steps,
        strategy=given.pop("strategy", "ddp_losses"),
        trainer_kwargs=given,
        tolerance=options.tolerance,
        deterministic=options.deterministic,
        without=options.without,
        ckpt_path=ckpt_path,
        timeout_seconds=options.timeout_seconds,
    )
    console = Console()
    console.print(report, highlight=False)
    folder = _new_folder(Path(options.output))
    report.to_json(folder / "report.json")
    report.to_html(folder / "report.html")
    written = ["report.html", "report.json"]
    try:
        report.plot(folder / "ratios.png")
        written.append("ratios.png")
    except ImportError:
        console.print("no picture: pip install 'lightning-ddp-losses[demo]'", markup=False)
    console.print(
        f"\nWritten to {folder}: {', '.join(written)} ({report.settings['seconds']} s)",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    return report


def devices_of(options: AuditOptions, trainer: dict[str, Any]) -> int:
    """Number of ranks: the option, or the trainer's, or 2."""
    if options.devices is not None:
        return options.devices
    given = trainer.get("devices")
    if isinstance(given, list):
        return max(2, len(given))
    return max(2, int(given)) if given is not None and str(given).isdigit() else 2


def _new_folder(root: Path) -> Path:
    taken = [int(found.name.removeprefix("version_")) for found in root.glob("version_*") if found.name[8:].isdigit()]
    folder = root / f"version_{max(taken, default=-1) + 1}"
    folder.mkdir(parents=True)
    return folder
