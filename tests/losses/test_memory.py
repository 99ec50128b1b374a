"""Cross-batch memory: one queue, the same on all ranks and in one process, step by step, across checkpoints and world sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.harness import CLASSES, DIM, ROWS, SPLITS, TASK
from tests.oracle import Encoder, assert_close, batches, cuts, own
from tests.refusals import refusals

STEPS = batches(type(TASK)(rows=ROWS, features=TASK.features, dim=DIM, classes=CLASSES, steps=5))
INNER: dict[str, Callable[[], nn.Module]] = {
    "contrastive": pml.ContrastiveLoss,
    "ntxent": pml.NTXentLoss,
    "learnt margin": lambda: pml.MarginLoss(learn_beta=True, num_classes=CLASSES, nu=0.1),
}
State = dict[str, Any]


class Run:
    """An encoder, a memory (`nested`: one of two losses) and an optimizer; `distributed`: our wrapper and the mean over ranks."""

    def __init__(
        self, inner: str, size: int, *, distributed: bool, miner: nn.Module | None = None, nested: bool = False
    ) -> None:
        torch.manual_seed(5)
        self.net = Encoder(TASK).double()
        self.memory = pml.CrossBatchMemory(INNER[inner](), DIM, memory_size=size, miner=miner).double()
        whole = pml.MultipleLosses([pml.NTXentLoss(), self.memory]) if nested else self.memory
        self.loss = GlobalBatchLoss(whole) if distributed else whole
        self.parameters = [*self.net.parameters(), *self.memory.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        self.distributed = distributed

    def step(self, features: Tensor, labels: Tensor, **more: Any) -> dict[str, Tensor]:
        """Train on one batch; what the memory holds afterwards."""
        value = self.loss(self.net(features), labels, **more)
        self.optimizer.zero_grad()
        value.backward()
        if self.distributed:
            for parameter in self.parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        return {
            "value": value.detach(),
            "queue": self.memory.embedding_memory.clone(),
            "labels": self.memory.label_memory.clone(),
            "position": torch.tensor([self.memory.queue_idx, self.memory.has_been_filled]),
            **{f"parameter {i}": p.detach().clone() for i, p in enumerate(self.parameters)},
        }

    def state(self) -> State:
        parts = {"net": self.net, "loss": self.loss, "optimizer": self.optimizer}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: State) -> None:
        for name, part in (("net", self.net), ("loss", self.loss), ("optimizer", self.optimizer)):
            part.load_state_dict(copy.deepcopy(state[name]))


def mask(labels: Tensor, features: Tensor) -> Tensor:
    """Which rows go to the queue; the others are compared with it. (On step 0 none would be there to compare with.)"""
    return features[:, 0] > 0.2


def steps_of(
    inner: str, size: int, sizes: list[int] | None = None, *, masked: bool = False, rest: int = 0, **options: Any
) -> list[Any]:
    """All steps (of which the last ones are returned), on this rank's rows; None: in one process."""
    run, part = Run(inner, size, distributed=sizes is not None, **options), slice(None) if sizes is None else own(sizes)
    return [run.step(x[part], y[part], **({"enqueue_mask": mask(y, x)[part]} if masked else {})) for x, y in STEPS][
        rest:
    ]


def compare(results: list[list[dict[str, Tensor]]], expected: list[dict[str, Tensor]]) -> None:
    for index, truth in enumerate(expected):
        for result in results:
            assert_close(result[index], truth)
            assert_close(result[index], results[0][index], rtol=0)


@pytest.mark.parametrize("split", ["even", "uneven", "a rank without rows"])
@pytest.mark.parametrize("size", [12, 13, 17, 30, 100])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_queue_is_that_of_one_process(pool: RankPool, world_size: int, size: int, split: str) -> None:
    """Sizes from the global batch up; most wrap in the middle of a batch."""
    inner = list(INNER)[size % 3]
    compare(pool.run(world_size, steps_of, inner, size, SPLITS[world_size][split]), steps_of(inner, size))


@pytest.mark.parametrize("size", [8, 12, 17])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mask_says_which_rows_are_remembered(pool: RankPool, world_size: int, size: int) -> None:
    """With a mask the memory must hold the rows that it marks, as in one process."""
    marked = max(int(mask(y, x).sum()) for x, y in STEPS)
    assert 0 < marked <= 8
    sizes = SPLITS[world_size]["uneven" if world_size > 1 else "even"]
    results = pool.run(world_size, steps_of, "contrastive", size, sizes, masked=True)
    compare(results, steps_of("contrastive", size, masked=True))


