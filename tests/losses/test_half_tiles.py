"""Tiles of half of the matrix of one-tower losses: each pair of rows is compared once, and all numbers are those of the whole matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, reducers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import Operators
from tests.doors import PackedMasks, TiledCall, call_tiles, half_tiles, log_sum_exps, tile_distance
from tests.oracle import Found, Place, assert_close, graded, normal, parity

ROWS, DIM = 48, 5
TILE_BYTES = ROWS * 8 * 2  # two rows against all columns: tiles of nine by ten
EXACT = 1e-12  # float64, relative; at most 2e-13 were found
RAW = partial(distances.DotProductSimilarity, normalize_embeddings=False)

LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "SupCon, sums far apart": lambda: pml.SupConLoss(temperature=0.002, distance=RAW()),
    "SupCon, reduced above a limit": lambda: pml.SupConLoss(reducer=reducers.ThresholdReducer(low=0.1)),
    "NTXent": pml.NTXentLoss,
    "NTXent, sums far apart": lambda: pml.NTXentLoss(temperature=0.002, distance=RAW()),
    "NTXent, per anchor": lambda: pml.NTXentLoss(reducer=reducers.PerAnchorReducer()),
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "MultiSimilarity, steep": partial(pml.MultiSimilarityLoss, alpha=40, beta=3000, base=0.1),
    "Contrastive": pml.ContrastiveLoss,
    "Contrastive, mean": lambda: pml.ContrastiveLoss(reducer=reducers.MeanReducer()),
    "Contrastive, between limits": lambda: pml.ContrastiveLoss(reducer=reducers.ThresholdReducer(low=0.1, high=0.7)),
    "Contrastive, per anchor": lambda: pml.ContrastiveLoss(reducer=reducers.PerAnchorReducer()),
    "Contrastive of cosines": lambda: pml.ContrastiveLoss(0.9, 0.1, distance=distances.CosineSimilarity()),
    "Contrastive, city block": lambda: pml.ContrastiveLoss(distance=distances.LpDistance(p=1)),
}
LABELS: dict[str, Callable[[], Tensor]] = {
    "four a class": lambda: torch.arange(ROWS) // 4,
    "one large class": lambda: torch.where(torch.arange(ROWS) < 40, 0, torch.arange(ROWS) // 2),
    "two classes": lambda: torch.arange(ROWS) % 2,
    "one class": lambda: torch.zeros(ROWS, dtype=torch.long),
    "hardly a pair": lambda: torch.arange(ROWS).clamp(min=2),
    "of 32 bits": lambda: (torch.arange(ROWS) % 3).int(),
}


def rows() -> Tensor:
    return normal(ROWS, DIM, seed=7)


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_half_of_the_matrix_is_the_whole(loss: str, labels: str) -> None:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    given, leaf, truth = LABELS[labels]()[order], rows().requires_grad_(), rows().requires_grad_()
    wrapped = GlobalBatchLoss(LOSSES[loss]().double(), mode="rows", tile_bytes=TILE_BYTES)
    assert wrapped.evaluation == "tiled, symmetric"
    expected = graded(LOSSES[loss]().double()(truth, given), rows=truth)
    assert_close(graded(wrapped(leaf, given), rows=leaf), expected, rtol=EXACT)


def of_many_classes(place: Place, loss: str, tile_bytes: int) -> Found:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    ours = GlobalBatchLoss(LOSSES[loss]().double(), mode="rows", tile_bytes=tile_bytes)
    with mock.patch.object(half_tiles, "PackedMasks", wraps=PackedMasks) as packed:
        found = place.evaluated(LOSSES[loss]().double(), ours, rows(), (torch.arange(ROWS) // 2)[order])
    # otherwise the cases would not be about them
    assert packed.called or place.alone or not place.sizes[dist.get_rank()]
    return found


@pytest.mark.parametrize("sizes", [(48,), (20, 28), (18, 0, 30), (16, 16, 16)])
@pytest.mark.parametrize("tile_bytes", [TILE_BYTES, 6 * TILE_BYTES])
def test_a_few_positives_among_many_classes(pool: RankPool, tile_bytes: int, sizes: tuple[int, ...]) -> None:
    """Masks are packed: positives of other ranks, too."""
    parity(pool, of_many_classes, sizes, tile_bytes, cases=LOSSES, rtol=EXACT)


NEAR: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "NTXent": pml.NTXentLoss,
    "NTXent, cold": lambda: pml.NTXentLoss(temperature=0.005),
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "Contrastive": pml.ContrastiveLoss,
}


@pytest.mark.parametrize("kind", ["random", "cone", "nearly equal"])
@pytest.mark.parametrize("loss", NEAR)
def test_halves_are_as_exact(loss: str, kind: str) -> None:
    """As tiles of the whole matrix: in float64 gradients are equal to 1e-12, in float32 they are as far from those."""
    count = 560
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(count, 32, generator=generator)
    common = torch.randn(32, generator=generator)
    if kind == "cone":
        given = given + 6 * common
    elif kind == "nearly equal":
        given = common + 1e-2 * given
    labels = torch.arange(count) % (count // 4)

    def gradient(dtype: torch.dtype, *, halves: bool) -> Tensor:
        leaf = given.to(dtype).clone().requires_grad_()
        wrapped = GlobalBatchLoss(NEAR[loss]().to(dtype), mode="rows")
        with contextlib.nullcontext() if halves else mock.patch.object(TiledCall, "_takes_halves", return_value=False):
            wrapped(leaf, labels).backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    truth = gradient(torch.float64, halves=False)
    assert_close({"rows": gradient(torch.float64, halves=True)}, {"rows": truth}, rtol=EXACT)
    off = [float((gradient(torch.float32, halves=halves) - truth).norm() / truth.norm()) for halves in (False, True)]
    assert off[1] < 1.5 * off[0], off


@contextlib.contextmanager
def multiplied_entries() -> Iterator[list[int]]:
    """The entries of matrices that products make, with the inner dimension."""
    found = []

    def note(operator: Any, arguments: tuple[Any, ...], _: list[Tensor]) -> None:
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = arguments[-2:]
            found.append(left.shape[0] * left.shape[1] * right.shape[1])

    with Operators(note):
        yield found


@pytest.mark.parametrize("loss", ["SupCon", "NTXent", "MultiSimilarity"])
def test_each_pair_is_multiplied_once(loss: str) -> None:
    """Half a product in forward and in backward, a whole one for the gradient. Squares on the diagonal are extra."""
    count = 40 * 9
    leaf = torch.randn(count, 32, generator=torch.Generator().manual_seed(7)).requires_grad_()
    wrapped = GlobalBatchLoss(LOSSES[loss](), mode="rows", tile_bytes=count * 4)
    with multiplied_entries() as entries:
        wrapped(leaf, torch.arange(count) // 2).backward()
    products = sum(entries) / (count * count * 32)
    assert 1.9 < products < 2.3


@pytest.mark.parametrize("centre", [0.0, 2.0])
def test_distances_of_far_negatives_are_not_computed(centre: float) -> None:
    """Without a negative inside the margin, roots are of positives only and the only product is that of the tiles."""
    count, roots = 40 * 9, [0]
    leaf = (torch.randn(count, 128, generator=torch.Generator().manual_seed(7)) + centre).requires_grad_()
    wrapped = GlobalBatchLoss(pml.ContrastiveLoss(), mode="rows", tile_bytes=count * 4 * 9)

    def note(operator: Any, _: tuple[Any, ...], outputs: list[Tensor]) -> None:
        if operator.overloadpacket is torch.ops.aten.sqrt_:
            roots[0] += outputs[0].numel()

    with multiplied_entries() as entries, Operators(note):
        wrapped(leaf, torch.arange(count) // 4).backward()
    products = sum(entries) / (count * count * 130)
    if centre:
        assert roots[0] > count * count / 2
        assert products > 1.5
    else:
        assert roots[0] < count * count / 10
        assert products < 0.65


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_left_out_is_beyond_the_margin(dtype: torch.dtype) -> None:
    """Of squares around the square of a margin, none that is left out is of a shorter distance, and a little larger ones are left out."""
    distance = tile_distance(distances.LpDistance(), ROWS)
    precision = torch.finfo(dtype).eps
    for margin in (-1.0, 0.0, *torch.rand(200, dtype=torch.float64).add(0.01).tolist()):
        steps = torch.arange(-20, 21, dtype=torch.float64) * precision / 2
        squares = (max(margin, 0) ** 2 * (1 + steps)).to(dtype)
        is_left_out = squares.double() >= distance.started(margin, dtype)
        assert bool((distance.finish_(squares.clone(), 1) >= margin)[is_left_out].all())
        assert is_left_out[-1]


@pytest.mark.parametrize("most", [0, 800_000, call_tiles.KEPT_BYTES])
@pytest.mark.parametrize("loss", ["SupCon", "NTXent", "MultiSimilarity", "Contrastive, per anchor"])
def test_tiles_are_kept_for_one_backward(loss: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit. The values and both gradients of one graph are the same bits as without: a second backward computes them again."""
    count = 600
    generator = torch.Generator().manual_seed(7)
    given, labels = torch.randn(count, 32, generator=generator), torch.arange(count) // 3

    def step(kept_bytes: int) -> tuple[Tensor, list[Tensor], float]:
        monkeypatch.setattr(call_tiles, "KEPT_BYTES", kept_bytes)
        leaf, grads = given.clone().requires_grad_(), []
        with multiplied_entries() as entries:
            value = GlobalBatchLoss(LOSSES[loss](), mode="rows")(leaf, labels)
            grads += torch.autograd.grad(value, leaf, retain_graph=True)
        grads += torch.autograd.grad(value, leaf)
        return value.detach(), grads, sum(entries) / (count * count * 32)

    value, grads, products = step(most)
    expected, (grad, _), all_products = step(0)
    for found in grads:
        torch.testing.assert_close(found, grad, rtol=0, atol=0)
    torch.testing.assert_close(value, expected, rtol=0, atol=0)
    # tiles are 0.71 of the matrix, 1.0 MB, and their gradients are 1.0 and what squares on the diagonal are extra
    saved = all_products - products
    if most == 0:
        assert saved == 0
    elif most < call_tiles.HALF_TILE_BYTES:
        assert 0.3 < saved < 0.7
    else:
        assert products < 1.85
        assert saved > 0.65


@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_rows_give_the_same_bits(loss: str) -> None:
    wrapped = GlobalBatchLoss(LOSSES[loss](), mode="rows", tile_bytes=TILE_BYTES)
    found = []
    for _ in range(2):
        leaf = rows().float().requires_grad_()
        value = wrapped(leaf, torch.arange(ROWS) // 4)
        value.backward()
        found.append((value.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


ENTRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "close": lambda values: values,
    "a row far below": lambda values: values.index_fill(0, torch.tensor(2), -200.0),
    "a column far below": lambda values: values.index_fill(1, torch.tensor(3), -200.0),
    "nothing counts in a row": lambda values: values.index_fill(0, torch.tensor(0), torch.finfo(torch.float32).min),
    "nan": lambda values: values.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(torch.nan)),
    "infinite": lambda values: values.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(torch.inf)),
}


@pytest.mark.parametrize("entries", ENTRIES)
def test_one_exponential_serves_rows_and_columns(entries: str) -> None:
    """If no sum is so far below the largest entry that it would be 0; and nan and infinity stay in their row and column."""
    values = ENTRIES[entries](torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 5)
    found = log_sum_exps(values.clone(), both=True)
    expected = values.logsumexp(1), values.logsumexp(0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
