"""Facts: numbers of one rank that all ranks compare, the columns of all ranks, and the note in which they are sent.

A `Fact` specifies what is read, at which stage of a run, and the rule for its columns. A stage collects the facts of all due checks into
one int64 array and one float64 array, and sends both in one note. A rule is a pure function from columns to findings, so every rank has the
same findings. Rows of users' checks are converted to facts in ``user_rows.py``.

A note consists of a head, a layout, the ints and the floats. The layout is a line of text with a part for each fact, separated by ``;``. A
part has a code for each column, separated by ``,``: ``q`` for an int and ``d`` for a float, followed by the length if the column is a list.
The part of a fact without numbers is ``-``. The part of a check that failed is ``!`` and the length of its text, whose bytes are stored as
ints.
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
"""Columns of one fact, texts of the ranks that failed, or None if any rank sent an empty entry."""

_Row: TypeAlias = "tuple[bytes, array[int], array[float]]"  # layout, ints and floats of one rank
_HEAD = struct.Struct("<II")  # sizes of the layout and of the ints in bytes
_NO_NUMBERS, _FAILED = "-", "!"


@dataclass(frozen=True)
class Fact:
    """Numbers that ranks compare at one stage.

    Attributes:
        name: Name of the numbers.
        stage: Stage of the run at which they are read.
        read: Function of the check that returns the numbers of this rank, without communication. It may return a function, which is called
            when the numbers are sent. After a step that is one step later, when copies from a device have been completed. It may return
            None if there are no numbers in this step.
        rule: Pure function that returns the findings in the columns of all ranks. None for numbers that are only stored, and for facts
            whose findings are added by single ranks while reading.
        see: Function of the check that receives the columns before the rule. It stores figures, and may add columns of earlier steps.
        equal: Columns in which healthy ranks have the same number.
        zero: Columns in which healthy ranks have zero. If all columns in ``equal`` and ``zero`` are healthy, the rule is not called,
            because it would find nothing. Leave both empty for a rule that depends on other columns.
    """

    name: str
    stage: CheckStage
    read: Callable[[Any], Numbers | Callable[[], Numbers] | None]
    rule: Callable[[Columns], list[Finding]] | None = None
    see: Callable[[Any, Columns], None] | None = None
    equal: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def is_healthy(self, columns: Columns) -> bool:
        """Return whether the columns in ``equal`` and ``zero`` imply that the rule finds nothing."""
        for name in self.equal:
            column = columns.get(name, (0, 1))  # a column that is missing on some rank is not healthy
            if column.count(column[0]) != len(column):
                return False
        is_zero = not any(any(columns.get(name, (1,))) for name in self.zero)
        return is_zero and bool(self.equal or self.zero)


# ---------------------------------------------------------------------- notes


def encode(entries: Sequence[Numbers | str | None]) -> bytes:
    """Return the note of several facts.

    Args:
        entries: Numbers of each fact, None for a fact without numbers, or a text for a check that failed.

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
            elif any(isinstance(number, float) for number in value):  # if one number is a float, all are sent as floats
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
    # on some ranks, lists have different lengths, numbers are missing, or a check has failed
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
            else:  # the column contains a list for each rank
                lists = [*zip(*islice(numbers, int(code[1:])), strict=True)]
                columns.append(lists or [()] * len(rows))
        found.append(columns)
    return found


def _merge(of_ranks: Sequence[Decoded]) -> Decoded:
    """Return the columns of one fact, given the columns that were decoded separately for each rank."""
    failures = {rank: found[0] for rank, found in enumerate(of_ranks) if isinstance(found, dict)}
    if failures:
        return failures
    if None in of_ranks:
        return None
    # omit columns that are missing on some ranks. Another column tells the rule that ranks differ
    return [[value for (value,) in column] for column in zip(*of_ranks, strict=False)]
