"""Every kernel, interpreted on the CPU, is the function whose place it takes: of any size, in float32 and in float16.

The interpreter rounds to bfloat16 by cutting off, so that two terms of a gradient are compared with their sum, less closely.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance
from pytorch_metric_learning.reducers import ClassWeightedReducer, PerAnchorReducer, ThresholdReducer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_ddp_losses.losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    SigLipLoss,
    sharded_softmax,
    tile_compiler,
    tower_tiles,
)
from tests.doors import LabelKeys, Tile, choice, evaluator, launches, split, tile_functions
from tests.kernels.cases import CASES, PAIRS

assert os.environ.get("TRITON_INTERPRET") == "1", "triton reads it as it is imported: run `nox -s kernels`"

SIZES = [(1, 1), (1, 130), (65, 127), (64, 128), (130, 257)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
TERMS = {0: 0.0, 1: 2.0**-7, 2: 2.0**-14, 3: 2.0**-14}  # of so many bf16 numbers that are cut off


def products_of(rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    given = values.to(dtype)
    if layout == "transposed":
        return given.t().contiguous().t()
    if layout == "ties":
        return given.mul(4).round().div(4)
    if layout == "every second column":
        return torch.stack([given, given * 0 + torch.nan], 2).view(rows, -1)[:, ::2]
    return given


def flat(found: Any) -> list[Tensor]:
    """The tensors of a result in float64, both terms of a gradient joined."""
    tensors = [tensor for tensor in tree_leaves(found) if tensor is not None]
    terms = [tensor.double() for tensor in tensors if tensor.dtype == torch.bfloat16]
    if terms:  # the second one is subtracted
        terms = [terms[0] - sum(terms[1:2]) + sum(terms[2:])]
    return [*(tensor.double() for tensor in tensors if tensor.dtype != torch.bfloat16), *terms]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest number."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every second column", "ties"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_its_function(name: str, dtype: torch.dtype, layout: str) -> None:
    for rows, columns in SIZES if layout == "contiguous" else SIZES[-1:]:
        for number, call in enumerate(CASES[name](rows, columns)):
            function, (_, *args) = call.func, call.args
            products = products_of(rows, columns, dtype, layout)
            expected = in_float64(function, products, args)
            found = launches.LAUNCHES[function.__name__](products, *args)
            term_count = sum(each is not None and each.dtype == torch.bfloat16 for each in tree_leaves(found))
            for ours, theirs in zip(flat(found), flat(expected), strict=True):
                most = max(TOLERANCE[dtype], TERMS[term_count])
                # the lowest number of a dtype stands for none
                ours, theirs = (each.clamp_min(-6e4) for each in (ours, theirs))
                off = difference(ours, theirs)
                assert off < most, f"{function.__name__} {number}, {rows} x {columns}: {off}"


def without_terms(grad: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    """The gradient that bf16 numbers stand for."""
    return split(grad, of_rows, of_columns, 0)


def in_float64(function: Callable[..., Any], products: Tensor, args: Sequence[Any]) -> Any:
    """What torch's operators find in float64."""
    wide = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, args)
    with (
        mock.patch.object(tower_tiles, "split", without_terms),
        mock.patch.object(sharded_softmax, "split", without_terms),
    ):
        return function(products.double(), *wide)


OF_PAIRS: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "NTXent": pml.NTXentLoss,
    "MultiSimilarity": partial(pml.MultiSimilarityLoss, distance=LpDistance()),
    "Contrastive": pml.ContrastiveLoss,
}


def on_a_tile(name: str, products: Tensor, run: Callable[..., Any] | None) -> list[Tensor]:
    """The numbers of a loss on the only tile of a batch, and the gradients that follow from them."""
    loss, labels = OF_PAIRS[name](), torch.arange(len(products)) % 7
    plan = evaluator.tiled_plan(loss)
    assert plan is not None
    pair_loss = plan.pair_loss(loss, plan.reductions, products, run)
    tile = Tile(products, slice(0, len(products)), LabelKeys(labels, labels, torch.arange(len(products)).unsqueeze(1)))
    numbers, grads = pair_loss.rows(tile, with_grads=pair_loss.grad_in_forward)
    _, stats = pair_loss.finalize(numbers, labels)
    pair_loss.prepare_backward(stats, stats, [products.new_ones(())] * len(pair_loss.sub_losses))
    return [*numbers, *grads, pair_loss.grad(tile)]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of entries that do not count
@pytest.mark.parametrize("size", [1e-30, 1.0, 300.0, 3e4])
@pytest.mark.parametrize("name", PAIRS)
def test_entries_of_any_size(name: str, size: float) -> None:
    """No exponential overflows, and what is rounded is an exponent of that size."""
    products = products_of(130, 130, torch.float32, "")
    products = (products + products.T) * size
    found = on_a_tile(name, products, lambda function, *args: launches.LAUNCHES[function.__name__](*args))
    expected = on_a_tile(name, products.double(), None)
    for ours, theirs in zip(found, expected, strict=True):
        assert bool(ours.isfinite().all())
        assert difference(ours.double(), theirs) < 1e-6 * max(size, 1)


def test_two_runs_are_equal_bit_by_bit() -> None:
    for name, calls in CASES.items():
        for call in calls(130, 257):
            runs = [
                flat(launches.LAUNCHES[call.func.__name__](products_of(130, 257, torch.float32, ""), *call.args[1:]))
                for _ in range(2)
            ]
            assert all(torch.equal(*each) for each in zip(*runs, strict=True)), name


