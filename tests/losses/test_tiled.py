"""Losses in tiles: value, gradient and recorded statistics of one process, on batches that take many tiles.

The one process calls pytorch-metric-learning (PML) itself. Rows are leaves: after the mean over ranks their gradients are the
slices of the one process's.
"""

from __future__ import annotations

import functools
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
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses import ClassShardedLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.losses.evaluations import chunks_of
from lightning_ddp_losses.losses.gathered_call import PMLCall, SeedCounter
from lightning_ddp_losses.losses.products import TOWER_BYTES
from lightning_ddp_losses.losses.tiled.evaluator import rows_of_a_tile
from lightning_ddp_losses.losses.tiled.tiles import tile_distance
from lightning_ddp_losses.losses.two_towers import tiles_of
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
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
REDUCERS: dict[str, Callable[[float], nn.Module]] = {
    "MeanReducer": lambda _: reducers.MeanReducer(),
    "SumReducer": lambda _: reducers.SumReducer(),
    "AvgNonZeroReducer": lambda _: reducers.AvgNonZeroReducer(),
    "ThresholdReducer, low": lambda size: reducers.ThresholdReducer(low=0.3 * size),
    "ThresholdReducer, high": lambda size: reducers.ThresholdReducer(high=1.0 * size),
    "ThresholdReducer, both": lambda size: reducers.ThresholdReducer(low=0.1 * size, high=1.2 * size),
    "PerAnchorReducer": lambda _: reducers.PerAnchorReducer(),
    "PerAnchorReducer, AvgNonZero": lambda _: reducers.PerAnchorReducer(reducers.AvgNonZeroReducer()),
    "PerAnchorReducer, Threshold": lambda size: reducers.PerAnchorReducer(
        reducers.ThresholdReducer(low=0.1 * size, high=1.5 * size)
    ),
    "ClassWeightedReducer": lambda _: reducers.ClassWeightedReducer(torch.linspace(0.1, 2, CLASSES)),
    "ClassWeightedReducer, below 0": lambda _: reducers.ClassWeightedReducer(torch.linspace(-1, 2, CLASSES)),
    "MultipleReducers": lambda _: reducers.MultipleReducers(
        {"pos_loss": reducers.SumReducer(), "neg_loss": reducers.ThresholdReducer(low=0.2)}
    ),
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(CLASSES - 1, (ROWS,), generator=generator)
    labels[17] = CLASSES - 1  # a class of one
    return {
        "embeddings": torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
        "views": torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64),
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


def alone(make: Make, give: Give) -> dict[str, Any]:
    rows, loss = batch(), recording(make)
    leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
    value = loss(**give(leaf, rows, views, False))
    value.backward()
    return {"value": value.detach(), "rows": leaf.grad, "views": views.grad, "records": records(loss)}


def on_ranks(
    names: list[str], tile_bytes: int | None, options: dict[str, Any] | None = None, sizes: list[int] | None = None
) -> dict[str, Any]:
    sizes, rank = sizes or SPLITS[dist.get_world_size()], dist.get_rank()
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = {}
    for name in names:
        make, give = CASES[name]
        rows = {n: t[part].clone() for n, t in batch().items()}
        leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
        # tiles that are compiled record nothing: the host does not know their pairs
        loss = make().double() if "compile_tiles" in (options or {}) else recording(make)
        wrapped = GlobalBatchLoss(loss, mode="rows", tile_bytes=tile_bytes, **(options or {}))
        assert wrapped.evaluation.startswith("tiled")
        value = wrapped(**give(leaf, rows, views, True))
        value.backward()
        found[name] = {"value": value.detach(), "rows": leaf.grad, "views": views.grad, "records": records(loss)}
    return found


def compare(results: list[dict[str, Any]], truth: dict[str, Any], statistics: bool = True) -> None:
    assert len({float(r["value"]) for r in results}) == 1
    ours = {"value": results[0]["value"], "rows": torch.cat([r["rows"] for r in results]) / len(results)}
    wanted = {"value": truth["value"], "rows": truth["rows"]}
    assert truth["rows"].norm() > 0
    if truth["views"] is not None:
        ours["views"], wanted["views"] = torch.cat([r["views"] for r in results]) / len(results), truth["views"]
    assert_close(ours, wanted)
    for result in results if statistics else []:
        assert result["records"] == pytest.approx(truth["records"], rel=1e-9)


def judged(name: str, results: list[dict[str, Any]], truth: dict[str, Any], *, statistics: bool = True) -> str:
    """What is wrong, in words."""
    try:
        compare([result[name] for result in results], truth, statistics)
    except AssertionError as error:
        return f"{name}: {error}"
    return ""


@functools.cache
def truth_of(name: str) -> dict[str, Any]:
    return alone(*CASES[name])


def test_tiles_are_one_process(pool: RankPool) -> None:
    """Every case on three ranks, a third of them on two and another third on one.

    A tile does not know how many ranks there are: it has its rows and all columns, and three uneven ranks cut both at more places.
    """
    names = list(CASES)
    assert any("num_above_low" in record for name in names for record in truth_of(name)["records"])
    problems = []
    for world_size, some in ((1, names[::3]), (2, names[1::3]), (3, names)):
        results = pool.run(world_size, on_ranks, some, TILE_BYTES)
        problems += [
            f"{world_size} ranks, {found}" for name in some if (found := judged(name, results, truth_of(name)))
        ]
    assert not problems, f"{len(problems)} of {len(CASES)}\n" + "\n".join(problems)


@pytest.mark.parametrize("tile_bytes", [TILE_BYTES, None])  # several tiles, or one that is kept for backward
def test_a_rank_without_rows_takes_part(pool: RankPool, tile_bytes: int | None) -> None:
    names = [f"{name}, {given}" for name in LOSSES for given in GIVEN]
    results = pool.run(3, on_ranks, names, tile_bytes, None, [0, 25, 35])
    problems = [problem for name in names if (problem := judged(name, results, truth_of(name)))]
    assert not problems, "\n".join(problems)


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


def in_parts(names: list[str], tile_bytes: int) -> dict[str, Any]:
    sizes, rank = SPLITS[dist.get_world_size()], dist.get_rank()
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = {}
    for name in names:
        for given in ("", "references"):
            rows = {n: t[part].clone() for n, t in batch().items()}
            leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
            loss = BY_ROWS[name]().double()
            wrapped = GlobalBatchLoss(loss, mode="rows", tile_bytes=tile_bytes)
            assert wrapped.evaluation == "row tiles"
            value = wrapped(**GIVEN[given](leaf, rows, views, True))
            value.backward()
            own = {n: p.grad for n, p in loss.named_parameters()}
            found[f"{name}, {given}"] = {"value": value.detach(), "rows": leaf.grad, "views": views.grad, **own}
    return found


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {1, 2}))
def test_any_row_loss_in_parts_is_one_process(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, in_parts, list(BY_ROWS), 60_000)
    for name, make in BY_ROWS.items():
        for given in ("", "references"):
            rows, loss = batch(), make().double()
            leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
            value = loss(**GIVEN[given](leaf, rows, views, False))
            value.backward()
            truth = {"value": value.detach(), "rows": leaf.grad, "views": views.grad}
            found = [result[f"{name}, {given}"] for result in results]
            compare(found, truth, statistics=False)
            for parameter, tensor in loss.named_parameters():
                mean = torch.stack([result[parameter] for result in found]).mean(0)
                torch.testing.assert_close(mean, tensor.grad, rtol=1e-9, atol=1e-12)


