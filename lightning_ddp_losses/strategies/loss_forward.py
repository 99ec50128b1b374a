"""What surrounds every call of a loss: precision, input checks, its parameters kept in the graph, and a count.

A patch sits in the loss's instance as its ``forward`` for the length of a fit: attributes, parameter names and hooks stay
those of the plain module. A copy or a pickle of the loss carries the plain ``forward`` again, so both need no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_ddp_losses.core import autograd_graph, inputs
from lightning_ddp_losses.core.compat import uncompiled
from lightning_ddp_losses.core.forward_patch import ForwardPatch, eager
from lightning_ddp_losses.distributed.process_groups import WithProcessGroup
from lightning_ddp_losses.errors import HiddenLossError
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss


class LossForwardPatch(ForwardPatch):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        sees_global_batch: Whether the loss evaluates the rows of all ranks.
        counting: Whether calls count (only inside ``training_step``, with gradients on).
        calls: Calls since ``reset``.
        rows: Rows of those calls, summed.
    """

    def __init__(self, loss: FoundLoss, *, refuse_nan: bool, global_loss: nn.Module | None = None) -> None:
        super().__init__(loss.module)
        self.loss = loss
        self._inner = uncompiled(loss.module)
        self._title = loss.title
        self.sees_global_batch = loss.sees_global_batch or global_loss is not None
        self._global_loss = global_loss  # evaluates the loss over all ranks, and comes back here for the loss itself
        self._in_global_loss = False
        self.counting = False
        self.calls = self.rows = 0
        self._refuse_nan = refuse_nan
        self._reading = inputs.ValueReading()
        self._paths = autograd_graph.ParameterPaths()

    def reset(self) -> None:
        """Forget the calls so far."""
        self.calls = self.rows = 0

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the loss, in ``promote(float32, parameters, inputs)`` with autocast off."""
        if self._in_global_loss:  # the global loss evaluates this one
            return self.original(*args, **kwargs)
        # 1. count
        if self.counting and torch.is_grad_enabled():
            self.calls += 1
            self.rows += inputs.num_rows(args, kwargs)
        # 2. check the inputs; to look at values on an accelerator waits for it
        read = self._reading.next_call((args, kwargs))
        self._reading.raise_late()
        inputs.check_inputs(
            self._inner,
            self._title,
            args,
            kwargs,
            read_values=read,
            refuse_nan=read and self._refuse_nan,
            allow_empty=self.sees_global_batch,
        )
        if not read and self._refuse_nan:
            inputs.note_nan(self._title, args, kwargs, self._reading)
        # 3. evaluate
        if self._global_loss is None:
            if not read:
                args, kwargs = inputs.clamp_labels(self._inner, self._title, args, kwargs, self._reading)
            if getattr(self._inner, "sees_global_batch", False) and isinstance(self._inner, WithProcessGroup):
                return self.original(*args, **kwargs)  # which computes wide by itself, and sends rows as they come
            return autograd_graph.run_full_precision(self.module, self.original, args, kwargs, paths=self._paths)
        self._in_global_loss = True
        try:
            return self._global_loss(*args, **kwargs)
        finally:
            self._in_global_loss = False


class UnregisteredLossPatch(ForwardPatch):
    """Watches an unregistered loss that no optimizer holds: used in ``training_step`` with gradients, it is an error."""

    def __init__(self, module: nn.Module, path: str, in_training_step: Callable[[], bool]) -> None:
        super().__init__(module)
        self.path = path
        self._in_training_step = in_training_step

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, unless it runs with gradients inside ``training_step``."""
        if torch.is_grad_enabled() and self._in_training_step():
            raise HiddenLossError(
                f"{type(uncompiled(self.module)).__name__} at {self.path}",
                expected="a registered submodule whose parameters are in an optimizer",
                got="an unregistered loss with trainable parameters, in no optimizer",
                fix="Assign it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for several) "
                "and give its parameters to an optimizer.",
            )
        return self.original(*args, **kwargs)
