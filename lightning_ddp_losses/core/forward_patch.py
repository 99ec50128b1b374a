"""A patch of one method of one module: what surrounds a call for the length of a fit, without a change of the module's type.

It sits in the instance under the method's name: attributes, parameter names, hooks and ``isinstance`` stay those of the plain
module. A copy or a pickle of the module carries the plain method again.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import nn

from lightning_ddp_losses.errors import ConfigurationError


def is_capturing() -> bool:
    """Return whether the kernels of this thread are recorded instead of run."""
    # the question is an error where torch is built without CUDA
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse_capture(title: str) -> None:
    """Refuse a call inside a capture.

    Args:
        title: Name of the called function in the message.

    Raises:
        ConfigurationError: inside ``torch.cuda.graph`` and what uses it.
    """
    if is_capturing():
        raise capture_error(title)


def capture_error(title: str) -> ConfigurationError:
    """Return the error of a call inside a capture."""
    return ConfigurationError(
        f"{title}: captured graph",
        expected="a call that runs each time, since ranks exchange messages on the host",
        got='a call inside torch.cuda.graph, torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead")',
        fix="Capture the encoder alone and call this outside of it, or compile with mode='default'.",
    )


F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Run the function itself outside torch.compile. Functions that it calls may still be compiled."""
    return cast("F", torch.compiler.disable(function, recursive=False))  # type: ignore[no-untyped-call]


def eager_recursive(function: F) -> F:
    """Run the function, and all that it calls, outside torch.compile."""
    return cast("F", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def _plain_method(module: nn.Module, name: str) -> Callable[..., Any]:
    return types.MethodType(getattr(type(module), name), module)


class MethodPatch:
    """Takes the place of a method of one module. A subclass defines the call.

    Args:
        module: Module that has the method.
        name: Name of the method.

    Attributes:
        synchronises: The method's result depends on the rows of all ranks.
    """

    synchronises: ClassVar[bool] = False

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self.module = module
        self._name = name
        self._original: Callable[..., Any] | None = module.__dict__.get(name)

    def install(self) -> None:
        """Take the method's place."""
        self.module.__dict__[self._name] = self

    def remove(self) -> None:
        """Give the place back, unless somebody else has taken it since."""
        if self.module.__dict__.get(self._name) is self:
            del self.module.__dict__[self._name]
            if self._original is not None:
                self.module.__dict__[self._name] = self._original

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method as it was."""
        if self._original is not None:
            return self._original(*args, **kwargs)
        return getattr(type(self.module), self._name)(self.module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _plain_method, (self.module, self._name)


def synchronises(module: nn.Module) -> bool:
    """Return whether a patch of this package computes the module's forward over the rows of all ranks."""
    return bool(getattr(module.__dict__.get("forward"), "synchronises", False))
