"""A 64-bit fingerprint of a tensor's bits: two ranks hold the same tensor exactly when their fingerprints agree.

A sum or a norm does not detect swaps, sign flips and +d/-d pairs. On the host the bytes are hashed in place by XXH3, at about the
speed of reading them, and the result depends only on the bytes. Tensors on an accelerator are hashed on the device: each 64-bit word is
added to its own upper part, which also moves the signs in its upper half to lower bits (as multiples of 2**63 an even number of flips
would cancel), then multiplied with two odd 64-bit weights, one selected by its position in the row of ``ROW_WORDS`` and one by the row.
This is integer arithmetic modulo 2**64, so the result does not depend on the order of addition, chunks or kernels.

The two methods give different numbers, so ranks compare tensors on devices of one kind.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import as_bytes, host_memory

MAX_ROWS = 64
"""Number of rows of a batch that are read if reading all of them would be too expensive."""

_WEIGHT_PARTS = 16  # number of parts of a weight, of which each call compares one
_SMALL_WEIGHT = 4096  # size up to which every call compares the whole weight
_MAX_COLUMNS = 32
_WIDE = 1024  # size of a row above which only some of its numbers are read
_MASK = (1 << 63) - 1


def batch_leaves(batch: Any) -> Iterator[Any]:
    """Yield all leaves of a batch. A plain list of tensors is not traversed further."""
    parts = batch
    if type(batch) not in (tuple, list):
        parts = (batch,)
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        else:
            yield from torch_compat.tree_leaves(part)


def row_hashes(tensors: list[Tensor], rows: int, max_rows: int | None = None) -> list[int]:
    """Return a 63-bit hash of each of the first rows (of all rows, unless ``max_rows``), over all tensors with that number of rows."""
    number = rows if max_rows is None else min(rows, max_rows)
    return hash_tables([table.cpu() for table in row_tables(tensors, rows, number)], number)


def row_tables(tensors: list[Tensor], rows: int, number: int) -> list[Tensor]:
    """Return the hashed parts of the first rows: all or some columns of ``number`` rows, for each tensor that has ``rows`` rows."""
    tables = []
    for tensor in tensors:
        is_readable = tensor.layout == torch.strided and not tensor.is_complex() and not tensor.is_quantized
        if not is_readable or tensor.shape[0] != rows or not tensor.numel():
            continue
        table = tensor.as_subclass(Tensor)  # a transform may return a subclass
        if number < rows:
            table = table[:number]
        width = table.numel() // number
        if width > _WIDE:
            table = table.flatten(1).index_select(1, _some_columns(width, table.device))
        tables.append(table)
    return tables


def hash_tables(tables: Sequence[Tensor], number: int) -> list[int]:
    """Return a hash of each of ``number`` rows over tables on the CPU."""
    hashes = [0] * number
    for table in tables:
        # the hash of each tensor is seeded with the hash of the previous one
        hashes = list(map(xxhash.xxh3_64_intdigest, host_memory(table).reshape(number, -1), hashes))
    return [value & _MASK for value in hashes]


@functools.lru_cache(maxsize=64)
def _some_columns(width: int, device: torch.device) -> Tensor:
    """Choose the same columns in every call, spread irregularly because images have empty borders."""
    return (torch.arange(_MAX_COLUMNS, device=device) * 2654435761 % width).unique()  # type: ignore[no-untyped-call,no-any-return]


StartedFingerprint: TypeAlias = "int | Tensor"
"""A fingerprint. On an accelerator its computation may still be in progress (0-dim int64)."""

ROW_WORDS = 1024
CHUNK_ROWS = 1 << 12  # 32 MiB, a compromise between the number of kernels and memory
_UPPER = 31  # an odd distance from 32 and 16, so that the lanes of a word do not cancel each other's signs


def fingerprint(tensor: Tensor) -> int:
    """Return the fingerprint of one dense tensor of any dtype, as a signed 64-bit number.

    Elements are hashed in logical order, independent of strides, with the bits of their dtype. A quantised tensor is hashed by its
    integers. Shape, dtype and scales are not included and must be compared separately.
    """
    return int(start_fingerprint(tensor))


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return the fingerprints of several tensors, waiting for an accelerator only once."""
    return start_fingerprints(tensors).read()


def start_fingerprint(tensor: Tensor) -> StartedFingerprint:
    """Start computing a fingerprint, without waiting for an accelerator."""
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return hash_bytes(host_memory(tensor)) if tensor.device.type == "cpu" else _on_device(as_bytes(tensor))


def start_fingerprints(tensors: Iterable[Tensor]) -> HostNumbers:
    """Start computing several fingerprints and copying them to the host, so that a later read does not wait."""
    return HostNumbers([start_fingerprint(t) for t in tensors])


