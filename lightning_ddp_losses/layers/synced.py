"""One batch norm layer whose training statistics are those of all ranks: a stand-in for its ``forward``, the layer itself unchanged.

The layer's own forward runs, with its checks, its counter and its momentum; only the ``torch.nn.functional.batch_norm`` that it
ends in is another one. So subclasses that do more (an activation, a dropout) work as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.forward_patch import ForwardPatch, eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.layers.batch_norm_function import Call, Scope, gather_statistics, normalise


class SyncedForward(ForwardPatch):
    """Runs one layer over the rows of all ranks while it trains.

    Args:
        layer: A batch norm.
        title: How messages name it.
        scope: Answers who normalises together (only once torch.distributed is there).

    Attributes:
        calls: Calls over more than one rank.
        rows: Rows (dimension 0) of the last of them on this rank.
    """

    synchronises = True

    def __init__(self, layer: nn.Module, title: str, scope: Callable[[], Scope]) -> None:
        super().__init__(layer)
        self.title, self.scope = title, scope
        self.calls = self.rows = 0

    @eager_recursive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward; in evaluation mode, in a world of one and where all rows are here already, untouched."""
        if not self.module.training or autograd_graph.is_inside_global_batch() or not process_groups.is_distributed():
            return self.original(*args, **kwargs)
        scope = self.scope()
        if process_groups.world_size(scope.meeting) == 1 or scope.part == 1:
            return self.original(*args, **kwargs)
        try:
            with _Instead(self, scope) as inside:
                output = self.original(*args, **kwargs)
            if not inside.met:
                raise self._unreachable()
        except Exception as error:  # what all ranks raise alike passes through
            fail_in(scope, error, self.title)
        return output

    def batch_norm(
        self,
        scope: Scope,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """``torch.nn.functional.batch_norm`` over the rows of all ranks."""
        plain = (input, running_mean, running_var, weight, bias, training, momentum, eps)
        if not training or not input.is_floating_point() or eps <= 0:
            return functional.batch_norm(*plain)  # or its error
        self.calls += 1
        self.rows = input.shape[0]
        call = Call(self.title, self.calls, scope)
        statistics = gather_statistics(call, input, f"eps={eps}, momentum={momentum}")
        known = next((t for t in (running_mean, weight) if t is not None), None)
        if statistics.total == 0 or (known is not None and known.numel() != input.shape[1]):
            return functional.batch_norm(*plain)
        _keep_average(running_mean, statistics.mean, momentum)
        _keep_average(running_var, statistics.unbiased, momentum)
        return normalise(call, input, statistics, weight, bias, eps)

    def _unreachable(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.title}: {type(self.module).__name__}.forward",
            expected="a call of torch.nn.functional.batch_norm",
            got="none: it computes the statistics of this rank's rows by itself",
            fix="Leave the layer out, or let its forward end in torch.nn.functional.batch_norm.",
        )


class _Instead(TorchFunctionMode):
    """Puts the synchronised batch norm into the place of torch's."""

    def __init__(self, layer: SyncedForward, scope: Scope) -> None:
        super().__init__()
        self._layer, self._scope = layer, scope
        self.met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.met = True
        return self._layer.batch_norm(self._scope, *args, **(kwargs or {}))


class UnregisteredSentinel(ForwardPatch):
    """Waits on a batch norm that the model has not registered: trained, it is an error, unless it was registered since.

    Args:
        layer: A batch norm.
        path: Where it was found.
        registered: Puts a ``SyncedForward`` into our place where the model knows the layer by now; else answers None.
    """

    def __init__(self, layer: nn.Module, path: str, registered: Callable[[nn.Module], SyncedForward | None]) -> None:
        super().__init__(layer)
        self.path = path
        self._registered = registered

    @eager_recursive
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward in evaluation mode and in a world of one."""
        if not self.module.training or process_groups.world_size() == 1:
            return self.original(*args, **kwargs)
        synced = self._registered(self.module)
        if synced is not None:
            return synced(*args, **kwargs)
        raise ConfigurationError(
            f"{type(self.module).__name__} at {self.path}",
            expected="a batch norm in a registered submodule",
            got="one that trains on this rank's rows alone: the model has not registered it, so it is not synchronised",
            fix="Assign the module that holds it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for "
            "several), or put it into evaluation mode.",
        )


def fail_in(scope: Scope, error: Exception, where: str) -> NoReturn:
    """Raise on every rank of the meeting; where that is a part of the world, the rest may be told by whoever comes next."""
    try:
        handshake.raise_on_all_ranks(error, where, group=scope.meeting)
    except Exception as known:
        if process_groups.world_size(scope.meeting) < process_groups.world_size():
            with contextlib.suppress(AttributeError):  # an exception class may forbid it
                known.collective = False  # type: ignore[attr-defined]
        raise


def _keep_average(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.copy_((1 - momentum) * running.to(value.dtype) + momentum * value)