def test_what_is_no_number_is_not_lost() -> None:
    for name, calls in CASES.items():
        for call in calls(65, 127):
            products = products_of(65, 127, torch.float32, "")
            products[3, 70] = torch.nan
            found = flat(launches.LAUNCHES[call.func.__name__](products, *call.args[1:]))
            is_found = any(bool(each.isnan().any()) for each in found)
            # the gradient of a margin is 0 there, as torch's operators have it, and the sum of the row is no number
            assert is_found != (call.func is tile_functions.contrastive_grad), f"{name}: {call.func.__name__}"


def test_a_matrix_stays_that_a_distance_needs_beside_its_gradient() -> None:
    products = products_of(65, 127, torch.float32, "")
    for name in PAIRS:
        for call in CASES[name](65, 127):
            before = products.clone()
            launches.LAUNCHES[call.func.__name__](products, *call.args[1:])
            assert torch.equal(products, before)


# ---------------------------------------------------------------------- losses as they are called


def in_rows(loss: Callable[..., nn.Module], **inner: Any) -> Callable[..., nn.Module]:
    return lambda **options: GlobalBatchLoss(loss(**inner), mode="rows", **options)


OF_BOTH_SIGNS = torch.tensor([1.0, -0.5, 2.0, 0.0, 0.25, -1.0, 3.0])
RAW = DotProductSimilarity(normalize_embeddings=False)
LOSSES: dict[str, Callable[..., nn.Module]] = {
    "CLIP": ClipLoss,
    "CLIP, smoothed, small tiles": partial(ClipLoss, label_smoothing=0.1, tile_bytes=2048),
    "SigLIP": SigLipLoss,
    "SigLIP, small tiles": partial(SigLipLoss, tile_bytes=2048),
    "ArcFace": lambda **options: ClassShardedLoss(pml.ArcFaceLoss(50, 8), **options),
    "ArcFace, chunks": lambda **options: ClassShardedLoss(pml.ArcFaceLoss(50, 8), chunk_size=7, **options),
    "NormalizedSoftmax, chunks": lambda **options: ClassShardedLoss(
        pml.NormalizedSoftmaxLoss(50, 8), chunk_size=7, **options
    ),
    "SupCon": in_rows(pml.SupConLoss),
    "SupCon, Euclidean, tiles": partial(in_rows(pml.SupConLoss, distance=LpDistance()), tile_bytes=999),
    "SupCon, references": in_rows(pml.SupConLoss),
    "NTXent": in_rows(pml.NTXentLoss),
    "NTXent, tiles": partial(in_rows(pml.NTXentLoss), tile_bytes=999),
    "NTXent, ratios as small as the number that is added": in_rows(pml.NTXentLoss, temperature=0.15, distance=RAW),
    "NTXent, anchors": in_rows(pml.NTXentLoss, reducer=PerAnchorReducer()),
    "NTXent, weights of both signs": in_rows(pml.NTXentLoss, reducer=ClassWeightedReducer(OF_BOTH_SIGNS)),
    "NTXent, references": in_rows(pml.NTXentLoss),
    "MultiSimilarity": in_rows(pml.MultiSimilarityLoss),
    "MultiSimilarity, Euclidean, tiles": partial(
        in_rows(pml.MultiSimilarityLoss, distance=LpDistance()), tile_bytes=999
    ),
    "MultiSimilarity, references": in_rows(pml.MultiSimilarityLoss),
    "Contrastive": in_rows(pml.ContrastiveLoss),
    "Contrastive, similarities, tiles": partial(
        in_rows(pml.ContrastiveLoss, pos_margin=0.9, neg_margin=0.1, distance=CosineSimilarity()), tile_bytes=999
    ),
    "Contrastive, limits": in_rows(pml.ContrastiveLoss, reducer=ThresholdReducer(low=0.1, high=0.7)),
    "Contrastive, anchors": in_rows(pml.ContrastiveLoss, reducer=PerAnchorReducer()),
    "Contrastive, weights of both signs": in_rows(pml.ContrastiveLoss, reducer=ClassWeightedReducer(OF_BOTH_SIGNS)),
    "Contrastive, references": in_rows(pml.ContrastiveLoss),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_kernels_is_itself(name: str, dtype: torch.dtype) -> None:
    found = []
    launched = mock.Mock(side_effect=choice.launch_of)
    for option in ("auto", False):
        torch.manual_seed(0)
        loss = LOSSES[name](compile_tiles=option)
        leaf, other = torch.randn(2, 37, 8).to(dtype)
        leaf.requires_grad_()
        labels = torch.arange(37) % 7
        arguments: tuple[Any, ...] = leaf, labels
        if isinstance(loss, ClipLoss | SigLipLoss):
            arguments = leaf, other
        elif "references" in name:
            arguments = leaf, labels, None, other, labels.flip(0)
        with (
            warnings.catch_warnings(),
            mock.patch.object(choice, "have_kernels", return_value=True),
            mock.patch.object(choice, "FEWEST_ENTRIES", 0),
            mock.patch.object(choice, "launch_of", launched),
            mock.patch.object(tile_compiler, "_HOST_TILE", (16, 32)),
        ):
            warnings.simplefilter("error")  # a kernel that fails would be said
            # of entries that do not count
            warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
            value = loss(*arguments)
            value.backward()
        found.append([value.detach(), leaf.grad, *(each.grad for each in loss.parameters())])
    assert launched.call_count >= 2
    # a gradient of bf16 rows is rounded to bf16
    most = 1e-6 if dtype == torch.float32 else 2.0**-8
    for ours, theirs in zip(*found, strict=True):
        assert difference(ours.double(), theirs.double()) < most
