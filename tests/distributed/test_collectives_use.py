"""Collectives in use: hand-written DDP loops against one process, parts of the world, ranks that disagree, ranks that wait."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from lightning_ddp_losses.testing import RankPool
from tests.doors import has_own_processor, wait
from tests.each_rank import each_rank
from tests.oracle import Encoder, Task, assert_close, batches, cuts, graded

TASK = Task(steps=3)


def batchwise(embeddings: Tensor, labels: Tensor) -> Tensor:
    """A loss that no split of the batch gives: supervised contrastive, the anchor's own place masked."""
    normed = nn.functional.normalize(embeddings)
    logits = (normed @ normed.T / 0.2).fill_diagonal_(-torch.inf)
    same = (labels[:, None] == labels[None]).double().fill_diagonal_(0)
    log_probability = logits.log_softmax(1).masked_fill(same == 0, 0)
    return -(log_probability.sum(1) / same.sum(1).clamp(min=1)).mean()


def encoder() -> nn.Module:
    torch.manual_seed(3)
    return Encoder(TASK).double()


def loop(model: nn.Module, part: slice, gather: Callable[[Tensor], Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for features, labels in batches(TASK):
        loss = batchwise(gather(model(features[part])), gather(labels[part]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def ddp_loop(even: bool, backward: str) -> tuple[list[float], dict[str, Tensor]]:
    part = cuts(TASK.rows, dist.get_world_size(), even=even)[dist.get_rank()]
    model = DistributedDataParallel(encoder())
    values = loop(model, part, lambda rows: all_gather_with_grad(rows, backward=backward))
    return values, dict(model.module.state_dict())


@pytest.mark.parametrize("backward", ["sum", "own_slice"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_hand_written_ddp_loop_is_one_process(pool: RankPool, world_size: int, even: bool, backward: str) -> None:
    alone = encoder()
    expected = loop(alone, slice(None), lambda rows: rows)
    for values, state in pool.run(world_size, ddp_loop, even, backward):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(state, alone.state_dict())


def sum_over_anchors(even: bool) -> dict[str, Tensor]:
    """The rows mode by hand: each rank back-propagates W times its own anchors' share."""
    world, rank = dist.get_world_size(), dist.get_rank()
    part = cuts(TASK.rows, world, even=even)[rank]
    features, labels = batches(TASK)[0]
    model = DistributedDataParallel(encoder())
    own = nn.functional.normalize(model(features[part]))
    everyone, all_labels = all_gather_with_grad(own), all_gather_with_grad(labels[part])
    share = ((own @ everyone.T).exp() * (labels[part][:, None] != all_labels)).sum()
    total = all_reduce_with_grad(share.detach())
    return graded(world * share, net=model.module) | {"value": total}


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sum_over_anchors_gathers_its_gradient_back(pool: RankPool, world_size: int, even: bool) -> None:
    features, labels = batches(TASK)[0]
    alone = encoder()
    rows = nn.functional.normalize(alone(features))
    value = ((rows @ rows.T).exp() * (labels[:, None] != labels)).sum()
    expected = graded(value, net=alone)
    for got in pool.run(world_size, sum_over_anchors, even):
        assert_close(got, expected)


def in_a_part_of_the_world() -> list[float]:
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    everyone = all_gather_with_grad(torch.tensor([float(rank)]))
    if rank == 1:
        assert everyone.tolist() == [0, 1, 2]
        return []
    local = torch.full((1 + rank, 1), float(rank), requires_grad=True)
    gathered = all_gather_with_grad(local, group=pair)
    total = all_reduce_with_grad(torch.tensor(1.0 + rank), group=pair)
    (gathered * (1 + rank)).sum().backward()
    assert local.grad.flatten().tolist() == [4.0] * (1 + rank)
    reduced = reduce_scatter_with_grad(torch.ones(2, 1), group=pair)
    return [*gathered.flatten().tolist(), total.item(), *reduced.flatten().tolist()]


def test_a_group_that_is_a_part_of_the_world(pool: RankPool) -> None:
    assert pool.run(3, in_a_part_of_the_world, fresh=True) == [[0, 2, 2, 2, 4, 2], [], [0, 2, 2, 2, 4, 2]]


@each_rank(2)
def test_several_gathers_before_one_backward() -> None:
    rank = dist.get_rank()
    first, second = (torch.full((1 + rank, 2), 1.0, requires_grad=True) for _ in range(2))
    a, b = all_gather_with_grad(first), all_gather_with_grad(second)
    again = all_gather_with_grad(first * 2)
    ((a + 3 * b).sum() + again.sum() * (rank + 1)).backward()
    assert first.grad.unique().tolist() == [2 + 2 * 3]  # W from the first gather, 2 * (1 + 2) from the third
    assert second.grad.unique().tolist() == [6]


# ---------------------------------------------------------------------- waiting awake or asleep


class Late:
    """A collective that is complete when it was asked a few times, or waited for."""

    def __init__(self) -> None:
        self.asked = self.waited = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize(
    ("processors", "local_world_size", "is_awake"),
    [(2, None, True), (1, None, False), (1, "1", True), (3, "4", False), (8, "8", True)],
    ids=["one each", "one for two", "two machines", "more on this machine", "enough on this machine"],
)
@each_rank(2)
def test_a_rank_waits_awake_only_on_a_processor_of_its_own(
    processors: int, local_world_size: str | None, is_awake: bool
) -> None:
    """Return whether this rank stayed awake, and how often it waited for the collective itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local_world_size is not None:
            patch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        has_own_processor.cache_clear()
        work = Late()
        wait(work)  # type: ignore[arg-type]
        has_own_processor.cache_clear()
    assert (work.asked > 0, work.waited) == (is_awake, 1)
