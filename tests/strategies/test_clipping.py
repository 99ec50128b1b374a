"""Clipping where ranks hold parts: the norm of the whole in float32 at least, and few launches for many parameters."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses.strategies.shards import Shards
from lightning_ddp_losses.testing import RankPool
from tests.oracle import cuts

ROWS, LIMIT = 12, 3.0


def gradients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One that every rank holds, and one of which each rank holds some rows; norms over 256."""
    generator = torch.Generator().manual_seed(0)
    return tuple((torch.randn(ROWS, 40, generator=generator) * 30).to(dtype) for _ in range(2))


def clip(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole, divided = gradients(dtype)
    own = cuts(ROWS, dist.get_world_size())[dist.get_rank()]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in (whole, divided[own])]
    parameters[0].grad, parameters[1].grad = whole, divided[own].clone()
    shards = Shards(cast("Any", None), lambda module: {})
    shards.parameters, shards._replicas = {"loss.W": parameters[1]}, {"loss.W": 1}
    shards.clip_(parameters, LIMIT)
    return parameters[0].grad, parameters[1].grad


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_norm_of_the_whole(pool: RankPool, world_size: int, dtype: torch.dtype, rtol: float) -> None:
    expected = [grad.double() for grad in gradients(dtype)]
    norm = torch.cat(expected).norm()
    assert norm > 256, "its square would fit into float16"
    results = pool.run(world_size, clip, dtype)
    joined = torch.cat([part for _, part in results])
    for found, grad in [(joined, expected[1]), *((whole, expected[0]) for whole, _ in results)]:
        torch.testing.assert_close(found.double(), grad * LIMIT / norm, rtol=rtol, atol=1e-6)


class Launches(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "detach" not in str(func)
        return func(*args, **(kwargs or {}))


def launches_of_many() -> int:
    shards = Shards(cast("Any", None), lambda module: {})
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(400)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    with Launches() as launches:
        shards.clip_(parameters, LIMIT)
    return launches.count


def test_many_parameters_take_few_launches(pool: RankPool) -> None:
    assert max(pool.run(2, launches_of_many)) < 30
