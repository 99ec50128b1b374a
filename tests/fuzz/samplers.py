"""`GlobalBatchSampler`: the ranks' batches together are those of one process, in every epoch, and after a resume at any epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from hypothesis import strategies as st
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ddp_losses import GlobalBatchSampler
from tests.fuzz.engine import Domain, Found, NotDefined, Place

KINDS = ["sequential", "random", "replacement", "weighted", "subset", "shuffles itself", "m per class"]


class ShufflesItself:
    """A sampler of one's own, with Python's random numbers, on a list that it keeps."""

    def __init__(self, length: int) -> None:
        self.indices = list(range(length))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Case:
    """Some epochs.

    Attributes:
        local: Rows of a rank.
        first_epoch: Where a run goes on; what is before it was drawn elsewhere.
        sets_epoch: Whether each epoch is set, as Lightning does; else one that was read to its end is followed by the next.
        broken_off: Whether each epoch is begun once before it is read.
    """

    ranks: tuple[int, ...]
    length: int
    local: int
    kind: str
    form: str
    drop_last: bool
    epochs: int
    first_epoch: int
    sets_epoch: bool
    broken_off: bool
    seed: int
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    sets_epoch = draw(st.booleans())
    return Case(
        ranks=(0,) * draw(st.integers(1, 4)),
        length=draw(st.integers(1, 40)),
        local=draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(KINDS)),
        form=draw(st.sampled_from(["indices", "batches"])),
        drop_last=draw(st.booleans()),
        epochs=draw(st.integers(1, 3)),
        first_epoch=draw(st.integers(0, 4)) if sets_epoch else 0,
        sets_epoch=sets_epoch,
        broken_off=sets_epoch and draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def inner(case: Case) -> Any:
    return {
        "sequential": lambda: SequentialSampler(range(case.length)),
        "random": lambda: RandomSampler(range(case.length)),
        "replacement": lambda: RandomSampler(range(case.length), replacement=True),
        "weighted": lambda: WeightedRandomSampler(torch.arange(case.length) + 1.0, case.length),
        "subset": lambda: SubsetRandomSampler(range(0, case.length, 2)),
        "shuffles itself": lambda: ShufflesItself(case.length),
        "m per class": lambda: MPerClassSampler(
            torch.arange(case.length) % 3, m=2, length_before_new_iter=2 * case.length
        ),
    }[case.kind]()


def drawn_alone(case: Case) -> list[list[list[int]]]:
    """Batches of each epoch, of the plain sampler."""
    found = []
    for epoch in range(case.first_epoch, case.first_epoch + case.epochs):
        # as Lightning's `seed_everything`
        torch.manual_seed(case.seed + epoch)
        random.seed(case.seed + epoch)
        numpy.random.seed(case.seed + epoch)
        # an error of pytorch-metric-learning's: too few rows for its classes
        found.append(list(BatchSampler(inner(case), case.local * len(case.ranks), case.drop_last)))
    if any(len(batch) < len(case.ranks) for epoch in found for batch in epoch):
        raise NotDefined  # too few rows for all ranks
    return found


def drawn_on_rank(case: Case, rank: int) -> list[list[list[int]]]:
    torch.manual_seed(999 + rank)
    options: Any = {"drop_last": case.drop_last, "seed": case.seed}
    if case.form == "indices":
        sampler: Any = GlobalBatchSampler(inner(case), case.local, **options)
        batches: Any = BatchSampler(sampler, case.local, drop_last=False)
    else:
        batches = sampler = GlobalBatchSampler.batches(inner(case), case.local * len(case.ranks), **options)
    found = []
    for epoch in range(case.first_epoch, case.first_epoch + case.epochs):
        if case.sets_epoch:
            sampler.set_epoch(epoch)
        if case.broken_off:
            next(iter(batches), None)
            sampler.set_epoch(epoch)
        found.append([list(batch) for batch in batches])
    return found


def counts(case: Case, batches: list[list[int]]) -> Tensor:
    """How often each row is in each batch."""
    found = torch.zeros(len(batches), case.length, dtype=torch.float64)
    for index, batch in enumerate(batches):
        for key in batch:
            found[index, key] += 1
    return found


def play(case: Case, place: Place) -> Found:
    """The union of the ranks' k-th batches is the k-th of one process."""
    epochs = drawn_alone(case) if place.alone else drawn_on_rank(case, place.rank)
    return {f"sum {epoch}": counts(case, batches) for epoch, batches in enumerate(epochs)}


DOMAIN = Domain.of("samplers", cases(), play)
