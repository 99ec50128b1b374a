"""Losses in tiles: value, gradient and recorded statistics of one process, on batches that take many tiles.

The one process calls pytorch-metric-learning (PML) itself. Rows are leaves: after the mean over ranks their gradients are the
slices of the one process's.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.utils import common_functions
from torch import Tensor, nn

from lightning_ddp_losses.losses import ClassShardedLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.counting import Operators
from tests.doors import (
    TOWER_BYTES,
    CallBatches,
    PMLCall,
    SeedCounter,
    chunks_of,
    facts_of,
    gather_batch,
    rows_of_a_tile,
    tile_distance,
    tiles_of,
)
from tests.each_rank import each_rank
from tests.losses.cases import REDUCERS
from tests.oracle import Found, Place, assert_near, graded, joined, normal, own, parity
from tests.refusals import refusals
from tests.slow_parameters import slow_parameters

ROWS, DIM, CLASSES = 60, 6, 7
SPLITS = {1: [60], 2: [23, 37], 3: [7, 40, 13]}
TILE_BYTES = ROWS * 8 * 9  # nine rows
Make = Callable[[], nn.Module]

LOSSES: dict[str, Any] = {
    "Contrastive": pml.ContrastiveLoss,
    "NTXent": pml.NTXentLoss,
    "SupCon": pml.SupConLoss,
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "Triplet": partial(pml.TripletMarginLoss, margin=0.2),
    "Triplet, smooth": partial(pml.TripletMarginLoss, margin=0.2, smooth_loss=True),
}
SIMILAR = {"Contrastive": {"pos_margin": 0.9, "neg_margin": 0.1}}  # margins that make sense of a similarity
DISTANCES: dict[str, Make] = {
    "CosineSimilarity": distances.CosineSimilarity,
    "cosine of the 1-norm": partial(distances.DotProductSimilarity, p=1),
    "DotProductSimilarity": partial(distances.DotProductSimilarity, normalize_embeddings=False),
    "DotProductSimilarity, cubed": partial(distances.DotProductSimilarity, power=3),
    "LpDistance": distances.LpDistance,
    "LpDistance, raw": partial(distances.LpDistance, normalize_embeddings=False),
    "LpDistance, squared": partial(distances.LpDistance, power=2),
    "LpDistance, 1": partial(distances.LpDistance, p=1),
    "SNRDistance": distances.SNRDistance,
}
LARGE = {"SupCon": 15.0, "NTXent": 15.0}  # losses are as large as that


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES - 1, (ROWS,), generator=generator)
    labels[17] = CLASSES - 1  # a class of one
    return {
        "embeddings": normal(ROWS, DIM, seed=generator),
        "views": normal(ROWS, DIM, seed=generator),
        "labels": labels,
        "other_labels": torch.randint(CLASSES - 1, (ROWS,), generator=generator),
    }


Give = Callable[[Tensor, dict[str, Tensor], Tensor, bool], dict[str, Any]]


def plain(leaf: Tensor, rows: dict[str, Tensor], views: Tensor, ranks: bool) -> dict[str, Any]:
    return {"embeddings": leaf, "labels": rows["labels"]}


def references(leaf: Tensor, rows: dict[str, Tensor], views: Tensor, ranks: bool) -> dict[str, Any]:
    return {**plain(leaf, rows, views, ranks), "ref_emb": views, "ref_labels": rows["other_labels"]}


def unlabelled_references(leaf: Tensor, rows: dict[str, Tensor], views: Tensor, ranks: bool) -> dict[str, Any]:
    """PML takes the anchors' labels, and a row is not its own positive."""
    return {**plain(leaf, rows, views, ranks), "ref_emb": views}


def mined(make: Make, with_views: bool, leaf: Tensor, rows: dict[str, Tensor], views: Tensor, ranks: bool) -> Any:
    given = (references if with_views else plain)(leaf, rows, views, ranks)
    miner = GlobalBatchMiner(make()) if ranks else make()
    return {**given, "indices_tuple": miner(**{n: t.detach() for n, t in given.items()})}


GIVEN: dict[str, Give] = {
    "": plain,
    "references": references,
    "references without labels": unlabelled_references,
    "mined pairs": partial(mined, partial(miners.PairMarginMiner, pos_margin=0.3, neg_margin=1.2), False),
    "mined pairs of references": partial(mined, miners.MultiSimilarityMiner, True),
    # few of them: PML compares each pair of the tuples with each other
    "mined triplets": partial(mined, miners.BatchHardMiner, False),
    "mined triplets of references": partial(mined, miners.BatchEasyHardMiner, True),
}


