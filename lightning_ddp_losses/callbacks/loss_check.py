"""`LossCheck`: every rank has a finite loss, of which each element counts the same, and what is logged of it is one number."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.divisors import Term, terms
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.logged import reduced_keys, watched
from lightning_ddp_losses.callbacks.loss_observations import local_contrastive
from lightning_ddp_losses.callbacks.loss_verdicts import different_keys, different_values, loss_meaning, without_loss
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.errors import DDPLossError

FILE_NAME = "losses_by_rank.csv"
_PRESENT, _MISSING = 1.0, 2.0
_KEY_BITS = 52  # exact in float64
_WINDOW, _BIASED_STEPS = 20, 3
_HISTORY = 10_000


class LossCheck(RankCheck):
    """The loss of each rank: there, finite, not zero from the start, and of elements that count alike on all ranks.

    Covers F30, F31, F35, F46, F55, F56 and F79. Keeps every rank's loss in ``history`` and, where there is a log folder, in
    ``losses_by_rank.csv``.

    Args:
        zero_steps: A loss that is exactly zero in so many steps from the start is reported.
        bias: An element may weigh so much more on one rank than on another (1.1 is 10%); reported after three steps of 20.
        file: Write ``losses_by_rank.csv``.
        **options: As ``RankCheck``.

    Communication: 64 bytes in the frame before backward; a few numbers at the start of an epoch and the end of validation.
    """

    moments = (
        Moment.EPOCH_START,
        Moment.BEFORE_BACKWARD,
        Moment.VALIDATION_EPOCH_END,
        Moment.VALIDATION_END,
        Moment.TRAIN_END,
    )
    faults = ("F30", "F31", "F35", "F46", "F55", "F56", "F79")
    needs_peers = False

    def __init__(
        self,
        zero_steps: int = 5,
        bias: float = 1.1,
        file: bool = True,
        *,
        every_n_steps: int = 1,
        action: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.zero_steps, self.bias, self.file = zero_steps, bias, file
        self._history: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=_HISTORY)
        self._stream: IO[str] | None = None
        self._training_step: Callable[..., Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._loss, self._state = math.nan, 0.0
        self._bad, self._index, self._zeros = -1, 0, 0
        self._terms: list[Term] = []
        self._keys: list[str] = []
        self._biased: deque[bool] = deque(maxlen=_WINDOW)
        self._contrastive = False

    @property
    def history(self) -> list[tuple[int, tuple[float, ...]]]:
        """Step and the loss of each rank, of the latest 10,000 steps of the latest fit."""
        return list(self._history)

    # ------------------------------------------------------------------ look

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at what ``training_step`` returns, before Lightning does."""
        self._begin()
        self._history.clear()
        self._contrastive = bool(local_contrastive(module))
        if module.automatic_optimization and process_groups.world_size() > 1:
            strategy: Any = trainer.strategy
            self._training_step = original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if loss is None:
                    self._meetwithout_loss()
                return output

            strategy.training_step = training_step

    def _meetwithout_loss(self) -> None:
        """A rank that returned None meets its peers where they are; alone, Lightning would stop this rank only."""
        if not self.session.synchronising:
            return
        if self.session.rides:
            own: list[Any] = [
                "None" if rank == process_groups.rank() else "?" for rank in range(process_groups.world_size())
            ]
            found = replace(
                without_loss(own), check=self.title, step=self.session.step, ranks=(process_groups.rank(),), values=()
            )
            handshake.raise_on_all_ranks(DDPLossError(found.text(), findings=[found]), "training_step")
        self._state = _MISSING
        self.session.at(Moment.BEFORE_BACKWARD)

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Remember which batch it is."""
        self._index = batch_idx

    def see_loss(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """Read the loss and its reductions. (Waits for the device.)"""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = scaler is not None and loss is not getattr(trainer.strategy, "closure_loss", None)
        factor = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        value = float(loss.item()) * factor / (float(scaler.get_scale()) if scaled else 1.0)  # type: ignore[union-attr]
        overflowed = scaled and math.isinf(value)  # by the scale: the scaler will skip this step on every rank
        if not math.isfinite(value) and not overflowed and self._bad < 0:
            self._bad = self._index
        self._loss, self._state = value, _PRESENT
        self._zeros = self._zeros + 1 if value == 0 and self._zeros >= 0 else -1
        self._terms = [term for term in terms(loss) if not (term.chosen and self._contrastive)]

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[float]:
        """This rank's loss, or the values that are watched."""
        if moment == Moment.BEFORE_BACKWARD:
            self._keys = reduced_keys(trainer)
            weights = [(t.weight, t.elements) for t in self._terms[:2]] + [(0.0, 0.0)] * 2
            key = float(hash_text("; ".join(self._keys), _KEY_BITS))
            row = [self._state, self._loss, float(self._bad), *weights[0], weights[1][0], key, float(self._zeros)]
            self._state, self._bad = 0.0, -1
            return row
        if moment == Moment.VALIDATION_EPOCH_END:
            self._keys = reduced_keys(trainer, validation=True)
            return [float(hash_text("; ".join(self._keys), _KEY_BITS))]
        values = watched(trainer)
        row = [float(hash_text("; ".join(values), _KEY_BITS))]
        for value in values.values():
            row += [float(value is not None), value or 0.0]
        return row

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[float]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Compare the losses, or the watched values."""
        if moment == Moment.BEFORE_BACKWARD:
            return self._judge_losses(table)
        if moment == Moment.VALIDATION_EPOCH_END:
            return different_keys([row[0] for row in table])
        if len({row[0] for row in table}) > 1:  # other monitors per rank: their names cannot be lined up
            return []
        return different_values(table, list(watched(trainer)))

    def _judge_losses(self, rows: list[list[float]]) -> list[Finding]:
        states, losses = [row[0] for row in rows], [row[1] for row in rows]
        self._record(losses)
        if _MISSING in states:
            return [without_loss(["None" if s == _MISSING else f"{v:g}" for s, v in zip(states, losses, strict=True)])]
        found = different_keys([row[6] for row in rows])
        bad = tuple(rank for rank, row in enumerate(rows) if row[2] >= 0)
        if bad:
            values = tuple(
                f"{v:g}" + (f" in batch {int(r[2])}" if r[2] >= 0 else "") for v, r in zip(losses, rows, strict=True)
            )
            fix = "Look at that batch; lower the learning rate or clip gradients. One rank's value spoils the gradients of all."
            found.append(Finding("F79", "the loss is not a finite number", "", bad, "loss", values, fix))
        zero = tuple(rank for rank, row in enumerate(rows) if row[7] == self.zero_steps)
        if zero:
            what = f"the loss has been exactly zero in all {self.zero_steps} steps so far"
            fix = "Look for batches without a positive pair, a mask that selects nothing, or a loss that saturates at once."
            found.append(Finding("F31", what, "", zero, "loss", tuple(f"{v:g}" for v in losses), fix))
        found += self._mean_of_means(rows)
        if self.session.step == 0 and len(rows) > 1 and not bad:
            found.append(loss_meaning(losses))
        return found

    def _mean_of_means(self, rows: list[list[float]]) -> list[Finding]:
        """Elements that weigh more on one rank than on another, in several steps."""
        if len(rows) == 1:
            return []
        biased = any(_apart([abs(row[place]) for row in rows]) > self.bias for place in (3, 5))
        self._biased.append(biased)
        if not biased or sum(self._biased) < _BIASED_STEPS:
            return []
        elements = [row[4] for row in rows]
        fix = (
            "Divide each rank's sum by the mean number over ranks (all-reduce the count), or use GlobalBatchLoss, which does. "
            "Else give ranks the same number of rows."
        )
        values = tuple(f"mean over {n:g}, each weighs {row[3]:.4g}" for n, row in zip(elements, rows, strict=True))
        expected = "elements that weigh the same on every rank"
        return [Finding("F30", "the loss is a mean of the ranks' means", expected, (), "loss", values, fix)]

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """The names that this rank logs."""
        return json.dumps(self._keys) if finding.fault == "F46" else None

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name what only some ranks log."""
        everyone = [json.loads(text) for text in texts]
        common = set.intersection(*map(set, everyone)) if everyone else set()
        own = tuple(", ".join(name for name in names if name not in common) or "nothing more" for names in everyone)
        return [replace(finding, values=own, name=", ".join(sorted({n for names in everyone for n in names} - common)))]

    # ------------------------------------------------------------------ records

    def _record(self, losses: list[float]) -> None:
        step = self.session.step
        self._history.append((step, tuple(losses)))
        folder = self.session.report.folder
        if not self.file or folder is None or process_groups.rank() or len(losses) == 1:
            return
        if self._stream is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stream = (folder / FILE_NAME).open("w")
            self._stream.write(",".join(["step", *(f"rank_{rank}" for rank in range(len(losses)))]) + "\n")
        self._stream.write(",".join([str(step), *(repr(value) for value in losses)]) + "\n")

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Give the strategy its method back and close the file."""
        if self._training_step is not None:
            vars(trainer.strategy).pop("training_step", None)
            self._training_step = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def figures(self) -> dict[str, float]:
        """The ranks' losses in the last step, from the smallest to the largest."""
        if not self._history:
            return {}
        losses = self._history[-1][1]
        return {"loss_min": min(losses), "loss_max": max(losses)}


def _apart(weights: list[float]) -> float:
    return max(weights) / min(weights) if min(weights) > 0 else 1.0
