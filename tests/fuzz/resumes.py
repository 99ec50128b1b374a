"""Training that is saved on some ranks and goes on on others: the steps of one process that was never interrupted.

A case is a few legs, each on its own number of ranks; a leg loads what the one before it saved. Under Lightning these are checkpoints of
`DDPLossStrategy`, whole or sharded; in a hand-written loop state dicts, of which the test makes the whole. The truth is plain torch.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_ddp_losses import ClassShardedLoss, DDPLossStrategy, GlobalBatchLoss, GlobalBatchSampler, SyncBatchNorm
from lightning_ddp_losses.sharding import ClassShard
from lightning_ddp_losses.testing import RankPool
from tests.doors import derived_seed
from tests.fits import make_trainer
from tests.fuzz.class_shards import SAMPLED, classes_drawn
from tests.fuzz.data import options
from tests.fuzz.engine import Domain, Found, Place, Refused, guarded, zero_or
from tests.fuzz.pml_losses import LOSSES, build
from tests.losses.sharded_cases import step_rows
from tests.oracle import CLASS_LOSSES, normal

FEATURES, DIM = 3, 4
SEED = 5  # of the samplers

# losses whose state all ranks hold: a weight, a learnt threshold, a histogram, a queue of rows with its position
REPLICATED: dict[str, Callable[[int], nn.Module]] = {
    "ArcFaceLoss": lambda classes: pml.ArcFaceLoss(classes, DIM),
    "ProxyAnchorLoss": lambda classes: pml.ProxyAnchorLoss(classes, DIM),
    "MarginLoss": lambda classes: pml.MarginLoss(learn_beta=True, num_classes=classes),
    "memory of ContrastiveLoss": lambda classes: pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=16),
    "memory of NTXentLoss": lambda classes: pml.CrossBatchMemory(pml.NTXentLoss(), DIM, memory_size=20),
    "memory of MultiSimilarityLoss": lambda classes: pml.CrossBatchMemory(
        pml.MultiSimilarityLoss(), DIM, memory_size=32
    ),
}
# not NAdam: torch widens its product of momenta when it is loaded, so that one process is off by 1e-9 too
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.05, eps=1e-4),
    "amsgrad": partial(torch.optim.Adam, lr=0.05, eps=1e-4, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.05, eps=1e-4, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.02, eps=1e-4, momentum=0.5, centered=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.02, eps=1e-2),
}
# what a row that no step has seen starts from is zero for these
SAMPLED_OPTIMIZERS = ["sgd", "momentum", "adam", "amsgrad", "adagrad"]


@dataclass(frozen=True)
class Leg:
    """What happens between a load and a save.

    Attributes:
        steps: Rows of each rank, by step; all of the same number of ranks.
        sharded: Whether each rank's part is saved by itself.
    """

    steps: tuple[tuple[int, ...], ...]
    sharded: bool

    @property
    def world_size(self) -> int:
        return len(self.steps[0])


@dataclass(frozen=True)
class Case:
    """Legs of one training.

    Attributes:
        kind: `sharded`: the classes are divided over the ranks; `replicated`: all ranks hold the loss.
        through: `trainer` or `hand`.
        sampler: Batches come from a `GlobalBatchSampler`, one epoch a leg, not from `legs`.
    """

    kind: str
    loss: str
    loss_options: tuple[tuple[str, Any], ...]
    classes: int
    sample_rate: float
    optimizer: str
    foreach: bool
    batch_norm: bool
    through: str
    sampler: bool
    legs: tuple[Leg, ...]
    seed: int
    dtype: str = "float64"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.legs[-1].steps[-1]

    @property
    def is_sharded(self) -> bool:
        return self.kind == "sharded"


@st.composite
def legs_strategy(draw: Any) -> tuple[Leg, ...]:
    found = []
    for _ in range(draw(st.sampled_from([2, 2, 3]))):
        world = draw(st.integers(1, 3))
        rows = st.lists(st.integers(0, 4), min_size=world, max_size=world).map(tuple).filter(lambda r: sum(r) > 0)
        found.append(Leg(tuple(draw(st.lists(rows, min_size=1, max_size=2))), sharded=draw(st.booleans())))
    return tuple(found)


@st.composite
def cases(draw: Any) -> Case:
    kind = draw(st.sampled_from(["sharded", "sharded", "replicated"]))
    name = draw(st.sampled_from(CLASS_LOSSES if kind == "sharded" else sorted(REPLICATED)))
    sample_rate = draw(st.sampled_from([1.0, 1.0, 0.5])) if kind == "sharded" and name in SAMPLED else 1.0
    through = draw(st.sampled_from(["trainer", "hand"]))
    return Case(
        kind=kind,
        loss=name,
        loss_options=tuple(sorted(options(draw, LOSSES[name]).items())) if kind == "sharded" else (),
        classes=draw(st.integers(3, 7)),
        sample_rate=sample_rate,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS) if sample_rate == 1 else SAMPLED_OPTIMIZERS)),
        foreach=draw(st.booleans()),
        batch_norm=draw(st.sampled_from([False, False, True])),
        through=through,
        sampler=draw(st.sampled_from([False, False, True])),
        legs=draw(legs_strategy()),
        seed=draw(st.integers(0, 1000)),
    )


# ---------------------------------------------------------------------- what is trained, and on what


def make_plain_loss(case: Case, classes: int | None = None) -> nn.Module:
    if case.is_sharded:
        return build(case.loss, case.dtype, case.loss_options, num_classes=classes or case.classes, embedding_size=DIM)
    torch.manual_seed(3)
    return REPLICATED[case.loss](case.classes).double()


def make_encoder(case: Case) -> nn.Module:
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(FEATURES, DIM, bias=not case.batch_norm)]
    if case.batch_norm:
        layers.append(nn.BatchNorm1d(DIM))
    return nn.Sequential(*layers).double()


def make_optimizer(case: Case, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[case.optimizer](parameters, foreach=case.foreach)


def data_set(case: Case) -> tuple[Tensor, Tensor]:
    """All rows of a training whose batches a sampler makes."""
    generator = torch.Generator().manual_seed(case.seed)
    features = normal(11, FEATURES, seed=generator)
    return features, torch.randint(case.classes, (11,), generator=generator)


def drawn_batch(case: Case, leg: int, step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks of a step whose cut is drawn."""
    rows = sum(case.legs[leg].steps[step])
    generator = torch.Generator().manual_seed(case.seed * 100 + leg * 10 + step)
    features = normal(rows, FEATURES, seed=generator)
    return features, torch.randint(case.classes, (rows,), generator=generator)


