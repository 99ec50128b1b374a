"""The place in an epoch where training goes on, and what a saved place says about the sampler it belongs to.

A place counts rows that were trained on, of all ranks together: so it means the same for any number of ranks, and rows that the
workers of a DataLoader had already drawn are drawn again. All else in a saved state is there to be compared: another sampler,
seed, data set or global batch would give other batches without a word.

Legend: ``G`` rows of a global batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from lightning_ddp_losses.errors import InputError

_COUNTS = ("epoch", "seed", "rows")
_COMPARED = ("sampler", "length", "global_batch_size", "drop_last")


class EpochPlace(NamedTuple):
    """Where an epoch goes on.

    Attributes:
        epoch: The epoch whose order is drawn.
        rows: Rows of it that were trained on, all ranks together.
        digest: What its draw had been (hexadecimal); empty where that is not known.
        announced: What ``set_epoch`` may say without moving on from here.
    """

    epoch: int
    rows: int
    digest: str
    announced: int


def read_place(title: str, state: Any, own: Mapping[str, Any], *, seed: int | None) -> EpochPlace:
    """Return the place that a saved state names.

    Args:
        title: The sampler, as errors name it.
        state: What ``state_dict`` returned.
        own: The same facts about the sampler that loads it.
        seed: The sampler's seed; None takes over the saved one.

    Raises:
        InputError: what is no such state, and a sampler that differs from the one that was saved; names both.
    """
    what = f"state that {title} loads"
    counts = [state.get(name) for name in _COUNTS] if isinstance(state, Mapping) else []
    if not counts or not all(isinstance(count, int) and count >= 0 for count in counts):
        got = f"{dict(state)}" if isinstance(state, Mapping) else type(state).__name__
        raise InputError(what, expected="what its state_dict() returned", got=got)
    # 1. the seed: the order of every epoch hangs on it
    if seed is not None and seed != state["seed"]:
        fix = own["seed_fix"].format(seed=state["seed"])
        raise InputError(f"{what}: seed", expected=state["seed"], got=seed, fix=fix)
    # 2. sampler, data set and global batch
    for name in _COMPARED:
        if name in state and state[name] != own[name]:
            raise InputError(
                f"{what}: {name.replace('_', ' ')}",
                expected=f"{state[name]}, as saved",
                got=f"{own[name]}{own.get('meaning', '') * (name == 'global_batch_size')}",
                fix=_fix(name, state[name], own),
            )
    return EpochPlace(state["epoch"], state["rows"], state.get("digest", ""), state["epoch"])


def _fix(name: str, saved: Any, own: Mapping[str, Any]) -> str:
    if name == "length":
        return "Resume on the data it was trained on, or start a new epoch: load no state."
    if name == "global_batch_size":
        W = own["world_size"]
        if own["local"] and saved is not None and saved % W == 0:
            return f"On {W} ranks give {own['local']}={saved // W}."
        if own["local"]:
            return f"Use GlobalBatchSampler.batches(sampler, {saved}), which any number of ranks can divide."
        return f"Give it {saved}: the number of ranks may change, the global batch may not."
    return "Build the sampler as it was when the state was saved."


def batches_behind(title: str, place: EpochPlace, sizes: Sequence[int], *, length: int) -> int:
    """Return how many batches of an epoch end at a place.

    Args:
        title: The sampler, as errors name it.
        place: The place.
        sizes: Rows of each global batch of the epoch.
        length: The sampler's length, as errors name it.

    Raises:
        InputError: a place inside a batch, or behind the end.
    """
    ends = list(accumulate(sizes, initial=0))
    if place.rows not in ends:
        raise InputError(
            f"{title}: place in epoch {place.epoch}",
            expected=f"the end of one of its {len(sizes)} batches of {ends[-1]} rows (length {length})",
            got=f"row {place.rows}",
            fix="Resume with the sampler and the global batch that were saved.",
            collective=True,
        )
    return ends.index(place.rows)


def compare_draws(title: str, place: EpochPlace, digest: bytes) -> None:
    """Refuse an epoch that is drawn in another order than before the checkpoint.

    Raises:
        InputError: on every rank, which have drawn the same.
    """
    if place.digest and place.digest != digest.hex():
        raise InputError(
            f"indices that {title} drew in epoch {place.epoch}",
            expected=f"those it drew when its state was saved (digest {place.digest[:8]})",
            got=f"digest {digest.hex()[:8]}",
            fix="Resume with the same labels, weights and lengths, and the same releases of torch, numpy and the sampler's library.",
            collective=True,
        )
