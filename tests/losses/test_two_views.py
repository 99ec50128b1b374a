"""Two views without labels: `GlobalBatchLoss(SelfSupervisedLoss(x))` is one process, for every loss that PML lets be inside, both ways.

One oracle is PML's class itself in one process; the other, for SimCLR, is its formula as it is published, written naively.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers, regularizers
from torch import Tensor

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.losses.cases import both_views
from tests.losses.harness import Case, check, compare, on_ranks, splits_by_turns
from tests.slow_parameters import slow_parameters

TEMPERATURE = 0.5


def views_of(loss: Any, symmetric: bool) -> pml.SelfSupervisedLoss:
    return pml.SelfSupervisedLoss(loss(), symmetric=symmetric)


INSIDE: dict[str, Any] = {name: getattr(pml, name) for name in pml.SelfSupervisedLoss.supported_losses()}
INSIDE |= {
    "NTXentLoss, summed": partial(pml.NTXentLoss, reducer=reducers.SumReducer()),
    "SupConLoss, per anchor": partial(pml.SupConLoss, reducer=reducers.PerAnchorReducer()),
    "NTXentLoss, regularised": partial(pml.NTXentLoss, embedding_regularizer=regularizers.LpRegularizer()),
}
CASES: dict[str, Case] = {}
for name, inside in INSIDE.items():
    CASES[f"{name}, both ways"] = Case(partial(views_of, inside, True), both_views)
    CASES[f"{name}, one way"] = Case(partial(views_of, inside, False), both_views)


def measure() -> dict[str, dict[str, dict[str, Tensor]]]:
    """All modes of all cases, on every rank; splits by turns."""
    found = {}
    for number, (name, case) in enumerate(CASES.items()):
        splits = splits_by_turns(number // 2, dist.get_world_size())  # both ways of a loss alike
        modes = GlobalBatchLoss(case.make(), **case.options).exact_modes()
        if case.options:
            modes = ("rows",)
        found[name] = {f"{s}, {mode}": on_ranks(case, sizes, mode) for s, sizes in splits.items() for mode in modes}
    return found


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
def test_every_loss_inside_is_one_process(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, measure)
    problems = [problem for name in CASES if (problem := judged(name, results, world_size))]
    assert not problems, "\n".join(problems)


def judged(name: str, results: list[Any], world_size: int) -> str:
    """What is wrong, in words."""
    try:
        check(CASES[name], [result[name] for result in results], world_size)
    except AssertionError as error:
        return f"{name}: {error}"
    return ""


def test_tiles_evaluate_what_they_evaluate_with_labels() -> None:
    for name, inside in INSIDE.items():
        labelled, both = GlobalBatchLoss(inside()), GlobalBatchLoss(views_of(inside, True))
        assert both.exact_modes() == labelled.exact_modes(), name
        assert both.evaluation == labelled.evaluation, name
        assert GlobalBatchLoss(views_of(inside, False)).evaluation != "tiled, symmetric", name


# ---------------------------------------------------------------------- SimCLR, as it is published


def views(rows: int) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return first, second


def simclr(first: Tensor, second: Tensor) -> Tensor:
    """Chen et al. 2020, equation 1: each of 2 N rows looks for its partner among the 2 N - 1 others."""
    rows = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    logits = rows @ rows.T / TEMPERATURE
    logits.fill_diagonal_(-torch.inf)
    partner = torch.arange(len(rows)).roll(len(first))
    return torch.nn.functional.cross_entropy(logits, partner)


def of_one_process(rows: int) -> dict[str, Tensor]:
    leaves = [view.requires_grad_() for view in views(rows)]
    value = simclr(*leaves)
    value.backward()
    return {"value": value.detach(), "first": leaves[0].grad, "second": leaves[1].grad}  # type: ignore[dict-item]


def of_ranks(sizes: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """This rank's value, gradients, and number of collectives forward and backward."""
    rank = dist.get_rank()
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    leaves = [view[start:stop].clone().requires_grad_() for view in views(sum(sizes))]
    loss = GlobalBatchLoss(pml.SelfSupervisedLoss(pml.NTXentLoss(TEMPERATURE)), **options)
    with CountCollectives() as counter:
        value = loss(*leaves)
        forward = len(counter.take())
        value.backward()
        backward = len(counter.take())
    grads = {"first": leaves[0].grad, "second": leaves[1].grad}
    return {"value": value.detach(), **grads, "collectives": (forward, backward)}


