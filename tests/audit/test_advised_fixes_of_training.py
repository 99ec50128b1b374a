"""The advised fixes of faults in parameters, optimizers, steps and data: after them the weights are those of one process.

Each row is a pair of LightningModules. The truth is Lightning's Trainer on one device with the rows of all ranks.
"""

from __future__ import annotations

import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import NormalizedSoftmaxLoss
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, GlobalBatchSampler, global_mean
from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.testing import RankPool
from tests.fits import listed, make_trainer, trainer_alone, weights_of

ROWS, STEPS, WIDTH, CLASSES = 8, 4, 4, 3
cross_entropy = nn.functional.cross_entropy


def data() -> Any:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(STEPS * ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(features, torch.arange(STEPS * ROWS) % CLASSES)


class Program(LightningModule):
    """An encoder that trains on this rank's rows of each batch. A program overrides what it is about."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        torch.manual_seed(3)
        self.encoder = nn.Linear(WIDTH, CLASSES)
        self.head = nn.Linear(CLASSES, CLASSES)
        self.double()
        self.build()

    def build(self) -> None:
        """More modules."""

    def outputs(self, features: Tensor) -> Tensor:
        return self.head(self.encoder(features))  # type: ignore[no-any-return]

    def objective(self, features: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.outputs(features), labels)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.objective(*batch)

    def train_dataloader(self) -> Any:
        features, labels = data().tensors
        parts = zip(features.split(ROWS), labels.split(ROWS), strict=True)
        own = [(x[self.rank :: self.ranks], y[self.rank :: self.ranks]) for x, y in parts]
        return listed(own)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ---------------------------------------------------------------------- parameters


class Proxies(Program):
    """A loss with a weight of its own, over the rows of all ranks."""

    def loss(self) -> nn.Module:
        torch.manual_seed(4)
        return GlobalBatchLoss(NormalizedSoftmaxLoss(CLASSES, CLASSES).double())

    def build(self) -> None:
        self.criterion = self.loss()

    def objective(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.outputs(features), labels)  # type: ignore[no-any-return]


class ProxiesAlone(Proxies):
    """The same, without this package."""

    def loss(self) -> nn.Module:
        torch.manual_seed(4)
        loss: nn.Module = NormalizedSoftmaxLoss(CLASSES, CLASSES).double()
        return loss


class ProxiesNotOptimized(Proxies):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class InAList(Program):
    """Two more layers, which a list hides."""

    def layers(self) -> list[nn.Module]:
        torch.manual_seed(4)
        return [nn.Linear(CLASSES, CLASSES).double() for _ in range(2)]

    def build(self) -> None:
        self.more: Any = self.layers()

    def outputs(self, features: Tensor) -> Tensor:
        out = super().outputs(features)
        for layer in self.more:
            out = layer(out.tanh())
        return out

    def configure_optimizers(self) -> Any:
        hidden = [p for layer in self.more for p in layer.parameters()]
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters(), *hidden], lr=0.1)


class InAModuleList(InAList):
    def build(self) -> None:
        self.more = nn.ModuleList(self.layers())


class SeededByRank(Program):
    """A layer whose start differs by rank, since it is made when DDP has sent the weights of rank 0."""

    def layer(self) -> nn.Module:
        torch.manual_seed(4 + self.rank)
        return nn.Linear(CLASSES, CLASSES).double()

    def on_train_start(self) -> None:
        self.more = self.layer()
        self.optimizers().add_param_group({"params": [*self.more.parameters()]})  # type: ignore[union-attr]

    def outputs(self, features: Tensor) -> Tensor:
        return self.more(super().outputs(features))  # type: ignore[no-any-return]


class MadeBeforeTheWrap(SeededByRank):
    def build(self) -> None:
        self.more = self.layer()

    def on_train_start(self) -> None: ...


class Replaced(Program):
    """The head's weight is set to half of itself in each step."""

    def on_train_batch_start(self, *args: Any) -> None:
        if self.global_step == 1:
            self.head.weight = nn.Parameter(0.5 * self.head.weight.detach())
            self.trainer.optimizers = [self.configure_optimizers()]


class CopiedInto(Replaced):
    def on_train_batch_start(self, *args: Any) -> None:
        if self.global_step == 1:
            with torch.no_grad():
                self.head.weight.copy_(0.5 * self.head.weight)


class Unfrozen(Program):
    def build(self) -> None:
        self.head.requires_grad_(False)

    def on_train_batch_start(self, *args: Any) -> None:
        self.head.requires_grad_(self.global_step >= 2)


class WithoutRateAtFirst(Program):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.encoder.parameters()}, {"params": self.head.parameters(), "lr": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)  # type: ignore[arg-type]

    def on_train_batch_start(self, *args: Any) -> None:
        if self.global_step >= 2:
            self.trainer.optimizers[0].param_groups[1]["lr"] = 0.1


