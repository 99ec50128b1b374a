"""What surrounds every call of a loss: precision, input checks, its parameters kept in the graph, and a count.

A patch sits in the loss's instance as its ``forward`` for the length of a fit: attributes, parameter names and hooks stay
those of the plain module. A copy or a pickle of the loss carries the plain ``forward`` again, so both need no peer.

With ``global_batch="auto"`` the patch hands the call to a wrapper that evaluates the loss over the rows of all ranks. Losses and
strategies do not know each other. The package hands the wrapper over when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.compat import uncompiled
from lightning_ddp_losses.core.forward_patch import MethodPatch, eager
from lightning_ddp_losses.distributed.process_groups import WithProcessGroup
from lightning_ddp_losses.errors import ConfigurationError, HiddenLossError
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, is_loss

_WRAPPED = (pml.BaseMetricLossFunction, pml.MultipleLosses, pml.SelfSupervisedLoss)
_wrapper: list[Callable[[nn.Module], nn.Module]] = []


class LossForwardPatch(MethodPatch):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        sees_global_batch: True if the loss evaluates the rows of all ranks.
        counting: True if calls count (only inside ``training_step``, with gradients on).
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
        self.value_reading = inputs.ValueReading()

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
        # 2. check the inputs. To look at values on an accelerator waits for it
        tensors = precision.CallTensors.of(self.module, args, kwargs)
        read = self.value_reading.next_call(tensors.given)
        self.value_reading.raise_late()
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
            self.value_reading.note_nan(self._title, args, kwargs)
        # 3. evaluate
        if self._global_loss is None:
            if not read:
                args, kwargs = inputs.clamp_labels(self._inner, self._title, args, kwargs, self.value_reading)
            if getattr(self._inner, "sees_global_batch", False) and isinstance(self._inner, WithProcessGroup):
                return self.original(*args, **kwargs)  # which computes wide by itself, and sends rows as they come
            return autograd_graph.run_full_precision(self.module, self.original, args, kwargs, tensors=tensors)
        self._in_global_loss = True
        try:
            return self._global_loss(*args, **kwargs)
        finally:
            self._in_global_loss = False


class UnregisteredLossPatch(MethodPatch):
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


class LossCalls(FitPart):
    """The forward patches of all losses of a fit.

    Attributes:
        patches: One for each loss of the fit.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self.patches: list[LossForwardPatch] = []
        self._unregistered: list[UnregisteredLossPatch] = []
        self._in_training_step = False

    def install(self) -> None:
        """Patch the losses that are known now."""
        # if a scaler looks for overflow, NaN is its business
        refuse_nan = getattr(self.fit.strategy.precision_plugin, "scaler", None) is None
        for loss in self.fit.found:
            global_loss = _wrap_global(loss, self.fit.module) if self.fit.options.global_batch else None
            self.patches.append(LossForwardPatch(loss, refuse_nan=refuse_nan, global_loss=global_loss))
        for patch in (*self.patches, *self._unregistered):
            patch.install()
            self.undo.callback(patch.remove)

    def watch_unregistered(self, modules: Mapping[str, nn.Module]) -> None:
        """Watch those of some hidden modules, by path, that are losses. To be called before ``install``."""
        self._unregistered = [
            UnregisteredLossPatch(module, path, lambda: self._in_training_step)
            for path, module in modules.items()
            if is_loss(module)
        ]

    def count(self, *, on: bool) -> None:
        """Count calls from now on, or stop counting."""
        self._in_training_step = on
        for patch in self.patches:
            patch.counting = on


# ---------------------------------------------------------------------- global_batch="auto"


def use_global_wrapper(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Set the wrapper that makes a loss global (``GlobalBatchLoss``).

    Example:
        >>> from lightning_ddp_losses import GlobalBatchLoss
        >>> use_global_wrapper(GlobalBatchLoss)  # as importing the package does
    """
    _wrapper[:] = [wrapper]


def _wrap_global(loss: FoundLoss, root: nn.Module) -> nn.Module | None:
    """Return the loss over all ranks, around the loss itself. None for one that is no PML loss, or global already.

    Args:
        loss: Found in ``root``.
        root: The LightningModule.

    Raises:
        ConfigurationError: for a cross-batch memory: only an explicit wrapper can save its position. For a loss inside a wrapper that
            gathers already.
    """
    inner = uncompiled(loss.module)
    if loss.sees_global_batch:
        return None
    if any(isinstance(module, pml.CrossBatchMemory) for module in inner.modules()):
        raise ConfigurationError(
            f"global_batch='auto': {loss.title}",
            expected="losses without a memory",
            got="a CrossBatchMemory, whose queue position would not be saved",
            fix="Write GlobalBatchLoss(CrossBatchMemory(...)) in the module.",
        )
    # no loss inside a wrapper of PML's that gathers
    path = loss.name.split(".")
    for depth in range(1, len(path)):
        if isinstance(root.get_submodule(".".join(path[:depth])), DistributedLossWrapper):
            raise ConfigurationError(
                f"global_batch='auto': {loss.title}",
                expected="losses that look at the rows they are given",
                got="one in pytorch-metric-learning's DistributedLossWrapper, which gathers by itself",
                fix="Leave the wrapper out.",
            )
    if not isinstance(inner, _WRAPPED):
        return None
    return _wrapper[0](loss.module)
