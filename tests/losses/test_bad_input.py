"""Ranks that disagree get the same error and can go on; ranks without rows and batches without pairs take part."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers, regularizers
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, InputError
from lightning_ddp_losses.losses import ClipLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.cases import classes
from tests.losses.harness import CLASSES, DIM, Case, fresh, global_rows, line_of_rows
from tests.oracle import Found, Place, assert_near, normal, parity
from tests.refusals import call_row

LABELS = torch.tensor([0, 0, 1, 1])
rows = line_of_rows


def ask(loss: nn.Module, *args: Any, mode: str = "auto", **kwargs: Any) -> Any:
    """The value of a loss; of rows and labels unless other arguments are given."""
    return GlobalBatchLoss(loss, mode=mode)(*(args or (rows(), LABELS)), **kwargs)  # type: ignore[arg-type]


def arc(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return pml.ArcFaceLoss(**{**classes, **options}).double()


class Two(nn.Module):
    """Some user's loss; the second argument is optional."""

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a.sin().mean() if b is None else (a * b).mean()


class Sums(nn.Module):
    """A user's loss whose batches come in a list."""

    def forward(self, views: list[Tensor]) -> Tensor:
        return sum(views, torch.zeros(())).square().mean()


class RankingOfTexts(nn.Module):
    """A loss that holds the model, in place of sentence-transformers' `MultipleNegativesRankingLoss`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Fails(nn.Module):
    """A loss that cannot take what one rank gives it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def forward(self, a: Tensor) -> Tensor:
        if self._rank == 1:
            raise ValueError("no loss for you")
        return a.mean()


def without_gradient_on_rank_1(rank: int) -> Any:
    with torch.set_grad_enabled(rank != 1):
        return ask(pml.SupConLoss())


