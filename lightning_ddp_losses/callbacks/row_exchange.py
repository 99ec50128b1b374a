"""How rows of checks travel: as bytes, in handshakes of their own, on a process group that only checks use.

A check's part of the row is a list of numbers, a 1-D tensor (int64, float64 or uint8), or the text of the error it met. Lists
stay lists on their way: after a step everything is out of the processor's caches, and a few numbers in a tensor then take
ten times as long as in a list (torch 2.13, measured 2026).

Ranks that come from different places of the program still pair up in handshakes of equal size and raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.liveness import Watch
from lightning_ddp_losses.distributed.raw_collectives import awake_seconds, gather
from lightning_ddp_losses.errors import InputError

Measured: TypeAlias = "Tensor | list[int] | list[float]"
"""One rank's numbers. A list with a float in it becomes one of floats, on this rank; ints must fit 64 bits."""

Table: TypeAlias = "Tensor | list[list[Any]] | dict[int, str]"
"""The ranks' rows of one check: a tensor (W, n), lists in rank order, or what went wrong on which ranks."""

_PART_HEAD = struct.Struct("<cxxxI")  # kind, bytes
_FAILED = b"!"
_LISTS = {b"q": "a list of ints", b"d": "a list of floats"}  # the codes of array
_DTYPES = {b"I": torch.int64, b"F": torch.float64, b"B": torch.uint8}
_CHUNK = 1 << 20  # elements of a tensor that are compared at a time
_FIRST_NAP_SECONDS, _NAP_SECONDS = 0.0001, 0.005


# ---------------------------------------------------------------------- rows as bytes


def encode(measured: object, title: str) -> bytes:
    """Encode what one check measured as its part of the row.

    Raises:
        InputError: what cannot travel.
    """
    if isinstance(measured, list):
        kind = "q"
        if any(isinstance(value, float) for value in measured):  # one float makes all of them floats
            kind = "d"
        with contextlib.suppress(TypeError):  # refused below
            return _part(kind.encode(), array(kind, measured).tobytes())
    if isinstance(measured, Tensor) and measured.ndim == 1:
        for code, dtype in _DTYPES.items():
            if measured.dtype == dtype:
                return _part(code, measured.detach().cpu().contiguous().numpy().tobytes())
    expected = "a list of numbers, or a 1-D tensor of int64, float64 or uint8"
    raise InputError(f"{title}.measure", expected=expected, got=_type_text(measured))


def encode_failure(text: str) -> bytes:
    """Encode what went wrong, in place of a check's part."""
    return _part(_FAILED, text.encode())


def decode_tables(rows: Sequence[bytes], number: int) -> list[Table]:
    """Sort the ranks' rows by check.

    A rank that measured fewer values than another is padded with zeros; put in front what tells such ranks apart.

    Args:
        rows: One row per rank, each the parts of all checks that were due.
        number: How many checks were due.
    """
    parts_by_rank = [_split(row, number) for row in rows]
    return [_table(parts) for parts in zip(*parts_by_rank, strict=True)]


def _part(kind: bytes, data: bytes) -> bytes:
    return _PART_HEAD.pack(kind, len(data)) + data


def _type_text(measured: object) -> str:
    """Describe for an error what a check measured."""
    if isinstance(measured, Tensor):
        return f"{tuple(measured.shape)} {measured.dtype}"
    if isinstance(measured, list):
        kinds = dict.fromkeys(type(value).__name__ for value in measured)
        return f"a list with {', '.join(kinds)}"
    return type(measured).__name__


def _split(row: bytes, number: int) -> list[tuple[bytes, bytes]]:
    """Split a row into the kind and the bytes of each check."""
    parts: list[tuple[bytes, bytes]] = []
    offset = 0
    for _ in range(number):
        kind, size = _PART_HEAD.unpack_from(row, offset)
        offset += _PART_HEAD.size + size
        parts.append((kind, row[offset - size : offset]))
    return parts


