"""`accumulation_window` in random loops: orders of calls on each rank, micro-batches that ranks skip, counts, names, functions of means,
checkpoints, other modules, scalers, FSDP2, and what breaks a window.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import GlobalBatchLoss, accumulation_window, global_mean
from tests.fuzz.engine import Domain, Found, NotDefined, Place, zero_or
from tests.oracle import normal

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
        skipped: Micro-batches and ranks that skip them after their forward.
        order: Backward after each forward, all forwards first, in another order on each rank, or one backward of their sum.
        counts: Whether and how the counts of the window are given.
        is_declared: Whether micro-batches are declared.
        names: Whether a hand-written mean has a name.
        checkpointed: Whether layers are computed again in backward, and by which of torch's two ways.
        hidden: The micro-batch in which a module that the window does not know takes the head's place.
        fault: What goes wrong in the window.
        scale: Of a scaler of half precision. None without one.
        is_sharded: Whether ``fully_shard`` divides the model.
        is_learned: Whether a weight of the losses is learned.
        estimate: Number of micro-batches that the window is given.
        seed: Seed of parameters and rows.
    """

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    terms: tuple[Term, ...]
    skipped: frozenset[tuple[int, int]]
    order: str
    counts: str
    is_declared: bool
    names: bool
    checkpointed: bool | None
    hidden: int
    fault: str
    scale: float | None
    is_sharded: bool
    is_learned: bool
    estimate: int
    seed: int
    dtype: str = "float64"

    def counted(self, rank: int) -> list[int]:
        """Micro-batches that a rank back-propagates."""
        return [i for i in range(len(self.sizes)) if (i, rank) not in self.skipped]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.tuples(*[st.integers(0, 4)] * world), min_size=2, max_size=4))
    weights = st.one_of(*[st.just((1.0,))] * 3, st.just((0.5,)), st.just((2.0, 2.0)), st.just((1.0, 3.0)))
    function = st.sampled_from(["linear"] * 12 + [*FUNCTIONS])
    term = st.builds(Term, st.sampled_from(["mean", "mean", "loss", "new loss"]), function, weights)
    is_sharded = draw(st.sampled_from([False] * 5 + [True]))
    places = [(i, rank) for i in range(len(sizes)) for rank in range(world)]
    of_all = frozenset((1, rank) for rank in range(world))
    skipped = [st.just(frozenset[tuple[int, int]]()), st.just(of_all)]
    if not is_sharded:
        skipped.append(st.frozensets(st.sampled_from(places), max_size=3))
    orders = ["plain", "plain", "forwards first", "other orders", "one backward"]
    counts = draw(st.sampled_from(["none", "none", "by name", "wrong"]))
    is_declared = draw(st.sampled_from([True, True, True, counts == "none"]))
    return Case(
        ranks=(1,) * world,
        sizes=tuple(sizes),
        terms=tuple(draw(st.lists(term, min_size=1, max_size=2))),
        skipped=draw(st.one_of(skipped)),
        order="plain" if is_sharded else draw(st.sampled_from(orders)),
        counts=counts,
        is_declared=is_declared,
        names=draw(st.booleans()) or counts != "none",
        checkpointed=None if is_sharded else draw(st.sampled_from([None, None, True, False])),
        hidden=-1 if is_sharded else draw(st.sampled_from([-1] * 8 + [1])),
        fault="" if is_sharded else draw(st.sampled_from([""] * 6 + ["zero_grad", "failed", "clipped", "exception"])),
        scale=None if is_sharded else draw(st.sampled_from([None, None, None, 8.0])),
        is_sharded=is_sharded,
        is_learned=False if is_sharded else draw(st.sampled_from([False, counts != "none"])),
        estimate=draw(st.integers(1, 4) if is_declared else st.sampled_from([len(sizes), len(sizes), 1])),
        seed=draw(st.integers(0, 99)),
    )


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()).double()
        self.head = nn.Linear(5, CLASSES).double()
        self.scale = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.losses = nn.ModuleList([GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1)) for _ in range(2)])

    def forward(self, rows: Tensor, case: Case, head: nn.Module | None = None) -> Tensor:
        if case.checkpointed is None:
            hidden = self.layers(rows)
        else:
            hidden = checkpoint(self.layers, rows.requires_grad_(), use_reentrant=case.checkpointed)
        return torch.as_tensor((head or self.head)(hidden))


def rows_of(case: Case, micro_batch: int) -> Tensor:
    return normal(sum(case.sizes[micro_batch]), FEATURES, seed=case.seed * 10 + micro_batch)


def labels_of(rows: Tensor) -> Tensor:
    return torch.where(rows[:, 0] > 0.5, -1, (rows.sum(1).abs() * 10).long() % CLASSES)


def number_of(term: Term, rows: Tensor) -> int:
    return len(rows) if term.kind == "mean" else int((labels_of(rows) >= 0).sum())


def weight_of(term: Term, micro_batch: int) -> float:
    return term.weights[micro_batch % len(term.weights)]


def window_of_a_rank(case: Case, net: Net, rank: int) -> None:
    """Open a window and do in it what the case says."""
    other = nn.Linear(5, CLASSES).double()
    if case.is_sharded:
        for module in (net.layers, net.head, net):
            fully_shard(module)
    own = [rows_of(case, i).split(list(sizes))[rank] for i, sizes in enumerate(case.sizes)]
    if case.fault == "exception":
        # a window that ends so leaves nothing behind
        with contextlib.suppress(ArithmeticError), accumulation_window(net, *net.losses) as window:
            with window.micro_batch():
                global_mean(net(own[0], case).square().sum(), 1).backward()
            raise ArithmeticError
    with accumulation_window(net, micro_batches=case.estimate, counts=counts_of(case, own, rank)) as window:
        scaler = None if case.scale is None else torch.amp.GradScaler("cpu", init_scale=case.scale)
        run_window(case, window, net, other, own, scaler)


