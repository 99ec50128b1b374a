"""Small gradients share one buffer, in which a parameter without a gradient keeps its place."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses.testing import RankPool
from tests.doors import LossReducer, ReducedParameters


def reduced(absent: str) -> dict[str, Tensor | None]:
    module = nn.ParameterDict({name: torch.zeros(size) for name, size in (("a", 2), ("b", 3), ("c", 1))})
    for number, (name, parameter) in enumerate(module.named_parameters(), start=1):
        if name != absent:
            parameter.grad = torch.full_like(parameter, number * (1.0 + dist.get_rank()))
    LossReducer(ReducedParameters(module, [])).reduce()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def test_a_parameter_without_a_gradient_keeps_its_place(pool: RankPool) -> None:
    for absent in ("a", "b", "c"):
        for found in pool.run(2, reduced, absent):
            means = {"a": [1.5, 1.5], "b": [3.0, 3.0, 3.0], "c": [4.5]}
            shown = {name: None if grad is None else grad.tolist() for name, grad in found.items()}
            assert shown == {**means, absent: None}
