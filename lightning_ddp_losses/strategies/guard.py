"""What surrounds every call of a loss: precision, input checks, its parameters kept in the graph, and a count.

A guard sits in the loss's instance as its ``forward`` for the length of a fit: attributes, parameter names and hooks stay
those of the plain module. A copy or a pickle of the loss carries the plain ``forward`` again, so both need no peer.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from lightning_ddp_losses import inputs, numerics
from lightning_ddp_losses.errors import HiddenLossError, format_error
from lightning_ddp_losses.strategies.discovery import FoundLoss, unwrap

__all__ = ["HiddenSentinel", "LossGuard", "keep_in_graph"]


F = TypeVar("F", bound=Callable[..., Any])


def _eager(function: F) -> F:
    """Run the function itself outside torch.compile; what it calls may still be compiled."""
    return cast("F", torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


class _InstanceForward:
    """A stand-in for one module's ``forward`` that installs, removes and copies cleanly."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._original: Callable[..., Any] | None = module.__dict__.get("forward")

    def install(self) -> None:
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self._original is not None:
                self.module.__dict__["forward"] = self._original

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self._original is not None:
            return self._original(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return _plain_forward(copy.deepcopy(self.module, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_forward, (self.module,)


class LossGuard(_InstanceForward):
    """Runs one loss in full precision on checked inputs and counts its calls.

    Attributes:
        counting: Whether calls count (only inside ``training_step``, with gradients on).
        calls: Calls since ``reset``.
        rows: Rows of those calls, summed.
    """

    def __init__(self, loss: FoundLoss, *, refuse_nan: bool) -> None:
        super().__init__(loss.module)
        self.loss = loss
        self.counting = False
        self.calls = self.rows = 0
        self._refuse_nan = refuse_nan
        self._seen = False

    def reset(self) -> None:
        """Forget the calls so far."""
        self.calls = self.rows = 0

    @_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, in ``promote(float32, parameters, inputs)`` with autocast off."""
        given = list(numerics.tensors_in((args, kwargs)))
        if self.counting and torch.is_grad_enabled():
            self.calls += 1
            self.rows += inputs.num_rows(args, kwargs)
        # reading values waits for the device: on an accelerator only at the first call
        on_host = all(t.device.type == "cpu" for t in given)
        read = on_host or not self._seen
        self._seen = True
        refuse_nan = read and self._refuse_nan
        inputs.check_inputs(unwrap(self.module), self.loss.title, args, kwargs, read_values=read, refuse_nan=refuse_nan)

        parameters = list(self.module.parameters())
        dtype = numerics.compute_dtype([*parameters, *given])
        args, kwargs = numerics.cast_floating((args, kwargs), dtype)
        devices = {t.device.type for t in given}
        with numerics.full_precision(dtype, devices), numerics.cast_parameters(self.module, dtype):
            result = self.original(*args, **kwargs)
        if torch.is_grad_enabled():
            result = keep_in_graph(result, [p for p in parameters if p.requires_grad], given)
        return result


class HiddenSentinel(_InstanceForward):
    """Waits on an unregistered loss that no optimizer holds: used in ``training_step`` with gradients, it is an error."""

    def __init__(self, module: nn.Module, path: str, in_training_step: Callable[[], bool]) -> None:
        super().__init__(module)
        self.path = path
        self._in_training_step = in_training_step

    @_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, unless it runs with gradients inside ``training_step``."""
        if torch.is_grad_enabled() and self._in_training_step():
            raise HiddenLossError(
                format_error(
                    f"{type(unwrap(self.module)).__name__} at {self.path}",
                    expected="a registered submodule whose parameters are in an optimizer",
                    got="an unregistered loss with trainable parameters, in no optimizer",
                    fix="Assign it to an attribute of the LightningModule (nn.ModuleList or nn.ModuleDict for several) "
                    "and give its parameters to an optimizer.",
                )
            )
        return self.original(*args, **kwargs)


def keep_in_graph(result: Any, parameters: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    """Tie parameters that the result does not depend on to it, with a zero gradient.

    A zero loss often leaves the weight out of the graph on that rank only; then the ranks' gradients cannot be averaged.

    Args:
        result: What the loss returned: a tensor, or a nest of tensors.
        parameters: The loss's trainable parameters.
        given: The loss's inputs; the search for parameters ends there.
    """
    outputs = [t for t in numerics.tensors_in(result) if t.is_floating_point()]
    if not outputs or not parameters:
        return result
    reached = _reached(outputs, given)
    missing = [p for p in parameters if id(p) not in reached]
    if not missing:
        return result
    if isinstance(result, Tensor):
        return _Tie.apply(result, *missing)  # type: ignore[no-untyped-call]
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(keep_in_graph(item, parameters, given) for item in result))
    if isinstance(result, (tuple, list)):
        return type(result)(keep_in_graph(item, parameters, given) for item in result)
    return {key: keep_in_graph(item, parameters, given) for key, item in result.items()}


def _reached(outputs: Sequence[Tensor], given: Sequence[Tensor]) -> set[int]:
    """Ids of the leaves that the outputs depend on, looking no further than the inputs."""
    ends = {t.grad_fn for t in given if t.grad_fn is not None}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen, leaves = set(ends), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(id(leaf))
        stack += [child for child, _ in node.next_functions if child is not None]
    return leaves


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
