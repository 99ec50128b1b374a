"""Means over ranks are exact for every convention of reduction: a mean, a sum, a factor; over some dimensions of a mesh, with copies."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import ArcFaceLoss, SupConLoss
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MeanSquaredError

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    accumulation_window,
    differentiable,
    global_mean,
    global_rows,
    ssl,
)
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import Rows
from tests.answers import assert_all_close, one_error
from tests.doors import gradient_reduction_of, reduced_by
from tests.fits import grads_of

NAMES = ("dp", "cp", "tp")
MESHES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)]
DIVISORS = {"mean": None, "sum": 1.0, 300: 300.0}
CLASSES = 4
NUMBERS = ((3, 0, 2, 1), (0, 4, 1, 0), (2, 2, 0, 3))  # by micro-batch, of the ranks whose rows differ
ROWS = Rows(dict.fromkeys(range(5), NUMBERS), features=4)


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def rows_of(micro_batch: int, place: int) -> Tensor:
    return ROWS.of(micro_batch, place, 4)[0]


def whole_rows(places: int, window: int) -> Tensor:
    return ROWS.whole(places, range(window))[0]


def summed(net: nn.Module, rows: Tensor) -> Tensor:
    value: Tensor = net(rows).square().sum(0)
    return value


def truth(places: int, window: int) -> dict[str, Tensor]:
    """The gradient of one process: of two means that count differently."""
    net, rows = make_net(), whole_rows(places, window)
    (summed(net, rows) / len(rows)).sum().backward()
    return grads_of(net)


def reduce_by_hand(net: nn.Module, mesh: DeviceMesh, divisor: float | None) -> None:
    """Reduce over the dimensions whose rows differ."""
    for parameter in net.parameters():
        for dim in ("dp", "cp"):
            dist.all_reduce(parameter.grad, group=mesh.get_group(dim))
        assert parameter.grad is not None
        parameter.grad /= mesh["dp"].size() * mesh["cp"].size() if divisor is None else divisor


@functools.cache
def mesh_of(shape: tuple[int, ...], world: Any) -> DeviceMesh:
    """The mesh of a world, made once: a thread of each group wakes up a hundred times a second as long as the process lives."""
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def by_hand(shape: tuple[int, ...], reduces: Any, window: int) -> dict[str, Tensor]:
    mesh = mesh_of(shape, dist.group.WORLD)
    place = mesh.get_local_rank("dp") * shape[1] + mesh.get_local_rank("cp")
    net = make_net()
    with accumulation_window(net) as micro_batches:
        for i in range(window):
            rows = rows_of(i, place)
            options: Any = {"mesh": mesh["dp", "cp"], "copies": mesh["tp"], "reduces": reduces}
            with micro_batches.micro_batch():
                global_mean(summed(net, rows), len(rows), **options).sum().backward()
    reduce_by_hand(net, mesh, DIVISORS[reduces])
    return grads_of(net)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("reduces", DIVISORS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_meshes(pool: RankPool, shape: tuple[int, ...], reduces: Any, window: int) -> None:
    assert_all_close(pool.run(4, by_hand, shape, reduces, window), truth(shape[0] * shape[1], window))


def sharded(factor: float | None, *, inner: float | None = None, forced: bool = True) -> nn.Sequential:
    net = make_net()
    for module in (net[0], net):
        fully_shard(module)
    for module, number in ((net[0], inner or factor), (net, factor)):
        if number is not None:
            module.set_gradient_divide_factor(number)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(forced)  # type: ignore[operator]
    return net


def from_module(factor: float | None, window: int) -> dict[str, Tensor]:
    net = sharded(factor)
    is_one = window == 1
    options: Any = {"module": net} if is_one else {}
    with contextlib.nullcontext() if is_one else accumulation_window(net) as micro_batches:
        for i in range(window):
            rows = rows_of(i, dist.get_rank())
            with contextlib.nullcontext() if micro_batches is None else micro_batches.micro_batch():
                global_mean(summed(net, rows), len(rows), **options).sum().backward()
    return grads_of(net)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("factor", [None, 1.0, 300.0])
def test_a_divided_model(pool: RankPool, factor: float | None, window: int) -> None:
    assert_all_close(pool.run(2, from_module, factor, window), truth(2, window))


def beside_a_divided_model(factor: float | None, kind: str) -> dict[str, Tensor]:
    """Class weights that lie beside the model: divided by class, or under a DDP."""
    net, rank = sharded(factor), dist.get_rank()
    loss: Any = class_loss()
    loss = ClassShardedLoss(loss) if kind == "shards" else DistributedDataParallel(GlobalBatchLoss(loss))
    with accumulation_window(net, loss) as window:
        for i in range(2):
            loss.require_backward_grad_sync = i == 1
            rows = rows_of(i, rank)
            with window.micro_batch():
                loss(net(rows), torch.arange(len(rows)) % CLASSES).backward()
    if kind == "shards":
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, loss.weight.grad)
        return {**grads_of(net), "weight": torch.cat(parts, 1)}
    return {**grads_of(net), "weight": loss.module.loss.W.grad}


def class_loss() -> nn.Module:
    torch.manual_seed(2)
    return ArcFaceLoss(CLASSES, 2).double()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["shards", "under DDP"])
@pytest.mark.parametrize("factor", [None, 1.0, 300.0])
def test_class_weights_beside_a_divided_model(pool: RankPool, factor: float | None, kind: str, world_size: int) -> None:
    net, loss = make_net(), class_loss()
    loss(net(whole_rows(world_size, 2)), labels_of(CLASSES, world_size, 2)).backward()
    truth = {**grads_of(net), "weight": loss.W.grad}
    assert_all_close(pool.run(world_size, beside_a_divided_model, factor, kind), truth)


def labels_of(classes: int, places: int, window: int) -> Tensor:
    """Labels of the rows of all ranks: each rank begins with class 0 in each micro-batch."""
    counts = [NUMBERS[i][place] for i in range(window) for place in range(places)]
    return torch.cat([torch.arange(count) % classes for count in counts])


def metric_of_a_divided_model(factor: float | None, window: int) -> dict[str, Tensor]:
    net, metric = sharded(factor), differentiable(MeanSquaredError())
    with accumulation_window(net) as micro_batches:
        for i in range(window):
            rows = rows_of(i, dist.get_rank())
            with micro_batches.micro_batch():
                metric(net(rows), rows[:, :2].contiguous()).backward()
    return grads_of(net)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("factor", [None, 1.0, 300.0])
def test_a_differentiable_metric(pool: RankPool, factor: float | None, window: int) -> None:
    net, rows = make_net(), whole_rows(2, window)
    (net(rows) - rows[:, :2]).square().mean().backward()
    assert_all_close(pool.run(2, metric_of_a_divided_model, factor, window), grads_of(net))


def own_mean(**options: Any) -> Tensor:
    rows = rows_of(0, dist.get_rank())
    return global_mean(summed(make_net(), rows), len(rows), **options)


def foreign_hook(_: object, bucket: Any) -> Any:
    raise NotImplementedError


def hooked() -> None:
    ddp = make_hooked()
    own_mean(module=ddp, reduces="mean").sum().item()
    own_mean(module=ddp)


def line(**names: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(names.values()), mesh_dim_names=tuple(names))


def beside(make: Callable[[], nn.Module], **options: Any) -> Tensor:
    """A mean that is told nothing of a module of the process."""
    module = make()
    value = own_mean(**options)
    assert module is not None
    return value


def make_hooked() -> nn.Module:
    ddp = DistributedDataParallel(make_net())
    foreign_hook.__annotations__.clear()
    ddp.register_comm_hook(None, foreign_hook)
    return ddp


def declared() -> None:
    """Neither a mean over ranks, nor what is declared, nor a module that is gone is an error."""
    beside(lambda: sharded(None))
    beside(lambda: sharded(float(dist.get_world_size())))
    beside(lambda: sharded(1.0), reduces="sum")
    beside(lambda: sharded(1.0), module=make_net())
    with torch.no_grad():
        beside(lambda: sharded(1.0))
    own_mean()


def test_a_mean_beside_modules_that_are_declared_or_gone(pool: RankPool) -> None:
    pool.run(2, declared)


def torn_copies() -> None:
    mesh = line(dp=1, tp=2)
    own_mean(mesh=mesh["dp"], copies=mesh["tp"])


# totals of two copies of the same three rows: as they are added in another order, or NaN
SAME_ROWS = {"NaN": (torch.nan, torch.nan), "cancels": (2.8e-17, 5.6e-17), "rounded": (1.0, 1.0 + 2.3e-16)}
OTHER_ROWS = {"NaN on one rank": (torch.nan, 1.0), "small": (1e-9, 2e-9), "other": (1.0, 1.1)}


def mean_of_copies(totals: tuple[float, float]) -> float:
    mesh = line(dp=1, tp=2)
    total = torch.tensor(totals[dist.get_rank()], dtype=torch.float64)
    return float(global_mean(total, 3, mesh=mesh["dp"], copies=mesh["tp"]))


@pytest.mark.parametrize("name", SAME_ROWS)
def test_copies_may_differ_by_rounding(pool: RankPool, name: str) -> None:
    expected = SAME_ROWS[name][0] / 3
    assert pool.run(2, mean_of_copies, SAME_ROWS[name]) == pytest.approx([expected] * 2, nan_ok=True)


def mesh_of_others() -> None:
    mesh, net = line(dp=1, cp=2), make_net()
    fully_shard(net, mesh=mesh["dp"])
    own_mean(mesh=mesh["dp", "cp"], module=net)


def exact_values() -> dict[str, Callable[[], Any]]:
    """Each kind of loss and metric over all ranks, of rows with a gradient."""
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 0, 1, 0])
    sampled = ClassShardedLoss(class_loss(), sample_rate=0.5)
    sampled.attach(torch.optim.SGD(sampled.parameters(), lr=0.1))
    return {
        "GlobalBatchLoss": lambda: GlobalBatchLoss(SupConLoss())(rows, labels),
        "a loss that sums": lambda: GlobalBatchLoss(nn.MSELoss())(rows, rows.detach() + 1),
        "coefficients that differ": lambda: GlobalBatchLoss(SupConLoss(), backward="sum")(rows, labels),
        "class shards": lambda: ClassShardedLoss(class_loss())(rows, labels),
        "PartialFC": lambda: sampled(rows, labels),
        "two towers": lambda: ClipLoss()(rows, rows + 1),
        "a metric": lambda: differentiable(MeanSquaredError())(rows, rows.detach() + 1),
        "a formula": lambda: global_rows(lambda x: (x @ x.T).logsumexp(1).mean(), rows),
        "moments": lambda: ssl.vicreg(rows, rows + 1),
        "koleo": lambda: ssl.koleo(rows),
    }


def all_beside(make: Callable[[], nn.Module]) -> dict[str, str]:
    """What each kind says next to a module of the process whose gradients are no mean. Without gradients it is computed."""
    module, found = make(), {}
    for name, value in exact_values().items():
        with torch.no_grad():
            value()
        try:
            value()
        except ConfigurationError as error:
            found[name] = str(error)
    assert module is not None
    return found


@pytest.mark.parametrize("make", ["a factor", "a hook"])
def test_losses_and_metrics_beside_modules_of_other_reductions(pool: RankPool, make: str) -> None:
    for found in pool.run(2, all_beside, BESIDE[make]):
        assert len(found) == 10
        for text in found.values():
            assert "reduces: expected the model, as module=" in text
            assert "accumulation_window(model, loss)" in text


def divided_without_a_mean() -> nn.Module:
    return sharded(1.0)


def with_a_mean() -> nn.Module:
    """A hook that declares its result, next to a divided model with the factor of a mean."""
    ddp = make_hooked()
    foreign_hook.reduces = "mean"  # type: ignore[attr-defined]
    return nn.ModuleList([ddp, sharded(float(dist.get_world_size()))])


def healthy() -> list[str]:
    try:
        return [*all_beside(with_a_mean)]
    finally:
        del foreign_hook.reduces  # type: ignore[attr-defined]


def test_losses_and_metrics_beside_means(pool: RankPool) -> None:
    assert pool.run(2, healthy) == [[], []]


def one_rank_alone() -> None:
    """The other rank has no such module: it hears of it in the handshake."""
    module = sharded(1.0)
    if dist.get_rank():
        module = make_net()
        gc.collect()
    loss = GlobalBatchLoss(SupConLoss())
    loss(torch.randn(4, 2, dtype=torch.float64, requires_grad=True), torch.tensor([1, 0, 1, 0]))
    assert module is not None


def summed_by_hand(backward: Any) -> dict[str, Tensor]:
    """A loss of pairs in a model whose gradients are sums: a window contains the model, and its scale."""
    net, rank = sharded(1.0), dist.get_rank()
    rows = rows_of(0, rank)
    reduction = gradient_reduction_of(net.named_modules())
    with reduced_by(lambda: reduction):
        GlobalBatchLoss(SupConLoss(), backward=backward)(net(rows), torch.arange(len(rows)) % 2).backward()
    return grads_of(net)


@pytest.mark.parametrize("backward", ["own_slice", "sum"])
def test_a_loss_of_pairs_in_a_model_of_sums(pool: RankPool, backward: str) -> None:
    net = make_net()
    SupConLoss()(net(whole_rows(2, 1)), labels_of(2, 2, 1)).backward()
    assert_all_close(pool.run(2, summed_by_hand, backward), grads_of(net))


BESIDE: dict[str, Callable[[], nn.Module]] = {"a factor": divided_without_a_mean, "a hook": make_hooked}
ERRORS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "torn factors": (
        lambda: own_mean(module=sharded(1.0, inner=2.0)),
        ["one divisor for all parameters", "`` by 1, `0` by 2", "set_gradient_divide_factor"],
    ),
    "torn factors in a window": (
        lambda: accumulation_window(sharded(1.0, inner=2.0)).__enter__(),
        ["one divisor for all parameters"],
    ),
    "gloo without sums": (
        lambda: own_mean(module=sharded(1.0, forced=False)),
        ["set_gradient_divide_factor(1) of ``", "set_force_sum_reduction_for_comms(True)"],
    ),
    "other than the module": (
        lambda: own_mean(module=sharded(1.0), reduces="mean"),
        ["a sum divided by 1 over 2 ranks (set_gradient_divide_factor(1))", "reduces='mean'"],
    ),
    "other than a peer": (
        lambda: own_mean(reduces="sum" if dist.get_rank() else "mean"),
        ["gradients end as=a sum divided by 1"],
    ),
    "unknown": (lambda: own_mean(reduces="none" if dist.get_rank() else "sum"), ["reduces: expected", "'none'"]),
    "negative": (lambda: own_mean(reduces=-2.0), ["reduces: expected", "-2.0"]),
    "hooked": (hooked, ["foreign_hook of DistributedDataParallel", 'reduces="mean"']),
    "beside a factor": (lambda: beside(lambda: sharded(1.0)), ["reduces: expected the model, as module=", "factor(1)"]),
    "beside a hook": (lambda: beside(make_hooked), ["foreign_hook of DistributedDataParallel", "module=model"]),
    "a factor on one rank": (
        one_rank_alone,
        ["rank 0: gradients of a module of this process=set_gradient_divide_factor(1)"],
    ),
    "torn copies": (torn_copies, ["the same rows, so the same total and count", "3.0", "0.0"]),
    "copies that differ too": (
        lambda: own_mean(mesh=(mesh := line(dp=2))["dp"], copies=mesh["dp"]),
        ["both with ranks [0, 1]"],
    ),
    "copies alone": (lambda: own_mean(copies=line(dp=2)["dp"]), ["copies without mesh"]),
    "a group too": (lambda: own_mean(mesh=line(dp=2)["dp"], group=dist.group.WORLD), ["a group, too"]),
    "mesh of others": (mesh_of_others, ["ranks over which the model is reduced", "got [0, 1]"]),
}


def fail(name: str) -> None:
    ERRORS[name][0]()


test_errors_on_every_rank = one_error(fail, ERRORS)