DISAGREE: dict[str, tuple[Any, ...]] = {
    # what each rank does, words of the message
    "width, rows": (lambda r: ask(pml.SupConLoss(), rows(DIM + r), LABELS), ("6", "7")),
    "width, replicated": (lambda r: ask(pml.SmoothAPLoss(), rows(DIM + r), LABELS), ("6", "7")),
    "width, elements": (lambda r: ask(arc(embedding_size=DIM + r), rows(DIM + r), LABELS), ("6", "7")),
    "width, torch": (lambda r: ask(nn.MSELoss(), rows(DIM + r), rows(DIM + r)), ("6", "7")),
    "width against the weight, one rank": (lambda r: ask(arc(), rows(DIM + r), LABELS), ("7", "W")),
    "dtype, rows": (
        lambda r: ask(pml.SupConLoss(), rows(dtype=torch.float32 if r else torch.float64), LABELS),
        ("float32", "float64"),
    ),
    "dtype, torch": (
        lambda r: ask(nn.MSELoss(), *[rows(dtype=torch.float32 if r else torch.float64)] * 2),
        ("float32", "float64"),
    ),
    "dtype of labels": (lambda r: ask(pml.SupConLoss(), rows(), LABELS.int() if r else LABELS), ("int32", "int64")),
    "presence of labels": (lambda r: ask(pml.NTXentLoss(), rows(), None if r else LABELS, ref_emb=rows()), "labels"),
    "references": (lambda r: ask(pml.NTXentLoss(), rows(), LABELS, **({"ref_emb": rows()} if r else {})), "ref_emb"),
    "tuples": (
        lambda r: ask(pml.NTXentLoss(), rows(), LABELS, miners.BatchHardMiner()(rows(), LABELS) if r else None),
        "index",
    ),
    "a third view, one rank": (
        lambda r: ask(pml.SelfSupervisedLoss(pml.NTXentLoss()), *[rows()] * (3 if r == 1 else 2)),
        ("embeddings, ref_emb", "3 positional"),
    ),
    "a view of another length, one rank": (
        lambda r: ask(pml.SelfSupervisedLoss(pml.NTXentLoss()), rows(), rows(count=4 + (r == 1))),
        ("views", "embeddings (4, 6), ref_emb (5, 6)"),
    ),
    "no second view, one rank": (
        lambda r: ask(pml.SelfSupervisedLoss(pml.NTXentLoss(), symmetric=False), *[rows()] * (1 + (r != 1))),
        ("views", "embeddings and ref_emb"),
    ),
    "both ways and one way": (
        lambda r: ask(pml.SelfSupervisedLoss(pml.NTXentLoss(), symmetric=bool(r)), rows(), rows()),
        "configuration",
    ),
    "a second view as labels": (
        lambda r: ask(pml.NTXentLoss(), rows(), rows()),
        (
            "labels",
            "floating dtype of shape (4, 6)",
            "GlobalBatchLoss(SelfSupervisedLoss(NTXentLoss(...)))(view1, view2)",
        ),
    ),
    "a second view as labels, one rank": (
        lambda r: ask(pml.VICRegLoss(), rows(), *[rows()] * (r == 1), ref_emb=rows()),
        ("labels", "ref_emb"),
    ),
    "labels that are no classes": (
        lambda r: ask(pml.SupConLoss(), rows(), LABELS.double()),
        ("labels", "floating dtype of shape (4,)", "labels.long()"),
    ),
    "labels of references that are no classes, one rank": (
        lambda r: ask(pml.SupConLoss(), rows(), LABELS, ref_emb=rows(), ref_labels=LABELS.float() if r else LABELS),
        ("ref_labels", "floating dtype"),
    ),
    "labels of several losses that are no classes": (
        lambda r: ask(pml.MultipleLosses([pml.SupConLoss(), pml.NTXentLoss()]), rows(), LABELS.double()),
        ("labels", "floating dtype"),
    ),
    "labels of a miner that are no classes": (
        lambda r: GlobalBatchMiner(miners.MultiSimilarityMiner())(rows(), LABELS.double()),
        ("labels", "floating dtype"),
    ),
    "labels twice": (lambda r: ask(pml.NTXentLoss(), rows(), LABELS, labels=LABELS), "labels twice"),
    "gradients off on one rank": (without_gradient_on_rank_1, ("gradients=off", "gradients=on")),
    "tuples of rows that a rank has not": (
        lambda r: ask(pml.NTXentLoss(), rows(), LABELS, tuple(torch.tensor([0, 3 + (r == 1)]) for _ in range(4))),
        ("indices_tuple", "0 to 4 for 4 rows", "GlobalBatchMiner returns"),
    ),
    "tuples of unequal lengths, one rank": (
        lambda r: ask(
            pml.NTXentLoss(), rows(), LABELS, tuple(torch.arange(2)[: 1 + (r != 1 or i != 1)] for i in range(4))
        ),
        ("indices_tuple", "lengths 2, 1, 2, 2"),
    ),
    "a column beside a row of targets": (
        lambda r: ask(nn.PoissonNLLLoss(), rows(1, 4 + r), torch.zeros(4 + r).double()),
        ("(4, 1), (4,)", "unsqueeze"),
    ),
    "tuples, elements": (
        lambda r: ask(arc(), rows(), LABELS, miners.BatchHardMiner()(rows(), LABELS) if r else None),
        (),
    ),
    "arguments of a user's loss": (lambda r: ask(Two(), rows(), *([rows()] if r else [])), "tensors"),
    "class of loss": (lambda r: ask((pml.NTXentLoss if r else pml.SupConLoss)()), ("NTXent", "SupCon")),
    "option of a loss": (lambda r: ask(pml.NTXentLoss(temperature=0.1 + r)), ("temperature=0.1", "temperature=1.1")),
    "option of a distance": (
        lambda r: ask(
            pml.ContrastiveLoss(distance=pml.ContrastiveLoss().distance.__class__(power=1 + r)), rows(), LABELS
        ),
        ("configuration", "power=1", "power=2"),
    ),
    "reducer": (
        lambda r: ask(
            pml.ContrastiveLoss(reducer=(reducers.SumReducer if r else reducers.MeanReducer)()), rows(), LABELS
        ),
        "configuration",
    ),
    "weights of several losses": (
        lambda r: ask(pml.MultipleLosses([pml.NTXentLoss(), pml.SupConLoss()], weights=[1, 1 + r])),
        ("configuration", "weights"),
    ),
    "class weights of a torch loss": (
        lambda r: ask(nn.CrossEntropyLoss(weight=torch.ones(DIM).double() + r)),
        ("configuration", "CrossEntropyLoss", "weight#"),
    ),
    "class weights of a reducer": (
        lambda r: ask(arc(reducer=reducers.ClassWeightedReducer(torch.ones(CLASSES) + r))),
        ("configuration", "ClassWeightedReducer", "weights#"),
    ),
    "views of another length, one rank": (
        lambda r: ask(pml.NTXentLoss(), rows(), ref_emb=rows(count=4 + (r == 1))),
        "ref_emb",
    ),
    "number of classes": (lambda r: ask(arc(num_classes=4 + r)), ("configuration", "W(6, 4)", "W(6, 5)")),
    "mode": (lambda r: ask(pml.SupConLoss(), mode="rows" if r else "replicated"), ("rows", "replicated")),
    "elements and replicated": (lambda r: ask(arc(), mode="replicated" if r else "elements"), ()),
    "an inexact configuration on one rank": (
        lambda r: ask(pml.TripletMarginLoss(triplets_per_anchor=3 if r == 1 else "all"), mode="rows"),
        "rows",
    ),
    "labels of another length, one rank": (
        lambda r: ask(pml.SupConLoss(), rows(), LABELS[:3] if r == 1 else LABELS),
        (),
    ),
    "labels out of range, one rank": (lambda r: ask(arc(), rows(), LABELS + 9 * (r == 1)), "0 to 3"),
    "labels that are no integers, one rank": (lambda r: ask(arc(), rows(), LABELS / (1 + (r == 1))), "float"),
    "miner": (
        lambda r: GlobalBatchMiner(miners.MultiSimilarityMiner(epsilon=0.1 + r))(rows(), LABELS),
        ("configuration", "epsilon=0.1", "epsilon=1.1"),
    ),
    "loss and miner": (
        lambda r: GlobalBatchMiner(miners.BatchHardMiner())(rows(), LABELS) if r else ask(pml.SupConLoss()),
        ("GlobalBatchMiner", "GlobalBatchLoss"),
    ),
}


