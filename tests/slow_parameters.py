"""Some parameters of a test in `nox -s slow`, the others in the suite proper."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_parameters(values: Iterable[Any], slow: Container[Any]) -> list[Any]:
    """Return the values as parameters of a test, in their order; those in `slow` have the mark."""
    return [pytest.param(value, marks=pytest.mark.slow) if value in slow else value for value in values]
