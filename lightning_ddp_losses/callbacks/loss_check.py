"""`LossCheck`: every rank has a finite loss, each element counts equally in it, and what is logged of it is one number.

The losses of a step are judged at the next one, before a checkpoint is saved and at the end of training (``loss_reader.py``); a finding
names its own step. A missing loss and the logged names are known on the host and judged at once (``logged_values.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_check import local_contrastive_losses
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.logged_values import LoggedValues, different_keys, name_keys
from lightning_ddp_losses.callbacks.loss_reader import MISSING, PRESENT, UNSEEN, LossReader, LossRow, is_divided
from lightning_ddp_losses.callbacks.report import LOSSES_FILE_NAME, MOST_RANKS_ONE_BY_ONE, Action
from lightning_ddp_losses.callbacks.row_exchange import Rows
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import DDPLossError

_WINDOW, _BIASED_STEPS = 20, 3
_HISTORY = 10_000
_EQUAL = 1e-6  # relative


class LossCheck(RankCheck, default=True):
    """The loss of each rank: there, finite, not zero from the start, of elements that count alike on all ranks, and logged as it is.

    Covers F30 (over ranks; over the micro-batches that Lightning accumulates as a note), F31, F35, F46, F55, F56, F79 and F82. Keeps
    every rank's loss in ``history`` and, if there is a log folder, in ``losses_by_rank.csv``; ``DDPChecks(log_figures=True)`` sends
    them to the loggers too, as often as Lightning logs (``ddp_checks/rank_0_loss``; of more than 8 ranks the smallest and largest).

    Args:
        zero_steps: Steps from the start after which a loss that is exactly zero in all of them is reported.
        bias: Allowed ratio of an element's weight on two ranks (1.1 is 10%), reported after three steps of 20; or in two micro-batches of
            an accumulation window, reported once.
        file: Whether to write ``losses_by_rank.csv``.
        **options: As ``RankCheck``.

    Communication: 72 bytes in the handshake before backward, and 16 for each micro-batch that Lightning accumulates; a few numbers at
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

    def __init__(
        self,
        *,
        zero_steps: int = 5,
        bias: float = 1.1,
        file: bool = True,
        every_n_steps: int = 1,
        action: Action = None,
    ) -> None:
        self.zero_steps, self.bias, self.file = zero_steps, bias, file
        self._training_step: Callable[..., Any] | None = None
        super().__init__(every_n_steps=every_n_steps, action=action)

    def _forget(self) -> None:
        self._history = LossHistory(file=self.file)
        self._state = UNSEEN
        self._reader = LossReader()
        self._values = LoggedValues()
        self._biased: deque[bool] = deque(maxlen=_WINDOW)

    @property
    def history(self) -> list[tuple[int, tuple[float, ...]]]:
        """Step and the loss of each rank, of the latest 10,000 steps of the latest fit."""
        return list(self._history.losses)

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at the result of ``training_step`` before Lightning does."""
        compares_rows = bool(local_contrastive_losses(module))
        has_windows = module.automatic_optimization and is_divided(trainer) and not compares_rows
        self._reader = LossReader(compares_rows=compares_rows, has_windows=has_windows)
        if module.automatic_optimization and process_groups.world_size() > 1:
            strategy: Any = trainer.strategy
            # on the strategy: it stands between Lightning's loop and the module, wrapped or not
            self._training_step = original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                if (output.get("loss") if isinstance(output, Mapping) else output) is None:
                    self._sync_without_loss()
                return output

            strategy.training_step = training_step

    def _sync_without_loss(self) -> None:
        """Exchange rows from a rank that returned None with its peers, where they are; alone, Lightning would stop this rank only."""
        if not self.runner.synchronising:
            return
        # peers that are in the strategy's handshake get the error there
        if self.runner.rows_in_strategy_handshake:
            missing = Finding.of("F35", ranks=(process_groups.rank(),), name="loss")
            finding = replace(missing, check=self.title, step=self.runner.step, moment="training_step")
            handshake.raise_on_all_ranks(DDPLossError(finding.text(), findings=[finding]), "training_step")
        self._state = MISSING
        self.runner.run_stage(CheckStage.BEFORE_BACKWARD)

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember which batch it is."""
        self._reader.see_batch(trainer, batch_idx)

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Start to copy the loss and its reductions to the host."""
        self._reader.see_loss(trainer, module, loss, self.runner.step)
        self._state = PRESENT

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Remember logged sums while they are this rank's own."""
        self._values.see_batch_end(trainer)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Give the strategy its method back and close the file."""
        if self._training_step is not None:
            vars(trainer.strategy).pop("training_step", None)
            self._training_step = None
        self._history.close()

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[float]:
        """Return this rank's loss, its sums of logged means, or the values that are logged and monitored."""
        if stage == CheckStage.BEFORE_BACKWARD:
            # losses of the step before; at the first step, which shows most faults, its own
            self._reader.read(self.runner.step if self.runner.steps else math.inf)
            return self._step_row(self._values.hash_keys(trainer))
        if stage == CheckStage.SAVE:
            return self._last_row(trainer)
        if stage in (CheckStage.TRAIN_EPOCH_END, CheckStage.VALIDATION_EPOCH_END):
            return self._values.measure_epoch(trainer, validation=stage == CheckStage.VALIDATION_EPOCH_END)
        logged = self._values.measure_logged(trainer)
        if stage != CheckStage.TRAIN_END:
            return logged
        # the losses that have not been read yet come first
        last = self._last_row(trainer)
        return [float(len(last)), *last, *logged]

    def _last_row(self, trainer: Trainer) -> list[float]:
        """Return the row of the losses that have not been read yet; empty if there are none."""
        if not self._reader.pending:
            return []
        self._reader.read(math.inf)
        return self._step_row(self._values.hash_keys(trainer))

    def _step_row(self, keys: float) -> list[float]:
        state, self._state = self._state, UNSEEN
        return self._reader.row(state, keys)

    # ------------------------------------------------------------------ judge

    def judge(self, table: Rows, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Compare the losses, or the logged and monitored values."""
        if stage in (CheckStage.BEFORE_BACKWARD, CheckStage.SAVE):
            return self._judge_step(table) if all(table) else []
        if stage in (CheckStage.TRAIN_EPOCH_END, CheckStage.VALIDATION_EPOCH_END):
            return self._values.judge_epoch(table)
        found: list[Finding] = []
        if stage == CheckStage.TRAIN_END:
            late = [row[1 : 1 + int(row[0])] for row in table]
            table = [row[1 + int(row[0]) :] for row in table]
            if all(late):
                found = self._judge_step(late)
        return found + self._values.judge_logged(table, trainer)

    def _judge_step(self, table: Sequence[Sequence[float]]) -> list[Finding]:
        """Compare the losses of a step, mostly the one before; findings name it."""
        own = len(LossRow._fields)
        rows = [LossRow(*row[:own]) for row in table]
        losses = [row.loss for row in rows]
        step = int(max(row.step for row in rows))
        # known at once: a rank without a loss, other names
        without = tuple(rank for rank, row in enumerate(rows) if row.state == MISSING)
        if without:
            texts = ["None" if rank in without else f"{loss:g}" for rank, loss in enumerate(losses)]
            found = [Finding.of("F35", ranks=without, name="loss", values=tuple(texts))]
        else:
            found = different_keys([row.keys for row in rows])
        # read later
        if step >= 0:
            self._history.add(self.runner, step, losses)
            of_step = [] if without else self._judge_values(rows, step)
            of_step += self._reader.judge_window([row[own:] for row in table], self.bias)
            found += [replace(each, step=step, moment=CheckStage.BEFORE_BACKWARD.value) for each in of_step]
        return found

    def _judge_values(self, rows: Sequence[LossRow], step: int) -> list[Finding]:
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
        ratios = [
            _largest_ratio([abs(row.weight) for row in rows]),
            _largest_ratio([abs(row.second_weight) for row in rows]),
        ]
        self._biased.append(max(ratios) > self.bias)
        if self._biased[-1] and sum(self._biased) >= _BIASED_STEPS:
            values = tuple(f"mean over {row.elements:g}, each weighs {row.weight:.4g}" for row in rows)
            found.append(Finding.of("F30", name="loss", values=values))
        # a note: whether the ranks have one loss or separate ones
        if step == 0 and not not_finite:
            values = tuple(f"{loss:.6g}" for loss in losses)
            is_one = max(losses) - min(losses) <= _EQUAL * max(map(abs, losses))
            case = "one_loss" if is_one else "check"
            found.append(Finding.of("F56", case, name="loss", values=values, mean=sum(losses) / len(losses)))
        return found

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the names that this rank logs."""
        return self._values.describe_keys() if finding.fault == "F46" else None

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name the values that only some ranks log."""
        return [name_keys(finding, texts)]

    def figures(self) -> dict[str, float]:
        """Return the ranks' losses in the last step, the smallest and the largest."""
        if not self._history.losses:
            return {}
        _, losses = self._history.losses[-1]
        return {"loss_min": min(losses), "loss_max": max(losses)}


class LossHistory:
    """Keeps the losses of all ranks in a fit, writes them to a file on rank 0, and sends them to the loggers.

    Args:
        file: Whether to write ``losses_by_rank.csv``.

    Attributes:
        losses: Step and the loss of each rank, of the latest 10,000 steps.
    """

    def __init__(self, *, file: bool) -> None:
        self.losses: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_HISTORY)
        self._file = file
        self._stream: IO[str] | None = None
        self._logged: int | None = None  # how often Lightning had logged when losses were last sent to the loggers

    def add(self, runner: CheckRunner, step: int, losses: list[float]) -> None:
        """Add the losses of one step."""
        self.losses.append((step, tuple(losses)))
        self._send_to_loggers(runner, step, losses)
        # one rank writes, if there is a folder and more than one loss
        if not self._file or len(losses) == 1:
            return
        if self._stream is None:
            self._stream = runner.report.open_file(LOSSES_FILE_NAME)
            if self._stream is None:
                return
            titles = [f"rank_{rank}" for rank in range(len(losses))]
            self._stream.write(",".join(["step", *titles]) + "\n")
        self._stream.write(",".join([str(step), *map(repr, losses)]) + "\n")

    def _send_to_loggers(self, runner: CheckRunner, step: int, losses: list[float]) -> None:
        """Send each rank's loss as often as Lightning logs; of many ranks the smallest and the largest."""
        # an option of the Trainer, which its type does not show
        every: int = getattr(runner.trainer, "log_every_n_steps", 0)
        if not every:
            return
        # the check may look at fewer steps than Lightning logs: the first one that it sees after each of those
        before, self._logged = self._logged, (step + 1) // every
        if self._logged == (step // every if before is None else before):
            return
        figures = {"loss_min": min(losses), "loss_max": max(losses)}
        if len(losses) <= MOST_RANKS_ONE_BY_ONE:
            figures = {f"rank_{rank}_loss": loss for rank, loss in enumerate(losses)}
        runner.report.log_step(runner.trainer, figures, step)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _largest_ratio(weights: list[float]) -> float:
    """Return how much more an element weighs on one rank than on another; 1 if a weight is not known."""
    if min(weights) <= 0:
        return 1.0
    return max(weights) / min(weights)
