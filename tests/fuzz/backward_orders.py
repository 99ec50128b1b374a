"""Several losses and collectives, back-propagated one by one in an order of each rank's own: exact, or the same error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss
from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad
from tests.fuzz.data import RowsCase, rows_strategy
from tests.fuzz.engine import Domain, Found, Place


@dataclass(frozen=True)
class Case(RowsCase):
    terms: tuple[str, ...]
    orders: tuple[tuple[int, ...], ...]
    together: bool
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    rows = draw(rows_strategy())
    terms = draw(st.lists(st.sampled_from(sorted(TERMS)), min_size=2, max_size=3))
    first = draw(st.permutations(range(len(terms))))
    same = draw(st.booleans())
    orders = [first if same else draw(st.permutations(range(len(terms)))) for _ in rows.ranks]
    return Case(rows, tuple(terms), tuple(map(tuple, orders)), together=draw(st.booleans()))


# each with the loss on the ranks, and in one process
Term = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]


def of_all(loss: nn.Module, **options: Any) -> Term:
    def on_ranks(x: Tensor, labels: Tensor) -> Tensor:
        return GlobalBatchLoss(loss, **options)(x, labels)

    return on_ranks, loss


def towers() -> Term:
    def on_ranks(x: Tensor, labels: Tensor) -> Tensor:
        return ClipLoss().double()(x, x.flip(1) * 2)

    def naive(x: Tensor, labels: Tensor) -> Tensor:
        a, b = nn.functional.normalize(x), nn.functional.normalize(x.flip(1) * 2)
        logits = a @ b.T * torch.tensor(1 / 0.07).log().double().exp()  # it is kept in float32 first
        target = torch.arange(len(x))
        return (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target)) / 2

    return on_ranks, naive


TERMS: dict[str, Callable[[], Term]] = {
    "NTXent": lambda: of_all(pml.NTXentLoss()),
    "NTXent again": lambda: of_all(pml.NTXentLoss()),
    "MultiSimilarity": lambda: of_all(pml.MultiSimilarityLoss()),
    "MultiSimilarity, rows": lambda: of_all(pml.MultiSimilarityLoss(), mode="rows"),
    "TripletMargin": lambda: of_all(pml.TripletMarginLoss(smooth_loss=True)),
    "FastAP": lambda: of_all(pml.FastAPLoss()),
    "towers": towers,
    "gather": lambda: (
        lambda x, labels: all_gather_with_grad(x).tanh().square().mean(),
        lambda x, labels: x.tanh().square().mean(),
    ),
    "sum": lambda: (
        lambda x, labels: all_reduce_with_grad(x.tanh().sum(0)).square().sum(),
        lambda x, labels: x.tanh().sum(0).square().sum(),
    ),
}


def differentiate(values: list[Tensor], order: tuple[int, ...], together: bool) -> None:
    if together:
        sum(values[index] * (1 + index) for index in order).backward()  # type: ignore[union-attr]
        return
    for index in order:
        (values[index] * (1 + index)).backward()


def play(case: Case, place: Place) -> Found:
    data, found = place.data(), {}
    labels = place.own(data["labels"])
    leaves = [place.leaf(f"x {index}", data["view 0"]) for index in range(len(case.terms))]
    values = [TERMS[name]()[place.alone](x, labels) for name, x in zip(case.terms, leaves, strict=True)]
    differentiate(values, case.orders[place.rank or 0], case.together)
    for index, value in enumerate(values):
        found[f"value {index}"] = value.detach()
    return found


DOMAIN = Domain.of("backward orders", cases(), play)