def batches_of_leg(case: Case, leg: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of one process."""
    if not case.sampler:
        return [drawn_batch(case, leg, step) for step in range(len(case.legs[leg].steps))]
    torch.manual_seed(SEED + leg)  # an epoch's seed
    features, labels = data_set(case)
    order = list(RandomSampler(range(len(features))))
    return [(features[part], labels[part]) for part in (order[:4], order[4:8], order[8:])]


def loader_of_leg(case: Case, leg: int) -> DataLoader[Any]:
    """This rank's rows."""
    rank = dist.get_rank()
    if case.sampler:
        data = TensorDataset(*data_set(case))
        sampler = GlobalBatchSampler.batches(RandomSampler(range(len(data))), 4, seed=SEED)
        sampler.set_epoch(leg)  # type: ignore[attr-defined]
        return DataLoader(data, batch_sampler=sampler)
    own = []
    for step, rows in enumerate(case.legs[leg].steps):
        features, labels = drawn_batch(case, leg, step)
        own.append((features.split(list(rows))[rank], labels.split(list(rows))[rank]))
    return DataLoader(own, batch_size=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- one process


def play(case: Case, place: Place) -> Found:
    """One process that is never interrupted. Ranks play the legs of `Resumes`."""
    encoder, loss = make_encoder(case), make_plain_loss(case)
    optimizer = make_optimizer(case, [*encoder.parameters(), *loss.parameters()])
    values = []
    for leg in range(len(case.legs)):
        values = []
        for step, (features, labels) in enumerate(batches_of_leg(case, leg)):
            optimizer.zero_grad()
            if case.sample_rate < 1:
                call = calls_before(case, leg) + step + 1
                value = sampled_step(case, leg, call, encoder, loss, optimizer, features, labels)
            else:
                value = loss(encoder(features), labels)
                value.backward()
                # PML leaves a parameter out of a loss that is zero; on ranks it has a zero then
                for parameter in loss.parameters():
                    parameter.grad = zero_or(parameter)
                optimizer.step()
            values.append(value.detach())
    found: Any = numbers_of_all_ranks(values, encoder, None if case.is_sharded else loss)
    if case.is_sharded:
        (weight,) = loss.parameters()
        shards = shards_of(case, weight, case.legs[-1].world_size)
        found["rank weight"] = [shard.own_part(weight.detach()) for shard in shards]
    return found


def numbers_of_all_ranks(values: list[Tensor], encoder: nn.Module, loss: nn.Module | None) -> Found:
    """What every rank must hold: the values of the last leg, and states."""
    found = {f"value step {step}": value for step, value in enumerate(values)}
    found |= {f"value encoder {name}": tensor.double() for name, tensor in encoder.state_dict().items()}
    if loss is not None:
        found |= {f"value loss {name}": tensor.double() for name, tensor in loss.state_dict().items()}
    return found


def shards_of(case: Case, weight: Tensor, world: int) -> list[ClassShard]:
    """Which part of a whole weight each rank holds."""
    dim = 0 if case.loss == "ProxyNCALoss" else 1
    per_class = weight.shape[dim] // case.classes
    return [ClassShard.of_rank(case.classes, world, rank, dim=dim, per_class=per_class) for rank in range(world)]


def torchs_seeds(case: Case, leg: int) -> list[int]:
    """What torch's generator was seeded with on each rank: under Lightning, another number of ranks than saved gets seeds of its own."""
    world = case.legs[leg].world_size
    if not leg or case.through != "trainer":
        return [3] * world
    if world == case.legs[leg - 1].world_size:
        return torchs_seeds(case, leg - 1)
    return [derived_seed(3 >> 1, calls_before(case, leg), rank) for rank in range(world)]


def calls_before(case: Case, leg: int) -> int:
    """How often the loss has drawn when a leg begins: our strategy's checkpoints say it, those by hand do not."""
    return sum(map(len, (batches_of_leg(case, before) for before in range(leg)))) if case.through == "trainer" else 0


def sampled_step(
    case: Case,
    leg: int,
    call: int,
    encoder: nn.Module,
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    features: Tensor,
    labels: Tensor,
) -> Tensor:
    """A step on the classes that the ranks of a leg draw; other rows of the weight and of its state stay as they are."""
    (weight,) = loss.parameters()
    world, seeds = case.legs[leg].world_size, torchs_seeds(case, leg)
    drawn = classes_drawn(case.classes, world, case.sample_rate, labels, call, seeds)
    shard = shards_of(case, weight, 1)[0]
    columns = torch.tensor([label * shard.per_class + i for label in drawn for i in range(shard.per_class)])
    # the same loss with fewer classes
    fewer = make_plain_loss(case, len(drawn))
    name, _ = next(fewer.named_parameters())
    places = torch.tensor([drawn.index(label) for label in labels.tolist()])
    part = {name: weight.index_select(shard.dim, columns)}
    value: Tensor = torch.func.functional_call(fewer, part, (encoder(features), places))
    value.backward()
    step_rows(optimizer, weight, columns, shard.dim)
    return value


# ---------------------------------------------------------------------- on ranks


class Job(LightningModule):
    """The drawn encoder, loss and optimizer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.encoder = make_encoder(case)
        plain = make_plain_loss(case)
        if case.is_sharded:
            self.loss: nn.Module = ClassShardedLoss(plain, sample_rate=case.sample_rate)
        else:
            self.loss = GlobalBatchLoss(plain)
        self.values: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        features, labels = batch
        value: Tensor = self.loss(self.encoder(features), labels)
        self.values.append(value.detach())
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.case, list(self.parameters()))

    def results(self) -> Found:
        """What `play` finds."""
        if isinstance(self.loss, ClassShardedLoss):
            found = numbers_of_all_ranks(self.values, self.encoder, None)
            return found | {"rank weight": self.loss.weight.detach().clone()}
        assert isinstance(self.loss, GlobalBatchLoss)
        # without the position of a memory, which the plain loss does not have
        return numbers_of_all_ranks(self.values, self.encoder, self.loss.wrapped)


def fit_leg(leg: int, folder: str, case: Case) -> Found:
    """Go on under Lightning, and save."""
    torch.manual_seed(3)  # which classes are drawn
    module = Job(case)
    strategy = DDPLossStrategy(sharded_checkpoints=case.legs[leg].sharded)
    trainer = make_trainer(strategy, max_epochs=leg + 1, sync_batchnorm=case.batch_norm)
    trainer.fit(module, loader_of_leg(case, leg), ckpt_path=f"{folder}/{leg - 1}" if leg else None)
    trainer.save_checkpoint(f"{folder}/{leg}")
    return module.results()


def train_leg(leg: int, loaded: list[dict[str, Any]], case: Case) -> dict[str, Any]:
    """Go on by hand from a state for each rank, or one for all, or none in the first leg; the results, and this rank's state."""
    torch.manual_seed(3)
    rank, world = dist.get_rank(), dist.get_world_size()
    module = Job(case)
    if case.batch_norm:
        SyncBatchNorm().apply(module.encoder)
    optimizer = module.configure_optimizers()
    if isinstance(module.loss, ClassShardedLoss):
        module.loss.shard_classes()
        module.loss.attach(optimizer)
    if loaded:
        state = loaded[rank if len(loaded) > 1 else 0]
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(own_optimizer_state(case, state["optimizer"], module))
    for index, batch in enumerate(loader_of_leg(case, leg)):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        for name, parameter in module.named_parameters():
            if not (case.is_sharded and name.startswith("loss.")):
                grad = zero_or(parameter)
                dist.all_reduce(grad)
                parameter.grad = grad / world
        optimizer.step()
    return {
        "found": module.results(),
        "module": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "state dict": module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


def own_optimizer_state(case: Case, state: dict[str, Any], module: Job) -> dict[str, Any]:
    """Cut this rank's part out of the moments of a whole weight."""
    if not isinstance(module.loss, ClassShardedLoss):
        return state
    weight, shard = module.loss.weight, module.loss.shard
    entries = dict(state["state"])
    last = max(index for group in state["param_groups"] for index in group["params"])
    if last in entries:
        entries[last] = {
            key: shard.own_part(t).clone()
            if isinstance(t, Tensor) and t.ndim and tuple(t.shape) == shard.whole_shape(weight)
            else t
            for key, t in entries[last].items()
        }
    return {**state, "state": entries}


def whole_of(case: Case, states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of those of all ranks: the parts of a divided weight and of its moments one after the other."""
    if not case.is_sharded:
        return states[0]
    dim = 0 if case.loss == "ProxyNCALoss" else 1
    key = next(name for name in states[0]["module"] if name.startswith("loss."))
    module = {**states[0]["module"], key: torch.cat([state["module"][key] for state in states], dim)}
    optimizer = states[0]["optimizer"]
    last, entries = max(optimizer["state"], default=-1), dict(optimizer["state"])
    if last >= 0:
        shape = states[0]["module"][key].shape
        entries[last] = {
            name: torch.cat([state["optimizer"]["state"][last][name] for state in states], dim)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for name, value in entries[last].items()
        }
    return {"module": module, "optimizer": {**optimizer, "state": entries}}


class Resumes(Domain):
    """Plays the legs of a case one after the other."""

    def play(self, pool: RankPool, case: Case) -> list[Found | Refused]:
        folder = Path(tempfile.mkdtemp(prefix="resumes-"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._fit(pool, case, str(folder)) if case.through == "trainer" else self._train(pool, case)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _fit(self, pool: RankPool, case: Case, folder: str) -> list[Found | Refused]:
        found: list[Found | Refused] = []
        for number, leg in enumerate(case.legs):
            found = pool.run(leg.world_size, guarded, partial(fit_leg, number, folder), case)
            if any(isinstance(each, Refused) for each in found):
                break
        return found

    def _train(self, pool: RankPool, case: Case) -> list[Found | Refused]:
        states: list[Any] = []
        for number, leg in enumerate(case.legs):
            # on as many ranks as before each rank may take up its own part
            loaded = states
            if states and not (leg.sharded and len(states) == leg.world_size):
                loaded = [whole_of(case, states)]
            elif states:
                loaded = [{**state, "module": state["state dict"]} for state in states]
            states = pool.run(leg.world_size, guarded, partial(train_leg, number, loaded), case)
            if any(isinstance(each, Refused) for each in states):
                return states
        return [state["found"] for state in states]


DOMAIN = Resumes.of("resumes", cases(), play)
