"""The command line: `ddp-losses fit|validate|test|predict|audit --config X` trains any LightningModule with exact distributed losses.

LightningCLI with our defaults, a progress bar for every kind of terminal, and the report at the end. What can be known to be
wrong before training is found before anything is written.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any, Union

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from lightning_ddp_losses.cli.audit import AuditedTrainer, AuditOptions, devices_of, run_audit
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
        kwargs.setdefault(
            "auto_configure_optimizers", False
        )  # one learning rate would replace those of encoder and loss
        kwargs.setdefault("trainer_class", AuditedTrainer)
        self.exit_status = 0
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})  # each run has a new folder unless one is named
        super().__init__(args=args, run=run, trainer_defaults=defaults | kwargs.pop("trainer_defaults", {}), **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and the audit."""
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
        if config.get("enable_progress_bar") is not False and not any(
            isinstance(each, ProgressBar) for each in callbacks
        ):
            callbacks.append(TQDMProgressBar(refresh_rate=10))  # needs a carriage return only
        try:
            return super().instantiate_trainer(callbacks=[*callbacks, RunReport()], **kwargs)
        except ValueError as error:  # a strategy or precision that Lightning does not know
            raise ConfigurationError(f"trainer: {error}") from error

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; our own errors come out as they are, not inside jsonargparse's account of types."""
        try:
            if self.subcommand == "audit":  # its trainers are made in processes of their own
                self.config_init = self.parser.instantiate_classes(self.config)
                self.model, self.datamodule = (self._get(self.config_init, key) for key in ("model", "data"))
            else:
                super().instantiate_classes()
        except ValueError as error:
            if isinstance(error.__cause__, DDPLossError):
                raise error.__cause__ from None
            raise

    def after_instantiate_classes(self) -> None:
        """Check what needs both the data and the number of ranks."""
        check = getattr(self.datamodule, "check", None)
        if check is not None:
            check(devices_of(*self._audit_options()) if self.subcommand == "audit" else self.trainer.world_size)

    def _audit_options(self) -> tuple[AuditOptions, dict[str, Any]]:
        trainer = self._get(self.config_init, "trainer", default={})
        return self._get(self.config_init, "audit"), dict(trainer)

    def _run_subcommand(self, subcommand: str) -> None:
        if subcommand != "audit":
            super()._run_subcommand(subcommand)
            return
        options, trainer = self._audit_options()
        report = run_audit(self.model, self.datamodule, trainer, options, self._get(self.config_init, "ckpt_path"))
        self.exit_status = 0 if report.equal else 1


def main() -> None:
    """Entry point of the console script: a mistake of the user's ends in its message, not in a traceback.

    Exit status: 0 done (or an audit that found both sides equal), 1 an error (or an audit that found a difference), 2 a
    command line that cannot be read, or an audit that could not run.
    """
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
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
