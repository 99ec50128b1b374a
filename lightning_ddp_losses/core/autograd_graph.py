"""How a loss is run: in full precision, and with all its parameters in the graph of the result.

A zero loss often leaves the weight out of the graph on one rank only; then the ranks' gradients cannot be averaged. So what
the result does not depend on is tied to it with a zero gradient.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import precision

_recent_global: deque[Tensor] = deque(maxlen=8)
_all_rows: ContextVar[bool] = ContextVar("all_rows", default=False)


@contextlib.contextmanager
def inside_global_batch() -> Iterator[None]:
    """Inside the block every rank computes the same from the rows of all ranks: statistics of the batch are global already."""
    before = _all_rows.set(True)
    try:
        yield
    finally:
        _all_rows.reset(before)


def is_inside_global_batch() -> bool:
    """Whether this runs inside ``inside_global_batch``."""
    return _all_rows.get()


def remember_global_value(value: Any) -> None:
    """Remember a value that is global already, so that reducing it once more can be called waste."""
    if isinstance(value, Tensor) and value.ndim == 0:
        _recent_global.append(value.detach())


def global_values() -> list[Tensor]:
    """The last few values that were global when they were made."""
    return list(_recent_global)


def run_full_precision(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``forward`` in ``promote(float32, parameters, inputs)`` with autocast off.

    Args:
        module: The loss; its parameters keep their dtype.
        forward: What to call.
        args: Positional arguments; floating tensors among them are cast.
        kwargs: Keyword arguments, likewise.
    """
    given = precision.tensors_in((args, kwargs))
    parameters = precision.parameters_of(module)
    dtype = precision.compute_dtype([*parameters, *given])
    devices = {t.device.type for t in given}
    if precision.is_full(dtype, devices, (*parameters, *given)):  # the usual case, and contexts take time
        result = forward(*args, **kwargs)
    else:
        args, kwargs = precision.cast_floating((args, kwargs), dtype)
        with precision.full_precision(dtype, devices), precision.cast_parameters(module, dtype):
            result = forward(*args, **kwargs)
    if torch.is_grad_enabled():
        result = attach_zero_grad(result, [p for p in parameters if p.requires_grad], given)
    return result


def match_requires_grad(tensor: Tensor, wanted: bool) -> Tensor:
    """The tensor, in need of a gradient where another rank's is: who needs none still takes part in backward's communication."""
    if wanted and not tensor.requires_grad and torch.is_grad_enabled():
        return tensor.detach().requires_grad_()
    return tensor


def attach_zero_grad(result: Any, parameters: Sequence[Tensor], given: Sequence[Tensor]) -> Any:
    """The result, with every parameter in its graph.

    Args:
        result: What the loss returned: a tensor, or a nest of tensors.
        parameters: The loss's trainable parameters.
        given: The loss's inputs; the search for parameters ends there.
    """
    outputs = [t for t in precision.tensors_in(result) if t.is_floating_point()] if parameters else []
    if not outputs:
        return result
    missing = _not_reached(outputs, given, parameters)
    if not missing:
        return result
    if isinstance(result, Tensor):
        return _AttachZeroGrad.apply(result, *missing)  # type: ignore[no-untyped-call]
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(attach_zero_grad(item, parameters, given) for item in result))
    if isinstance(result, (tuple, list)):
        return type(result)(attach_zero_grad(item, parameters, given) for item in result)
    return {key: attach_zero_grad(item, parameters, given) for key, item in result.items()}


def _not_reached(outputs: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that the outputs do not depend on, looking no further than the inputs."""
    missing = {id(p): p for p in parameters}
    seen = {t.grad_fn for t in given if t.grad_fn is not None}
    stack = [t.grad_fn for t in outputs if t.grad_fn is not None]
    while stack and missing:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        below = node.next_functions
        if not below:  # a parameter's own node is a leaf; to ask the others costs more than the rest of the search
            missing.pop(id(getattr(node, "variable", None)), None)
        stack += [child for child, _ in below if child is not None]
    return list(missing.values())


class _AttachZeroGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
