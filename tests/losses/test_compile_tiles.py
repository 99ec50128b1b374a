"""``compile_tiles=True``: what a tile computes from masks is one process, and ranks agree whether it is compiled.

Compiling takes seconds, so that most tests call the functions as they are; ``tests/faults`` compiles them.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import PeerError
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss, tile_compiler
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses import sharded_cases
from tests.losses.test_tiled import CASES, SPLITS, TILE_BYTES, play
from tests.oracle import Found, Place, normal, parity
from tests.slow_parameters import slow_parameters

TOWERS: dict[str, Callable[..., nn.Module]] = {"CLIP": ClipLoss, "SigLIP": SigLipLoss}
WITH_MASKS = [name for name in CASES if "mined" not in name]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def with_masks(place: Place, name: str, tile_bytes: int | None) -> Found:
    calls = mock.Mock(side_effect=as_it_is)
    with mock.patch.object(tile_compiler, "compiled", calls):
        found = play(place, name, tile_bytes, {"compile_tiles": True})
    # of each loss two functions, but of triplets one or none
    assert place.alone or calls.call_count >= 2 or "Triplet" in name
    return found


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2, 3}))
def test_masks_are_one_process(pool: RankPool, world_size: int) -> None:
    tile_bytes = TILE_BYTES if world_size != 2 else None  # several tiles, or one that is kept for backward
    names = WITH_MASKS if world_size > 1 else WITH_MASKS[::3]  # a tile does not know how many ranks there are
    parity(pool, with_masks, SPLITS[world_size], tile_bytes, cases=names)


@pytest.mark.parametrize("sizes", slow_parameters([[31, 0, 29], [1, 59]], [[1, 59]]), ids=str)
def test_masks_of_a_rank_with_one_row_or_none(pool: RankPool, sizes: list[int]) -> None:
    parity(pool, with_masks, sizes, TILE_BYTES, cases=WITH_MASKS[::3])


MAKE: dict[str, Callable[..., nn.Module]] = {
    "tiles": lambda **options: GlobalBatchLoss(pml.SupConLoss(), mode="rows", **options),
    "classes": lambda **options: ClassShardedLoss(pml.ArcFaceLoss(8, 4), **options),
}


def with_a_compiler_that_fails(name: str, failing_rank: int) -> dict[str, Any]:
    """The value of two calls and what was said, where a rank cannot compile."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        if dist.get_rank() == failing_rank:
            raise RuntimeError("no compiler here")
        return mock.Mock(side_effect=AssertionError) if values else mock.Mock(side_effect=function)

    torch.manual_seed(0)
    loss, eager, values = MAKE[name](compile_tiles=True), MAKE[name](), list[float]()
    eager.load_state_dict(loss.state_dict())
    rows, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 0, 1, 1, 2, 2])
    with warnings.catch_warnings(record=True) as said, mock.patch.object(tile_compiler, "compiled", compiled):
        warnings.simplefilter("always")
        for _ in range(2):
            values.append(loss(rows, labels).item())
    return {"values": values, "eager": eager(rows, labels).item(), "said": [str(one.message) for one in said]}


@pytest.mark.parametrize("name", MAKE)
def test_where_one_rank_cannot_compile_none_does(pool: RankPool, name: str) -> None:
    first, second = pool.run(2, with_a_compiler_that_fails, name, 1)
    assert first["values"] == second["values"] == pytest.approx([first["eager"]] * 2, rel=1e-6)
    (said,) = first["said"]  # rank 0 says it, once
    assert "compile_tiles: torch.compile failed on rank 1 (RuntimeError: no compiler here)" in said
    assert "All ranks compute tiles eagerly" in said
    assert not second["said"]


def one_rank_compiles(name: str) -> None:
    loss = MAKE[name](compile_tiles=dist.get_rank() == 0)
    with mock.patch.object(tile_compiler, "compiled", as_it_is):
        loss(torch.randn(4, 4), torch.tensor([0, 0, 1, 1]))


def successor(value: int) -> int:
    return value + 1


def test_a_function_that_cannot_be_compiled_later_is_called_as_it_is() -> None:
    compiler = tile_compiler.TileCompiler()
    with (
        mock.patch.object(tile_compiler.TileCompiler, "_run", side_effect=RuntimeError("no compiler")),
        pytest.warns(
            UserWarning, match="successor is computed eagerly on this rank, which gives the same numbers: RuntimeError"
        ),
    ):
        assert compiler(successor, 1) == 2
    assert compiler(successor, 2) == 3  # and is not tried again


