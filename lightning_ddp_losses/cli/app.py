"""The command line: `ddp-losses fit|validate|test|predict|audit --config X` trains any LightningModule with exact distributed losses.

`ddp-losses parity` compares loops without a Trainer, `certify` shows whether DDP is right for a loss, `explain` is the manual, `configs`
lists the configs included in the package, `doctor` checks the installation.

It is LightningCLI with our defaults, a progress bar for every kind of terminal, and the report at the end. Errors that can be detected
before training are reported before anything is written.

A config is a program: `class_path` imports the module that it names and calls the class, and so do options of callbacks, loggers and
data. Do not run a config that you would not run as a script. `ddp-losses explain security` lists everything that is trusted.

`ddp-losses audit --config X` takes the config of `fit`. Exit status: 0 equal, 1 different, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import os
import pydoc
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List, Optional, Union  # noqa: UP035 - read by jsonargparse at run time on every Python

import torch
import torch.distributed as dist
import yaml
from jsonargparse.typing import class_from_function
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from lightning_ddp_losses.audit import AuditReport, audit, parity
from lightning_ddp_losses.cli import misspelled
from lightning_ddp_losses.cli.certify import named, run_certify
from lightning_ddp_losses.cli.configs import named_configs, run_configs, with_shipped_configs
from lightning_ddp_losses.cli.doctor import run_doctor, version_line
from lightning_ddp_losses.cli.manual import run_explain
from lightning_ddp_losses.cli.report import RunReport
from lightning_ddp_losses.core import launch_variables
from lightning_ddp_losses.demo.data import BatchedArrayDataModule
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, expect

QUIET = (
    ".*does not have many workers which may be a bottleneck.*",  # each rank reads arrays faster itself
    "The number of training batches .* is smaller than the logging interval",  # losses are logged once an epoch
    "The dirpath has changed from",  # each run has a separate folder, even if it starts from a checkpoint
    "Total length of `list` across ranks is zero",  # the user does not hold out any rows
    ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",  # lightning 2.6 on torch 2.13, and a user cannot change it
)
"""Messages of warnings that the command line hides."""

DESCRIPTION = "Train on N GPUs and get the gradients you would get on one: LightningCLI with exact distributed losses."
MORE_COMMANDS = (
    "Also: `ddp-losses parity` compares any training loop on N ranks with one process; `ddp-losses certify` says whether plain DDP is "
    "right for a loss, and which line is not; `ddp-losses explain` is the manual, with known faults and what to do about them; "
    "`ddp-losses configs` lists the configs that come with the package; `ddp-losses doctor` looks at the installation; "
    "`ddp-losses --version`."
)
"""Help text of these commands."""


class LossCLI(LightningCLI):
    """LightningCLI with the defaults of this package and the subcommand `audit`.

    It takes all arguments of LightningCLI. In your own `cli.py`, ``LossCLI(MyModule, MyData)`` reads the configs that
    ``LightningCLI(MyModule, MyData)`` reads, and ``python cli.py audit --config X`` audits them. Without a class, model and data
    are given by `class_path`. Output goes to a new folder under ``logs/`` for each run, including its config. No option is
    filled in from another one: jsonargparse would silently replace the user's value, and omit it from the saved
    config and from the checkpoint's hyperparameters.

    Args:
        model_class: The LightningModule, or a function that makes one. If None, a config names it.
        datamodule_class: The data module, or a function that makes one. If None, a config names it.
        *further: Further arguments of LightningCLI, by position.
        **options: Further arguments of LightningCLI, by name. Its defaults apply except for these: trainer_defaults (a CSV log, 10
            epochs, strategy ``ddp_losses``, and yours are added), seed_everything_default 0, configs of a run overwritten
            in the folder that it names, and ``--optimizer`` only with a `model_class`.

    Attributes:
        exit_status: Exit status for a script (`sys.exit`): 1 after an audit that found a difference, else 0.

    Raises:
        ConfigurationError: No device, or a global batch that is not divisible by the ranks.
    """

    def __init__(self, model_class: Any = None, datamodule_class: Any = None, *further: Any, **options: Any) -> None:
        # LightningCLI's arguments by name, whether they were passed by position or by name
        signature = inspect.signature(LightningCLI.__init__)
        given = signature.bind(self, model_class, datamodule_class, *further, **options).arguments
        del given["self"]
        # our defaults
        trainer_class = given.get("trainer_class", Trainer)
        given["trainer_defaults"] = _trainer_defaults(trainer_class) | (given.get("trainer_defaults") or {})
        given.setdefault("seed_everything_default", 0)
        # with a class_path, a single learning rate would replace the separate rates of encoder and loss
        given.setdefault("auto_configure_optimizers", model_class is not None)
        # each run has a new folder unless it names one
        given.setdefault("save_config_kwargs", {"overwrite": True})
        # a subcommand is a method of the class that the parser reads, whereas the user's trainer class is not changed
        self._trainer_to_make = trainer_class
        given["trainer_class"] = with_audit(trainer_class)
        self.exit_status = 0
        super().__init__(**given)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's subcommands and the audit."""
        return {**LightningCLI.subcommands(), "audit": {"model", "datamodule"}}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add trainer, model and data, replacing Lightning's headings of model and data, which are truncated sentences."""
        super().add_core_arguments_to_parser(parser)
        for name, heading in (("model", "The LightningModule"), ("data", "The data")):
            if getattr(self, f"subclass_mode_{name}") and name in (groups := parser.groups or {}):
                groups[name].title = heading

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        if subcommand != "audit":
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)
        parser.usage = "ddp-losses audit --config CONFIG [--audit.OPTION VALUE] [--OPTION VALUE] ..."
        parser.add_class_arguments(AuditOptions, "audit")  # first in the help
        self._add_arguments(parser)
        for option in ("ckpt_path", "weights_only"):  # a config saved by fit also contains these
            parser.add_argument(f"--{option}", type=Union[str, bool, None], default=None)  # noqa: UP007 - as above
        return parser

    def before_instantiate_classes(self) -> None:
        """Report sizes that a loss requires and that are missing, because jsonargparse accepts None for untyped parameters."""
        path = "init_args.loss" if self.subclass_mode_model else "loss"
        model = self._get(self.config, "model") or {}
        while sizes := model.get(f"{path}.init_args"):
            for name in ("num_classes", "embedding_size"):
                is_missing = name in sizes and sizes[name] is None
                if is_missing and _is_required(model.get(f"{path}.class_path"), name):
                    what, fix = f"model.{path}.init_args.{name}", "Set it in the config."
                    raise ConfigurationError(what, expected="a number", got="nothing", fix=fix)
            path += ".init_args.loss"  # continue with the loss inside a wrapping loss

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the trainer, with a progress bar that every terminal supports and the report at the end."""
        config = self._get(self.config_init, "trainer", default={})
        fix = "Set trainer.devices to 1 for plain training in one process, to more for more ranks."
        has_ranks = config.get("devices") not in (0, "0")
        expect(has_ranks, "trainer.devices", expected="1 or more ranks", got=0, fix=fix)
        self.trainer_class = self._trainer_to_make
        if "callbacks" in config:  # a function that makes trainers may not accept any
            callbacks = _as_list(kwargs.pop("callbacks", config.get("callbacks")))
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            if config.get("enable_progress_bar", False) is not False and not has_bar:
                callbacks.append(TQDMProgressBar(refresh_rate=10))  # only needs a carriage return
            kwargs["callbacks"] = [*callbacks, RunReport()]
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:  # a strategy or precision that is unknown to Lightning
            raise ConfigurationError(f"trainer: {error}") from error

    def instantiate_classes(self) -> None:
        """Make model, data and trainer, and raise our own errors unchanged instead of inside jsonargparse's report about types."""
        try:
            if self.subcommand == "audit":  # its trainers are made in separate processes
                self.config_init = self.parser.instantiate(self.config)
                self.model = self._get(self.config_init, "model")
                self.datamodule = self._get(self.config_init, "data")
                self._add_configure_optimizers_method_to_model(self.subcommand)
            else:
                super().instantiate_classes()
        except ValueError as error:
            if isinstance(error.__cause__, DDPLossError):
                raise error.__cause__ from None
            raise

    def after_instantiate_classes(self) -> None:
        """Check the data against the number of ranks."""
        data = self.datamodule
        if not isinstance(data, BatchedArrayDataModule):
            return
        auditing = self.subcommand == "audit"
        ranks = devices_of(*self._audit_options()) if auditing else self.trainer.world_size
        data.check(ranks, str(self.subcommand))

    def _audit_options(self) -> tuple[AuditOptions, dict[str, Any]]:
        """Return the audit's options, and the trainer's options with all callbacks of a fit except our report."""
        trainer = dict(self._get(self.config_init, "trainer", default={}))
        callbacks = _as_list(trainer.get("callbacks"))
        callbacks += [self._get(self.config_init, key) for key in self._subcommand_parsers["audit"].callback_keys]
        callbacks += _as_list(self.trainer_defaults.get("callbacks"))
        return self._get(self.config_init, "audit"), trainer | {"callbacks": callbacks}

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
        devices: Number of ranks. Default: the trainer's, and at least 2.
        steps: Optimizer steps.
        tolerance: Largest relative error that is not reported. Default: estimated from the precision.
        randomness: global, by_row: all ranks draw what one process draws. rank: from their own generators. Default: as the strategy does.
        without: Features disabled on both sides: batch_norm, precision, uneven.
        deterministic: Deterministic algorithms only.
        timeout_seconds: Time limit of each run.
        output: Folder for report.html, report.json and ratios.png. Each audit gets a new one inside it.
    """

    devices: Optional[int] = None  # noqa: UP045 - read by jsonargparse at run time on every Python
    steps: int = 3
    tolerance: Optional[float] = None  # noqa: UP045 - read by jsonargparse at run time on every Python
    randomness: Optional[str] = None  # noqa: UP045 - read by jsonargparse at run time on every Python
    without: List[str] = field(default_factory=list)  # noqa: UP006 - read by jsonargparse at run time on every Python
    deterministic: bool = True
    timeout_seconds: float = 300.0
    output: str = "logs/audit"


def _trainer_defaults(trainer_class: Any) -> dict[str, Any]:
    """Return our defaults for a trainer. For a function that makes trainers, only those that it accepts."""
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs", "name": "fit"}}
    defaults = {"logger": logger, "max_epochs": 10, "log_every_n_steps": 10, "strategy": "ddp_losses"}
    if isinstance(trainer_class, type):
        return defaults
    taken = inspect.signature(trainer_class).parameters
    return {name: default for name, default in defaults.items() if name in taken}


def _as_list(callbacks: Any) -> list[Any]:
    """Return callbacks as a new list. Lightning accepts several, one or None."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list) else [callbacks]


