"""`MaxSimLoss` of 256 queries x 32 vectors and 256 documents x 180 vectors x 128, beside the formula on padded texts, in one process.

The peer is what sentence-transformers' `MultiVectorMultipleNegativesRankingLoss` computes by default: products of all vectors, masked, the
largest of each query's vector, their sums, cross entropy. Value and gradients are compared first. Timed: forward and backward, in turns in
the same process, the peer twice (A/A). Peak memory: by how much the resident set grows in one step, in a fresh process.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, peak_of, return_freed_blocks
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import MaxSimLoss

__all__ = ["main"]

QUERY_VECTORS, DOCUMENT_VECTORS, WIDTH, EQUAL = 32, 180, 128, 1e-4  # relative, float32
SHARE = 0.1  # of the bytes of all products, at most


def texts(rows: int, *, ragged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, T, D), documents (B, t, D) and how many vectors of each document count."""
    torch.manual_seed(0)
    queries = functional.normalize(torch.randn(rows, QUERY_VECTORS, WIDTH), dim=-1).requires_grad_()
    documents = functional.normalize(torch.randn(rows, DOCUMENT_VECTORS, WIDTH), dim=-1).requires_grad_()
    lengths = torch.full((rows,), DOCUMENT_VECTORS)
    if ragged:
        lengths = torch.randint(DOCUMENT_VECTORS // 3, DOCUMENT_VECTORS + 1, (rows,))
    return queries, documents, lengths


def padded_formula(queries: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
    """The loss from the products of all vectors (B, B, T, t)."""
    counts = torch.arange(documents.shape[1]) < lengths.unsqueeze(1)
    products = torch.einsum("itd,jud->ijtu", queries, documents)
    products = products.masked_fill(~counts[None, :, None, :], -torch.inf)
    scores = products.amax(3).sum(2)
    return functional.cross_entropy(scores, torch.arange(len(queries)))


def ours(queries: Tensor, documents: Tensor, lengths: Tensor) -> Tensor:
    """`MaxSimLoss` of the same texts."""
    return MaxSimLoss()(queries, documents, documents_mask=lengths)


def stepped(loss: Any, batch: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Value and gradients of one step."""
    queries, documents, _ = batch
    queries.grad = documents.grad = None
    value = loss(*batch)
    value.backward()
    assert queries.grad is not None
    assert documents.grad is not None
    return [value.detach(), queries.grad, documents.grad]


def timed(rows: int, ragged: bool, rounds: int, seconds: float) -> tuple[float, list[list[float]]]:
    """Largest relative difference, and milliseconds of (padded, ours, padded) for each round."""
    small = texts(max(rows // 8, 2), ragged=ragged)
    pairs = zip(stepped(padded_formula, small), stepped(ours, small), strict=True)
    off = max([float((a - b).norm() / a.norm()) for a, b in pairs])
    batch = texts(rows, ragged=ragged)
    steps = [lambda loss=loss: stepped(loss, batch) for loss in (padded_formula, ours, padded_formula)]
    return off, time_in_turns(steps, rounds, seconds, least=1)


def peak(rows: int, ragged: bool, padded: bool) -> int:
    """Bytes that the resident set grows by in one step."""
    return_freed_blocks()
    loss = padded_formula if padded else ours
    stepped(loss, texts(2, ragged=ragged))
    batch = texts(rows, ragged=ragged)
    return peak_of(lambda: stepped(loss, batch))


def main(arguments: list[str]) -> list[Row]:
    """One row for texts of full length, and one for texts of different lengths."""
    parser = argparse.ArgumentParser("max_sim", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="of timed rounds per row at most")
    options: Any = parser.parse_args(arguments)
    products = options.rows**2 * QUERY_VECTORS * DOCUMENT_VECTORS * 4
    found: list[Row] = []
    for ragged in (False, True):
        job = (options.rows, ragged, options.rounds, options.seconds)
        ((off, rounds),) = run_ranks(timed, *job, world_size=1, seconds=1200.0)
        grown, of_padded = (
            run_ranks(peak, options.rows, ragged, padded, world_size=1, seconds=1200.0)[0] for padded in (False, True)
        )
        padded, own, again = (statistics.median(column) for column in zip(*rounds, strict=True))
        is_small = grown <= SHARE * products
        found.append(
            {
                "table": f"MaxSim of {options.rows} x {QUERY_VECTORS} and {options.rows} x {DOCUMENT_VECTORS} vectors of {WIDTH}",
                "size": "60 to 180 vectors" if ragged else "180 vectors",
                "ours_ms": own,
                "padded_ms": padded,
                "ratio": statistics.median(row[1] / row[0] for row in rounds),
                "a_a": again / padded,
                "ours_MiB": grown / MIB,
                "padded_MiB": of_padded / MIB,
                "limit_MiB": SHARE * products / MIB,
                "differs_by": off,
                "rounds": len(rounds),
                "verdict": "met" if off <= EQUAL and is_small else "WRONG",
            }
        )
    return found
