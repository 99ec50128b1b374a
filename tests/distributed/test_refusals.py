"""What exchanges refuse: ranks that disagree, what cannot be sent, backwards in another order, errors of one rank.

Errors that leave ranks without a group, so that each needs fresh ranks, are in the files of their subjects.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from lightning_ddp_losses.errors import InputError, RankMismatchError
from lightning_ddp_losses.sharding import ClassShard
from tests.distributed.test_backward_exchange import EXCHANGING, SILENT, of_a_rank, two_losses
from tests.distributed.test_handshake import overtake, send_much
from tests.doors import handshake, messages
from tests.refusals import Mistake, Refused, refusals, refusals_of_one_process

RANKS = ("rank 0", "rank 1", "rank 2")


def go_on(error: Exception) -> None:
    """The next handshake and the next gather are right, and its gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    assert handshake.all_gather("after", {}, b"ok") == [b"ok"] * world
    rows = torch.full((1 + rank, 2), float(rank), requires_grad=True)
    gathered = all_gather_with_grad(rows)
    gathered.sum().backward()
    assert gathered[:, 0].tolist() == [float(r) for r in range(world) for _ in range(1 + r)]
    assert rows.grad.unique().tolist() == [world]


def decided_by_all(error: Exception) -> None:
    assert error.collective  # type: ignore[attr-defined]
    go_on(error)


# ---------------------------------------------------------------------- handshakes

LONG = "x" * 80
# what a rank gives to the handshake (the operation, what must match, the payload), and words beside the ranks
DISAGREEING: dict[str, tuple[Callable[[int], tuple[Any, ...]], tuple[str, ...]]] = {
    "operation": (lambda rank: (f"loss {rank}", {}), ()),
    "value": (lambda rank: ("loss", {"margin": 0.5 + 0.1 * (rank == 1), "scale": 64}), ("margin", "0.6")),
    "end of a long text": (
        lambda rank: ("loss", {"names": "x" * 5000 + str(rank)}),
        (f"\n  rank 0: names=...{LONG}0\n",),
    ),
    "behind a long text": (
        lambda rank: ("loss", {"configuration": "x" * 600, "width": 7 + rank}),
        ("RankMismatchError: loss: width: expected the same on every rank\n  rank 0: width=7\n  rank 1: width=8\n",),
    ),
    "a missing value": (lambda rank: ("loss", {"margin": 1} if rank else {}), ()),
    "many bytes per character": (lambda rank: ("loss", {"names": "é" * 223 + str(rank)}), ()),
    "an awkward value": (lambda rank: ("loss", {"text": f"a=b\nc=d{rank}"}), ()),
    "a large payload on one side": (lambda rank: ("loss", {"margin": rank}, bytes(9000 * rank)), ()),
}


def disagree(case: str, rank: int) -> None:
    handshake.all_gather(*DISAGREEING[case][0](rank))


def disagreeing(case: str, ranks: int) -> Refused:
    words = (*DISAGREEING[case][1], *RANKS[:ranks])
    unsaid = "scale" if case == "value" else None
    return Refused(partial(disagree, case), words, "RankMismatchError", ranks, unsaid=unsaid, after=decided_by_all)


def fail_on(failing: tuple[int, ...], error: BaseException, rank: int) -> None:
    if rank in failing:
        handshake.raise_on_all_ranks(error, "training_step")
    handshake.all_gather("loss", {"rows": 3}, b"x" * 2000)


def failing(ranks: tuple[int, ...], text: str) -> Refused:
    """An error of ours on some ranks of three is the same on all."""
    return Refused(partial(fail_on, ranks, InputError(text)), (text, "training_step"), "InputError", 3, after=go_on)


def different_errors(rank: int) -> None:
    own = [InputError("labels"), RankMismatchError("widths"), InputError("labels")][rank]
    handshake.raise_on_all_ranks(own, "training_step")


def skipped_call(rank: int) -> None:
    if rank != 1:
        handshake.all_gather("loss 'arcface'", {"rows": "?"})
    handshake.all_gather("backward", {"step": 0})