def cases() -> dict[str, tuple[Make, Give]]:
    """Each pair of a loss and what is given to it, a distance, a reducer; with a distance or a reducer what is given goes by turns.

    So each pair of the three is there, too: a distance makes a matrix, a reducer takes a column, and what is given chooses pairs of rows.
    """
    out: dict[str, tuple[Make, Give]] = {}
    for (name, loss), (given, give) in itertools.product(LOSSES.items(), GIVEN.items()):
        out[f"{name}, {given}"] = (loss, give)
    for (i, (name, loss)), (j, (kind, distance)) in _numbered(LOSSES, DISTANCES):
        margins = SIMILAR.get(name, {}) if "Similarity" in kind or "cosine" in kind else {}
        given = ("", "references")[(i + j) % 2]
        out[f"{name}, {kind}, {given}"] = (partial(_with, loss, distance=distance, **margins), GIVEN[given])
    for (i, (name, loss)), (j, (kind, reducer)) in _numbered(LOSSES, REDUCERS):
        weighs_a_column = name == "MultiSimilarity" and kind.startswith("ClassWeightedReducer")
        if (name.startswith("Triplet") and "PerAnchor" in kind) or weighs_a_column:
            continue  # PML cannot; PML multiplies a column by a row
        make = partial(_with, loss, reducer=partial(reducer, LARGE.get(name, 1.0)))
        # PML takes no mined pairs with a reducer per anchor; limits of single elements are counted in matrices, columns and named pairs
        kinds_of_rows = ["", "references"] if "PerAnchor" in kind else ["", "references", "mined pairs"]
        if name not in ("Contrastive", "Triplet") or not kind.startswith("Threshold"):
            kinds_of_rows = [kinds_of_rows[(i + j) % len(kinds_of_rows)]]
        for given in kinds_of_rows:
            out[f"{name}, {kind}, {given}"] = (make, GIVEN[given])
    for name, loss in LOSSES.items():
        for kind in (regularizers.LpRegularizer, regularizers.ZeroMeanRegularizer):
            make = partial(_with, loss, embedding_regularizer=kind, embedding_reg_weight=lambda: 0.3)
            out[f"{name}, {kind.__name__}"] = (make, plain)
            if kind is regularizers.ZeroMeanRegularizer:
                out[f"{name}, {kind.__name__}, references"] = (make, references)
    for temperature in (0.004, 0.5):  # the rows' sums of exponentials are far apart, or close
        raw = partial(distances.DotProductSimilarity, normalize_embeddings=False)
        for name in ("NTXent", "SupCon"):
            out[f"{name}, temperature {temperature}"] = (
                partial(_with, LOSSES[name], distance=raw, temperature=lambda t=temperature: t),
                plain,
            )
    out["MultiSimilarity, steep"] = (partial(pml.MultiSimilarityLoss, alpha=40, beta=3000, base=0.1), plain)
    for name, margins in {"no negative": (0, 0.1), "every pair": (0, 3)}.items():
        pair = partial(pml.ContrastiveLoss, *margins)  # distances of normalised rows lie between 0 and 2
        out[f"Contrastive, {name} counts"] = (pair, plain)
        out[f"Contrastive, {name} counts, mean"] = (partial(pair, reducer=reducers.MeanReducer()), plain)
    out["Signal to noise"] = (pml.SignalToNoiseRatioContrastiveLoss, plain)
    return out


def _numbered(*axes: dict[str, Any]) -> Any:
    """Each combination of numbered items."""
    return itertools.product(*(enumerate(axis.items()) for axis in axes))


def _with(loss: Any, **options: Callable[[], Any] | float) -> nn.Module:
    return loss(**{n: v() if callable(v) else v for n, v in options.items()})  # type: ignore[no-any-return]


CASES = cases()


def records(loss: nn.Module) -> dict[str, float]:
    """What PML recorded, of the distance and the reducers."""
    return {
        f"{path}.{name}": float(getattr(module, name))
        for path, module in loss.named_modules()
        if path.startswith(("distance", "reducer"))
        for name in getattr(module, "_record_these_stats", ())
    }


def recording(make: Make) -> nn.Module:
    """Make a loss that records: PML asks as it is made which names it has for that."""
    with mock.patch.object(common_functions, "COLLECT_STATS", True):
        return make().double()


