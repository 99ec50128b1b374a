"""Accumulation windows under Lightning: after each window, the gradient of one process on all its rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import CASES, Job, fit, fit_alone, own_batches, train
from tests.oracle import assert_close

Alone = Callable[[str, int], dict[str, Any]]
SCALE = 256.0  # of fp16 losses
COUNT = 7  # micro-batches: the last window is shorter for 2, 3 and 4


def compare(found: list[dict[str, Any]], alone: dict[str, Any], tolerance: float = 1e-9) -> None:
    for of_rank in found:
        ours, theirs = of_rank["state"], alone["state"]
        # a sharded weight is whole on rank 0 alone
        trained = [name for name, tensor in theirs.items() if tensor.is_floating_point() and not ours[name].is_meta]
        assert any(name.startswith("net.") for name in trained)
        assert_close({n: ours[n] for n in trained}, {n: theirs[n] for n in trained}, tolerance)
        # what hooks, checks and clipping see before each step
        assert len(of_rank["gradients"]) == len(alone["gradients"])
        for found_grads, true_grads in zip(of_rank["gradients"], alone["gradients"], strict=True):
            whole = {n for n, grad in found_grads.items() if grad.shape == true_grads[n].shape}
            assert_close(_only(found_grads, whole), _only(true_grads, whole), tolerance)
    assert "loss.W" not in found[0]["state"] or not found[0]["state"]["loss.W"].is_meta


def _only(tensors: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: tensors[name] for name in names}


@pytest.fixture(scope="module")
def trained_alone(pool: RankPool) -> Alone:
    """What one process trains with windows of a size, once for each case."""
    return functools.cache(lambda case, size: pool.run(1, fit_alone, case, size, COUNT, distributed=False)[0])


def sizes_of_windows() -> list[Any]:
    """Each case on each number of ranks with windows of a size by turns, and of 3: on three ranks, on fewer in the slow tests."""
    found: list[Any] = []
    for number, case in enumerate(CASES):
        for world_size in (1, 2, 3):
            window = 1 + (number + world_size) % 4
            found.append((case, world_size, window))
            if window != 3:
                found.append(pytest.param(case, world_size, 3, marks=[] if world_size == 3 else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize(("case", "world_size", "size"), sizes_of_windows())
def test_a_window_is_one_process_on_all_its_rows(
    pool: RankPool, trained_alone: Alone, case: str, world_size: int, size: int
) -> None:
    compare(pool.run(world_size, fit, case, size, COUNT), trained_alone(case, size))


def test_the_last_window_of_an_epoch_is_divided_by_what_it_has(pool: RankPool) -> None:
    """Ten batches in windows of four: the third step has two. (Lightning divides its gradient by four.)"""
    alone = pool.run(1, fit_alone, "global_mean", 4, 10, distributed=False)[0]
    found = pool.run(2, fit, "global_mean", 4, 10)
    assert [len(of_rank["gradients"]) for of_rank in found] == [3, 3]
    compare(found, alone)


REGULARISED = "ArcFace, non-zero, regularised"
# case, ranks, windows, options of the trainer, of the strategy
OPTIONS: dict[str, tuple[str, int, int | list[int], dict[str, Any], dict[str, Any]]] = {
    "clipped by norm": (REGULARISED, 2, 3, {"gradient_clip_val": 0.02}, {}),
    "find_unused_parameters": (REGULARISED, 2, 3, {}, {"find_unused_parameters": True}),
    "buckets as views": (REGULARISED, 2, 3, {}, {"gradient_as_bucket_view": True}),
    "without call check": (REGULARISED, 2, 3, {}, {"check_calls": False}),
    "a loss that the strategy makes global": ("ArcFace, plain", 2, 3, {}, {"global_batch": "auto"}),
    "windows that change from epoch to epoch": ("cross entropy, ignored", 2, [2, 3, 4], {}, {}),
    "four ranks": ("cross entropy, ignored", 4, 4, {}, {}),
    "four ranks, two divisors": ("global_mean, two divisors", 4, 4, {}, {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_other_options(pool: RankPool, name: str) -> None:
    case, world_size, windows, trainer, strategy = OPTIONS[name]
    alone = pool.run(1, fit_alone, case, windows, COUNT, trainer, distributed=False)[0]
    compare(pool.run(world_size, fit, case, windows, COUNT, trainer, **strategy), alone)


class Hooked(Callback):
    """Gives the model's DDP a communication hook, as torch does it: Lightning registers them on CUDA alone."""

    def __init__(self, kind: str) -> None:
        self.hook: Any = {"all-reduce": allreduce_hook, "fp16": fp16_compress_hook, "PowerSGD": powerSGD_hook}[kind]
        self.state: Any = None
        if kind == "PowerSGD":  # of full rank, so that it loses nothing
            self.state = PowerSGDState(
                None, matrix_approximation_rank=6, start_powerSGD_iter=2, min_compression_rate=0.05
            )
        self.calls = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        @functools.wraps(self.hook)  # torch looks at the annotations
        def counted(state: Any, bucket: Any) -> Any:
            self.calls += 1
            return self.hook(state, bucket)

        trainer.strategy.wrapped_model.register_comm_hook(self.state, counted)


