"""Sharded classes under the strategy: training, evaluation, clipping, scaling, averages and checkpoints, against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, DDPChecks, DDPLossStrategy
from lightning_ddp_losses.sharding import ClassShard
from lightning_ddp_losses.testing import RankPool
from tests.counting import Operators
from tests.doors import Shards, process_groups, tag_shard
from tests.fits import make_trainer, scale_of, scaled, trainer_alone, weights_of
from tests.oracle import CLASS_LOSSES, assert_close, batches, cuts
from tests.refusals import assert_same_error
from tests.strategies.jobs import TASK, Job, fit, fit_alone, loader, make_loss
from tests.strategies.sharded_jobs import Plain, Sharded, fit_sharded, whole_state

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*Be aware that when using `ckpt_path`"
)
NAMES = {"SoftTripleLoss": "loss.fc", "ProxyNCALoss": "loss.proxies"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


def joined(results: list[dict[str, Tensor]], loss: str = "ArcFaceLoss") -> dict[str, Tensor]:
    return whole_state(results, NAMES.get(loss, "loss.W"), 0 if loss == "ProxyNCALoss" else 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_equals_one_process(pool: RankPool, world_size: int, options: dict[str, Any]) -> None:
    expected = fit_alone(Plain, **options)
    for even in (True, False):
        assert_close(joined(pool.run(world_size, fit_sharded, even=even, **options)), expected)


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_every_loss_trains(pool: RankPool, name: str) -> None:
    expected = fit_alone(lambda: Plain(name, "adam"))
    assert_close(joined(pool.run(2, fit_sharded, name, "adam", even=False), name), expected)


class Evaluates(Sharded):  # runs the loss in evaluation too; nothing there may change a weight
    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        assert self.objective(*batch, index).isfinite()

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss.predict(self.encoder(batch[0]), k=2)[1]


@pytest.mark.parametrize("then", ["validate", "test", "predict"])
def test_evaluation_leaves_the_shards_alone(pool: RankPool, then: str) -> None:
    assert_close(joined(pool.run(2, fit_sharded, make=Evaluates, then=then)), fit_alone(Plain))


PLACES = {"one process": 0, "1 rank": 1, "2 ranks": 2, "3 ranks": 3}


def train_at(pool: RankPool, place: str, epochs: int, load: str | None, save: str | None) -> dict[str, Tensor]:
    if PLACES[place]:
        options = {"load": load, "save": save, "max_epochs": epochs}
        return joined(pool.run(PLACES[place], fit_sharded, "ArcFaceLoss", "adam", **options))
    return fit_alone(partial(Plain, "ArcFaceLoss", "adam"), max_epochs=epochs, ckpt_path=load, save=save)


@pytest.fixture(scope="module")
def two_epochs(pool: RankPool) -> dict[str, Tensor]:
    """What one process trains."""
    return train_at(pool, "one process", 2, None, None)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Where the first of two epochs is saved, trained and saved once for each place."""
    folder = tmp_path_factory.mktemp("halves")

    def path_of(source: str) -> str:
        path = folder / source
        if not path.exists():
            train_at(pool, source, 1, None, str(path))
        return str(path)

    return path_of


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_a_checkpoint_goes_on_anywhere(
    pool: RankPool, saved: Callable[..., str], two_epochs: dict[str, Tensor], source: str, target: str
) -> None:
    assert_close(train_at(pool, target, 2, saved(source), None), two_epochs)


def keys(path: str) -> tuple[list[str], torch.Size, torch.Size]:
    saved = torch.load(path, weights_only=False)
    weight = saved["state_dict"]["loss.W"]
    state = saved["optimizer_states"][0]["state"]
    return list(saved["state_dict"]), weight.shape, state[max(state)]["exp_avg"].shape


