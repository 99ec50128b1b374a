"""Ranks with one row, with rows that do not vary, or with none: value, gradient and accumulated value of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor

from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.metrics.cases import CASES, differentiable_classes
from tests.metrics.harness import difference, offline, rows_of, step, truth_of
from tests.oracle import Place, normal, own
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
    number = sum(sizes) // repeats
    preds, target = normal(2, number, outputs, seed=seed)
    preds = preds + target + 7
    preds, target = (t.repeat_interleave(repeats, 0) for t in (preds, target))
    if outputs == 1:
        return preds[:, 0], target[:, 0]
    return preds, target


def one_process(name: str, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Value and gradient of each batch, then the value of all; none of our code."""
    metric = offline(CORRELATIONS[name]())
    found = []
    for preds, target in batches:
        leaf = preds.clone().requires_grad_()
        value = metric(leaf, target)
        value.sum().backward()
        assert value.isfinite().all()
        found.append((value.detach(), leaf.grad))
    return found, metric.compute()


def correlations(name: str, sizes: list[int], repeats: int) -> None:
    """On this rank, by ``forward`` and by ``update``, with and without a graph kept."""
    part, world = own(sizes), dist.get_world_size()
    batches = [rows(sizes, repeats, 2 if name.endswith("2") else 1, seed) for seed in range(2)]
    steps, total = one_process(name, batches)
    _, value_of_first = one_process(name, batches[:1])
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    trained, updated = differentiable(CORRELATIONS[name]()), differentiable(CORRELATIONS[name]())
    kept = differentiable(CORRELATIONS[name](), keep_graph=True)
    for (preds, target), (value, grad) in zip(batches, steps, strict=True):
        leaf = preds[part].clone().requires_grad_()
        ours = trained(leaf, target[part])
        ours.sum().backward()
        close(ours.detach(), value)
        close(leaf.grad / world, grad[part])
        updated.update(preds[part], target[part])
    close(trained.compute(), total)
    close(updated.compute(), total)
    # through one `compute`
    preds, target = batches[0]
    leaf = preds[part].clone().requires_grad_()
    kept.update(leaf, target[part])
    ours = kept.compute()
    ours.sum().backward()
    close(ours.detach(), value_of_first)
    close(leaf.grad / world, steps[0][1][part])


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize(("world_size", "layout"), [(w, name) for w in LAYOUTS for name in LAYOUTS[w]])
def test_correlations(pool: RankPool, name: str, world_size: int, layout: str) -> None:
    sizes, repeats = LAYOUTS[world_size][layout]
    pool.run(world_size, correlations, name, sizes, repeats)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 0, 3]], ids=str)
@each_rank(3)
def test_a_correlation_in_a_collection(sizes: list[int]) -> None:
    """A correlation beside others, in one exchange before ``compute``."""
    preds, target = rows(sizes, 1, 1, 0)
    metrics = differentiable(tm.MetricCollection([tm.PearsonCorrCoef(), tm.MeanSquaredError()]))
    metrics.update(preds[own(sizes)], target[own(sizes)])
    truth = {
        "PearsonCorrCoef": float(torch.corrcoef(torch.stack([preds, target]))[0, 1]),
        "MeanSquaredError": float((preds - target).square().mean()),
    }
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(truth, rel=1e-9)


FAMILIES = sorted({cls.__module__.split(".")[1] for name, cls in differentiable_classes().items() if name in CASES})


@pytest.mark.filterwarnings("ignore:Metric `.*` will save all")
@pytest.mark.parametrize("family", slow_parameters(FAMILIES, {"image"}))
@each_rank(3)
def test_a_rank_without_rows_counts_for_nothing(family: str) -> None:
    """The last one."""
    off = {}
    for name, cls in differentiable_classes().items():
        for index, case in enumerate(CASES.get(name, []) if cls.__module__.split(".")[1] == family else []):
            number = rows_of(case.global_batch(0))
            if number >= 4:
                place = Place([number // 2, number - number // 2, 0], dist.get_rank())
                *values, grad = truth_of(case)[0]
                ours = step(place, differentiable(case.make()), case, 0)
                off[f"{name} {index}"] = difference(ours, [*values, place.own(grad)]) / case.rtol
    assert {name: number for name, number in off.items() if not number < 1} == {}
