"""`LossCheck`: every rank has a finite loss, of which each element counts the same, and what is logged of it is one number.

To read a loss on an accelerator waits for it, so there nobody does at once: the loss of a step is copied on the way, read in the next step,
and travels and is judged then, or at the end of training; what is found names the step it was found in. Whether there is a loss at
all, and what is logged, is known on the host and judged at once.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor

from lightning_ddp_losses.callbacks import logged_values
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import send_gradient_scale
from lightning_ddp_losses.callbacks.element_weights import ElementWeight, element_weights, read_weights
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.logged_means import LoggedMeans
from lightning_ddp_losses.callbacks.loss_observations import local_contrastive_losses
from lightning_ddp_losses.callbacks.micro_batches import MicroBatches, uneven_micro_batches
from lightning_ddp_losses.callbacks.report import LOSSES_FILE_NAME, MOST_RANKS_ONE_BY_ONE
from lightning_ddp_losses.core.host_copy import HostCopy, HostNumbers
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.accumulation import counts_nothing
from lightning_ddp_losses.errors import DDPLossError

_UNSEEN, _PRESENT, _MISSING = 0.0, 1.0, 2.0
_HASH_BITS = 52  # exact in float64
_WINDOW, _BIASED_STEPS = 20, 3
_HISTORY = 10_000
_EQUAL = 1e-6  # relative
_NO_WEIGHT = ElementWeight(0.0, 0.0)


class LossRow(NamedTuple):
    """What travels before backward, all as floats.

    Attributes:
        state: Whether there is a loss (``_PRESENT``, ``_MISSING``, or ``_UNSEEN`` where none came by).
        loss: Its value; of several batches of a step the last one's, or the first one's that is not finite.
        bad_batch: The first batch of this step whose loss was not finite; -1 for none.
        weight: How much one element weighs in the first reduction of the loss; 0 where it is not known.
        elements: How many elements that reduction has.
        second_weight: As ``weight``, in the second reduction.
        keys: A hash of the names that are logged and reduced over ranks.
        zero_steps: Steps since the start in which the loss was exactly zero; -1 once it was not.
        step: Of the loss and of all that is read off it: the step before this one, at the first step this one; -1 for none.
    """

    state: float
    loss: float
    bad_batch: float
    weight: float
    elements: float
    second_weight: float
    keys: float
    zero_steps: float
    step: float


class _SeenLoss(NamedTuple):
    """A loss that came by, on its way to the host.

    Attributes:
        step: Optimizer steps before it.
        batch_idx: Of its batch.
        begins_window: Whether it is the first micro-batch of those that Lightning accumulates.
        value: What is back-propagated.
        factor: What makes that into what ``training_step`` returned, but for the scale.
        scale: Of the gradient scaler, by which the loss is multiplied; none where it is not.
        is_scaled: Whether a gradient scaler looks for overflow.
        may_be_nan: Whether it is a mean over nothing, which adds nothing.
        weights: Its reductions.
    """

    step: int
    batch_idx: int
    begins_window: bool
    value: HostCopy
    factor: float
    scale: HostNumbers
    is_scaled: bool
    may_be_nan: bool
    weights: list[ElementWeight]


class LossCheck(RankCheck, default=True):
    """The loss of each rank: there, finite, not zero from the start, of elements that count alike on all ranks, and logged as it is.

    Covers F30 (over ranks; over the micro-batches that Lightning accumulates as a note), F31, F35, F46, F55, F56, F79 and F82. Keeps
    every rank's loss in ``history`` and, where there is a log folder, in ``losses_by_rank.csv``; ``DDPChecks(log_figures=True)`` sends
    them to the loggers too, as often as Lightning logs (``ddp_checks/rank_0_loss``; of more than 8 ranks the smallest and largest).

    Args:
        zero_steps: A loss that is exactly zero in so many steps from the start is reported.
        bias: An element may weigh so much more on one rank than on another (1.1 is 10%), reported after three steps of 20; or in one
            micro-batch than in another of its accumulation window, reported once.
        file: Write ``losses_by_rank.csv``.
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
        action: Mapping[str, str] | str | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.zero_steps, self.bias, self.file = zero_steps, bias, file
        self._history: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_HISTORY)
        self._logged: int | None = None  # how often Lightning had logged when losses were last sent to the loggers
        self._stream: IO[str] | None = None
        self._training_step: Callable[..., Any] | None = None
        self._forget()

    def _forget(self) -> None:
        self._loss, self._state = math.nan, _UNSEEN
        self._batch_idx, self._bad_batch, self._zero_steps = 0, -1, 0
        self._begins_window, self._read_step = False, -1
        self._seen: list[_SeenLoss] = []  # not read yet
        self._weights: list[ElementWeight] = []
        self._keys: list[str] = []
        self._means = LoggedMeans()
        self._biased: deque[bool] = deque(maxlen=_WINDOW)
        self._has_contrastive_loss = False
        self._micro_batches: MicroBatches | None = None

    @property
    def history(self) -> list[tuple[int, tuple[float, ...]]]:
        """Step and the loss of each rank, of the latest 10,000 steps of the latest fit."""
        return list(self._history)

    # ------------------------------------------------------------------ observe

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at what ``training_step`` returns, before Lightning does."""
        self._forget()
        self._history.clear()
        self._logged = None
        self._has_contrastive_loss = bool(local_contrastive_losses(module))
        # a loss that compares rows is no mean over those of several micro-batches
        if module.automatic_optimization and _is_divided(trainer) and not self._has_contrastive_loss:
            self._micro_batches = MicroBatches()
        if module.automatic_optimization and process_groups.world_size() > 1:
            strategy: Any = trainer.strategy
            # on the strategy: it stands between Lightning's loop and the module, wrapped or not
            self._training_step = original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                loss = output
                if isinstance(output, Mapping):
                    loss = output.get("loss")
                if loss is None:
                    self._sync_without_loss()
                return output

            strategy.training_step = training_step

    def _sync_without_loss(self) -> None:
        """Exchange rows from a rank that returned None with its peers, where they are; alone, Lightning would stop this rank only."""
        if not self.runner.synchronising:
            return
        # peers that are in the strategy's handshake get the error there
        if self.runner.rows_in_strategy_handshake:
            rank = process_groups.rank()
            missing = _missing_loss((rank,), ())
            finding = replace(missing, check=self.title, step=self.runner.step, moment="training_step")
            handshake.raise_on_all_ranks(DDPLossError(finding.text(), findings=[finding]), "training_step")
        self._state = _MISSING
        self.runner.run_stage(CheckStage.BEFORE_BACKWARD)

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember which batch it is."""
        self._batch_idx = batch_idx
        self._begins_window |= batch_idx % trainer.accumulate_grad_batches == 0

    def see_loss(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """Start to copy the loss and its reductions to the host."""
        # the value that training_step returned: without the scaler's factor and accumulation's divisor
        factor = 1.0
        if module.automatic_optimization and _is_divided(trainer):
            factor *= trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        is_scaled = scaler is not None and loss is not getattr(trainer.strategy, "closure_loss", None)
        scale = HostNumbers([])
        if is_scaled:
            scale = send_gradient_scale(trainer)
        # the graph is gone when the loss is judged; outside a window no mean is known to count nothing
        asks = not _is_divided(trainer)
        if loss.device.type == "cpu":  # the value is at hand
            asks = not math.isfinite(float(loss.detach()))
        seen = _SeenLoss(
            step=self.runner.step,
            batch_idx=self._batch_idx,
            begins_window=self._begins_window,
            value=HostCopy(loss),
            factor=factor,
            scale=scale,
            is_scaled=is_scaled,
            may_be_nan=asks and counts_nothing(loss),
            weights=element_weights(loss),
        )
        self._state, self._begins_window = _PRESENT, False
        self._seen.append(seen)

    def _read(self, seen: _SeenLoss) -> None:
        """Take note of a loss that is on the host by now."""
        factor = seen.factor
        for scale in seen.scale.read():
            factor /= float(scale)
        value = float(seen.value.read()) * factor
        is_good = math.isfinite(value)
        if not is_good:  # by the scale, so that the scaler will skip this step on every rank; or a mean over nothing, which adds nothing
            is_good = (seen.is_scaled and math.isinf(value)) or seen.may_be_nan
        if self._bad_batch < 0:  # a loss that was not finite stays until it is reported
            self._loss, self._read_step = value, seen.step
            if not is_good:
                self._bad_batch = seen.batch_idx
        # zero in every step so far
        if value == 0 and self._zero_steps >= 0:
            self._zero_steps += 1
        else:
            self._zero_steps = -1
        weights = read_weights(seen.weights)
        self._weights = []
        for weight in weights:
            if weight.kind == "local" and not (weight.is_masked and self._has_contrastive_loss):
                self._weights.append(weight)
        if self._micro_batches is not None:
            if seen.begins_window:
                self._micro_batches.clear()
            self._micro_batches.add(value, weights, factor)

    def _read_earlier(self, step: float) -> None:
        """Read the losses of steps before this one, which have long arrived."""
        while self._seen and self._seen[0].step < step:
            self._read(self._seen.pop(0))

    def see_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Remember what is logged while it is this rank's own."""
        if trainer.validating or trainer.is_last_batch:
            self._means.see_batch_end(logged_values.results_of_epoch(trainer, validation=trainer.validating))

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> list[float]:
        """Return this rank's loss, what it has added up of logged means, or the values that are logged and monitored."""
        if stage == CheckStage.BEFORE_BACKWARD:
            self._keys = logged_values.reduced_keys(trainer)
            # losses of the step before; at the first step, which shows most faults, its own
            self._read_earlier(self.runner.step if self.runner.steps else math.inf)
            return self._step_row()
        if stage == CheckStage.SAVE:
            return self._last_row()
        if stage == CheckStage.TRAIN_EPOCH_END:
            return self._means.measure_sums(logged_values.results_of_epoch(trainer))
        if stage == CheckStage.VALIDATION_EPOCH_END:
            self._keys = logged_values.reduced_keys(trainer, validation=True)
            sums = self._means.measure_sums(logged_values.results_of_epoch(trainer, validation=True))
            return [logged_values.hash_names(self._keys), *sums]
        # at the end of training, or validation: the losses that nobody has read yet
        last: list[float] = []
        if stage == CheckStage.TRAIN_END:
            last = self._last_row()
            last.insert(0, float(len(last)))
        # the means that are looked at, a hash of the names that are monitored, then for each whether it is there, and its value
        measured = self._means.measure_logged(trainer.callback_metrics)
        values = logged_values.monitored_values(trainer)
        measured.append(logged_values.hash_names(values))
        for value in values.values():
            measured += [float(value is not None), value or 0.0]
        return last + measured

    def _last_row(self) -> list[float]:
        """Return the row of the losses that have not been read yet; empty if there are none."""
        if not self._seen:
            return []
        self._read_earlier(math.inf)
        return self._step_row()

    def _step_row(self) -> list[float]:
        """Return what was read since the last row."""
        # the two reductions next to the loss say enough: a loss is rarely the sum of more
        first, second = (*self._weights, _NO_WEIGHT, _NO_WEIGHT)[:2]
        row = LossRow(
            state=self._state,
            loss=self._loss,
            bad_batch=float(self._bad_batch),
            weight=float(first.weight),
            elements=float(first.elements),
            second_weight=float(second.weight),
            keys=logged_values.hash_names(self._keys),
            zero_steps=float(self._zero_steps),
            step=float(self._read_step),
        )
        measured = [*row]
        if self._micro_batches is not None:
            measured += self._micro_batches.row() if self._read_step >= 0 else [0.0]
        self._state, self._bad_batch, self._read_step = _UNSEEN, -1, -1
        return measured

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[float]], trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> list[Finding]:
        """Compare the losses, or the logged and monitored values."""
        if stage == CheckStage.BEFORE_BACKWARD:
            return self._judge_step(table)
        if stage == CheckStage.SAVE:
            return self._judge_step(table) if all(table) else []
        if stage == CheckStage.TRAIN_EPOCH_END:
            self._means.judge_sums(table)
            return []
        if stage == CheckStage.VALIDATION_EPOCH_END:
            self._means.judge_sums([row[1:] for row in table])
            return logged_values.different_keys([row[0] for row in table])
        found: list[Finding] = []
        if stage == CheckStage.TRAIN_END:
            late = [row[1 : 1 + int(row[0])] for row in table]
            table = [row[1 + int(row[0]) :] for row in table]
            if all(late):
                found = self._judge_step(late)
        number = self._means.number
        found += self._means.judge_logged(table[0][:number])
        monitored = [row[number:] for row in table]
        if len({row[0] for row in monitored}) > 1:  # other monitors per rank: their names cannot be lined up
            return found
        return found + logged_values.different_values(
            [row[1:] for row in monitored], list(logged_values.monitored_values(trainer))
        )

    def _judge_step(self, table: Sequence[Sequence[float]]) -> list[Finding]:
        """Compare the losses of a step, mostly the one before; findings name it."""
        own = len(LossRow._fields)
        rows = [LossRow(*row[:own]) for row in table]
        step = int(max(row.step for row in rows))
        found = self._judge_losses(rows, step)
        if step >= 0:
            of_step = self._judge_values(rows, step) + self._judge_window([row[own:] for row in table])
            found += [replace(each, step=step, moment=CheckStage.BEFORE_BACKWARD.value) for each in of_step]
        return found

    def _judge_losses(self, rows: Sequence[LossRow], step: int) -> list[Finding]:
        """Look for what is known at once: a rank without a loss, other names."""
        losses = [row.loss for row in rows]
        if step >= 0:
            self._record(step, losses)
        # a rank without a loss
        without = tuple(rank for rank, row in enumerate(rows) if row.state == _MISSING)
        if without:
            texts = ["None" if rank in without else f"{loss:g}" for rank, loss in enumerate(losses)]
            return [_missing_loss(without, tuple(texts))]
        return logged_values.different_keys([row.keys for row in rows])

    def _judge_values(self, rows: Sequence[LossRow], step: int) -> list[Finding]:
        if any(row.state == _MISSING for row in rows):
            return []
        found: list[Finding] = []
        losses = [row.loss for row in rows]
        # a rank whose loss is not a number, or zero from the start
        not_finite = tuple(rank for rank, row in enumerate(rows) if row.bad_batch >= 0)
        if not_finite:
            found.append(_not_finite(not_finite, rows))
        zero = tuple(rank for rank, row in enumerate(rows) if row.zero_steps == self.zero_steps)
        if zero:
            what = f"the loss has been exactly zero in all {self.zero_steps} steps so far"
            fix = "Look for batches without a positive pair, a mask that selects nothing, or a loss that saturates at once."
            found.append(Finding("F31", what, "", zero, "loss", tuple(f"{loss:g}" for loss in losses), fix))
        # elements of other weight
        found += self._mean_of_means(rows)
        if step == 0 and len(rows) > 1 and not not_finite:
            found.append(_loss_meaning(losses))
        return found

    def _mean_of_means(self, rows: Sequence[LossRow]) -> list[Finding]:
        """Look for elements that weigh more on one rank than on another, in several steps."""
        if len(rows) == 1:
            return []
        first = _largest_ratio([abs(row.weight) for row in rows])
        second = _largest_ratio([abs(row.second_weight) for row in rows])
        biased = max(first, second) > self.bias
        self._biased.append(biased)
        if not biased or sum(self._biased) < _BIASED_STEPS:
            return []
        fix = (
            "Divide each rank's sum by the mean number over ranks (all-reduce the count), or use GlobalBatchLoss, which does. "
            "Else give ranks the same number of rows."
        )
        values = tuple(f"mean over {row.elements:g}, each weighs {row.weight:.4g}" for row in rows)
        expected = "elements that weigh the same on every rank"
        return [Finding("F30", "the loss is a mean of the ranks' means", expected, (), "loss", values, fix)]

    def _judge_window(self, rows: Sequence[Sequence[float]]) -> list[Finding]:
        """Say once how far the mean of the micro-batches' means is from that over all their rows."""
        found = uneven_micro_batches(rows, self.bias)
        if found:
            self._micro_batches = None
        return found

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Return the names that this rank logs."""
        if finding.fault != "F46":
            return None
        return json.dumps(self._keys)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name what only some ranks log."""
        names_by_rank = [json.loads(text) for text in texts]
        # what not all ranks log, by rank and in all
        common = set.intersection(*map(set, names_by_rank))
        only_some: set[str] = set()
        values = []
        for names in names_by_rank:
            more = [name for name in names if name not in common]
            only_some.update(more)
            values.append(", ".join(more) or "nothing more")
        return [replace(finding, values=tuple(values), name=", ".join(sorted(only_some)))]

    # ------------------------------------------------------------------ records

    def _record(self, step: int, losses: list[float]) -> None:
        """Keep the losses of all ranks, and write them on rank 0."""
        self._history.append((step, tuple(losses)))
        self._send_to_loggers(step, losses)
        # one rank writes, where there is a folder and more than one loss
        if not self.file or len(losses) == 1:
            return
        if self._stream is None:
            self._stream = self.runner.report.open_file(LOSSES_FILE_NAME)
            if self._stream is None:
                return
            titles = [f"rank_{rank}" for rank in range(len(losses))]
            self._stream.write(",".join(["step", *titles]) + "\n")
        self._stream.write(",".join([str(step), *map(repr, losses)]) + "\n")

    def _send_to_loggers(self, step: int, losses: list[float]) -> None:
        """Send each rank's loss as often as Lightning logs; of many ranks the smallest and the largest."""
        trainer = self.runner.trainer
        every: int = getattr(trainer, "log_every_n_steps", 0)  # an option of the Trainer, which its type does not show
        if not every:
            return
        # the check may look at fewer steps than Lightning logs: the first one that it sees after each of those
        before, self._logged = self._logged, (step + 1) // every
        if before is None:
            before = step // every
        if self._logged == before:
            return
        figures = {"loss_min": min(losses), "loss_max": max(losses)}
        if len(losses) <= MOST_RANKS_ONE_BY_ONE:
            figures = {f"rank_{rank}_loss": loss for rank, loss in enumerate(losses)}
        self.runner.report.log_step(trainer, figures, step)

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Give the strategy its method back and close the file."""
        if self._training_step is not None:
            vars(trainer.strategy).pop("training_step", None)
            self._training_step = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def figures(self) -> dict[str, float]:
        """Return the ranks' losses in the last step, the smallest and the largest."""
        if not self._history:
            return {}
        _, losses = self._history[-1]
        return {"loss_min": min(losses), "loss_max": max(losses)}


