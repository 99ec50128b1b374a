"""Rows of checks outside this package: ``measure`` returns a row of numbers, and ``judge`` receives the table of all ranks' rows.

Only this module converts rows to facts. The fact has two columns: the kind of the row, and its numbers.

A row is a list of numbers, a 1-D tensor (int64, float64 or uint8), or a function that returns either when the row is sent. The copy of a
tensor to the host starts immediately and is read when the row is sent, so that checks do not wait for a device.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.callbacks.facts.fact import Columns, Fact, Numbers
from lightning_ddp_losses.callbacks.findings import FAILED, CheckStage, Finding
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.errors import InputError

Measured: TypeAlias = Tensor | list[int] | list[float]
"""One rank's numbers. A list that contains a float is converted to floats on this rank. Ints must fit into 64 bits."""

Row: TypeAlias = Measured | Callable[[], Tensor] | Callable[[], list[int]] | Callable[[], list[float]]
"""Numbers that ``RankCheck.measure`` returns, or a function that returns them when the row is sent."""

_LIST = 0
_DTYPES = {1: torch.int64, 2: torch.float64, 3: torch.uint8}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


def facts_of_rows(check: Any) -> list[Fact]:
    """Return the facts of a check that measures rows, one for each of its stages, or an empty list for any other check."""
    if not (check.overrides("measure") or check.overrides("judge")):
        return []
    return [Fact(check.title, stage, partial(_read, stage), partial(_judge, check, stage)) for stage in check.stages]


def _read(stage: CheckStage, check: Any) -> Numbers | Callable[[], Numbers]:
    row = check.measure(check.runner.trainer, check.runner.module, stage)
    if isinstance(row, Tensor):
        row = HostCopy(row).read
    if callable(row):
        return lambda: numbers_of(row(), check.title)
    return numbers_of(row, check.title)


def numbers_of(measured: object, title: str) -> Numbers:
    """Return a row as the columns of a fact.

    Raises:
        InputError: for a value that cannot be sent.
    """
    got = type(measured).__name__
    if isinstance(measured, list):
        code = "d" if any(isinstance(value, float) for value in measured) else "q"
        with contextlib.suppress(TypeError):  # the error is raised below
            return {"kind": _LIST, "row": array(code, measured).tolist()}
        got = f"a list with {', '.join(dict.fromkeys(type(value).__name__ for value in measured))}"
    elif isinstance(measured, Tensor):
        if measured.ndim == 1 and measured.dtype in _KINDS:
            return {"kind": _KINDS[measured.dtype], "row": measured.tolist()}
        got = f"{tuple(measured.shape)} {measured.dtype}"
    expected = "a list of numbers, or a 1-D tensor of int64, float64 or uint8"
    raise InputError(
        f"{title}.measure",
        expected=expected,
        got=got,
        fix="Return the row of this rank, for example values.double().flatten().",
    )


def table_of(columns: Columns) -> Tensor | list[list[Any]]:
    """Return the table of all ranks' rows of one kind. Shorter rows are padded with zeros."""
    longest = max(map(len, columns["row"]))
    rows = []
    for row in columns["row"]:
        zero = 0.0 if any(isinstance(value, float) for value in row) else 0
        rows.append([*row, *[zero] * (longest - len(row))])
    kind = columns["kind"][0]
    return rows if kind == _LIST else torch.tensor(rows, dtype=_DTYPES[kind])


def _judge(check: Any, stage: CheckStage, columns: Columns) -> list[Finding]:
    """Call a check with its table. If ranks have rows of different kinds, return a finding instead."""
    if len(set(columns["kind"])) > 1:
        pairs = zip(columns["kind"], columns["row"], strict=True)
        texts = tuple(f"{rank}: measured {_name_of(kind, row)}" for rank, (kind, row) in enumerate(pairs))
        return [Finding.of(FAILED, ranks=tuple(range(len(texts))), name=check.title, values=texts)]
    found: list[Finding] = check.judge(table_of(columns), check.runner.trainer, check.runner.module, stage)
    return found


def _name_of(kind: int, row: Sequence[Any]) -> str:
    if kind != _LIST:
        return str(_DTYPES[kind])
    return "a list of floats" if any(isinstance(value, float) for value in row) else "a list of ints"