def disagree_then_go_on(name: str) -> tuple[str, str]:
    with pytest.raises(DDPLossError) as caught:
        call_row(__name__, "DISAGREE", name)
    ask(pml.SupConLoss()).backward()
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize("name", DISAGREE)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_get_the_same_error_and_go_on(pool: RankPool, world_size: int, name: str) -> None:
    results = pool.run(world_size, disagree_then_go_on, name)
    assert len(set(results)) == 1, results
    words = DISAGREE[name][1]
    for word in (words,) if isinstance(words, str) else words:
        assert word in results[0][1], results[0][1]
    assert any(f"rank {rank}" in results[0][1] for rank in range(world_size))


def then_next(call: Callable[[], object]) -> None:
    call()
    ask(pml.SupConLoss())


def foreign_error() -> None:
    then_next(lambda: ask(Fails(dist.get_rank()), rows()))


def warned() -> None:
    """Rows of many identities, numbered on each rank: tiles of so many rows exchange more than the next handshake has."""
    many = normal(600, DIM, seed=dist.get_rank())
    then_next(lambda: ask(pml.NTXentLoss(), many, torch.arange(600), mode="rows"))


NO_POSITIVES: dict[str, Callable[[], nn.Module]] = {
    "ContrastiveLoss": pml.ContrastiveLoss,
    "MarginLoss": partial(pml.MarginLoss, learn_beta=True, nu=0.1, num_classes=100),
    "MultiSimilarityLoss": pml.MultiSimilarityLoss,
    "NTXentLoss": pml.NTXentLoss,
    "SupConLoss": pml.SupConLoss,
    "TripletMarginLoss": pml.TripletMarginLoss,
    "TripletMarginLoss, summed": lambda: pml.TripletMarginLoss(reducer=reducers.SumReducer()),
    "LiftedStructureLoss": pml.LiftedStructureLoss,
    "ArcFaceLoss without elements": lambda: pml.ArcFaceLoss(100, DIM, reducer=reducers.ThresholdReducer(low=1e9)),
    "CrossBatchMemory": lambda: pml.CrossBatchMemory(pml.MarginLoss(learn_beta=True), DIM, memory_size=20),
}


def lonely(place: Place, mode: str, name: str) -> Found:
    """Every row of a class of its own."""
    net, loss = fresh(Case(NO_POSITIVES[name]))
    judge = loss if place.alone else GlobalBatchLoss(loss, mode=mode)  # type: ignore[arg-type]
    value = judge(net(place.own(global_rows()["features"])), place.own(torch.arange(12)) + 50)
    found = place.graded(value, net=net, loss=loss)
    if not place.alone:
        assert all(p.grad is not None for p in loss.parameters()), "a parameter left the graph"
        assert all(p.grad is not None for n, p in net.named_parameters() if n != "logit_scale")
    return found


