"""`GlobalBatchSampler`: the ranks' batches together are those of one process, in every epoch, and after a resume anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from lightning_ddp_losses import GlobalBatchSampler
from tests.fuzz.engine import Domain, Found, NotDefined

__all__ = ["DOMAIN"]


@dataclass(frozen=True)
class Case:
    ranks: tuple[int, ...]
    length: int
    local: int
    kind: str
    form: str
    drop_last: bool
    epochs: int
    seed: int
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    return Case(
        ranks=(0,) * draw(st.integers(1, 4)),
        length=draw(st.integers(1, 40)),
        local=draw(st.integers(1, 5)),
        kind=draw(st.sampled_from(["sequential", "random", "replacement", "weighted"])),
        form=draw(st.sampled_from(["indices", "batches"])),
        drop_last=draw(st.booleans()),
        epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 1000)),
    )


def inner(case: Case) -> Any:
    return {
        "sequential": lambda: SequentialSampler(range(case.length)),
        "random": lambda: RandomSampler(range(case.length)),
        "replacement": lambda: RandomSampler(range(case.length), replacement=True),
        "weighted": lambda: WeightedRandomSampler(torch.arange(case.length) + 1.0, case.length),
    }[case.kind]()


def alone(case: Case) -> dict[str, Any]:
    """One process draws with the plain sampler; the union of the ranks' k-th batches is its k-th."""
    world, found = len(case.ranks), {}
    size = case.local * world
    batches = []
    for epoch in range(case.epochs):
        torch.manual_seed(case.seed + epoch)
        batches.append(list(BatchSampler(inner(case), size, case.drop_last)))
    if any(len(batch) < world for epoch in batches for batch in epoch):
        raise NotDefined  # too few rows for all ranks
    for epoch, drawn in enumerate(batches):
        found[f"sum {epoch}"] = torch.zeros(len(drawn), case.length, dtype=torch.float64)
        for index, batch in enumerate(drawn):
            for key in batch:
                found[f"sum {epoch}"][index, key] += 1
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
        drawn = [list(batch) for batch in batches]
        counts = torch.zeros(len(drawn), case.length, dtype=torch.float64)
        for index, batch in enumerate(drawn):
            for key in batch:
                counts[index, key] += 1
        found[f"sum {epoch}"] = counts
    return found


DOMAIN = Domain("samplers", cases(), on_rank, alone)
