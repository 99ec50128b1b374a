"""Something changes after a call: on all ranks, then the next call is one of a fresh loss, or on one rank, then it is one error."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, differentiable, synced
from lightning_ddp_losses.errors import DDPLossError, RankMismatchError
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.oracle import normal

DIM, CLASSES = 8, 5
FEW, MANY = 6, 120  # rows of rank 0; the others have some more
Set = Callable[[Any, Any], None]


# ---------------------------------------------------------------------- losses of one's own


class Scaled(nn.Module):
    """A mean over rows, divided by an option that a subclass keeps somewhere."""

    def __init__(self, option: float) -> None:
        super().__init__()
        self.put(option)

    def put(self, option: float) -> None:
        raise NotImplementedError

    def get(self) -> float:
        raise NotImplementedError

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return (embeddings.square().mean(1) / self.get()).mean()


class Public(Scaled):
    def put(self, option: float) -> None:
        self.temperature = option

    def get(self) -> float:
        return self.temperature


class Private(Scaled):
    def put(self, option: float) -> None:
        self._t = option

    def get(self) -> float:
        return self._t


class InAnObject(Scaled):
    def put(self, option: float) -> None:
        self.cfg = SimpleNamespace(t=option)

    def get(self) -> float:
        return float(self.cfg.t)


class InADict(Scaled):
    def put(self, option: float) -> None:
        self.__dict__.setdefault("options", {})["t"] = [option]

    def get(self) -> float:
        return float(self.__dict__["options"]["t"][0])


class InAFunction(Scaled):
    def put(self, option: float) -> None:
        self.scale = lambda: option

    def get(self) -> float:
        return self.scale()


class AsTensor(Scaled):
    def put(self, option: float) -> None:
        self.t = torch.tensor(option, dtype=torch.float64)

    def get(self) -> float:
        return float(self.t)


class Unreadable(Scaled):
    """What no reading of attributes finds."""

    def put(self, option: float) -> None:
        self.iterator = iter([option] * 1000)

    def get(self) -> float:
        return next(self.iterator)


OWN = {cls.__name__: cls for cls in (Public, Private, InAnObject, InADict, InAFunction, AsTensor)}


# ---------------------------------------------------------------------- every kind of call


def inner(name: str, module: str = "loss") -> Set:
    """Sets an attribute of the wrapped loss, or of a module inside it."""

    def put(wrapper: Any, value: Any) -> None:
        setattr(wrapper.get_submodule(module), name, value)

    return put


@dataclass
class Case:
    """A call with an option.

    Attributes:
        make: The option's value -> what is called.
        put: Sets the option of what was made.
        values: Two values of it.
        rows: Of rank 0.
        given: What the call takes instead of embeddings and labels: rows of this rank -> the arguments.
    """

    make: Callable[[Any], Any]
    put: Set
    values: tuple[Any, Any]
    rows: int = FEW
    given: Callable[[int], tuple[Tensor, ...]] | None = None


def wrapped(loss: Callable[..., nn.Module], option: str, **options: Any) -> Callable[[Any], Any]:
    return lambda value: GlobalBatchLoss(loss(**{option: value}).double(), **options)


def embeddings_of(rows: int) -> Tensor:
    return normal(rows, DIM, seed=7 + (dist.get_rank() if dist.is_initialized() else 0)).requires_grad_()


def labelled(rows: int) -> tuple[Tensor, ...]:
    return embeddings_of(rows), torch.arange(rows) % CLASSES


def two_views(rows: int) -> tuple[Tensor, ...]:
    rows_of_both = embeddings_of(2 * rows)
    return rows_of_both[:rows], rows_of_both[rows:]


def two_columns(rows: int) -> tuple[Tensor, ...]:
    both = embeddings_of(rows)
    return both[:, 0], both[:, 1].detach().abs()


def arcface(scale: float, made: Callable[..., nn.Module] = GlobalBatchLoss) -> nn.Module:
    torch.manual_seed(3)
    return made(pml.ArcFaceLoss(CLASSES, DIM, scale=scale).double())


class Mined(nn.Module):
    """A loss over what our miner names."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.miner = GlobalBatchMiner(miners.MultiSimilarityMiner(epsilon=epsilon))
        self.loss = GlobalBatchLoss(pml.TripletMarginLoss())

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


