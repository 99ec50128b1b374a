"""Memory of tiles: nothing that a tile allocates stays, so that the resident set does not grow with the whole matrix."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_metric_learning.losses as pml
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss, microbatched, ssl
from tests.doors import TileResults, operands
from tests.losses.resident_growth import FEW, KINDS, MANY, PAIR_LOSSES, WORLDS
from tests.processes import run_python

DIM = 8
TILE_BYTES = 64 << 10
# glibc's variables: every block is on the heap, which never shrinks
ALL_ON_THE_HEAP = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
LARGEST_GROWTH = 2.6  # of the resident set, each time that the rows double
FREE_MIB = 4.0  # that the heap may have free, so that few rows seem to need less


class LiveStorages(TorchDispatchMode):
    """Counts the storages that were made inside the block and are alive whenever a product of matrices starts."""

    def __init__(self) -> None:
        super().__init__()
        self.at_products: list[int] = []
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.at_products.append(len(self._alive))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._alive:
                    self._alive.add(storage._cdata)
                    weakref.finalize(storage, self._alive.discard, storage._cdata)
        return out


def rows_of(count: int) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(count)).requires_grad_()


def pairs(loss: Callable[[], Any]) -> Callable[[int], Tensor]:
    wrapped = GlobalBatchLoss(loss(), mode="rows", tile_bytes=TILE_BYTES)
    return lambda count: wrapped(rows_of(count), torch.arange(count) // 4)


def towers(loss: Callable[..., Any], **options: Any) -> Callable[[int], Tensor]:
    made = loss(tile_bytes=TILE_BYTES, **options)
    return lambda count: made(rows_of(count), rows_of(count))


def classes(loss: Callable[..., Any]) -> Callable[[int], Tensor]:
    def call(count: int) -> Tensor:
        return ClassShardedLoss(loss(4 * count, DIM), chunk_size=64)(rows_of(64), torch.arange(64))

    return call


def pieces() -> Callable[[int], Tensor]:
    encoder = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.1), nn.Linear(DIM, DIM))
    in_pieces = microbatched(encoder, 16)
    return lambda count: in_pieces(rows_of(count)).sum()


STEPS: dict[str, Callable[[], Callable[[int], Tensor]]] = {
    **{name: lambda loss=loss: pairs(loss) for name, loss in PAIR_LOSSES.items()},
    "Circle, row tiles": lambda: pairs(pml.CircleLoss),
    "CLIP": lambda: towers(ClipLoss),
    "SigLIP": lambda: towers(SigLipLoss),
    "ArcFace, class-sharded": lambda: classes(pml.ArcFaceLoss),
    "KoLeo": lambda: lambda count: ssl.koleo(rows_of(count)),
    "an encoder in pieces": pieces,
}


@pytest.mark.parametrize("name", STEPS)
def test_what_is_alive_does_not_grow_with_the_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssl, "_TILE_BYTES", TILE_BYTES)
    # the rows of a gradient in pieces too
    monkeypatch.setattr(operands, "_PIECE_BYTES", 1 << 10)
    step = STEPS[name]()
    step(64).backward()
    alive = []
    for count in (512, 1024):
        with LiveStorages() as storages:
            step(count).backward()
        assert len(storages.at_products) >= 10
        alive.append((len(storages.at_products), max(storages.at_products)))
    (few_products, few_alive), (many_products, many_alive) = alive
    assert many_products > 1.5 * few_products
    assert many_alive <= few_alive + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_are_joined_as_torch_joins_them(device: str) -> None:
    pieces = [torch.tensor([1, 2]), torch.tensor([0.5, 3.0]), torch.tensor([7])]
    pieces = [piece.to(device) for piece in pieces]
    results = TileResults(5, pieces[0])
    for start, piece in zip((0, 2, 4), pieces, strict=True):
        results.store_(piece, start)
    expected = torch.cat(pieces)
    assert results.joined().dtype == expected.dtype
    assert device == "meta" or results.joined().tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiles_of_one_loss_may_count_in_other_dtypes(dtype: torch.dtype) -> None:
    """Triplets of many positives are sorted and counted in integers, those of few one by one."""
    labels = torch.cat([torch.zeros(30), torch.arange(1, 31).repeat_interleave(2)]).long()
    found = []
    for loss in (pml.TripletMarginLoss(), GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows", tile_bytes=2000)):
        rows = torch.randn(90, DIM, generator=torch.Generator().manual_seed(3), dtype=dtype).requires_grad_()
        value = loss(rows, labels)
        value.backward()
        found.append((value.detach(), rows.grad))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=1e-7)


def test_the_resident_set_grows_with_the_rows() -> None:
    """In fresh processes, one and two ranks, where every hole in the heap counts."""
    done = run_python("-m", "tests.losses.resident_growth", **ALL_ON_THE_HEAP)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[float]] = json.loads(done.stdout)
    assert len(found) == len(KINDS) * len(WORLDS)
    doublings = (MANY // FEW).bit_length() - 1
    for name, (few, many) in found.items():
        assert many < (few + FREE_MIB) * LARGEST_GROWTH**doublings, (
            f"{name}: {few} MiB for {FEW} rows, {many} for {MANY}"
        )
