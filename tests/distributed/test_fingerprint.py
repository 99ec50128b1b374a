"""Both ways to a fingerprint (the host's and the accelerator's) change with every kind of change, and depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.doors import HostNumbers, combine, fingerprint, fingerprints, start_fingerprint
from tests.doors import fingerprint_file as module


def on_device(tensor: Tensor) -> int:
    """What an accelerator computes, here on the host."""
    return int(module._on_device(tensor.detach().contiguous().reshape(-1).view(torch.int8)))


WAYS = pytest.mark.parametrize("way", [fingerprint, on_device])


def flip(t: Tensor, *indices: int) -> None:
    flat = t.view(-1)
    flat[list(indices)] = -flat[list(indices)]


def swap(t: Tensor, a: object, b: object) -> None:
    t[a], t[b] = t[b].clone(), t[a].clone()


def plus_minus(t: Tensor) -> None:
    t[0, 0] += 0.5
    t[3, 3] -= 0.5


def ulp(t: Tensor) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    t.view(integers)[5, 5] += 1


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "odd column negated": lambda t: t[:, 1].neg_(),
    "two odd weights negated": lambda t: flip(t, 1, 3),
    "row negated": lambda t: t[2].neg_(),
    "tensor negated": lambda t: t.neg_(),
    "one unit in the last place": ulp,
    "rows swapped": lambda t: swap(t, 1, 7),
    "words swapped": lambda t: swap(t.view(-1, 2), 4, 9),
    "neighbours swapped": lambda t: swap(t.view(-1), 10, 11),
    "columns swapped": lambda t: swap(t.T, 2, 5),
    "one weight zeroed": lambda t: t[4, 4].zero_(),
    "plus and minus": plus_minus,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@WAYS
@pytest.mark.parametrize("shape", [(12, 10), (64, 48), (600, 500)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_seen(
    change: str, dtype: torch.dtype, shape: tuple[int, int], way: Callable[[Tensor], int]
) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    after = before.clone()
    CHANGES[change](after)
    assert not torch.equal(before, after)
    assert way(before) == way(before.clone())
    assert way(before) != way(after)


@WAYS
def test_nothing_but_the_bits_counts(way: Callable[[Tensor], int]) -> None:
    t = torch.randn(70, 90)
    expected = way(t)
    assert way(t.T.contiguous().T) == expected
    assert way(t.clone().requires_grad_()) == expected
    assert way(t.view(-1)) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert way(t) == expected
    unaligned = torch.cat([t.new_zeros(1), t.view(-1)])[1:]
    assert way(unaligned) == expected
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert way(t) == expected
    torch.set_num_threads(threads)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 12])
@pytest.mark.parametrize("size", [1, 31, 2048, 2049, 8 * 2048, 300_000], ids=str)
def test_an_accelerator_computes_the_sum_in_chunks(size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out, modulo 2**64, with Python's integers."""
    t = torch.randn(size, generator=torch.Generator().manual_seed(2))
    words = torch.cat([t, t.new_zeros(-size % 2048)]).view(torch.int64).tolist()
    by_place, by_row = (module._weights(max(1024, size), stream, t.device).tolist() for stream in (0, 1))
    total = sum((w + (w >> 31)) * by_place[i % 1024] * by_row[i // 1024] for i, w in enumerate(words))
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk)
    assert on_device(t) % 2**64 == total % 2**64
    t[-1] = -t[-1]
    assert on_device(t) % 2**64 != total % 2**64


def test_nothing_at_all() -> None:
    assert fingerprint(torch.zeros(0)) == fingerprint(torch.zeros(3, 0))
    assert on_device(torch.zeros(0)) == 0
    assert fingerprints([]) == []
    assert combine([]) == 0


def test_dtypes_that_are_not_floating() -> None:
    values = [
        torch.tensor([True, False, True]),
        torch.arange(9),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.tensor(3.0),
    ]
    seen = fingerprints(values)
    assert len(set(seen)) == len(seen) == 4
    assert seen == [fingerprint(v) for v in values]


@WAYS
def test_random_changes_are_seen(way: Callable[[Tensor], int]) -> None:
    """Two thousand small tensors that differ in one bit: no two fingerprints agree."""
    base = torch.randint(0, 2**31, (64,), generator=torch.Generator().manual_seed(3))
    seen = {way(base)}
    for number in range(2000):
        changed = base.clone()
        changed[number % 64] ^= 1 << (number // 64 % 60)
        seen.add(way(changed))
    assert len(seen) == 2001


@WAYS
def test_signs_in_upper_halves_do_not_cancel(way: Callable[[Tensor], int]) -> None:
    """Even numbers of flips at any place of a word, whose multiples of 2**63 would add up to nothing."""
    t = torch.randint(-(2**62), 2**62, (4096,), generator=torch.Generator().manual_seed(4))
    seen = {way(t)}
    for bit in range(64):
        for places in ([3, 9], [3, 1024 + 3], list(range(4096))):
            changed = t.clone()
            changed[places] ^= -(2**63) if bit == 63 else 1 << bit
            seen.add(way(changed))
    assert len(seen) == 1 + 3 * 64


def test_order_counts_and_what_is_on_its_way_arrives() -> None:
    values = [torch.randn(5), torch.randn(5)]
    prints = fingerprints(values)
    assert combine(prints) != combine(prints[::-1])
    started = [start_fingerprint(values[0]), torch.tensor(7), start_fingerprint(values[1]), torch.tensor(-8)]
    assert HostNumbers(started).read() == [prints[0], 7, prints[1], -8]
