"""Steps in Lightning's loops: accumulation windows, and the batches after which training can continue, between two steps.

A window is opened by the first micro-batch and closed by the backward that synchronises.
``distributed/accumulation`` defines a window. Lightning divides what ``training_step`` returns by ``accumulate_grad_batches``.
This part undoes it, because the window divides by its counts. If counts are given, the mean over the window's micro-batches replaces it, so
that each other term has the same weight as in one process. The value of a loss is its share times the number of micro-batches.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow, active, step_inside_window
from lightning_ddp_losses.distributed.window_end import Note, refuse_failures
from lightning_ddp_losses.distributed.window_parts import SLOPES, WindowCall
from lightning_ddp_losses.distributed.window_terms import Counts
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies.epoch_ends import replace_training_loader
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.window_batches import WindowLoader, counts_first


class LightningWindows(FitPart):
    """The accumulation windows of one fit. A part with ``accumulation="window"`` only.

    In automatic optimisation each ``training_step`` is a micro-batch, and the call check of the backward that synchronises carries the
    notes of the window. In manual optimisation the user opens windows and declares micro-batches.
    """

    needs = ("accumulation", "window")

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._window: AccumulationWindow | None = None
        self._calls: list[WindowCall] = []  # of the backward that runs
        self._notes: list[Note] = []  # of all ranks, in the window that ends
        self._expected: list[tuple[Any, Any]] = []  # counts and totals that were given before the window was open
        self._last_batch = (-1, -1)  # epoch and number

    @property
    def _is_automatic(self) -> bool:
        return self.fit.module.automatic_optimization

    # ------------------------------------------------------------------ automatic optimisation

    def setup(self) -> None:
        """Let the batches of a window be read before its first step, if the module counts in them. It is the outermost loader."""
        if not self.fit.is_fitting or not counts_first(self.fit):
            return
        replace_training_loader(self, WindowLoader, fit=self.fit)

    def on_train_start(self) -> None:
        """Let the notes of windows travel in each call check."""
        if self._is_automatic:
            self.fit.strategy.attach_payload(self._measure, self._judge, name="accumulation window")

    @contextlib.contextmanager
    def training_step(self) -> Iterator[None]:
        """Run a step as the next micro-batch of its window, which the first one opens. In manual optimisation the user opens windows."""
        trainer, window = self.fit.trainer, self._window
        if not self._is_automatic:
            yield
            return
        batch, per_window = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        if (trainer.current_epoch, batch) == self._last_batch and window is None:
            raise ConfigurationError(
                "accumulation='window'",
                expected="an optimizer that evaluates each batch once",
                got=f"a second training_step of batch {batch}",
                fix="Use another optimizer (LBFGS evaluates a batch several times), or accumulation='mean'.",
            )
        self._last_batch = trainer.current_epoch, batch
        number = batch % per_window + 1
        opens = number == 1 or window is None
        if opens:
            window = self._open(per_window)
        assert window is not None
        window.begin_micro_batch(number, is_last=self.fit.strategy.sync_gradients)
        if opens and not window.is_single:
            self._count_ahead(window, per_window - number + 1)
        self._give_expected(window)
        with active(window):
            yield

    def _open(self, micro_batches: int) -> AccumulationWindow:
        module = self.fit.module
        corrected = corrected_parameters(module, self.fit.strategy.optimizers)
        # the call check compares the upstream gradients of automatic optimisation
        compares_ranks = not self._is_automatic
        self._window = AccumulationWindow(corrected, micro_batches, {"": module}, compares_ranks=compares_ranks)
        self._notes = []
        return self._window

    def _count_ahead(self, window: AccumulationWindow, batches: int) -> None:
        """Give a window the counts of all its batches, if the module counts in them. Communication: one handshake, and reading batches."""
        trainer = self.fit.trainer
        loader = lightning_compat.combined_loader(trainer.fit_loop)
        if isinstance(loader, WindowLoader):
            left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_idx
            counts, number = loader.counts_of_window(min(batches, left))
            window.expect_counts(counts)
            window.terms.averages = number

    def _measure(self) -> bytes:
        """Return this rank's note in the backward that ends a window. Empty without a window."""
        window = self._window
        if window is None or window.is_single:
            return b""
        try:
            note = window.note()
        except ConfigurationError as error:
            note = Note(failure=str(error))
        return note.pack()

    def _judge(self, payloads: list[bytes]) -> None:
        """Take the notes of all ranks."""
        if all(payloads):
            self._notes = [Note.read(payload) for payload in payloads]
            refuse_failures(self._notes)

    # ------------------------------------------------------------------ manual optimisation

    @contextlib.contextmanager
    def block(self, micro_batches: int) -> Iterator[AccumulationWindow]:
        """Make the micro-batches that are declared inside the block one window."""
        if self._window is not None:
            raise ConfigurationError(
                "strategy.window()",
                expected="no window around it",
                got="one that is open",
                fix="Close the outer window before you open another.",
            )
        window = self._open(micro_batches)
        try:
            self._give_expected(window)
            with window.block():
                yield window
            window.end_("strategy.window()")
        finally:
            self._window = None

    # ------------------------------------------------------------------ both

    def on_train_end(self) -> None:
        """Compare the upstream gradients of the last window."""
        SLOPES.compare()

    def expect_counts(self, counts: Counts | None, totals: Mapping[str, float | Sequence[float]] | None) -> None:
        """Take what losses will count in the window that is open, or in the next one."""
        if self._window is None:
            self._expected.append((counts, totals))
        else:
            self._expect(self._window, counts, totals)

    def _give_expected(self, window: AccumulationWindow) -> None:
        expected, self._expected = self._expected, []
        for counts, totals in expected:
            self._expect(window, counts, totals)

    def _expect(
        self, window: AccumulationWindow, counts: Counts | None, totals: Mapping[str, float | Sequence[float]] | None
    ) -> None:
        """Give a window the counts of the user. The number of its micro-batches is then what the trainer says."""
        window.expect_counts(counts, totals)
        if self._is_automatic and not window.is_single:
            trainer = self.fit.trainer
            left = trainer.num_training_batches - trainer.fit_loop.epoch_loop.batch_idx
            window.terms.averages = int(min(window.expected_micro_batches, left))

    def before_backward(self, loss: Tensor) -> Tensor:
        """Count a loss that is about to be back-propagated, and undo Lightning's division of it, or replace it by the window's."""
        window = self._window
        if window is None or not self._is_automatic:
            return loss  # inside a block backward itself counts it
        self._calls = window.begin_backward([loss])
        for call in self._calls:
            call.is_counted = True  # a backward that fails ends the fit
        divided_by = self.fit.trainer.accumulate_grad_batches
        factor = divided_by / window.averages
        return loss if factor == 1 else loss * factor

    def on_gradients_reduced(self) -> None:
        """Correct the gradients of a window of automatic optimisation, which now contain all ranks and micro-batches."""
        window = self._window
        if window is None:
            return
        if not self._is_automatic:
            window.gradients.note()  # our means over ranks
            return
        self._window = None
        if not window.is_single:
            SLOPES.compare([call for call in window.calls if call.is_counted])
            window.correct_(self._notes or [window.note_of_all()])

    def after_backward(self) -> None:
        """Note the gradients that a backward of automatic optimisation left."""
        if self._window is not None and self._is_automatic and not self._window.is_single:
            self._window.end_backward_(self._calls)

    def closed(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """Return a closure after which an optimizer may step: not while gradients wait to be corrected."""

        def closed_window() -> Any:
            result = closure()
            if self._window is not None and self._window.has_begun:
                raise step_inside_window(type(optimizer).__name__)
            return result

        return closed_window


def corrected_parameters(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return by name the parameters that an accumulation window corrects: those the module trains, and others that its optimizers step."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    known = set(map(id, found.values()))
    for i, optimizer in enumerate(optimizers):
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        found.update({f"parameter {j} of optimizer {i}": p for j, p in enumerate(others)})
    return found


# ---------------------------------------------------------------------- between two steps


class TrainedBatches(NamedTuple):
    """The batches that a fit has trained on.

    Attributes:
        epoch: Epoch that training continues in.
        batches: Trained batches of that epoch.
        rewinds: True if Lightning's counters differ and have to be set back.
    """

    epoch: int
    batches: int
    rewinds: bool

    @classmethod
    def of(cls, trainer: pl.Trainer) -> TrainedBatches:
        """Return the batches that a trainer has trained on. Those of an unfinished accumulation window do not count."""
        loop = trainer.fit_loop
        counted = {
            "epoch_progress": loop.epoch_progress.state_dict(),
            "epoch_loop.batch_progress": loop.epoch_loop.batch_progress.state_dict(),
        }
        return cls.read(counted, length=trainer.num_training_batches, window=batches_of_step(trainer))

    @classmethod
    def read(cls, counted: Mapping[str, Any], *, length: float = math.inf, window: int = 1) -> TrainedBatches:
        """Read them from the counters of a fit loop, as a checkpoint has them.

        Args:
            counted: The loop's counters, by name.
            length: Number of batches of an epoch.
            window: Number of batches of a step.
        """
        epochs, progress = counted["epoch_progress"]["current"], counted["epoch_loop.batch_progress"]
        batches, epoch = progress["current"], epochs["processed"]
        trained = batches["processed"]
        is_over = trained >= length or (progress["is_last_batch"] and trained == batches["ready"])
        is_inside = epochs["started"] > epoch
        # 1. between two epochs, at the start or the end of the fit
        if not is_inside and (is_over or trained == 0):
            return cls(epoch, 0, rewinds=is_over)
        # 2. all batches of an epoch are trained on that is not over for Lightning: it runs validation and the hooks at its end, but not
        #    if the last batch itself was not over, and then it would lose count of the epochs
        if is_over:
            return cls(epoch + 1, 0, rewinds=batches["completed"] < trained)
        # 3. inside an epoch. max_steps may have ended it, then Lightning counts it as over
        stepped = trained - trained % window
        rewinds = stepped != trained or progress["is_last_batch"] or not is_inside
        return cls(epoch - (not is_inside), stepped, rewinds=rewinds)

    def rewound(self, fit_loop: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fit loop of a checkpoint with the counters of epochs and batches after these."""
        # Lightning logs by the batches that stepped, and counts one after the hooks that save
        logged = dict(fit_loop["epoch_loop.state_dict"])
        logged["_batches_that_stepped"] += self.epoch > fit_loop["epoch_progress"]["current"]["processed"]
        # 1. epochs: this one has begun if some of its batches are trained on
        begun = self.epoch + (self.batches > 0)
        wanted = {"ready": begun, "started": begun, "processed": self.epoch, "completed": self.epoch}
        epochs = _counted(fit_loop["epoch_progress"], wanted)
        # 2. batches
        batches = _counted(fit_loop["epoch_loop.batch_progress"], dict.fromkeys(wanted, self.batches))
        batches["is_last_batch"] = False
        changed = {"epoch_loop.state_dict": logged, "epoch_progress": epochs, "epoch_loop.batch_progress": batches}
        return {**fit_loop, **changed}


def batches_of_step(trainer: pl.Trainer) -> int:
    """Return the number of batches of a step. Training can continue between two steps, not inside one."""
    return trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1


def iterator_follows(trainer: pl.Trainer) -> bool:
    """Return whether the iterator from which training continues is yet to be made: between two epochs."""
    trained, progress = TrainedBatches.of(trainer), trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    is_over = current.processed == 0 or progress.is_last_batch or current.processed >= trainer.num_training_batches
    return trained.epoch > 0 and trained.batches == 0 and is_over and current.ready <= current.processed


def _counted(progress: Mapping[str, Any], wanted: Mapping[str, int]) -> dict[str, Any]:
    """Return counters with these values, and totals that fit them."""
    # totals count from processed batches: one that failed was ready and started only
    before = progress["total"]["processed"] - progress["current"]["processed"]
    total = {field: before + value for field, value in wanted.items()}
    return {**progress, "current": {**progress["current"], **wanted}, "total": {**progress["total"], **total}}
