"""Options that may only be given by name from now on: for one release they still work by position, with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn_positional_options(*names: str, after: int = 0) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an ``__init__`` with keyword-only options, so that those which had a place before still work there.

    The signature that tools read (``inspect``, LightningCLI, mypy) is the keyword-only one.

    Args:
        *names: The options, in the order of their former places.
        after: How many arguments before them stay positional.

    Raises:
        TypeError: when called with more positional options than there were, or with one given twice.
    """

    def decorate(init: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(init)
        def with_positions(self: Any, *arguments: Any, **options: Any) -> R:
            first, positional = arguments[:after], arguments[after:]
            if positional:
                title = type(self).__name__
                if len(positional) > len(names):
                    raise TypeError(f"{title} takes at most {len(names)} positional options, got {len(positional)}")
                named = dict(zip(names, positional, strict=False))
                twice = ", ".join(name for name in named if name in options)
                if twice:
                    raise TypeError(f"{title} got several values for {twice}")
                shown = ", ".join(f"{name}=..." for name in named)
                text = f"{title}: give options by name, {title}({shown}); by position they will not work in the next release"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                options |= named
            return init(self, *first, **options)

        return with_positions  # type: ignore[return-value]

    return decorate
