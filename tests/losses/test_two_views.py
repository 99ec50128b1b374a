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
from tests.each_rank import each_rank
from tests.losses.cases import both_views
from tests.losses.harness import SPLITS, Case, check, in_modes, splits_by_turns
from tests.oracle import Found, Place, assert_near, graded, joined, normal, own, parity
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
        found[name] = in_modes(case, splits)
    return found


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
def test_every_loss_inside_is_one_process(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, measure)
    for name, case in CASES.items():
        check(case, [result[name] for result in results], SPLITS[world_size])


def test_tiles_evaluate_what_they_evaluate_with_labels() -> None:
    for name, inside in INSIDE.items():
        labelled, both = GlobalBatchLoss(inside()), GlobalBatchLoss(views_of(inside, True))
        assert both.exact_modes() == labelled.exact_modes(), name
        assert both.evaluation == labelled.evaluation, name
        assert GlobalBatchLoss(views_of(inside, False)).evaluation != "tiled, symmetric", name


# ---------------------------------------------------------------------- SimCLR, as it is published


def views(rows: int) -> tuple[Tensor, Tensor]:
    first, second = normal(2, rows, 8, seed=3)
    return first, second


def simclr(first: Tensor, second: Tensor) -> Tensor:
    """Chen et al. 2020, equation 1: each of 2 N rows looks for its partner among the 2 N - 1 others."""
    rows = torch.nn.functional.normalize(torch.cat([first, second]), dim=1)
    logits = rows @ rows.T / TEMPERATURE
    logits.fill_diagonal_(-torch.inf)
    partner = torch.arange(len(rows)).roll(len(first))
    return torch.nn.functional.cross_entropy(logits, partner)


def play(place: Place, options: dict[str, Any], frozen: bool = False) -> Found:
    """Value and gradients; no gradient goes to a frozen second view."""
    first, second = map(place.leaf, ("first", "second"), views(sum(place.sizes)))
    loss: Any = simclr
    if not place.alone:
        loss = GlobalBatchLoss(pml.SelfSupervisedLoss(pml.NTXentLoss(TEMPERATURE)), **options)
    return place.graded(loss(first, second.detach() if frozen else second))


@pytest.mark.parametrize("frozen", [False, True], ids=["", "a view without gradient"])
@pytest.mark.parametrize("options", [{}, {"mode": "replicated"}], ids=str)
@pytest.mark.parametrize("sizes", [[24], [12, 12], [7, 17], [5, 0, 20]], ids=str)
def test_nt_xent_of_two_views_is_simclr(
    pool: RankPool, sizes: list[int], options: dict[str, Any], frozen: bool
) -> None:
    parity(pool, play, sizes, options, frozen, compare=assert_near)


@each_rank(2)
def test_tiles_need_no_collective_in_backward() -> None:
    place = Place([20, 20], dist.get_rank())
    first, second = map(place.leaf, ("first", "second"), views(40))
    value = GlobalBatchLoss(pml.SelfSupervisedLoss(pml.NTXentLoss(TEMPERATURE)))(first, second)
    with CountCollectives() as counter:
        value.backward()
    assert counter.take() == []


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
    leaves = {name: rows[own(sizes[name])].clone().requires_grad_() for name, rows in places().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = GlobalBatchLoss(pml.DynamicSoftMarginLoss())(leaves["embeddings"], ref_emb=leaves["ref_emb"])
    return graded(value, **leaves), [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("rows", "references", "warns"),
    [([12], [15], False), ([4, 8], [4, 11], False), ([6, 6], [5, 10], True), ([1, 4, 7], [3, 0, 12], True)],
    ids=str,
)
def test_other_numbers_of_references(pool: RankPool, rows: list[int], references: list[int], warns: bool) -> None:
    sizes = {"embeddings": rows, "ref_emb": references}
    results = pool.run(len(rows), pairs_by_place, sizes)
    found = joined([each for each, _ in results], *sizes)
    leaves = {name: part.clone().requires_grad_() for name, part in places().items()}
    truth = graded(hardest_in_batch(leaves["embeddings"], leaves["ref_emb"]), **leaves)
    theirs = pml.DynamicSoftMarginLoss()(leaves["embeddings"].detach(), ref_emb=leaves["ref_emb"].detach())
    assert float(truth["value"]) == pytest.approx(float(theirs), rel=1e-12)
    assert_near(found, truth)
    assert [len(caught) for _, caught in results] == [int(warns)] + [0] * (len(rows) - 1)
    if warns:
        assert f"rank 0: {rows[0]} and {references[0]}" in results[0][1][0]
