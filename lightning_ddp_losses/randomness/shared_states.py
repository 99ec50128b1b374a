"""`take_states_`: sets the generators of all ranks to the same state, at the beginning and at the end of a step.

This covers torch's generators of the CPU and the device, and numpy's and Python's generators. In a block, all ranks start from the states
of rank 0, so a number without rows is equal on all ranks (such as Mixup's coefficient, from any of the generators). A rank without rows has
drawn less, and at the end takes the states of a rank with rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_ddp_losses.core.random_state import devices_in_use, read_random_states, write_random_states_
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.process_groups import Group

DIGEST_BYTES = 16


def device_of_draws() -> torch.device:
    """Return the device with an additional generator, which is the current device of its type, or the CPU if no accelerator is in use."""
    in_use = devices_in_use()
    if not in_use:
        return torch.device("cpu")
    return torch.device(in_use[0].type)


def digest_of(states: Mapping[str, Tensor]) -> bytes:
    """Return a hash of the states of generators."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(states):
        hashed.update(name.encode())
        hashed.update(states[name].numpy().tobytes())
    return hashed.digest()


def take_states_(states: Mapping[str, Tensor], source: int, is_source: bool, group: Group) -> None:
    """Set the generators of all ranks to the states of one rank.

    Args:
        states: States of this rank (``read_random_states``), for the same generators on all ranks.
        source: The rank whose states are used.
        is_source: Whether this rank is the source.
        group: Process group. None is the world.

    Raises:
        RankMismatchError: on every rank, if ranks have different generators.

    Communication: one handshake.
    """
    sizes = {name: state.numel() for name, state in states.items()}
    payload = b""
    if is_source:
        payload = b"".join(state.numpy().tobytes() for state in states.values())
    payloads = handshake.all_gather("states of generators", {"generators": sizes}, payload, group=group)
    if is_source:
        return
    taken = {}
    start = 0
    for name, size in sizes.items():
        part = bytearray(payloads[source][start : start + size])
        taken[name] = torch.frombuffer(part, dtype=torch.uint8)
        start += size
    write_random_states_(taken, device_of_draws())


def torch_states(device: torch.device) -> Tensor:
    """Return the concatenated states of torch's generators of the CPU and of a device."""
    state = torch.get_rng_state()
    if device.type == "cpu":
        return state
    return torch.cat([state, torch.get_device_module(device).get_rng_state().cpu()])


@contextmanager
def generators_put_back(generator: torch.Generator | None) -> Iterator[None]:
    """Restore the states of torch's generators, and of a generator of the user, after the block."""
    device = device_of_draws()
    module = None if device.type == "cpu" else torch.get_device_module(device)
    state = torch.get_rng_state()
    of_device = module.get_rng_state() if module is not None else None
    of_user = generator.get_state() if generator is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if module is not None:
            module.set_rng_state(of_device)
        if generator is not None and of_user is not None:
            generator.set_state(of_user)


def own_states() -> dict[str, Tensor]:
    """Return the states of this process's generators, by name."""
    return read_random_states(device_of_draws())
