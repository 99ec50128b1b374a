"""What surrounds every call of a loss: precision, input checks, its parameters kept in the graph, and a count.

A guard sits in the loss's instance as its ``forward`` for the length of a fit: attributes, parameter names and hooks stay
those of the plain module. A copy or a pickle of the loss carries the plain ``forward`` again, so both need no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.forward_patch import ForwardPatch, eager
from lightning_ddp_losses.errors import HiddenLossError
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, unwrap


class LossForwardPatch(ForwardPatch):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        sees_global_batch: Whether the loss evaluates the rows of all ranks.
        counting: Whether calls count (only inside ``training_step``, with gradients on).
        calls: Calls since ``reset``.
        rows: Rows of those calls, summed.
        awaited: Calls that backward has yet to pass through.
        on_return: Called when it has; answers whether the call was one of the open backward.
    """

    def __init__(self, loss: FoundLoss, *, refuse_nan: bool, whole: nn.Module | None = None) -> None:
        super().__init__(loss.module)
        self.loss = loss
        self._inner = unwrap(loss.module)
        self.sees_global_batch = loss.sees_global_batch or whole is not None
        self._whole = whole  # evaluates the loss over all ranks, and comes back here for the loss itself
        self._inside = False
        self.counting = False
        self.calls = self.rows = self.awaited = 0
        self.on_return: Callable[[], bool] = lambda: True
        self._refuse_nan = refuse_nan
        self._reading = inputs.ValueReading()

    def reset(self) -> None:
        """Forget the calls so far."""
        self.calls = self.rows = self.awaited = 0

    def _await(self, given: Iterable[Tensor]) -> None:
        """Notice when backward leaves this call: the gradient of an input comes after those of the loss's parameters."""
        passed_on = next((t for t in given if t.grad_fn is not None), None)
        if passed_on is not None:
            self.awaited += 1
            passed_on.register_hook(self._returned)  # type: ignore[no-untyped-call]

    def _returned(self, _: Tensor) -> None:
        if not self.on_return():
            self.awaited = max(0, self.awaited - 1)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, in ``promote(float32, parameters, inputs)`` with autocast off."""
        if self._inside:
            return self.original(*args, **kwargs)
        if self.counting and torch.is_grad_enabled():
            self.calls += 1
            self.rows += inputs.num_rows(args, kwargs)
            self._await(precision.tensors_in((args, kwargs)))
        read = self._reading.next_call((args, kwargs))
        inputs.check_inputs(
            self._inner,
            self.loss.title,
            args,
            kwargs,
            read_values=read,
            refuse_nan=read and self._refuse_nan,
            allow_empty=self.sees_global_batch,
        )
        if self._whole is None:
            return autograd_graph.run_full_precision(self.module, self.original, args, kwargs)
        self._inside = True
        try:
            return self._whole(*args, **kwargs)
        finally:
            self._inside = False


class UnregisteredLossPatch(ForwardPatch):
    """Waits on an unregistered loss that no optimizer holds: used in ``training_step`` with gradients, it is an error."""

    def __init__(self, module: nn.Module, path: str, in_training_step: Callable[[], bool]) -> None:
        super().__init__(module)
        self.path = path
        self._in_training_step = in_training_step

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, unless it runs with gradients inside ``training_step``."""
        if torch.is_grad_enabled() and self._in_training_step():
            raise HiddenLossError(
                f"{type(unwrap(self.module)).__name__} at {self.path}",
                expected="a registered submodule whose parameters are in an optimizer",
                got="an unregistered loss with trainable parameters, in no optimizer",
                fix="Assign it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for several) "
                "and give its parameters to an optimizer.",
            )
        return self.original(*args, **kwargs)
