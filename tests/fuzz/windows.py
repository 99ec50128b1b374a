"""`accumulation_window` in random loops: order of calls, skipped micro-batches, counts, functions of means, checkpoints, other modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import GlobalBatchLoss, accumulation_window, global_mean
from tests.fuzz.engine import Domain, Found, NotDefined, zero_or

FEATURES, CLASSES = 3, 4
FUNCTIONS = {
    "linear": lambda mean: mean,
    "square": torch.square,
    "root": lambda mean: (mean + 1).sqrt(),
    "clamp": lambda mean: mean.clamp(min=0.05),
    "log": lambda mean: (mean + 1).log(),
}


@dataclass(frozen=True)
class Term:
    """One term of what is back-propagated.

    Attributes:
        kind: A hand-written mean, or a loss over targets of which some are ignored.
        function: Function of it.
        weights: Its weight in each micro-batch, by turns.
    """

    kind: str
    function: str
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Case:
    """One window.

    Attributes:
        ranks: Ranks, of which the engine knows the number.
        sizes: Rows of each micro-batch on each rank.
        terms: What is added up.
        skipped: Micro-batches that all ranks skip after their forward.
        order: Backward after each forward, or all forwards first.
        counts: Whether and how the counts of the window are given.
        checkpointed: Whether layers are computed again in backward, and by which of torch's two ways.
        hidden: The micro-batch in which a module that the window does not know takes the head's place.
        estimate: Number of micro-batches that the window is given.
        seed: Seed of parameters and rows.
    """

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    terms: tuple[Term, ...]
    skipped: frozenset[int]
    order: str
    counts: str
    checkpointed: bool | None
    hidden: int
    estimate: int
    seed: int
    dtype: str = "float64"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.tuples(*[st.integers(0, 4)] * world), min_size=2, max_size=4))
    weights = st.one_of(st.just((1.0,)), st.just((0.5,)), st.just((2.0, 2.0)), st.just((1.0, 3.0)))
    term = st.builds(
        Term, st.sampled_from(["mean", "mean", "loss"]), st.sampled_from(["linear"] * 6 + [*FUNCTIONS]), weights
    )
    return Case(
        ranks=(1,) * world,
        sizes=tuple(sizes),
        terms=tuple(draw(st.lists(term, min_size=1, max_size=2))),
        skipped=draw(st.sampled_from([frozenset[int](), frozenset[int](), frozenset({1})])),
        order=draw(st.sampled_from(["plain", "forwards first"])),
        counts=draw(st.sampled_from(["none", "none", "by name", "wrong"])),
        checkpointed=draw(st.sampled_from([None, None, True, False])),
        hidden=draw(st.sampled_from([-1] * 5 + [1])),
        estimate=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 99)),
    )


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()).double()
        self.head = nn.Linear(5, CLASSES).double()
        self.losses = nn.ModuleList([GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1)) for _ in range(2)])

    def forward(self, rows: Tensor, case: Case, head: nn.Module | None = None) -> Tensor:
        if case.checkpointed is None:
            hidden = self.layers(rows)
        else:
            hidden = checkpoint(self.layers, rows.requires_grad_(), use_reentrant=case.checkpointed)
        return torch.as_tensor((head or self.head)(hidden))


def rows_of(case: Case, micro_batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed * 10 + micro_batch)
    return torch.randn(sum(case.sizes[micro_batch]), FEATURES, generator=generator, dtype=torch.float64)


def labels_of(rows: Tensor) -> Tensor:
    return torch.where(rows[:, 0] > 0.5, -1, (rows.sum(1).abs() * 10).long() % CLASSES)


def number_of(term: Term, rows: Tensor) -> int:
    return len(rows) if term.kind == "mean" else int((labels_of(rows) >= 0).sum())


def weight_of(term: Term, micro_batch: int) -> float:
    return term.weights[micro_batch % len(term.weights)]


def on_rank(case: Case) -> Found:
    rank, net, other = dist.get_rank(), Net(case.seed), nn.Linear(5, CLASSES).double()
    counted = [i for i in range(len(case.sizes)) if i not in case.skipped]
    own = [rows_of(case, i).split(list(case.sizes[i]))[rank] for i in range(len(case.sizes))]
    counts: Any = None
    if case.counts != "none":
        counts = {}
        for i, term in enumerate(case.terms):
            number = sum(number_of(term, own[j]) for j in counted) + (case.counts == "wrong")
            counts[f"term {i}" if term.kind == "mean" else f"losses.{i}"] = number

    def value_of(micro_batch: int) -> Tensor:
        rows = own[micro_batch]
        out = net(rows, case, other if micro_batch == case.hidden else None)
        value = torch.zeros((), dtype=torch.float64)
        for i, term in enumerate(case.terms):
            if term.kind == "mean":
                mean = global_mean(out.square().sum() * (1 + i), len(rows), name=f"term {i}")
            else:
                mean = net.losses[i](out, labels_of(rows))
            value = value + weight_of(term, micro_batch) * FUNCTIONS[term.function](mean)
        return value

    with accumulation_window(net, micro_batches=case.estimate, counts=counts):
        if case.order == "plain":
            for i in range(len(own)):
                value = value_of(i)
                if i not in case.skipped:
                    value.backward()  # type: ignore[no-untyped-call]
        else:
            values = [value_of(i) for i in range(len(own))]
            for i in counted:
                values[i].backward()  # type: ignore[no-untyped-call]
    return {name: zero_or(p) for name, p in net.named_parameters()}


def alone(case: Case) -> dict[str, Any]:
    """One process on all rows that are back-propagated, where each weight is that of the first micro-batch that counts."""
    net = Net(case.seed)
    counted = [i for i in range(len(case.sizes)) if i not in case.skipped]
    if case.hidden in counted and case.counts == "by name":
        raise NotDefined  # with counts nothing is corrected, so the window may not know a module
    rows = torch.cat([rows_of(case, i) for i in counted])
    value = torch.zeros((), dtype=torch.float64)
    for i, term in enumerate(case.terms):
        number = number_of(term, rows)
        if not number:
            continue
        first = next(j for j in counted if number_of(term, rows_of(case, j)))
        out = net.head(net.layers(rows))
        if term.kind == "mean":
            mean = out.square().sum() * (1 + i) / number
        else:
            mean = nn.functional.cross_entropy(out, labels_of(rows), ignore_index=-1)
        value = value + weight_of(term, first) * FUNCTIONS[term.function](mean)
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    return {name: zero_or(p) for name, p in net.named_parameters()}


DOMAIN = Domain("windows", cases(), on_rank, alone)
