"""Metrics of the global held-out set: against a naive oracle, and the same on any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.demo.evaluation import HeldOut, HeldOutRows, retrieval_metrics
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.testing import RankPool


def held_out_set() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (53,), generator=generator)
    return torch.randn(53, 6, dtype=torch.float64, generator=generator) + labels[:, None], labels


def naive(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """One query at a time, straight from the definitions."""
    similarity = torch.nn.functional.normalize(embeddings) @ torch.nn.functional.normalize(embeddings).T
    first, precision, mean_average = [], [], []
    for query in range(len(labels)):
        others = [row for row in similarity[query].argsort(descending=True).tolist() if row != query]
        r = int((labels == labels[query]).sum()) - 1
        if r:
            hits = [float(labels[row] == labels[query]) for row in others]
            first.append(hits[0])
            precision.append(sum(hits[:r]) / r)
            mean_average.append(sum(hits[k] * sum(hits[: k + 1]) / (k + 1) for k in range(r)) / r)
    means = [sum(values) / len(values) for values in (first, precision, mean_average)]
    return dict(zip(("precision_at_1", "r_precision", "map_at_r"), means, strict=True))


def test_metrics_are_those_of_the_definitions() -> None:
    embeddings, labels = held_out_set()
    labels[0] = 2**40 + 1  # alone in its class, and beyond what float32 can tell apart
    labels[1:3] = 2**40
    assert retrieval_metrics(embeddings, labels) == pytest.approx(naive(embeddings, labels), abs=1e-12)


def test_float64_neighbours_that_float32_cannot_tell_apart_stay_in_order() -> None:
    angles = torch.tensor([0.0, 1.0, 1.0 + 1e-9, -1.0 - 2e-9], dtype=torch.float64)
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.tensor([0, 0, 1, 1])
    assert retrieval_metrics(embeddings, labels) == pytest.approx(naive(embeddings, labels), abs=1e-12)


def test_metrics_refuse_nan_and_are_nan_where_no_class_has_two_rows() -> None:
    embeddings, labels = held_out_set()
    assert all(math.isnan(value) for value in retrieval_metrics(embeddings, torch.arange(53)).values())
    embeddings[7, 0] = torch.nan
    with pytest.raises(InputError, match="finite numbers, got 1 rows of 53"):
        retrieval_metrics(embeddings, labels)


def gather_shards(sizes: list[int], repeat: int) -> HeldOut:
    """Deal the rows out by `sizes`, two batches on each rank; the first `repeat` rows come to the last rank a second time."""
    embeddings, labels = held_out_set()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    positions = list(order.split(sizes))
    positions[-1] = torch.cat([positions[-1], order[:repeat]])
    rows = HeldOutRows()
    for batch in positions[dist.get_rank()].tensor_split(2):
        rows.add(embeddings[batch], labels[batch], batch, loss=embeddings[batch].square().mean())
    return rows.gather()


@pytest.mark.parametrize("sizes", [[53], [30, 23], [2, 49, 2]], ids=str)
@pytest.mark.parametrize("repeat", [0, 2])
def test_uneven_shards_give_the_one_process_set(pool: RankPool, sizes: list[int], repeat: int) -> None:
    embeddings, labels = held_out_set()
    for joined in pool.run(len(sizes), gather_shards, sizes, repeat):
        torch.testing.assert_close(joined.embeddings, embeddings, rtol=0, atol=0)
        torch.testing.assert_close(joined.labels, labels, rtol=0, atol=0)
        if not repeat:
            assert joined.loss == pytest.approx(float(embeddings.square().mean()), rel=1e-12)
