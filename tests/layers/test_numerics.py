"""Precision: a mean that dwarfs the deviation, half precision inputs and parameters, and ranks that hold the same bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses import SyncBatchNorm
from lightning_ddp_losses.layers import batch_norm_function
from lightning_ddp_losses.testing import RankPool
from tests.doors import batch_norm_kernels, tensors_in
from tests.oracle import cuts

ROWS = 60


def batch(mean_over_std: float) -> tuple[Tensor, Tensor]:
    """Rows (G, 3, 4) and a gradient of their outputs, in float64 but exact in float32."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 3, 4, generator=generator) + torch.linspace(-0.5, 0.5, ROWS).view(-1, 1, 1) + mean_over_std
    return x.double(), torch.randn(ROWS, 3, 4, generator=generator).double()


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad.to(y.dtype))
    params = {f"d{name}": p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **params, **dict(layer.named_buffers())}


def on_a_rank(mean_over_std: float, dtype: torch.dtype, of_layer: torch.dtype, autocast: bool) -> dict[str, Tensor]:
    part = cuts(ROWS, dist.get_world_size(), even=False)[dist.get_rank()]
    x, grad = (t[part].to(dtype) for t in batch(mean_over_std))
    layer = SyncBatchNorm().apply(nn.BatchNorm1d(3, momentum=1.0).to(of_layer))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return step(layer, x, grad)


def joined(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As one process would hold it; buffers must be equal bit for bit."""
    for name in ("running_mean", "running_var"):
        assert all(torch.equal(found[name], ranks[0][name]) for found in ranks), name
    whole = {name: torch.cat([found[name] for found in ranks]) for name in ("y", "dx")}
    shares = {name: sum(found[name].double() for found in ranks) for name in ("dweight", "dbias")}
    return {**ranks[0], **whole, **shares}


def errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {k: ((found[k].double() - truth[k]).norm() / truth[k].norm()).item() for k in truth if k[0] != "n"}


@pytest.mark.parametrize("mean_over_std", [0.0, 1e3, 1e4])
def test_float32_is_as_good_as_in_one_process_far_from_zero(pool: RankPool, mean_over_std: float) -> None:
    x, grad = batch(mean_over_std)
    truth = step(nn.BatchNorm1d(3, momentum=1.0).double(), x, grad)
    alone = errors(step(nn.BatchNorm1d(3, momentum=1.0), x.float(), grad.float()), truth)
    for world_size in (2, 3):
        ours = errors(
            joined(pool.run(world_size, on_a_rank, mean_over_std, torch.float32, torch.float32, False)), truth
        )
        # each rank's mean is rounded before they are merged; sums of squares lose the variance altogether at 1e4
        rounding = 1e-6 + 1e-8 * mean_over_std
        for name, off in ours.items():
            assert off < 2 * alone[name] + rounding, (name, ours, alone)


HALVES: dict[str, tuple[Any, ...]] = {
    "autocast": (torch.bfloat16, torch.float32, True),
    "bfloat16 rows": (torch.bfloat16, torch.float32, False),
    "float16 rows": (torch.float16, torch.float32, False),
    "all bfloat16": (torch.bfloat16, torch.bfloat16, False),
}


@pytest.mark.parametrize("case", HALVES)
def test_half_precision_keeps_dtypes_and_statistics_in_float32(pool: RankPool, case: str) -> None:
    dtype, of_layer, _ = HALVES[case]
    x, grad = (t.to(dtype).double() for t in batch(3.0))
    truth = step(nn.BatchNorm1d(3, momentum=1.0).double(), x, grad)
    alone = step(nn.BatchNorm1d(3, momentum=1.0).to(of_layer), x.to(dtype), grad.to(dtype))
    ranks = pool.run(2, on_a_rank, 3.0, *HALVES[case])
    assert {name: t.dtype for name, t in ranks[0].items()} == {name: t.dtype for name, t in alone.items()}
    ours, theirs = errors(joined(ranks), truth), errors(alone, truth)
    rounding = max(1e-6, torch.finfo(of_layer).eps)  # each rank's share of a gradient is rounded on its own
    assert all(off < 2 * theirs[name] + rounding for name, off in ours.items()), (ours, theirs)
    if of_layer == torch.float32:
        assert ours["running_var"] < 1e-6


class LikeMps(TorchDispatchMode):
    """The CPU as a device without float64 and without the fused statistics. Host copies are not on the device."""

    on_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket is not torch.ops.aten.batch_norm_update_stats
        found = func(*args, **(kwargs or {}))
        if not self.on_host:
            assert not any(t.dtype == torch.float64 for t in tensors_in([found])), func
        return found


def without_float64() -> dict[str, Tensor]:
    part = cuts(ROWS, dist.get_world_size(), even=False)[dist.get_rank()]
    x, grad = (t[part].float() for t in batch(3.0))
    layer, merge = SyncBatchNorm().apply(nn.BatchNorm1d(3, momentum=1.0)), batch_norm_function._merge_moments
    with mock.patch.object(batch_norm_kernels, "LIMITED_DEVICES", ("cpu",)), LikeMps() as device:

        def merge_on_host(*args: Any) -> Any:
            device.on_host = True
            found = merge(*args)
            device.on_host = False
            return found

        with mock.patch.object(batch_norm_function, "_merge_moments", merge_on_host):
            return step(layer, x, grad)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_device_without_float64_and_fused_statistics(pool: RankPool, world_size: int) -> None:
    truth = step(nn.BatchNorm1d(3, momentum=1.0).double(), *batch(3.0))
    found = errors(joined(pool.run(world_size, without_float64)), truth)
    assert max(found.values()) < 1e-6, found


def test_moments_are_merged_on_the_host_for_a_device_without_float64() -> None:
    x, table = torch.zeros(2, 3, device="meta"), torch.zeros(12, device="meta")
    is_meta = mock.patch.object(batch_norm_kernels, "LIMITED_DEVICES", ("meta",))
    with is_meta, pytest.raises(NotImplementedError, match="meta"):  # which has nothing to copy to the host
        batch_norm_function._merge_moments([2, 2], table, x, None)
    assert batch_norm_function._merge_moments([2, 2], table, x, None).mean.device.type == "meta"
