"""Draws an epoch of any sampler from a seed, the same on every rank, and leaves the process and the sampler as they were.

Every rank draws all indices of an epoch from the same seed, which is cheap compared to loading. So every generator that a sampler may use
is seeded for the draw and restored afterwards: seeding them for training instead would give all ranks the same dropout. A sampler may also
shuffle its own lists and arrays in place, which is undone.

Legend: ``W`` ranks.
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

from lightning_ddp_losses.core.nests import is_array
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS, global_generators, preserve_random_state
from lightning_ddp_losses.distributed.fingerprint import fingerprint, hash_bytes
from lightning_ddp_losses.errors import expect

PML = "pytorch_metric_learning.utils.common_functions"
_CONTAINERS = (list, dict, set, deque, array, tuple)  # and tensors and arrays of numpy
_PLAIN = {int, float, str, bool, type(None)}
_MAX_COPIED = 256 << 20  # bytes of an array


def draw_seeded(sampler: Any, seed: int) -> list[Any]:
    """Return everything that a sampler yields after seeding, and restore the generators and the sampler's containers.

    Args:
        sampler: Sampler over the whole data set.
        seed: Seed of all generators: the global ones, pytorch-metric-learning's, and attributes of the sampler and of samplers inside it.
    """
    generators = [*global_generators(), getattr(sys.modules.get(PML), "NUMPY_RANDOM", None)]
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


def share(rows: int, world_size: int, rank: int) -> slice:
    """Return the rank's contiguous part of ``rows``. Sizes differ by one at most, with the larger parts first."""
    each, extra = divmod(rows, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


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
    """Undo a sampler's changes to its lists and arrays: an epoch does not depend on the epochs drawn before it.

    Restores the lists, dicts, sets, arrays and tensors in its attributes, also inside each other, and which of them an attribute names.

    Raises:
        ConfigurationError: if an array that is too large for a copy was changed.
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
        # most lists hold numbers or texts, without containers inside
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple, deque)) and not set(map(type, value)) <= _PLAIN:
            queue += value
    return found.values()


def _saved(own: Any) -> Any:
    """Return a shallow copy of a container, a hash of an array that is too large for one, or None for a read-only one."""
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
    """Give a container back its saved contents."""
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
    else:  # numpy's array or a tensor, which may have no dimension
        with torch.no_grad():
            own[...] = before
