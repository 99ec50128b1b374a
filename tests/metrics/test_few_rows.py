"""Ranks with one row, with rows that do not vary, or with none: value, gradient and accumulated value of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor

from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.metrics.cases import CASES, differentiable_classes
from tests.metrics.harness import alone, difference, rows_of, step_on_rank
from tests.slow_parameters import slow_parameters

# rows of each rank, and how often each row is repeated
LAYOUTS: dict[int, dict[str, tuple[list[int], int]]] = {
    1: {"all": ([6], 1)},
    2: {"one row": ([1, 1], 1), "one row beside others": ([1, 5], 1), "equal rows": ([3, 3], 3), "none": ([6, 0], 1)},
    3: {"one row": ([1, 1, 1], 1), "equal rows": ([4, 4, 4], 4), "none": ([3, 3, 0], 1), "none first": ([0, 1, 4], 1)},
}
CORRELATIONS = {
    "PearsonCorrCoef": lambda: tm.PearsonCorrCoef(),
    "PearsonCorrCoef of 2": lambda: tm.PearsonCorrCoef(num_outputs=2),
    "ConcordanceCorrCoef": lambda: tm.ConcordanceCorrCoef(),
}


def rows(sizes: list[int], repeats: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """A global batch far from 0, its rows in runs of equal ones."""
    generator = torch.Generator().manual_seed(seed)
    number = sum(sizes) // repeats
    preds, target = torch.randn(2, number, outputs, generator=generator, dtype=torch.float64)
    preds = preds + target + 7
    preds, target = (t.repeat_interleave(repeats, 0) for t in (preds, target))
    if outputs == 1:
        return preds[:, 0], target[:, 0]
    return preds, target


def one_process(name: str, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Value and gradient of each batch, then the value of all; none of our code."""
    metric = CORRELATIONS[name]().set_dtype(torch.float64)
    metric.distributed_available_fn = lambda: False
    found = []
    for preds, target in batches:
        leaf = preds.clone().requires_grad_()
        value = metric(leaf, target)
        value.sum().backward()
        assert leaf.grad is not None
        assert value.isfinite().all()
        found.append((value.detach(), leaf.grad))
    return found, metric.compute()


def correlations(name: str, sizes: list[int], repeats: int) -> None:
    """On this rank, by ``forward`` and by ``update``, with and without a graph kept."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    batches = [rows(sizes, repeats, 2 if name.endswith("2") else 1, seed) for seed in range(2)]
    steps, total = one_process(name, batches)
    (first,), value_of_first = one_process(name, batches[:1])

    trained, updated = differentiable(CORRELATIONS[name]()), differentiable(CORRELATIONS[name]())
    kept = differentiable(CORRELATIONS[name](), keep_graph=True)
    for (preds, target), (value, grad) in zip(batches, steps, strict=True):
        leaf = preds[own].clone().requires_grad_()
        ours = trained(leaf, target[own])
        ours.sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(ours.detach(), value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(leaf.grad / world, grad[own], rtol=1e-9, atol=1e-12)
        updated.update(preds[own], target[own])
    torch.testing.assert_close(trained.compute(), total, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(updated.compute(), total, rtol=1e-9, atol=1e-12)

    preds, target = batches[0]
    leaf = preds[own].clone().requires_grad_()
    kept.update(leaf, target[own])
    ours = kept.compute()
    ours.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(ours.detach(), value_of_first, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(leaf.grad / world, first[1][own], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize(("world_size", "layout"), [(w, name) for w in LAYOUTS for name in LAYOUTS[w]])
def test_correlations(pool: RankPool, name: str, world_size: int, layout: str) -> None:
    sizes, repeats = LAYOUTS[world_size][layout]
    pool.run(world_size, correlations, name, sizes, repeats)


def collection(sizes: list[int]) -> dict[str, float]:
    """A correlation beside others, in one exchange before ``compute``."""
    own = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
    preds, target = rows(sizes, 1, 1, 0)
    metrics = differentiable(tm.MetricCollection([tm.PearsonCorrCoef(), tm.MeanSquaredError()]))
    metrics.update(preds[own], target[own])
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 0, 3]], ids=str)
def test_a_correlation_in_a_collection(pool: RankPool, sizes: list[int]) -> None:
    preds, target = rows(sizes, 1, 1, 0)
    truth = {
        "PearsonCorrCoef": float(torch.corrcoef(torch.stack([preds, target]))[0, 1]),
        "MeanSquaredError": float((preds - target).square().mean()),
    }
    for found in pool.run(3, collection, sizes):
        assert found == pytest.approx(truth, rel=1e-9)


def without_rows(family: str) -> dict[str, float]:
    """By case, the difference from one process over its tolerance; the last rank has no rows."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    for name, cls in differentiable_classes().items():
        if name not in CASES or cls.__module__.split(".")[1] != family:
            continue
        for index, case in enumerate(CASES[name]):
            number = rows_of(case.global_batch(0))
            if number < 2 * (world - 1):
                continue
            step = number // (world - 1)
            ends = [step * (r + 1) for r in range(world - 2)] + [number, number]
            own = slice(ends[rank - 1] if rank else 0, ends[rank])
            *values, grad = alone(case)[0]
            ours = step_on_rank(differentiable(case.make()), case, 0, own)
            found[f"{name} {index}"] = difference(ours, [*values, grad[own]]) / case.rtol
    return found


FAMILIES = sorted({cls.__module__.split(".")[1] for name, cls in differentiable_classes().items() if name in CASES})


@pytest.mark.filterwarnings("ignore:Metric `.*` will save all")
@pytest.mark.parametrize("family", slow_parameters(FAMILIES, {"image"}))
def test_a_rank_without_rows_counts_for_nothing(pool: RankPool, family: str) -> None:
    for found in pool.run(3, without_rows, family):
        assert {name: off for name, off in found.items() if not off < 1} == {}