def test_a_checkpoint_holds_what_one_process_saves(pool: RankPool, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours.ckpt"), str(tmp_path / "theirs.ckpt")
    train_at(pool, "3 ranks", 1, None, ours)
    train_at(pool, "one process", 1, None, theirs)
    assert keys(ours) == keys(theirs)


class OtherClasses(Sharded):
    def build(self, loss: str) -> None:
        torch.manual_seed(0)
        self.loss = ClassShardedLoss(pml.ArcFaceLoss(num_classes=TASK.classes + 1, embedding_size=TASK.dim).double())


def load_into_other_classes(path: str) -> bool:
    module = OtherClasses("ArcFaceLoss", "adam")
    before = {name: value.clone() for name, value in module.state_dict().items() if "encoder" in name}
    trainer = make_trainer("ddp_losses")
    with pytest.raises(Exception, match=r"loss\.W.*expected.*\(4, 6\).*got.*\(4, 5\)") as raised:
        trainer.fit(module, loader(), ckpt_path=path)
    assert type(raised.value).__name__ == "InputError"
    return all(torch.equal(value, module.state_dict()[name]) for name, value in before.items())


def test_other_classes_are_refused_before_anything_is_loaded(pool: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "five.ckpt")
    train_at(pool, "2 ranks", 1, None, file)
    assert pool.run(2, load_into_other_classes, file, fresh=True) == [True, True]


class Built(Sharded):  # made before the ranks exist, as a script makes its module
    def build(self, loss: str) -> None:
        with mock.patch.object(process_groups, "is_distributed", return_value=False):
            self.loss = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=5, embedding_size=TASK.dim, seed=1).double()
        assert self.loss.weight.numel() == 0


def test_a_loss_that_is_never_whole_trains_alike_on_any_number_of_ranks(pool: RankPool) -> None:
    one, two, three = (joined(pool.run(world_size, fit_sharded, make=Built)) for world_size in (1, 2, 3))
    assert_close(two, one)
    assert_close(three, one)


class Parts(Sharded):  # sharded over two ranks, twice
    def build(self, loss: str) -> None:
        part, _ = dist.new_subgroups(2)
        self.loss = ClassShardedLoss(make_loss(loss), group=part)


def test_shards_with_replicas_train_and_are_saved(pool: RankPool, tmp_path: Path) -> None:
    file, options = str(tmp_path / "parts.ckpt"), {"gradient_clip_val": 0.05}
    expected = fit_alone(Plain, **options)
    results = pool.run(
        4, fit_sharded, make=Parts, even=False, save=file, callbacks=[DDPChecks(summary=False, file=False)], **options
    )
    for part in (results[:2], results[2:]):
        assert_close(joined(part), expected)
    assert_close(torch.load(file, weights_only=False)["state_dict"], expected)


class Clips(Sharded):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Overflow(Callback):  # one rank's shard overflows in one step
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 1 and not getattr(self, "done", False):
            self.done = True
            if dist.get_rank() == 1:
                module.loss.W.grad[0, 0] = torch.inf


def overflow() -> tuple[dict[str, Tensor], float]:
    module = Sharded()
    trainer = make_trainer(DDPLossStrategy(), plugins=[scaled(8.0)], callbacks=[Overflow()])
    trainer.fit(module, loader())
    return weights_of(module), scale_of(trainer)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(pool: RankPool) -> None:
    results = pool.run(2, overflow)
    assert [scale for _, scale in results] == [4.0, 4.0]
    state = joined([state for state, _ in results])  # equal but for the shards
    assert all(value.isfinite().all() for value in state.values())


class OwnShard(Job):
    """A sharded parameter of the module itself: rank r holds rows 2r and 2r + 1 and gets a gradient of its own."""

    overlapping = False

    def build(self, loss: str) -> None:
        super().build(loss)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.rows = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))
        start = 0 if self.overlapping else 2 * rank
        tag_shard(self.rows, ClassShard(start, start + 2, 2 * world))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        return super().objective(features, labels, index) + (1.0 + self.global_rank) * self.rows.sum()


class OverlappingShard(OwnShard):
    overlapping = True


def test_a_sharded_parameter_of_the_module_itself_is_not_averaged(pool: RankPool) -> None:
    before = OwnShard().rows.detach()
    for rank, state in enumerate(pool.run(2, fit, partial(OwnShard, optimizer="plain"))):
        steps = -0.1 * (1 + rank) * len(batches(TASK))
        assert_close({"rows": state["rows"]}, {"rows": before + steps})


