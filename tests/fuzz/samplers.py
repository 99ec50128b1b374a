"""`GlobalBatchSampler`: the ranks' batches together are those of one process, in every epoch, and after a resume at any epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_ddp_losses import GlobalBatchSampler
from tests.fuzz.engine import Domain, Found, NotDefined

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


def alone(case: Case) -> dict[str, Any]:
    """One process draws with the plain sampler; the union of the ranks' k-th batches is its k-th."""
    world = len(case.ranks)
    size = case.local * world
    batches = []
    for epoch in range(case.first_epoch, case.first_epoch + case.epochs):
        # as Lightning's `seed_everything`
        torch.manual_seed(case.seed + epoch)
        random.seed(case.seed + epoch)
        numpy.random.seed(case.seed + epoch)
        try:
            batches.append(list(BatchSampler(inner(case), size, case.drop_last)))
        except AssertionError as error:  # pytorch-metric-learning: too few rows for its classes
            raise NotDefined from error
    if any(len(batch) < world for epoch in batches for batch in epoch):
        raise NotDefined  # too few rows for all ranks
    return {f"sum {epoch}": counts(case, drawn) for epoch, drawn in enumerate(batches)}


def counts(case: Case, batches: list[list[int]]) -> Tensor:
    """How often each row is in each batch."""
    found = torch.zeros(len(batches), case.length, dtype=torch.float64)
    for index, batch in enumerate(batches):
        for key in batch:
            found[index, key] += 1
    return found


def on_rank(case: Case) -> Found:
    world = dist.get_world_size()
    torch.manual_seed(999 + dist.get_rank())
    if case.form == "indices":
        sampler: Any = GlobalBatchSampler(inner(case), case.local, drop_last=case.drop_last, seed=case.seed)
        batches: Any = BatchSampler(sampler, case.local, drop_last=False)
    else:
        batches = sampler = GlobalBatchSampler.batches(
            inner(case), case.local * world, drop_last=case.drop_last, seed=case.seed
        )
    found = {}
    for epoch in range(case.epochs):
        if case.sets_epoch:
            sampler.set_epoch(case.first_epoch + epoch)
        if case.broken_off:
            next(iter(batches), None)
            sampler.set_epoch(case.first_epoch + epoch)
        found[f"sum {epoch}"] = counts(case, [list(batch) for batch in batches])
    return found


DOMAIN = Domain("samplers", cases(), on_rank, alone)
