"""Under Lightning: W ranks with batch norm train as one process does, and the module comes back as it was."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import GlobalBatchLoss, SyncBatchNorm
from lightning_ddp_losses.strategies import register_loss_type
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer
from tests.oracle import Encoder, assert_close
from tests.strategies.jobs import TASK, Job, fit, fit_alone, loader, make_loss, strategy_of

OURS: dict[str, Any] = {"plugins": [SyncBatchNorm()]}


class NormedEncoder(Encoder):
    """Batch norms between the layers, the last one not affine."""

    def __init__(self) -> None:
        super().__init__(TASK)
        self.insert(1, nn.BatchNorm1d(8))
        self.append(nn.BatchNorm1d(TASK.dim, affine=False, momentum=None))


@register_loss_type
class ProjectedArcFace(nn.Module):
    """A learnable loss with a projector and its batch norm inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.projector = nn.Sequential(nn.Linear(TASK.dim, TASK.dim), nn.BatchNorm1d(TASK.dim)).double()
        self.arc = make_loss()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.arc(self.projector(embeddings), labels)


class Normed(Job):
    def build(self, loss: str) -> None:
        torch.manual_seed(1)
        self.encoder = NormedEncoder().double()
        self.loss = ProjectedArcFace()


class TwoForwards(Normed):
    """Several forwards before one backward."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), labels) + self.loss(self.encoder(features.flip(1)), labels)


class TwoBackwards(Normed):
    """Manual optimisation: one forward of the encoder, two backwards through it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        embeddings = self.encoder(batch[0])
        self.manual_backward(self.loss(embeddings, batch[1]), retain_graph=True)
        self.manual_backward(0.1 * embeddings.square().mean() + 0 * self.loss(embeddings, batch[1]))
        optimizer.step()


class OfPairs(Normed):
    """A loss over all rows of all ranks, alone or wrapped for them: right on uneven ranks too."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss = GlobalBatchLoss(pml.SupConLoss()) if dist.is_initialized() else pml.SupConLoss()


class Shared(Normed):
    """One batch norm under two names."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.again = self.encoder[1]


class Checkpointed(Normed):
    """The encoder runs again in backward: its averages move twice, as in one process."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(checkpoint(self.encoder, features.requires_grad_(), use_reentrant=True), labels)


class Compiled(Normed):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.encoder = torch.compile(self.encoder, backend="eager")


class Frozen(Normed):
    """A frozen encoder, whose averages still move, but for one layer."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.encoder.requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        self.encoder[1].eval()


class Hidden(Normed):
    """A batch norm in a list, which the module does not see."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.kept = [nn.Sequential(nn.BatchNorm1d(TASK.features, affine=False).double())]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.kept[0](features), labels, index)


class HiddenInEvaluation(Hidden):
    """As somebody keeps a teacher."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.kept[0].eval()


# a name of torch 2.13
BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)