@pytest.mark.parametrize("options", [{}, {"mode": "replicated"}], ids=str)
@pytest.mark.parametrize("sizes", [[24], [12, 12], [7, 17], [5, 0, 20]], ids=str)
def test_nt_xent_of_two_views_is_simclr(pool: RankPool, sizes: list[int], options: dict[str, Any]) -> None:
    results = pool.run(len(sizes), of_ranks, sizes, options)
    truth, world = of_one_process(sum(sizes)), len(sizes)
    found = {"value": results[0]["value"]}
    for name in ("first", "second"):  # DDP's mean over ranks of each rank's own rows
        found[name] = torch.cat([result[name] for result in results]) / world
    compare(found, truth)
    assert len({float(result["value"]) for result in results}) == 1


def test_tiles_need_no_collective_in_backward(pool: RankPool) -> None:
    for result in pool.run(2, of_ranks, [20, 20], {}):
        assert result["collectives"][1] == 0


def frozen(sizes: list[int]) -> dict[str, Tensor]:
    """The second view is a target: no gradient goes to it."""
    rank = dist.get_rank()
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    first, second = (view[start:stop].clone() for view in views(sum(sizes)))
    value = GlobalBatchLoss(pml.SelfSupervisedLoss(pml.NTXentLoss(TEMPERATURE)))(first.requires_grad_(), second)
    value.backward()
    return {"value": value.detach(), "first": first.grad}  # type: ignore[dict-item]


def test_a_view_without_gradient(pool: RankPool) -> None:
    results = pool.run(2, frozen, [7, 17])
    truth = of_one_process(24)
    found = {"value": results[0]["value"], "first": torch.cat([result["first"] for result in results]) / 2}
    compare(found, {name: truth[name] for name in found})


# ---------------------------------------------------------------------- pairs by place, and another number of references


def places() -> dict[str, Tensor]:
    first, second = views(15)
    return {"embeddings": first[:12], "ref_emb": second}


def hardest_in_batch(rows: Tensor, references: Tensor) -> Tensor:
    """PML's formula without labels, written so that backward works: PML 2.9 writes into the distances that torch 2.13 keeps for it."""
    loss = pml.DynamicSoftMarginLoss()
    distances = torch.cdist(*(torch.nn.functional.normalize(t) for t in (rows, references)))
    own = torch.eye(*distances.shape, dtype=torch.bool)
    others, missing = distances.masked_fill(own, torch.inf), distances.new_zeros(abs(len(rows) - len(references)))
    of_rows, of_references = others.min(1).values, others.min(0).values
    if len(rows) < len(references):
        of_rows = torch.cat([of_rows, missing])
    else:
        of_references = torch.cat([of_references, missing])
    data = torch.cat([distances.diagonal(), missing]) - torch.min(of_rows, of_references)
    loss.hist_ = loss.hist_.to(data)
    loss.update_histogram(data)
    return loss.weigh_loss(data).mean()


def pairs_by_place(sizes: dict[str, list[int]]) -> tuple[dict[str, Tensor], list[str]]:
    """This rank's value and gradients, and what it was warned of."""
    rank, leaves = dist.get_rank(), {}
    for name, rows in places().items():
        start = sum(sizes[name][:rank])
        leaves[name] = rows[start : start + sizes[name][rank]].clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = GlobalBatchLoss(pml.DynamicSoftMarginLoss())(leaves["embeddings"], ref_emb=leaves["ref_emb"])
    value.backward()
    return {"value": value.detach(), **{n: leaf.grad for n, leaf in leaves.items()}}, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("rows", "references", "warns"),
    [([12], [15], False), ([4, 8], [4, 11], False), ([6, 6], [5, 10], True), ([1, 4, 7], [3, 0, 12], True)],
    ids=str,
)
def test_other_numbers_of_references(pool: RankPool, rows: list[int], references: list[int], warns: bool) -> None:
    sizes = {"embeddings": rows, "ref_emb": references}
    results = pool.run(len(rows), pairs_by_place, sizes)
    found = {"value": results[0][0]["value"]}
    for name in sizes:
        found[name] = torch.cat([result[name] for result, _ in results]) / len(rows)
    leaves = {name: part.clone().requires_grad_() for name, part in places().items()}
    value = hardest_in_batch(leaves["embeddings"], leaves["ref_emb"])
    value.backward()
    theirs = pml.DynamicSoftMarginLoss()(leaves["embeddings"].detach(), ref_emb=leaves["ref_emb"].detach())
    assert float(value.detach()) == pytest.approx(float(theirs), rel=1e-12)
    compare(found, {"value": value.detach(), **{n: leaf.grad for n, leaf in leaves.items()}})  # type: ignore[dict-item]
    assert [len(caught) for _, caught in results] == [int(warns)] + [0] * (len(rows) - 1)
    if warns:
        assert f"rank 0: {rows[0]} and {references[0]}" in results[0][1][0]
