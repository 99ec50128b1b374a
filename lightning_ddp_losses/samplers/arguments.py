"""What a global sampler can be built from; everything else is refused before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sized
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.samplers.randomness import SEEDS, nested


def check_rows(what: str, size: object) -> None:
    """Refuse a batch size that is given and is no positive number."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ConfigurationError(what, expected="a positive number of rows", got=repr(size))


def check_seed(what: str, seed: object) -> None:
    """Refuse a seed that is given and that not every generator takes."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEEDS):
        raise ConfigurationError(what, expected=f"a whole number from 0 to {SEEDS - 1}", got=repr(seed))


def checked_sampler(sampler: Any) -> Any:
    """``sampler``, if it is one over the whole data set and knows its length."""

    def refuse(got: str, fix: str) -> ConfigurationError:
        return ConfigurationError("GlobalBatchSampler", expected="a sampler with a length", got=got, fix=fix)

    name = type(sampler).__name__
    if not isinstance(sampler, Iterable) or isinstance(sampler, (Dataset, DataLoader, str, bytes, dict)):
        raise refuse(name, "Give it what you would give to DataLoader(sampler=...) or DataLoader(batch_sampler=...).")
    for inner in nested(sampler):
        if isinstance(inner, DistributedSampler) or hasattr(getattr(inner, "batch_size", None), "draw"):
            cut = type(inner).__name__
            raise refuse(
                f"{name}, which is cut by rank already"
                if inner is sampler
                else f"{name} around a {cut}, which is cut by rank already",
                "Give it the sampler that one process would use, over the whole data set.",
            )
    try:
        length = len(sampler) if isinstance(sampler, Sized) else None
    except (TypeError, NotImplementedError):
        length = None
    if length is None or math.isinf(length):
        raise refuse(f"{name} without one", "Give the sampler a finite __len__.")
    return sampler