def _is_required(class_path: Any, parameter: str) -> bool:
    """Return whether a parameter of a class does not have a default."""
    signature = inspect.signature(pydoc.locate(str(class_path)))  # type: ignore[arg-type]
    return parameter in signature.parameters and signature.parameters[parameter].default is inspect.Parameter.empty


def _audit(self: Trainer) -> None:
    """Compare every gradient of N ranks with one process, and explain the difference."""


def with_audit(trainer_class: Any) -> type[Trainer]:
    """Return a class with a method for each subcommand, which only the parser reads, using the first line of each docstring as help.

    Args:
        trainer_class: A subclass of Trainer, or a function that makes a trainer.
    """
    named = trainer_class if isinstance(trainer_class, type) else class_from_function(trainer_class)
    methods = {name: _with_whole_summary(getattr(named, name)) for name in LightningCLI.subcommands()}
    return type(named.__name__, (named,), {**methods, "audit": _audit, "__doc__": named.__doc__})


def _with_whole_summary(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for the parser to read, with the first paragraph of its docstring joined to one line."""
    summary, *sections = (inspect.getdoc(method) or "").split("\n\n")
    read = functools.wraps(method)(lambda *_, **__: None)
    read.__doc__ = "\n\n".join([" ".join(summary.split()), *sections])
    return read


def run_audit(
    model: LightningModule, data: Any, trainer: dict[str, Any], options: AuditOptions, ckpt_path: str | None
) -> AuditReport:
    """Audit the training of a config, print the report and write it to files.

    Args:
        model: LightningModule of the config.
        data: Data module or loaders of the config.
        trainer: Instantiated options of the Trainer.
        options: Options of the audit.
        ckpt_path: A checkpoint to start from.
    """
    # options that the config sets, and the audit's defaults for all other options
    given = {name: value for name, value in trainer.items() if value is not None}
    strategy = given.pop("strategy", "ddp_losses")
    asked = vars(options) | {"devices": devices_of(options, trainer)}
    folder = _new_name(Path(asked.pop("output")))
    report = audit(model, data, strategy=strategy, trainer_kwargs=given, ckpt_path=ckpt_path, **asked)
    show_report(report, folder)
    return report


def _new_name(root: Path) -> Path:
    taken = [int(found.name[8:]) for found in root.glob("version_*") if found.name[8:].isdigit()]
    return root / f"version_{max(taken, default=-1) + 1}"


def devices_of(options: AuditOptions, trainer: dict[str, Any]) -> int:
    """Return the number of ranks: the option, otherwise the trainer's, otherwise 2."""
    if options.devices is not None:
        return options.devices
    given = trainer.get("devices")
    count = len(given) if isinstance(given, list) else given
    return max(2, int(str(count))) if str(count).isdigit() else 2


# ---------------------------------------------------------------------- parity, and the report of both

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "none": None}