def test_parts_are_ordinary_input_and_cover_all_rows() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2, 3, 4, 5, 5, 6])  # rows without positives cannot stand alone
    call = PMLCall(
        pml.CircleLoss(),
        {"embeddings": torch.randn(10, 3), "labels": labels},
        lambda tensors: gather_batch("a loss", tensors, {}, extra=SeedCounter().next()),
        0,
    )
    parts = chunks_of(pml.CircleLoss(), call, 10 * 6 * 4)  # one row each, were it not for that
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(10))
    assert len(parts) > 1
    positives, negatives = call.local_pair_counts()
    assert all(positives[part].sum() > 1 and negatives[part].sum() > 1 for part in parts)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tile_bytes": 0}, "tile_bytes"),
    ({"tile_bytes": -4}, "tile_bytes"),
    ({"tile_bytes": 1.5}, "tile_bytes"),
    ({"gather": "some"}, "gather"),
    ({"gather": "ring"}, "expected 'all', got 'ring'"),
    ({"gather": "ring", "mode": "rows"}, "`tile_bytes` bounds the distances"),
]


@pytest.mark.parametrize(("options", "word"), REFUSED)
def test_tiles_and_ways_to_gather_that_cannot_be_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        GlobalBatchLoss(**{"loss": pml.SupConLoss(), **options})


