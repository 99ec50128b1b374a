"""Gives losses the paths of lightly, which needs torchvision and is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def paths_of_lightly(*classes: type) -> Iterator[None]:
    """Give the classes lightly's paths, for a while: a command that looks for losses would import them."""
    with contextlib.ExitStack() as stack:
        for each in classes:
            stack.enter_context(mock.patch.object(each, "__module__", f"lightly.loss.{each.__name__.lower()}"))
        yield