def hash_bytes(data: object) -> int:
    """Return a signed 64-bit hash of a buffer."""
    value: int = xxhash.xxh3_64_intdigest(data)  # type: ignore[arg-type]
    return value - (1 << 64) if value >> 63 else value


def hash_text(text: str, bits: int = 63) -> int:
    """Return an unsigned number with the given number of bits that identifies a text. It is never 0."""
    return hash_bytes(text.encode()) & ((1 << bits) - 1) or 1


def hash_lines(lines: Iterable[str]) -> int:
    """Return a signed 64-bit number for several lines of text, or 0 without any."""
    text = "\n".join(lines)
    return hash_bytes(text.encode()) if text else 0


def combine(values: Sequence[int]) -> int:
    """Return one number for several, dependent on their order, or 0 without any."""
    return hash_bytes(array("q", values)) if values else 0


class WeightFingerprints:
    """Fingerprints of a loss's weights, of a different part in each call: ranks with different weights cannot compute a common value.

    ``DTensor`` weights are skipped, because ranks hold different parts of them.

    Args:
        wanted: If False, weights may differ temporarily, for example if ranks average them every few steps.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._calls = 0
        self._failures = 0  # failures of the group at the last call
        self._started = HostNumbers([])  # started by the last call on an accelerator

    def take(self, weights: Iterable[Tensor], group: Group) -> str:
        """Return the fingerprint to compare in a call, or an empty text. On an accelerator it is the previous call's fingerprint."""
        if not self._wanted or process_groups.world_size(group) == 1:
            return ""
        failures = process_groups.failures(group)
        if failures != self._failures:  # only some ranks may have reached the failed call
            self._calls, self._failures, self._started = 0, failures, HostNumbers([])
        part = self._calls % _WEIGHT_PARTS
        self._calls += 1
        pieces = [_part_of(weight, part) for weight in weights if type(weight) in (Tensor, Parameter)]
        if not pieces:
            return ""
        late, self._started = self._started, start_fingerprints(pieces)
        on_host = all(piece.device.type == "cpu" for piece in pieces)
        found = combine((self._started if on_host else late).read())
        return f"{found & _MASK:x}" if found else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy or pickle starts anew: numbers in transit from a device cannot be pickled
        return functools.partial(WeightFingerprints, wanted=self._wanted), ()


def _part_of(weight: Tensor, part: int) -> Tensor:
    """Return one part of a large weight as a view, or a small weight unchanged."""
    flat = weight.detach().reshape(-1)
    if len(flat) <= _SMALL_WEIGHT:
        return flat
    size = -(-len(flat) // _WEIGHT_PARTS)
    return flat[part * size : (part + 1) * size]


@torch.no_grad()
def _on_device(data: Tensor) -> Tensor:
    """Hash (n,) uint8 to one int64, with torch's own operations."""
    words = _as_words(data)
    word_weights = _weights(ROW_WORDS, 0, data.device)
    row_weights = _weights(max(len(words), 1), 1, data.device)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for chunk, rows in zip(words.split(CHUNK_ROWS), row_weights.split(CHUNK_ROWS), strict=True):  # type: ignore[no-untyped-call]
        mixed = torch.bitwise_right_shift(chunk, _UPPER).add_(chunk).mul_(word_weights)
        total += mixed.sum(1).mul_(rows[: len(chunk)]).sum()
    return total


def _as_words(data: Tensor) -> Tensor:
    """View bytes as (rows, ROW_WORDS) int64: their own memory if it consists of whole, aligned rows, otherwise a zero-padded copy."""
    missing = -data.numel() % (8 * ROW_WORDS)
    if missing or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    return data.view(torch.int64).view(-1, ROW_WORDS)


def _weights(number: int, stream: int, device: torch.device) -> Tensor:
    size = max(ROW_WORDS, 1 << (number - 1).bit_length())  # limit the number of different sizes to cache
    return _cached_weights(size, stream, device)[:number]


@functools.cache
def _cached_weights(number: int, stream: int, device: torch.device) -> Tensor:
    """Return odd 64-bit weights with mixed bits for each index, without a generator: equal on every device and release of torch."""
    bits = torch.arange(1, number + 1, dtype=torch.int64, device=device)
    bits = bits * 2 + (stream << 40) + 1
    for multiplier in (-7046029254386353131, -4658895280553007687, -7723592293110705685):
        bits = bits ^ bits.bitwise_right_shift(29)
        bits = bits * multiplier
    return (bits ^ bits.bitwise_right_shift(32)).bitwise_or_(1)