# ---------------------------------------------------------------------- the step


class SecondBackward(Program):
    """A penalty that gets its gradient after the reduction."""

    def penalty(self) -> Tensor:
        return self.outputs(self.features).square().mean()

    def training_step(self, batch: Any, index: int) -> Any:
        self.features = batch[0]
        return self.objective(*batch)

    def on_after_backward(self) -> None:
        self.penalty().backward()  # type: ignore[no-untyped-call]


class OneSum(SecondBackward):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch, index) + self.penalty()

    def on_after_backward(self) -> None: ...


class ByHand(Program):
    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__(rank, ranks)
        self.automatic_optimization = False

    def backpropagate(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.backpropagate(self.objective(*batch))
        optimizer.step()  # type: ignore[union-attr]


class ManualBackward(ByHand):
    def backpropagate(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class ClippedOnOneRank(Program):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.rank == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class PlateauOfARank(Program):
    """A scheduler that lowers the rate as soon as the loss of an epoch grows past the best."""

    sync_dist = False

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.objective(*batch)
        # of rank 1 it grows; of both together it falls
        shown = loss + (0.5 * self.current_epoch if self.rank else -2.0 * self.current_epoch) * (self.ranks > 1)
        shown = shown - 0.75 * self.current_epoch * (self.ranks == 1)
        self.log("shown", shown, on_step=False, on_epoch=True, sync_dist=self.sync_dist)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "shown"}}


class PlateauOfAll(PlateauOfARank):
    sync_dist = True


class ZeroWithoutGraph(Program):
    """A layer that only rows of class 0 use, which a rank may lack: its loss is a constant there."""

    def build(self) -> None:
        torch.manual_seed(4)
        self.special = nn.Linear(CLASSES, 1).double()

    def absent(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor) -> Tensor:
        outputs = self.outputs(features)
        common = cross_entropy(outputs, labels)
        chosen = labels == 0
        if not chosen.any():
            return common + self.absent()
        # a sum divided by a number that all ranks know: the mean over ranks is that of one process
        return common + self.ranks * self.special(outputs[chosen]).square().sum() / ROWS  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        features, labels = data().tensors
        own = []
        for x, y in zip(features.split(ROWS), labels.split(ROWS), strict=True):
            order = y.argsort(stable=True)
            own.append(tuple(t[order].chunk(self.ranks)[self.rank] for t in (x, y)))
        return listed(own)


class ZeroWithGraph(ZeroWithoutGraph):
    def absent(self) -> Tensor:
        return 0 * sum(p.sum() for p in self.special.parameters())  # type: ignore[return-value]


class NoLoss(ZeroWithoutGraph):
    """A step without a loss for a rank without rows of class 0."""

    def objective(self, features: Tensor, labels: Tensor) -> Any:
        chosen = labels == 0
        if not chosen.any():
            return self.nothing(features)
        return self.ranks * self.special(self.outputs(features[chosen])).square().sum() / ROWS

    def nothing(self, features: Tensor) -> Any:
        return None


class ZeroThatDepends(NoLoss):
    def nothing(self, features: Tensor) -> Any:
        return 0 * self.special(self.outputs(features)).sum()


class CountsInABuffer(Program):
    """A metric's state of each rank, which weighs the loss: DDP writes that of rank 0 over it."""

    def build(self) -> None:
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def gathered(self, own: Tensor) -> Tensor:
        return own

    def training_step(self, batch: Any, index: int) -> Any:
        own = batch[1].double().sum() + self.rank
        self.total += self.gathered(own) - (self.rank if self.ranks == 1 else 0)  # type: ignore[operator]
        return super().training_step(batch, index)


class CountsOfAll(CountsInABuffer):
    def gathered(self, own: Tensor) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(own)
        return own - self.ranks * (self.ranks - 1) / 2


