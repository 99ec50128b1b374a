"""Losses in tiles: value, gradient and recorded statistics of one process, on batches that take many tiles.

The one process calls pytorch-metric-learning (PML) itself. Rows are gathered as leaves: after the mean over ranks their gradients are the slices of
the one process's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss, GlobalBatchMiner
from tests.oracle import assert_close
from tests.rank_pool import RankPool

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
LARGE = {"SupCon": 4.0, "NTXent": 4.0}  # losses are as large as that
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
    out: dict[str, tuple[Make, Give]] = {}
    for (name, loss), (given, give) in itertools.product(LOSSES.items(), GIVEN.items()):
        out[f"{name}, {given}"] = (loss, give)
    for (name, loss), (kind, distance) in itertools.product(LOSSES.items(), DISTANCES.items()):
        margins = SIMILAR.get(name, {}) if "Similarity" in kind or "cosine" in kind else {}
        for given in ("", "references"):
            out[f"{name}, {kind}, {given}"] = (partial(_with, loss, distance=distance, **margins), GIVEN[given])
    for (name, loss), (kind, reducer) in itertools.product(LOSSES.items(), REDUCERS.items()):
        if (name.startswith("Triplet") and "PerAnchor" in kind) or (name, kind) == (
            "MultiSimilarity",
            "ClassWeightedReducer",
        ):
            continue  # PML cannot; PML multiplies a column by a row
        for given in ("", "references", "mined pairs"):
            if not (given == "mined pairs" and "PerAnchor" in kind):
                out[f"{name}, {kind}, {given}"] = (partial(_with, loss, reducer=partial(reducer, LARGE.get(name, 1.0))), GIVEN[given])
    for name, loss in LOSSES.items():
        for kind in (regularizers.LpRegularizer, regularizers.ZeroMeanRegularizer):
            make = partial(_with, loss, embedding_regularizer=kind, embedding_reg_weight=lambda: 0.3)
            out[f"{name}, {kind.__name__}"] = (make, plain)
            out[f"{name}, {kind.__name__}, references"] = (make, references)
    for temperature in (0.004, 0.5):  # the rows' sums of exponentials are far apart, or close
        raw = partial(distances.DotProductSimilarity, normalize_embeddings=False)
        for name in ("NTXent", "SupCon"):
            out[f"{name}, temperature {temperature}"] = (
                partial(_with, LOSSES[name], distance=raw, temperature=lambda t=temperature: t),
                plain,
            )
    out["MultiSimilarity, steep"] = (partial(pml.MultiSimilarityLoss, alpha=40, beta=3000, base=0.1), plain)
    out["Signal to noise"] = (pml.SignalToNoiseRatioContrastiveLoss, plain)
    return out


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


def alone(make: Make, give: Give) -> dict[str, Any]:
    rows, loss = batch(), make().double()
    for module in loss.modules():
        module.collect_stats = True
    leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
    value = loss(**give(leaf, rows, views, False))
    value.backward()
    return {"value": value.detach(), "rows": leaf.grad, "views": views.grad, "records": records(loss)}


def on_ranks(names: list[str], tile_bytes: int | None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    sizes, rank = SPLITS[dist.get_world_size()], dist.get_rank()
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    found = {}
    for name in names:
        make, give = CASES[name]
        rows = {n: t[part].clone() for n, t in batch().items()}
        leaf, views = rows["embeddings"].requires_grad_(), rows["views"].requires_grad_()
        loss = make().double()
        for module in loss.modules():
            module.collect_stats = True
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tiles_are_one_process(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, on_ranks, list(CASES), TILE_BYTES)
    problems = []
    for name, (make, give) in CASES.items():
        try:
            compare([result[name] for result in results], alone(make, give))
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    assert not problems, f"{len(problems)} of {len(CASES)}\n" + "\n".join(problems)
