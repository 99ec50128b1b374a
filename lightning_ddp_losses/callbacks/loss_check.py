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
from typing import IO, Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks import findings
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_check import contrastive_losses
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing, odd_ranks
from lightning_ddp_losses.callbacks.loss_reader import LossReader, LossRow, is_divided
from lightning_ddp_losses.callbacks.report import LOSSES_FILE_NAME, MOST_RANKS_ONE_BY_ONE
from lightning_ddp_losses.callbacks.row_exchange import Rows
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.errors import DDPLossError

_WINDOW, _BIASED_STEPS = 20, 3
_HISTORY = 10_000
_EQUAL = 1e-6  # relative
_HASH_BITS = 52  # exact in float64
_ROUNDING = 1e-5  # relative to the mean of absolute values; ranks add float32 sums
_EPOCH_ENDS = (CheckStage.TRAIN_EPOCH_END, CheckStage.VALIDATION_EPOCH_END)


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

    Communication: 72 bytes in the handshake before backward, and 16 for each micro-batch that Lightning accumulates. A few numbers at
        the start and end of an epoch and of validation.

    Example:
        >>> checks = DDPChecks([LossCheck(bias=1.5, file=False)])
    """

    stages = (
        CheckStage.EPOCH_START,
        CheckStage.BEFORE_BACKWARD,
        CheckStage.TRAIN_EPOCH_END,
        CheckStage.VALIDATION_EPOCH_END,
        CheckStage.VALIDATION_END,
        CheckStage.SAVE,
        CheckStage.TRAIN_END,
    )
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
        has_windows = module.automatic_optimization and is_divided(trainer) and not compares_rows
        self._reader = LossReader(compares_rows=compares_rows, has_windows=has_windows)
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
        self._values.see_batch_end(trainer)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Give the strategy its method back and close the file."""
        if self._replaces_step:
            vars(trainer.strategy).pop("training_step", None)
        self._history.close()

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[float]:
        """Return this rank's loss, its sums of logged means, or the values that are logged and monitored."""
        if stage == CheckStage.BEFORE_BACKWARD:
            # losses of the step before. At the first step, which shows most faults, of that step
            self._reader.read(self.runner.step if self.runner.steps else math.inf)
            return self._step_row(trainer)
        if stage == CheckStage.SAVE:
            return self._last_row(trainer)
        if stage in _EPOCH_ENDS:
            return self._values.measure_epoch(trainer, validation=stage == CheckStage.VALIDATION_EPOCH_END)
        logged = self._values.measure_logged(trainer)
        if stage != CheckStage.TRAIN_END:
            return logged
        # the unread losses come first
        last = self._last_row(trainer)
        return [float(len(last)), *last, *logged]

    def _last_row(self, trainer: Trainer) -> list[float]:
        """Return the row of the losses that have not been read yet. Empty if there are none."""
        if not self._reader.pending:
            return []
        self._reader.read(math.inf)
        return self._step_row(trainer)

    def _step_row(self, trainer: Trainer) -> list[float]:
        is_missing, self._is_missing = self._is_missing, False
        return self._reader.row(self._values.hash_keys(_results_of_epoch(trainer)), is_missing=is_missing)

    # ------------------------------------------------------------------ judge

    def judge(self, table: Rows, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Compare the losses, or the logged and monitored values."""
        if stage in _EPOCH_ENDS:
            return self._values.judge_epoch(table)
        losses: Rows = [[]]
        if stage in (CheckStage.BEFORE_BACKWARD, CheckStage.SAVE):
            losses, table = table, []
        elif stage == CheckStage.TRAIN_END:
            losses = [row[1 : 1 + int(row[0])] for row in table]
            table = [row[1 + int(row[0]) :] for row in table]
        found = self._judge_step(losses) if all(losses) else []
        return found + (self._values.judge_logged(table, trainer) if table else [])

    def _judge_step(self, table: Sequence[Sequence[float]]) -> list[Finding]:
        """Compare the losses of a step, mostly the one before. Findings name it."""
        own = len(LossRow._fields)
        rows = [LossRow(*row[:own]) for row in table]
        losses = [row.loss for row in rows]
        step = int(max(row.step for row in rows))
        # known at once: a rank without a loss, different names
        without = tuple(rank for rank, row in enumerate(rows) if row.is_missing)
        if without:
            texts = ["None" if rank in without else f"{loss:g}" for rank, loss in enumerate(losses)]
            found = [Finding.of("F35", ranks=without, name="loss", values=tuple(texts))]
        else:
            found = differing([row.keys for row in rows], "F46", name="log keys")
        # read later
        if step >= 0:
            self._history.add(self.runner, step, losses)
            of_step = [] if without else self._judge_values(rows)
            of_step += self._reader.judge_window([row[own:] for row in table], self.bias)
            found += [replace(each, step=step, moment=CheckStage.BEFORE_BACKWARD.value) for each in of_step]
        return found

    def _judge_values(self, rows: Sequence[LossRow]) -> list[Finding]:
        found: list[Finding] = []
        losses = [row.loss for row in rows]
        shown = [f"{loss:g}" for loss in losses]
        # a rank with a loss that is not a number, or zero from the start
        not_finite = tuple(rank for rank, row in enumerate(rows) if row.bad_batch >= 0)
        if not_finite:
            batches = [f" in batch {int(row.bad_batch)}" if row.bad_batch >= 0 else "" for row in rows]
            values = tuple(loss + batch for loss, batch in zip(shown, batches, strict=True))
            found.append(Finding.of("F79", ranks=not_finite, name="loss", values=values))
        zero = tuple(rank for rank, row in enumerate(rows) if row.zero_steps == self.zero_steps)
        if zero:
            found.append(Finding.of("F31", ranks=zero, name="loss", values=tuple(shown), steps=self.zero_steps))
        if len(rows) == 1:
            return found
        # elements that weigh more on one rank than on another, in several steps
        first = _largest_ratio([abs(row.weight) for row in rows])
        second = _largest_ratio([abs(row.second_weight) for row in rows])
        self._biased.append(max(first, second) > self.bias)
        if self._biased[-1] and sum(self._biased) >= _BIASED_STEPS:
            values = tuple(f"mean over {row.elements:g}, each weighs {row.weight:.4g}" for row in rows)
            found.append(Finding.of("F30", name="loss", values=values))
        return found

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return the logged names or values of this rank."""
        return {"F46": self._values.keys, "F56": self._values.local_values}.get(finding.fault)

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


def _largest_ratio(weights: list[float]) -> float:
    """Return the largest ratio of an element's weights on two ranks. 1 if a weight is not known."""
    if min(weights) <= 0:
        return 1.0
    return max(weights) / min(weights)


# ---------------------------------------------------------------------- logged values


class LoggedValues:
    """Compares logged values between ranks, and epoch means with the true ones.

    Attributes:
        keys: Names that this rank logs and reduces.
        local_values: Values that this rank logs alone.
    """

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.local_values: dict[str, float] = {}
        self._rows_before: dict[str, Tensor] = {}  # by Lightning's key, before the reduction
        self._names: list[str] = []  # means of the epoch that has just ended
        # means over the rows of all ranks, which may be floored: each with the mean of the ranks' absolute sums, the measure of
        # rounding, and the rows of each rank. The same on every rank
        self._true_means: dict[str, tuple[float, float, tuple[float, ...]]] = {}

    # ------------------------------------------------------------------ names

    def hash_keys(self, results: Any) -> float:
        """Return a hash of the names of logged values that need all ranks: with ``sync_dist``, or a metric."""
        self.keys = sorted(f"{name} ({value.meta.fx})" for name, value in results.items() if _is_reduced(value))
        return _hash_of(self.keys)

    # ------------------------------------------------------------------ an epoch, before and after Lightning has logged its means

    def see_batch_end(self, trainer: Trainer) -> None:
        """Remember numbers of rows that Lightning may reduce in place before they are read. (Does not wait for the device.)"""
        if not (trainer.validating or trainer.is_last_batch):
            return
        for key, result in _results_of_epoch(trainer, validation=trainer.validating).items():
            if _is_global_mean(result) and not compat.is_reduced(result):
                self._rows_before[key] = result.cumulated_batch_size.clone()

    def measure_epoch(self, trainer: Trainer, *, validation: bool = False) -> list[float]:
        """Return hashes of the names that are reduced, of the values that are not and of the names of means, then sum and rows of each."""
        results = _results_of_epoch(trainer, validation=validation)
        keys = self.hash_keys(results)
        self.local_values = {} if validation else _values_of_one_rank(results)
        sums = dict(sorted(self._sums(results)))
        self._names = list(sums)
        measured = [keys, _hash_of(map(repr, self.local_values.items())), _hash_of(sums)]
        for each in sums.values():
            measured += each
        return measured

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

    def judge_epoch(self, table: Sequence[Sequence[float]]) -> list[Finding]:
        """Report different names, and values of one rank. Remember the true means if the number of ranks does not divide the rows."""
        self._true_means = {}
        keys, local_values, names, *numbers = zip(*table, strict=True)
        found = differing(keys, "F46", name="log keys")
        if len(set(local_values)) > 1:
            found.append(Finding("F56", "logged values", name="logged values"))
        if len(set(names)) > 1:  # different names per rank: they cannot be lined up
            return found
        for name, totals, rows in zip(self._names, numbers[::2], numbers[1::2], strict=True):
            if sum(rows) % len(table):
                mean, scale = sum(totals) / sum(rows), sum(map(abs, totals)) / sum(rows)
                self._true_means[name] = mean, scale, rows
        return found

    def measure_logged(self, trainer: Trainer) -> list[float]:
        """Return the means that may be floored, a hash of the monitored names, then for each whether it is logged, and its value."""
        means = [float(trainer.callback_metrics.get(name, math.nan)) for name in self._true_means]
        values = _monitored_values(trainer)
        measured = [*means, _hash_of(values)]
        for value in values.values():
            measured += [float(value is not None), value or 0.0]
        return measured

    def judge_logged(self, table: Sequence[Sequence[float]], trainer: Trainer) -> list[Finding]:
        """Report wrong means, each once, and monitored values that differ."""
        number = len(self._true_means)
        found = self._wrong_means(table[0][:number])
        monitored = [row[number:] for row in table]
        if len({row[0] for row in monitored}) > 1:  # different monitors per rank: their names cannot be lined up
            return found
        return found + _different_values([row[1:] for row in monitored], list(_monitored_values(trainer)))

    def _wrong_means(self, logged: Sequence[float]) -> list[Finding]:
        """Compare rank 0's values. Reduced ones are equal on every rank."""
        found = []
        for (name, (mean, scale, rows)), value in zip(self._true_means.items(), logged, strict=True):
            # NaN is a different fault
            if abs(value - mean) > _ROUNDING * scale:
                values = tuple(f"{number:g} rows" for number in rows)
                found.append(Finding.of("F82", name=name, values=values, value=value, mean=mean, rows=sum(rows)))
        self._true_means = {}
        return found


def _hash_of(names: Iterable[str]) -> float:
    """Return one number for some names, exact as a float."""
    return float(hash_text("; ".join(names), _HASH_BITS))


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


def _is_reduced(value: Any) -> bool:
    sync = value.meta.sync
    return not value.is_tensor or (sync.should and not sync.rank_zero_only)


def _is_global_mean(result: Any) -> bool:
    """Return whether a logged value is the mean of an epoch over all ranks, and was logged in this epoch."""
    if not result.is_tensor or result.has_reset:
        return False
    sync = result.meta.sync
    over_all_ranks = sync.should and not sync.rank_zero_only and sync.group is None
    return bool(over_all_ranks and result.meta.on_epoch and result.meta.is_mean_reduction)


def _monitored_values(trainer: Trainer) -> dict[str, float | None]:
    """Return this rank's values that decide on checkpoints, early stopping or learning rates. None for a value that is not logged."""
    if trainer.state.fn != "fit":  # they decide on training alone
        return {}
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    monitors += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    found: dict[str, float | None] = {}
    for name in sorted({monitor for monitor in monitors if monitor and isinstance(monitor, str)}):
        value = trainer.callback_metrics.get(name)
        is_number = isinstance(value, Tensor) and value.numel() == 1
        found[name] = float(value) if is_number else None  # type: ignore[arg-type]
    return found


def _name_keys(finding: Finding, names_by_rank: Sequence[list[str]]) -> Finding:
    """Name the keys that only some ranks log."""
    common = set.intersection(*map(set, names_by_rank))
    further = [[name for name in names if name not in common] for names in names_by_rank]
    only_some = sorted(set().union(*further))
    values = tuple(", ".join(names) or "nothing more" for names in further)
    return replace(finding, values=values, name=", ".join(only_some))


def _name_values(finding: Finding, values_by_rank: Sequence[dict[str, float]]) -> Finding:
    """Name the values that ranks log alone and that differ."""
    names = list(findings.differing_columns(values_by_rank))[: findings.MOST_NAMES]
    shown = tuple(", ".join(f"{values.get(name, math.nan):.6g}" for name in names) for values in values_by_rank)
    return Finding.of("F56", name=", ".join(names), values=shown, shown=findings.shown_names(names))


def _different_values(rows: Sequence[Sequence[float]], names: list[str]) -> list[Finding]:
    """Report monitored values that differ. A row holds for each name whether it is logged, and its value."""
    found = []
    for place, name in enumerate(names):
        column = [row[2 * place + 1] if row[2 * place] else None for row in rows]
        # not logged anywhere yet, or the same everywhere
        logged = [value for value in column if value is not None]
        if logged and not (len(logged) == len(rows) and _are_equal(logged)):
            shown = tuple("not logged" if value is None else f"{value:.6g}" for value in column)
            found.append(Finding.of("F55", ranks=odd_ranks(column), name=name, values=shown))
    return found


def _are_equal(values: Sequence[float]) -> bool:
    if math.isnan(values[0]):
        return all(map(math.isnan, values))
    return all(math.isclose(value, values[0], rel_tol=_EQUAL) for value in values)
