"""What the checks measured at one moment, as bytes: one row per rank travels in the shared gather.

A check's part of the row is a list of numbers, a 1-D tensor (int64, float64 or uint8), or the text of the error it met. Lists
stay lists on their way: after a step everything is out of the processor's caches, and a few numbers in a tensor then take
ten times as long as in a list.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError

Measured: TypeAlias = "Tensor | list[int] | list[float]"
"""One rank's numbers. A list with a float in it becomes one of floats, on this rank; ints must fit 64 bits."""

_HEAD = struct.Struct("<cxxxI")  # kind, bytes
_FAILED = b"!"
_LISTS = {b"q": "a list of ints", b"d": "a list of floats"}  # the codes of array
_DTYPES = {b"I": torch.int64, b"F": torch.float64, b"B": torch.uint8}


def encode(measured: object, title: str) -> bytes:
    """One check's part of a row; refuses what cannot travel."""
    if isinstance(measured, list):
        kind = "d" if any(isinstance(value, float) for value in measured) else "q"
        with contextlib.suppress(TypeError):  # said below
            return _part(kind.encode(), array(kind, measured).tobytes())
    if isinstance(measured, Tensor) and measured.ndim == 1:
        for code, dtype in _DTYPES.items():
            if measured.dtype == dtype:
                return _part(code, measured.detach().cpu().contiguous().numpy().tobytes())
    got = f"{tuple(measured.shape)} {measured.dtype}" if isinstance(measured, Tensor) else type(measured).__name__
    if isinstance(measured, list):
        got = f"a list with {', '.join(dict.fromkeys(type(value).__name__ for value in measured))}"
    expected = "a list of numbers, or a 1-D tensor of int64, float64 or uint8"
    raise InputError(f"{title}.measure", expected=expected, got=got)


def failure(text: str) -> bytes:
    """In place of a part: what went wrong."""
    return _part(_FAILED, text.encode())


def _part(kind: bytes, data: bytes) -> bytes:
    return _HEAD.pack(kind, len(data)) + data


def tables(rows: Sequence[bytes], number: int) -> list[Tensor | list[list[Any]] | dict[int, str]]:
    """The ranks' rows by check: lists in rank order, a tensor (W, n), or what went wrong on which ranks.

    A rank that measured fewer values than another is padded with zeros; put in front what tells such ranks apart.
    """
    by_rank = [_unpack(row, number) for row in rows]
    return [_table(parts) for parts in zip(*by_rank, strict=True)]


def _table(parts: Sequence[tuple[bytes, bytes]]) -> Tensor | list[list[Any]] | dict[int, str]:
    """The ranks' parts of one check."""
    kind = parts[0][0]
    kinds = {kind for kind, _ in parts}
    if _FAILED in kinds:
        return {rank: data.decode(errors="replace") for rank, (kind, data) in enumerate(parts) if kind == _FAILED}
    if len(kinds) > 1 and not kinds <= _LISTS.keys():
        return {rank: f"measured {_LISTS.get(kind) or _DTYPES[kind]}" for rank, (kind, _) in enumerate(parts)}
    longest = max(len(data) for _, data in parts)
    padded = [data.ljust(longest, b"\0") for _, data in parts]
    if kind in _LISTS:
        return [array(own.decode(), data).tolist() for (own, _), data in zip(parts, padded, strict=True)]
    if not longest:
        return torch.zeros((len(parts), 0), dtype=_DTYPES[kind])
    return torch.frombuffer(bytearray(b"".join(padded)), dtype=_DTYPES[kind]).view(len(parts), -1)


def _unpack(row: bytes, number: int) -> list[tuple[bytes, bytes]]:
    """For each check a kind and its bytes."""
    parts: list[tuple[bytes, bytes]] = []
    offset = 0
    for _ in range(number):
        kind, size = _HEAD.unpack_from(row, offset)
        offset += _HEAD.size + size
        parts.append((kind, row[offset - size : offset]))
    return parts
