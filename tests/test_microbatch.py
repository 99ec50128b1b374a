"""An encoder in pieces has the value and gradient of the whole batch, draws its masks again, and is reduced once per step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses import ClipLoss, ConfigurationError, GlobalBatchLoss, InputError, microbatched
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.fits import grads_of
from tests.oracle import Encoder, Task, assert_close, batches, cuts, graded
from tests.refusals import Mistake, refusals_of_one_process

TASK = Task(rows=12)


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Encoder(TASK), nn.Dropout(dropout), nn.LayerNorm(TASK.dim), nn.Linear(TASK.dim, 3)).double()


def objective(embeddings: Tensor) -> Tensor:
    """Every row meets every other."""
    return torch.logsumexp(embeddings @ embeddings.t(), 1).square().mean()


def rows() -> Tensor:
    return batches(TASK)[0][0]


@pytest.mark.parametrize("chunk_size", [1, 5, 12, 100])
def test_pieces_are_the_whole(chunk_size: int) -> None:
    whole, pieces = encoder(), encoder()
    a, b = rows().requires_grad_(), rows().requires_grad_()
    truth, ours = objective(whole(a)), objective(microbatched(pieces, chunk_size)(b))
    assert_close(graded(ours, x=b, encoder=pieces), graded(truth, x=a, encoder=whole))


def test_masks_are_drawn_again() -> None:
    """Dropout: the same pieces by hand, with everything kept."""
    kept, ours = encoder(0.5), encoder(0.5)
    x = rows()
    torch.manual_seed(0)
    truth = graded(objective(torch.cat([kept(piece) for piece in x.split(5)])), encoder=kept)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    value = objective(microbatched(ours, 5)(x))
    torch.rand(3)  # what is drawn in between does not matter
    assert_close(graded(value, encoder=ours), truth)
    torch.manual_seed(0)
    objective(microbatched(ours, 5)(x)).backward()
    assert torch.equal(after, torch.get_rng_state())


def test_each_backward_draws_the_masks_of_the_forward() -> None:
    """A graph that is kept runs its pieces again in each backward, and leaves the generator where it was."""
    module = encoder(0.5)
    value = objective(microbatched(module, 5)(rows()))
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        module.zero_grad()
        value.backward(retain_graph=True)
        found.append(grads_of(module))
    assert_close(found[1], found[0], rtol=0.0)
    assert torch.equal(before, torch.get_rng_state())


def test_fake_tensors() -> None:
    """Torch measures memory with them. They are refused beside the real tensors that hold a generator's state."""
    with FakeTensorMode():
        module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        microbatched(module, 4)(torch.randn(10, 3)).sum().backward()
    assert module[0].weight.grad is not None


def test_autocast_is_that_of_the_forward() -> None:
    whole, pieces = encoder().float(), encoder().float()
    x = rows().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        truth, ours = whole(x), microbatched(pieces, 4)(x)
    assert ours.dtype == truth.dtype == torch.bfloat16
    objective(truth.float()).backward()
    objective(ours.float()).backward()
    assert_close(grads_of(pieces), grads_of(whole), rtol=2e-2)


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


class Pair(dict):
    """A dict of somebody's own, as model outputs often are."""


