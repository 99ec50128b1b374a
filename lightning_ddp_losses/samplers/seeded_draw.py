"""Draws an epoch of any sampler from a seed, alike on every rank, and leaves the process and the sampler as they were.

Every rank draws all indices of an epoch from the same seed. That is cheap next to loading. So every generator that a sampler may use is
seeded for the draw and put back afterwards: seeding them for training instead would give all ranks the same dropout. A sampler may also
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

from lightning_ddp_losses.core.random_state import NUMPY_SEEDS, global_generators, preserve_random_state
from lightning_ddp_losses.distributed.fingerprint import fingerprint, hash_bytes
from lightning_ddp_losses.errors import expect

PML = "pytorch_metric_learning.utils.common_functions"
_CONTAINERS = (list, dict, set, deque, array, tuple, Tensor)  # and numpy's array
_PLAIN = {int, float, str, bool, type(None)}
_MAX_COPIED = 256 << 20  # bytes of an array


def draw_seeded(sampler: Any, seed: int) -> list[Any]:
    """Return everything that a sampler yields after seeding; generators and the sampler's containers are as before afterwards.

    Args:
        sampler: Sampler over the whole data set.
        seed: Seed of all generators: the global ones, pytorch-metric-learning's, and all that are attributes of the sampler or of
            samplers inside it.
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
    """Return the rank's contiguous part of ``rows``; sizes differ by one at most, the larger parts first."""
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


# ---------------------------------------------------------------------- the sampler's own containers


@contextlib.contextmanager
def preserve_shuffled(sampler: object) -> Iterator[None]:
    """Undo changes of a sampler to its own lists and arrays: an epoch is the same whether or not others were drawn before it.

    Restores lists, dicts, sets, arrays and tensors in its attributes, also inside each other, and which of them an attribute names.

    Raises:
        ConfigurationError: an array that is too large to be copied was changed.
    """
    named: list[tuple[dict[str, Any], dict[str, Any]]] = []
    queue: list[Any] = []
    for attributes in map(_attributes, nested_samplers(sampler)):
        named.append((attributes, {name: value for name, value in attributes.items() if _is_container(value)}))
        queue += attributes.values()
    kept = [(own, _saved(own)) for own in _containers_in(queue)]
    try:
        yield
    finally:
        for own, before in kept:
            _restore_(own, before, type(sampler).__name__)
        for attributes, values in named:
            attributes.update(values)


def _is_container(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or _is_numpy_array(value)


def _is_numpy_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _containers_in(queue: list[Any]) -> Iterable[Any]:
    """Return the containers among values and inside them, each once; takes the values out of the queue."""
    found: dict[int, Any] = {}
    while queue:
        value = queue.pop()
        if id(value) in found or not _is_container(value):
            continue
        found[id(value)] = value
        # numbers and texts hold nothing; most lists are of them
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple, deque)) and not set(map(type, value)) <= _PLAIN:
            queue += value
    return found.values()


def _saved(own: Any) -> Any:
    """Return a shallow copy of a container, or a hash of an array that is too large for one; None if it cannot be written to."""
    if isinstance(own, Tensor):
        if own.layout != torch.strided or own.is_meta:
            return None
        return fingerprint(own) if own.nbytes > _MAX_COPIED else own.detach().clone()
    if _is_numpy_array(own):
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
    elif isinstance(own, (dict, set)):
        own.clear()
        own.update(before)
    elif isinstance(own, (list, deque)):
        own.clear()
        own.extend(before)
    elif isinstance(own, array):
        own[:] = before
    else:  # numpy's array or a tensor, which may have no dimension
        with torch.no_grad():
            own[...] = before