def test_the_memory_mines_the_global_batch(pool: RankPool) -> None:
    miner = miners.PairMarginMiner()
    compare(pool.run(2, steps_of, "contrastive", 17, [4, 8], miner=miner), steps_of("contrastive", 17, miner=miner))


def first_part(steps: int, size: int, nested: bool) -> tuple[State, list[str]]:
    run, part = Run("learnt margin", size, distributed=True, nested=nested), own(SPLITS[dist.get_world_size()]["even"])
    for x, y in STEPS[:steps]:
        run.step(x[part], y[part])
    return run.state(), sorted(run.loss.state_dict())


def second_part(state: State, steps: int, size: int, nested: bool) -> list[Any]:
    part = cuts(ROWS, dist.get_world_size(), even=False)[dist.get_rank()]
    run = Run("learnt margin", size, distributed=True, nested=nested)
    run.load(state)
    return [run.step(x[part], y[part]) for x, y in STEPS[steps:]]


@pytest.mark.parametrize(("before", "after", "nested"), [(1, 3, False), (2, 2, True), (2, 3, False), (3, 1, True)])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_resume_at_another_world_size_goes_on_exactly(
    pool: RankPool, steps: int, before: int, after: int, nested: bool
) -> None:
    size = 17  # full after two steps
    state, keys = pool.run(before, first_part, steps, size, nested)[0]
    assert any("position" in key for key in keys)
    expected = steps_of("learnt margin", size, nested=nested, rest=steps)
    compare(pool.run(after, second_part, state, steps, size, nested), expected)


def test_a_copy_keeps_a_position_of_its_own() -> None:
    run = Run("contrastive", 17, distributed=False)
    wrapped = GlobalBatchLoss(run.memory)
    x, y = STEPS[0]
    wrapped(run.net(x), y)
    twin = copy.deepcopy(wrapped)
    twin(run.net(x), y)
    assert (run.memory.queue_idx, twin.wrapped.queue_idx) == (12, 7)
    assert wrapped.state_dict()["queue_position.position"].tolist() == [12, 0]
    assert twin.state_dict()["queue_position.position"].tolist() == [7, 1]


@each_rank(2)
def test_the_mask_is_taken_where_pml_takes_it() -> None:
    """The fourth argument of PML's memory is the mask; the sixth of its distributed wrapper."""
    features, labels = STEPS[0]
    torch.manual_seed(5)
    rows, marked, part = Encoder(TASK).double()(features), mask(labels, features), own([4, 8])
    e, y, m = rows[part], labels[part], marked[part]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((e, y, None, m), {}),
        ((e, y, None, None, None, m), {}),
        ((e, y), {"enqueue_mask": m}),
    ]
    alone = pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=30).double()
    wrapped = [GlobalBatchLoss(copy.deepcopy(alone)) for _ in calls]
    found = [loss(*args, **kwargs).item() for loss, (args, kwargs) in zip(wrapped, calls, strict=True)]
    expected = alone(rows, labels, None, marked).item()
    assert expected > 0
    assert found == pytest.approx([expected] * 3, rel=1e-9)


def no_rows(rank: int) -> None:
    loss = GlobalBatchLoss(pml.CrossBatchMemory(pml.NTXentLoss(), DIM, memory_size=8))
    loss(torch.ones(0, DIM), torch.ones(0, dtype=torch.long))


def too_small(rank: int) -> None:
    steps_of("contrastive", 8, SPLITS[dist.get_world_size()]["uneven"])


TOO_SMALL = ("memory_size", "12", "8", "CrossBatchMemory")
REFUSED = {
    "no rows on all ranks": (no_rows, "CrossBatchMemory): embeddings: expected rows on some rank", "InputError"),
    "smaller than the batch of two ranks": (too_small, TOO_SMALL, "InputError"),
    "smaller than the batch of three ranks": (too_small, TOO_SMALL, "InputError", 3),
}
test_what_a_memory_cannot_hold_is_an_error_on_all_ranks = refusals(__name__, "REFUSED")