class Own(nn.Module):
    """Results in a class of its own; one that is its input, one that is an embedding changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(TASK.features, 2).double()

    def forward(self, x: Tensor) -> Any:
        return Pair(out=self.layer(x), given=x, none=None)


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_results_are_tensors_like_any_other(chunk_size: int) -> None:
    """A class of its own, in-place changes, an input passed through, a second derivative."""
    module, x = Own(), rows().requires_grad_()
    truth, y = copy.deepcopy(module), rows().requires_grad_()
    found = microbatched(module, chunk_size)(x)
    assert type(found) is Pair
    assert found["none"] is None
    assert torch.equal(found["given"], x)
    (slope,) = torch.autograd.grad(found["out"].mul_(2.0).pow(3).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad((truth(y)["out"] * 2.0).pow(3).sum(), y, create_graph=True)
    w, v = module.layer.weight, truth.layer.weight
    assert_close(graded(slope.square().sum(), x=x, w=w), graded(expected.square().sum(), x=y, w=v))


class Allocated(TorchDispatchMode):
    """The most bytes of tensors made inside that are alive at once; what is there before does not count."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.known = {t.untyped_storage().data_ptr() for t in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in [t for t in tree_leaves(out) if isinstance(t, Tensor)]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return out

    def gone(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.alive -= size


def peak_of(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, *, backward: bool) -> int:
    with Allocated([x, *module.parameters()]) as allocated:
        value = run(x)
        if backward:
            value.backward(torch.ones_like(value))
    module.zero_grad()
    return allocated.peak


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_that_of_a_piece(backward: bool) -> None:
    """Results once, one piece of 1/64 of the activations; in backward the gradient of the results and of the encoder."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    module, x = nn.Sequential(*layers, nn.Linear(64, 32)), torch.randn(2048, 64)
    results, weights = 2048 * 32 * 4, sum(p.nbytes for p in module.parameters())
    whole = peak_of(module, module, x, backward=backward)
    pieces = peak_of(module, microbatched(module, 32), x, backward=backward)
    held = results + (results + weights if backward else 0)
    activations = whole - results
    assert activations > 12 * results
    assert pieces <= held + 1.5 * activations / 64


def test_two_towers_and_one_encoder() -> None:
    """One encoder for both towers, in pieces of different size; the gradient arrives once."""
    shared, alone, x = encoder(), encoder(), batches(TASK)
    value = ClipLoss().double()(microbatched(shared, 5)(x[0][0]), microbatched(shared, 4)(x[1][0]))
    truth = ClipLoss().double()(alone(x[0][0]), alone(x[1][0]))
    assert_close(graded(value, encoder=shared), graded(truth, encoder=alone))


class Model(nn.Module):
    """Runs its encoder in pieces itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.run = microbatched(self.encoder, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class Whole(nn.Module):
    def forward(self, embeddings: Tensor) -> Tensor:
        return objective(embeddings)


def under_ddp(how: str, static_graph: bool = False) -> tuple[dict[str, Tensor], int]:
    """Gradients, and the number of reductions of the third step."""
    world = dist.get_world_size()
    parts = cuts(TASK.rows, world, even=False)
    if how == "a rank without rows":
        parts = [slice(0, 0), *cuts(TASK.rows, world - 1)]
    x, loss = rows()[parts[dist.get_rank()]], GlobalBatchLoss(Whole())
    ddp = DistributedDataParallel(Model() if how == "inside" else encoder(), static_graph=static_graph)
    run: Callable[[Tensor], Tensor] = ddp if how in ("inside", "plainly") else microbatched(ddp, 2)
    for _ in range(3):
        ddp.zero_grad()
        with CountCollectives() as counter:
            loss(run(x)).backward()
    inner = ddp.module.encoder if how == "inside" else ddp.module
    return grads_of(inner), sum("allreduce" in name for name in counter.take())


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("how", ["inside", "around", "a rank without rows"])
def test_one_reduction_under_ddp(pool: RankPool, how: str, static_graph: bool) -> None:
    alone = encoder()
    objective(alone(rows())).backward()
    _, plain = pool.run(2, under_ddp, "plainly")[0]
    for world_size in (2, 3):
        for found, reductions in pool.run(world_size, under_ddp, how, static_graph):
            assert_close(found, grads_of(alone))
            assert reductions <= plain


def test_without_gradients_and_with_frozen_parts() -> None:
    module = encoder()
    module[0].requires_grad_(False)
    x = rows()
    with torch.no_grad():
        torch.testing.assert_close(microbatched(module, 5)(x), module(x))
    objective(microbatched(module, 5)(x)).backward()
    assert module[0][0].weight.grad is None
    assert module[3].weight.grad is not None


def test_it_adds_no_parameter_names() -> None:
    assert list(Model().state_dict()) == [f"encoder.{name}" for name in encoder().state_dict()]
    copied = copy.deepcopy(Model())
    assert copied.run.encoder is copied.encoder


class Hides(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(embeddings=x)


class Ragged(nn.Module):
    """A wider result with every call."""

    width = 3

    def forward(self, x: Tensor) -> Tensor:
        self.width += 1
        return x[:, : self.width]


def with_norm(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(TASK.features, 4), *layers).double()


BAD: dict[str, Mistake] = {
    "chunk 0": (lambda: microbatched(encoder(), 0), "chunk_size"),
    "chunk of a fraction": (lambda: microbatched(encoder(), 2.5), "chunk_size"),  # type: ignore[arg-type]
    "no module": (lambda: microbatched(objective, 2), "encoder"),  # type: ignore[arg-type]
    "batch norm": (lambda: microbatched(with_norm(nn.BatchNorm1d(4)), 2)(rows()), "`1` (BatchNorm1d)"),
    "batch norm without statistics": (
        lambda: microbatched(with_norm(nn.BatchNorm1d(4, track_running_stats=False)), 2)(rows()),
        "BatchNorm1d",
    ),
    "power iteration": (
        lambda: microbatched(nn.utils.parametrizations.spectral_norm(nn.Linear(TASK.features, 4)).double(), 2)(rows()),
        "parametrizations.weight.0._u",
    ),
    "tensors inside an object": (lambda: microbatched(Hides(), 2)(rows()), "inside a SimpleNamespace"),
    "a width that depends on the piece": (lambda: microbatched(Ragged(), 2)(rows()), "shape (2, 5)"),
    "a result without rows": (lambda: microbatched(Whole(), 2)(rows()), "a row for each row"),
    "no batch": (lambda: microbatched(encoder(), 2)(torch.zeros(())), "dim 0"),
    "a step before backward": (lambda: stepped(microbatched(Own(), 5)), "changed in between"),
}


def stepped(run: Any) -> None:
    out = run(rows())["out"]
    torch.optim.SGD(run.encoder.parameters(), 0.1).step(lambda: out.sum().backward(retain_graph=True))
    out.sum().backward()


test_bad_input = refusals_of_one_process(BAD, ConfigurationError, InputError)


def test_batch_norm_at_rest() -> None:
    module = with_norm(nn.BatchNorm1d(4))
    norm, before = module[1], copy.deepcopy(module[1].state_dict())
    value = objective(microbatched(module, 5, batch_norm="eval")(rows()))
    assert norm.training
    value.backward()
    ours = grads_of(module)
    assert norm.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())
    module.zero_grad()
    norm.eval()
    objective(module(rows())).backward()
    assert_close(ours, grads_of(module))


class TimeFirst(nn.Module):
    """A sequence encoder: (B, features) -> (time, B, width)."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.steps = steps

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([self.layer(rows) * step for step in range(self.steps)])


@pytest.mark.parametrize(("chunk_size", "rows"), [(4, 8), (1, 3), (2, 4), (3, 7)])
def test_a_dimension_that_has_the_size_of_a_piece_by_chance_is_refused(chunk_size: int, rows: int) -> None:
    with pytest.raises(InputError, match="a row for each row of the batch"):
        microbatched(TimeFirst(chunk_size), chunk_size)(torch.randn(rows, 3))


def test_one_piece_may_have_any_form() -> None:
    encoder, rows = TimeFirst(4), torch.randn(4, 3)
    assert torch.equal(microbatched(encoder, 4)(rows), encoder(rows))


def test_the_look_at_the_form_is_taken_once_and_draws_nothing() -> None:
    sizes: list[int] = []
    dropped = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    dropped.register_forward_hook(lambda module, args, result: sizes.append(len(result)))
    rows = torch.randn(8, 3)
    pieces = microbatched(dropped, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        found = pieces(rows)
    torch.manual_seed(0)
    assert torch.equal(found, torch.cat([dropped(rows[:4]), dropped(rows[4:])]))
    sizes.clear()
    with torch.no_grad():
        pieces(rows)
    assert sizes == [4, 4]
