"""Gradients of documented uses against one process, float64: `GlobalBatchLoss` beside PML's own `DistributedLossWrapper`.

The uses are the losses of pytorch-metric-learning (PML), and its reducers, miners, distances, regularisers and two views on some of
them. For each, all ranks run on slices of ONE global batch, and the mean over ranks of each gradient (what DDP leaves) is compared with
the loss itself on the whole batch in one process: *exact* is 1e-8 relative for every parameter, *wrong scale* has the right direction,
*wrong direction* has not.

PML's wrapper is given what it asks for: two views get labels that are unique over the ranks, miners are its own
``DistributedMinerWrapper``, and random losses the same seed on every rank; a loss or miner that draws is counted apart where it
is not exact, since ranks that draw by themselves cannot agree. What kills its process is started anew.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor, nn

from benchmarks.records import Row
from lightning_ddp_losses import GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankFailure, RankPool

__all__ = ["main"]

EXACT = 1e-8
ROWS, FEATURES, DIM, CLASSES, SEED = 24, 5, 4, 4, 7
SPLITS = {2: {"even": [12, 12], "uneven": [9, 15]}, 3: {"even": [8, 8, 8], "uneven": [5, 12, 7]}}
SPLIT_NAMES = ("even", "uneven")

# ---------------------------------------------------------------------- uses


@dataclass(frozen=True)
class Use:
    """One loss and how it is called.

    Attributes:
        make: Makes the loss.
        miner: Makes a miner whose tuples the loss gets. None without one.
        has_views: Whether it compares two views of each row, without labels.
        draws: Whether the loss draws random numbers.
        miner_draws: Whether the miner does.
    """

    make: Callable[[], nn.Module]
    miner: Callable[[], Any] | None = None
    has_views: bool = False
    draws: bool = False
    miner_draws: bool = False


def uses() -> dict[str, Use]:
    """Return all uses by name."""
    classes = {"num_classes": CLASSES, "embedding_size": DIM}
    with_classes: dict[str, dict[str, Any]] = {
        **dict.fromkeys(("ArcFaceLoss", "CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss"), classes),
        **dict.fromkeys(("ProxyAnchorLoss", "ProxyNCALoss", "SoftTripleLoss", "SphereFaceLoss"), classes),
        "SubCenterArcFaceLoss": classes,
        "P2SGradLoss": {"descriptors_dim": DIM, "num_classes": CLASSES},
    }
    with_options: dict[str, dict[str, Any]] = {
        "FastAPLoss": {"num_bins": 5},
        "HistogramLoss": {"n_bins": 10},
        "RankedListLoss": {"margin": 1, "Tn": 1},
    }
    rows = [
        "AngularLoss",
        "CircleLoss",
        "ContrastiveLoss",
        "GeneralizedLiftedStructureLoss",
        "MarginLoss",
        "NTXentLoss",
    ]
    rows += ["MultiSimilarityLoss", "SignalToNoiseRatioContrastiveLoss", "SupConLoss", "TripletMarginLoss"]
    rows += ["TupletMarginLoss"]
    whole = ["DynamicSoftMarginLoss", "InstanceLoss", "IntraPairVarianceLoss", "LiftedStructureLoss", "NCALoss"]
    whole += ["NPairsLoss", "PNPLoss", "SmoothAPLoss", "ThresholdConsistentMarginLoss"]
    plain: dict[str, dict[str, Any]] = {name: {} for name in [*rows, *whole]}
    options = {**plain, **with_classes, **with_options}
    found = {name: Use(partial(getattr(pml, name), **given)) for name, given in options.items()}
    # 1. options of losses
    found["MarginLoss, learnt betas"] = Use(partial(pml.MarginLoss, learn_beta=True, num_classes=CLASSES))
    found["TripletMarginLoss, swap"] = Use(partial(pml.TripletMarginLoss, swap=True))
    found["TripletMarginLoss, smooth"] = Use(partial(pml.TripletMarginLoss, smooth_loss=True))
    for name in ("MarginLoss", "TripletMarginLoss"):
        few = partial(getattr(pml, name), triplets_per_anchor=2)
        found[f"{name}, 2 triplets per anchor"] = Use(few, draws=True)
    found["CrossBatchMemory"] = Use(partial(_memory, 30))
    # 2. reducers, distances, regularisers
    some = ("ArcFaceLoss", "ContrastiveLoss", "MultiSimilarityLoss", "TripletMarginLoss")
    kinds: list[Callable[[], Any]] = [reducers.MeanReducer, reducers.AvgNonZeroReducer]
    kinds += [
        partial(reducers.ThresholdReducer, low=0.05),
        partial(reducers.ClassWeightedReducer, torch.arange(1.0, 5.0)),
    ]
    for name in some:
        for kind in kinds:
            title = getattr(kind, "func", kind).__name__
            found[f"{name}, {title}"] = Use(partial(_with, name, options[name], reducer=kind))
    for name in ("ContrastiveLoss", "NTXentLoss", "TripletMarginLoss"):
        for kind in (distances.CosineSimilarity, distances.LpDistance, distances.SNRDistance):
            found[f"{name}, {kind.__name__}"] = Use(partial(_with, name, {}, distance=kind))
    for kind in (regularizers.LpRegularizer, regularizers.ZeroMeanRegularizer, regularizers.CenterInvariantRegularizer):
        where = "weight" if kind is regularizers.CenterInvariantRegularizer else "embedding"
        make = partial(_with, "ArcFaceLoss", classes, **{f"{where}_regularizer": kind})
        found[f"ArcFaceLoss, {kind.__name__}"] = Use(make)
    # 3. miners, two views
    mining = ["AngularMiner", "BatchEasyHardMiner", "BatchHardMiner", "DistanceWeightedMiner", "HDCMiner"]
    mining += ["MultiSimilarityMiner", "PairMarginMiner", "TripletMarginMiner"]
    for name in mining:
        for loss in (pml.ContrastiveLoss, pml.TripletMarginLoss, pml.MultiSimilarityLoss):
            draws = name == "DistanceWeightedMiner"
            found[f"{name} for {loss.__name__}"] = Use(loss, getattr(miners, name), miner_draws=draws)
    for name in rows:
        found[f"{name}, two views"] = Use(getattr(pml, name), has_views=True)
    return found


def _with(name: str, options: Mapping[str, Any], **parts: Callable[[], Any]) -> nn.Module:
    loss: nn.Module = getattr(pml, name)(**options, **{part: make() for part, make in parts.items()})
    return loss


def _memory(size: int) -> nn.Module:
    return pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=size)  # type: ignore[no-any-return]


USES = uses()

# ---------------------------------------------------------------------- one process, ours, theirs

Found = dict[str, Tensor]


def _encoder_and_loss(use: Use) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    encoder = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, DIM))
    return encoder.double(), use.make().double()


def _rows(sizes: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return features, a second view and labels of the global batch, or of this rank's slice, and where it begins."""
    generator = torch.Generator().manual_seed(11)
    features, views = torch.randn(2, ROWS, FEATURES, generator=generator, dtype=torch.float64).unbind()
    labels = (torch.arange(ROWS) % CLASSES)[torch.randperm(ROWS, generator=generator)]
    start, stop = 0, ROWS
    if sizes is not None:
        start = sum(sizes[: dist.get_rank()])
        stop = start + sizes[dist.get_rank()]
    return features[start:stop], views[start:stop], labels[start:stop], start


