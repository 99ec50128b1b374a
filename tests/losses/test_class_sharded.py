"""A class weight sharded over the ranks gives the value and all gradients of one process that holds it whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, SigLipLoss
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.sharded_cases import (
    CASES,
    CLASSES,
    DIM,
    NOT_A_NUMBER,
    Case,
    assert_as_one_process,
    call,
    class_dim,
    global_rows,
    judge,
    make,
    net,
    whole,
)
from tests.oracle import CLASS_LOSSES, Found, Place, assert_close, graded, joined, own, parity
from tests.slow_parameters import slow_parameters


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
def test_ranks_are_one_process(pool: RankPool, world_size: int) -> None:
    assert_as_one_process(pool, world_size, CASES)


def test_a_mean_over_no_rows_is_none_as_in_one_process(pool: RankPool) -> None:
    for case in NOT_A_NUMBER.values():
        assert judge(case, [12])["value"].isnan()
        assert all(found["value"].isnan() for found in pool.run(2, call, case, [5, 7]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_rows_on_any_rank_leave_the_regulariser_of_the_weight(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, call_without_rows)
    for name, case in CASES.items():
        plain = make(case)
        weight = next(iter(plain.parameters()))
        truth = weight.sum() * 0
        if plain.weight_regularizer is not None:
            truth = truth + plain.weight_regularization_loss(weight.t() if class_dim(case.name) else weight)["losses"]
        truths = graded(truth, weight=weight)
        ours = joined([result[name] for result in results], weight=class_dim(case.name))
        assert_close({key: ours.pop(key) for key in truths}, truths)
        assert not any(gradient.any() for gradient in ours.values())


def call_without_rows() -> dict[str, dict[str, torch.Tensor]]:
    return {name: call(case, [0] * dist.get_world_size()) for name, case in CASES.items()}


@each_rank(2)
def test_classes_that_no_number_of_ranks_divides() -> None:
    assert ClassShardedLoss(make(Case("ArcFaceLoss"))).shard.classes == [4, 3][dist.get_rank()]


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_logits_and_best_classes(name: str) -> None:
    loss = make(Case(name))
    sharded = ClassShardedLoss(loss, chunk_size=2)
    features = net()(global_rows([5, 7, 0][: dist.get_world_size()])["features"])
    theirs = loss.get_logits(features)
    torch.testing.assert_close(sharded.get_logits(features), theirs, rtol=1e-9, atol=1e-12)
    values, labels = sharded.predict(features, k=3)
    best = theirs.topk(3, 1, largest=name != "ProxyNCALoss")  # there smaller is better
    torch.testing.assert_close(values, best.values, rtol=1e-9, atol=1e-12)
    assert torch.equal(labels, best.indices)


def initial(name: str, seed: int | None) -> torch.Tensor:
    torch.manual_seed(5 if seed is None else 5 + dist.get_rank())
    return (
        ClassShardedLoss.build(getattr(pml, name), num_classes=9001, embedding_size=3, seed=seed)
        .weight.detach()
        .clone()
    )


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("seed", [None, 3])
def test_the_initial_weight_is_the_same_for_any_number_of_ranks(pool: RankPool, name: str, seed: int | None) -> None:
    found = [whole(pool.run(world_size, initial, name, seed), name) for world_size in (1, 2, 3)]
    theirs = next(iter(getattr(pml, name)(num_classes=9001, embedding_size=3).parameters())).detach()
    assert found[0].shape == theirs.shape
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert abs(float(found[0].std() / theirs.std()) - 1) < 0.05  # kaiming_uniform_ looks at the number of all classes
    assert len(found[0].unique()) > 0.9 * found[0].numel()


@each_rank(1, distributed=False)
def test_a_built_loss_waits_for_its_ranks() -> None:
    torch.manual_seed(0)
    early = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=CLASSES, embedding_size=DIM)
    before = early.weight.numel()
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    rows = global_rows()
    early.double()
    first = early.weight
    early(net()(rows["features"]), rows["labels"]).backward()
    optimizer.step()
    assert (before, early.weight.numel(), first is early.weight) == (0, CLASSES * DIM, True)


@pytest.mark.parametrize("name", ["ArcFaceLoss", "SphereFaceLoss", "SoftTripleLoss"])
@each_rank(2)
def test_half_precision_runs_in_float32(name: str) -> None:
    """A scale of 64 overflows half precision; the loss runs in float32."""
    rows, whole_batch, encoder, loss = global_rows([6, 6]), global_rows(), net(), make(Case(name)).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ClassShardedLoss(loss)(encoder(rows["features"]).half().detach(), rows["labels"])
    assert value.dtype == torch.float32
    truth = loss(encoder(whole_batch["features"]).half().float(), whole_batch["labels"])
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=0)


class TwiceItself(torch.nn.Module):
    """A loss of two towers on one and the same embeddings, doubled."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.loss(embeddings, 2 * embeddings)


@pytest.mark.parametrize("name", ["sharded", "towers", "sigmoid"])
@each_rank(3)
def test_backward_inside_autocast_is_as_wide_as_forward(name: str) -> None:
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
        rows = global_rows([4, 4, 4])
        features = net()(rows["features"]).detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(features, rows["labels"])
            if inside:
                value.backward()
        if not inside:
            value.backward()
        found.append([features.grad, *(p.grad for p in loss.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def step(loss: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Value and gradients of some rows of the net."""
    features = features.detach().requires_grad_()
    return graded(loss(features, labels), x=features, weight=next(iter(loss.parameters())))


def four_classes(**options: Any) -> Any:
    """Four classes on three ranks: two, two and none."""
    torch.manual_seed(0)
    loss = pml.ArcFaceLoss(num_classes=4, embedding_size=DIM).double()
    return ClassShardedLoss(loss, **options) if dist.is_initialized() else loss


def with_four_classes() -> dict[str, torch.Tensor]:
    loss, rows = four_classes(), global_rows([4, 4, 4])
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
    assert_close(joined([{n: r[n] for n in truth} for r in results], "x", weight=1), truth)
    with torch.no_grad():
        plain.W -= 0.1 * plain.W.grad
        best = plain.get_logits(net()(rows["features"])).topk(2, 1).indices
    assert torch.equal(torch.cat([r["best"] for r in results]), best)


def with_one_row(place: Place, name: str) -> Found:
    """The first rank has one row, the others none."""
    rows, plain = global_rows(), make(Case(name))
    loss = plain if place.alone else ClassShardedLoss(plain)
    value = loss(place.leaf("x", net()(rows["features"])[:1]), place.own(rows["labels"][:1]))
    return place.graded(value, weight=next(iter(loss.parameters())))


@pytest.mark.parametrize("name", CLASS_LOSSES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_row_over_all_ranks(pool: RankPool, world_size: int, name: str) -> None:
    parity(pool, with_one_row, [1, 0, 0][:world_size], name, shards=lambda _: {"weight": class_dim(name)})


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
    features = global_rows([4, 4, 4])["features"]
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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_a_loss_far_below_its_logits_is_not_zero(world_size: int) -> None:
    plain, rows, labels = nearly_certain()
    part = own([[2], [1, 1], [1, 1, 0]][world_size - 1])
    expected = float(plain(rows, labels).detach())
    assert float(ClassShardedLoss(plain)(rows[part], labels[part]).detach()) == pytest.approx(expected, rel=1e-9)
