"""A draw from a sampler with a given seed, which leaves random numbers and the sampler unchanged.

Every generator that a sampler may use is seeded for the draw and restored afterwards. Otherwise all ranks would have the same dropout.
Objects that a sampler shuffles in place are restored too.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightning_ddp_losses.core.inputs import is_array
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS, global_generators, preserve_random_state
from lightning_ddp_losses.distributed.fingerprint import fingerprint, hash_bytes
from lightning_ddp_losses.errors import expect

_PML = "pytorch_metric_learning.utils.common_functions"
_CONTAINERS = (list, dict, set, deque, array, tuple)  # in addition to tensors and numpy arrays
_PLAIN = {int, float, str, bool, type(None)}
_MAX_COPIED = 256 << 20  # largest array to copy, in bytes


def draw_seeded(sampler: Any, seed: int) -> list[Any]:
    """Return everything that a sampler yields after seeding, and restore the generators and the sampler's containers.

    Args:
        sampler: Sampler over the whole dataset.
        seed: Seed of all generators: the global ones, pytorch-metric-learning's, and attributes of the sampler and of nested samplers.
    """
    generators = [*global_generators(), getattr(sys.modules.get(_PML), "NUMPY_RANDOM", None)]
    for owner in nested_samplers(sampler):
        generators += _attributes(owner).values()
    with preserve_random_state(generators, seed=seed % NUMPY_SEEDS), preserve_shuffled(sampler):
        return list(sampler)


def draw_digest(batches: Iterable[list[Any]]) -> bytes:
    """Return a hash of drawn batches."""
    seen = blake2b(digest_size=16)
    for batch in batches:
        try:
            data = array("q", batch).tobytes()
        except (TypeError, OverflowError):
            data = repr(batch).encode()
        seen.update(len(data).to_bytes(8, "little") + data)
    return seen.digest()


def nested_samplers(sampler: object) -> list[object]:
    """Return ``sampler`` and the samplers that it holds, outermost first."""
    found = [sampler]
    for outer in found:
        for value in _attributes(outer).values():
            if isinstance(value, Sampler) and all(value is not other for other in found):
                found.append(value)
    return found


def _attributes(owner: object) -> dict[str, Any]:
    return getattr(owner, "__dict__", {})


# ---------------------------------------------------------------------- the sampler's containers


@contextlib.contextmanager
def preserve_shuffled(sampler: object) -> Iterator[None]:
    """Undo a sampler's changes to its lists and arrays, so that an epoch does not depend on previously drawn epochs.

    Restores the lists, dicts, sets, arrays and tensors in its attributes, including nested ones, and the assignment of attributes to them.

    Raises:
        ConfigurationError: if an array that is too large to copy was changed.
    """
    owners = list(map(_attributes, nested_samplers(sampler)))
    named = [{name: value for name, value in owner.items() if _is_container(value)} for owner in owners]
    queue = [value for owner in owners for value in owner.values()]
    kept = [(own, _saved(own)) for own in _containers_in(queue)]
    try:
        yield
    finally:
        for own, before in kept:
            _restore_(own, before, type(sampler).__name__)
        for owner, values in zip(owners, named, strict=True):
            owner.update(values)


def _is_container(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or is_array(value)


def _containers_in(queue: list[Any]) -> Iterable[Any]:
    """Return the containers among values and inside them, each once. The queue is empty afterwards."""
    found: dict[int, Any] = {}
    while queue:
        value = queue.pop()
        if id(value) in found or not _is_container(value):
            continue
        found[id(value)] = value
        # most lists hold numbers or texts, and cannot contain containers
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple, deque)) and not set(map(type, value)) <= _PLAIN:
            queue += value
    return found.values()


def _saved(own: Any) -> Any:
    """Return a shallow copy of a container, a hash of an array that is too large to copy, or None for a read-only one."""
    if isinstance(own, Tensor):
        if own.layout != torch.strided or own.is_meta:
            return None
        return fingerprint(own) if own.nbytes > _MAX_COPIED else own.detach().clone()
    if is_array(own):
        if not own.flags.writeable:
            return None
        is_large = own.nbytes > _MAX_COPIED and own.dtype != object
        return hash_bytes(own.tobytes()) if is_large else own.copy()
    return None if isinstance(own, tuple) else copy.copy(own)


def _restore_(own: Any, before: Any, name: str) -> None:
    """Restore the saved contents of a container."""
    if before is None:
        return
    if isinstance(before, int):
        what, fix = f"{name}, an array of {own.nbytes >> 20} MiB", "Let it shuffle a list of indices, or a copy."
        expect(_saved(own) == before, what, expected="unchanged by drawing", got="another order", fix=fix)
    elif isinstance(own, (list, array)):
        own[:] = before
    elif isinstance(own, (dict, set, deque)):
        own.clear()
        own.extend(before) if isinstance(own, deque) else own.update(before)
    else:  # a numpy array or a tensor, which may be 0-dim
        with torch.no_grad():
            own[...] = before
