"""One rank calls another loss, in another mode, on another device or inside a captured graph: the same error on all ranks; else silence."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses import SyncBatchNorm, global_mean
from lightning_ddp_losses.collectives import all_reduce_with_grad
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.harness import CLASSES, DIM, line_of_rows

LABELS = torch.tensor([0, 0, 1, 1])
rows = partial(line_of_rows, dtype=torch.float32)
Call = Callable[[], Any]


def arc() -> nn.Module:
    return pml.ArcFaceLoss(CLASSES, DIM)


class Weighted(nn.Module):
    """A user's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, rows: Tensor, others: Tensor) -> Tensor:
        return (rows * others * self.weight).mean()


def norm() -> Callable[[Tensor, Tensor], Tensor]:
    layer = nn.BatchNorm1d(DIM)
    with mock.patch.object(torch.cuda, "is_initialized", return_value=False):  # to synchronise it is a handshake too
        SyncBatchNorm().apply(layer)
    return lambda rows, _: layer(rows)


# each is called with rows, and with labels or (PAIRED) with rows
KINDS: dict[str, Callable[..., Any]] = {
    "replicated": lambda **name: GlobalBatchLoss(pml.SupConLoss(), **name),
    "rows": lambda **name: GlobalBatchLoss(pml.SupConLoss(), mode="rows", **name),
    "elements": lambda **name: GlobalBatchLoss(nn.CrossEntropyLoss(), **name),
    "elements of PML": lambda **name: GlobalBatchLoss(arc(), **name),
    "class weights": lambda **name: GlobalBatchLoss(nn.CrossEntropyLoss(torch.ones(DIM)), **name),
    "a user's": lambda **name: GlobalBatchLoss(Weighted(), **name),
    "miner": lambda **name: GlobalBatchMiner(miners.MultiSimilarityMiner(), **name),
    "class shards": lambda **name: ClassShardedLoss(arc(), **name),
    "towers": ClipLoss,
    "towers, ring": lambda **name: SigLipLoss(gather="ring", **name),
    "metric": lambda: differentiable(torchmetrics.MeanSquaredError()),
    "global_mean": lambda: lambda rows, _: global_mean(rows.sum(), 4),
    "collective": lambda: lambda rows, _: all_reduce_with_grad(rows),
    "batch norm": norm,
}
PAIRED = ("a user's", "towers", "towers, ring", "metric")


def second_argument(kind: str) -> Tensor:
    return rows() * 0.5 if kind in PAIRED else LABELS


def call_of(kind: str, **name: Any) -> Call:
    made = KINDS[kind](**name)
    return lambda: made(rows(), second_argument(kind))


# ---------------------------------------------------------------------- several losses of one kind


ORDERED = ["replicated", "rows", "elements", "miner", "class shards", "towers", "metric"]
MADE_ALONE = [kind for kind in ORDERED if kind != "class shards"]  # which all ranks make together


def call_in_order(calls: list[Call], swapped: bool) -> None:
    """Call each three times, the ranks alike or rank 1 the other way round."""
    for _ in range(3):
        for call in calls[:: -1 if swapped and dist.get_rank() == 1 else 1]:
            call()


def two(kind: str, swapped: bool, extra_on: int | None = None) -> None:
    if dist.get_rank() == extra_on:
        KINDS[kind]()
    call_in_order([call_of(kind), call_of(kind)], swapped)


@pytest.mark.parametrize("kind", MADE_ALONE)
@pytest.mark.parametrize("extra_on", [None, 0, 1])
def test_the_same_order_is_silent(pool: RankPool, kind: str, extra_on: int | None) -> None:
    pool.run(2, two, kind, False, extra_on)


def named(kind: str, swapped: bool) -> None:
    names = ["first", "second"]
    # made in another order on rank 1
    calls = {name: call_of(kind, name=name) for name in (names[::-1] if dist.get_rank() else names)}
    call_in_order([calls[name] for name in names], swapped)


@pytest.mark.parametrize("kind", ORDERED[:-1])
def test_names_make_the_order_that_losses_are_made_in_free(pool: RankPool, kind: str) -> None:
    pool.run(2, named, kind, False)


def labelled(made: nn.Module) -> Call:
    return lambda: made(rows(), LABELS)


def copies() -> None:
    loss = KINDS["replicated"]()
    if dist.get_rank():
        copy.deepcopy(loss)
    again, other = copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))
    call_in_order([labelled(each) for each in (loss, again, loss, other)], swapped=False)
    call_in_order([labelled(again), labelled(other)], swapped=True)