def weighted(weights: list[float]) -> nn.Module:
    return GlobalBatchLoss(pml.MultipleLosses([pml.SupConLoss(), pml.NTXentLoss()], weights=[*weights]))


def put_in_place(wrapper: Any, weights: list[float]) -> None:
    wrapper.loss.weights[:] = weights


def class_weight(first: float) -> nn.Module:
    weight = torch.ones(DIM, dtype=torch.float64)
    weight[0] = first
    return GlobalBatchLoss(nn.CrossEntropyLoss(weight))


def write_weight(wrapper: Any, first: float) -> None:
    wrapper.loss.weight.data[0] = first  # no version counts this


def minkowski(make: Callable[..., Any]) -> Callable[[float], Any]:
    return lambda p: make(torchmetrics.MinkowskiDistance(p).set_dtype(torch.float64))


def put_p(metric: Any, p: float) -> None:
    metric.p = p


CASES: dict[str, Case] = {
    "few rows": Case(wrapped(pml.SupConLoss, "temperature"), inner("temperature"), (0.1, 0.5)),
    "tiles": Case(wrapped(pml.SupConLoss, "temperature", mode="rows"), inner("temperature"), (0.1, 0.5), rows=MANY),
    "row tiles": Case(wrapped(pml.CircleLoss, "gamma", mode="rows"), inner("gamma"), (80, 20), rows=MANY),
    "elements": Case(arcface, inner("scale"), (64, 8)),
    "torch": Case(wrapped(nn.CrossEntropyLoss, "label_smoothing"), inner("label_smoothing"), (0.0, 0.3)),
    "class weights": Case(class_weight, write_weight, (1.0, 5.0)),
    "two views": Case(
        lambda t: GlobalBatchLoss(pml.SelfSupervisedLoss(pml.NTXentLoss(t))),
        inner("temperature"),  # of the loss inside, as of the plain loss
        (0.1, 0.5),
        given=two_views,
    ),
    "a reducer": Case(
        lambda low: GlobalBatchLoss(pml.TripletMarginLoss(reducer=reducers.ThresholdReducer(low=low)), mode="rows"),
        inner("low", "loss.reducer"),
        (0.0, 0.2),
        rows=MANY,
    ),
    "a distance": Case(
        lambda power: GlobalBatchLoss(pml.ContrastiveLoss(distance=distances.LpDistance(power=power))),
        inner("power", "loss.distance"),
        (1, 2),
    ),
    "a list": Case(weighted, put_in_place, ([1.0, 1.0], [1.0, 0.5])),
    "a miner": Case(Mined, inner("epsilon", "miner.miner"), (0.1, 0.9), rows=20),
    "class shards": Case(partial(arcface, made=ClassShardedLoss), inner("scale"), (64, 8)),
    "towers": Case(
        lambda smoothing: ClipLoss(label_smoothing=smoothing).double(),
        lambda loss, smoothing: setattr(loss, "label_smoothing", smoothing),
        (0.0, 0.3),
        given=two_views,
    ),
    "a differentiable metric": Case(minkowski(differentiable), put_p, (3.0, 2.0), given=two_columns),
    "a synced metric": Case(minkowski(synced), put_p, (3.0, 2.0), given=two_columns),
    **{
        f"{name}": Case(lambda t, cls=cls: GlobalBatchLoss(cls(t)), lambda w, t: w.loss.put(t), (0.1, 0.5))
        for name, cls in OWN.items()
    },
    "Public, by elements": Case(lambda t: GlobalBatchLoss(ByElements(t)), inner("temperature"), (0.1, 0.5)),
}


def regularizer(there: bool) -> nn.Module | None:
    return regularizers.LpRegularizer() if there else None


def put_array(wrapper: Any, value: float) -> None:
    wrapper.loss.priors = numpy.full(3, value)


def put_reducer(wrapper: Any, low: float | None) -> None:
    wrapper.loss.reducer = reducers.MeanReducer() if low is None else reducers.ThresholdReducer(low=low)


def with_array(value: float) -> nn.Module:
    loss = GlobalBatchLoss(Public(0.1))
    put_array(loss, value)
    return loss


def with_reducer(low: float | None) -> nn.Module:
    loss = GlobalBatchLoss(pml.TripletMarginLoss())
    put_reducer(loss, low)
    return loss


