"""What the checks measured at one moment, as bytes: one row per rank travels in the shared gather.

A check's part of the row is its 1-D tensor (int64, float64 or uint8), or the text of the error it met.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError, format_error

__all__ = ["check_measure", "pack", "tables"]

_HEAD = struct.Struct("<BBxxI")  # failed, dtype, bytes
_DTYPES = (torch.int64, torch.float64, torch.uint8)
_FAILED = -1


def pack(parts: Sequence[Tensor | str]) -> bytes:
    """One rank's row: a tensor for each check that measured, a text for one that failed."""
    row = bytearray()
    for part in parts:
        failed = isinstance(part, str)
        data = part.encode() if isinstance(part, str) else part.detach().cpu().contiguous().numpy().tobytes()
        code = 0 if isinstance(part, str) else _DTYPES.index(part.dtype)
        row += _HEAD.pack(failed, code, len(data)) + data
    return bytes(row)


def check_measure(measured: object, title: str) -> Tensor:
    """Refuse what cannot travel in a row."""
    if isinstance(measured, Tensor) and measured.ndim == 1 and measured.dtype in _DTYPES:
        return measured
    got = f"{tuple(measured.shape)} {measured.dtype}" if isinstance(measured, Tensor) else type(measured).__name__
    raise InputError(format_error(f"{title}.measure", expected="a 1-D tensor of int64, float64 or uint8", got=got))


def tables(rows: Sequence[bytes], number: int) -> list[Tensor | dict[int, str]]:
    """The ranks' rows by check: a table (W, n), or what went wrong on which ranks.

    A rank that measured fewer values than another is padded with zeros; put in front what tells such ranks apart.
    """
    by_rank = [_unpack(row, number) for row in rows]
    return [_table(parts) for parts in zip(*by_rank, strict=True)]


def _table(parts: Sequence[tuple[int, bytes]]) -> Tensor | dict[int, str]:
    """The ranks' parts of one check."""
    codes = {code for code, _ in parts}
    if _FAILED in codes:
        return {rank: data.decode(errors="replace") for rank, (code, data) in enumerate(parts) if code == _FAILED}
    if len(codes) > 1:
        return {rank: f"measured {_DTYPES[code]}" for rank, (code, _) in enumerate(parts)}
    dtype, longest = _DTYPES[codes.pop()], max(len(data) for _, data in parts)
    if not longest:
        return torch.zeros((len(parts), 0), dtype=dtype)
    joined = b"".join(data.ljust(longest, b"\0") for _, data in parts)
    return torch.frombuffer(bytearray(joined), dtype=dtype).view(len(parts), -1)


def _unpack(row: bytes, number: int) -> list[tuple[int, bytes]]:
    """For each check a code (of the dtype, or that it failed) and its bytes."""
    parts: list[tuple[int, bytes]] = []
    offset = 0
    for _ in range(number):
        failed, code, size = _HEAD.unpack_from(row, offset)
        offset += _HEAD.size
        parts.append((_FAILED if failed else code, row[offset : offset + size]))
        offset += size
    return parts