def _graded(value: Tensor, encoder: nn.Module, loss: nn.Module) -> Found:
    value.backward()
    parameters = nn.ModuleDict({"encoder": encoder, "loss": loss}).named_parameters()
    return {"value": value.detach()} | {name: p.grad for name, p in parameters if p.grad is not None}


def _unique_views(encoder: nn.Module, sizes: Sequence[int] | None) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Return two views with one label for each row of the global batch."""
    features, views, _, start = _rows(sizes)
    labels = torch.arange(start, start + len(features))
    return (encoder(features), labels), {"ref_emb": encoder(views), "ref_labels": labels.clone()}


def alone(use: Use) -> Found:
    """Return value and gradients in one process. A loss that draws is ours in a world of one."""
    encoder, loss = _encoder_and_loss(use)
    features, _, labels, _ = _rows()
    torch.manual_seed(SEED)
    if use.has_views:
        given, named = _unique_views(encoder, None)
        return _graded(loss(*given, **named), encoder, loss)
    rows = encoder(features)
    judged = GlobalBatchLoss(loss) if use.draws else loss
    tuples = []
    if use.miner is not None:
        tuples.append(GlobalBatchMiner(use.miner())(rows, labels))
    return _graded(judged(rows, labels, *tuples), encoder, loss)


def measure_ours(name: str, split: str) -> dict[str, Found]:
    """Return value and gradients of this rank in each exact mode."""
    use, sizes = USES[name], SPLITS[dist.get_world_size()][split]
    found = {}
    for mode in GlobalBatchLoss(use.make()).exact_modes():
        encoder, loss = _encoder_and_loss(use)
        wrapped = GlobalBatchLoss(loss, mode=mode)
        features, views, labels, _ = _rows(sizes)
        torch.manual_seed(SEED + dist.get_rank())
        rows = encoder(features)
        tuples = []
        if use.miner is not None:
            torch.manual_seed(SEED)
            tuples.append(GlobalBatchMiner(use.miner())(rows, labels))
        value = wrapped(rows, ref_emb=encoder(views)) if use.has_views else wrapped(rows, labels, *tuples)
        found[mode] = _graded(value, encoder, loss)
    return found


def measure_theirs(name: str, split: str) -> Found:
    """Return gradients of this rank under PML's wrapper."""
    use, sizes = USES[name], SPLITS[dist.get_world_size()][split]
    encoder, loss = _encoder_and_loss(use)
    wrapped = DistributedLossWrapper(loss)
    torch.manual_seed(SEED)
    if use.has_views:
        given, named = _unique_views(encoder, sizes)
        value = wrapped(*given, **named)
    else:
        features, _, labels, _ = _rows(sizes)
        rows, tuples = encoder(features), []
        if use.miner is not None:
            tuples.append(DistributedMinerWrapper(use.miner())(rows, labels))
        value = wrapped(rows, labels, *tuples)
    # each rank returns W times its loss; only gradients are judged
    return _graded(value, encoder, loss) | {"value": torch.zeros(())}


