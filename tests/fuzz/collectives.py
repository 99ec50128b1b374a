"""The differentiable collectives: dtypes, shapes, layouts, rows of each rank, ranks that need no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from tests.fuzz.engine import Domain, Found, Place, zero_or

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


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor.double()


def of_all_ranks(case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """What each rank gets."""
    if case.what == "gather":
        return [torch.cat(inputs)] * len(inputs)
    total = torch.stack(inputs).sum(0)
    return [total] * len(inputs) if case.what == "reduce" else list(total.split(list(case.ranks)))


def exchanged(case: Case, own: Tensor, rank: int) -> Tensor:
    if case.what == "gather":
        return all_gather_with_grad(own, backward=case.backward)
    if case.what == "reduce":
        return all_reduce_with_grad(own, backward=case.backward)
    return reduce_scatter_with_grad(own, case.ranks[rank])


def play(case: Case, place: Place) -> Found:
    """With its own tensor on a rank; with those of all ranks, in float64, in one process."""
    inputs, ranks = tensors(case), list(range(len(case.ranks)))
    if place.alone:
        inputs = [as_real(each) if each.is_floating_point() else each for each in inputs]
    else:
        ranks = [place.rank]
        inputs = [inputs[place.rank]]
        if case.strided and inputs[0].ndim > 0:
            inputs = [torch.stack([inputs[0]] * 2, -1)[..., 1]]
    for rank, each in zip(ranks, inputs, strict=True):
        each.requires_grad_(needs_grad(case, rank))
    outputs = of_all_ranks(case, inputs) if place.alone else [exchanged(case, inputs[0], place.rank)]
    found = {"rank out": [as_real(each.detach()) for each in outputs]}
    if any(needs_grad(case, rank) for rank in range(len(case.ranks))):
        parts = zip(ranks, outputs, strict=True)
        torch.stack([(out.double() * weights(case, out.shape, rank)).sum() for rank, out in parts]).sum().backward()
        found["rank grad"] = [zero_or(each).double() for each in inputs]
    return found if place.alone else {name: of_rank for name, (of_rank,) in found.items()}


DOMAIN = Domain.of("collectives", cases(), play)
