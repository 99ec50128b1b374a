"""The fingerprint changes with every kind of change, is the same on both ways to compute it, and depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses import fingerprint as module
from lightning_ddp_losses.fingerprint import fingerprint, fingerprints


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


@pytest.mark.parametrize("shape", [(12, 10), (64, 48), (600, 500)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_seen(
    change: str, dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    after = before.clone()
    CHANGES[change](after)
    assert not torch.equal(before, after)
    fast = fingerprint(before), fingerprint(after)
    monkeypatch.setattr(module, "_int_mm_is_right", lambda _: False)
    slow = fingerprint(before), fingerprint(after)
    assert fast[0] == slow[0]
    assert fast[1] == slow[1]
    assert fast[0] != fast[1]


def test_nothing_but_the_bits_counts() -> None:
    t = torch.randn(70, 90)
    expected = fingerprint(t)
    assert fingerprint(t.T.contiguous().T) == expected
    assert fingerprint(t.clone().requires_grad_()) == expected
    assert fingerprint(t.view(-1)) == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fingerprint(t) == expected
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert fingerprint(t) == expected
    torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [0, 1, 31, 256, 1024 * 256, 1024 * 256 + 3, 300_000], ids=str)
def test_sizes_around_rows_and_chunks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.randn(size, generator=torch.Generator().manual_seed(2))
    one = fingerprint(t)
    monkeypatch.setattr(module, "_int_mm_is_right", lambda _: False)
    assert fingerprint(t) == one
    if size:
        t[-1] = -t[-1]
        assert fingerprint(t) != one


def test_dtypes_that_are_not_floating() -> None:
    values = [
        torch.tensor([True, False, True]),
        torch.arange(9),
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.tensor(3.0),
    ]
    seen = fingerprints(values)
    assert seen.shape == (4,)
    assert len(set(seen.tolist())) == 4
    assert fingerprints([]).numel() == 0


def test_random_changes_are_seen() -> None:
    """Two thousand small tensors that differ in one bit: no two fingerprints agree."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randint(0, 2**31, (64,), generator=generator)
    seen = {int(fingerprint(base))}
    for number in range(2000):
        changed = base.clone()
        changed[number % 64] ^= 1 << (number // 64 % 60)
        seen.add(int(fingerprint(changed)))
    assert len(seen) == 2001


def test_a_wrong_fast_product_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.randn(200, 300)
    right = fingerprint(t)
    module._int_mm_is_right.cache_clear()
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros(a.shape[0], b.shape[1], dtype=torch.int32))
    assert fingerprint(t) == right
    monkeypatch.delattr(torch, "_int_mm")
    module._int_mm_is_right.cache_clear()
    assert fingerprint(t) == right
    module._int_mm_is_right.cache_clear()
