"""Parts of the world, how many collectives a layer costs, and where it leaves its neighbours alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss, SyncBatchNorm
from lightning_ddp_losses.layers import batch_norms
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.oracle import assert_close, normal

GROUPS: dict[str, tuple[int, Any, list[list[int]]]] = {  # world, options, who normalises together
    "size 1": (2, lambda: {"group_size": 1}, [[0], [1]]),
    "size of the world": (2, lambda: {"group_size": 2}, [[0, 1]]),
    "pairs": (4, lambda: {"group_size": 2}, [[0, 1], [2, 3]]),
    "a group": (3, lambda: {"process_group": own_group([[0, 2], [1]])}, [[0, 2], [1]]),
    "a function": (3, lambda: {"process_group": lambda: own_group([[0], [1, 2]])}, [[0], [1, 2]]),
}


def own_group(parts: list[list[int]]) -> Any:
    made = [dist.new_group(part) for part in parts]
    return next(g for g, part in zip(made, parts, strict=True) if dist.get_rank() in part)


def rows_of(rank: int) -> Tensor:
    return normal(2 + rank, 3, seed=rank) + rank


def in_its_group(case: str) -> dict[str, Tensor]:
    layer = SyncBatchNorm(**GROUPS[case][1]()).apply(nn.BatchNorm1d(3).double())
    x = rows_of(dist.get_rank()).requires_grad_()
    y = layer(x)
    y.pow(3).sum().backward()
    return {"y": y.detach(), "dx": x.grad} | buffers_of(layer)


def buffers_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.double() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_normalise_apart(pool: RankPool, case: str) -> None:
    world_size, _, parts = GROUPS[case]
    found = pool.run(world_size, in_its_group, case, fresh=True)
    for part in parts:
        alone = nn.BatchNorm1d(3).double()
        xs = [rows_of(rank).requires_grad_() for rank in part]
        ys = alone(torch.cat(xs)).split([len(x) for x in xs])
        torch.cat(ys).pow(3).sum().backward()
        for rank, x, y in zip(part, xs, ys, strict=True):
            assert_close(found[rank], {"y": y.detach(), "dx": x.grad} | buffers_of(alone))


def counted(channels: int, dtype: torch.dtype, needs: bool, mode: str) -> list[int]:
    model = nn.Sequential(nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)).to(dtype)
    SyncBatchNorm().apply(model)
    if mode == "evaluation":
        model.eval()
    x = torch.randn(3, channels, dtype=dtype)
    model(x)  # handshakes carry it inline from then on
    with CountCollectives() as count:
        y = model(x.requires_grad_(needs))
        forward = len(count.take())
        y.square().sum().backward()
        return [forward, len(count.take())]


def with_inputs_that_need_no_gradient(affine: bool) -> dict[str, Tensor]:
    """The gradient of rank 0's input, where rank 1's needs none, and the weight's gradient alone."""
    layer = SyncBatchNorm().apply(nn.BatchNorm1d(3, affine=affine).double())
    x = rows_of(dist.get_rank()).requires_grad_(dist.get_rank() == 0)
    y = layer(x).pow(3).sum()
    if affine:
        (weight,) = torch.autograd.grad(y, [layer.weight], retain_graph=True)
        dist.all_reduce(weight)
    y.backward()
    found = {} if x.grad is None else {"dx": x.grad}
    return found | ({"weight": weight} if affine else {})


@pytest.mark.parametrize("affine", [True, False])
def test_a_rank_whose_input_needs_no_gradient_takes_part_in_that_of_the_others(pool: RankPool, affine: bool) -> None:
    first, second = pool.run(2, with_inputs_that_need_no_gradient, affine)
    assert "dx" not in second
    alone, xs = nn.BatchNorm1d(3, affine=affine).double(), [rows_of(rank).requires_grad_() for rank in range(2)]
    alone(torch.cat(xs)).pow(3).sum().backward()
    expected = {"dx": xs[0].grad} | ({"weight": alone.weight.grad} if affine else {})
    assert_close(first, expected)


COUNTS = [  # channels, dtype, gradient of the input, mode; collectives of two layers forward and backward
    (64, torch.float32, True, "training", [2, 2]),
    (64, torch.float32, False, "training", [2, 1]),
    (512, torch.float64, True, "training", [2, 2]),
    (20_000, torch.float32, True, "training", [4, 4]),
    (64, torch.float32, True, "evaluation", [0, 0]),
]


@pytest.mark.parametrize(("channels", "dtype", "needs", "mode", "expected"), COUNTS, ids=str)
def test_collectives_are_counted(
    pool: RankPool, channels: int, dtype: torch.dtype, needs: bool, mode: str, expected: list[int]
) -> None:
    assert pool.run(2, counted, channels, dtype, needs, mode) == [expected] * 2
    assert pool.run(1, counted, channels, dtype, needs, mode) == [[0, 0]]


class PairsAfterNorm(nn.Module):
    """A loss of one's own with a batch norm in it, for all pairs of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(embeddings)
        return ((x @ x.T) * (labels[:, None] == labels)).tanh().mean()


def in_a_global_loss() -> dict[str, Tensor]:
    loss = GlobalBatchLoss(PairsAfterNorm())
    SyncBatchNorm().apply(loss)
    x = rows_of(dist.get_rank()).requires_grad_()
    loss(x, torch.arange(len(x)) % 2).backward()
    return {"dx": x.grad / dist.get_world_size()} | buffers_of(loss.loss)  # what DDP's mean makes of it


def test_a_norm_that_sees_all_rows_already_is_left_alone(pool: RankPool) -> None:
    alone = PairsAfterNorm()
    xs = [rows_of(rank).requires_grad_() for rank in range(3)]
    alone(torch.cat(xs), torch.cat([torch.arange(len(x)) % 2 for x in xs])).backward()
    for rank, found in enumerate(pool.run(3, in_a_global_loss)):
        assert_close(found, {"dx": xs[rank].grad} | buffers_of(alone))


@each_rank(2)
def test_copies_pickles_and_compiled_modules() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    plugin = SyncBatchNorm()
    plugin.apply(model)
    assert batch_norms(model) == {"0": "group"}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is nn.BatchNorm1d
        assert batch_norms(other) == {"0": "rank"}
        other(torch.randn(3, 3))  # needs no peer
        other.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))
    plugin.revert(model)
    assert "forward" not in vars(model[0])
    alone = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    assert torch.equal(compiled(x), alone(x))
    plugin.apply(model)
    both = torch.cat([x, x + 1])
    assert torch.allclose(compiled(x + dist.get_rank()), alone(both).split(4)[dist.get_rank()], atol=1e-6)
    plugin.revert(model)


@each_rank(2)
def test_a_plugin_at_work_can_be_copied() -> None:
    """A plugin at work, copied: the copy is of the same groups, and at work nowhere."""
    group = dist.new_group(list(range(dist.get_world_size())))
    for plugin in (SyncBatchNorm(), SyncBatchNorm(group_size=1), SyncBatchNorm(process_group=group)):
        layer = nn.Sequential(nn.BatchNorm1d(3))
        plugin.apply(layer)
        copied = [copy.deepcopy(plugin)]
        if plugin.process_group is None:  # nobody can pickle a group of processes
            copied.append(pickle.loads(pickle.dumps(plugin)))
        for other in copied:
            assert other.group_size == plugin.group_size
            assert other.process_group is plugin.process_group
            other.apply(nn.Sequential(nn.BatchNorm1d(3)))
            other.revert(layer)
            assert "forward" in vars(layer[0])
