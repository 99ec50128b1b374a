"""One draw, equal wherever it runs: every generator that a sampler may use is seeded for it and put back afterwards.

Samplers take their random numbers from wherever they like: torch's generator, one of their own, numpy's or Python's, PML's
``c_f.NUMPY_RANDOM``. Seeding them for training instead would give all ranks the same dropout.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

SEEDS = 1 << 32  # numpy takes no larger seed
_SHUFFLED = ("labels", "fixed_set_of_triplets")  # of MPerClassSampler (a list) and FixedSetOfTriplets (an array)
PML = "pytorch_metric_learning.utils.common_functions"


class _Source(NamedTuple):
    """A generator: how its state is read, put back, and made from a seed."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]
    seed: Callable[[int], Any]


def nested(sampler: object) -> list[object]:
    """``sampler`` and the samplers it holds, outermost first."""
    found = [sampler]
    for outer in found:
        for value in getattr(outer, "__dict__", {}).values():
            if isinstance(value, Sampler) and all(value is not other for other in found):
                found.append(value)
    return found


@contextlib.contextmanager
def seeded(seed: int, sampler: object) -> Iterator[None]:
    """Seed all CPU generators and those that ``sampler`` holds; restore every one of them on leaving."""
    sources = _sources(sampler)
    states = [source.get() for source in sources]
    try:
        for source in sources:
            source.seed(seed % SEEDS)
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.put(state)


@contextlib.contextmanager
def put_back(sampler: object) -> Iterator[None]:
    """Undo what PML's samplers shuffle in place: an epoch is the same whether or not others were drawn before it."""
    kept = []
    for owner in nested(sampler):
        if any(cls.__module__.startswith("pytorch_metric_learning.") for cls in type(owner).__mro__):
            shuffled = [owner.__dict__[name] for name in _SHUFFLED if name in owner.__dict__]
            kept += [(own, own.copy()) for own in shuffled]
    try:
        yield
    finally:
        for own, before in kept:
            own[:] = before


def _sources(sampler: object) -> list[_Source]:
    # a module that is not loaded has drawn nothing and will not be asked
    numpy, pml = sys.modules.get("numpy"), sys.modules.get(PML)
    generators = [torch.default_generator, random, getattr(numpy, "random", None), getattr(pml, "NUMPY_RANDOM", None)]
    for owner in nested(sampler):
        generators += getattr(owner, "__dict__", {}).values()
    unique = {id(generator): generator for generator in generators}
    return [source for generator in unique.values() if (source := _as_source(generator, numpy))]


def _as_source(generator: Any, numpy: Any) -> _Source | None:
    if isinstance(generator, torch.Generator):
        return _Source(generator.get_state, generator.set_state, generator.manual_seed)
    if generator is random or isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate, generator.seed)
    if numpy is None:
        return None
    if generator is numpy.random or isinstance(generator, numpy.random.RandomState):
        return _Source(generator.get_state, generator.set_state, generator.seed)
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return _Source(lambda: bits.state, put, lambda seed: put(type(bits)(seed).state))
    return None