def sharing(temperature: float) -> nn.Module:
    """Two losses that share a distance, and one loss twice."""
    shared = distances.CosineSimilarity()
    first = pml.SupConLoss(temperature=temperature, distance=shared)
    return GlobalBatchLoss(pml.MultipleLosses([first, pml.NTXentLoss(distance=shared), first]))


CASES["a number of numpy"] = Case(
    lambda t: GlobalBatchLoss(pml.SupConLoss(numpy.float32(t)), mode="rows"),
    lambda wrapper, t: setattr(wrapper.loss, "temperature", numpy.float32(t)),
    (0.1, 0.5),
    rows=MANY,
)
CASES["a regularizer that goes"] = Case(
    lambda there: GlobalBatchLoss(pml.SupConLoss(embedding_regularizer=regularizer(there))),
    lambda wrapper, there: setattr(wrapper.loss, "embedding_regularizer", regularizer(there)),
    (True, False),
)
CASES["an array"] = Case(with_array, put_array, (1.0, 2.0))
CASES["another reducer"] = Case(with_reducer, put_reducer, (None, 0.2))
CASES["modules in several places"] = Case(sharing, inner("temperature", "loss.losses.0"), (0.1, 0.5))


class ByElements(pml.ArcFaceLoss):
    """A loss of PML's with an option of its own."""

    def __init__(self, temperature: float) -> None:
        torch.manual_seed(3)
        super().__init__(CLASSES, DIM)
        self.temperature = temperature
        self.double()

    def compute_loss(self, *args: Any) -> Any:
        found = super().compute_loss(*args)
        found["loss"]["losses"] = found["loss"]["losses"] / self.temperature
        return found


def call(case: Case, module: Any, rank: int) -> Tensor:
    """One call, forward and backward; the value and the gradient of the embeddings."""
    arguments = (case.given or labelled)(case.rows + rank)
    if isinstance(module, torchmetrics.Metric) and not module.dist_sync_on_step:
        module.reset()
        module.update(*arguments)
        return torch.as_tensor(module.compute()).detach().reshape(1)
    value = module(*arguments)
    leaf = next(tensor for tensor in arguments if tensor.requires_grad)
    value.backward()
    found = leaf.grad if leaf.is_leaf else None
    grads = [] if found is None else [found.flatten()]
    return torch.cat([value.detach().reshape(1), *grads]).clone()


# ---------------------------------------------------------------------- after so many calls


def changed(name: str, calls: int, on: tuple[int, ...] | None) -> list[Tensor]:
    """The value after the option changed on some ranks (None: all), and that of a fresh loss with the new option."""
    case, rank = CASES[name], dist.get_rank()
    before, after = case.values
    module = case.make(before)
    for _ in range(calls):
        call(case, module, rank)
    if on is None or rank in on:
        case.put(module, after)
    return [call(case, module, rank), call(case, case.make(after), rank)]


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("name", CASES)
def test_on_all_ranks_it_is_a_fresh_loss(pool: RankPool, name: str, calls: int) -> None:
    for value, fresh in pool.run(2, changed, name, calls, None):
        torch.testing.assert_close(value, fresh, rtol=1e-12, atol=0)


def changed_back(name: str) -> list[Tensor]:
    """The call after the error, when the option is what it was."""
    case, rank = CASES[name], dist.get_rank()
    before, after = case.values
    module = case.make(before)
    call(case, module, rank)
    if rank == 1:
        case.put(module, after)
    with pytest.raises(RankMismatchError):
        call(case, module, rank)
    if rank == 1:
        case.put(module, before)
    return [call(case, module, rank), call(case, case.make(before), rank)]


@pytest.mark.parametrize("name", CASES)
def test_once_it_is_the_same_again_so_is_the_loss(pool: RankPool, name: str) -> None:
    for value, fresh in pool.run(2, changed_back, name):
        torch.testing.assert_close(value, fresh, rtol=1e-12, atol=0)


def other_mode(name: str) -> None:
    case, rank = CASES[name], dist.get_rank()
    module = case.make(case.values[0])
    call(case, module, rank)
    module.train(rank == 0)
    call(case, module, rank)


