"""What happens when ranks that meet to exchange states hold different ones: an error that names it, or a default that fits.

A rank that has seen no data holds the defaults, which some metrics widen at their first update. Such a default takes the shape of what
the other ranks hold; whatever else differs is an error, the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.metrics.travelling_state import State


def adapt_states(
    title: str, states: Sequence[State], configuration: str, device: torch.device, group: Group
) -> list[State]:
    """Compare in full what the ranks hold: an error that names it, or defaults in the shape of what other ranks have.

    Raises:
        RankMismatchError: on every rank, with what differs.

    Communication: one handshake, and one gather of what does not fit in it.
    """
    own = {
        "configuration": configuration,
        "device": device.type,
        "states": [[s.name, s.reduction, s.kind, *_described(s.value), s.untouched] for s in states],
    }
    payloads = handshake.all_gather(f"{title}, in full", {}, json.dumps(own).encode(), group=group)
    gathered = [json.loads(payload) for payload in payloads]

    # the metric itself: how it was made, where it lives, which states it has
    for what in ("configuration", "device"):
        texts = [of_rank[what] for of_rank in gathered]
        if len(set(texts)) > 1:
            by_rank = _differing_parts(texts)
            _refuse_other_metrics(f"{title}: {what}", by_rank)
    by_rank = []
    for of_rank in gathered:
        described = [f"{name} ({kind}, {reduction})" for name, reduction, kind, *_ in of_rank["states"]]
        by_rank.append(", ".join(described) or "no states")
    if len(set(by_rank)) > 1:
        _refuse_other_metrics(f"{title}: states", by_rank)

    # each state: the ranks that put something in must agree, the others' defaults follow
    adapted = []
    for index, state in enumerate(states):
        entries = [of_rank["states"][index][3:] for of_rank in gathered]
        adapted.append(_adapt_state(title, state, entries))
    return adapted


def _adapt_state(title: str, state: State, entries: Sequence[Sequence[Any]]) -> State:
    """Return the state, or its default in the other ranks' shape; ``entries``: dtype, shape, untouched of each rank."""
    shapes = [(dtype, tuple(shape)) for dtype, shape, _ in entries]
    if state.kind != "stack" or len(set(shapes)) == 1:
        return state
    touched = {entry for entry, (_, _, untouched) in zip(shapes, entries, strict=True) if not untouched}
    described = [f"{shape} {dtype}" for dtype, shape in shapes]
    if len(touched) != 1:
        raise RankMismatchError(
            f"{title}: state `{state.name}`",
            expected="one shape and dtype on every rank",
            ranks=described,
            fix="Call update with inputs of the same width, number of dimensions and dtype on every rank.",
            collective=True,
        )
    # every rank asks for all of them, so that all raise
    dtype, shape = touched.pop()
    if any(not _expands(default, shape) for _, default in shapes):
        raise RankMismatchError(
            f"{title}: state `{state.name}`",
            expected=f"a default that fits the shape {shape} of the ranks with data",
            ranks=described,
            fix="Give every rank data before compute.",
            collective=True,
        )
    if not state.untouched:
        return state
    assert isinstance(state.value, Tensor)
    return replace(state, value=state.value.to(getattr(torch, dtype)).expand(shape).contiguous())


def _expands(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape expands to another, as `Tensor.expand` does."""
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in ends)


def _described(value: Tensor | list[Tensor]) -> tuple[str, list[int]]:
    """Return dtype and shape of a tensor; nothing of a list, whose contents are compared elsewhere."""
    if isinstance(value, Tensor):
        return str(value.dtype)[6:], list(value.shape)
    return "", []


def _differing_parts(texts: Sequence[str]) -> list[str]:
    """Return of each text the parts, between semicolons and commas, that not all texts have."""
    found = []
    common = set.intersection(*(set(_parts_of(text)) for text in texts))
    for text in texts:
        own = [part for part in _parts_of(text) if part not in common]
        found.append(", ".join(own) or text)
    return found


def _parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.replace("; ", ", ").split(", ")]


def _refuse_other_metrics(what: str, by_rank: Sequence[str]) -> NoReturn:
    raise RankMismatchError(
        what,
        expected="the same on every rank",
        ranks=by_rank,
        fix="Build the metric alike on every rank.",
        collective=True,
    )