def play(place: Place, name: str, tile_bytes: int | None, options: dict[str, Any] | None = None) -> Found:
    """Value, gradients and records; tiles that are compiled record nothing, for the host does not know their pairs."""
    (make, give), is_compiled = CASES[name], "compile_tiles" in (options or {})
    rows = {name: place.own(tensor).clone() for name, tensor in batch().items()}
    leaf, views = place.leaf("embeddings", batch()["embeddings"]), place.leaf("views", batch()["views"])
    loss = make().double() if is_compiled else recording(make)
    judge = loss
    if not place.alone:
        judge = GlobalBatchLoss(loss, mode="rows", tile_bytes=tile_bytes, **(options or {}))
        assert judge.evaluation.startswith("tiled")
    found = place.graded(judge(**give(leaf, rows, views, not place.alone)))
    assert not place.alone or found["rows embeddings"].any()
    if is_compiled:
        return found
    return found | {f"value of {key}": torch.tensor(number) for key, number in records(loss).items()}


def test_tiles_are_one_process(pool: RankPool) -> None:
    """Every case on three ranks, a third of them on two and another third on one.

    A tile does not know how many ranks there are: it has its rows and all columns, and three uneven ranks cut both at more places.
    """
    names = list(CASES)
    assert any("num_above_low" in key for name in names for key in play(Place([ROWS]), name, None))
    for world_size, some in ((1, names[::3]), (2, names[1::3]), (3, names)):
        parity(pool, play, SPLITS[world_size], TILE_BYTES, cases=some)


@pytest.mark.parametrize("tile_bytes", [TILE_BYTES, None])  # several tiles, or one that is kept for backward
def test_a_rank_without_rows_takes_part(pool: RankPool, tile_bytes: int | None) -> None:
    parity(pool, play, [0, 25, 35], tile_bytes, cases=[f"{name}, {given}" for name in LOSSES for given in GIVEN])


def test_tiles_on_an_accelerator_are_few() -> None:
    """65,536 rows against as many columns of float32 are 64 tiles of 256 MiB; the CPU's stay in its cache."""
    rows = 65_536
    on_device = rows_of_a_tile(rows * 4, rows, torch.device("cuda"), None)
    assert -(-rows // on_device) == 64
    assert rows_of_a_tile(rows * 4, rows, torch.device("cpu"), None) == 64
    # products of two towers, nearly square
    assert len(list(tiles_of(rows, rows, TOWER_BYTES // 4))) == 256
    # logits of as many classes
    loss = ClassShardedLoss(pml.ArcFaceLoss(4, 2))
    assert -(-rows // loss._chunk(rows, 4, torch.device("cuda"))) == 64


SYMMETRIC = [
    name
    for name, (make, give) in CASES.items()
    if give is plain and GlobalBatchLoss(make()).evaluation == "tiled, symmetric" and "Regularizer" not in name
]


BY_ROWS: dict[str, Make] = {
    "Angular": pml.AngularLoss,
    "Circle": pml.CircleLoss,
    "GeneralizedLiftedStructure": pml.GeneralizedLiftedStructureLoss,
    "Margin": partial(pml.MarginLoss, learn_beta=True, nu=0.1),
    "Margin, betas": partial(pml.MarginLoss, learn_beta=True, nu=0.1, num_classes=CLASSES),
    "Margin, PML's divisor": partial(pml.MarginLoss, reducer=reducers.DivisorReducer()),
    "Tuplet": pml.TupletMarginLoss,
    "Tuplet, sum": partial(pml.TupletMarginLoss, reducer=reducers.SumReducer()),
    "Circle, regularised": partial(pml.CircleLoss, embedding_regularizer=regularizers.ZeroMeanRegularizer()),
}


def in_parts(place: Place, case: tuple[str, str]) -> Found:
    """What some rows find, in parts of the rows."""
    name, given = case
    rows = {name: place.own(tensor).clone() for name, tensor in batch().items()}
    leaf, views = place.leaf("embeddings", batch()["embeddings"]), place.leaf("views", batch()["views"])
    loss = BY_ROWS[name]().double()
    judge = loss if place.alone else GlobalBatchLoss(loss, mode="rows", tile_bytes=60_000)
    assert place.alone or judge.evaluation == "row tiles"
    return place.graded(judge(**GIVEN[given](leaf, rows, views, not place.alone)), loss=loss)


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {1, 2}))
def test_any_row_loss_in_parts_is_one_process(pool: RankPool, world_size: int) -> None:
    cases = itertools.product(BY_ROWS, ("", "references"))
    parity(pool, in_parts, SPLITS[world_size], cases=cases, compare=assert_near)


def test_parts_are_ordinary_input_and_cover_all_rows() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 5, 6])  # rows without positives cannot stand alone
    loss, given = pml.CircleLoss(), {"embeddings": torch.randn(10, 3), "labels": labels}
    batches = CallBatches.of(loss, given)
    gathered = gather_batch("a loss", batches.tensors, {}, extra=SeedCounter().next())
    call = PMLCall(loss, facts_of(loss), given, batches, gathered, 0)
    parts = chunks_of(pml.CircleLoss(), call, 10 * 6 * 4)  # one row each, were it not for that
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(10))
    assert len(parts) > 1
    positives, negatives = call.local_pair_counts()
    assert all(positives[part].sum() > 1 and negatives[part].sum() > 1 for part in parts)


