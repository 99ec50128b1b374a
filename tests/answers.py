"""What tests ask of the answers and the errors of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from tests.oracle import assert_close
from tests.refusals import assert_errors

__all__ = ["assert_all_close", "assert_errors"]


def assert_all_close(states: Iterable[Mapping[str, Tensor]], oracle: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    """The state of every rank is the oracle's (`assert_close`)."""
    for state in states:
        assert_close(state, oracle, rtol)