@each_rank(3)
def test_a_loss_made_in_each_step_is_silent() -> None:
    kept = call_of("replicated")
    for _ in range(100):
        call_of("replicated")()
        kept()


# ---------------------------------------------------------------------- under autocast, or without gradients


MODES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], str]] = {
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast=on"),
    "no_grad": (torch.no_grad, "gradients=off"),
}
MODAL = [*ORDERED, "elements of PML", "global_mean"]


def call_in_mode(kind: str, mode: str, ranks: list[int]) -> None:
    torch.manual_seed(0)
    encoder, made = nn.Linear(DIM, DIM), KINDS[kind]()
    with MODES[mode][0]() if dist.get_rank() in ranks else contextlib.nullcontext():
        embeddings = encoder(rows())
        made(embeddings, embeddings * 0.5 if kind in PAIRED else LABELS)


@pytest.mark.parametrize(
    ("kind", "mode"), [(kind, mode) for kind in MODAL for mode in MODES if (kind, mode) != ("miner", "no_grad")]
)
def test_one_mode_on_all_ranks_is_silent(pool: RankPool, kind: str, mode: str) -> None:
    pool.run(2, call_in_mode, kind, mode, [0, 1])


# ---------------------------------------------------------------------- tensors, or a loss, on another device: torch's `meta`


PLACED = [kind for kind in KINDS if kind not in ("metric", "global_mean", "collective", "batch norm")]
WITHOUT_TENSORS = ("replicated", "rows", "elements", "miner")


def tensors_apart(kind: str) -> None:
    KINDS[kind]()(rows(), second_argument(kind).to("meta" if dist.get_rank() else "cpu"))


def loss_apart(kind: str) -> None:
    loss = KINDS[kind]()
    loss(rows(), second_argument(kind))
    if dist.get_rank():
        loss.to("meta")
    loss(rows(), second_argument(kind))


def logits_apart(kind: str) -> None:
    KINDS[kind]().predict(rows().to("meta" if dist.get_rank() else "cpu"))


JOBS = [(tensors_apart, kind) for kind in PLACED]
JOBS += [(loss_apart, kind) for kind in PLACED if kind not in WITHOUT_TENSORS]
JOBS += [(logits_apart, "class shards")]


def batch_apart(kind: str) -> None:
    place = "meta" if dist.get_rank() else "cpu"
    KINDS[kind]()(rows().to(place), second_argument(kind).to(place))


# ---------------------------------------------------------------------- inside a captured graph


@contextlib.contextmanager
def capturing(here: bool) -> Iterator[None]:
    """Inside the block, torch says that a graph is captured."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=here),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


def errors_on_rank(captures: list[int]) -> dict[str, str]:
    """What each call says on this rank, then that it works again."""
    found = {}
    for kind in KINDS:
        call, found[kind] = call_of(kind), "no error"
        try:
            with capturing(dist.get_rank() in captures):
                call()
        except ConfigurationError as error:
            found[kind] = str(error)
        call()
    return found


def test_a_captured_graph_is_refused_on_all_ranks_whichever_of_them_captures(pool: RankPool) -> None:
    for captures in ([1], [0, 1]):
        found = pool.run(2, errors_on_rank, captures)
        assert found[0] == found[1]
        for kind, text in found[0].items():
            assert "captured graph" in text, f"{kind}: {text}"
            assert "torch.cuda.graph" in text
            assert 'mode="reduce-overhead"' in text


def test_a_captured_graph_is_refused_by_one_process(pool: RankPool) -> None:
    (found,) = pool.run(1, errors_on_rank, [0])
    alone = {kind: text for kind, text in found.items() if "captured graph" not in text}
    assert set(alone) <= {"collective", "batch norm"}, alone  # which do nothing there that a graph could not hold


# ---------------------------------------------------------------------- batches in dicts


class OfDict(nn.Module):
    """A user's loss of batches by key."""

    def forward(self, rows: Tensor, others: dict[str, Tensor]) -> Tensor:
        return (rows * (others["a"] + 2 * others["b"])).mean()


def keys_in_order(keys_by_rank: list[str], calls_before: int) -> None:
    loss = GlobalBatchLoss(OfDict())
    for _ in range(calls_before):
        loss(rows(), {"a": rows(), "b": rows() * 3})
    loss(rows(), {key: rows() for key in keys_by_rank[dist.get_rank()]})


def test_one_order_of_keys_on_all_ranks_is_silent(pool: RankPool) -> None:
    pool.run(2, keys_in_order, ["ba", "ba"], 2)
