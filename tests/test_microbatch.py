"""An encoder in pieces has the value and gradient of the whole batch, draws its masks again, and is reduced once per step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import ClipLoss, ConfigurationError, GlobalBatchLoss, InputError, microbatched
from tests.counting import CountCollectives
from tests.oracle import Encoder, Task, assert_close, batches, cuts
from tests.rank_pool import RankPool

TASK = Task(rows=12)


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Encoder(TASK), nn.Dropout(dropout), nn.LayerNorm(TASK.dim), nn.Linear(TASK.dim, 3)).double()


def objective(embeddings: Tensor) -> Tensor:
    """Every row meets every other."""
    return torch.logsumexp(embeddings @ embeddings.t(), 1).square().mean()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 100])
def test_pieces_are_the_whole(chunk_size: int) -> None:
    whole, pieces = encoder(), encoder()
    a, b = batches(TASK)[0][0], batches(TASK)[0][0]
    a.requires_grad_(), b.requires_grad_()
    truth, ours = objective(whole(a)), objective(microbatched(pieces, chunk_size)(b))
    truth.backward()
    ours.backward()
    assert_close(gradients(pieces) | {"x": b.grad, "v": ours}, gradients(whole) | {"x": a.grad, "v": truth})


def test_masks_are_drawn_again() -> None:
    """Dropout: the same pieces by hand, with everything kept."""
    kept, ours = encoder(0.5), encoder(0.5)
    x = batches(TASK)[0][0]
    torch.manual_seed(0)
    truth = objective(torch.cat([kept(piece) for piece in x.split(5)]))
    truth.backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    value = objective(microbatched(ours, 5)(x))
    torch.rand(3)  # what is drawn in between does not matter
    value.backward()
    assert_close(gradients(ours) | {"v": value}, gradients(kept) | {"v": truth})
    torch.manual_seed(0)
    objective(microbatched(ours, 5)(x)).backward()
    assert torch.equal(after, torch.get_rng_state())


def test_autocast_is_that_of_the_forward() -> None:
    whole, pieces = encoder().float(), encoder().float()
    x = batches(TASK)[0][0].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        truth, ours = whole(x), microbatched(pieces, 4)(x)
    assert ours.dtype == truth.dtype == torch.bfloat16
    objective(truth.float()).backward()
    objective(ours.float()).backward()
    assert_close(gradients(pieces), gradients(whole), rtol=2e-2)


class Nest(nn.Module):
    """Several inputs, several results, something that is no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(TASK.features, 2)

    def forward(self, x: dict[str, Tensor], table: Tensor, *, scale: float) -> Any:
        hidden = self.layer(x["a"]) * scale + table.sum()
        return {"out": (hidden, x["b"]), "scale": scale}


def test_nests_of_tensors() -> None:
    torch.manual_seed(0)
    module = Nest()
    x = {"a": torch.randn(7, TASK.features), "b": torch.arange(7)}
    truth = module(x, torch.ones(3), scale=2.0)
    ours = microbatched(module, 3)(x, torch.ones(3), scale=2.0)
    torch.testing.assert_close(ours, truth)
    ours["out"][0].sum().backward()
    assert module.layer.weight.grad is not None


def two_towers() -> dict[str, Tensor]:
    """One encoder for both towers, in pieces of different size; the gradient arrives once."""
    shared, x = encoder(), batches(TASK)
    loss = ClipLoss().double()
    loss(microbatched(shared, 5)(x[0][0]), microbatched(shared, 4)(x[1][0])).backward()
    return gradients(shared)


def test_two_towers_and_one_encoder() -> None:
    shared, x = encoder(), batches(TASK)
    ClipLoss().double()(shared(x[0][0]), shared(x[1][0])).backward()
    assert_close(two_towers(), gradients(shared))