@pytest.mark.parametrize("name", NO_POSITIVES)
@pytest.mark.parametrize("sizes", [[6, 6], [0, 12], [5, 0, 7]], ids=str)
def test_a_batch_without_positive_pairs_gives_the_zero_of_one_process(
    pool: RankPool, sizes: list[int], name: str
) -> None:
    modes = GlobalBatchLoss(NO_POSITIVES[name]()).exact_modes()
    parity(pool, lonely, sizes, name, cases=modes, compare=assert_near)


@each_rank(2)
def test_torchs_mean_over_nothing_is_not_a_number() -> None:
    assert GlobalBatchLoss(nn.CrossEntropyLoss())(rows(), torch.full((4,), -100)).isnan()
    assert GlobalBatchLoss(nn.MSELoss())(rows(count=0), rows(count=0)).isnan()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rows": (lambda: GlobalBatchLoss(pml.SmoothAPLoss(), mode="rows"), "SmoothAPLoss.*replicated.*'rows'"),
    "elements": (lambda: GlobalBatchLoss(pml.SupConLoss(), mode="elements"), "SupConLoss.*rows.*'elements'"),
    "a user's loss": (lambda: GlobalBatchLoss(Two(), mode="elements"), "Two.*'elements'"),
    "elements with a regulariser": (
        lambda: ask(arc(embedding_regularizer=regularizers.LpRegularizer()), mode="elements"),
        "ArcFaceLoss.*'elements'",
    ),
    "random triplets": (
        lambda: ask(pml.TripletMarginLoss(triplets_per_anchor=3), mode="rows"),
        "TripletMarginLoss.*'rows'",
    ),
    "unknown mode": (lambda: GlobalBatchLoss(pml.SupConLoss(), mode="tiles"), "'tiles'"),  # type: ignore[arg-type]
    "unknown backward": (lambda: GlobalBatchLoss(pml.SupConLoss(), backward="mean"), "'mean'"),  # type: ignore[arg-type]
    "no loss": (lambda: GlobalBatchLoss("sum"), "a function of tensors.*global_mean"),  # type: ignore[arg-type]
    "a class": (
        lambda: GlobalBatchLoss(pml.SupConLoss),
        "the class SupConLoss.*GlobalBatchLoss\\(SupConLoss\\(...\\)\\)",
    ),  # type: ignore[arg-type]
    "a miner": (lambda: GlobalBatchLoss(miners.BatchHardMiner()), "miner BatchHardMiner.*Mine with GlobalBatchMiner"),
    "a metric": (lambda: GlobalBatchLoss(MeanSquaredError()), "metric MeanSquaredError.*differentiable"),
    **{
        f"one-hot labels, {dtype}": (
            partial(ask, pml.NTXentLoss(), rows(), nn.functional.one_hot(LABELS).to(dtype)),
            f"labels.*shape \\(4, 2\\).*{re.escape('labels.int().argmax(1)')}",
        )
        for dtype in (torch.float32, torch.int64, torch.bool)
    },
    "flags as labels": (lambda: ask(pml.NTXentLoss(), rows(), LABELS > 0), "labels.*torch.bool.*labels.long"),
    "no reduction": (lambda: GlobalBatchLoss(nn.CrossEntropyLoss(reduction="none")), "CrossEntropyLoss.*'none'"),
    "tensors in an unknown list": (
        lambda: ask(Sums(), type("Views", (list,), {})([rows(), rows()])),
        "a Views of tensors",
    ),
    "labels of the views only": (
        lambda: ask(pml.NTXentLoss(), rows(), ref_emb=rows(), ref_labels=LABELS),
        "ref_labels",
    ),
    **{
        f"gathers by itself: {name}": (partial(GlobalBatchLoss, make()), f"got {name}")
        for name, make in {
            "DistributedLossWrapper": lambda: DistributedLossWrapper(pml.SupConLoss()),
            "GlobalBatchLoss in losses.1": lambda: pml.MultipleLosses([pml.NCALoss(), GlobalBatchLoss(pml.NCALoss())]),
            "GlobalBatchMiner in miner": lambda: pml.CrossBatchMemory(
                pml.NTXentLoss(), DIM, miner=GlobalBatchMiner(miners.PairMarginMiner())
            ),
            "ClipLoss": ClipLoss,
        }.items()
    },
    "tuples of other rows": (
        lambda: ask(
            pml.NTXentLoss(), rows(), LABELS, GlobalBatchMiner(miners.BatchHardMiner())(rows(count=2), LABELS[1:3])
        ),
        "of the 4 rows.*of 2 rows",
    ),
    "tuples that are masks": (
        lambda: ask(pml.TripletMarginLoss(), rows(), LABELS, (LABELS > 0, LABELS > 0, LABELS < 1), mode="rows"),
        "3 or 4 tensors of row numbers.*torch.bool",
    ),
    "labels of two dimensions": (lambda: ask(pml.SupConLoss(), rows(), LABELS[:, None]), "labels.*shape \\(4, 1\\)"),
    "labels in a list": (lambda: ask(pml.SupConLoss(), rows(), LABELS.tolist()), "labels.*shape \\(n,\\), got list"),
    "embeddings of three dimensions": (
        lambda: ask(pml.SupConLoss(), rows()[:, None], LABELS, mode="rows"),
        "embeddings.*shape \\(n, D\\), got shape \\(4, 1, 6\\)",
    ),
    "pairs without negatives": (
        lambda: ask(pml.ContrastiveLoss(), rows(), LABELS, (LABELS, LABELS)),
        "3 or 4 tensors of row numbers.*got 2",
    ),
    "tuples that are lists": (
        lambda: ask(pml.ContrastiveLoss(), rows(), LABELS, ([0], [1], [2])),
        "3 or 4 tensors of row numbers.*got list, list, list",
    ),
    "tuples of other references": (
        lambda: ask(
            pml.ContrastiveLoss(),
            rows(),
            LABELS,
            GlobalBatchMiner(miners.BatchHardMiner())(rows(), LABELS, rows(count=6), torch.arange(6) // 3),
            mode="rows",
        ),
        "of the 4 references.*of 6 references",
    ),
    "no miner": (lambda: GlobalBatchMiner(nn.Identity()), "miner"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises((ConfigurationError, InputError), match=f"(?s){words}"):
        call()


def test_a_loss_that_embeds_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankingOfTexts, "__module__", "sentence_transformers.losses.multiple_negatives_ranking")
    expected = "RankingOfTexts, which embeds texts itself.*Embed this rank's texts first.*explain sentence_transformers"
    with pytest.raises(ConfigurationError, match=f"(?s){expected}"):
        GlobalBatchLoss(RankingOfTexts(nn.Identity()))


NOT_FINITE: dict[str, Callable[[], Any]] = {
    "triplets": pml.TripletMarginLoss,
    "smooth triplets": lambda: pml.TripletMarginLoss(smooth_loss=True),
    "contrastive": pml.ContrastiveLoss,
    "NT-Xent": pml.NTXentLoss,
}


def a_row_is_nan(name: str) -> tuple[float, float, float, bool]:
    """The value of tiles, of the full loss on every rank and of one process, and whether all gradients of this rank are NaN."""
    world, rank = dist.get_world_size(), dist.get_rank()
    embeddings, labels = rows(count=12).detach(), torch.arange(12) // 3
    embeddings[2] = torch.nan
    values = []
    for mode in ("rows", "replicated"):
        own = embeddings.chunk(world)[rank].clone().requires_grad_()
        value = GlobalBatchLoss(NOT_FINITE[name](), mode=mode)(own, labels.chunk(world)[rank])
        value.backward()
        values.append(value.item())
    assert own.grad is not None
    return *values, NOT_FINITE[name]()(embeddings, labels).item(), bool(own.grad.isnan().any(1).all())


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_value_does_not_hide_that_a_row_is_nan(pool: RankPool, name: str, world_size: int) -> None:
    """PML's reducers leave NaN out of the value, while its gradients are NaN. The value of tiles is NaN."""
    for tiles, replicated, alone, are_nan in pool.run(world_size, a_row_is_nan, name):
        assert are_nan
        assert tiles != tiles
        assert replicated == pytest.approx(alone, rel=1e-9, nan_ok=True)