def unreadable(*, check_weights: bool = True, calls: int = 2) -> list[float]:
    loss = GlobalBatchLoss(Unreadable(0.1 if dist.get_rank() == 0 else 0.5), check_weights=check_weights)
    return [loss(*labelled(FEW + dist.get_rank())).item() for _ in range(calls)]


def test_a_user_may_let_ranks_differ(pool: RankPool) -> None:
    first, second = pool.run(2, partial(unreadable, check_weights=False))
    assert first != second


# ---------------------------------------------------------------------- state is followed


class LastValue(nn.Module):
    """Keeps its last value, the rows that it has seen and a moving centre, each of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.seen = 0.0
        self._notes: list[float] = []
        self.register_buffer("center", torch.zeros(DIM, dtype=torch.float64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value = embeddings.square().mean()
        self.seen += dist.get_rank()
        self.last = self.seen + value.item()
        self._notes.append(self.last)
        self.center.mul_(0.9).add_(self.last)
        return value


@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_what_a_forward_changes_may_differ(world_size: int) -> None:
    loss = GlobalBatchLoss(LastValue())
    for step in range(4):
        loss(*labelled(FEW)).backward()
        # the mode is set from outside, on all ranks
        loss.train(step % 2 == 0)
    assert loss.loss.seen == 4 * dist.get_rank()


@pytest.mark.parametrize("duplicate", ["copy", "pickle"])
@each_rank(2)
def test_a_copy_knows_what_was_told_and_what_is_state(duplicate: str) -> None:
    loss = GlobalBatchLoss(LastValue())
    loss(*labelled(FEW))
    twin = copy.deepcopy(loss) if duplicate == "copy" else pickle.loads(pickle.dumps(loss))
    twin(*labelled(FEW))
    if dist.get_rank() == 1:
        twin.loss.option = 3
    with pytest.raises(RankMismatchError):
        twin(*labelled(FEW))
    loss(*labelled(FEW))


class Meter:
    """An object that the training loop changes, on each rank by its own rows."""

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        self.total += value


@each_rank(2)
def test_an_object_that_does_something_is_no_option() -> None:
    own = Public(0.1)
    own.meter, own.numbers = Meter(), {"a": [1.0]}
    # a circle, and a graph with many ways through it
    own.meter.owner = own
    nodes: list[Any] = [[] for _ in range(40)]
    for node in nodes:
        node += nodes
    own.graph = nodes
    loss = GlobalBatchLoss(own)
    for _ in range(3):
        loss(*labelled(FEW))
        own.meter.update(dist.get_rank())


@each_rank(2)
def test_numbers_of_a_process_are_no_options() -> None:
    rank, own = dist.get_rank(), Public(0.1)
    own.rank = own._local_rank = rank
    own.device = torch.device("cuda", rank)
    own.args = SimpleNamespace(rank=rank, gpu=rank, low_rank=1)
    own.log = lambda: rank
    own.lora_rank = 1
    own.temporary = float("nan")
    loss = GlobalBatchLoss(own)
    for step in range(3):
        loss.loss.temperature = 0.1 + step
        loss(*labelled(FEW))


class Looks(nn.Module):
    """Holds what cannot be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.strange, self.meta = Strange(), torch.empty(2, device="meta")
        self.register_buffer("meta_buffer", torch.empty(2, device="meta"))
        self.numbers = list(range(2000))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings.square().mean()


class Strange:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError


@each_rank(2)
def test_what_cannot_be_looked_at_is_left_alone() -> None:
    loss = GlobalBatchLoss(Looks(), check_weights=False)
    for _ in range(2):
        loss(*labelled(FEW))
    loss.loss.numbers.append(dist.get_rank())
    with pytest.raises(RankMismatchError, match="numbers"):
        loss(*labelled(FEW))


@each_rank(2)
def test_to_look_at_the_plan_on_one_rank_changes_nothing() -> None:
    loss = class_weight(1.0)
    if dist.get_rank() == 0:
        print(loss.plan)
    loss.load_state_dict(class_weight(2.0).state_dict())
    loss(*labelled(FEW))


# ---------------------------------------------------------------------- a call that fails