def in_another_order(rank: int) -> None:
    """Rank 0 leaves one on its way when it opens the next; the other opens them the other way round."""
    if rank == 0:
        handshake.start("first", {})
        handshake.all_gather("second", {})
    else:
        handshake.all_gather("second", {})
        handshake.all_gather("first", {})


def announce_much(rank: int) -> None:
    pack = messages.Header.pack

    def more(kind: Any, text: Any, digest: Any, payload_bytes: int, *rest: Any) -> Any:
        return pack(kind, text, digest, (64 << 20) + 1 if rank == 1 else payload_bytes, *rest)

    # nothing is made ready for what it announces
    gathered = mock.patch.object(handshake.PendingHandshake, "_gather_rest", side_effect=AssertionError("gathered"))
    with mock.patch.object(messages.Header, "pack", more), gathered:
        handshake.all_gather("this", {})


def speak_another_version(rank: int) -> None:
    with mock.patch.object(messages, "VERSION", 1 + (rank == 1)):
        handshake.all_gather("this", {}, bytes(20_000))


BEYOND = ("at most 67,108,864 bytes", "  rank 1: 67,108,865 bytes\n")
TEXTS = {"short": "labels: expected 0..4, got 9", "long": "long " * 2000 + "end"}
HANDSHAKES: dict[str, Refused] = {
    **{f"{case}, {W} ranks": disagreeing(case, W) for case in DISAGREEING for W in (2, 3)},
    **{
        f"a {name} error of ranks {ranks}": failing(ranks, text)
        for name, text in TEXTS.items()
        for ranks in ((0,), (1,), (2,), (0, 2), (0, 1, 2))
    },
    "an error that is not ours stays itself": Refused(
        partial(fail_on, (1,), ZeroDivisionError("division by zero")),
        ("PeerError: ", "ZeroDivisionError", "rank 1"),
        ranks=3,
        own={1: "ZeroDivisionError: division by zero"},
        after=go_on,
    ),
    "a signal in one process": Refused(
        partial(fail_on, (0,), KeyboardInterrupt("stop")), (), ranks=1, own={0: "KeyboardInterrupt: stop"}
    ),
    "an error in one process, which gets no place": Refused(
        partial(fail_on, (0,), InputError("x")), "InputError: x", ranks=1, unsaid="training_step", after=go_on
    ),
    "different errors make one that holds all": Refused(different_errors, ("labels", "widths"), ranks=3),
    "a skipped call meets the next handshake": Refused(skipped_call, ("arcface", "backward"), "RankMismatchError", 3),
    **{f"a pending one met another, {W} ranks": Refused(in_another_order, (), "RankMismatchError", W) for W in (2, 3)},
    "an error while a long one is on its way": Refused(lambda _: overtake(True), "rank 1 met this"),
    "a header that announces more than 64 MiB": Refused(announce_much, BEYOND, "PeerError", 3),
    "a payload of ours that is too long": Refused(lambda _: send_much(False), "PeerError: ", same=False),
    "another version, of which nothing is read": Refused(
        speak_another_version, "  rank 1: handshake version 2\n", "RankMismatchError"
    ),
}
test_handshakes = refusals(__name__, "HANDSHAKES")


# ---------------------------------------------------------------------- collectives

