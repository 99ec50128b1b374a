"""What `global_rows` refuses on every rank, or computes exactly all the same: reads of memory, writes, ranks that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.doors import call
from tests.losses.rows_cases import Square, Thrice, rows_of, rows_of_all
from tests.oracle import own
from tests.refusals import Refused, refusals

ROWS = (5, 2)
Formula = Callable[[Tensor, Tensor], Any]


def rows() -> list[Tensor]:
    """This rank's rows and numbers, of one global batch."""
    return [rows_of(ROWS), torch.arange(7)[own(ROWS)]]


def run(formula: Formula, *, backward: bool = True) -> None:
    value = global_rows(formula, *rows(), name="loss")
    if backward:
        value.backward()


def by_rank(first: Formula, second: Formula) -> Callable[[int], None]:
    return lambda rank: run(second if rank else first)


def every(formula: Formula) -> Callable[[int], None]:
    return lambda rank: run(formula)


def written(write: Callable[[Tensor], Any]) -> Callable[[int], None]:
    def formula(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1
        write(z)
        return z.square().sum()

    return every(formula)


def view_written(x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1
    z[3].zero_()
    return z.square().sum() * x.sum()


def view_written_unseen(x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1
    z[3].data.zero_()
    return z.square().sum() * x.sum()


def written_beside_a_copy(x: Tensor, y: Tensor) -> Tensor:
    first = x[:2] * 1  # a row on a rank, or none
    z = first.T.contiguous()
    z[0] = 0
    return z.sum() + first.sum()


def written_after_view(x: Tensor, y: Tensor) -> Tensor:
    z = x.detach() * 1
    third = z[3]
    z.zero_()
    return third.sum() * x.sum()


def of_means(x: Tensor, y: Tensor) -> Tensor:
    return x.mean(0).square().sum()


def of_deviations(x: Tensor, y: Tensor) -> Tensor:
    return x.std(0).square().sum()


def nested(x: Tensor) -> Tensor:
    return checkpoint(lambda z: z.tanh().mean(), x, use_reentrant=False) * x.sum()


def without_gradient(rank: int) -> None:
    with torch.set_grad_enabled(rank == 0):
        run(lambda x, y: x.mean(0).square().sum(), backward=False)


def captured(rank: int) -> None:
    local = torch.randn(1, 4, generator=torch.Generator().manual_seed(rank)).double()
    run(lambda x, y: ((x - local) ** 2).mean())


OPERATORS = "expected operators that compute with the rows"


def meet_on_a_device(local: bool) -> float:
    """Tensors of the formula are compared at the end of the call, as on an accelerator."""
    with mock.patch.object(call, "_is_on_host", return_value=False):
        own = torch.full((4,), 1.0 + dist.get_rank() * local, dtype=torch.float64)
        return float(global_rows(lambda x, y: (x * own).square().sum(), *rows(), name="loss").detach())


def meet_with_infinity(rank: int) -> None:
    mask = torch.tensor([-torch.inf, 0.0, 1.0, 2.0 + rank], dtype=torch.float64)
    global_rows(lambda x, y: (x + mask).exp().sum(), *rows(), name="loss")


REFUSED: dict[str, tuple[Any, ...]] = {
    # memory
    "data_ptr": (every(lambda x, y: x.data_ptr()), OPERATORS),
    "storage": (every(lambda x, y: x.untyped_storage()), OPERATORS),
    "dlpack": (every(lambda x, y: torch.from_dlpack(x).sum()), OPERATORS),
    "an old dlpack": (every(lambda x, y: torch.utils.dlpack.to_dlpack(x)), OPERATORS),
    "as_strided": (every(lambda x, y: x.as_strided((2,), (1,)).sum()), OPERATORS),
    "a hook": (every(lambda x, y: x.register_hook(print)), OPERATORS),
    "a new data": (every(lambda x, y: setattr(x, "data", y)), OPERATORS),
    "a pickle": (every(lambda x, y: __import__("copy").deepcopy(x)), OPERATORS),
    # what differs between the ranks
    "another number of numpy": (lambda rank: run(lambda x, y: (x * np.float32(2 + rank)).sum()), "equal on all ranks"),
    "another array": (lambda rank: run(lambda x, y: (y * np.array(2 + rank)).sum(), backward=False), "every rank"),
    "another complex number": (lambda rank: run(lambda x, y: (x * complex(0, 2 + rank)).sum().imag), "every rank"),
    "a number that hides in a large tensor": (
        lambda rank: run(lambda x, y: (x * torch.tensor([1e6, 0.1 + 0.1 * rank, 1.0, 1.0]).double()).sum()),
        "that is no argument",
    ),
    # what torch itself loses
    "a weight of l1_loss": (
        every(lambda x, y: F.l1_loss(x, x * 2, weight=x.detach().abs())),
        ("l1_loss on rows of all ranks", "weight=None", "by hand"),
    ),
    # writes
    "a write into an argument": (
        every(lambda x, y: (y.mul_(2)[:, None] * x).sum()),
        ("argument 1", "no write in place"),
    ),
    "a write into an argument's column": (
        every(lambda x, y: (y[:2].zero_() * 0).sum() + x.sum()),
        ("argument 1", "no write in place"),
    ),
    "a write into all rows": (written(lambda z: z.index_fill_(0, torch.tensor([1]), 9.0)), "write in place"),
    "a write by numbers": (written(lambda z: z.__setitem__(torch.tensor([1, 5]), 0.0)), "write in place"),
    "a write of a row": (written(lambda z: z.__setitem__(1, 0.0)), "write in place"),
    "a write of an order": (written(lambda z: z.cumsum_(0)), "write in place"),
    "a random write": (written(lambda z: z.normal_()), "write in place"),
    "an output": (written(lambda z: torch.add(z, 1, out=z)), "write in place"),
    "a write into a view of copied rows": (every(view_written), "expected no write in place"),
    "an uncounted write into a view of copied rows": (every(view_written_unseen), "expected no write in place"),
    "a write below a view of copied rows": (every(written_after_view), "expected no write in place"),
    "a write beside what one row makes no copy": (
        every(written_beside_a_copy),
        ("contiguous", "Whether its result is a copy depends on the number of rows"),
    ),
    # what autograd would lose
    "a custom function": (every(lambda x, y: Square.apply(x).sum()), "custom autograd.Function"),
    "a custom identity": (every(lambda x, y: Thrice.apply(x).mean()), "custom autograd.Function"),
    "a checkpoint of the old kind": (
        every(lambda x, y: checkpoint(lambda z: z.mean(), x, use_reentrant=True)),
        "custom autograd.Function",
    ),
    "a transform": (every(lambda x, y: torch.func.grad(lambda z: z.sin().sum())(x).sum()), "inside a transform"),
    "a gradient of a transform": (
        every(lambda x, y: torch.func.grad(lambda w: (x @ w).mean())(torch.ones(4).double()).sum()),
        "matmul on rows of all ranks: expected an operator that is called by the formula itself, got one inside a transform",
    ),
    "a map over weights": (
        every(lambda x, y: torch.vmap(lambda w: (x * w).sum())(torch.ones(4).double()).sum()),
        ("mul on rows of all ranks", "inside a transform (torch.func, vmap), at test_global_rows_refusals.py"),
    ),
    "a checkpoint in a checkpoint": (
        every(lambda x, y: checkpoint(nested, x, use_reentrant=False)),
        (
            "tanh on rows of all ranks",
            "got one inside another one, at test_global_rows_refusals.py",
            "lambda z: z.tanh()",
        ),
        "ConfigurationError",
    ),
    "a map over rows": (every(lambda x, y: torch.vmap(lambda r: r * 2)(x).sum()), "inside a transform"),
    # results
    "rows": (every(lambda x, y: F.mse_loss(x, x * 2, reduction="none")), "expected values that are equal on all ranks"),
    # ranks that differ
    "another branch": (
        by_rank(of_means, of_deviations),
        ("in of_means: return x.mean", "in of_deviations: return x.std"),
        "RankMismatchError",
    ),
    "one exchange more": (
        by_rank(lambda x, y: x.sum(), of_means),
        "in of_means: return x.mean",
        "RankMismatchError",
    ),
    "another number": (by_rank(lambda x, y: (x * 2).sum(), lambda x, y: (x * 3).sum()), "mul 3", "RankMismatchError"),
    "gradients on one rank": (without_gradient, "gradients", "RankMismatchError"),
    "a tensor of this rank": (captured, "expected the same values on every rank", "RankMismatchError"),
    "a number of this rank": (
        lambda rank: run(lambda x, y: x.sum() * (1 + rank)),
        ("operations on sums", "mul #0 1", "mul #0 2"),
        "RankMismatchError",
    ),
    "another width": (
        lambda rank: global_rows(lambda x: x.sum(), torch.ones(2, 3 + rank), name="loss"),
        "(rows, 4)",
        "RankMismatchError",
    ),
    "sparse rows": (lambda rank: global_rows(torch.sum, torch.eye(2).to_sparse()), "expected a dense tensor"),
    "no function": (lambda rank: global_rows(3, torch.eye(2)), "expected a function"),
    "a write into numpy": Refused(
        every(lambda x, y: x.detach().numpy().fill(0)), (), own=dict.fromkeys((0, 1), "ValueError")
    ),
    "an infinite number beside a difference": (meet_with_infinity, "that is no argument", "DDPLossError", 2, False),
    "a tensor of this rank on an accelerator": (
        lambda rank: meet_on_a_device(True),
        "(4,) torch.float64 that is no argument",
        "DDPLossError",
        2,
        False,
    ),
    # an error of one rank
    "an error of the formula": Refused(
        lambda rank: run(lambda x, y: {}["absent"] if rank else x.sum()), "absent", "PeerError", own={1: "KeyError"}
    ),
}
test_errors_on_every_rank = refusals(__name__, "REFUSED")


def values() -> list[Any]:
    given = [each.detach() for each in rows()]
    return [global_rows(formula, *given, name=f"{number}") for number, formula in enumerate(READ)]


def in_place(x: Tensor, y: Tensor) -> list[float]:
    """The operators that Python writes in place with."""
    x, y, above = x * 1, y * 1, x > 0
    x **= 2
    y <<= 2
    y >>= 1
    above &= x > 1
    above |= x > 4
    above ^= x > 3
    return [*x.sum(1).tolist(), *y.tolist(), above.sum().item()]


READ: list[Formula] = [
    in_place,
    lambda x, y: x.H.tolist() + x.mH.tolist(),
    lambda x, y: x[:2].quantile(0.5, dim=1).tolist(),
    lambda x, y: x.tolist(),
    lambda x, y: y.max().item(),
    lambda x, y: [int(label) for label in y],
    lambda x, y: float(x.sum() > 0),
    lambda x, y: np.asarray(x).sum().item(),
    lambda x, y: x.numpy().tolist(),
    lambda x, y: 3 in y,
    lambda x, y: [len(x), x.shape[0], x.size(0), x.numel(), x.ndim, x.dim(), list(x.shape[1:])],
    lambda x, y: y[x[:, 0] > 0].tolist(),
    lambda x, y: y.unique().tolist(),
    lambda x, y: torch.nonzero(y > 2).tolist(),
    lambda x, y: [part.tolist() for part in x.split(3)],
    lambda x, y: torch.where(y > 2)[0].tolist(),
    lambda x, y: y.float().mean().item(),
    lambda x, y: bool((y >= 0).all()) and bool((y == 3).any()),
    lambda x, y: x.view(-1, 2).tolist(),
    lambda x, y: x.reshape(-1)[::3].tolist(),
    lambda x, y: torch.flip(y, (0,)).tolist(),
    lambda x, y: y.roll(1).tolist(),
    lambda x, y: torch.complex(x, x).abs().sum().item(),
    lambda x, y: f"{y.max()}",
    lambda x, y: torch.histc(x, 4).tolist(),
    lambda x, y: x.to(torch.float32).dtype == torch.float32 and x.device.type == "cpu",
    lambda x, y: (x > 0).sum().item() + (x > 0).float().argmax(0).sum().item(),
]


def test_reads_are_those_of_one_process(pool: RankPool) -> None:
    whole = rows_of_all(ROWS), torch.arange(7)
    for found in pool.run(2, values):
        for number, formula in enumerate(READ):
            assert str(found[number]) == str(formula(*whole)), f"formula {number}"


def test_tensors_of_an_accelerator_that_are_equal(pool: RankPool) -> None:
    assert len(set(pool.run(2, meet_on_a_device, False))) == 1
