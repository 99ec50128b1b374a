"""Gradients of documented uses against one process, float64: `GlobalBatchLoss` beside PML's own `DistributedLossWrapper`.

The uses are the tests' own table (``tests/losses``): every loss of pytorch-metric-learning (PML), its reducers,
regularisers, distances, two views, miners, memory. For each, all ranks run on slices of ONE global batch, and the mean
over ranks of each gradient (what DDP leaves) is compared with the loss itself on the whole batch in one process: *exact* is
1e-8 relative for every parameter, *wrong scale* has the right direction, *wrong direction* has not.

PML's wrapper is given what it asks for: two views get labels that are unique over the ranks, miners are its own
``DistributedMinerWrapper``, and random losses the same seed on every rank; a loss or miner that draws is counted apart where it
is not exact, since ranks that draw by themselves cannot agree. What kills its process is started anew.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from torch import Tensor

from benchmarks.records import Row
from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.losses.cases import PML
from tests.losses.harness import (
    SEED,
    SPLITS,
    Arguments,
    Case,
    Net,
    Rows,
    alone,
    fresh,
    on_ranks,
    own_rows,
)
from tests.losses.test_reducers import SUMS, reduced, supported
from tests.losses.variants import MINERS, VARIANTS
from tests.oracle import graded, joined

__all__ = ["main"]

EXACT = 1e-8
SPLIT_NAMES = ("even", "uneven")
NOT_THEIRS = (
    "a user's loss",
    "tuples of",
    "mined references",
    "with its classes",
)  # losses and tuples that their wrapper does not take
RANDOM_MINERS = ("DistanceWeightedMiner", "UniformHistogramMiner")


def uses() -> dict[str, Case]:
    """Everything but tuples that are local to a rank, which their wrapper does not claim to take."""
    own = {n: c for n, c in VARIANTS.items() if not n.endswith(", local") and not any(part in n for part in NOT_THEIRS)}
    some = [
        name for name in SUMS if name in ("ArcFaceLoss", "ContrastiveLoss", "MultiSimilarityLoss", "TripletMarginLoss")
    ]
    reducing = {f"{loss}, {r}": reduced(loss, r) for loss in some for r in supported(loss)}
    plain = {n: c for n, c in PML.items() if not any(part in n for part in NOT_THEIRS)}
    return {**plain, **own, **reducing}


USES = uses()


def measure_ours(name: str, split: str) -> dict[str, dict[str, Tensor]]:
    """On a rank: value and gradients in each exact mode."""
    case, sizes = USES[name], SPLITS[dist.get_world_size()][split]
    modes = GlobalBatchLoss(case.make(), **case.options).exact_modes()
    return {mode: on_ranks(case, sizes, mode) for mode in modes}


def measure_theirs(name: str, split: str) -> dict[str, Tensor]:
    """On a rank: value and gradients under PML's wrapper."""
    case, sizes = USES[name], SPLITS[dist.get_world_size()][split]
    net, loss = fresh(case)
    wrapped = DistributedLossWrapper(loss)
    torch.manual_seed(SEED)
    args, kwargs = theirs(name, case, sizes)(net, own_rows(sizes, dist.get_rank()))
    # each rank returns W times its loss; only gradients are judged
    return graded(wrapped(*args, **kwargs), net=net, loss=loss) | {"value": torch.zeros(())}


def theirs(name: str, case: Case, sizes: list[int]) -> Any:
    """How their wrapper is to be called."""
    miner = name.partition(" for ")[0]
    if miner in MINERS:
        return partial(_their_miner, miner)
    return partial(_their_views, sizes) if name.endswith(", two views") else case.give


def _their_miner(miner: str, net: Net, rows: Rows) -> Arguments:
    embeddings, labels = net(rows["features"]), rows["labels"]
    return (embeddings, labels, DistributedMinerWrapper(MINERS[miner]())(embeddings, labels)), {}


def _their_views(sizes: list[int], net: Net, rows: Rows) -> Arguments:
    start = sum(sizes[: dist.get_rank()])
    labels = torch.arange(start, start + rows["features"].shape[0])
    return (net(rows["features"]), labels), {"ref_emb": net(rows["views"]), "ref_labels": labels.clone()}


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
                columns = verdicts[("ours", split, world)], verdicts[("PML", split, world)] = {}, {}
                for name, case in chosen.items():
                    truth = alone(case, SPLITS[world][split])
                    columns[0][name] = _ours(ours, world, name, split, truth)
                    plain = alone(replace(case, random=False), SPLITS[world][split]) if case.random else truth
                    found = _theirs(peer, world, name, split, plain)
                    draws = case.random or name.startswith(RANDOM_MINERS)
                    if draws and _kind(found) in ("scale", "direction"):
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


def _details(chosen: Mapping[str, Case], verdicts: Mapping[tuple[str, str, int], Mapping[str, str]]) -> list[Row]:
    return [
        {"table": "Case by case", "case": name, "mode": GlobalBatchLoss(case.make(), **case.options).exact_modes()[0]}
        | {f"{who}_{split}_{world}": found[name] for (who, split, world), found in verdicts.items()}
        for name, case in chosen.items()
    ]