X = torch.ones(4, 2)
# what is the same on all ranks
UNSENT: dict[str, tuple[Callable[[], object], str]] = {
    "uint64": (lambda: all_reduce_with_grad(X.to(torch.uint64)), "torch.uint64"),
    "half complex": (lambda: reduce_scatter_with_grad(X.to(torch.complex32)), "torch.complex32"),
    "sparse": (lambda: all_reduce_with_grad(X.to_sparse()), "torch.sparse_coo"),
    "quantised": (lambda: all_gather_with_grad(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)), "torch.qint8"),
    "nested": (lambda: all_gather_with_grad(torch.nested.nested_tensor([X, X])), "dense"),
    "without memory": (lambda: all_gather_with_grad(X.to("meta")), "on meta"),
    "grad": (lambda: torch.func.grad(lambda x: all_gather_with_grad(x).sum())(X), "torch.func"),
    "vjp": (lambda: torch.func.vjp(all_reduce_with_grad, X), "torch.func"),
    "jacrev": (lambda: torch.func.jacrev(lambda x: reduce_scatter_with_grad(x).sum(0))(X), "torch.func"),
    "vmap": (lambda: torch.func.vmap(all_reduce_with_grad)(X), "torch.func"),
    "jvp": (lambda: torch.func.jvp(all_gather_with_grad, (X,), (X,)), "torch.func"),
}


def send(case: str, by: int, rank: int) -> None:
    """So many ranks send what cannot be sent, the others rows."""
    if rank < by:
        UNSENT[case][0]()
    else:
        all_gather_with_grad(X)


def one_call_more(rank: int) -> None:
    for _ in range(1 + (rank > 0)):
        all_reduce_with_grad(torch.ones(()))
        all_gather_with_grad(torch.ones(2))
    all_reduce_with_grad(torch.ones(7))


Row = tuple[Callable[[int], object], str | tuple[str, ...]]
DIFFERENT: dict[str, Row] = {
    "width": (lambda r: all_gather_with_grad(torch.ones(2, 3 + r)), ("rank 0: shape=('rows', 3)", "('rows', 4)")),
    "a large width": (lambda r: all_gather_with_grad(torch.ones(2, 3 if r else 30_000)), "('rows', 30000)"),
    "number of dimensions": (
        lambda r: all_gather_with_grad(torch.ones([(2, 3), (6,), (1, 2, 3)][r])),
        "rank 1: shape=('rows',)",
    ),
    "dtype": (
        lambda r: all_gather_with_grad(torch.ones(2, 3, dtype=torch.float64 if r else torch.float32)),
        ("dtype: expected the same", "float32", "float64"),
    ),
    "dtype of equal size": (
        lambda r: all_gather_with_grad(torch.ones(2, dtype=torch.int32 if r else torch.float32)),
        ("float32", "int32"),
    ),
    "backward": (
        lambda r: all_gather_with_grad(torch.ones(2, 3), backward="own_slice" if r else "sum"),
        ("backward=sum", "backward=own_slice"),
    ),
    "operation": (
        lambda r: (all_reduce_with_grad if r else all_gather_with_grad)(torch.ones(2, 3)),
        ("all_reduce", "all_gather"),
    ),
    "scatter and gather": (
        lambda r: (reduce_scatter_with_grad if r else all_gather_with_grad)(torch.ones(6, 3)),
        ("reduce_scatter", "all_gather"),
    ),
    "number of calls": (one_call_more, ("rank 0: shape=(7,)", "rank 1: shape=()")),
    "shape of a reduction": (lambda r: all_reduce_with_grad(torch.ones(3 + r)), "rank 1: shape=(4,)"),
    "rows of a reduction": (
        lambda r: reduce_scatter_with_grad(torch.ones(6 + 6 * (r == 1), 2)),
        "rank 1: shape=(12, 2)",
    ),
}
SUM, TENSOR = "rows: expected non-negative numbers that sum to the", "expected a torch.Tensor, got"
WRONG: dict[str, Row] = {
    "rows that do not sum": (lambda r: reduce_scatter_with_grad(torch.ones(6, 2), 2 + r), (SUM, "rank 1: 3")),
    "negative rows": (lambda r: reduce_scatter_with_grad(torch.ones(6, 2), -1 if r else 7), (SUM, "rank 1: -1")),
    "rows nobody can divide": (lambda r: reduce_scatter_with_grad(torch.ones(7, 2)), f"{SUM} 7 rows"),
    "a scalar to scatter": (lambda r: reduce_scatter_with_grad(torch.ones(())), "got a 0-dim tensor"),
    "no tensor on one rank": (lambda r: all_gather_with_grad([1.0] if r == 1 else torch.ones(2)), f"{TENSOR} list"),
    "no tensor anywhere": (lambda r: all_reduce_with_grad(None), f"{TENSOR} NoneType"),  # type: ignore[arg-type]
    "unknown backward on one rank": (
        lambda r: all_reduce_with_grad(torch.ones(2), backward="mean" if r == 1 else "sum"),
        "expected 'sum' or 'own_slice', got 'mean'",
    ),
    "rows that are no number": (
        lambda r: reduce_scatter_with_grad(torch.ones(6, 2), "3" if r == 1 else None),
        "expected an int or None, got '3'",
    ),
}
COLLECTIVES: dict[str, Refused] = {
    **{
        f"{case}, {W} ranks": Refused(call, words, kind, W, after=go_on)
        for kind, table in {"RankMismatchError": DIFFERENT, "InputError": WRONG}.items()
        for case, (call, words) in table.items()
        for W in (2, 3)
    },
    **{
        f"{case} on {'all ranks' if by == 2 else 'one rank'}": Refused(
            partial(send, case, by), words, "InputError", after=go_on
        )
        for case, (_, words) in UNSENT.items()
        for by in (1, 2)
    },
}
_warns = pytest.mark.filterwarnings("ignore")  # torch says that nested tensors and quantised ones may change
test_collectives = _warns(refusals(__name__, "COLLECTIVES"))