class OverAnEmptyClass(Program):
    """The mean of a class that a rank may lack is not a number."""

    def rows_of_class(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.outputs(features)[labels == 0].square().sum(1).mean()

    def objective(self, features: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.outputs(features), labels) + self.rows_of_class(features, labels)

    def train_dataloader(self) -> Any:
        return ZeroWithoutGraph.train_dataloader(self)  # type: ignore[arg-type]


class OverAllRanks(OverAnEmptyClass):
    def rows_of_class(self, features: Tensor, labels: Tensor) -> Tensor:
        chosen = labels == 0
        return global_mean(self.outputs(features)[chosen].square().sum(), chosen.sum())


class InAnOrderOfTheRank(Program):
    """Two layers, registered in the order of a set, which may differ between processes."""

    def names(self) -> list[str]:
        return ["first", "second"][:: -1 if self.rank else 1]

    def build(self) -> None:
        for name in self.names():
            torch.manual_seed(len(name))
            self.add_module(name, nn.Linear(CLASSES, CLASSES).double())

    def outputs(self, features: Tensor) -> Tensor:
        out = super().outputs(features)
        return self.get_submodule("second")(self.get_submodule("first")(out).tanh())  # type: ignore[no-any-return]


class InAFixedOrder(InAnOrderOfTheRank):
    def names(self) -> list[str]:
        return sorted(super().names())


class ComplexBuffer(Program):
    """A buffer that gloo and NCCL may not broadcast."""

    def build(self) -> None:
        self.register_buffer("turn", torch.tensor([1j, 1, -1j], dtype=torch.complex128))

    def turned(self, out: Tensor) -> Tensor:
        turned: Tensor = out * self.turn  # type: ignore[operator]
        return turned.real + turned.imag

    def outputs(self, features: Tensor) -> Tensor:
        return self.turned(super().outputs(features))


class TwoRealBuffers(ComplexBuffer):
    def build(self) -> None:
        self.register_buffer("real", torch.tensor([0.0, 1, 0], dtype=torch.float64))
        self.register_buffer("imag", torch.tensor([1.0, 0, -1], dtype=torch.float64))

    def turned(self, out: Tensor) -> Tensor:
        return out * self.real + out * self.imag  # type: ignore[operator]


# ---------------------------------------------------------------------- data


class Loader:
    """No DataLoader: batches of one rank, of a part of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        features, labels = data().tensors
        batches = zip(features.split(ROWS // 2), labels.split(ROWS // 2), strict=True)
        self.batches = [*itertools.islice(batches, rank, None, ranks)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class SameForAll(Program):
    def train_dataloader(self) -> Any:
        return Loader(0, 1)


class EveryOther(SameForAll):
    def train_dataloader(self) -> Any:
        return Loader(self.rank, self.ranks)


class ThreeShortBatches(Program):
    """Ranks with two and four batches, and a loss over the rows of all."""

    def build(self) -> None:
        self.criterion: nn.Module = GlobalBatchLoss(nn.CrossEntropyLoss())

    def objective(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.outputs(features), labels)  # type: ignore[no-any-return]

    def train_dataloader(self) -> Any:
        own = [*super().train_dataloader().dataset]
        return listed(own[: STEPS - 2 * self.rank])


class ThreeShortBatchesAlone(ThreeShortBatches):
    """All rows that the ranks have, step by step."""

    def build(self) -> None:
        self.criterion = nn.CrossEntropyLoss()

    def train_dataloader(self) -> Any:
        loaders = [ThreeShortBatches(rank, 2).train_dataloader().dataset for rank in range(2)]
        steps = itertools.zip_longest(*loaders)
        rows = [[batch for batch in step if batch is not None] for step in steps]
        joined = [tuple(torch.cat(part) for part in zip(*step, strict=True)) for step in rows]
        return listed(joined)


class OneOfEach(Sampler[int]):
    """An order for whole batches, as a sampler of M rows a class has it."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(STEPS * ROWS, generator=torch.Generator().manual_seed(7)).tolist())

    def __len__(self) -> int:
        return STEPS * ROWS


class Sampled(Program):
    """The order of a sampler, dealt to the ranks batch by batch."""

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_sampler=GlobalBatchSampler.batches(OneOfEach(), ROWS))


class SampledAlone(Sampled):
    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=ROWS, sampler=OneOfEach())


