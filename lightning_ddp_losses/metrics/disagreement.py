"""Ranks whose states differ: what each holds, in words, as one error; or defaults that fit the other ranks' shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.metrics.layout import State


def agree_in_full(
    title: str, states: Sequence[State], configuration: str, device: torch.device, group: Group
) -> list[State]:
    """What the ranks hold, told in full: an error that names it, or defaults in the shape of what other ranks have.

    Raises:
        RankMismatchError: on every rank, with what differs.

    Communication: one frame, and one gather of what does not fit in it.
    """
    own = {
        "configuration": configuration,
        "device": device.type,
        "states": [
            [s.name, getattr(s.reduce, "__qualname__", "none"), s.kind, *_told(s.value), s.untouched] for s in states
        ],
    }
    everyone = [
        json.loads(p) for p in handshake.all_gather(f"{title}, in full", {}, json.dumps(own).encode(), group=group)
    ]
    for what in ("configuration", "device"):
        if len({ranks[what] for ranks in everyone}) > 1:
            told = _differing([ranks[what] for ranks in everyone])
            _refuse(f"{title}: {what}", "the same on every rank", told, "Build the metric alike on every rank.")
    kept = [[entry[:3] for entry in ranks["states"]] for ranks in everyone]
    if any(k != kept[0] for k in kept):
        told = [", ".join(f"{name} ({kind}, {reduce})" for name, reduce, kind in k) or "no states" for k in kept]
        _refuse(f"{title}: states", "the same on every rank", told, "Build the metric alike on every rank.")
    adapted = []
    for index, state in enumerate(states):
        entries = [ranks["states"][index] for ranks in everyone]
        shapes = {(entry[3], tuple(entry[4])) for entry in entries if not entry[5]}
        adapted.append(state)
        if state.kind != "stack" or len({(e[3], tuple(e[4])) for e in entries}) == 1:
            continue
        if len(shapes) != 1:
            told = [f"{tuple(entry[4])} {entry[3]}" for entry in entries]
            _refuse(
                f"{title}: state `{state.name}`",
                "one shape and dtype on every rank",
                told,
                "Call update with inputs of the same width, number of dimensions and dtype on every rank.",
            )
        dtype, shape = shapes.pop()
        if state.untouched:
            assert isinstance(state.value, Tensor)
            adapted[-1] = replace(state, value=_as_default(title, state, getattr(torch, dtype), shape))
    return adapted


def _as_default(title: str, state: State, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    assert isinstance(state.value, Tensor)
    try:
        return state.value.to(dtype).expand(shape).contiguous()
    except RuntimeError:
        raise RankMismatchError(
            f"{title}: state `{state.name}`",
            expected=f"a default that fits the other ranks' shape {shape}",
            got=f"{tuple(state.value.shape)} on a rank without data",
            fix="Give every rank data before compute.",
        ) from None


def _told(value: Tensor | list[Tensor]) -> tuple[str, list[int]]:
    return (str(value.dtype)[6:], list(value.shape)) if isinstance(value, Tensor) else ("", [])


def _differing(texts: Sequence[str]) -> list[str]:
    """The parts, between semicolons and commas, that not all texts have."""
    parts = [[part.strip() for part in text.replace("; ", ", ").split(", ")] for text in texts]
    common = set(parts[0]).intersection(*parts[1:])
    return [
        ", ".join(part for part in own if part not in common) or text for own, text in zip(parts, texts, strict=True)
    ]


def _refuse(what: str, expected: str, told: Sequence[str], fix: str) -> None:
    raise RankMismatchError(what, expected=expected, ranks=told, fix=fix, collective=True)
