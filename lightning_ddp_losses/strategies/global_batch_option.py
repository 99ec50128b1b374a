"""``global_batch="auto"``: losses of an unchanged LightningModule, evaluated over the rows of all ranks.

Losses and strategies do not know each other; the package hands the wrapper over when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import pytorch_metric_learning.losses as pml
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn

from lightning_ddp_losses.core.compat import uncompiled
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

_WRAPPED = (pml.BaseMetricLossFunction, pml.MultipleLosses, pml.SelfSupervisedLoss)
_wrapper: list[Callable[[nn.Module], nn.Module]] = []


def use_global_wrapper(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Say what makes a loss global (``GlobalBatchLoss``).

    Example:
        >>> from lightning_ddp_losses import GlobalBatchLoss
        >>> use_global_wrapper(GlobalBatchLoss)  # as importing the package does
    """
    _wrapper[:] = [wrapper]


def wrap_global(loss: FoundLoss, root: nn.Module) -> nn.Module | None:
    """Return the loss over all ranks, around the loss itself; None for one that is no PML loss, or global already.

    Args:
        loss: Found in ``root``.
        root: The LightningModule.

    Raises:
        ConfigurationError: for a cross-batch memory, whose position only an explicit wrapper can save; for a loss inside a wrapper that
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