def with_a_compiler_that_fails_later(name: str) -> list[Tensor]:
    """What a rank gets, less what it gets uncompiled, where rank 1 cannot compile for the sizes of its first batch."""
    fails = [False]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if fails[0] and dist.get_rank() == 1:
                raise RuntimeError("no compiler here")
            return function(*args)

        return run

    def rehearse(self: tile_compiler.TileCompiler, *args: Any) -> None:
        fails[0] = False
        original(self, *args)
        fails[0] = True

    original, differences = tile_compiler.TileCompiler.rehearse, []
    rows = normal(2, 6, 4, seed=dist.get_rank())
    loss, eager = (TOWERS[name](compile_tiles=compile_tiles).double() for compile_tiles in (True, False))
    with (
        warnings.catch_warnings(),
        mock.patch.object(tile_compiler, "compiled", compiled),
        mock.patch.object(tile_compiler.TileCompiler, "rehearse", rehearse),
    ):
        warnings.simplefilter("ignore")
        for has_grad in (True, False):  # another kind of call: the ranks compile together once more
            with torch.set_grad_enabled(has_grad):
                leaves = rows.clone().requires_grad_(has_grad)
                differences.append((loss(*leaves) - eager(*leaves)).detach())
    return differences


@pytest.mark.parametrize("name", TOWERS)
def test_a_rank_that_cannot_compile_later_still_meets_its_peers(pool: RankPool, name: str) -> None:
    for differences in pool.run(2, with_a_compiler_that_fails_later, name):
        assert all(abs(float(difference)) < 1e-12 for difference in differences)


def stopped_before_the_ranks_compile() -> float:
    """The value of a call after one that rank 1 has left before it compiled."""
    loss, rows = SigLipLoss(compile_tiles=True).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    fails = mock.patch.object(SigLipLoss, "_number", side_effect=MemoryError("rank 1 alone"))
    with mock.patch.object(tile_compiler, "compiled", as_it_is):
        with fails if dist.get_rank() else contextlib.nullcontext(), contextlib.suppress(MemoryError, PeerError):
            loss(*rows)
        return loss(*rows).item()


def test_a_call_that_no_rank_has_compiled_is_compiled_later(pool: RankPool) -> None:
    first, second = pool.run(2, stopped_before_the_ranks_compile)
    assert first == second


def test_what_is_compiled_stays_in_its_process() -> None:
    original = tile_compiler.TileCompiler()
    original.has_failed = True
    for other in (copy.deepcopy(original), pickle.loads(pickle.dumps(original))):
        assert isinstance(other, tile_compiler.TileCompiler)
        assert not other.has_failed


@pytest.mark.parametrize("name", TOWERS)
@each_rank(2)
def test_towers_with_masks(name: str) -> None:
    """What one rank gets of functions that find own pairs by a mask, less what it gets of those that take a view of them."""
    rank, found = dist.get_rank(), []
    rows = normal(2, 12, 6, seed=0)
    part, extra, queue = [slice(0, 5), slice(5, 12)][rank], rows[0, :3] * 2, rows[1, :2] * 3
    for options in ({"compile_tiles": True}, {}):
        leaves = [tensor[part].clone().requires_grad_() for tensor in rows]
        loss = TOWERS[name](tile_bytes=16 * 8, **options).double()
        with mock.patch.object(tile_compiler, "compiled", as_it_is):
            value = loss(*leaves, extra, queue)
            value.backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves), loss.logit_scale.grad])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def as_if_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function as the compiler sees it, whose masks stand in place of scattered targets."""

    def run(*args: Any) -> Any:
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            return function(*args)

    return run


ONE_PRODUCT = ("ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "SphereFaceLoss")


def classes_with_masks(place: Place, case: sharded_cases.Case) -> Found:
    calls = mock.Mock(side_effect=as_if_compiled)
    with mock.patch.object(tile_compiler, "compiled", calls):
        found = sharded_cases.play(place, case, compile_tiles=True)
    # the logits of these are one product
    is_compiled = case.name in ONE_PRODUCT and "distance" not in case.options
    assert place.alone or calls.call_count >= 2 or not is_compiled
    return found


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {3}))
def test_classes_with_masks_are_one_process(pool: RankPool, world_size: int) -> None:
    names = [name for name in sharded_cases.CASES if "mined" not in name]
    sharded_cases.assert_as_one_process(pool, world_size, names, classes_with_masks)


@pytest.mark.parametrize("products", ["float32", "bf16"])
@each_rank(2)
def test_sampled_classes_with_masks(products: str) -> None:
    """Sampled classes, and products of bf16: what one rank gets, less what it gets uncompiled."""
    found, count = [], 12
    rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    labels = torch.arange(count) * 3 + dist.get_rank()
    for compile_tiles in (True, False):
        torch.manual_seed(0)
        loss = ClassShardedLoss(
            pml.NormalizedSoftmaxLoss(40, 6),
            chunk_size=4,
            sample_rate=0.5,
            unbiased=True,
            products=products,
            compile_tiles=compile_tiles,
        )
        loss.attach(torch.optim.SGD(loss.parameters(), lr=0.1))
        leaf = rows.clone().requires_grad_()
        with mock.patch.object(tile_compiler, "compiled", as_if_compiled):
            value = loss(leaf, labels)
            value.backward()
        found.append([value.detach(), leaf.grad, loss.weight.grad.to_dense()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
