"""What tests ask of the answers and the errors of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_ddp_losses.testing import RankError
from tests.oracle import assert_close


def assert_errors(errors: Iterable[RankError], *words: str, of: str = "DDPLossError") -> None:
    """Every rank raised an error of this class, without waiting for a time-out, and it holds these words."""
    for error in errors:
        assert error.is_a(of), error
        assert all(word in error.message for word in words), (words, error.message)
        assert not error.timed_out, error


def assert_all_close(states: Iterable[Mapping[str, Tensor]], oracle: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    """The state of every rank is the oracle's (`assert_close`)."""
    for state in states:
        assert_close(state, oracle, rtol)