def joined(ranks: Sequence[Found]) -> Found:
    """Return the means over ranks. Values must be equal, and gradients of the same parameters."""
    assert len({float(rank["value"]) for rank in ranks}) == 1, "ranks return different values"
    assert all(rank.keys() == ranks[0].keys() for rank in ranks), "gradients on some ranks only"
    return {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in ranks[0]}


def judge(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> str:
    """The worst of all parameters, in words."""
    floor = 1e-12 * max(float(t.norm()) for name, t in truth.items() if name != "value")
    worst, ratios = 0.0, []
    for name, right in truth.items():
        if name == "value" or right.norm() <= floor:
            continue
        got = ours.get(name, torch.zeros_like(right))
        if (got - right).norm() <= EXACT * right.norm():
            continue
        cosine = float(torch.nn.functional.cosine_similarity(got.flatten(), right.flatten(), dim=0))
        worst = max(worst, 1 - cosine)
        ratios.append(float(got.norm() / right.norm()))
    if not ratios:
        return "exact"
    ratio = max(ratios, key=lambda r: abs(r - 1))
    return f"direction: cos {1 - worst:.2f}, x {ratio:.2f}" if worst > 1e-9 else f"scale: x {ratio:.2f}"


def _ours(pool: RankPool, world: int, name: str, split: str, truth: Mapping[str, Tensor]) -> str:
    try:
        results = pool.run(world, measure_ours, name, split)
        verdicts = {mode: judge(joined([r[mode] for r in results]), truth) for mode in results[0]}
    except AssertionError as error:  # a rank that failed, or ranks that disagree
        return f"error: {_last_line(error)}"
    wrong = [f"{mode}: {verdict}" for mode, verdict in verdicts.items() if verdict != "exact"]
    return ", ".join(wrong) or "exact"


def _theirs(pool: RankPool, world: int, name: str, split: str, truth: Mapping[str, Tensor]) -> str:
    try:
        return judge(joined(pool.run(world, measure_theirs, name, split)), truth)
    except RankFailure as error:
        return f"error: {_last_line(error)}"
    except AssertionError:
        return "direction: gradients on some ranks only"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line or "died" in line]
    kind = re.search(r"\w+Error|died with \S+ \w+", lines[-1]) if lines else None
    return kind.group() if kind else "no answer"