def badly(kind: str) -> None:
    rank = dist.get_rank()
    leaf, labels = torch.randn(10, DIM + rank * (kind == "width")), torch.arange(10) % 3
    if kind == "width":
        GlobalBatchLoss(pml.SupConLoss(), mode="rows")(leaf, labels)
    else:  # on one rank only
        GlobalBatchLoss(pml.SupConLoss(), mode="rows", tile_bytes=79 if rank == 1 else None)(leaf, labels)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("width", ("rank 0", "rank 1", "6", "7")),
        ("small", ("tile_bytes", "80 bytes", "79")),
    ],
)
def test_ranks_that_disagree_get_one_error(pool: RankPool, kind: str, words: tuple[str, ...]) -> None:
    errors = pool.errors(2, badly, kind)
    assert len({error.message.split("(rank")[0] for error in errors}) == 1
    for word in words:
        assert word in errors[0].message


def few_rows_on_one_tile_size() -> float:
    """A tile size is a rank's own business, also where ``auto`` finds too few rows for tiles."""
    loss = GlobalBatchLoss(pml.SupConLoss(), tile_bytes=1000 if dist.get_rank() else None)
    value = loss(torch.linspace(0, 1, 60).view(10, 6).sin().requires_grad_(), torch.arange(10) % 3)
    value.backward()
    return value.item()


def test_ranks_may_use_tiles_of_different_size(pool: RankPool) -> None:
    assert len(set(pool.run(2, few_rows_on_one_tile_size))) == 1


def contradicting() -> None:
    pair = torch.tensor([0, 1]), torch.tensor([1, 0])
    leaf = torch.randn(4, DIM)
    loss = GlobalBatchLoss(pml.SupConLoss(), mode="rows")
    loss(leaf, torch.tensor([0, 0, 1, 1]), (*pair, *pair) if dist.get_rank() else (*pair, pair[0] + 2, pair[1] + 2))


def test_a_pair_that_is_positive_and_negative_is_an_error_everywhere(pool: RankPool) -> None:
    for error in pool.errors(2, contradicting):
        assert "either positive or negative" in error.message


def warm() -> dict[str, Any]:
    """A temperature that someone made a parameter."""
    part = slice(0, 23) if dist.get_rank() == 0 else slice(23, 60)
    loss = pml.NTXentLoss().double()
    loss.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    wrapped = GlobalBatchLoss(loss)
    leaf = batch()["embeddings"][part].clone().requires_grad_()
    value = wrapped(leaf, batch()["labels"][part])
    value.backward()
    return {"evaluation": wrapped.evaluation, "value": value.detach(), "grad": loss.temperature.grad}


def test_a_learnt_temperature_gets_its_gradient(pool: RankPool) -> None:
    first, second = pool.run(2, warm)
    loss = pml.NTXentLoss().double()
    loss.temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    value = loss(batch()["embeddings"], batch()["labels"])
    value.backward()
    assert first["evaluation"] == "row tiles"
    ours = {"value": first["value"], "grad": (first["grad"] + second["grad"]) / 2}
    assert_close(ours, {"value": value.detach(), "grad": loss.temperature.grad})


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket in _PRODUCTS
        return func(*args, **(kwargs or {}))


TEN_TILES, ONE_TILE = ROWS * 8 * 6, ROWS * ROWS * 8