def few_rows_on_one_tile_size() -> float:
    """A tile size is a rank's own business, also where ``auto`` finds too few rows for tiles."""
    loss = GlobalBatchLoss(pml.SupConLoss(), tile_bytes=1000 if dist.get_rank() else None)
    value = loss(torch.linspace(0, 1, 60).view(10, 6).sin().requires_grad_(), torch.arange(10) % 3)
    value.backward()
    return value.item()


def test_ranks_may_use_tiles_of_different_size(pool: RankPool) -> None:
    assert len(set(pool.run(2, few_rows_on_one_tile_size))) == 1


def ask(rank: int, width: int = DIM, tuples: Any = None, **options: Any) -> None:
    GlobalBatchLoss(pml.SupConLoss(), mode="rows", **options)(torch.randn(4, width), torch.tensor([0, 0, 1, 1]), tuples)


PAIR = torch.tensor([0, 1]), torch.tensor([1, 0])
DISAGREE: dict[str, tuple[Any, ...]] = {
    "width": (lambda r: ask(r, DIM + r), ("rank 0", "rank 1", "6", "7"), "RankMismatchError"),
    # on one rank only
    "small tiles": (lambda r: ask(r, tile_bytes=31 if r else None), ("tile_bytes", "32 bytes", "31")),
    "a pair that is positive and negative": (
        lambda r: ask(r, tuples=(*PAIR, *(index + 2 * (1 - r) for index in PAIR))),
        "either positive or negative",
    ),
}
test_ranks_that_disagree_get_one_error = refusals(__name__, "DISAGREE")


def warm(place: Place) -> Found:
    """A temperature that someone made a parameter."""
    loss = pml.NTXentLoss().double()
    loss.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    judge = loss if place.alone else GlobalBatchLoss(loss)
    value = judge(place.own(batch()["embeddings"]).requires_grad_(), place.own(batch()["labels"]))
    assert place.alone or judge.evaluation == "row tiles"
    return place.graded(value, loss=loss)


def test_a_learnt_temperature_gets_its_gradient(pool: RankPool) -> None:
    parity(pool, warm, SPLITS[2])


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


TEN_TILES, ONE_TILE = ROWS * 8 * 6, ROWS * ROWS * 8


