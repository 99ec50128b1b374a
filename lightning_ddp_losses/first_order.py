"""Gradients that are to be taken once: the second derivative of a value over all ranks would need all ranks once more.

Gradient penalties and Hessian products ask for it (``create_graph=True``). It is an error, never a gradient without that part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError, format_error

__all__ = ["first_order_only", "to_be_taken_once"]

Grads = tuple[Tensor | None, ...]

_OF_ONE_RANK = "Penalise the gradient of what each rank computes by itself (the encoder's, a plain loss's), not of a value over all ranks."


def first_order_only(what: str, *, linear: bool = False) -> Callable[[Callable[..., Grads]], Callable[..., Grads]]:
    """For the ``backward`` of an autograd function, which saves what its result depends on: to differentiate that result is an error.

    torch's ``once_differentiable`` says so only where the gradient that comes in has a graph. Below the end of a loss it has none, and
    what comes out then passes for a constant.

    Args:
        what: How the message names it.
        linear: The function is linear: where the gradient that comes in is a constant, so is what comes out.
    """

    def decorate(backward: Callable[..., Grads]) -> Callable[..., Grads]:
        @functools.wraps(backward)
        def wrapped(ctx: Any, *grads: Tensor | None) -> Grads:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled() or (linear and not any(g is not None and g.requires_grad for g in grads)):
                return found
            return to_be_taken_once(found, (*grads, *ctx.saved_tensors), what, _OF_ONE_RANK)

        return wrapped

    return decorate


def to_be_taken_once(gradients: Grads, depends_on: Grads, what: str, fix: str) -> Grads:
    """The same gradients; to differentiate them is an error.

    Args:
        gradients: What a ``backward`` computed without a graph, with ``create_graph=True``.
        depends_on: What they are a function of, with its graph.
        what: How the message names it.
        fix: What to do.
    """
    return tuple(None if g is None else _Once.apply(g, what, fix, *depends_on) for g in gradients)  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, what: str, fix: str, *depends_on: Tensor | None) -> Tensor:
        ctx.what, ctx.fix = what, fix
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        raise ConfigurationError(
            format_error(
                f"second derivative of {ctx.what}",
                expected="first derivatives only",
                got="a backward through a gradient made with create_graph=True",
                fix=ctx.fix,
            )
        )
