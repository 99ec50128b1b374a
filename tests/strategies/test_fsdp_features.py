"""What else a fit can have under `fsdp2_ddp_losses`: batch norm, metrics, samplers, windows, uneven ends, float64; and what is refused."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import ModelParallelLossStrategy, differentiable, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.counting import CountCollectives
from tests.doors import torch_compat
from tests.fits import make_trainer, weights_of
from tests.oracle import Task, assert_close, batches
from tests.strategies.fsdp_jobs import Towers, fit_kind_alone, fit_sharded_model, make_job, shard, step_alone
from tests.strategies.jobs import TASK, Job, fit_alone, loader

ROWS, G, EPOCHS = 21, 6, 2


def mean_over_some(features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over some of the rows, and how many those are: never all on any rank."""
    counted = features[:, 0] > 0.3
    return embeddings.square().sum(1)[counted].sum(), counted.sum()


class Mixed(Job):  # batch norm in the encoder, a metric as a loss, a hand-written mean; rows are counted in validation
    is_global = True

    def build(self, loss: str) -> None:
        self.encoder = nn.Sequential(
            nn.Linear(TASK.features, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, TASK.dim)
        ).double()
        metric = torchmetrics.MeanSquaredError()
        self.metric = differentiable(metric) if self.is_global else None
        self.seen: list[int] = []

    def configure_model(self) -> None:
        shard(self, self.encoder)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        total, count = mean_over_some(features, embeddings)
        if self.metric is None:
            return total / count + 0.5 * (embeddings[:, 0] - features[:, 1]).square().mean()
        return global_mean(total, count) + 0.5 * self.metric(embeddings[:, 0], features[:, 1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.encoder(batch[0])
        self.seen += batch[1].tolist()


class PlainMixed(Mixed):  # the same for one process
    is_global = False


def mixed_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(ROWS, TASK.features, generator=generator, dtype=torch.float64), torch.arange(ROWS))


def fit_mixed(kind: type[Mixed]) -> tuple[dict[str, Tensor], list[int]]:
    W = dist.get_world_size() if dist.is_initialized() else 1
    module = kind()
    data = DataLoader(mixed_data(), batch_size=G // W)
    options = {"max_epochs": EPOCHS, "use_distributed_sampler": True, "sync_batchnorm": True}
    trainer = make_trainer(ModelParallelLossStrategy(use_global_sampler=True), **options)
    trainer.fit(module, data, DataLoader(mixed_data(), batch_size=G // W))
    return weights_of(module), module.seen


def test_batch_norm_metrics_means_samplers_and_evaluation_are_those_of_one_process(pool: RankPool) -> None:
    module = PlainMixed()
    optimizer = module.configure_optimizers()
    for features, labels in [*DataLoader(mixed_data(), batch_size=G)] * EPOCHS:
        step_alone(optimizer, module.objective(features, labels, 0))
    results = pool.run(2, fit_mixed, Mixed)
    for state, _ in results:
        assert_close(state, dict(module.state_dict()))
    seen = sorted(row for _, rows in results for row in rows)
    assert seen == sorted(list(range(ROWS)) * EPOCHS), "each row once in each validation"


class Window(Job):  # a hand-written mean whose count differs between micro-batches
    def configure_model(self) -> None:
        shard(self, self.encoder)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return global_mean(*mean_over_some(features, self.encoder(features)))


def fit_window() -> tuple[dict[str, Tensor], int]:
    with CountCollectives() as seen:
        state = fit_sharded_model(Window, strategy={"accumulation": "window"}, accumulate_grad_batches=3, even=False)
    # what fully_shard sends in backward
    return state, seen.names.count("_reduce_scatter_base_")


def test_a_window_is_one_batch_and_nothing_is_reduced_inside_it(pool: RankPool) -> None:
    job = Window()
    optimizer = job.configure_optimizers()
    steps = batches(TASK)
    for start in range(0, len(steps), 3):
        features = torch.cat([batch[0] for batch in steps[start : start + 3]])
        total, count = mean_over_some(features, job.encoder(features))
        step_alone(optimizer, total / count)
    expected = {name: value for name, value in job.state_dict().items() if name.startswith("encoder")}
    for state, reduce_scatters in pool.run(2, fit_window):
        assert_close({name: state[name] for name in expected}, expected)
        assert reduce_scatters == 2 * 2, "two layers, in two windows of four batches"


NAMES = ("named_modules", "named_parameters", "named_buffers")


def names_asked_for(strategy_losses: str | list[str]) -> int:
    """How often all names of a module are walked through between the second batch of a fit and the last but one."""
    module, count = make_job("arcface", is_global=False), Counter[int]()

    def counting(walk: Callable[..., Any]) -> Callable[..., Any]:
        def walk_and_count(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            count[module.trainer.fit_loop.batch_idx if module._trainer else -1] += 1
            return walk(self, *args, **kwargs)

        return walk_and_count

    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(nn.Module, name, counting(getattr(nn.Module, name))))
        trainer = make_trainer(ModelParallelLossStrategy(strategy_losses))
        trainer.fit(module, loader(task=Task(steps=5)))
    return sum(count[index] for index in (2, 3))


def test_a_step_walks_through_no_names(pool: RankPool) -> None:
    """With thousands of parameters that takes milliseconds; Lightning's own strategy does not either."""
    ours, lightnings = pool.run(1, names_asked_for, "auto"), pool.run(1, names_asked_for, [])
    assert ours == lightnings, "walks through all names"


class Looking(Towers):  # runs the encoder between two steps, without a backward, which leaves it gathered
    is_global = False

    def configure_model(self) -> None:
        fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

    def on_train_start(self) -> None:
        self.gathered_in_steps, self.gathered_after = list[bool](), list[bool]()

    def is_gathered(self) -> bool:
        return any(not isinstance(p, DTensor) for p in self.encoder.parameters())

    def training_step(self, batch: Any, index: int) -> Any:
        self.gathered_in_steps.append(self.is_gathered())
        return super().training_step(batch, index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            with torch.no_grad():
                self.encoder(batch[0])
        self.gathered_after.append(self.is_gathered())


def where_parameters_are_gathered() -> tuple[list[bool], list[bool]]:
    module = Looking("ArcFaceLoss", "sgd")
    make_trainer(ModelParallelLossStrategy()).fit(module, loader())
    return module.gathered_in_steps[:4], module.gathered_after[:4]


def test_a_step_begins_with_parts_also_where_a_forward_has_left_them_gathered(pool: RankPool) -> None:
    assert pool.run(2, where_parameters_are_gathered) == [([False] * 4, [False, True] * 2)] * 2


class StepCollectives(Callback):  # the collectives between the ends of the second and the third batch
    def __init__(self) -> None:
        self.count = CountCollectives()
        self.of_step: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            self.count.take()
        if index == 2:
            self.of_step = Counter(self.count.take())


def collectives_of_a_step(is_ours: bool) -> Counter[str]:
    seen, world_size = StepCollectives(), dist.get_world_size()
    strategy = ModelParallelLossStrategy() if is_ours else ModelParallelStrategy(world_size, 1)
    with seen.count:
        trainer = make_trainer(strategy, callbacks=[seen])
        trainer.fit(make_job("arcface", is_global=is_ours), loader(world_size, dist.get_rank()))
    return seen.of_step


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_has_one_handshake_and_one_reduction_more_than_lightnings(pool: RankPool, ranks: int) -> None:
    """And the exchange of the global loss itself. Lightning's broadcast before each batch, which asks for SIGTERM, is spared."""
    ours = pool.run(ranks, collectives_of_a_step, True)
    for own, plain in zip(ours, pool.run(ranks, collectives_of_a_step, False), strict=True):
        assert plain - own == {"broadcast_": 1}
        assert own - plain == {"alltoall_base_": 3}


@pytest.mark.parametrize("uneven", ["join", "stop"])
def test_ranks_may_run_out_of_batches(pool: RankPool, uneven: str) -> None:
    states = pool.run(2, fit_until, uneven)
    job = make_job("three", is_global=False)
    optimizer = job.configure_optimizers()
    rows = TASK.rows // 2
    for number, (features, labels) in enumerate(batches(TASK)):
        # rank 1 has no more than two batches
        if number >= 2:
            features, labels = features[:rows], labels[:rows]
        if number >= 2 and uneven == "stop":
            break
        step_alone(optimizer, job.objective(features, labels, 0))
    assert_all_close(states, job.state_dict(), rtol=1e-8)


def fit_until(uneven: str) -> dict[str, Tensor]:
    module = make_job("three")
    own = list(loader(2, dist.get_rank()).dataset)  # type: ignore[arg-type]
    data = DataLoader(own if dist.get_rank() == 0 else own[:2], batch_size=None)
    make_trainer(ModelParallelLossStrategy(uneven=uneven)).fit(module, data)
    return weights_of(module)


@pytest.mark.parametrize("kind", ["three", "clip"])
def test_it_trains_as_ddp_does(pool: RankPool, kind: str) -> None:
    ours, ddp = (pool.run(2, fit_sharded_model, kind, "adamw", even=False, ddp=ddp) for ddp in (False, True))
    assert_close(ours[0], ddp[0], rtol=1e-10)


def in_float32(module: Towers) -> None:
    module.float()


class Rounded(Towers):  # one process that starts from weights of float32
    is_global = False

    def build(self, loss: str) -> None:
        super().build(loss)
        self.float().double()


@pytest.mark.parametrize("strategy", ["fsdp2_ddp_losses", None])
def test_it_trains_in_float64(pool: RankPool, strategy: str | None) -> None:
    expected = fit_alone(Rounded)
    options: dict[str, Any] = {"strategy": strategy, "precision": "64-true", "prepare": in_float32}
    for state in pool.run(2, fit_sharded_model, "arcface", **options):
        assert all(value.dtype == torch.float64 for value in state.values())
        assert_close(state, expected, rtol=1e-8)


def test_a_halved_encoder_leaves_the_loss_in_full_precision(pool: RankPool) -> None:
    for state in pool.run(2, fit_sharded_model, "arcface", precision="bf16-true", prepare=in_float32):
        assert state["encoder.0.weight"].dtype == torch.bfloat16
        assert state["loss.W"].dtype == torch.float32
        assert bool(state["loss.W"].isfinite().all())


def a_tied_layer(module: Towers) -> None:
    """The loss's weight is that of a layer, which the module's own `configure_model` divides."""
    layer = nn.Linear(module.loss.W.shape[1], module.loss.W.shape[0], bias=False).double()
    module.encoder.append(layer)
    module.loss.W = layer.weight


def fit_as_on_a_gpu(optimizer: str) -> dict[str, Tensor]:
    """There torch steps all parameters of a group in one call, unless an option says otherwise."""
    groups: list[Any] = []

    def keep(module: Towers) -> None:
        make = module.configure_optimizers
        module.configure_optimizers = lambda: groups.append(made := make()) or made  # type: ignore[method-assign]

    optim = importlib.import_module("torch.optim.optimizer")
    with mock.patch.object(optim, "_get_foreach_kernels_supported_devices", return_value=["cpu"]):
        state = fit_sharded_model("arcface", optimizer, prepare=keep)
    assert [group["foreach"] for group in groups[0].param_groups] == [None], "a checkpoint has the user's options"
    return state


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_group_of_divided_and_whole_parameters(pool: RankPool, optimizer: str) -> None:
    for state in pool.run(2, fit_as_on_a_gpu, optimizer):
        assert_close(state, fit_kind_alone("arcface", optimizer))


class Wrapped:  # what Lightning takes for an optimizer
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state
        self.state_dict, self.load_state_dict, self.step = (
            optimizer.state_dict,
            optimizer.load_state_dict,
            optimizer.step,
        )
        self.zero_grad = optimizer.zero_grad


def wrap(module: Towers) -> None:
    make = module.configure_optimizers
    module.configure_optimizers = lambda: Wrapped(make())  # type: ignore[method-assign]


def test_an_optimizer_that_is_not_torchs(pool: RankPool) -> None:
    for state in pool.run(2, fit_sharded_model, "arcface", prepare=wrap):
        assert_close(state, fit_kind_alone("arcface"))


def compiled(module: Towers) -> None:
    module.encoder.compile(backend="aot_eager")


def fit_compiled() -> dict[str, Tensor]:
    torch.compiler.reset()
    with mock.patch.object(torch._dynamo.config, "suppress_errors", False):
        return fit_sharded_model("three", "adamw", prepare=compiled)


def test_a_compiled_model(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit_compiled), fit_kind_alone("three", "adamw"), rtol=1e-8)


def fit_under_an_older_torch(prepare: Callable[[Towers], None] | None = None) -> dict[str, Tensor]:
    never = mock.Mock(return_value=False)
    with mock.patch.multiple(torch_compat, marks_sharded=never, was_sharded=never):
        return fit_sharded_model("three", "adamw", prepare=prepare)


def test_an_older_torch(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit_under_an_older_torch), fit_kind_alone("three", "adamw"), rtol=1e-8)
