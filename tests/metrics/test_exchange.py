"""The exchange itself: how many collectives, how many updates, many bytes, other groups, no graph that grows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor

from lightning_ddp_losses.metrics import differentiable
from tests.counting import CountCollectives
from tests.doors import tensors_in
from tests.each_rank import each_rank
from tests.metrics.kinds import KINDS, Ours
from tests.oracle import cuts


def rows(n: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Counted(Ours):
    updates = 0

    def update(self, rows: Tensor) -> None:
        type(self).updates += 1
        super().update(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "most"), [(64, 1), (8000, 2)])  # rows: a few go into a handshake
@each_rank(2)
def test_collectives_and_updates_of_a_forward(number: int, most: int, kind: str) -> None:
    """Of forward and backward in steady state, and updates per forward."""
    metric, Counted.updates = Counted(kind), 0
    for step in range(3):
        with CountCollectives() as collectives:
            value = metric(rows(number, step).requires_grad_())
            forward = collectives.take()
            value.backward()
    grows = "list" in kind or kind == "cat tensor"  # with the rows
    assert len(forward) == (most if grows else 1)
    assert not any("barrier" in name for name in forward)
    assert collectives.take() == []
    assert Counted.updates // 3 == (2 if kind in ("None tensor", "callable list") else 1)


# in a new group: one that has carried as many bytes before gives them room in its first message
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
@each_rank(fresh=True)
def test_many_bytes_travel_in_place_in_order(world_size: int, dtype: torch.dtype) -> None:
    """More bytes than a handshake carries, and uneven: the rows of all ranks in order, bit for bit, and their gradient."""
    rank, total = dist.get_rank(), 6000
    metric, everything = Ours("cat list", keep_graph=True), rows(total, 1).to(dtype)
    parts = [everything[part] for part in cuts(total, world_size, even=False)]
    own = parts[rank].clone().requires_grad_(dtype.is_floating_point)
    metric.kept = list(own.split(len(own) // 2 + 1))  # by update, halves would be widened
    with CountCollectives() as collectives:
        metric.sync()
    assert len(collectives.names) == 2
    halves = [part.split(len(part) // 2 + 1) for part in parts]
    assert torch.equal(metric.kept, torch.cat([pieces[k] for k in range(2) for pieces in halves]))
    assert metric.kept.dtype == dtype
    if own.requires_grad:
        weights = torch.arange(total).to(dtype)
        torch.sum(metric.kept * weights[:, None]).backward()
        at = torch.cat([torch.full((len(p),), r) for k in range(2) for r, p in enumerate(h[k] for h in halves)])
        assert torch.allclose(own.grad, world_size * weights[at == rank][:, None].expand_as(own.grad))


@each_rank(3)
def test_a_process_group_of_its_own() -> None:
    """Ranks 0 and 2 exchange in a group of their own; rank 1 does something else."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    copied = differentiable(tm.MeanSquaredError(process_group=group)).clone()
    assert copied.process_group is group
    preds = rows(4, dist.get_rank())[:, 0].requires_grad_()
    value = copied(preds, torch.zeros(4, dtype=torch.float64))
    value.backward()
    assert torch.allclose(preds.grad / 2, 2 * preds.detach() / 8)
    everything = torch.cat([rows(4, 0)[:, 0], rows(4, 2)[:, 0]])
    assert abs(float(value.detach() - everything.square().mean())) < 1e-12


@each_rank(2)
def test_no_graph_is_kept_and_a_failure_leaves_the_states_alone() -> None:
    """What is held after many steps has no graph, and a failed step leaves the states as they were."""
    for metric in (Ours("cat list"), Ours("None list"), differentiable(tm.PearsonCorrCoef())):
        args = (rows(4, 9)[:, 0],) if isinstance(metric, tm.PearsonCorrCoef) else ()
        for step in range(3):
            first = rows(4, step)[:, 0] if args else rows(4, step)
            metric(first.requires_grad_(), *args).sum().backward()
        held = [metric.metric_state, metric._forward_cache, metric._computed]
        assert not any(t.requires_grad for v in held for t in tensors_in(v))
    before = float(metric.compute())
    with pytest.raises(RuntimeError):
        metric(rows(4, 0)[:, 0], args[0][:2])
    assert float(metric.compute()) == before
    assert metric.update_count == 3
