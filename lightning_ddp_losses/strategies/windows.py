"""Accumulation windows as Lightning's loops go: opened by the first micro-batch, closed by the backward that synchronises.

``distributed/accumulation`` defines a window. Lightning divides what ``training_step`` returns by ``accumulate_grad_batches``.
That is undone here, as the window divides by its counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow, Counts, active, step_inside_window
from lightning_ddp_losses.distributed.window_parts import compare_slopes
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart


class LightningWindows(FitPart):
    """The accumulation windows of one fit. A part with ``accumulation="window"`` only."""

    needs = ("accumulation", "window")

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._window: AccumulationWindow | None = None
        self._expected: list[tuple[Any, Any]] = []  # counts and totals that were given before the window was open
        self._last_batch = (-1, -1)  # epoch and number

    # ------------------------------------------------------------------ automatic optimisation

    def training_step(self) -> AbstractContextManager[None]:
        """Return the context of the window's next micro-batch. In manual optimisation windows are blocks of the user's."""
        if not self.fit.module.automatic_optimization:
            return contextlib.nullcontext()
        return self._micro_batch(self.fit.trainer, is_last=self.fit.strategy.sync_gradients)

    @contextlib.contextmanager
    def _micro_batch(self, trainer: pl.Trainer, *, is_last: bool) -> Iterator[None]:
        """Run a training step as the next micro-batch of its window. The first one opens it."""
        batch, per_window = trainer.fit_loop.epoch_loop.batch_idx, trainer.accumulate_grad_batches
        if (trainer.current_epoch, batch) == self._last_batch and self._window is None:
            raise ConfigurationError(
                "accumulation='window'",
                expected="an optimizer that evaluates each batch once",
                got=f"a second training_step of batch {batch}",
                fix="Use another optimizer (LBFGS evaluates a batch several times), or accumulation='mean'.",
            )
        self._last_batch = trainer.current_epoch, batch
        number = batch % per_window + 1
        window = self._window
        if number == 1 or window is None:
            window = self._open(per_window)
        window.begin_micro_batch(number, is_last=is_last)
        self._give_expected(window)
        with active(window):
            yield

    def _open(self, micro_batches: int) -> AccumulationWindow:
        module = self.fit.module
        corrected = corrected_parameters(module, self.fit.strategy.optimizers)
        self._window = AccumulationWindow(corrected, micro_batches, {"": module})
        return self._window

    # ------------------------------------------------------------------ manual optimisation

    @contextlib.contextmanager
    def block(self, micro_batches: int) -> Iterator[AccumulationWindow]:
        """Make the backward calls inside the block the micro-batches of one window."""
        if self._window is not None:
            raise ConfigurationError("strategy.window()", expected="no window around it", got="one that is open")
        window = self._open(micro_batches)
        window.refuse_left_gradients()
        try:
            self._give_expected(window)
            with active(window):
                yield window
            handshake.all_gather("end of strategy.window()", {"micro-batches": window.micro_batch - 1})
            window.correct_()
        finally:
            self._window = None

    # ------------------------------------------------------------------ both

    def on_train_end(self) -> None:
        """Compare the upstream gradients of the last window."""
        compare_slopes()

    def expect_counts(self, counts: Counts | None, totals: Mapping[str, float | Sequence[float]] | None) -> None:
        """Take what losses will count in the window that is open, or in the next one."""
        if self._window is None:
            self._expected.append((counts, totals))
        else:
            self._window.expect_counts(counts, totals)

    def _give_expected(self, window: AccumulationWindow) -> None:
        expected, self._expected = self._expected, []
        for counts, totals in expected:
            window.expect_counts(counts, totals)

    def before_backward(self, loss: Tensor) -> Tensor:
        """Count a loss that is about to be back-propagated, and undo Lightning's division of it."""
        window = self._window
        if window is None or not self.fit.module.automatic_optimization:
            return loss  # inside a block backward itself counts it
        if not window.is_open:
            window.refuse_left_gradients()
        window.commit([loss])
        divided_by = self.fit.trainer.accumulate_grad_batches
        return loss * divided_by if divided_by > 1 else loss

    def on_gradients_reduced(self) -> None:
        """Correct the gradients of a window of automatic optimisation: they are those of all ranks and micro-batches now."""
        if not self.fit.module.automatic_optimization:
            return
        window, self._window = self._window, None
        if window is not None and not window.is_single:
            window.correct_()

    def closed(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """Return a closure after which an optimizer may step: not while gradients wait to be corrected."""

        def closed_window() -> Any:
            result = closure()
            if self._window is not None and self._window.is_open:
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