def _kind(verdict: str) -> str:
    first = verdict.partition(":")[0]
    if first.startswith("random"):
        return "random"
    return first if first in ("exact", "scale", "direction") else "error or crash"


def main(arguments: list[str]) -> list[Row]:
    """The table of counts, and one row per use."""
    parser = argparse.ArgumentParser("parity", description=__doc__)
    parser.add_argument("--only", default="", help="uses whose name contains this")
    parser.add_argument("--world-size", type=int, nargs="*", default=[2, 3], choices=[2, 3])
    options = parser.parse_args(arguments)
    chosen = {name: case for name, case in USES.items() if options.only in name}
    verdicts: dict[tuple[str, str, int], dict[str, str]] = {}
    ours, peer = RankPool(), RankPool(grace_seconds=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for world in options.world_size:
            for split in SPLIT_NAMES:
                columns: tuple[dict[str, str], dict[str, str]] = ({}, {})
                verdicts["ours", split, world], verdicts["PML", split, world] = columns
                for name, case in chosen.items():
                    truth = alone(case)
                    columns[0][name] = _ours(ours, world, name, split, truth)
                    plain = alone(replace(case, draws=False)) if case.draws else truth
                    found = _theirs(peer, world, name, split, plain)
                    if (case.draws or case.miner_draws) and _kind(found) in ("scale", "direction"):
                        found = f"random by nature, {found}"
                    columns[1][name] = found
    ours.close()
    peer.close()
    return [*_summary(verdicts), *_details(chosen, verdicts)]


def _summary(verdicts: Mapping[tuple[str, str, int], Mapping[str, str]]) -> list[Row]:
    rows = []
    names = {"ours": "GlobalBatchLoss, every exact mode", "PML": "PML DistributedLossWrapper"}
    for (who, split, world), found in sorted(verdicts.items(), key=lambda item: (item[0][0] == "PML", item[0][1:])):
        count = Counter(map(_kind, found.values()))
        rows.append(
            {
                "table": "Gradients of all parameters against one process",
                "who": names[who],
                "ranks": world,
                "batches": split,
                "cases": len(found),
                "exact": count["exact"],
                "wrong_scale": count["scale"],
                "wrong_direction": count["direction"],
                "random": count["random"],
                "error_or_crash": count["error or crash"],
                "verdict": "-" if who == "PML" else "right" if count["exact"] == len(found) else "WRONG",
            }
        )
    return rows


def _details(chosen: Mapping[str, Use], verdicts: Mapping[tuple[str, str, int], Mapping[str, str]]) -> list[Row]:
    return [
        {"table": "Case by case", "case": name, "mode": GlobalBatchLoss(case.make()).exact_modes()[0]}
        | {f"{who}_{split}_{world}": found[name] for (who, split, world), found in verdicts.items()}
        for name, case in chosen.items()
    ]
