"""Random state: save the generators that some code may draw from, optionally seed them, and restore all of them afterwards.

Third-party code may draw from any generator: torch's, a separate one, numpy's or Python's,
pytorch-metric-learning's ``c_f.NUMPY_RANDOM``. This module defines how each kind is saved, seeded and restored.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat


class CountedDraws:
    """Counts the calls of a module that draws new numbers in each call.

    Attributes:
        number: Calls so far.
    """

    def __init__(self) -> None:
        self.number = 0


def read_draw_counts(module: nn.Module) -> dict[str, int]:
    """Return how often each counter in a module has drawn, by its path."""
    return {path: draws.number for path, draws in _counters_in(module).items()}


def write_draw_counts_(module: nn.Module, counts: Mapping[str, int]) -> None:
    """Set the counters in a module to these values. Paths that the module does not have are ignored."""
    for path, draws in _counters_in(module).items():
        draws.number = counts.get(path, draws.number)


def _counters_in(module: nn.Module) -> dict[str, CountedDraws]:
    """Return the counters of a module and of all modules inside it."""
    found = {}
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, CountedDraws):
                found[f"{path}.{name}"] = value
    return found


_WORDS = 624
_ABSENT = -1  # position stored for a generator of another kind, which is not restored
_TWISTER = "MT19937"


def read_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's generators, by name.

    Args:
        device: Device with the additional generator, which must be the current device of its kind. For the CPU only torch's is saved.

    Returns:
        uint8 tensors on the CPU. Their names and sizes depend only on the kind of the device and the release of torch.
    """
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    module = _device_module(device)
    if module is not None:
        states[device.type] = module.get_rng_state().cpu()
    return states


def write_random_states_(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the generators of this process to the states returned by ``read_random_states``.

    Args:
        states: Its result.
        device: The same device.
    """
    # clone it: for a row of a larger tensor, torch 2.13 reads beyond its memory and crashes
    torch.set_rng_state(states["torch"].clone())
    # 1. Python
    words, place, normal = _from_twister(states["python"])
    random.setstate((3, (*words, place), normal))
    # 2. numpy, if the saved generator was of this kind
    words, place, normal = _from_twister(states["numpy"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and place != _ABSENT:
        key = numpy.array(words, dtype=numpy.uint32)
        numpy.random.set_state((_TWISTER, key, place, int(normal is not None), normal or 0.0))
    # 3. the device
    module = _device_module(device)
    if module is not None:
        module.set_rng_state(states[device.type].clone())


def seed_generators_(seed: int, device: torch.device) -> None:
    """Seed the generators of this process, excluding devices that it does not use.

    Args:
        seed: 0 to 2**63 - 1.
        device: Device with an additional generator to seed.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % NUMPY_SEEDS)
    module = _device_module(device)
    if module is not None:
        module.manual_seed(seed)


def derived_seed(*numbers: int) -> int:
    """Return a seed derived from these numbers, such that neighbouring numbers give unrelated seeds.

    Returns:
        0 to 2**63 - 1.
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def _device_module(device: torch.device) -> Any:
    """Return torch's module for a kind of device (``torch.cuda``), or None if the device does not have a separate generator."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


def _python_state() -> Tensor:
    _, words, normal = random.getstate()
    return _twister(words[:_WORDS], words[_WORDS], normal)


def _numpy_state() -> Tensor:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state(legacy=False)
    if state is None or state["bit_generator"] != _TWISTER:
        return _twister([0] * _WORDS, _ABSENT, None)
    normal = state["gauss"] if state["has_gauss"] else None
    return _twister(state["state"]["key"].tolist(), state["state"]["pos"], normal)


def _twister(words: Sequence[int], place: int, normal: float | None) -> Tensor:
    """Return a Mersenne Twister's state: words, position, whether a normal number is left, and its bits."""
    (bits,) = struct.unpack("<q", struct.pack("<d", normal or 0.0))
    return torch.tensor([*words, place, int(normal is not None), bits]).view(torch.uint8)


def _from_twister(state: Tensor) -> tuple[list[int], int, float | None]:
    # a row of a larger tensor may not be aligned for int64
    *words, place, has_normal, bits = state.clone().view(torch.int64).tolist()
    (normal,) = struct.unpack("<d", struct.pack("<q", bits))
    return words, place, normal if has_normal else None


NUMPY_SEEDS = 1 << 32
"""Number of seeds that numpy accepts."""


class RandomSource(NamedTuple):
    """A generator: functions that read its state, restore it, and seed it."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], Any]
    seed: Callable[[int], Any]


def torch_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return torch's own generators of the CPU and of the accelerators among these, each once.

    Unlike these, ``torch.manual_seed`` seeds every existing device, and formats a stack trace for each kind that is not in use.
    """
    places = {(device.type, device.index or 0) for device in devices if device.type not in ("cpu", "meta")}
    found = [torch.default_generator]
    for kind, index in sorted(places):
        found += torch_compat.device_generators(kind)[index : index + 1]
    return found


