"""`LossCheck`: every rank has a finite loss with equally weighted elements, and logged values are reduced over all ranks.

The losses of a step are judged in the next step, before a checkpoint is saved and at the end of training (``loss_reader.py``). A finding
names the step of its loss. A missing loss and the logged names are available on the host and judged immediately.

This file contains the check, the history of losses, and `LoggedValues`, which handles names that are reduced over ranks, values that each
rank logs without reduction, monitored values, and epoch means. A monitored value is read by a callback or a scheduler. If it differs
between ranks, their checkpoints, early stopping or learning rates differ.

An epoch mean is ``self.log(..., on_epoch=True, sync_dist=True)``. Lightning divides the mean over ranks of their sums by the mean of their
numbers of rows. Plain DDP writes the latter back into an integer tensor, which floors it. The logged value is then too large if ``W`` does
not divide the number of rows. (Lightning 2.6.6, issue 21859; correct under ``"ddp_losses"``.) The sums of a rank must be read before
Lightning reduces them in place: at the last batch of a validation, and at the end of a training epoch, or also at its last batch if another
callback reads metrics earlier. The true mean is computed from the sums of all ranks at the end of the epoch. The logged value is read one
stage later.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.errors import DDPLossError

_WINDOW = 20  # number of recent steps among which biased ones are counted
_HISTORY = 10_000
# stages of facts that are read more than once
_LAST = (CheckStage.SAVE, CheckStage.TRAIN_END)
_EPOCH_ENDS = (CheckStage.TRAIN_EPOCH_END, CheckStage.VALIDATION_EPOCH_END)
_HOOKS_RETURNED = (CheckStage.TRAIN_LOGGED, CheckStage.VALIDATION_LOGGED)
_VALUES_LOGGED = (CheckStage.EPOCH_START, CheckStage.VALIDATION_END, CheckStage.TRAIN_END)
_EQUAL, _ZERO = ("keys",), ("is_missing", "is_odd", "biased_steps", "is_uneven")  # columns of losses that are healthy


@dataclass(kw_only=True, eq=False, repr=False)
class LossCheck(RankCheck, default=True):
    """Checks that every rank has a finite loss with equally weighted elements, and that logged values are reduced over all ranks.

    A loss that is exactly zero from the first step is also a fault. The check covers F30 (between ranks, and as a note between accumulated
    micro-batches), F31, F35, F46, F55, F56, F79 and F82. The losses of all ranks are stored in ``history`` and, if there is a log folder,
    in ``losses_by_rank.csv``. With ``DDPChecks(log_figures=True)`` they are also sent to the loggers, at Lightning's logging interval
    (``ddp_checks/rank_0_loss``; with more than 8 ranks only the smallest and largest).

    Args:
        zero_steps: Number of first steps after which a loss that was exactly zero in all of them is reported.
        bias: Allowed ratio of an element's weight on two ranks (1.1 is 10%), reported after three of 20 steps, or in two micro-batches of
            an accumulation window, reported once.
        file: If True, write ``losses_by_rank.csv``.
        **options: Same as in ``RankCheck``.

    Communication: 88 bytes in the handshake before backward, and 16 for each accumulated micro-batch. A few numbers at the start and end
        of an epoch and of validation.

    Example:
        >>> checks = DDPChecks([LossCheck(bias=1.5, file=False)])
    """

    faults = ("F30", "F31", "F35", "F46", "F55", "F56", "F79", "F82")
    needs_peers = False

    zero_steps: int = 5
    bias: float = 1.1
    file: bool = True

    def _forget(self) -> None:
        self._replaces_step = False  # whether the strategy's training_step is replaced
        self._history = LossHistory(file=self.file)
        self._is_missing = False  # training_step returned None
        self._reader = LossReader()
        self._values = LoggedValues()
        self._biased: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def history(self) -> list[tuple[int, tuple[float, ...]]]:
        """Number and losses of all ranks for each of the last 10,000 steps of the latest fit."""
        return list(self._history.losses)

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Read the result of ``training_step`` before Lightning does."""
        compares_rows = bool(contrastive_losses(module)[0])
        self._results = self.runner.epoch_ends.ends[CheckStage.TRAIN_LOGGED].results  # one object in all epochs
        divides = is_divided(trainer)
        has_windows = module.automatic_optimization and divides and not compares_rows
        self._reader = LossReader(is_divided=divides, compares_rows=compares_rows, has_windows=has_windows)
        if module.automatic_optimization and process_groups.world_size() > 1:
            strategy: Any = trainer.strategy
            # Lightning's loop calls the module through the strategy, whether it is wrapped or not
            original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                if (output.get("loss") if isinstance(output, Mapping) else output) is None:
                    self._sync_without_loss()
                return output

            strategy.training_step = training_step
            self._replaces_step = True

    def _sync_without_loss(self) -> None:
        """Exchange the row of a rank that returned None with its peers. Without this, Lightning would stop only this rank."""
        if not self.runner.synchronising:
            return
        # peers that wait in the strategy's handshake receive the error there
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
        """Store logged sums before they are reduced."""
        if trainer.validating or trainer.testing or trainer.is_last_batch:
            self._values.see_batch_end(self._epoch_end().results)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Restore the strategy's method and close the file."""
        if self._replaces_step:
            vars(trainer.strategy).pop("training_step", None)
        vars(self).pop("_results", None)
        self._history.close()

    # ------------------------------------------------------------------ facts

    def _read_losses(self) -> Numbers:
        """Return the losses of the previous step. At the first step, which reveals most faults, return its own losses."""
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
        numbers = self._reader.numbers()
        is_odd = numbers["bad_batch"] >= 0 or numbers["zero_steps"] == self.zero_steps
        options = {"bias": self.bias, "most_zero_steps": self.zero_steps}
        return {"is_missing": is_missing, "is_odd": is_odd, "keys": keys, **numbers, **options}

    def _see_losses(self, columns: Columns) -> None:
        """Store the losses of all ranks, and add columns: the number of biased steps, and whether micro-batches are uneven."""
        step, is_uneven = max(columns["step"]), False
        if step >= 0:
            self._history.add(self.runner, step, list(columns["loss"]))
            if not any(columns["is_missing"]):
                self._biased.append(has_biased_weights(columns))
            is_uneven = any(columns["micro_batches"]) and bool(uneven_micro_batches(columns))
            if is_uneven:  # reported now, and only once
                self._reader.stop_windows()
        columns["biased_steps"] = [sum(self._biased)]
        columns["is_uneven"] = [is_uneven]

    def _read_epoch(self) -> Numbers:
        return self._values.numbers_of_epoch(self._epoch_end().results)

    def _read_names(self) -> Numbers:
        end = self._epoch_end()
        return end.numbers() | self._values.numbers_of_one_rank(self.runner.trainer, end.results)

    def _see_names(self, columns: Columns) -> None:
        self._epoch_end().take(columns)

    def _epoch_end(self) -> EpochEnd:
        """Return the epoch end of the loop that is running."""
        trainer = self.runner.trainer
        stage = CheckStage.TRAIN_LOGGED
        if trainer.validating or trainer.testing:
            stage = CheckStage.VALIDATION_LOGGED
        return self.runner.epoch_ends.ends[stage]

    def _see_epoch(self, columns: Columns) -> None:
        self._values.keep_true_means(columns)

    def _read_logged(self) -> Numbers:
        return self._values.logged_numbers(self.runner.trainer)

    def _see_logged(self, columns: Columns) -> None:
        self._values.add_true_means_(columns)

    facts = (
        Fact("losses", CheckStage.BEFORE_BACKWARD, _read_losses, compare_losses, _see_losses, _EQUAL, _ZERO),
        Fact("last losses", _LAST, _read_last, compare_losses, _see_losses, _EQUAL, _ZERO),
        Fact("logged means", _EPOCH_ENDS, _read_epoch, compare_names, _see_epoch),
        Fact("logged names", _HOOKS_RETURNED, _read_names, compare_epoch, _see_names),
        Fact("logged values", _VALUES_LOGGED, _read_logged, compare_logged, _see_logged),
    )

    # ------------------------------------------------------------------ findings and figures

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return the names that this rank logs with their source lines, or its logged values."""
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
    """Stores the losses of all ranks in a fit, writes them to a file on rank 0, and sends them to the loggers.

    Args:
        file: If True, write ``losses_by_rank.csv``.

    Attributes:
        losses: Number and losses of all ranks for each of the last 10,000 steps.
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
        # only one rank has a file to write, and a single loss is not written
        if not self._file or len(losses) == 1:
            return
        if self._stream is None:
            self._stream = runner.row_exchange.report.open_file(LOSSES_FILE_NAME)
            if self._stream is None:
                self._file = False
                return
            titles = [f"rank_{rank}" for rank in range(len(losses))]
            self._stream.write(",".join(["step", *titles]) + "\n")
        self._stream.write(",".join([str(step), *map(repr, losses)]) + "\n")

    def _send_to_loggers(self, runner: CheckRunner, step: int, losses: list[float]) -> None:
        """Send the loss of each rank at Lightning's logging interval. With many ranks, send only the smallest and largest."""
        # this attribute is missing in the Trainer's type annotations
        every: int = getattr(runner.trainer, "log_every_n_steps", 0)
        if not every:
            return
        # the check may read fewer steps than Lightning logs, so it sends the first step that it reads after each logged one
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
        local_values: Values that this rank logs without reduction.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._hash, self._logged = 0, (0, 0)  # hash of the keys, and the values that were hashed
        self.local_values: dict[str, float] = {}
        self._rows_before: dict[str, Tensor] = {}  # by Lightning's key, before the reduction
        # sums and rows of all ranks for the means of the last epoch that may be floored, equal on all ranks
        self._true_means: Columns = {}

    # ------------------------------------------------------------------ names

    def hash_keys(self, results: Any) -> int:
        """Return a hash of the names of logged values that need all ranks: with ``sync_dist``, or a metric."""
        logged = id(results), len(results)  # names are never removed
        if logged != self._logged:
            self._logged = logged
            self._keep_keys(results.items())
        return self._hash

    def _hash_keys_of_epoch(self, results: Any) -> int:
        """Return the same hash for the names that were logged in this epoch."""
        self._logged = 0, 0
        self._keep_keys((key, value) for key, value in results.items() if not value.has_reset)
        return self._hash

    def _keep_keys(self, logged: Iterable[tuple[str, Any]]) -> None:
        self.keys = sorted(name_of_log(key, value) for key, value in logged if needs_all_ranks(value))
        self._hash = hash_text("; ".join(self.keys))

    # ------------------------------------------------------------------ an epoch, before and after Lightning has logged its means

    def see_batch_end(self, results: Any) -> None:
        """Copy the numbers of rows that Lightning may reduce in place before they are read. (Does not wait for the device.)"""
        for key, result in results.items():
            if _is_global_mean(result) and not lightning_compat.is_reduced(result):
                self._rows_before[key] = result.cumulated_batch_size.clone()

    def numbers_of_one_rank(self, trainer: Trainer, results: Any) -> dict[str, int]:
        """Return a hash of the values that no hook of the epoch reduces, and store the names of reduced values.

        Monitored values are excluded. They are compared when they are available to the callbacks that monitor them.
        """
        values = _values_of_one_rank(results)
        for name in _monitored_names(trainer):
            values.pop(name, None)
        self.local_values = values
        self._hash_keys_of_epoch(results)
        return {"local_values": hash_text("; ".join(map(repr, values.items())))}

    def numbers_of_epoch(self, results: Any) -> dict[str, Any]:
        """Return hashes of all reduced names and of the names of means, and the sum and number of rows of each mean."""
        keys = self._hash_keys_of_epoch(results)
        sums = dict(sorted(self._sums(results)))
        numbers: dict[str, Any] = {"keys": keys, "names": hash_text("; ".join(sums))}
        for name, (total, rows) in sums.items():
            numbers[SUM + name] = total
            numbers[ROWS + name] = rows
        return numbers

    def _sums(self, results: Any) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield each name with the sum of its values weighted by their rows, and the number of rows."""
        for key, result in results.items():
            rows = self._rows_before.pop(key, None)
            if not _is_global_mean(result):
                continue
            if not lightning_compat.is_reduced(result):
                rows = result.cumulated_batch_size
            elif rows is None or "batch_end" in result.meta.fx:  # more rows were logged after the copy
                continue
            yield lightning_compat.epoch_name(results, result), (float(result.value), float(rows))

    def keep_true_means(self, columns: Columns) -> None:
        """Store sums and rows of all ranks for each mean that may be floored because ``W`` does not divide its rows."""
        self._true_means = {}
        if len(set(columns["names"])) > 1:  # ranks have different names, which cannot be matched
            return
        for column, rows in columns.items():
            if column.startswith(ROWS) and sum(rows) % len(rows):
                name = column.removeprefix(ROWS)
                self._true_means |= {SUM + name: columns[SUM + name], ROWS + name: rows}

    def logged_numbers(self, trainer: Trainer) -> dict[str, Any]:
        """Return means that may be floored, a hash of the monitored names, and their values (an empty list if not logged)."""
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
        """Add columns with the sums and rows of the last epoch, and reset them."""
        columns |= self._true_means
        self._true_means = {}


def _values_of_one_rank(results: Any) -> dict[str, float]:
    """Return the values that are logged without ``sync_dist``, of which only rank 0's appear in the log."""
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
    """Return the names of values that control checkpoints, early stopping or learning rates."""
    if trainer.state.fn != "fit":  # they have an effect only in training
        return []
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    monitors += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    return sorted({monitor for monitor in monitors if monitor and isinstance(monitor, str)})


def _monitored_values(trainer: Trainer) -> dict[str, float | None]:
    """Return the monitored values of this rank, with None for a value that is not logged."""
    found: dict[str, float | None] = {}
    for name in _monitored_names(trainer):
        value = trainer.callback_metrics.get(name)
        is_number = isinstance(value, Tensor) and value.numel() == 1
        found[name] = float(value) if is_number else None  # type: ignore[arg-type]
    return found


def _name_keys(finding: Finding, lines_by_rank: Sequence[dict[str, str]]) -> Finding:
    """Name the keys that only some ranks log, with the source line of the first such key on each rank."""
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
    """Name the values that are logged without reduction and differ between ranks."""
    names = list(findings.differing_columns(values_by_rank))[: findings.MOST_NAMES]
    shown = tuple(", ".join(f"{values.get(name, math.nan):.6g}" for name in names) for values in values_by_rank)
    return Finding.of("F56", name=", ".join(names), values=shown, shown=findings.shown_names(names))