PARITY: dict[str, tuple[type[Job], Any, dict[str, Any], dict[str, Any]]] = {
    # job, strategy, options on the ranks, options of both
    "plugin under ddp_losses": (Normed, {}, OURS, {}),
    "plugin under ddp": (Normed, "ddp", OURS, {}),
    "sync_batchnorm=True": (Normed, {}, {"sync_batchnorm": True}, {}),
    "sync_batchnorm=True, plain": (Normed, {"losses": []}, {"sync_batchnorm": True}, {}),
    "accumulate": (Normed, {}, OURS, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "without the buffers' broadcast": (Normed, {BUFFERS: False}, OURS, {}),
    "two forwards": (TwoForwards, {}, OURS, {}),
    "two backwards": (TwoBackwards, {}, OURS, {}),
    "shared": (Shared, {}, OURS, {}),
    "checkpointed": (Checkpointed, {}, OURS, {}),
    "compiled": (Compiled, {}, OURS, {}),
    "frozen": (Frozen, {"static_graph": True}, OURS, {}),
    "unregistered, in evaluation mode": (HiddenInEvaluation, {}, OURS, {}),
}


def cases_and_ranks() -> list[Any]:
    """Each case on three ranks, or on one and two, by turns; the others are slow, and so is what each rank compiles."""
    found: list[Any] = [pytest.param("compiled", 2, marks=pytest.mark.slow)]
    for number, case in enumerate(name for name in PARITY if name != "compiled"):
        for world_size in (1, 2, 3):
            marks = [pytest.mark.slow] if (world_size == 3) == bool(number % 2) else []
            found.append(pytest.param(case, world_size, marks=marks))
    return found


@pytest.mark.parametrize(("case", "world_size"), cases_and_ranks())
def test_a_fit_equals_one_process(pool: RankPool, case: str, world_size: int) -> None:
    job, strategy, ours, options = PARITY[case]
    expected = fit_alone(job, **options)
    for state in pool.run(world_size, fit, job, strategy, **ours, **options):
        assert_close(state, expected)


def test_uneven_ranks_with_a_global_loss(pool: RankPool) -> None:
    expected = fit_alone(OfPairs)
    for world_size in (2, 3):
        for state in pool.run(world_size, fit, OfPairs, {}, even=False, **OURS):
            assert_close(state, expected)


def test_without_the_plugin_another_model_is_trained(pool: RankPool) -> None:
    state, expected = pool.run(2, fit, Normed)[0], fit_alone(Normed)
    with pytest.raises(AssertionError, match=r"encoder\.1\.running_var"):
        assert_close(state, expected, rtol=1e-3)


class Watch(Callback):
    """What the module is while it trains."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        kinds = {type(m) for m in pl_module.modules()}
        assert nn.BatchNorm1d in kinds
        assert nn.SyncBatchNorm not in kinds
        assert list(pl_module.state_dict()) == list(Normed().state_dict())


def fitted_twice() -> dict[str, Any]:
    module = Normed()
    before = repr(module), list(module.state_dict())
    world, rank = dist.get_world_size(), dist.get_rank()
    averaging = WeightAveraging(use_buffers=True)  # keeps a copy of the module, which needs no peer
    trainer = make_trainer(strategy_of({}), callbacks=[Watch(), averaging], plugins=[SyncBatchNorm()])
    trainer.fit(module, loader(world, rank))
    assert (repr(module), list(module.state_dict())) == before
    assert "on_before_backward" not in vars(module)
    assert not any("forward" in vars(m) for m in module.modules() if m is not module)  # Lightning keeps one of its own
    again = make_trainer("ddp_losses", sync_batchnorm=True)
    again.fit(module, loader(world, rank))
    module.eval()
    return dict(module.state_dict())


def test_the_module_comes_back_as_it_was_and_trains_again(pool: RankPool) -> None:
    first, second = pool.run(2, fitted_twice)
    assert_close(first, second, rtol=0)
    Normed().load_state_dict(first)


class HiddenLoss(Normed):
    """A loss with a batch norm, in a list."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.losses = [self.loss]
        del self.loss

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.losses[0](self.encoder(features), labels)

    def optimised(self) -> list[nn.Parameter]:
        return [*self.parameters(), *self.losses[0].parameters()]


class SkipsOnARank(Normed):
    """At step 1, rank 1 calls the encoder more often, leaves it out of its loss, or fails."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        odd = self.global_rank == 1 and index == 1
        embeddings = self.encoder(features)
        if odd and self.what == "fails":
            raise KeyError("rank 1 alone")
        if odd and self.what == "one forward more":
            embeddings = embeddings + self.encoder(features)
        if self.what == "left out" and odd:
            embeddings = embeddings.detach().requires_grad_()
        if self.what == "one channel more" and odd:
            self.encoder[1](torch.cat([features, features], 1)[:, :9])
        return self.loss(embeddings, labels)


def test_an_adopted_loss_is_synchronised(pool: RankPool) -> None:
    expected = {name.replace("loss.", "_adopted_losses.losses_0."): t for name, t in fit_alone(Normed).items()}
    for state in pool.run(2, adopted):
        assert_close(state, expected)


def adopted() -> dict[str, Tensor]:
    module = HiddenLoss()
    trainer = make_trainer(strategy_of({"adopt": True}), **OURS)
    trainer.fit(module, loader(dist.get_world_size(), dist.get_rank()))
    state = dict(module.state_dict())
    return state | {f"_adopted_losses.losses_0.{k}": v for k, v in module.losses[0].state_dict().items()}