def counts_of(case: Case, own: list[Tensor], rank: int) -> Any:
    """This rank's counts, or those that are off by one."""
    if case.counts == "none":
        return None
    counts: dict[Any, float] = {}
    for i, term in enumerate(case.terms):
        number = sum(number_of(term, own[j]) for j in case.counted(rank)) + (case.counts == "wrong")
        counts[f"term {i}" if term.kind == "mean" else f"losses.{i}"] = number
    return counts


def value_of(case: Case, net: Net, other: nn.Module, rows: Tensor, micro_batch: int) -> Tensor:
    """What a rank back-propagates of a micro-batch."""
    out = net(rows, case, other if micro_batch == case.hidden else None)
    value = torch.zeros((), dtype=torch.float64)
    for i, term in enumerate(case.terms):
        if term.kind == "mean":
            mean = global_mean(out.square().sum() * (1 + i), len(rows), name=f"term {i}" if case.names else None)
        elif term.kind == "loss" or case.counts != "none":
            mean = net.losses[i](out, labels_of(rows))
        else:
            mean = GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1))(out, labels_of(rows))
        value = value + weight_of(term, micro_batch) * FUNCTIONS[term.function](mean)
    if case.is_learned:
        value = (torch.exp(-net.scale) * value + net.scale / len(case.sizes)).sum()
    if case.fault == "failed" and micro_batch == 0 and dist.get_rank() == len(case.ranks) - 1:
        value.register_hook(lambda grad: 1 / 0)  # type: ignore[no-untyped-call]
    return value


def run_window(case: Case, window: Any, net: Net, other: nn.Module, own: list[Tensor], scaler: Any) -> None:
    """Run forwards and backwards of a rank, in its order."""
    rank = dist.get_rank()
    values = []
    backwards = []
    for i, rows in enumerate(own):
        with window.micro_batch() if case.is_declared else contextlib.nullcontext():
            values.append(value_of(case, net, other, rows, i))
        if i in case.counted(rank):
            backwards.append(i)
        if case.order == "plain" and i in backwards:
            back_propagate(case, net, values[i], scaler, is_first=i == 0)
    if case.order == "other orders" and rank % 2:
        backwards.reverse()
    if case.order == "one backward" and backwards:
        total = torch.stack([values[i] for i in backwards]).sum()
        back_propagate(case, net, total, scaler, is_first=0 in backwards)
    elif case.order != "plain":
        for i in backwards:
            back_propagate(case, net, values[i], scaler, is_first=i == 0)
    if case.fault == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    # a scaler divides inside the window, or after it
    if scaler is not None and not case.seed % 2 and backwards:
        scaler.unscale_(torch.optim.SGD(net.parameters()))


def back_propagate(case: Case, net: Net, value: Tensor, scaler: Any, *, is_first: bool) -> None:
    scaled = value if scaler is None else scaler.scale(value)
    with contextlib.suppress(ZeroDivisionError):
        scaled.backward()
    if case.fault == "zero_grad" and is_first:
        net.zero_grad()


NEVER = 1e6  # no gradient: only an error is right


def window_of_one_process(case: Case, net: Net) -> None:
    """All rows that are back-propagated, where each weight is the weight of the first micro-batch that counts."""
    world = len(case.ranks)
    counted = sorted((i, rank) for rank in range(world) for i in case.counted(rank))
    if case.counts == "by name" and any(i == case.hidden for i, _ in counted):
        raise NotDefined  # with counts nothing is corrected, so the window may not know a module
    pieces = {(i, rank): rows_of(case, i).split(list(case.sizes[i]))[rank] for i, rank in counted}
    value = torch.zeros((), dtype=torch.float64)
    for i, term in enumerate(case.terms):
        rows = torch.cat([torch.empty(0, FEATURES, dtype=torch.float64), *pieces.values()])
        number = number_of(term, rows)
        if not number:
            continue
        first = next(j for j, rank in counted if number_of(term, pieces[j, rank]))
        out = net.head(net.layers(rows))
        if term.kind == "mean":
            mean = out.square().sum() * (1 + i) / number
        else:
            mean = nn.functional.cross_entropy(out, labels_of(rows), ignore_index=-1)
        value = value + weight_of(term, first) * FUNCTIONS[term.function](mean)
    if case.is_learned:
        value = (torch.exp(-net.scale) * value + net.scale * len(counted) / len(case.sizes) / world).sum()
    if value.requires_grad:
        value.backward()  # type: ignore[no-untyped-call]
    is_broken = (
        case.counts == "wrong"
        or (case.fault == "clipped" and counted)
        or (case.fault == "zero_grad" and any(i == 0 for i, _ in counted))
        or (case.fault == "failed" and (0, world - 1) in counted)
    )
    if is_broken:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, NEVER)


def play(case: Case, place: Place) -> Found:
    net, scale = Net(case.seed), 1.0
    if place.alone:
        window_of_one_process(case, net)
    else:
        window_of_a_rank(case, net, place.rank)
        if case.scale is not None and case.seed % 2:
            scale = case.scale
    found = {}
    for name, parameter in net.named_parameters():
        grad = zero_or(parameter)
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad) / scale
    return found


DOMAIN = Domain.of("windows", cases(), play)
