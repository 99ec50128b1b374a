"""`LossCheck`: every rank has a finite loss, each element counts equally in it, and the logged values are those of all ranks.

The losses of a step are judged at the next one, before a checkpoint is saved and at the end of training (``loss_reader.py``). A finding
names the step of its loss. A missing loss and the logged names are known on the host and judged at once.

The check comes first, then the history of losses, then logged values (`LoggedValues`): names that are reduced over ranks, values that each
rank logs alone, values that decide, and epoch means. A value decides if a callback or a scheduler monitors it. If it differs between ranks,
they save, stop or slow down differently.

An epoch mean is ``self.log(..., on_epoch=True, sync_dist=True)``. Lightning divides the ranks' mean sum by their mean number of rows.
Plain DDP writes that second mean back into an integer tensor, which floors it. The logged value is then too large if ``W`` does not divide
the rows. (Lightning 2.6.6, issue 21859; right under ``"ddp_losses"``.) The sums of a rank must be read before Lightning reduces them in
place: in a validation at its last batch, in a training epoch at its end, or at its last batch too if another callback asks for metrics
earlier. All ranks' sums give the true mean at the end of the epoch. The logged value is read one stage later.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks import findings
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_check import contrastive_losses
from lightning_ddp_losses.callbacks.facts.fact import Columns, Fact, Numbers
from lightning_ddp_losses.callbacks.facts.hook_ends import EpochEnd, name_of_log, needs_all_ranks
from lightning_ddp_losses.callbacks.facts.loss_rules import (
    MEAN,
    MONITORED,
    ROWS,
    SUM,
    compare_epoch,
    compare_logged,
    compare_losses,
    compare_names,
    has_biased_weights,
    uneven_micro_batches,
)
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.loss_reader import LossReader, is_divided
from lightning_ddp_losses.callbacks.report import LOSSES_FILE_NAME, MOST_RANKS_ONE_BY_ONE
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.errors import DDPLossError

_WINDOW = 20  # steps, of which some may be biased
_HISTORY = 10_000


@dataclass(kw_only=True, eq=False, repr=False)
class LossCheck(RankCheck, default=True):
    """Every rank has a loss, finite, not zero from the start, of elements with equal weight. Logged values are those of all ranks.

    Covers F30 (over ranks; over the micro-batches that Lightning accumulates as a note), F31, F35, F46, F55, F56, F79 and F82. Keeps
    every rank's loss in ``history`` and, if there is a log folder, in ``losses_by_rank.csv``. ``DDPChecks(log_figures=True)`` sends
    them to the loggers too, as often as Lightning logs (``ddp_checks/rank_0_loss``; with more than 8 ranks the smallest and largest).

    Args:
        zero_steps: Number of first steps after which a loss that was exactly zero in all of them is reported.
        bias: Allowed ratio of an element's weight on two ranks (1.1 is 10%), reported after three steps of 20, or in two micro-batches of
            an accumulation window, reported once.
        file: If True, write ``losses_by_rank.csv``.
        **options: As ``RankCheck``.

    Communication: 88 bytes in the handshake before backward, and 16 for each micro-batch that Lightning accumulates. A few numbers at
        the start and end of an epoch and of validation.

    Example:
        >>> checks = DDPChecks([LossCheck(bias=1.5, file=False)])
    """

    faults = ("F30", "F31", "F35", "F46", "F55", "F56", "F79", "F82")
    needs_peers = False

    zero_steps: int = 5
    bias: float = 1.1
    file: bool = True

    def _forget(self) -> None:
        self._replaces_step = False  # of the strategy
        self._history = LossHistory(file=self.file)
        self._is_missing = False  # training_step returned None
        self._reader = LossReader()
        self._values = LoggedValues()
        self._biased: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def history(self) -> list[tuple[int, tuple[float, ...]]]:
        """Step and the loss of each rank, of the latest 10,000 steps of the latest fit."""
        return list(self._history.losses)

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Read the result of ``training_step`` before Lightning does."""
        compares_rows = bool(contrastive_losses(module)[0])
        self._results = _results_of_epoch(trainer)  # one object in all epochs
        divides = is_divided(trainer)
        has_windows = module.automatic_optimization and divides and not compares_rows
        self._reader = LossReader(is_divided=divides, compares_rows=compares_rows, has_windows=has_windows)
        if module.automatic_optimization and process_groups.world_size() > 1:
            strategy: Any = trainer.strategy
            # on the strategy: Lightning's loop calls the module through it, wrapped or not
            original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                if (output.get("loss") if isinstance(output, Mapping) else output) is None:
                    self._sync_without_loss()
                return output

            strategy.training_step = training_step
            self._replaces_step = True

    def _sync_without_loss(self) -> None:
        """Exchange the row of a rank that returned None with its peers. Lightning alone would stop this rank only."""
        if not self.runner.synchronising:
            return
        # peers that wait in the strategy's handshake get the error there
        if self.runner.rows_in_strategy_handshake:
            missing = Finding.of("F35", ranks=(process_groups.rank(),), name="loss")
            finding = replace(missing, check=self.title, step=self.runner.step, moment="training_step")
            handshake.raise_on_all_ranks(DDPLossError(finding.text(), findings=[finding]), "training_step")
        self._is_missing = True
        self.runner.run_stage(CheckStage.BEFORE_BACKWARD)

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Start to copy the loss and its reductions to the host."""
        self._reader.see_loss(trainer, module, loss, self.runner.step)
        self._is_missing = False

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Remember logged sums before they are reduced."""
        if trainer.validating or trainer.testing or trainer.is_last_batch:
            self._values.see_batch_end(trainer)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Give the strategy its method back and close the file."""
        if self._replaces_step:
            vars(trainer.strategy).pop("training_step", None)
        vars(self).pop("_results", None)
        self._history.close()

    # ------------------------------------------------------------------ facts

    def _read_losses(self) -> Numbers:
        """Return the losses of the step before. At the first step, which shows most faults, those of that step."""
        self._reader.read(self.runner.step if self.runner.steps else math.inf)
        return self._numbers()

    def _read_last(self) -> Numbers | None:
        """Return the losses that have not been read yet."""
        if not self._reader.pending:
            return None
        self._reader.read(math.inf)
        return self._numbers()

    def _numbers(self) -> Numbers:
        is_missing, self._is_missing = self._is_missing, False
        keys = self._values.hash_keys(self._results)
        options = {"bias": self.bias, "most_zero_steps": self.zero_steps}
        return {"is_missing": is_missing, "keys": keys, **self._reader.numbers(), **options}

    def _see_losses(self, columns: Columns) -> None:
        """Keep the losses of all ranks, and add the number of biased steps."""
        step = max(columns["step"])
        if step >= 0:
            self._history.add(self.runner, step, list(columns["loss"]))
            if not any(columns["is_missing"]):
                self._biased.append(has_biased_weights(columns))
            if any(columns["micro_batches"]) and uneven_micro_batches(columns):  # is reported now, and once
                self._reader.stop_windows()
        columns["biased_steps"] = [sum(self._biased)]

    def _read_epoch(self, *, validation: bool = False) -> Numbers:
        return self._values.numbers_of_epoch(_results_of_epoch(self.runner.trainer, validation=validation))

    def _read_names(self, *, validation: bool = False) -> Numbers:
        local = self._values.numbers_of_one_rank(self.runner.trainer, validation=validation)
        return self._epoch_end(validation).numbers() | local

    def _see_names(self, columns: Columns, *, validation: bool = False) -> None:
        self._epoch_end(validation).take(columns)

    def _epoch_end(self, validation: bool) -> EpochEnd:
        stage = CheckStage.VALIDATION_LOGGED if validation else CheckStage.TRAIN_LOGGED
        return self.runner.epoch_ends.ends[stage]

    def _see_epoch(self, columns: Columns) -> None:
        self._values.keep_true_means(columns)

    def _read_logged(self) -> Numbers:
        return self._values.logged_numbers(self.runner.trainer)

    def _see_logged(self, columns: Columns) -> None:
        self._values.add_true_means_(columns)

    facts = (
        Fact("losses", CheckStage.BEFORE_BACKWARD, _read_losses, compare_losses, _see_losses),
        Fact("last losses", CheckStage.SAVE, _read_last, compare_losses, _see_losses),
        Fact("last losses", CheckStage.TRAIN_END, _read_last, compare_losses, _see_losses),
        Fact("logged means", CheckStage.TRAIN_EPOCH_END, _read_epoch, compare_names, _see_epoch),
        Fact("logged names", CheckStage.TRAIN_LOGGED, _read_names, compare_epoch, _see_names),
        Fact(
            *("logged means", CheckStage.VALIDATION_EPOCH_END, partial(_read_epoch, validation=True)),
            *(compare_names, _see_epoch),
        ),
        Fact(
            *("logged names", CheckStage.VALIDATION_LOGGED, partial(_read_names, validation=True)),
            *(compare_epoch, partial(_see_names, validation=True)),
        ),
        Fact("logged values", CheckStage.EPOCH_START, _read_logged, compare_logged, _see_logged),
        Fact("logged values", CheckStage.VALIDATION_END, _read_logged, compare_logged, _see_logged),
        Fact("logged values", CheckStage.TRAIN_END, _read_logged, compare_logged, _see_logged),
    )

    # ------------------------------------------------------------------ findings and figures

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return the logged names of this rank with their lines, or its values."""
        if finding.fault == "F46":
            lines = self.runner.epoch_ends.lines
            return {name: lines.get(name, "") for name in self._values.keys}
        return self._values.local_values if finding.fault == "F56" else None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the values that only some ranks log, or that differ between ranks."""
        return [_name_keys(finding, texts) if finding.fault == "F46" else _name_values(finding, texts)]

    def figures(self) -> dict[str, float]:
        """Return the smallest and the largest loss of the last step."""
        if not self._history.losses:
            return {}
        _, losses = self._history.losses[-1]
        return {"loss_min": min(losses), "loss_max": max(losses)}

    def remarks(self) -> list[str]:
        """Return the range of the ranks' losses in the last step."""
        figures = {f"{loss:.4g}" for loss in self.figures().values()}
        return [f"loss of the last step {' to '.join(sorted(figures, key=float))}"] if figures else []


