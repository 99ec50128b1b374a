"""The command line: `ddp-losses fit|validate|test|predict|audit --config X` trains any LightningModule with exact distributed losses.

LightningCLI with our defaults, a progress bar for every kind of terminal, and the report at the end. What can be known to be
wrong before training is found before anything is written.

`ddp-losses audit --config X` takes the config that `fit` takes; exit status 0 equal, 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List, Optional, Union  # noqa: UP035 - read by jsonargparse at run time on every Python

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from lightning_ddp_losses.audit import AuditReport, audit
from lightning_ddp_losses.cli.report import RunReport
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError

QUIET = (
    ".*does not have many workers which may be a bottleneck.*",  # arrays are read faster by the rank itself
    "The number of training batches .* is smaller than the logging interval",  # losses are logged once an epoch
    "The dirpath has changed from",  # each run has a folder of its own, also one that starts from a checkpoint
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # lightning 2.6 on torch 2.13; nothing a user can do
)
"""Messages of warnings that the command line leaves out."""


class LossCLI(LightningCLI):
    """LightningCLI with the defaults of this package.

    Model and data are given by `class_path`. Output goes to a new folder under ``logs/`` for each run, with the config in
    it. No option is filled in from another one: jsonargparse would replace the user's value without a word, and leave it
    out of the saved config and of the checkpoint's hyperparameters.

    Args:
        args: Command line as a list, or a dict of its options; None reads `sys.argv`.
        run: Whether to run the subcommand at once.
        **kwargs: Further arguments of LightningCLI.

    Raises:
        ConfigurationError: No device, or a global batch that does not divide into the ranks.
    """

    def __init__(self, args: Any = None, run: bool = True, **kwargs: Any) -> None:
        defaults: dict[str, Any] = {
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": "logs", "name": "fit"},
            },
            "max_epochs": 10,
            "log_every_n_steps": 10,
            "strategy": "ddp_losses",
        }
        kwargs.setdefault("parser_kwargs", {"prog": "ddp-losses"})
        kwargs.setdefault("seed_everything_default", 0)
        # one learning rate would replace those of encoder and loss
        kwargs.setdefault("auto_configure_optimizers", False)
        kwargs.setdefault("trainer_class", AuditedTrainer)
        # each run has a new folder unless one is named
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        defaults |= kwargs.pop("trainer_defaults", {})
        self.exit_status = 0
        super().__init__(args=args, run=run, trainer_defaults=defaults, **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's, and the audit."""
        return {**LightningCLI.subcommands(), "audit": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand != "audit":
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        parser.add_class_arguments(AuditOptions, "audit")
        for option in ("ckpt_path", "weights_only"):  # what a config that fit has saved also holds
            parser.add_argument(f"--{option}", type=Union[str, bool, None], default=None)  # noqa: UP007
        return parser

    def before_instantiate_classes(self) -> None:
        """Name the sizes that a loss asks for and did not get: jsonargparse lets untyped parameters pass as None."""
        path = "init_args.loss.init_args"
        while sizes := self._get(self.config, "model", default={}).get(path):
            for name in ("num_classes", "embedding_size"):
                if name in sizes and sizes[name] is None:
                    raise ConfigurationError(
                        f"model.{path}.{name}", expected="a number", got="nothing", fix="Set it in the config."
                    )
            path += ".loss.init_args"  # of a loss around a loss

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer, with a progress bar that every terminal can show and the report at the end."""
        config = self._get(self.config_init, "trainer", default={})
        if config.get("devices") in (0, "0"):
            fix = "Set trainer.devices to 1 for plain training in one process, to more for more ranks."
            raise ConfigurationError("trainer.devices", expected="1 or more ranks", got=0, fix=fix)
        callbacks = config.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config.get("enable_progress_bar") is not False and not has_bar:
            callbacks.append(TQDMProgressBar(refresh_rate=10))  # needs a carriage return only
        callbacks.append(RunReport())
        try:
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except ValueError as error:  # a strategy or precision that Lightning does not know
            raise ConfigurationError(f"trainer: {error}") from error

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; our own errors come out as they are, not inside jsonargparse's account of types."""
        try:
            if self.subcommand == "audit":  # its trainers are made in processes of their own
                self.config_init = self.parser.instantiate_classes(self.config)
                self.model = self._get(self.config_init, "model")
                self.datamodule = self._get(self.config_init, "data")
            else:
                super().instantiate_classes()
        except ValueError as error:
            if isinstance(error.__cause__, DDPLossError):
                raise error.__cause__ from None
            raise

    def after_instantiate_classes(self) -> None:
        """Check what needs both the data and the number of ranks."""
        check = getattr(self.datamodule, "check", None)
        if check is None:
            return
        if self.subcommand == "audit":
            check(devices_of(*self._audit_options()))
        else:
            check(self.trainer.world_size)

    def _audit_options(self) -> tuple[AuditOptions, dict[str, Any]]:
        trainer = self._get(self.config_init, "trainer", default={})
        return self._get(self.config_init, "audit"), dict(trainer)

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand != "audit":
            super()._run_subcommand(subcommand)
            return
        options, trainer = self._audit_options()
        report = run_audit(self.model, self.datamodule, trainer, options, self._get(self.config_init, "ckpt_path"))
        self.exit_status = int(not report.equal)


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
    # only what the config says; the rest keeps the audit's defaults
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
    # what it found: on the terminal, then in a folder of its own
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
    """Return the number of ranks: the option, or the trainer's, or 2."""
    if options.devices is not None:
        return options.devices
    given = trainer.get("devices")
    if isinstance(given, list):
        return max(2, len(given))
    if str(given).isdigit():
        return max(2, int(str(given)))
    return 2


def _new_folder(root: Path) -> Path:
    taken = [int(found.name.removeprefix("version_")) for found in root.glob("version_*") if found.name[8:].isdigit()]
    folder = root / f"version_{max(taken, default=-1) + 1}"
    folder.mkdir(parents=True)
    return folder


def extend_module_path_(path: list[str], arguments: Sequence[str]) -> None:
    """Let a config name classes of modules that lie beside it or in the current folder.

    The console script has neither on its path. Both go to the end: a file there hides no installed package.

    Args:
        path: Where Python looks for modules (`sys.path`).
        arguments: The command line; a config that it names and that is no file is the parser's business.
    """
    reader = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    reader.add_argument("-c", "--config", action="append", default=[])
    configs: list[str] = []
    with contextlib.suppress(argparse.ArgumentError):  # an option without its value: the parser says so
        configs = reader.parse_known_args(arguments)[0].config
    beside = [os.path.dirname(os.path.abspath(config)) for config in configs if os.path.isfile(config)]
    for folder in (*beside, os.getcwd()):
        if folder not in path:
            path.append(folder)


def main() -> None:
    """Run the console script: a mistake of the user's ends in its message, not in a traceback.

    Exit status: 0 done (or an audit that found both sides equal), 1 an error (or an audit that found a difference), 2 a
    command line that cannot be read, or an audit that could not run.
    """
    # what a user can do nothing about is not shown
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    extend_module_path_(sys.path, sys.argv[1:])
    auditing = sys.argv[1:2] == ["audit"]
    try:
        status = LossCLI().exit_status
    except (DDPLossError, MisconfigurationException) as error:
        if getattr(error, "collective", False) and process_groups.rank() > 0:
            sys.exit(1)  # rank 0 says the same
        message = f"ddp-losses: {type(error).__name__}: {error}"
        if not auditing:
            sys.exit(message)
        sys.stderr.write(f"{message}\n")
        sys.exit(2)
    except Exception:
        if not auditing:
            raise
        traceback.print_exc()
        sys.exit(2)
    if status:
        sys.exit(status)
