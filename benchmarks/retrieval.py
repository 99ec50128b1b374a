"""`EmbeddingRetrieval` of 50,000 rows on 2 ranks, compared to one matrix product of all rows with all rows.

50,000 x 128, classes of 20, float32. The product is made in pieces of 512 rows on the same ranks, each with its half of the queries, and
nothing is done with it. Both take turns in the same processes, and each takes the time of its slowest rank. MAP@R of classes of 100 and MRR
are measured too. First the values of a part of the rows are compared with those of pytorch-metric-learning.

Peak memory: by how much the resident set grows in one compute, after a compute of few rows. A matrix of all distances would be 10 GB.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, Resident
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import EmbeddingRetrieval

__all__ = ["main"]

WIDTH = 128
_PIECE = 512  # rows of the product at a time
AT_R = ("map_at_r", "precision_at_1", "r_precision")
AT_K = ("precision_at_1", "hit_rate@10", "recall@10", "ndcg@10")
# names, rows of a class, limit of the time in products
JOBS: tuple[tuple[tuple[str, ...], int, float | None], ...] = (
    (AT_K, 20, 1.8),
    (AT_R, 20, None),
    (AT_R, 101, 2.2),
    (("mrr",), 20, None),
)
MOST_MEBIBYTES = 200


def rows_of(count: int, of_class: int) -> tuple[Tensor, Tensor]:
    """Rows around a centre for each class, and their labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % max(1, count // of_class)
    centres = torch.randn(int(labels.max()) + 1, WIDTH, generator=generator)
    return centres[labels] * 0.5 + torch.randn(count, WIDTH, generator=generator), labels


def filled(names: tuple[str, ...], rows: Tensor, labels: Tensor) -> EmbeddingRetrieval:
    """A metric with this rank's rows."""
    metric = EmbeddingRetrieval(names)
    own = torch.arange(dist.get_rank(), len(rows), dist.get_world_size())
    metric.update(rows[own], labels[own], own)
    return metric


def computed(metric: EmbeddingRetrieval) -> dict[str, Tensor]:
    """One search."""
    metric._evaluation.rows.version += 1  # else the value is the last one
    return metric.compute()


def difference_from_pml() -> float:
    """Largest difference of 2,000 rows from PML's values."""
    rows, labels = rows_of(2000, 20)
    theirs = ("mean_average_precision_at_r", "precision_at_1", "r_precision")
    search = CustomKNN(CosineSimilarity())
    calculator = AccuracyCalculator(theirs, k="max_bin_count", device=torch.device("cpu"), knn_func=search)
    expected = calculator.get_accuracy(rows, labels)
    found = filled(AT_R, rows, labels).compute()
    return max(abs(float(found[name]) - expected[of_pml]) for name, of_pml in zip(AT_R, theirs, strict=True))


def timed(names: tuple[str, ...], count: int, of_class: int, rounds: int, seconds: float) -> tuple[float, Any]:
    """Difference from PML, and milliseconds of (product, metric) for each round."""
    rows, labels = rows_of(count, of_class)
    metric = filled(names, rows, labels)
    columns = torch.nn.functional.normalize(rows).t()
    queries = columns.t()[dist.get_rank() :: dist.get_world_size()].contiguous()
    buffer = torch.empty(_PIECE, count)

    def product() -> None:
        for piece in torch.split(queries, _PIECE):
            torch.mm(piece, columns, out=buffer[: len(piece)])

    off = difference_from_pml()
    steps = [product, lambda: computed(metric)]
    return off, time_in_turns(steps, rounds, seconds, warm_up=0, least=1)


def peak(names: tuple[str, ...], count: int, of_class: int) -> int:
    """Bytes that the resident set grows by in one compute."""
    rows, labels = rows_of(count, of_class)
    filled(names, rows[:2000], labels[:2000]).compute()
    metric = filled(names, rows, labels)
    del rows, labels
    gc.collect()
    resident = Resident()
    resident.reset()
    before = resident.now()
    metric.compute()
    grown = resident.peak - before
    resident.close()
    return grown


def main(arguments: list[str]) -> list[Row]:
    """One row per kind of metric, and one for memory of each size of a class."""
    parser = argparse.ArgumentParser("retrieval", description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of timed rounds per row at most")
    options: Any = parser.parse_args(arguments)
    table = f"Retrieval metrics of {options.rows} rows x {WIDTH} on 2 ranks, float32, beside one product of all rows with all rows"
    found: list[Row] = []
    for names, of_class, limit in JOBS:
        answers = run_ranks(timed, names, options.rows, of_class, options.rounds, options.seconds, seconds=1200.0)
        both = list(zip(*(times for _, times in answers), strict=True))
        products, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(2))
        ratio = statistics.median(a / b for a, b in zip(ours, products, strict=True))
        off = max(answer[0] for answer in answers)
        verdict = "met" if limit is None or ratio <= limit else "missed"
        found.append(
            {
                "table": table,
                "metric": ", ".join(names),
                "classes": f"of {of_class}",
                "product_ms": statistics.median(products),
                "ours_ms": statistics.median(ours),
                "ratio": ratio,
                "time_limit": limit,
                "differs_from_pml_by": off,
                "rounds": len(both),
                "verdict": "WRONG" if off > 1e-6 else verdict,
            }
        )
    for of_class in (20, options.rows // 10):
        grown = max(run_ranks(peak, AT_R, options.rows, of_class, seconds=1200.0))
        found.append(
            {
                "table": "Peak memory of a compute, a rank",
                "metric": ", ".join(AT_R),
                "classes": f"of {of_class}",
                "MiB": grown / MIB,
                "limit_MiB": MOST_MEBIBYTES,
                "verdict": "met" if grown <= MOST_MEBIBYTES * MIB else "WRONG",
            }
        )
    return found