class LossHistory:
    """Keeps the losses of all ranks in a fit, writes them to a file on rank 0, and sends them to the loggers.

    Args:
        file: If True, write ``losses_by_rank.csv``.

    Attributes:
        losses: Step and the loss of each rank, of the latest 10,000 steps.
    """

    def __init__(self, *, file: bool) -> None:
        self.losses: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_HISTORY)
        self._file = file
        self._stream: IO[str] | None = None
        self._logged: int | None = None  # how often Lightning had logged when this class last sent losses

    def add(self, runner: CheckRunner, step: int, losses: list[float]) -> None:
        """Add the losses of one step."""
        self.losses.append((step, tuple(losses)))
        self._send_to_loggers(runner, step, losses)
        # one rank writes, if there is a folder and more than one loss
        if not self._file or len(losses) == 1:
            return
        if self._stream is None:
            self._stream = runner.row_exchange.report.open_file(LOSSES_FILE_NAME)
            if self._stream is None:
                return
            titles = [f"rank_{rank}" for rank in range(len(losses))]
            self._stream.write(",".join(["step", *titles]) + "\n")
        self._stream.write(",".join([str(step), *map(repr, losses)]) + "\n")

    def _send_to_loggers(self, runner: CheckRunner, step: int, losses: list[float]) -> None:
        """Send each rank's loss as often as Lightning logs. With many ranks the smallest and the largest."""
        # an option of the Trainer, which its type does not show
        every: int = getattr(runner.trainer, "log_every_n_steps", 0)
        if not every:
            return
        # the check may look at fewer steps than Lightning logs: it sends the first one after each of those
        before, self._logged = self._logged, (step + 1) // every
        if self._logged == (step // every if before is None else before):
            return
        figures = {"loss_min": min(losses), "loss_max": max(losses)}
        if len(losses) <= MOST_RANKS_ONE_BY_ONE:
            figures = {f"rank_{rank}_loss": loss for rank, loss in enumerate(losses)}
        runner.row_exchange.report.log_step(runner.trainer, figures, step)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


# ---------------------------------------------------------------------- logged values


class LoggedValues:
    """Compares logged values between ranks, and epoch means with the true ones.

    Attributes:
        keys: Names that this rank logs and reduces.
        local_values: Values that this rank logs alone.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._hash, self._logged = 0, (0, 0)  # of the keys, and the values whose keys they are
        self.local_values: dict[str, float] = {}
        self._rows_before: dict[str, Tensor] = {}  # by Lightning's key, before the reduction
        # means of the last epoch that may be floored: sum and rows of each rank. The same on every rank
        self._true_means: Columns = {}

    # ------------------------------------------------------------------ names

    def hash_keys(self, results: Any) -> int:
        """Return a hash of the names of logged values that need all ranks: with ``sync_dist``, or a metric."""
        logged = id(results), len(results)  # names are never taken out
        if logged != self._logged:
            self._logged = logged
            self._keep_keys(results.items())
        return self._hash

    def _hash_keys_of_epoch(self, results: Any) -> int:
        """Return the same of the names that were logged in this epoch."""
        self._logged = 0, 0
        self._keep_keys((key, value) for key, value in results.items() if not value.has_reset)
        return self._hash

    def _keep_keys(self, logged: Iterable[tuple[str, Any]]) -> None:
        self.keys = sorted(name_of_log(key, value) for key, value in logged if needs_all_ranks(value))
        self._hash = hash_text("; ".join(self.keys))

    # ------------------------------------------------------------------ an epoch, before and after Lightning has logged its means

    def see_batch_end(self, trainer: Trainer) -> None:
        """Remember numbers of rows that Lightning may reduce in place before they are read. (Does not wait for the device.)"""
        validation = trainer.validating or trainer.testing
        for key, result in _results_of_epoch(trainer, validation=validation).items():
            if _is_global_mean(result) and not compat.is_reduced(result):
                self._rows_before[key] = result.cumulated_batch_size.clone()

    def numbers_of_one_rank(self, trainer: Trainer, *, validation: bool = False) -> dict[str, int]:
        """Return a hash of the values that are not reduced, of all hooks of the epoch. Keep the names that are.

        Values that decide are left out: they are compared once they are there for the callbacks that watch them.
        """
        results = _results_of_epoch(trainer, validation=validation)
        values = _values_of_one_rank(results)
        for name in _monitored_names(trainer):
            values.pop(name, None)
        self.local_values = values
        self._hash_keys_of_epoch(results)
        return {"local_values": hash_text("; ".join(map(repr, values.items())))}

    def numbers_of_epoch(self, results: Any) -> dict[str, Any]:
        """Return hashes of the names that are reduced and of the names of means, then sum and rows of each."""
        keys = self._hash_keys_of_epoch(results)
        sums = dict(sorted(self._sums(results)))
        numbers: dict[str, Any] = {"keys": keys, "names": hash_text("; ".join(sums))}
        for name, (total, rows) in sums.items():
            numbers[SUM + name] = total
            numbers[ROWS + name] = rows
        return numbers

    def _sums(self, results: Any) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield names with the sum of their values, each times its rows, and the number of rows."""
        for key, result in results.items():
            rows = self._rows_before.pop(key, None)
            if not _is_global_mean(result):
                continue
            if not compat.is_reduced(result):
                rows = result.cumulated_batch_size
            elif rows is None or "batch_end" in result.meta.fx:  # more was logged since it was remembered
                continue
            yield compat.epoch_name(results, result), (float(result.value), float(rows))

    def keep_true_means(self, columns: Columns) -> None:
        """Remember sums and rows of all ranks, of the means that may be floored: ``W`` does not divide their rows."""
        self._true_means = {}
        if len(set(columns["names"])) > 1:  # different names per rank: they cannot be lined up
            return
        for column, rows in columns.items():
            if column.startswith(ROWS) and sum(rows) % len(rows):
                name = column.removeprefix(ROWS)
                self._true_means |= {SUM + name: columns[SUM + name], ROWS + name: rows}

    def logged_numbers(self, trainer: Trainer) -> dict[str, Any]:
        """Return the means that may be floored, a hash of the monitored names, then each of their values. An empty list is no value."""
        numbers: dict[str, Any] = {}
        for column in self._true_means:
            if column.startswith(SUM):
                name = column.removeprefix(SUM)
                numbers[MEAN + name] = float(trainer.callback_metrics.get(name, math.nan))
        values = _monitored_values(trainer)
        numbers["monitors"] = hash_text("; ".join(values))
        for name, value in values.items():
            numbers[MONITORED + name] = [] if value is None else [value]
        return numbers

    def add_true_means_(self, columns: Columns) -> None:
        """Add the sums and rows of the last epoch, once."""
        columns |= self._true_means
        self._true_means = {}


def _results_of_epoch(trainer: Trainer, *, validation: bool = False) -> Any:
    """Return the values that training or validation has logged in this epoch, by Lightning's key."""
    return compat.logged_results(compat.validation_loop(trainer) if validation else trainer.fit_loop.epoch_loop)


def _values_of_one_rank(results: Any) -> dict[str, float]:
    """Return the values that each rank logs alone, without ``sync_dist``, so that the log shows those of rank 0."""
    found: dict[str, float] = {}
    for result in results.values():
        meta = result.meta
        if not result.is_tensor or result.has_reset or meta.sync.should or meta.sync.rank_zero_only:
            continue
        rows = float(result.cumulated_batch_size) if meta.on_epoch and meta.is_mean_reduction else 1.0
        found[meta.name] = float(result.value) / rows
    return found


def _is_global_mean(result: Any) -> bool:
    """Return whether a logged value is the mean of an epoch over all ranks, and was logged in this epoch."""
    if not result.is_tensor or result.has_reset:
        return False
    sync = result.meta.sync
    over_all_ranks = sync.should and not sync.rank_zero_only and sync.group is None
    return bool(over_all_ranks and result.meta.on_epoch and result.meta.is_mean_reduction)


def _monitored_names(trainer: Trainer) -> list[str]:
    """Return the names of the values that decide on checkpoints, early stopping or learning rates."""
    if trainer.state.fn != "fit":  # they decide on training alone
        return []
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    monitors += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return sorted({monitor for monitor in monitors if monitor and isinstance(monitor, str)})


def _monitored_values(trainer: Trainer) -> dict[str, float | None]:
    """Return this rank's values that decide. None for a value that is not logged."""
    found: dict[str, float | None] = {}
    for name in _monitored_names(trainer):
        value = trainer.callback_metrics.get(name)
        is_number = isinstance(value, Tensor) and value.numel() == 1
        found[name] = float(value) if is_number else None  # type: ignore[arg-type]
    return found


def _name_keys(finding: Finding, lines_by_rank: Sequence[dict[str, str]]) -> Finding:
    """Name the keys that only some ranks log, with the line of the first one of each rank."""
    common = set.intersection(*map(set, lines_by_rank))
    only_some: set[str] = set()
    values = []
    for lines in lines_by_rank:
        further = [name for name in lines if name not in common]
        only_some.update(further)
        text = ", ".join(further) or "nothing more"
        if further and lines[further[0]]:
            text += f", logged at {lines[further[0]]}"
        values.append(text)
    return replace(finding, values=tuple(values), name=", ".join(sorted(only_some)))


def _name_values(finding: Finding, values_by_rank: Sequence[dict[str, float]]) -> Finding:
    """Name the values that ranks log alone and that differ."""
    names = list(findings.differing_columns(values_by_rank))[: findings.MOST_NAMES]
    shown = tuple(", ".join(f"{values.get(name, math.nan):.6g}" for name in names) for values in values_by_rank)
    return Finding.of("F56", name=", ".join(names), values=shown, shown=findings.shown_names(names))