# ---------------------------------------------------------------------- backward


def one_rank_differentiates(kind: str, rank: int) -> None:
    """Rank 0 back-propagates; the others go on to the next forward."""
    loss, x, labels = of_a_rank(kind)
    value = loss(x, labels)
    if rank == 0:
        value.backward()
    loss(x, labels)


def in_another_order_on_the_last(kind: str, ranks: int, large: bool) -> Refused:
    words = ("backward of ", *(f"{name}: " for name in RANKS[:ranks]))
    return Refused(lambda _: two_losses(kind, ranks - 1, large), words, "RankMismatchError", ranks)


BACKWARDS: dict[str, Refused] = {
    # few bytes and many, two ranks and three, crossed over with the kinds
    **{
        f"another order on one rank, {kind}, {W} ranks": in_another_order_on_the_last(kind, W, (number + W) % 2 == 0)
        for number, kind in enumerate(EXCHANGING)
        for W in (2, 3)
    },
    **{
        f"one rank's backward meets the others' next forward, {kind}": Refused(
            partial(one_rank_differentiates, kind), "rank 0: backward of ", "RankMismatchError", 3
        )
        for kind in EXCHANGING
    },
    # backward exchanges nothing, so that the next forward finds it
    **{
        f"one rank's backward, {kind}": Refused(
            partial(one_rank_differentiates, kind),
            ("coefficient of the last backward", "rank 1: "),
            "RankMismatchError",
            3,
        )
        for kind in SILENT
    },
}
test_backwards = refusals(__name__, "BACKWARDS")


# ---------------------------------------------------------------------- groups and blocks of classes


class Managed(dist.ProcessGroup):
    """As torchft's: not of torch.distributed's making, and of a size of its own."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def size(self) -> int:
        return 2


GROUPS: dict[str, Refused] = {
    f"a group that torch has not made, {name}": Refused(
        lambda _: all_gather_with_grad(torch.ones(2), group=Managed()),
        ("got Managed", "mean of the gradients over the replicas"),
        "ConfigurationError",
        ranks,
    )
    for name, ranks in {"one rank": 1, "without ranks": 0}.items()
}
test_groups = refusals(__name__, "GROUPS")

BOUNDS: dict[str, Mistake] = {
    str(bounds): (partial(ClassShard, *bounds), "expected 0 <= start <= stop <= num_classes")
    for bounds in ((-1, 2, 3), (2, 1, 3), (0, 4, 3), (4, 4, 3))
}
test_bounds = refusals_of_one_process(BOUNDS, ValueError)
