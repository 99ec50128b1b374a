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
    found: list[Tensor | dict[int, str]] = []
    for parts in zip(*by_rank, strict=True):
        failures = {rank: part for rank, part in enumerate(parts) if isinstance(part, str)}
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if failures:
            found.append(failures)
        elif len({t.dtype for t in tensors}) > 1:
            found.append({rank: f"measured {t.dtype}" for rank, t in enumerate(tensors)})
        else:
            table = tensors[0].new_zeros((len(tensors), max(t.numel() for t in tensors)))
            for rank, tensor in enumerate(tensors):
                table[rank, : tensor.numel()] = tensor
            found.append(table)
    return found


def _unpack(row: bytes, number: int) -> list[Tensor | str]:
    parts: list[Tensor | str] = []
    offset = 0
    for _ in range(number):
        failed, code, size = _HEAD.unpack_from(row, offset)
        offset += _HEAD.size
        data = row[offset : offset + size]
        offset += size
        if failed:
            parts.append(data.decode(errors="replace"))
        elif data:
            parts.append(torch.frombuffer(bytearray(data), dtype=_DTYPES[code]))
        else:
            parts.append(torch.zeros(0, dtype=_DTYPES[code]))
    return parts
