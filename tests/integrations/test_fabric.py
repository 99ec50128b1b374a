"""`Fabric(strategy="ddp_losses")`: hand-written loops on ranks are one process, as under the Trainer's strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from pytorch_metric_learning.losses import ArcFaceLoss, ProxyAnchorLoss
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    GlobalBatchLoss,
    accumulation_window,
    global_mean,
)
from lightning_ddp_losses.integrations.fabric import FabricDDPLossStrategy
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.answers import assert_all_close
from tests.fits import grads_of
from tests.oracle import Encoder, Task, assert_close, batches, cuts
from tests.refusals import Refused, refusals

TASK = Task(steps=6)
RATE, CLIP, RESUMED_AT = 0.3, 0.2, 4


class Both(nn.Module):  # an encoder and its loss
    def __init__(self, encoder: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.encoder, self.loss = encoder, loss

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        value: Tensor = self.loss(self.encoder(features), labels)
        return value


def encoder_and_loss(kind: str, *, on_ranks: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    encoder = Encoder(TASK).double()
    loss = ProxyAnchorLoss if kind == "anchor" else ArcFaceLoss
    inner = loss(TASK.classes, TASK.dim).double()
    if not on_ranks:
        return encoder, inner
    return encoder, ClassShardedLoss(inner) if kind == "sharded" else GlobalBatchLoss(inner)


def fabric_of(strategy: Any = "ddp_losses") -> Fabric:
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), plugins=[RankEnvironment()])
    fabric.launch()
    return fabric


def named(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy, without counts of batches."""
    return {name: value.clone() for name, value in state.items() if "num_batches" not in name}


