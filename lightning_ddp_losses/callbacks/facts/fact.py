"""Facts: numbers of one rank that all ranks compare, the columns of all ranks, and the note in which they travel.

A `Fact` names what is read, the stage of a run that reads it, and the rule over its columns. A stage collects the facts of all checks that
are due into one array of int64 and one of float64, and sends both in one note. A rule is a pure function from columns to findings, so
every rank has the same findings. Rows of checks of users become facts in ``user_rows.py``.

A note is a head, a layout, the ints and the floats. The layout is a line of text with a part for each fact, separated by ``;``. A part has
a code for each column, separated by ``,``: ``q`` for an int, ``d`` for a float, with a number behind it for a list of so many. The part of
a fact without numbers is ``-``. The part of a check that failed is ``!`` and the length of its text, whose bytes are stored as ints.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from lightning_ddp_losses.callbacks.findings import CheckStage, Finding

Numbers: TypeAlias = "Mapping[str, float | Sequence[float]]"
"""Numbers of one rank by the name of their column: an int, a float, or a list of either."""

Columns: TypeAlias = "dict[str, Sequence[Any]]"
"""Numbers of all ranks by the name of their column, in rank order."""

Decoded: TypeAlias = "list[Sequence[Any]] | dict[int, str] | None"
"""Columns of one fact, texts of the ranks that failed, or None if a rank has no numbers."""

_Row: TypeAlias = "tuple[bytes, array[int], array[float]]"  # of one rank: layout, ints, floats
_HEAD = struct.Struct("<II")  # bytes of the layout and of the ints
_NO_NUMBERS, _FAILED = "-", "!"


@dataclass(frozen=True)
class Fact:
    """Numbers that ranks compare at one stage.

    Attributes:
        name: Name of what is read.
        stage: Place of the run that reads it.
        read: Function of the check that returns the numbers of this rank, without communication. If it returns a function, that is called
            when the numbers travel: after a step one step later, when the numbers of a device have arrived. None for no numbers now.
        rule: Pure function that returns the findings in the columns of all ranks. None for numbers that are only kept, and for findings
            that a rank makes by itself while it reads.
        see: Function of the check that gets the columns before the rule. It keeps figures, and may add columns of earlier steps.
        equal: Columns in which healthy ranks have the same number.
        zero: Columns in which healthy ranks have zero. If all columns of both kinds are healthy, the rule finds nothing, and is not called.
            Leave both empty for a rule that needs more than them.
    """

    name: str
    stage: CheckStage
    read: Callable[[Any], Numbers | Callable[[], Numbers] | None]
    rule: Callable[[Columns], list[Finding]] | None = None
    see: Callable[[Any, Columns], None] | None = None
    equal: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def is_healthy(self, columns: Columns) -> bool:
        """Return whether the columns alone show that the rule finds nothing."""
        for name in self.equal:
            column = columns.get(name, (0, 1))  # some rank has no such column
            if column.count(column[0]) != len(column):
                return False
        is_zero = not any(any(columns.get(name, (1,))) for name in self.zero)
        return is_zero and bool(self.equal or self.zero)


# ---------------------------------------------------------------------- notes


def encode(entries: Sequence[Numbers | str | None]) -> bytes:
    """Return the note of several facts.

    Args:
        entries: Numbers of each fact. None for a fact without any, a text for a check that failed.

    Raises:
        TypeError: for a value that is neither a number nor a list of numbers.
        OverflowError: for an int that does not fit 64 bits.
    """
    parts: list[str] = []
    ints, floats = array("q"), array("d")
    for numbers in entries:
        if numbers is None:
            parts.append(_NO_NUMBERS)
            continue
        if isinstance(numbers, str):
            text = numbers.encode()
            ints.extend(text)
            parts.append(f"{_FAILED}{len(text)}")
            continue
        codes: list[str] = []
        for value in numbers.values():
            if isinstance(value, int):
                ints.append(value)
                codes.append("q")
            elif isinstance(value, float):
                floats.append(value)
                codes.append("d")
            elif any(isinstance(number, float) for number in value):  # one float makes all of them floats
                floats.extend(value)
                codes.append(f"d{len(value)}")
            else:
                ints.extend(value)  # type: ignore[arg-type]
                codes.append(f"q{len(value)}")
        parts.append(",".join(codes))
    layout = ";".join(parts).encode()
    return _HEAD.pack(len(layout), 8 * len(ints)) + layout + ints.tobytes() + floats.tobytes()


def decode(notes: Sequence[bytes]) -> list[Decoded]:
    """Return the columns of each fact in the notes of all ranks."""
    rows: list[_Row] = []
    for note in notes:
        size, num_bytes = _HEAD.unpack_from(note)
        begin = _HEAD.size + size
        end = begin + num_bytes
        rows.append((note[_HEAD.size : begin], array("q", note[begin:end]), array("d", note[end:])))
    if all(layout == rows[0][0] for layout, _, _ in rows):
        return _read(rows)
    # a rank has lists of another length, no numbers, or an error
    by_rank = [_read([row]) for row in rows]
    return [_merge(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _read(rows: Sequence[_Row]) -> list[Decoded]:
    """Return the columns of rows with the same layout."""
    layout, _, _ = rows[0]
    ints = zip(*[of_rank for _, of_rank, _ in rows], strict=True)
    floats = zip(*[of_rank for _, _, of_rank in rows], strict=True)
    found: list[Decoded] = []
    for part in layout.decode().split(";"):
        if part == _NO_NUMBERS:
            found.append(None)
            continue
        if part.startswith(_FAILED):
            texts = zip(*islice(ints, int(part[1:])), strict=True)
            found.append({rank: bytes(text).decode(errors="replace") for rank, text in enumerate(texts)})
            continue
        columns: list[Sequence[Any]] = []
        for code in filter(None, part.split(",")):
            numbers: Iterator[Any] = ints if code[0] == "q" else floats
            if len(code) == 1:
                columns.append(next(numbers))
            else:  # a list of each rank
                lists = [*zip(*islice(numbers, int(code[1:])), strict=True)]
                columns.append(lists or [()] * len(rows))
        found.append(columns)
    return found


def _merge(of_ranks: Sequence[Decoded]) -> Decoded:
    """Return the columns of one fact, given those of each rank alone."""
    failures = {rank: found[0] for rank, found in enumerate(of_ranks) if isinstance(found, dict)}
    if failures:
        return failures
    if None in of_ranks:
        return None
    # columns that only some ranks have are left out. A rule sees from another column that ranks differ
    return [[value for (value,) in column] for column in zip(*of_ranks, strict=False)]
