"""Hashes of the rows of a batch, by which ranks tell whether they have the same ones.

No row travels, and of a wide one few numbers are read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.fingerprint import hash_rows
from lightning_ddp_losses.distributed.raw_collectives import host_memory

MAX_ROWS = 64
"""Rows of a batch that are read where all of them would cost too much."""

_MAX_COLUMNS = 32
_WIDE = 1024  # numbers in a row, of which only some are read
_MASK = (1 << 63) - 1


def batch_leaves(batch: Any) -> Iterator[Any]:
    """Yield all that a batch holds; a plain list of tensors needs no walk."""
    parts = batch
    if type(batch) not in (tuple, list):
        parts = (batch,)
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        else:
            yield from compat.tree_leaves(part)


def row_hashes(tensors: list[Tensor], rows: int, max_rows: int | None = None) -> list[int]:
    """Return a hash (63 bits) of each of the first rows (all of them, unless ``max_rows``), over all tensors that have that many."""
    number = rows if max_rows is None else min(rows, max_rows)
    return hash_tables([table.cpu() for table in row_tables(tensors, rows, number)], number)


def row_tables(tensors: list[Tensor], rows: int, number: int) -> list[Tensor]:
    """Return what is hashed of the first rows: of each tensor that has ``rows``, all or some columns of ``number`` of them."""
    tables = []
    for tensor in tensors:
        is_readable = tensor.layout == torch.strided and not tensor.is_complex() and not tensor.is_quantized
        if not is_readable or tensor.shape[0] != rows or not tensor.numel():
            continue
        table = tensor.as_subclass(Tensor)  # what transforms make of a tensor may be a class of its own
        if number < rows:
            table = table[:number]
        width = table.numel() // number
        if width > _WIDE:
            table = table.flatten(1).index_select(1, _read_columns(width, table.device))
        tables.append(table)
    return tables


def hash_tables(tables: Sequence[Tensor], number: int) -> list[int]:
    """Return a hash of each of ``number`` rows over tables on the CPU."""
    hashes = [0] * number
    for table in tables:
        # each tensor's hash begins where the one before ended
        hashes = hash_rows(host_memory(table).reshape(number, -1), hashes)
    return [value & _MASK for value in hashes]


@functools.lru_cache(maxsize=64)
def _read_columns(width: int, device: torch.device) -> Tensor:
    """Choose the same columns at every call, spread irregularly: pictures have empty borders."""
    return (torch.arange(_MAX_COLUMNS, device=device) * 2654435761 % width).unique()  # type: ignore[no-untyped-call,no-any-return]
