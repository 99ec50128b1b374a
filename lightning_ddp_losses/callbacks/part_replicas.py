"""Parts of a divided model that several ranks hold (HSDP: ``fully_shard`` over a mesh of replicas x shards), compared between those ranks.

A rank's row is two numbers: which parts it holds, and one fingerprint of what is looked at. Ranks with the same first number must have
the same second one. Nothing travels where each part is on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_ddp_losses.callbacks.findings import MOST_NAMES, Finding, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import RotatingSlices, TensorSlice, divided_parameters
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed.fingerprint import combine, hash_lines, start_fingerprints
from lightning_ddp_losses.distributed.shard import local_part
from lightning_ddp_losses.strategies.fsdp_setup import replicated_dim

NAME = "parts of parameters"
"""The name of a finding whose parameters are still to be told."""


class PartRow(NamedTuple):
    """What travels where parts have replicas.

    Attributes:
        place: A hash of which parts the rank holds.
        values: One fingerprint of the slices looked at.
    """

    place: int
    values: int


@dataclass(frozen=True)
class ComparedParts:
    """Holds what was looked at at one stage, on its way to the host.

    Attributes:
        place: As ``PartRow``.
        slices: Of the parts.
        sent: Their fingerprints.
    """

    place: int
    slices: list[TensorSlice]
    sent: HostNumbers

    def row(self) -> PartRow:
        """Return what travels."""
        return PartRow(self.place, combine(self.sent.read()))

    def describe(self) -> str:
        """Return this rank's fingerprints by name, for ``explain``."""
        by_name: dict[str, list[int]] = {}
        for piece, value in zip(self.slices, self.sent.read(), strict=True):
            by_name.setdefault(piece.name, []).append(value)
        return json.dumps({"place": self.place, "values": by_name})


class PartReplicas:
    """Compares the replicas of each part.

    Args:
        max_slices: As ``RotatingSlices``.
    """

    def __init__(self, max_slices: int) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._slices = RotatingSlices(max_slices)
        self._parts: dict[str, Tensor] = {}
        self._place = 0

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find the parameters whose parts have replicas; to be called while none of them is gathered."""
        divided = divided_parameters(trainer)
        named = [(name, p) for name, p in module.named_parameters() if name in divided]
        self._parameters = {name: p for name, p in named if replicated_dim(p) is not None}
        # the objects stay, and so does what they hold, also while fully_shard has others in their place
        self._parts = {name: local_part(p.detach()) for name, p in self._parameters.items()}
        self._place = hash_lines([f"{name} {_place_of(p)}" for name, p in self._parameters.items()])
        self._slices.update(self._parts)

    def measure(self, choose: Callable[[RotatingSlices], list[TensorSlice]]) -> ComparedParts | None:
        """Look at this rank's parts; None where each part is on one rank.

        Args:
            choose: The slices of this stage.
        """
        if not self._parameters:
            return None
        slices = choose(self._slices)
        sent = start_fingerprints(piece.of(self._parts[piece.name]) for piece in slices)
        return ComparedParts(self._place, slices, sent)


def judge_parts(rows: Sequence[PartRow], fault: str) -> list[Finding]:
    """Return a finding where a part differs from its replicas."""
    odd = _odd_replicas([row.place for row in rows], [row.values for row in rows])
    if not odd:
        return []
    return [Finding(fault, NAME, "equal values on the ranks that hold the same part", odd, name=NAME)]


def explain_parts(finding: Finding, states: Sequence[Mapping[str, object]]) -> list[Finding]:
    """Name the parameters of which a part differs, and for each rank those that should hold the same."""
    places = [state["place"] for state in states]
    values = [state["values"] for state in states]
    holders = tuple(_holders(places, rank) for rank in range(len(places)))
    found = []
    for name in values[0]:  # type: ignore[attr-defined]
        odd = _odd_replicas(places, [of_rank[name] for of_rank in values])  # type: ignore[index]
        if odd:
            found.append(replace(finding, what=f"parameter `{name}`", name=name, ranks=odd, values=holders))
    return found[:MOST_NAMES] or [finding]


def _odd_replicas(places: Sequence[object], values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks that differ from what most ranks with the same part have."""
    odd: list[int] = []
    for place in set(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        their_values = [values[rank] for rank in ranks]
        odd += [ranks[number] for number in odd_ranks(their_values)]
    return tuple(sorted(odd))


def _holders(places: Sequence[object], rank: int) -> str:
    others = [str(other) for other, place in enumerate(places) if place == places[rank] and other != rank]
    return f"holds the same part as rank {', '.join(others)}"


def _place_of(parameter: nn.Parameter) -> str:
    """Return where a rank stands along the dimensions of the mesh that divide a parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    return str([coordinate for coordinate, placement in zip(place, placements, strict=True) if placement.is_shard()])
