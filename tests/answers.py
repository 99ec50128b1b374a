"""What tests ask of the answers and the errors of all ranks, and tests that are rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.refusals import assert_errors

__all__ = ["as_one_process", "assert_all_close", "assert_errors", "one_error"]
Test = Callable[..., None]


def assert_all_close(states: Iterable[Mapping[str, Tensor]], oracle: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    """The state of every rank is the oracle's (`assert_close`)."""
    for state in states:
        assert_close(state, oracle, rtol)


def as_one_process(
    program: Callable[[str], Any],
    truth: Callable[[str, int], Any],
    names: Iterable[str],
    worlds: int | Sequence[int] = 2,
) -> Test:
    """A test that each rank finds with a program, which gets a name, what one process finds for all ranks of that world."""

    def test(pool: RankPool, name: str, world: int) -> None:
        assert_all_close(pool.run(world, program, name), truth(name, world))

    return _for_each(test, names, worlds)


def one_error(program: Callable[[str], Any], table: Mapping[str, Any], worlds: int | Sequence[int] = 2) -> Test:
    """A test that a program, which gets the name of a row, is an error on all ranks. Its words are the last column."""

    def test(pool: RankPool, name: str, world: int) -> None:
        words = table[name][-1]
        assert_errors(pool.errors(world, program, name), *([words] if isinstance(words, str) else words))

    return _for_each(test, table, worlds)


def _for_each(body: Test, names: Iterable[str], worlds: int | Sequence[int]) -> Test:
    if isinstance(worlds, int):

        @pytest.mark.parametrize("name", names)
        def test(pool: RankPool, name: str) -> None:
            body(pool, name, worlds)

        return test
    return pytest.mark.parametrize("world", worlds)(pytest.mark.parametrize("name", names)(body))
