"""Random state: save the generators that some code may draw from, perhaps seed them, and put all of them back afterwards.

Code of others takes its random numbers from wherever it likes: torch's generators, one of its own, numpy's or Python's,
pytorch-metric-learning's ``c_f.NUMPY_RANDOM``. This is the one place that knows how each kind is saved, seeded and put back.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from lightning_ddp_losses.core import compat

NUMPY_SEEDS = 1 << 32
"""numpy takes no larger seed."""


class RandomSource(NamedTuple):
    """A generator: how its state is read, put back, and made from a seed."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]


def torch_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return torch's own generators of the CPU and of the accelerators among these, each once.

    Not ``torch.manual_seed``'s choice: it seeds every device there is, and formats a stack trace for each kind that is not in use.
    """
    places = {(device.type, device.index or 0) for device in devices if device.type not in ("cpu", "meta")}
    found = [torch.default_generator]
    for kind, index in sorted(places):
        found += compat.device_generators(kind)[index : index + 1]
    return found


def devices_in_use() -> list[torch.device]:
    """Return the accelerators that this process may have drawn on; a kind that it has not woken up stays asleep."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def global_generators(devices: Iterable[torch.device] = ()) -> list[Any]:
    """Return the generators that any code may use without being given one: torch's, Python's, and numpy's where it is loaded."""
    generators: list[Any] = [*torch_generators(devices), random]
    numpy = sys.modules.get("numpy")  # a module that is not loaded has drawn nothing and will not be asked
    if numpy is not None:
        generators.append(numpy.random)
    return generators


@contextlib.contextmanager
def preserve_random_state(generators: Iterable[object], *, seed: int | None = None) -> Iterator[None]:
    """Put generators back at the end of the block.

    Args:
        generators: Of torch, Python or numpy, also modules (``random``, ``numpy.random``); whatever else is among them is left alone.
        seed: Seeds all of them at the start of the block; None: they go on from where they are.
    """
    unique = {id(generator): generator for generator in generators}
    sources = [source for source in map(random_source, unique.values()) if source is not None]
    states = [source.get_state() for source in sources]
    try:
        if seed is not None:
            for source in sources:
                source.seed(seed)
        yield
    finally:
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)


def random_source(generator: Any) -> RandomSource | None:
    """Return how a generator is saved, put back and seeded; None for what is no generator."""
    if isinstance(generator, torch.Generator):
        return RandomSource(generator.get_state, generator.set_state, generator.manual_seed)
    if generator is random or isinstance(generator, random.Random):
        return RandomSource(generator.getstate, generator.setstate, generator.seed)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if generator is numpy.random or isinstance(generator, numpy.random.RandomState):
        return RandomSource(generator.get_state, generator.set_state, lambda seed: generator.seed(seed % NUMPY_SEEDS))
    if isinstance(generator, numpy.random.Generator):
        return _numpy_generator(generator.bit_generator)
    return None


def _numpy_generator(bits: Any) -> RandomSource:
    """Return the source of a numpy ``Generator``, whose state is an attribute and whose seed makes a new one."""

    def set_state(state: Any) -> None:
        bits.state = state

    def seed_(seed: int) -> None:
        bits.state = type(bits)(seed).state

    return RandomSource(lambda: bits.state, set_state, seed_)
