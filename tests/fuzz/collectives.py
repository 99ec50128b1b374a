"""The differentiable collectives: dtypes, shapes, layouts, rows of each rank, ranks that need no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from tests.fuzz.engine import Domain, Found

KINDS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "complex128": torch.complex128,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
GATHERED_ONLY = ("bool", "uint8")


@dataclass(frozen=True)
class Case:
    what: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    backward: str
    without_grad: int
    strided: bool
    seed: int

    @property
    def dtype(self) -> str:
        return "float64" if self.kind not in ("float32", "bfloat16") else "float32"


@st.composite
def cases(draw: Any) -> Case:
    what = draw(st.sampled_from(["gather", "reduce", "scatter"]))
    kinds = sorted(KINDS) if what == "gather" else sorted(set(KINDS) - set(GATHERED_ONLY) - {"complex128"})
    ranks = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    return Case(
        what=what,
        ranks=ranks,
        shape=tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
        kind=draw(st.sampled_from(kinds)),
        backward=draw(st.sampled_from(["sum", "own_slice"])),
        without_grad=draw(st.integers(-1, 3)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def tensors(case: Case) -> list[Tensor]:
    """Each rank's input."""
    generator = torch.Generator().manual_seed(case.seed)
    total = sum(case.ranks)
    found = []
    for rows in case.ranks:
        count = rows if case.what == "gather" else total
        shape = (count, *case.shape) if case.what != "reduce" else case.shape
        numbers = torch.randint(-8, 9, shape, generator=generator)  # exact in every dtype
        found.append(numbers.to(KINDS[case.kind]))
    return found


def weights(case: Case, shape: torch.Size, rank: int) -> Tensor:
    """What a rank multiplies its result with: the same on all ranks where the backward assumes that."""
    seed = case.seed + 7 + (rank if case.backward == "sum" or case.what == "scatter" else 0)
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


def needs_grad(case: Case, rank: int) -> bool:
    return KINDS[case.kind].is_floating_point and rank != case.without_grad


def alone(case: Case) -> dict[str, Any]:
    inputs = [t.double().requires_grad_() if t.dtype.is_floating_point else t for t in tensors(case)]
    world = len(inputs)
    if case.what == "gather":
        outputs = [torch.cat(inputs)] * world
    elif case.what == "reduce":
        outputs = [torch.stack(inputs).sum(0)] * world
    else:
        outputs = list(torch.stack(inputs).sum(0).split(list(case.ranks)))
    found: dict[str, Any] = {"rank out": [as_real(t.detach()) for t in outputs]}
    if any(needs_grad(case, rank) for rank in range(world)):
        sum((o * weights(case, o.shape, rank)).sum() for rank, o in enumerate(outputs)).backward()
        found["rank grad"] = [
            (t.grad if t.grad is not None and needs_grad(case, rank) else torch.zeros(t.shape))
            for rank, t in enumerate(inputs)
        ]
    return found


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = tensors(case)[rank]
    if case.strided and own.ndim > 0:
        own = torch.stack([own, own], -1)[..., 1]
    own.requires_grad_(needs_grad(case, rank))
    if case.what == "gather":
        out = all_gather_with_grad(own, backward=case.backward)
    elif case.what == "reduce":
        out = all_reduce_with_grad(own, backward=case.backward)
    else:
        out = reduce_scatter_with_grad(own, case.ranks[rank])
    found = {"rank out": as_real(out.detach())}
    if any(needs_grad(case, each) for each in range(world)):
        (out.double() * weights(case, out.shape, rank)).sum().backward()
        found["rank grad"] = torch.zeros(own.shape) if own.grad is None else own.grad.double()
    return found


DOMAIN = Domain("collectives", cases(), on_rank, alone)