def averaged(epochs: int, load: str | None, save: str | None) -> dict[str, Tensor]:
    """Train with an average of the weights, on ranks or in one process; what the fit leaves in the module is the average."""
    ranks = dist.is_initialized()
    options: dict[str, Any] = {"callbacks": [WeightAveraging()], "max_epochs": epochs}
    trainer = make_trainer(DDPLossStrategy(), **options) if ranks else trainer_alone(**options)
    module = (Sharded if ranks else Plain)("ArcFaceLoss", "adam")
    trainer.fit(module, loader(*((dist.get_world_size(), dist.get_rank()) if ranks else (1, 0))), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return weights_of(module)


class SavesInBetween(WeightAveraging):  # saves while the average is kept with the weights
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def saved_in_between(path: str, strategy: dict[str, Any]) -> None:
    fit_sharded("ArcFaceLoss", "adam", strategy=strategy, callbacks=[SavesInBetween(path)], max_epochs=2)


def test_an_average_is_saved_whole_and_goes_on_anywhere(pool: RankPool, tmp_path: Path) -> None:
    file, alone = str(tmp_path / "half.ckpt"), str(tmp_path / "alone.ckpt")
    expected = averaged(2, None, None)
    trainer = trainer_alone(callbacks=[SavesInBetween(alone)], max_epochs=2)
    trainer.fit(Plain("ArcFaceLoss", "adam"), loader(1, 0))
    pool.run(2, saved_in_between, file, {})
    ours, theirs = (torch.load(path, weights_only=False) for path in (file, alone))
    for part in ("state_dict", "current_model_state"):
        assert_close(ours[part], theirs[part])
    assert_close(whole_state(pool.run(3, averaged, 2, file, None)), expected)
    assert_close(averaged(2, file, None), expected)


def test_an_average_in_a_sharded_checkpoint_is_refused(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.errors(2, saved_in_between, str(tmp_path / "folder"), {"sharded_checkpoints": True})
    assert_same_error(errors, "sharded_checkpoints", "a callback put in the place of loss.W")


class Apart(Sharded):  # the sharded weight has an optimizer of its own kind
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.manual_backward(self.objective(*batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        rest: list[nn.Parameter] = list(self.encoder.parameters())
        return [torch.optim.Adafactor(rest), torch.optim.Adam(self.loss.parameters())]


class Adafactor(Sharded):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def test_an_optimizer_of_whole_weights_may_have_the_rest(pool: RankPool) -> None:
    pool.run(2, fit_sharded, make=Apart)
    pool.run(1, fit_sharded, make=Adafactor)


# Clipping where ranks hold parts: the norm of the whole in float32 at least, and few launches for many parameters.

ROWS, LIMIT = 12, 3.0


def gradients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One that every rank holds, and one of which each rank holds some rows; norms over 256."""
    generator = torch.Generator().manual_seed(0)
    return tuple((torch.randn(ROWS, 40, generator=generator) * 30).to(dtype) for _ in range(2))


def clip(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole, divided = gradients(dtype)
    own = cuts(ROWS, dist.get_world_size())[dist.get_rank()]
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in (whole, divided[own])]
    parameters[0].grad, parameters[1].grad = whole, divided[own].clone()
    shards = Shards(cast("Any", None), lambda module: {})
    shards.parameters, shards._replicas = {"loss.W": parameters[1]}, {"loss.W": 1}
    shards.clip_(parameters, LIMIT)
    return parameters[0].grad, parameters[1].grad


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_norm_of_the_whole(pool: RankPool, world_size: int, dtype: torch.dtype, rtol: float) -> None:
    expected = [grad.double() for grad in gradients(dtype)]
    norm = torch.cat(expected).norm()
    assert norm > 256, "its square would fit into float16"
    results = pool.run(world_size, clip, dtype)
    joined = torch.cat([part for _, part in results])
    for found, grad in [(joined, expected[1]), *((whole, expected[0]) for whole, _ in results)]:
        torch.testing.assert_close(found.double(), grad * LIMIT / norm, rtol=rtol, atol=1e-6)


def launches_of_many() -> int:
    shards = Shards(cast("Any", None), lambda module: {})
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(400)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    launched: list[str] = []
    with Operators(lambda operator, *_: launched.append(str(operator))):
        shards.clip_(parameters, LIMIT)
    return sum("detach" not in name for name in launched)


def test_many_parameters_take_few_launches(pool: RankPool) -> None:
    assert max(pool.run(2, launches_of_many)) < 30