# ---------------------------------------------------------------------- findings


def _missing_loss(ranks: tuple[int, ...], values: tuple[str, ...]) -> Finding:
    """Report ranks whose ``training_step`` gave nothing."""
    fix = "Return a loss on every rank; a batch without one can return a zero that depends on the parameters (0 * embeddings.sum())."
    return Finding("F35", "training_step returned None", "a loss on every rank", ranks, "loss", values, fix)


def _not_finite(ranks: tuple[int, ...], rows: Sequence[LossRow]) -> Finding:
    """Report ranks whose loss is not a finite number, and in which batch."""
    values = []
    for row in rows:
        text = f"{row.loss:g}"
        if row.bad_batch >= 0:
            text += f" in batch {int(row.bad_batch)}"
        values.append(text)
    fix = (
        "Look at that batch. nan is often a mean over nothing (no valid target, an empty mask): return a zero that depends on the "
        "parameters there. inf is an overflow: lower the learning rate. One rank's value spoils the gradients of all."
    )
    return Finding("F79", "the loss is not a finite number", "", ranks, "loss", tuple(values), fix)


def _loss_meaning(losses: list[float]) -> Finding:
    """Say whether the ranks have one loss or each its own."""
    values = tuple(f"{value:.6g}" for value in losses)
    if max(losses) - min(losses) <= _EQUAL * max(map(abs, losses)):
        return Finding("F56", "the loss is that of all ranks together, one number", name="loss", values=values)
    mean = sum(losses) / len(losses)
    what = f"each rank has the loss of its own rows; training minimises their mean, {mean:.6g}"
    return Finding("F56", what, name="loss", values=values, fix="Log it with sync_dist=True to see the mean.")


def _largest_ratio(weights: list[float]) -> float:
    """Return how much more an element weighs on one rank than on another; 1 where a weight is not known."""
    if min(weights) <= 0:
        return 1.0
    return max(weights) / min(weights)


def _is_divided(trainer: pl.Trainer) -> bool:
    """Say whether Lightning's division of a loss by the number of micro-batches stands."""
    return getattr(trainer.strategy, "accumulation", "mean") == "mean"
