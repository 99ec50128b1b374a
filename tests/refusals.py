"""Tables of what is refused: a row says what the user does, some words of the error, its class and the number of ranks.

Words may begin with the class, as in a traceback: "InputError: labels". All ranks raise the same text, unless a row says
otherwise. A folder has its table in `test_refusals.py`; beside it are the tables of a file whose programs are of no use
without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from lightning_ddp_losses.testing import RankError, RankPool

# a call in one process, and words of its error in their order
Mistake = tuple[Callable[[], object], str | tuple[str, ...]]


class Refused(NamedTuple):
    """A row of a table.

    Attributes:
        call: What each rank does, of its number.
        words: Some words of the error.
        kind: Its class, or a base of it.
        ranks: Of the world; 0: one process without a group.
        same: Whether the text is the same on all ranks.
        own: Ranks that raise an error which is not ours, and some words of its class and text. The other ranks raise what the row says.
        unsaid: Words that the error does not have.
        after: What each rank does with its error, for instance go on.
    """

    call: Callable[[int], object]
    words: str | Sequence[str]
    kind: str = "DDPLossError"
    ranks: int = 2
    same: bool = True
    own: Mapping[int, str] = {}
    unsaid: str | None = None
    after: Callable[[Exception], object] | None = None


def rows_of(
    call: Callable[[str], object], words: Mapping[str, str | Sequence[str]], **options: Any
) -> dict[str, Refused]:
    """A table of one program, which gets the name of its row. Options are of `Refused`."""
    return {name: Refused(lambda _, name=name: call(name), said, **options) for name, said in words.items()}


def assert_errors(errors: Sequence[RankError], *words: str, of: str = "DDPLossError") -> None:
    """Every rank raised an error of this class, without waiting for a time-out, and it holds these words."""
    texts = [f"{error.type}: {error.message}" for error in errors]
    assert all(error.is_a(of) for error in errors), texts
    assert [word for word in words for text in texts if word not in text] == [], texts
    assert not any(error.timed_out for error in errors), texts


def assert_same_error(errors: Sequence[RankError], *words: str, kind: str = "DDPLossError") -> None:
    """As `assert_errors`, of one error of ours that is the same on every rank."""
    assert_errors(errors, *words, of=kind)
    texts = [f"{error.type}: {error.message}" for error in errors]
    assert all(error.is_a("DDPLossError") for error in errors), texts
    assert len(set(texts)) == 1, texts


def call_row(module: str, table: str, name: str) -> object:
    """Do what a row says, on this rank."""
    row = Refused(*getattr(import_module(module), table)[name])
    try:
        return row.call(dist.get_rank() if dist.is_initialized() else 0)
    except Exception as error:
        if row.after is not None:
            row.after(error)
        raise


def assert_refused(pool: RankPool, module: str, table: str, name: str) -> None:
    """A row of a module's table is an error on all ranks, the same one unless the row says otherwise."""
    row = Refused(*getattr(import_module(module), table)[name])
    words = (row.words,) if isinstance(row.words, str) else row.words
    errors = pool.errors(row.ranks or 1, call_row, module, table, name, distributed=row.ranks > 0)
    peers = [error for error in errors if error.rank not in row.own]
    for rank, text in row.own.items():
        assert text in f"{errors[rank].type}: {errors[rank].message}"
        assert not errors[rank].is_a("DDPLossError")
    if row.same and peers:
        assert_same_error(peers, *words, kind=row.kind)
    else:
        assert_errors(peers, *words, of=row.kind)
    assert row.unsaid is None or [error.message for error in errors if row.unsaid in error.message] == []
    assert not any(error.timed_out for error in errors), errors


def refusals(module: str, table: str) -> Callable[..., None]:
    """A test of each row of a module's table, which is written above."""

    @pytest.mark.parametrize("name", vars(sys.modules[module])[table])
    def test(pool: RankPool, name: str) -> None:
        assert_refused(pool, module, table, name)

    return test


def refusals_of_one_process(table: Mapping[str, Mistake], *kinds: type[Exception]) -> Callable[..., None]:
    """A test of each row of a table: its call raises an error of these classes."""

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        call, words = table[name]
        in_order = map(re.escape, [words] if isinstance(words, str) else words)
        with pytest.raises(kinds, match="(?s:.*)".join(in_order)):
            call()

    return test
