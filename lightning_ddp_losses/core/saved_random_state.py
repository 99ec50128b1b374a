"""Random states as tensors, so that a checkpoint can hold them and ``torch.load(weights_only=True)`` reads it.

Four generators that training code may use without being given one: torch's on the CPU, Python's, numpy's, and that of the device.
Python and numpy (by default) run the same Mersenne Twister: 624 words, a place in them, and perhaps the second of two normal numbers.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core.random_state import NUMPY_SEEDS

_WORDS = 624
_ABSENT = -1  # the place of a generator that is of another kind; it is left alone
_TWISTER = "MT19937"


def read_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's generators, by name.

    Args:
        device: Whose generator is read too, as the current one of its kind; the CPU has none beside torch's.

    Returns:
        uint8 tensors on the CPU; their names and sizes depend on nothing but the kind of the device and the release of torch.
    """
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    module = _device_module(device)
    if module is not None:
        states[device.type] = module.get_rng_state().cpu()
    return states


def write_random_states_(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators of this process where ``read_random_states`` found them.

    Args:
        states: What it returned.
        device: As there.
    """
    # copies: of a row of a larger tensor, torch 2.13 reads beyond its memory and crashes
    torch.set_rng_state(states["torch"].clone())
    # 1. Python
    words, place, normal = _from_twister(states["python"])
    random.setstate((3, (*words, place), normal))
    # 2. numpy, where it is of the kind that was saved
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
    """Seed the generators of this process, without the devices that it does not use.

    Args:
        seed: 0 to 2**63 - 1.
        device: Whose generator is seeded too.
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
    """Return a seed that belongs to these numbers: neighbouring ones have nothing in common.

    Returns:
        0 to 2**63 - 1.
    """
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def _device_module(device: torch.device) -> Any:
    """Return torch's module of a kind of device (``torch.cuda``), None where the device has no generator of its own."""
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
    """Return a Mersenne Twister's state: words, place, whether there is a normal number left, and its bits."""
    (bits,) = struct.unpack("<q", struct.pack("<d", normal or 0.0))
    return torch.tensor([*words, place, int(normal is not None), bits]).view(torch.uint8)


def _from_twister(state: Tensor) -> tuple[list[int], int, float | None]:
    # a row of a larger tensor may not lie where int64 can
    *words, place, has_normal, bits = state.clone().view(torch.int64).tolist()
    (normal,) = struct.unpack("<d", struct.pack("<q", bits))
    return words, place, normal if has_normal else None
