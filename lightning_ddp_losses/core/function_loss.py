"""`FunctionLoss`: wraps a plain function of tensors as a loss module, so that it can be used wherever a loss module is accepted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from torch import nn

from lightning_ddp_losses.errors import InputError

UNFINISHED = (AsyncGeneratorType, CoroutineType, GeneratorType)
"""What a function with ``async`` or ``yield`` returns. It has not run."""


class FunctionLoss(nn.Module):
    """A function as a loss module without weights.

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
    """Return the name of a function, of the function inside a partial, or of a callable object's class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def name_of_loss(loss: object) -> str:
    """Return the name of a loss in messages: its class, or the function that it calls."""
    if isinstance(loss, FunctionLoss):
        return name_of_function(loss.function)
    return type(loss).__name__


def unfinished_error(loss: str, value: Any) -> InputError:
    """Return the error for a loss that returns something that has not run."""
    if isinstance(value, CoroutineType):
        value.close()  # it would warn that it was never awaited
    return InputError(
        f"{loss}: result",
        expected="a function that returns tensors",
        got=f"a {type(value).__name__}: it has async or yield, and has not run",
        fix="Write it as a plain function.",
    )


def as_module(loss: Any) -> Any:
    """Wrap a function in a module. Any other object, including a class, is returned unchanged."""
    is_function = callable(loss) and not isinstance(loss, (type, nn.Module))
    return FunctionLoss(loss) if is_function else loss