class Model(nn.Module):
    """Runs its encoder in pieces itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.run = microbatched(self.encoder, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def under_ddp(how: str, static_graph: bool) -> tuple[dict[str, Tensor], int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = batches(TASK)[0][0][cuts(TASK.rows, world, even=False)[rank]]
    loss = GlobalBatchLoss(Whole())
    if how == "inside":
        ddp = DistributedDataParallel(Model(), static_graph=static_graph)
        run: Callable[[Tensor], Tensor] = ddp
        inner = ddp.module.encoder
    else:
        ddp = DistributedDataParallel(encoder(), static_graph=static_graph)
        run, inner = microbatched(ddp, 2), ddp.module
    reductions = 0
    for _ in range(3):
        ddp.zero_grad()
        with CountCollectives() as counter:
            loss(run(x)).backward()
        reductions = sum("allreduce" in name for name in counter.take())
    return gradients(inner), reductions


class Whole(nn.Module):
    def forward(self, embeddings: Tensor) -> Tensor:
        return objective(embeddings)


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("how", ["inside", "around"])
def test_one_reduction_under_ddp(pool: RankPool, how: str, static_graph: bool) -> None:
    alone = encoder()
    objective(alone(batches(TASK)[0][0])).backward()
    plain = pool.run(2, plain_reductions)[0]
    for world_size in (2, 3):
        for found, reductions in pool.run(world_size, under_ddp, how, static_graph):
            assert_close(found, gradients(alone))
            assert reductions <= plain


def plain_reductions() -> int:
    ddp, x = DistributedDataParallel(encoder()), batches(TASK)[0][0]
    for _ in range(3):
        with CountCollectives() as counter:
            objective(ddp(x)).backward()
        reductions = sum("allreduce" in name for name in counter.take())
    return reductions


def test_without_gradients_and_with_frozen_parts() -> None:
    module = encoder()
    module[0].requires_grad_(False)
    x = batches(TASK)[0][0]
    with torch.no_grad():
        torch.testing.assert_close(microbatched(module, 5)(x), module(x))
    objective(microbatched(module, 5)(x)).backward()
    assert module[0][0].weight.grad is None
    assert module[3].weight.grad is not None


def test_it_adds_no_parameter_names() -> None:
    assert list(Model().state_dict()) == [f"encoder.{name}" for name in encoder().state_dict()]
    copied = copy.deepcopy(Model())
    assert copied.run.encoder is copied.encoder


def with_norm(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(TASK.features, 4), *layers).double()


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "chunk 0": (lambda: microbatched(encoder(), 0), "chunk_size"),
    "chunk of a fraction": (lambda: microbatched(encoder(), 2.5), "chunk_size"),  # type: ignore[arg-type]
    "no module": (lambda: microbatched(objective, 2), "encoder"),  # type: ignore[arg-type]
    "batch norm": (lambda: microbatched(with_norm(nn.BatchNorm1d(4)), 2)(rows()), "1 (BatchNorm1d)"),
    "batch norm without statistics": (
        lambda: microbatched(with_norm(nn.BatchNorm1d(4, track_running_stats=False)), 2)(rows()),
        "BatchNorm1d",
    ),
    "power iteration": (
        lambda: microbatched(nn.utils.parametrizations.spectral_norm(nn.Linear(TASK.features, 4)).double(), 2)(rows()),
        "parametrizations.weight.0._u",
    ),
    "a result without rows": (lambda: microbatched(Whole(), 2)(rows()), "a row for each row"),
    "no rows": (lambda: microbatched(encoder(), 2)(rows()[:0]), "at least one"),
}


def rows() -> Tensor:
    return batches(TASK)[0][0]


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    run, words = BAD[name]
    with pytest.raises((ConfigurationError, InputError)) as raised:
        run()
    assert words in str(raised.value)


def test_batch_norm_at_rest() -> None:
    module = with_norm(nn.BatchNorm1d(4))
    norm, before = module[1], copy.deepcopy(module[1].state_dict())
    value = objective(microbatched(module, 5, batch_norm="eval")(rows()))
    assert norm.training
    value.backward()
    ours = gradients(module)
    assert norm.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())
    module.zero_grad()
    norm.eval()
    objective(module(rows())).backward()
    assert_close(ours, gradients(module))