@pytest.mark.parametrize(
    ("make", "trained", "tile_bytes", "forward", "backward"),
    [
        (pml.ContrastiveLoss, True, TEN_TILES, 30, 0),  # distances, gradients of positives and of negatives
        (pml.ContrastiveLoss, False, TEN_TILES, 10, 0),
        (partial(pml.ContrastiveLoss, reducer=reducers.PerAnchorReducer()), True, TEN_TILES, 10, 20),
        (pml.SupConLoss, True, TEN_TILES, 10, 20),
        (pml.SupConLoss, True, ONE_TILE, 1, 1),
        (pml.NTXentLoss, True, ONE_TILE, 1, 1),
    ],
)
def test_what_forward_knows_is_not_computed_again(
    make: Make, trained: bool, tile_bytes: int, forward: int, backward: int
) -> None:
    rows = batch()["embeddings"].requires_grad_(trained)
    loss = GlobalBatchLoss(make(), mode="rows", tile_bytes=tile_bytes)
    with Products() as products:
        value = loss(rows, torch.arange(ROWS) // 4)
        assert products.number == forward
        if trained:
            value.backward()
        assert products.number == forward + backward


def test_triplets_need_no_cumulated_sum_of_floats() -> None:
    """CUDA has none under ``torch.use_deterministic_algorithms``."""
    rows = batch()["embeddings"].requires_grad_()
    with mock.patch.object(Tensor, "cumsum", side_effect=RuntimeError("not deterministic")):
        GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")(rows, torch.arange(ROWS) // 20).backward()
    assert rows.grad is not None


def hard_inputs() -> dict[str, Any]:
    """What a batch may look like that no one thought of."""
    rank, found = dist.get_rank(), {}
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, DIM, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) // 3
    own = slice(0, 4) if rank == 0 else slice(4, 12)
    for name, make in LOSSES.items():
        wrapped = GlobalBatchLoss(make().double(), mode="rows")
        strided = rows.repeat_interleave(2, 1)[own].requires_grad_()
        first, second = wrapped(strided[:, ::2], labels[own]), wrapped(strided[:, 1::2] * 2, labels[own].int())
        (first + 3 * second).backward()  # two calls before one backward
        single = rows[own].float().bfloat16().requires_grad_()
        low = wrapped(single, labels[own])
        low.backward()
        twice = rows[own].clone().requires_grad_()
        value = wrapped(twice, labels[own])
        value.backward(retain_graph=True)
        value.backward()
        alike = torch.ones(4, DIM, dtype=torch.float64).requires_grad_()
        same = wrapped(alike, torch.tensor([0, 0, 1, 1]))  # rows that coincide
        same.backward()
        none = rows[own].clone().requires_grad_()
        wrapped(none, torch.arange(12)[own]).backward()  # no positive anywhere
        with torch.no_grad():
            two_classes = wrapped(rows[own], (labels > 1).long()[own])
        copied = pickle.loads(pickle.dumps(wrapped))
        found[name] = {
            "two": (first + 3 * second).detach(),
            "strided": strided.grad,
            "low": (low.dtype, single.grad.dtype, low.detach().double()),
            "twice": twice.grad,
            "alike": (same.detach(), alike.grad),
            "none": none.grad,
            "copied": copied(rows[own], labels[own]).detach(),
            "two classes": two_classes,
        }
    return found


def test_odd_batches(pool: RankPool) -> None:
    results = pool.run(2, hard_inputs)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(12, DIM, generator=generator, dtype=torch.float64)
    labels = torch.arange(12) // 3
    for name, make in LOSSES.items():
        loss, found = make().double(), [result[name] for result in results]

        def mean(key: str, found: list[Any] = found) -> Tensor:
            return torch.cat([f[key] for f in found]) / 2

        strided = rows.repeat_interleave(2, 1).requires_grad_()
        two = loss(strided[:, ::2], labels) + 3 * loss(strided[:, 1::2] * 2, labels)
        two.backward()
        twice = rows.clone().requires_grad_()
        value = loss(twice, labels)
        (2 * value).backward()
        assert_close({"two": found[0]["two"], "rows": mean("strided")}, {"two": two.detach(), "rows": strided.grad})
        assert_close({"twice": mean("twice")}, {"twice": twice.grad})
        assert_close({"copied": found[1]["copied"]}, {"copied": value.detach()})
        assert_close({"two": found[0]["two classes"]}, {"two": loss(rows, (labels > 1).long())})
        kind, grad_kind, low = found[0]["low"]
        assert (kind, grad_kind) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(low, make()(rows.float().bfloat16().float(), labels).double(), rtol=1e-5, atol=1e-6)
        alike = torch.ones(8, DIM, dtype=torch.float64).requires_grad_()
        same = loss(alike, torch.tensor([0, 0, 1, 1] * 2))
        same.backward()
        torch.testing.assert_close(found[0]["alike"][0], same.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.cat([f["alike"][1] for f in found]) / 2, alike.grad, rtol=1e-9, atol=1e-9)
        none = rows.clone().requires_grad_()
        loss(none, torch.arange(12)).backward()
        torch.testing.assert_close(mean("none"), none.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [1, 2])
def test_rows_too_short_to_be_normalised_have_the_gradient_of_torch(p: int) -> None:
    rows = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([[1.0], [0.0], [1e-13], [1e-11]], dtype=torch.float64)
    distance, upstream = tile_distance(distances.LpDistance(p=p), 30), torch.linspace(-1, 2, 12).double().view(4, 3)
    prepared = distance.prepare(rows)
    leaf = rows.clone().requires_grad_()
    unit = torch.nn.functional.normalize(leaf, p=p, dim=1)
    unit.backward(upstream)
    torch.testing.assert_close(prepared.rows, unit.detach(), rtol=0, atol=0)
    assert leaf.grad is not None
    torch.testing.assert_close(distance.prepare_vjp(rows, prepared, upstream), leaf.grad, rtol=1e-12, atol=0)