def after_a_failure(name: str, where: str) -> list[Tensor]:
    """The call after one that failed on rank 1 and that the loop has caught on all ranks."""
    case, rank = CASES[name], dist.get_rank()
    module = case.make(case.values[0])
    for _ in range(3):
        call(case, module, rank)
    if where == "on one rank" and rank == 1:
        case = replace(case, given=without_a_batch)
    # backward may communicate: all ranks must want it
    refused = torch.no_grad() if where == "on all ranks" and rank == 1 else contextlib.nullcontext()
    with pytest.raises(DDPLossError), refused:
        call(case, module, rank)
    case = CASES[name]
    return [call(case, module, rank) for _ in range(3)] + [call(case, case.make(case.values[0]), rank)]


def without_a_batch(rows: int) -> tuple[Tensor, ...]:
    """Arguments that a rank refuses itself."""
    first, second = labelled(rows)
    return first[None], second


@pytest.mark.parametrize("where", ["on one rank", "on all ranks"])
@pytest.mark.parametrize("name", ["few rows", "tiles", "class shards", "towers", "a large weight"])
def test_the_call_after_one_that_failed_is_healthy(pool: RankPool, name: str, where: str) -> None:
    for *values, fresh in pool.run(2, after_a_failure, name, where):
        for value in values:
            torch.testing.assert_close(value, fresh, rtol=1e-12, atol=0)


def large_arcface(scale: float) -> nn.Module:
    torch.manual_seed(3)
    # no elements: all rows are gathered. The weight is compared in parts
    loss = pml.ArcFaceLoss(2000, DIM, scale=scale).double()
    return GlobalBatchLoss(loss, mode="replicated")


CASES["a large weight"] = Case(large_arcface, inner("scale"), (64, 8))


@each_rank(2)
def test_a_buffer_that_one_rank_adds_is_an_error_and_one_of_all_ranks_is_followed() -> None:
    loss = GlobalBatchLoss(pml.SupConLoss())
    for _ in range(2):
        loss(*labelled(FEW))
    loss.loss.register_buffer("on_all", torch.ones(2))
    loss(*labelled(FEW))
    if dist.get_rank():
        loss.loss.register_buffer("on_one", torch.ones(2))
    with pytest.raises(RankMismatchError, match="on_one"):
        loss(*labelled(FEW))


class Registers(nn.Module):
    """Registers a buffer when it first gets rows."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if dist.get_rank() == 0 and not hasattr(self, "seen"):
            self.register_buffer("seen", torch.ones(2))
        return embeddings.square().mean()


@each_rank(2)
def test_a_buffer_that_the_losss_own_forward_registers_is_state() -> None:
    loss = GlobalBatchLoss(Registers())
    for _ in range(3):
        loss(*labelled(FEW))


@each_rank(2)
def test_messages_name_the_loss_that_is_there() -> None:
    loss = GlobalBatchLoss(pml.SupConLoss())
    loss(*labelled(FEW))
    loss.loss = pml.NTXentLoss(temperature=0.1 + dist.get_rank())
    with pytest.raises(RankMismatchError, match=r"GlobalBatchLoss\(NTXentLoss\)"):
        loss(*labelled(FEW))


class Weighs(nn.Module):
    """Weighs rows by a tensor that is a plain attribute, and counts its calls in another one, on each rank from another number."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.tensor([1.0, 2.0])
        self.number = torch.zeros(1)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self.number += 1 + dist.get_rank()
        return embeddings.square().mean() * self.factors.sum()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),
}
WRITES: dict[str, Callable[[Any], None]] = {
    "in place": lambda own: own.factors.mul_(3),
    "another tensor": lambda own: setattr(own, "factors", own.factors * 3),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("write", WRITES)
@each_rank(2)
def test_a_copy_compares_the_tensors_of_its_loss(how: str, write: str) -> None:
    original = GlobalBatchLoss(Weighs())
    for _ in range(2):
        original(*labelled(FEW))
    copied = COPIES[how](original)
    for _ in range(2):
        copied(*labelled(FEW))
    copied = COPIES[how](copied)
    if dist.get_rank():
        WRITES[write](copied.loss)
    with pytest.raises(RankMismatchError, match="configuration"):
        copied(*labelled(FEW))
    # what all ranks change is followed, also between a call and the copy
    for each in (original, copied):
        each.loss.factors = torch.tensor([5.0, 6.0])
    copied = COPIES[how](original)
    assert torch.equal(copied(*labelled(FEW)), original(*labelled(FEW)))
