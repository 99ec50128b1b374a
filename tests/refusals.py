"""Tables of what is refused on ranks: each row has a call, words of the error, and maybe its kind and the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import pytest
import torch.distributed as dist

from lightning_ddp_losses.testing import RankError, RankPool


class Refused(NamedTuple):
    """A row of a table.

    Attributes:
        call: What each rank does, of its number.
        words: Some words of the error.
        kind: Its class.
        ranks: Of the world.
    """

    call: Callable[[int], object]
    words: str | tuple[str, ...]
    kind: str = "DDPLossError"
    ranks: int = 2


def assert_same_error(errors: Sequence[RankError], *words: str, kind: str = "DDPLossError") -> None:
    """Every rank raised the same error of ours, without waiting for a time-out, and it holds these words."""
    told = [f"rank {error.rank}: {error.type} {error.message}" for error in errors]
    assert all(error.is_a("DDPLossError") and error.is_a(kind) for error in errors), told
    assert len({(error.type, error.message) for error in errors}) == 1, told
    assert [word for word in words if word not in errors[0].message] == [], told
    assert not any(error.timed_out for error in errors), told


def call_row(module: str, table: str, name: str) -> object:
    """Do what a row says, on this rank."""
    return Refused(*getattr(import_module(module), table)[name]).call(dist.get_rank())


def assert_refused(pool: RankPool, module: str, table: str, name: str) -> None:
    """A row of a module's table is the same error on all ranks."""
    row = Refused(*getattr(import_module(module), table)[name])
    words = (row.words,) if isinstance(row.words, str) else row.words
    assert_same_error(pool.errors(row.ranks, call_row, module, table, name), *words, kind=row.kind)


def refusals(module: str, table: str) -> Callable[..., None]:
    """A test of each row of a module's table, which is written above."""

    @pytest.mark.parametrize("name", vars(sys.modules[module])[table])
    def test(pool: RankPool, name: str) -> None:
        assert_refused(pool, module, table, name)

    return test


def refusals_of_one_process(
    table: dict[str, tuple[Callable[[], object], str | tuple[str, ...]]], *kinds: type[Exception]
) -> Callable[..., None]:
    """A test of each row of a table of calls without arguments, and words of the errors."""

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        call, words = table[name]
        with pytest.raises(kinds) as raised:
            call()
        assert [word for word in ((words,) if isinstance(words, str) else words) if word not in str(raised.value)] == []

    return test
