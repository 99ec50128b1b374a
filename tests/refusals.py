"""Tables of what is refused on ranks: each row has a call, words of the error, and maybe its kind and the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

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
        same: Whether the text is the same on all ranks.
    """

    call: Callable[[int], object]
    words: str | Sequence[str]
    kind: str = "DDPLossError"
    ranks: int = 2
    same: bool = True


def rows_of(
    call: Callable[[str], object], words: Mapping[str, str | Sequence[str]], **options: Any
) -> dict[str, Refused]:
    """A table of one program, which gets the name of its row. Options are of `Refused`."""
    return {name: Refused(lambda _, name=name: call(name), said, **options) for name, said in words.items()}


def assert_errors(errors: Sequence[RankError], *words: str, of: str = "DDPLossError") -> None:
    """Every rank raised an error of this class, without waiting for a time-out, and it holds these words."""
    told = [f"rank {error.rank}: {error.type} {error.message}" for error in errors]
    assert all(error.is_a(of) for error in errors), told
    assert [word for word in words for error in errors if word not in error.message] == [], told
    assert not any(error.timed_out for error in errors), told


def assert_same_error(errors: Sequence[RankError], *words: str, kind: str = "DDPLossError") -> None:
    """As `assert_errors`, of one error of ours that is the same on every rank."""
    assert_errors(errors, *words, of=kind)
    told = [f"rank {error.rank}: {error.type} {error.message}" for error in errors]
    assert all(error.is_a("DDPLossError") for error in errors), told
    assert len({(error.type, error.message) for error in errors}) == 1, told


def call_row(module: str, table: str, name: str) -> object:
    """Do what a row says, on this rank."""
    return Refused(*getattr(import_module(module), table)[name]).call(dist.get_rank())


def assert_refused(pool: RankPool, module: str, table: str, name: str) -> None:
    """A row of a module's table is an error on all ranks, the same one unless the row says otherwise."""
    row = Refused(*getattr(import_module(module), table)[name])
    words = (row.words,) if isinstance(row.words, str) else row.words
    errors = pool.errors(row.ranks, call_row, module, table, name)
    if row.same:
        assert_same_error(errors, *words, kind=row.kind)
    else:
        assert_errors(errors, *words, of=row.kind)


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