def _table(parts: Sequence[tuple[bytes, bytes]]) -> Table:
    """Bring the ranks' parts of one check together."""
    kind = parts[0][0]
    kinds = {kind for kind, _ in parts}
    # an error on any rank, or kinds that cannot be compared
    if _FAILED in kinds:
        return {rank: data.decode(errors="replace") for rank, (kind, data) in enumerate(parts) if kind == _FAILED}
    if len(kinds) > 1 and not kinds <= _LISTS.keys():
        return {rank: f"measured {_LISTS.get(kind) or _DTYPES[kind]}" for rank, (kind, _) in enumerate(parts)}
    # rows of one length
    longest = max(len(data) for _, data in parts)
    padded = [data.ljust(longest, b"\0") for _, data in parts]
    if kind in _LISTS:
        return [array(own.decode(), data).tolist() for (own, _), data in zip(parts, padded, strict=True)]
    if not longest:
        return torch.zeros((len(parts), 0), dtype=_DTYPES[kind])
    return torch.frombuffer(bytearray(b"".join(padded)), dtype=_DTYPES[kind]).view(len(parts), -1)


# ---------------------------------------------------------------------- rows between ranks


class RowExchange:
    """Exchanges rows between the ranks of the world and counts what that takes.

    Args:
        watch: Watch of the run, which raises when a peer has failed; None: there is none.

    Attributes:
        gathers: Gathers of rows so far.
        bytes: Bytes that this rank sent in them.
    """

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self.gathers = 0
        self.bytes = 0

    def gather_rows(self, place: str, row: bytes, must_match: Mapping[str, object] | None = None) -> list[bytes]:
        """Return the rows of all ranks, in rank order.

        Raises:
            RankMismatchError: on every rank, when ranks are at different places, or ``must_match`` differs.

        Communication: one gather; one more when a row outgrew the agreed size. None in a world of one.
        """
        # one handshake: ranks at different places get the same error in it
        pending = handshake.start(place, must_match or {}, row, channel="checks")
        self._wait(pending)
        rows = pending.finish()
        self.gathers += process_groups.world_size() > 1
        self.bytes += pending.sent_bytes
        return rows

    def _wait(self, pending: handshake.PendingHandshake) -> None:
        """Wait, first awake, and leave when a peer has failed: it will not come."""
        began, awake = time.perf_counter(), awake_seconds()
        while not pending.is_completed():
            waited = time.perf_counter() - began
            if waited < awake:
                time.sleep(0)  # peers are usually here at once, and a nap takes longer than the gather
            else:
                if self._watch is not None:
                    self._watch.check_peers()
                time.sleep(min(max(waited / 20, _FIRST_NAP_SECONDS), _NAP_SECONDS))

    def gather_json(self, place: str, value: object) -> list[Any]:
        """Return a plain value of each rank, in rank order; communicates as ``gather_rows``."""
        return [json.loads(row) for row in self.gather_rows(place, json.dumps(value).encode())]

    def gather_texts(self, local_text: str | None) -> list[str] | None:
        """Return the ranks' texts; None where a rank has none. Communicates as ``gather_rows``."""
        texts = self.gather_json("texts about findings", local_text)
        if any(text is None for text in texts):
            return None
        return texts

    def max_difference(self, local: Tensor | None) -> float | None:
        """Return the largest difference between any two ranks of a tensor's elements; None where ranks cannot be compared.

        Communication: one gather, and two for each 8 MiB of the tensor.
        """
        if process_groups.world_size() == 1:
            return None
        # agree that every rank has a tensor of one shape and dtype
        description = ""
        if local is not None and not local.is_quantized and local.layout == torch.strided:
            description = f"{tuple(local.shape)} {local.dtype}"
        descriptions = self.gather_rows("a tensor's difference", description.encode())
        if local is None or not description or len(set(descriptions)) > 1:
            return None
        # compare it chunk by chunk
        group = process_groups.internal_groups().checks
        flat = local.detach().reshape(-1)
        if flat.is_complex():  # the larger of real and imaginary part
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        largest = 0.0
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK].double().cpu()
            gathered = chunk.new_empty(process_groups.world_size() * chunk.numel())
            gather(gathered, chunk, group=group)
            gathered = gathered.view(-1, chunk.numel())
            difference = gathered.amax(0) - gathered.amin(0)
            largest = max(largest, float(difference.nan_to_num(nan=float("inf")).max()))
        return largest