def run_parity(arguments: Sequence[str]) -> int:
    """Compare a loop's ranks with one process, show the report and return the exit status.

    Args:
        arguments: Arguments after ``ddp-losses parity``.
    """
    given = vars(_parity_parser().parse_args(arguments))
    sys.path.insert(0, os.getcwd())  # not on the path of a console script
    output = given.pop("output")
    report = parity(**_parity_options(given))
    show_report(report, None if output is None else Path(output))
    return int(not report.equal)


def _parity_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``parity``, parsed and imported."""
    form = "loop" if given.pop("loop") else "step"
    function = named("ddp-losses parity", given.pop("function"))
    options = given | {"build": named("ddp-losses parity", given["build"]), form: function}
    batches = named("ddp-losses parity", given["batches"])
    if callable(batches):
        parameters = inspect.signature(batches).parameters.values()
        if all(parameter.default is not parameter.empty for parameter in parameters):  # it does not need the rank
            batches = batches()
    options |= {name: _DTYPES[given[name]] for name in ("dtype", "precision")}
    if given["splits"] not in ("even", "uneven"):
        options["splits"] = [int(part) for part in given["splits"].split(",")]
    if ":" in given["wrap"]:
        options["wrap"] = named("ddp-losses parity", given["wrap"])
    elif given["wrap"] == "none":
        options["wrap"] = None
    return options | {"batches": batches}


def show_report(report: AuditReport, folder: Path | None) -> None:
    """Print a report, and write report.html, report.json and ratios.png.

    Args:
        report: Report of an audit.
        folder: Folder of the files. If None, no files are written.
    """
    console = Console()
    console.print(report, highlight=False)
    if folder is None:
        return
    report.to_json(folder / "report.json")
    report.to_html(folder / "report.html")
    written = ["report.html", "report.json"]
    try:
        report.plot(folder / "ratios.png")
        written.append("ratios.png")
    except ImportError:
        console.print("no picture: pip install 'lightning-ddp-losses[demo]'", markup=False)
    sentence = f"\nWritten to {folder}: {', '.join(written)} ({report.settings['seconds']} s)"
    console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def _parity_parser() -> argparse.ArgumentParser:
    text = "N ranks of a training loop against one process; status 0 equal, 1 different, 2 could not run."
    parser = argparse.ArgumentParser(prog="ddp-losses parity", description=text)
    parser.add_argument("build", help="my_module:build makes the model, or the model and its optimizer's maker")
    parser.add_argument("function", help="my_module:step, from model and batch to the loss; or a loop")
    parser.add_argument("batches", help="my_module:batches: global batches, or a function that gives them")
    parser.add_argument("--loop", action="store_true", help="the function is a whole optimizer step")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--wrap", default="ddp", help="ddp, fully_shard, none, or my_module:wrap")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches to an optimizer step")
    parser.add_argument("--splits", default="even", help="even, uneven, or rows of each rank: 5,3")
    parser.add_argument("--steps", type=int, help="optimizer steps; all that the batches are for")
    parser.add_argument("--dtype", choices=_DTYPES, default="float64", help="none: as model and batches are")
    parser.add_argument("--precision", choices=_DTYPES, default="none", help="dtype of autocast; none: no autocast")
    draws = "global, by_row: draws of one process"
    parser.add_argument("--randomness", choices=("rank", "global", "by_row"), default="rank", help=draws)
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="time limit of each run")
    parser.add_argument("--output", help="folder for report.html, report.json and ratios.png")
    return parser


# ---------------------------------------------------------------------- the console script

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "parity": run_parity,
    "certify": run_certify,
    "explain": run_explain,
    "configs": run_configs,
    "doctor": run_doctor,
}
"""Commands other than training and auditing, by their first word."""
COMPARING = ("audit", "parity", "certify")
"""Commands with the exit status of a comparison."""


def config_files(arguments: Sequence[str]) -> list[Path]:
    """Return the existing config files that a command line names. The parser reports the others."""
    return [Path(config) for _, _, config in named_configs(arguments) if os.path.isfile(config)]


def extend_module_path_(path: list[str], arguments: Sequence[str]) -> None:
    """Make modules in a config's own folder and in the current folder importable for the config.

    The console script has neither on its path. Both are appended at the end, so that a file in them does not hide an installed package.

    Args:
        path: Python's list of module folders (`sys.path`).
        arguments: The command line.
    """
    beside = [str(config.absolute().parent) for config in config_files(arguments)]
    for folder in (*beside, os.getcwd()):
        if folder not in path:
            path.append(folder)


def missing_class_path(arguments: Sequence[str]) -> str:
    """Return advice if a config's model has no class_path, as in configs of a user's own command line, otherwise an empty text."""
    for file in config_files(arguments):
        config = None
        with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
            config = yaml.safe_load(file.read_text())
        model = config.get("model") if isinstance(config, dict) else None
        if isinstance(model, dict) and "class_path" not in model:
            return (
                f"{file}: `model` has no class_path. A LightningCLI(MyModule, MyData) of your own reads such a config: write "
                "LossCLI (from lightning_ddp_losses.cli) in its place, and `python cli.py audit --config ...` audits it. Or give the "
                "class here, model: {class_path: package.MyModule, init_args: {...}}, and data likewise.\n"
            )
    return ""


def replace_letters_that_the_terminal_lacks() -> None:
    """Show a question mark for a letter that the terminal's encoding (such as ascii) does not have, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def note_left_over_variables(error: Exception) -> None:
    """Add a launcher's variables to an error during start-up, because Lightning reads them when it makes the Trainer."""
    if not dist.is_initialized():
        for sentence in launch_variables.left_over():
            error.add_note(f"{sentence} {launch_variables.ADVICE}")


