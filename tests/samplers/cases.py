"""Samplers of every kind, and what one process draws from them without any code of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.samplers import FixedSetOfTriplets, HierarchicalSampler, MPerClassSampler
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler
from torch.utils.data import SubsetRandomSampler as Subset
from torch.utils.data import WeightedRandomSampler as Weighted

ROWS = 52
SEED = 11
LABELS = torch.arange(ROWS) % 6


class ByLength(Sampler[list[int]]):  # batches of different sizes, drawn by Python's generator and one of its own
    def __init__(self) -> None:
        self.own = np.random.RandomState(3)

    def __iter__(self) -> Iterator[Any]:
        rest = list(range(ROWS))
        random.shuffle(rest)
        while len(rest) > 9:
            size = int(self.own.randint(3, 7))
            batch, rest = rest[:size], rest[size:]
            yield torch.tensor(batch)
        yield rest

    def __len__(self) -> int:
        return 10


class Keys(Sampler[tuple[str, int]]):
    """Keys of a data set that is no sequence, drawn by numpy's new generator inside an inner sampler."""

    class Order(Sampler[int]):
        def __init__(self) -> None:
            self.own = np.random.default_rng(5)

        def __iter__(self) -> Iterator[int]:
            return iter(self.own.permutation(ROWS))

    def __init__(self) -> None:
        self.order = self.Order()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return (("row", int(row)) for row in self.order)

    def __len__(self) -> int:
        return ROWS


class ByEpoch(Sampler[int]):  # its order follows `set_epoch` alone
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(row + 7 * self.epoch) % ROWS for row in range(ROWS)])

    def __len__(self) -> int:
        return ROWS


class ShufflesItself(Sampler[int]):
    """Shuffles what it holds in place: a list, lists in a dict, an array, a tensor; and takes another list for its own."""

    def __init__(self) -> None:
        self.rows = list(range(10))
        self.by_class = {"a": list(range(10, 18)), "b": (list(range(18, 26)),)}
        self.numbers = np.arange(26, 34)
        self.tensor = torch.arange(34, 42)
        self.order = list(range(42, ROWS))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.rows)
        random.shuffle(self.by_class["a"])
        random.shuffle(self.by_class["b"][0])
        np.random.shuffle(self.numbers)
        self.tensor.copy_(self.tensor[torch.randperm(len(self.tensor))])
        self.order = random.sample(self.order, len(self.order))
        mixed = [self.rows, self.by_class["a"], self.by_class["b"][0], self.numbers, self.tensor, self.order]
        return (int(row) for part in mixed for row in part)

    def __len__(self) -> int:
        return ROWS


@dataclass(frozen=True)
class Case:  # a sampler, and the batch size where it yields indices
    make: Callable[[], Any]
    size: int | None = None
    drop_last: bool = False


def triplets() -> FixedSetOfTriplets:
    np.random.seed(0)  # it draws when it is built
    return FixedSetOfTriplets(LABELS, 16)


def hierarchy() -> HierarchicalSampler:
    np.random.seed(0)
    labels = torch.stack([LABELS, LABELS // 2], dim=1).tolist()
    return HierarchicalSampler(np.array(labels), batch_size=8, samples_per_class=2, batches_per_super_tuple=3)


CASES = {
    "sequential": Case(lambda: SequentialSampler(range(ROWS)), 8),
    "random": Case(lambda: RandomSampler(range(ROWS)), 12),
    "random, last dropped": Case(lambda: RandomSampler(range(ROWS)), 12, drop_last=True),
    "random, rows of the last batch not divided": Case(lambda: RandomSampler(range(ROWS)), 15),
    "random, own generator": Case(lambda: RandomSampler(range(ROWS), generator=torch.Generator().manual_seed(1)), 12),
    "weighted": Case(lambda: Weighted(torch.arange(ROWS) + 1.0, 36), 12),
    "subset": Case(lambda: Subset(range(5, 41)), 6),
    "list": Case(lambda: list(range(40, 0, -1)), 12),
    "keys": Case(Keys, 12, drop_last=True),
    "follows set_epoch": Case(ByEpoch, 9),
    "m per class": Case(lambda: MPerClassSampler(LABELS, 4, 12, length_before_new_iter=60), 12),
    "triplets": Case(triplets, 12),
    "batch sampler": Case(lambda: BatchSampler(RandomSampler(range(ROWS)), 9, drop_last=False)),
    "batch sampler, last dropped": Case(lambda: BatchSampler(RandomSampler(range(ROWS)), 9, drop_last=True)),
    "hierarchical": Case(hierarchy),
    "by length": Case(ByLength),
    "shuffles itself": Case(ShufflesItself, 9),
}


def one_process(case: Case, epochs: Iterable[int] = (0, 1), *, drop_last: bool | None = None) -> list[list[list[Any]]]:
    """The batches of each epoch, from the plain sampler alone, fresh for each: some shuffle what they hold."""
    drawn = []
    for epoch in epochs:
        sampler = case.make()
        seed_all(SEED + epoch, sampler)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        dropping = case.drop_last if drop_last is None else drop_last
        batches = BatchSampler(sampler, case.size, dropping) if case.size else sampler
        drawn.append([[as_key(key) for key in batch] for batch in batches])
    return drawn


def seed_all(seed: int, sampler: Any) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    if getattr(sampler, "generator", None) is not None:
        sampler.generator.manual_seed(seed)
    if isinstance(sampler, ByLength):
        sampler.own = np.random.RandomState(seed)
    if isinstance(sampler, Keys):
        sampler.order.own = np.random.default_rng(seed)


def as_key(key: Any) -> Any:
    return key if isinstance(key, tuple) else int(key)
