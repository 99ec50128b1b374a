"""A class weight sharded over the ranks gives the value and all gradients of one process that holds it whole."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, SigLipLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives, nothing_rides
from tests.losses.sharded_cases import (
    CASES,
    CLASSES,
    DIM,
    NOT_A_NUMBER,
    Case,
    global_rows,
    judge,
    make,
    measure,
    net,
    problems_of,
    whole,
)
from tests.oracle import CLASS_LOSSES, assert_close
from tests.slow_parameters import slow_parameters


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
def test_ranks_are_one_process(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, measure, list(CASES))
    problems = problems_of(CASES, results)
    assert not problems, "\n".join(problems)


def value_of(case: Case) -> float:
    rows = global_rows([5, 7], dist.get_rank())
    return ClassShardedLoss(make(case), **case.sharded)(net()(rows["features"]), rows["labels"]).item()


def test_a_mean_over_no_rows_is_none_as_in_one_process(pool: RankPool) -> None:
    for case in NOT_A_NUMBER.values():
        assert judge(case, [12])["value"].isnan()
        assert all(math.isnan(value) for value in pool.run(2, value_of, case))


def collectives(name: str, rides: bool) -> tuple[list[str], list[str], int]:
    rows = global_rows([6, 6], dist.get_rank())
    loss = ClassShardedLoss(make(Case(name)))
    with contextlib.nullcontext() if rides else nothing_rides():
        for _ in range(2):
            with CountCollectives() as counter:
                value = loss(net()(rows["features"]), rows["labels"])
                forward = counter.take()
                value.backward()
                backward = counter.take()
    return forward, backward, loss.shard.classes


@pytest.mark.parametrize("rides", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_a_step_costs_five_collectives_and_three_where_the_rows_fit_in_the_handshake(
    pool: RankPool, name: str, rides: bool
) -> None:
    classes_per_rank = []
    for forward, backward, classes in pool.run(2, collectives, name, rides):
        assert (len(forward), len(backward)) == ((2, 1) if rides else (3, 2)), (forward, backward)
        classes_per_rank.append(classes)
    assert classes_per_rank == [4, 3]


def no_collectives() -> int:
    rows = global_rows([12], 0)
    with CountCollectives() as counter:
        ClassShardedLoss(make(Case("ArcFaceLoss")))(net()(rows["features"]), rows["labels"]).backward()
    return len(counter.take())


@pytest.mark.parametrize("distributed", [True, False])
def test_a_world_of_one_pays_nothing(pool: RankPool, distributed: bool) -> None:
    assert pool.run(1, no_collectives, distributed=distributed) == [0]


def logits_of(name: str) -> list[Any]:
    loss = make(Case(name))
    sharded = ClassShardedLoss(loss, chunk_size=2)
    features = net()(global_rows([5, 7, 0][: dist.get_world_size()] or [12], dist.get_rank())["features"])
    logits = loss.get_logits(features)
    ours = sharded.get_logits(features)
    values, labels = sharded.predict(features, k=3)
    return [ours, logits, values, labels]


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_logits_and_best_classes(pool: RankPool, world_size: int, name: str) -> None:
    for ours, theirs, values, labels in pool.run(world_size, logits_of, name):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        smaller_is_better = name == "ProxyNCALoss"
        best = theirs.topk(3, 1, largest=not smaller_is_better)
        torch.testing.assert_close(values, best.values, rtol=1e-9, atol=1e-12)
        assert torch.equal(labels, best.indices)


def initial(name: str, seed: int | None, options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(5 if seed is None else 5 + dist.get_rank())
    cls = getattr(pml, name)
    loss = ClassShardedLoss.build(cls, num_classes=9001, embedding_size=3, seed=seed, **options)
    return loss.weight.detach().clone()


@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in CLASS_LOSSES])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_initial_weight_is_the_same_for_any_number_of_ranks(
    pool: RankPool, name: str, options: dict[str, Any], seed: int | None
) -> None:
    found = [whole(pool.run(world_size, initial, name, seed, options), name) for world_size in (1, 2, 3)]
    plain = getattr(pml, name)(num_classes=9001, embedding_size=3, **options)
    theirs = next(iter(plain.parameters())).detach()
    assert found[0].shape == theirs.shape
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert abs(float(found[0].std() / theirs.std()) - 1) < 0.05  # kaiming_uniform_ looks at the number of all classes
    assert len(found[0].unique()) > 0.9 * found[0].numel()


def built_before_the_ranks() -> tuple[int, int, bool]:
    torch.manual_seed(0)
    early = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=CLASSES, embedding_size=DIM)
    before = early.weight.numel()
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    rows = global_rows()
    early.double()
    first = early.weight
    early(net()(rows["features"]), rows["labels"]).backward()
    optimizer.step()
    return before, early.weight.numel(), first is early.weight


def test_a_built_loss_waits_for_its_ranks(pool: RankPool) -> None:
    assert pool.run(1, built_before_the_ranks, distributed=False) == [(0, CLASSES * DIM, True)]


def in_float32(name: str) -> float:
    """A scale of 64 overflows half precision; the loss runs in float32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = global_rows([12 // world] * world, rank)
    embeddings = net()(rows["features"]).half().detach()
    loss = make(Case(name)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ClassShardedLoss(loss)(embeddings, rows["labels"])
    assert value.dtype == torch.float32
    global_embeddings = net()(global_rows()["features"]).half().float()
    return float((value - loss(global_embeddings, global_rows()["labels"])).detach().abs() / value.detach())


@pytest.mark.parametrize("name", ["ArcFaceLoss", "SphereFaceLoss", "SoftTripleLoss"])
def test_half_precision_runs_in_float32(pool: RankPool, name: str) -> None:
    assert max(pool.run(2, in_float32, name)) < 1e-5


def backward_of_halves(name: str) -> bool:
    """Whether a backward inside autocast, as by hand in a training step, is that outside of it, bit for bit."""
    losses = {
        "sharded": lambda: ClassShardedLoss(pml.ArcFaceLoss(num_classes=CLASSES, embedding_size=DIM)),
        "towers": lambda: TwiceItself(ClipLoss()),
        "sigmoid": lambda: TwiceItself(SigLipLoss()),
    }
    found = []
    for inside in (False, True):
        torch.manual_seed(0)
        loss = losses[name]()
        rows = global_rows([4, 4, 4], dist.get_rank())
        features = net()(rows["features"]).detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(features, rows["labels"])
            if inside:
                value.backward()
        if not inside:
            value.backward()
        found.append([features.grad, *(p.grad for p in loss.parameters())])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class TwiceItself(torch.nn.Module):
    """A loss of two towers on one and the same embeddings, doubled."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.loss(embeddings, 2 * embeddings)


@pytest.mark.parametrize("name", ["sharded", "towers", "sigmoid"])
def test_backward_inside_autocast_is_as_wide_as_forward(pool: RankPool, name: str) -> None:
    assert pool.run(3, backward_of_halves, name) == [True] * 3


def step(loss: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Value and gradients of some rows of the net."""
    features = features.detach().requires_grad_()
    value = loss(features, labels)
    value.backward()
    return {"value": value.detach(), "x": features.grad, "weight": next(iter(loss.parameters())).grad}


def joined(results: list[dict[str, torch.Tensor]], name: str) -> dict[str, torch.Tensor]:
    """The ranks' numbers as one process has them."""
    x = torch.cat([result["x"] for result in results]) / len(results)
    return {"value": results[0]["value"], "x": x, "weight": whole([result["weight"] for result in results], name)}


def four_classes(**options: Any) -> Any:
    """Four classes on three ranks: two, two and none."""
    torch.manual_seed(0)
    loss = pml.ArcFaceLoss(num_classes=4, embedding_size=DIM).double()
    return ClassShardedLoss(loss, **options) if dist.is_initialized() else loss


def with_four_classes() -> dict[str, torch.Tensor]:
    loss, rows = four_classes(), global_rows([4, 4, 4], dist.get_rank())
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
    loss.attach(optimizer)
    found = step(loss, net()(rows["features"]), rows["labels"] % 4)
    optimizer.step()
    return found | {"best": loss.predict(net()(rows["features"]), k=2)[1]}


def test_a_rank_without_classes(pool: RankPool) -> None:
    results = pool.run(3, with_four_classes)
    plain, rows = four_classes(), global_rows()
    truth = step(plain, net()(rows["features"]), rows["labels"] % 4)
    assert [r["weight"].shape[1] for r in results] == [2, 2, 0]
    assert_close(joined(results, "ArcFaceLoss"), truth)
    with torch.no_grad():
        plain.W -= 0.1 * plain.W.grad
        best = plain.get_logits(net()(rows["features"])).topk(2, 1).indices
    assert torch.equal(torch.cat([r["best"] for r in results]), best)


def with_one_row(name: str) -> dict[str, torch.Tensor]:
    """The first rank has one row, the others none."""
    rows, own = global_rows(), slice(0, 1 if dist.get_rank() == 0 else 0)
    return step(ClassShardedLoss(make(Case(name))), net()(rows["features"])[own], rows["labels"][own])


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_row_over_all_ranks(pool: RankPool, world_size: int, name: str) -> None:
    results, rows = pool.run(world_size, with_one_row, name), global_rows()
    assert_close(joined(results, name), step(make(Case(name)), net()(rows["features"])[:1], rows["labels"][:1]))


def two_steps(loss: Any, optimizer: str, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    stepper = getattr(torch.optim, optimizer)(loss.parameters(), lr=0.1)
    if isinstance(loss, ClassShardedLoss):
        loss.attach(stepper)
    for _ in range(2):
        loss(net()(features).detach(), labels).backward()
        stepper.step()
        stepper.zero_grad()
    return next(iter(loss.parameters())).detach()


def sampled_with_four_classes(optimizer: str) -> torch.Tensor:
    """Every class is in the batch, so that all are sampled."""
    features = global_rows([4, 4, 4], dist.get_rank())["features"]
    return two_steps(four_classes(sample_rate=0.5), optimizer, features, torch.arange(4))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Rprop"])
def test_sampling_on_a_rank_without_classes(pool: RankPool, optimizer: str) -> None:
    parts = pool.run(3, sampled_with_four_classes, optimizer)
    truth = two_steps(four_classes(), optimizer, global_rows()["features"], torch.arange(12) % 4)
    assert_close({"weight": torch.cat(parts, 1)}, {"weight": truth})


def nearly_certain() -> tuple[pml.CosFaceLoss, torch.Tensor, torch.Tensor]:
    """A row that is on its class, which outweighs all others by 34 of 64, and one that is far from it."""
    loss = pml.CosFaceLoss(num_classes=4, embedding_size=2, margin=0, scale=64, reducer=reducers.AvgNonZeroReducer())
    loss.W.data = torch.tensor([[1.0, 0.46, 0.46, 0.46], [0.0, 0.888, 0.888, 0.888]], dtype=torch.float64)
    return loss, torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 0])


def small_loss() -> float:
    plain, rows, labels = nearly_certain()
    own = slice(dist.get_rank(), 2 if dist.get_rank() == dist.get_world_size() - 1 else dist.get_rank() + 1)
    return float(ClassShardedLoss(plain)(rows[own], labels[own]).detach())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_far_below_its_logits_is_not_zero(pool: RankPool, world_size: int) -> None:
    plain, rows, labels = nearly_certain()
    expected = float(plain(rows, labels).detach())
    for value in pool.run(world_size, small_loss):
        assert value == pytest.approx(expected, rel=1e-9)