@pytest.mark.parametrize(
    ("make", "trained", "tile_bytes", "forward", "backward"),
    [
        # nine tiles of half of the matrix. Their gradients are of rows, and of columns but for the last square on the diagonal
        (pml.SupConLoss, True, TEN_TILES, 9, 9 + 9 + 8),
        (partial(pml.ContrastiveLoss, reducer=reducers.PerAnchorReducer()), True, TEN_TILES, 9, 9 + 9 + 8),
        # distances, gradients of positives where there are any, and of negatives where any passes its margin
        (pml.ContrastiveLoss, True, TEN_TILES, 28, 0),
        (pml.ContrastiveLoss, False, TEN_TILES, 9, 0),
        (pml.SupConLoss, True, ONE_TILE, 1, 1),
        (pml.NTXentLoss, True, ONE_TILE, 1, 1),
    ],
)
def test_what_forward_knows_is_not_computed_again(
    make: Make, trained: bool, tile_bytes: int, forward: int, backward: int
) -> None:
    rows = batch()["embeddings"].requires_grad_(trained)
    loss = GlobalBatchLoss(make(), mode="rows", tile_bytes=tile_bytes)
    products = []
    with Operators(lambda operator, *_: products.append(operator.overloadpacket in _PRODUCTS)):
        value = loss(rows, torch.arange(ROWS) // 4)
        assert sum(products) == forward
        if trained:
            value.backward()
        assert sum(products) == forward + backward


def test_triplets_need_no_cumulated_sum_of_floats() -> None:
    """CUDA has none under ``torch.use_deterministic_algorithms``."""
    rows = batch()["embeddings"].requires_grad_()
    with mock.patch.object(Tensor, "cumsum", side_effect=RuntimeError("not deterministic")):
        GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")(rows, torch.arange(ROWS) // 20).backward()
    assert rows.grad is not None


def odd_calls(loss: Any, part: slice, ones: int) -> dict[str, Any]:
    """What a batch may look like that no one thought of: value and gradient of each, of the loss itself or wrapped."""
    rows = normal(12, DIM, seed=3)[part]
    labels, apart = (torch.arange(12) // 3)[part], torch.arange(12)[part]
    strided, twice, none = rows.repeat_interleave(2, 1).requires_grad_(), rows.clone().requires_grad_(), rows.clone()
    two = loss(strided[:, ::2], labels) + 3 * loss(strided[:, 1::2] * 2, labels.int())  # two calls before one backward
    value = loss(twice, labels)
    value.backward(retain_graph=True)
    alike = torch.ones(ones, DIM, dtype=torch.float64).requires_grad_()  # rows that coincide
    with torch.no_grad():
        two_classes = loss(rows, (labels > 1).long())
    return {
        "two": graded(two, rows=strided),
        "twice": graded(value, rows=twice),
        "alike": graded(loss(alike, torch.tensor([0, 0, 1, 1] * (ones // 4))), rows=alike),
        "none": graded(loss(none.requires_grad_(), apart), rows=none),  # no positive anywhere
        "two classes": {"value": two_classes},
        "copied": {"value": pickle.loads(pickle.dumps(loss))(rows, labels).detach()},
    }


def odd_calls_on_a_rank() -> dict[str, Any]:
    return {n: odd_calls(GlobalBatchLoss(make().double(), mode="rows"), own([4, 8]), 4) for n, make in LOSSES.items()}


def test_odd_batches(pool: RankPool) -> None:
    results = pool.run(2, odd_calls_on_a_rank)
    for name, make in LOSSES.items():
        for call, truth in odd_calls(make().double(), slice(None), 8).items():
            ours = joined([result[name][call] for result in results], "rows")
            for key, expected in truth.items():
                torch.testing.assert_close(ours[key], expected, rtol=1e-9, atol=1e-9 if call == "alike" else 1e-12)


@each_rank(2)
def test_half_precision() -> None:
    rows = torch.randn(12, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    labels, part = torch.arange(12) // 3, own([4, 8])
    for make in LOSSES.values():
        leaf = rows[part].clone().requires_grad_()
        low = GlobalBatchLoss(make().double(), mode="rows")(leaf, labels[part])
        low.backward()
        assert (low.dtype, leaf.grad.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(low.detach(), make()(rows.float(), labels), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", [1, 2])
def test_rows_too_short_to_be_normalised_have_the_gradient_of_torch(p: int) -> None:
    rows = normal(4, 3, seed=0)
    rows *= torch.tensor([[1.0], [0.0], [1e-13], [1e-11]], dtype=torch.float64)
    distance, upstream = tile_distance(distances.LpDistance(p=p), 30), torch.linspace(-1, 2, 12).double().view(4, 3)
    prepared = distance.prepare(rows)
    leaf = rows.clone().requires_grad_()
    unit = torch.nn.functional.normalize(leaf, p=p, dim=1)
    unit.backward(upstream)
    torch.testing.assert_close(prepared.rows, unit.detach(), rtol=0, atol=0)
    torch.testing.assert_close(distance.prepare_vjp(rows, prepared, upstream), leaf.grad, rtol=1e-12, atol=0)


def test_entries_that_are_no_positives_may_be_as_far_as_they_like() -> None:
    """A row of nearly equal numbers has ratios of noise to signal of 1e5 with others. Exponentials of their multiples are infinite."""
    embeddings = normal(6, 2, seed=0)
    embeddings[0, 1] = embeddings[0, 0] + 1e-2
    embeddings.requires_grad_()
    labels = torch.arange(6) % 3
    loss = pml.MultiSimilarityLoss(distance=distances.SNRDistance())
    values = [loss(embeddings, labels), GlobalBatchLoss(loss, mode="rows")(embeddings, labels)]
    expected, got = (torch.autograd.grad(value, embeddings)[0] for value in values)
    torch.testing.assert_close(values[1], values[0], rtol=1e-9, atol=0)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
