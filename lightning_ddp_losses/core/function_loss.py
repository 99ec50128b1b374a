"""`FunctionLoss`: a plain function of tensors as a loss module, so that all that takes a loss module takes a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class FunctionLoss(nn.Module):
    """A function as a loss module. It has no weights of its own.

    Args:
        function: Function, ``functools.partial``, bound method or callable object.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def extra_repr(self) -> str:
        """Show the name of the function."""
        return name_of_function(self.function)


def name_of_function(function: Any) -> str:
    """Return the name of a function: of a partial one that of its whole, of a callable object that of its class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def name_of_loss(loss: object) -> str:
    """Return the name of a loss in messages: its class, or the function that it calls."""
    if isinstance(loss, FunctionLoss):
        return name_of_function(loss.function)
    return type(loss).__name__


def as_module(loss: Any) -> Any:
    """Return a function as a module. All else, classes too, stays what it is."""
    is_function = callable(loss) and not isinstance(loss, (type, nn.Module))
    return FunctionLoss(loss) if is_function else loss