def main() -> None:
    """Run the console script, printing a user's mistake as a message without a traceback.

    Exit status: 0 done (or an audit that found both sides equal), 1 an error (or an audit that found a difference), 2 a
    command line that cannot be parsed, or an audit that could not run.
    """
    replace_letters_that_the_terminal_lacks()
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{version_line()}\n")
        return
    # hide warnings that a user cannot act on
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    command = "".join(sys.argv[1:2])
    try:
        if command in COMMANDS:  # without training
            sys.exit(COMMANDS[command](sys.argv[2:]))
        # a config of the package is given by name, and started ranks receive its path
        sys.argv[1:] = with_shipped_configs(sys.argv[1:])
        extend_module_path_(sys.path, sys.argv[1:])
        described = {"prog": "ddp-losses", "description": DESCRIPTION, "epilog": MORE_COMMANDS}
        status = LossCLI(parser_kwargs=described).exit_status
    except SystemExit as stop:
        if stop.code == 2:  # a command line or a config that the parser rejected
            sys.stderr.write(missing_class_path(sys.argv[1:]))
            sys.stderr.write(misspelled.advice(config_files(sys.argv[1:])))
        raise
    except (DDPLossError, MisconfigurationException) as error:
        if getattr(error, "collective", False) and process_groups.rank() > 0:
            sys.exit(1)  # rank 0 prints the same error
        message = "\n".join([f"ddp-losses: {type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if command not in COMPARING:
            sys.exit(message)
        sys.stderr.write(f"{message}\n")
        sys.exit(2)
    except Exception as error:
        note_left_over_variables(error)
        if command not in COMPARING:
            raise
        traceback.print_exc()
        sys.exit(2)
    if status:
        sys.exit(status)