class PermutedByRank(Sampled):
    """Each rank takes its part of an order of its own."""

    def train_dataloader(self) -> Any:
        sampler: Any = DistributedSampler(data(), self.ranks, self.rank, seed=7 + self.rank)
        return DataLoader(data(), batch_size=ROWS // self.ranks, sampler=sampler)


class Reshuffled(Sampled):
    """Lightning divides what the sampler has ordered, by an order of its own."""

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=ROWS // self.ranks, sampler=OneOfEach())


class NotSet(Program):
    """A distributed sampler under a name where Lightning does not find it: each epoch has the order of the first."""

    def train_dataloader(self) -> Any:
        sampler: Any = DistributedSampler(data(), self.ranks, self.rank, seed=7)
        self.order = [sampler]
        size = ROWS // self.ranks
        batches = type("Batches", (list,), {"__iter__": lambda own: iter([*torch.tensor([*sampler]).split(size)])})  # type: ignore[no-untyped-call]
        return DataLoader(data(), batch_sampler=batches([[0]] * STEPS))


class SetByHand(NotSet):
    def on_train_epoch_start(self) -> None:
        self.order[0].set_epoch(self.current_epoch)


class Stream(IterableDataset[Any]):
    """Batches, one after the other; of this rank if it is divided."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Any]:
        features, labels = data().tensors
        rows = zip(features.split(ROWS // 2), labels.split(ROWS // 2), strict=True)
        return itertools.islice(rows, self.rank, None, self.ranks)


class Undivided(Program):
    def train_dataloader(self) -> Any:
        return listed(Stream(0, 1))


class Divided(Program):
    def train_dataloader(self) -> Any:
        return listed(Stream(self.rank, self.ranks))


class Accumulated(ThreeShortBatches):
    """Five micro-batches in windows of two: the last has one."""

    def train_dataloader(self) -> Any:
        return listed([*Program.train_dataloader(self).dataset][:3])


class AccumulatedAlone(Accumulated):
    """A batch a window."""

    def build(self) -> None:
        self.criterion = nn.CrossEntropyLoss()

    def train_dataloader(self) -> Any:
        first, second, last = super().train_dataloader().dataset
        window = tuple(torch.cat(parts) for parts in zip(first, second, strict=True))
        return listed([window, last])


# ---------------------------------------------------------------------- the table


class Row(NamedTuple):
    """A fault, its fix, and the same in one process.

    Attributes:
        sick: Program with the fault.
        mended: Program after the fix.
        whole: Program of one process.
        strategy: Makes the strategy of the fix.
        options: Options of all trainers.
        fix: Further options of the trainer, that are the fix.
        of_ranks: Further options of the trainers on ranks.
        ends: True if the run with the fault ends in an error.
    """

    sick: type[Program]
    mended: type[Program]
    whole: type[Program]
    strategy: Callable[[], Any] = partial(str, "ddp")
    options: Mapping[str, Any] = MappingProxyType({})
    fix: Mapping[str, Any] = MappingProxyType({})
    of_ranks: Mapping[str, Any] = MappingProxyType({})
    ends: bool = False


DISTRIBUTED = {"use_distributed_sampler": True}
TWO_EPOCHS = {"max_epochs": 2}
ROWS_OF_FAULTS: dict[str, Row] = {
    "F01": Row(ProxiesNotOptimized, Proxies, ProxiesAlone),
    "F02": Row(InAList, InAModuleList, InAModuleList),
    "F04": Row(SeededByRank, MadeBeforeTheWrap, MadeBeforeTheWrap),
    "F05": Row(SeededByRank, MadeBeforeTheWrap, MadeBeforeTheWrap),
    "F06": Row(Replaced, CopiedInto, CopiedInto, ends=True),
    "F08": Row(Unfrozen, WithoutRateAtFirst, Unfrozen),
    "F09": Row(SecondBackward, OneSum, SecondBackward),
    "F10": Row(ByHand, ManualBackward, ByHand),
    "F12": Row(InAnOrderOfTheRank, InAFixedOrder, InAFixedOrder),
    "F13": Row(ClippedOnOneRank, Program, ClippedOnOneRank, fix={"gradient_clip_val": 0.05}),
    "F17": Row(PlateauOfARank, PlateauOfAll, PlateauOfARank, options={"max_epochs": 3}),
    "F32": Row(ZeroWithoutGraph, ZeroWithGraph, ZeroWithGraph, ends=True),
    "F35": Row(NoLoss, ZeroThatDepends, NoLoss, ends=True),
    "F36": Row(
        ThreeShortBatches, ThreeShortBatches, ThreeShortBatchesAlone, lambda: DDPLossStrategy(uneven="join"), ends=True
    ),
    "F49": Row(CountsInABuffer, CountsOfAll, CountsOfAll),
    "F67": Row(SameForAll, EveryOther, Program),
    "F68": Row(Reshuffled, Sampled, SampledAlone, of_ranks=DISTRIBUTED),
    "F69": Row(PermutedByRank, Sampled, SampledAlone),
    "F70": Row(NotSet, SetByHand, SetByHand, options=TWO_EPOCHS),
    "F71": Row(Undivided, Divided, Program),
    "F79": Row(OverAnEmptyClass, OverAllRanks, OverAnEmptyClass),
    "F81": Row(ComplexBuffer, TwoRealBuffers, TwoRealBuffers, ends=True),
    "F84": Row(
        Accumulated,
        Accumulated,
        AccumulatedAlone,
        lambda: DDPLossStrategy(accumulation="window"),
        of_ranks={"accumulate_grad_batches": 2},
    ),
}
SICK, MENDED, WHOLE = range(3)


def state_of(program: Program) -> dict[str, Tensor]:
    """The weights, and those that a list hides."""
    more: Any = getattr(program, "more", None)
    found = weights_of(program)
    for number, layer in enumerate(more if isinstance(more, list) else []):
        found |= {f"more.{number}.{name}": value for name, value in weights_of(layer).items()}
    return found


def on_ranks(fault: str, which: int) -> dict[str, Tensor]:
    row = ROWS_OF_FAULTS[fault]
    program = row[which](dist.get_rank(), dist.get_world_size())  # type: ignore[operator, call-arg]
    strategy = row.strategy() if which == MENDED else "ddp"
    options = {**row.options, **row.of_ranks, **(row.fix if which == MENDED else {})}
    with warnings.catch_warnings():
        # Lightning's advice comes on rank 0 alone; as an error it would leave the other waiting
        warnings.filterwarnings("ignore", "It is recommended to use `self.log.*sync_dist=True")
        make_trainer(strategy, **options).fit(program)
    return state_of(program)


def in_one_process(fault: str) -> dict[str, Tensor]:
    row = ROWS_OF_FAULTS[fault]
    program = row.whole()
    trainer_alone(**row.options).fit(program)
    return state_of(program)


def difference(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert ours.keys() == truth.keys()
    differences = [float((ours[name] - truth[name]).norm() / truth[name].norm().clamp(min=1e-9)) for name in truth]
    return max(math.inf if math.isnan(each) else each for each in differences)


@pytest.mark.parametrize("fault", ROWS_OF_FAULTS)
def test_after_the_advised_fix_the_weights_are_those_of_one_process(pool: RankPool, fault: str) -> None:
    assert FAULTS[fault].fix
    truth = in_one_process(fault)
    for ours in pool.run(2, on_ranks, fault, MENDED):
        assert difference(ours, truth) < 1e-9


@pytest.mark.parametrize("fault", [fault for fault, row in ROWS_OF_FAULTS.items() if not row.ends])
def test_with_the_fault_they_are_not(pool: RankPool, fault: str) -> None:
    truth = in_one_process(fault)
    assert max(difference(ours, truth) for ours in pool.run(2, on_ranks, fault, SICK)) > 1e-4


# ---------------------------------------------------------------------- a loop without Lightning


class Scaled(nn.Module):
    """A buffer that belongs to the rows of a rank. DDP writes that of rank 0 over it before a forward."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(WIDTH, CLASSES).double()
        self.register_buffer("scale", scale)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features) * self.scale  # type: ignore[no-any-return]


def gradients_of_two_forwards(scale: Tensor, **options: Any) -> list[Any]:
    x = data().tensors[0]
    model: nn.Module
    if dist.is_initialized():
        part = slice(dist.get_rank(), None, dist.get_world_size())
        x, own = x[part], scale[part]
        model = DistributedDataParallel(Scaled(torch.zeros_like(own)), **options)
        model.module.scale.copy_(own)
    else:
        model = Scaled(scale)
    (model(x).square().mean() + model(-x).exp().mean()).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_two_forwards_before_a_backward_without_the_broadcast_of_buffers(pool: RankPool) -> None:
    scale = torch.arange(1.0, 1 + STEPS * ROWS, dtype=torch.float64)[:, None] / ROWS
    truth = gradients_of_two_forwards(scale)
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    option = "forward_sync_buffers" if newer else "broadcast_buffers"
    for ours in pool.run(2, gradients_of_two_forwards, scale, **{option: False}):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=0)
    for ours in pool.run(2, gradients_of_two_forwards, scale):
        assert not torch.allclose(ours[0], truth[0], rtol=1e-4)