def devices_in_use() -> list[torch.device]:
    """Return the accelerators on which this process may have drawn numbers, without initialising a kind of device."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def global_generators(devices: Iterable[torch.device] = ()) -> list[Any]:
    """Return the generators that any code can use implicitly: torch's, Python's, and numpy's if it is loaded."""
    generators: list[Any] = [*torch_generators(devices), random]
    numpy = sys.modules.get("numpy")  # a module that is not loaded has not drawn
    if numpy is not None:
        generators.append(numpy.random)
    return generators


@contextlib.contextmanager
def preserve_random_state(generators: Iterable[object], *, seed: int | None = None) -> Iterator[None]:
    """Restore the state of generators at the end of the block.

    Args:
        generators: Generators of torch, Python or numpy, including modules (``random``, ``numpy.random``). Other objects are ignored.
        seed: Seed for all of them at the start of the block. If None, they continue from their current state.
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


class PieceRuns:
    """The runs of a module on the pieces of a batch, one after the other, and each of them again in backward.

    Attributes:
        are_complete: Whether a run in backward needs no other mechanism for its random numbers.
    """

    are_complete = True

    def of_all(self) -> AbstractContextManager[None]:
        """Return a context for the first runs of all pieces."""
        return contextlib.nullcontext()

    def add(self, rows: slice, whole: Sequence[Tensor], cut: Sequence[Tensor]) -> None:
        """Add the next piece.

        Args:
            rows: Its position in dimension 0 of the batch.
            whole: Tensors of the call.
            cut: The same tensors for the piece, where those without rows in dimension 0 are unchanged.
        """

    def of_run(self, number: int) -> AbstractContextManager[None]:
        """Return a context to run a piece in, for the first time or again. First runs must be in order."""
        raise NotImplementedError

    def note_results(self, results: Sequence[Tensor]) -> None:
        """Called with the results of the piece that was added last, after its first run."""

    def mark(self, joined: Sequence[Tensor]) -> None:
        """Called with the results of all pieces, joined along dimension 0."""


class RandomStates(PieceRuns):
    """States of torch's generators at the start of several runs, so that a repeated run draws the same numbers.

    The memory of all states is allocated before the first run. It is Python's memory and is read and written by address, because modes of
    torch (fake tensors) reject operators on tensors that were not created by them.

    Args:
        devices: Devices that runs draw on, besides the CPU.
        runs: Number of runs. 0 if they are not repeated.

    Attributes:
        are_complete: Whether the generators of all devices are known. If not, use torch's own mechanism for all of them.
    """

    def __init__(self, devices: Iterable[torch.device], runs: int) -> None:
        accelerators = {device for device in devices if device.type not in ("cpu", "meta")}
        self.are_complete = all(torch_compat.device_generators(device.type) for device in accelerators)
        self._generators = torch_generators(accelerators) if self.are_complete and runs else []
        self._memory = [bytearray(runs * generator.get_state().nbytes) for generator in self._generators]
        self._stored = 0

    @contextlib.contextmanager
    def of_run(self, number: int) -> Iterator[None]:
        """Store the states when a run is executed for the first time. Otherwise start from them, and restore the generators at the end.

        Args:
            number: Number of the run, starting at 0. First executions must follow this order.
        """
        if number == self._stored:
            self._store_(number)
            self._stored += 1
            yield
            return
        with preserve_random_state(self._generators):
            self._restore_(number)
            yield

    def _store_(self, number: int) -> None:
        for generator, memory in zip(self._generators, self._memory, strict=True):
            state = generator.get_state()
            start = number * state.nbytes
            memory[start : start + state.nbytes] = ctypes.string_at(state.data_ptr(), state.nbytes)

    def _restore_(self, number: int) -> None:
        for generator, memory in zip(self._generators, self._memory, strict=True):
            state = generator.get_state()
            start = number * state.nbytes
            stored = bytes(memory[start : start + state.nbytes])
            ctypes.memmove(state.data_ptr(), stored, state.nbytes)
            generator.set_state(state)


def random_source(generator: Any) -> RandomSource | None:
    """Return functions that save, restore and seed a generator, or None for any other object."""
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
    """Return the source of a numpy ``Generator``, whose state is an attribute, and which is seeded through a new bit generator."""

    def set_state(state: Any) -> None:
        bits.state = state

    def seed_(seed: int) -> None:
        bits.state = type(bits)(seed).state

    return RandomSource(lambda: bits.state, set_state, seed_)