def train_ranks(
    kind: str, place: str, clip: bool, accumulate: int, folder: str = "", *, resume: bool = False
) -> dict[str, Tensor]:
    """Train; with a folder, save at the end; to resume, save in the middle, and go on from there in other objects."""
    fabric = fabric_of()
    own = cuts(TASK.rows, dist.get_world_size(), even=False)[dist.get_rank()]

    def set_up() -> tuple[Any, Any, Any, nn.Module]:
        encoder, loss = encoder_and_loss(kind, on_ranks=True)
        if place == "inside":
            whole = Both(encoder, loss)
            model, optimizer = fabric.setup(whole, torch.optim.SGD(whole.parameters(), RATE, momentum=0.5))
            return model, model, optimizer, whole
        model, beside = fabric.setup_module(encoder), fabric.setup_module(loss)
        parameters = [*encoder.parameters(), *loss.parameters()]
        optimizer = fabric.setup_optimizers(torch.optim.SGD(parameters, RATE, momentum=0.5))
        return model, lambda features, labels: beside(model(features), labels), optimizer, Both(encoder, loss)

    model, evaluate, optimizer, whole = set_up()
    for step, (features, labels) in enumerate(batches(TASK)):
        if resume and step == RESUMED_AT:
            fabric.save(f"{folder}/saved", {"model": whole, "optimizer": optimizer, "step": step})
            fabric = fabric_of()
            model, evaluate, optimizer, whole = set_up()
            state = {"model": whole, "optimizer": optimizer, "step": 0}
            fabric.load(f"{folder}/saved", state)
            assert state["step"] == step
        is_last = (step + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(evaluate(features[own], labels[own]) / accumulate)
        if is_last:
            if clip:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()
    if folder:
        fabric.save(f"{folder}/end-{place}", {"model": whole})
    if kind == "sharded":
        return {name: value for name, value in named(whole.state_dict()).items() if not name.startswith("loss")}
    return named(whole.state_dict())


def train_alone(kind: str, clip: bool, accumulate: int) -> dict[str, Tensor]:
    encoder, loss = encoder_and_loss(kind, on_ranks=False)
    whole = Both(encoder, loss)
    optimizer = torch.optim.SGD(whole.parameters(), RATE, momentum=0.5)
    for step, (features, labels) in enumerate(batches(TASK)):
        (whole(features, labels) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return whole.state_dict()


@pytest.mark.parametrize(("clip", "accumulate"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize("kind", ["class", "anchor"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(
    pool: RankPool, tmp_path: Path, world_size: int, kind: str, place: str, clip: bool, accumulate: int
) -> None:
    truth = train_alone(kind, clip, accumulate)
    assert_all_close(pool.run(world_size, train_ranks, kind, place, clip, accumulate), truth)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_divided_classes(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    truth = train_alone("sharded", True, 2)
    for place in ("inside", "beside"):
        pool.run(world_size, train_ranks, "sharded", place, True, 2, str(tmp_path))
        saved = torch.load(tmp_path / f"end-{place}", weights_only=True)["model"]
        assert_close(named(saved), truth)


@pytest.mark.parametrize("place", ["inside", "beside"])
@pytest.mark.parametrize("kind", ["class", "sharded"])
def test_a_run_goes_on(pool: RankPool, tmp_path: Path, kind: str, place: str) -> None:
    truth = train_alone(kind, True, 2)
    pool.run(2, train_ranks, kind, place, True, 2, str(tmp_path), resume=True)
    saved = torch.load(tmp_path / f"end-{place}", weights_only=True)["model"]
    assert_close(named(saved), truth)
    # plain names, and whole weights: one process reads the file of the middle
    in_the_middle = torch.load(tmp_path / "saved", weights_only=True)["model"]
    Both(*encoder_and_loss(kind, on_ranks=False)).load_state_dict(named(in_the_middle))


def train_window() -> dict[str, Tensor]:
    fabric = fabric_of()
    own = cuts(TASK.rows, dist.get_world_size(), even=False)[dist.get_rank()]
    encoder, _ = encoder_and_loss("class", on_ranks=True)
    model = fabric.setup_module(encoder)
    steps = batches(TASK)[:3]
    with accumulation_window(model, micro_batches=3) as window:
        for step, (features, _) in enumerate(steps):
            rows = features[own][step:]
            with fabric.no_backward_sync(model, enabled=step < 2), window.micro_batch():
                fabric.backward(global_mean(model(rows).square().sum(), len(rows)))
    return grads_of(encoder)


def test_accumulation_window(pool: RankPool) -> None:
    encoder, _ = encoder_and_loss("class", on_ranks=False)
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for part in cuts(TASK.rows, 2, even=False):
        for step, (features, _) in enumerate(batches(TASK)[:3]):
            total, rows = total + encoder(features[part][step:]).square().sum(), rows + len(features[part][step:])
    (total / rows).backward()
    assert_all_close(pool.run(2, train_window), grads_of(encoder))


def call_on_one_rank() -> None:
    fabric = fabric_of()
    encoder, loss = encoder_and_loss("class", on_ranks=False)  # no loss over all ranks, so nothing meets in forward
    model, learnable = fabric.setup_module(encoder), fabric.setup_module(loss)
    features, labels = batches(TASK)[0]
    embeddings = model(features)
    fabric.backward(learnable(embeddings, labels) if dist.get_rank() == 0 else embeddings.sum())


def set_up_differently() -> None:
    fabric_of().setup_module(nn.Linear(3, 2 + dist.get_rank()))


def clip_another_norm() -> None:
    fabric = fabric_of()
    whole = Both(*encoder_and_loss("sharded", on_ranks=True))
    model, optimizer = fabric.setup(whole, torch.optim.SGD(whole.parameters(), RATE))
    fabric.backward(model(*batches(TASK)[0]))
    fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)


NORM = "clip_gradients(norm_type=...) over classes that are divided over the ranks: expected 2.0, got 1.0"
RAN = "ArcFaceLoss `module_1` ran on some ranks only: expected every rank or none"
REFUSED: dict[str, Refused] = {
    "a loss on one rank": Refused(lambda _: call_on_one_rank(), RAN, "LossCallError"),
    "another width": Refused(lambda _: set_up_differently(), "the same names, shapes and dtypes", "RankMismatchError"),
    "another norm": Refused(lambda _: clip_another_norm(), NORM, "ConfigurationError"),
    "an option that there is not": Refused(
        lambda _: FabricDDPLossStrategy(find_unused_parameter=True),
        "Did you mean find_unused_parameters",
        "ConfigurationError",
        0,
    ),
}
test_errors_on_every_rank = refusals(__name__, "REFUSED")