def fit_hooked(kind: str, case: str, window: int) -> dict[str, Any]:
    hooked = Hooked(kind)
    result = fit(case, window, COUNT, {"callbacks": [hooked], "accumulate_grad_batches": window})
    compressed = 0 if hooked.state is None else hooked.state.compression_stats()[2]
    return result | {"calls": hooked.calls, "compressed": compressed}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("kind", "rounding"), [("all-reduce", 1e-9), ("fp16", 2e-2), ("PowerSGD", 1e-9)])
def test_a_communication_hook(pool: RankPool, trained_alone: Alone, kind: str, rounding: float, window: int) -> None:
    alone = trained_alone(REGULARISED, window)
    found = pool.run(2, fit_hooked, kind, REGULARISED, window)
    for of_rank in found:
        assert of_rank["calls"] == -(-COUNT // window)  # one bucket
        assert (of_rank["compressed"] > 0) == (kind == "PowerSGD")
    if kind == "fp16":
        # a half has 11 bits; what the first steps round goes on in the later ones
        assert 1e-6 < distance(found[0]["gradients"][0], alone["gradients"][0]) < 2e-3
    compare(found, alone, rounding)


def test_the_mean_of_means_is_another_gradient(pool: RankPool, trained_alone: Alone) -> None:
    """What the window corrects: plain accumulation is off by more than any rounding."""
    case = "cross entropy, ignored"
    alone = trained_alone(case, 3)["gradients"][0]
    window = pool.run(2, fit, case, 3, COUNT)[0]["gradients"][0]
    mean = pool.run(2, fit, case, 3, COUNT, accumulation="mean")[0]["gradients"][0]
    off = {kind: distance(found, alone) for kind, found in {"window": window, "mean": mean}.items()}
    assert off["window"] < 1e-12, off
    assert off["mean"] > 0.1, off


def distance(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Relative distance of the encoder's gradients."""
    names = [name for name in true if name.startswith("net.")]
    difference = torch.cat([(found[name] - true[name]).flatten() for name in names])
    return float(difference.norm() / torch.cat([true[name].flatten() for name in names]).norm())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision(pool: RankPool, trained_alone: Alone, precision: str) -> None:
    alone = trained_alone("ArcFace", 3)["gradients"]
    for of_rank in pool.run(2, fit_in_halves, precision):
        assert of_rank["scale"] in (None, SCALE)  # no overflow
        for found, true in zip(of_rank["gradients"], alone, strict=True):
            assert distance(found, true) < 0.03


def fit_in_halves(precision: str) -> dict[str, Any]:
    if precision == "bf16":
        plugin = MixedPrecision("bf16-mixed", "cpu")
    else:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    job = Job("ArcFace", window=3).float()
    batches = own_batches(job.global_batches(COUNT, 3))
    job.batches = [(rows.float(), labels) for rows, labels in batches]
    train(job, job.batches, accumulate_grad_batches=3, plugins=[plugin])
    scale = None if plugin.scaler is None else plugin.scaler.get_scale()
    return {"gradients": job.gradients, "scale": scale}


@pytest.mark.parametrize("blocked", [True, False])
def test_manual_optimization(pool: RankPool, blocked: bool) -> None:
    for case in ("ArcFace, non-zero, regularised", "cross entropy, sum", "global_mean, two divisors"):
        (alone,) = pool.run(1, fit_alone, case, 3, 6, distributed=False)
        compare(pool.run(2, fit_by_hand, case, blocked), alone)


class ByHand(Job):  # each batch is a window, a list of micro-batches
    def __init__(self, case: str, blocked: bool) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.blocked = blocked

    def training_step(self, window: Any, index: int) -> None:
        strategy: Any = self.trainer.strategy
        optimizer: Any = self.optimizers()
        if self.case.expects is not None:
            strategy.expect_counts(self.case.expects(window))
        with strategy.window(len(window)) as open_window:
            for i, batch in enumerate(window):
                waits = self.blocked and i + 1 < len(window)
                with open_window.micro_batch():
                    loss = self.case.value(self, *batch)
                with strategy.block_backward_sync() if waits else contextlib.nullcontext():
                    self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def fit_by_hand(case: str, blocked: bool) -> dict[str, Any]:
    job = ByHand(case, blocked)
    batches = own_batches(job.global_batches(6, 3))
    train(job, [batches[:3], batches[3:]])
    return job.found()
