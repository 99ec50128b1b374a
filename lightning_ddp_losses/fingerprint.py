"""A 64-bit fingerprint of a tensor's bits: two ranks hold the same tensor exactly when their fingerprints agree.

A sum or a norm misses swaps, sign flips and +d/-d pairs; a plain multilinear hash misses even numbers of sign flips. Here
the bytes, in rows of ``ROW_BYTES``, are multiplied with a matrix of small integers, and the products, which are exact, with
64-bit weights by position. All arithmetic is on integers: no thread count, order of addition or kernel changes the result,
so there is no false alarm. The cost is one pass over the memory.

``torch._int_mm`` does the first product at memory speed. It is private, so it is tried once per device and compared; the
other way is a float32 product, whose sums stay below 2**24 and are therefore the same integers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["fingerprint", "fingerprints"]

ROW_BYTES = 1024  # 1024 * 128 * 127 < 2**24: exact in float32 too
COLUMNS = 16
CHUNK_ROWS = 1024  # 1 MiB: stays in the cache between the two products


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of one dense tensor of any dtype, as a 0-dim int64 tensor on its device.

    Elements count in logical order (strides do not), with their dtype's bits. Shape and dtype are not part of it: compare them
    beside it.
    """
    data = _as_bytes(tensor)
    rows, rest = divmod(data.numel(), ROW_BYTES)
    table = data[: rows * ROW_BYTES].view(rows, ROW_BYTES)
    parts = [_mix(table[start : start + CHUNK_ROWS]) for start in range(0, rows, CHUNK_ROWS)]
    if rest:
        last = data.new_zeros((1, ROW_BYTES))
        last[0, :rest] = data[rows * ROW_BYTES :]
        parts.append(_mix(last))
    if not parts:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    chunks = torch.stack(parts)
    return (chunks * _weights(len(parts), 1, tensor.device)).sum()


def fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """The fingerprints of several tensors, as a 1-D int64 tensor on the CPU."""
    found = [fingerprint(t) for t in tensors]
    if not found:
        return torch.zeros(0, dtype=torch.int64)
    if len({f.device for f in found}) > 1:
        found = [f.cpu() for f in found]
    return torch.stack(found).cpu()


def _as_bytes(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.int8)


def _mix(chunk: Tensor) -> Tensor:
    """(rows, ROW_BYTES) bytes -> one int64; every byte counts by its place."""
    product = torch._int_mm if chunk.shape[0] > COLUMNS and _int_mm_is_right(chunk.device) else _float_product
    sums = product(chunk, _matrix(chunk.device)).view(-1).long()
    return sums.mul_(_weights(CHUNK_ROWS * COLUMNS, 0, chunk.device)[: sums.numel()]).sum()


def _float_product(chunk: Tensor, matrix: Tensor) -> Tensor:
    with torch.autocast(chunk.device.type, enabled=False):
        return (chunk.float() @ matrix.float()).int()


@functools.cache
def _int_mm_is_right(device: torch.device) -> bool:
    bits = _random_bits(2 * COLUMNS * ROW_BYTES, 2, device).bitwise_and(255).sub(128).to(torch.int8).view(-1, ROW_BYTES)
    bits[0] = -128  # the largest sums too
    try:
        return torch.equal(torch._int_mm(bits, _matrix(device)), _float_product(bits, _matrix(device)))
    except (AttributeError, RuntimeError):
        return False


@functools.cache
def _matrix(device: torch.device) -> Tensor:
    """(ROW_BYTES, COLUMNS) int8, none of them zero: one changed byte changes every sum of its row."""
    bits = _random_bits(ROW_BYTES * COLUMNS, 3, device)
    small = bits.bitwise_and(0x7FFFFFFF).remainder(127).add(1)
    return torch.where(bits < 0, -small, small).to(torch.int8).view(ROW_BYTES, COLUMNS)


def _weights(number: int, stream: int, device: torch.device) -> Tensor:
    size = max(CHUNK_ROWS * COLUMNS, 1 << (number - 1).bit_length())  # few different sizes: they stay cached
    return _cached_weights(size, stream, device)[:number]


@functools.cache
def _cached_weights(number: int, stream: int, device: torch.device) -> Tensor:
    return _random_bits(number, stream, device).bitwise_or(1)


def _random_bits(number: int, stream: int, device: torch.device) -> Tensor:
    """64 mixed bits for each index: the same on every device and release of torch (no generator is asked)."""
    bits = torch.arange(1, number + 1, dtype=torch.int64, device=device)
    bits = bits * 2 + (stream << 40) + 1
    for multiplier in (-7046029254386353131, -4658895280553007687, -7723592293110705685):
        bits = bits ^ bits.bitwise_right_shift(29)
        bits = bits * multiplier
    return bits ^ bits.bitwise_right_shift(32)
