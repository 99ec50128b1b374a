"""`ParameterSyncCheck`: every rank holds the same parameters, bit for bit, by name.

A row is a hash of names, shapes, dtypes and order, and one fingerprint of all parameters of a stage. At the start the ranges of the class
shards follow. Parameters are compared one by one only if ranks differ.

Parts of a divided model may lie on several ranks (HSDP: ``fully_shard`` over a mesh of replicas x shards). Two numbers of the row are for
them: a hash of the parts that the rank holds, and one fingerprint of their values. Ranks with the same first number must have the same
second one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks import ddp_state
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import DDPSnapshot, StepState
from lightning_ddp_losses.callbacks.findings import MOST_NAMES, CheckStage, Finding, differing, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import (
    RotatingSlices,
    SentFingerprints,
    TensorSlice,
    class_shards,
    divided_parameters,
    is_replicated,
    replicated_parameters,
)
from lightning_ddp_losses.callbacks.report import Action
from lightning_ddp_losses.callbacks.row_exchange import Row, Rows
from lightning_ddp_losses.distributed.fingerprint import hash_lines
from lightning_ddp_losses.distributed.shard import ClassShard, first_holders, local_part
from lightning_ddp_losses.strategies.fsdp_losses import replicated_dim

_SHARD_NUMBERS = 3  # numbers of a class shard in a row
_PARTS = "parts of parameters"  # name of a finding before its parameters are known


class PartReplicas:
    """Compares the replicas of each part.

    Args:
        max_slices: Number of slices, as for ``RotatingSlices``.

    Attributes:
        place: Hash of the parts that the rank holds. 0 if no part has replicas.
    """

    def __init__(self, max_slices: int) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._slices = RotatingSlices(max_slices)
        self._parts: dict[str, Tensor] = {}
        self.place = 0

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Find the parameters with replicated parts, while none of them is gathered."""
        divided = divided_parameters(trainer)
        named = [(name, p) for name, p in module.named_parameters() if name in divided]
        self._parameters = {name: p for name, p in named if replicated_dim(p) is not None}
        # the objects and their memory stay, also while fully_shard has others in their place
        self._parts = {name: local_part(p.detach()) for name, p in self._parameters.items()}
        self.place = hash_lines([f"{name} {_place_of(p)}" for name, p in self._parameters.items()])
        self._slices.update(self._parts)

    def measure(self, choose: Callable[[RotatingSlices], list[TensorSlice]]) -> SentFingerprints | None:
        """Start the fingerprints of this rank's parts. None if each part is on one rank.

        Args:
            choose: Function that chooses the slices of this stage.
        """
        if not self._parameters:
            return None
        return SentFingerprints.of(choose(self._slices), self._parts)


class ParameterRow(NamedTuple):
    """Numbers that travel. Before the wrap only the first one.

    At the start of training, three numbers follow for each class shard: its first and last class and the number of classes.

    Attributes:
        structure: Hash of names, shapes, dtypes and order.
        values: One fingerprint of the slices of this stage.
        place: Hash of the parts that the rank holds. 0 if no part has replicas.
        parts: One fingerprint of those parts.
    """

    structure: int
    values: int
    place: int
    parts: int


@dataclass(frozen=True)
class ComparedParameters:
    """Holds the parameters of one stage and their fingerprints, on their way to the host.

    Attributes:
        parameters: Parameters by name.
        sent: Fingerprints of the slices. None before the wrap.
        parts: Fingerprints of parts that have replicas.
        state: Further knowledge that may explain a difference. None before the wrap.
    """

    parameters: Mapping[str, Tensor]
    sent: SentFingerprints | None = None
    parts: SentFingerprints | None = None
    state: StepState | None = None


class ParameterSyncCheck(RankCheck, default=True):
    """Parameters are equal on all ranks: values, names, order, shapes, dtypes, and whether they train.

    In a model that ``fully_shard`` divides, each part is compared between the ranks that hold it, if there are several.

    Parameters after a step are judged at the next one, before a checkpoint is saved and at the end of training (``runner``), so that the
    check does not wait for a device. The finding names the step of its parameters.

    Covers F04, F11, F12 and F16. Gradients and learning rates distinguish F05-F10 (a gradient that was not synchronised) from F14, F15
    and F17 (optimizers that differ).

    Args:
        parts: Number of parts. Each step compares one of them, 1/``parts`` of the bytes. A small model has fewer parts.
        full_every_n_steps: Period of a pass over all parameters. Such a pass is also at the start, after the first step, and at the end.
        **options: As ``RankCheck``.

    Communication: 40 bytes in the shared gather, and three numbers for each class shard at the start.

    Example:
        >>> checks = DDPChecks([ParameterSyncCheck(parts=1)])  # all parameters in every step
    """

    stages = (CheckStage.BEFORE_WRAP, CheckStage.TRAIN_START, CheckStage.AFTER_STEP, CheckStage.TRAIN_END)
    faults = ("F04", "F05", "F06", "F07", "F08", "F09", "F10", "F11", "F12", "F14", "F15", "F16", "F17", "SYNC")

    def __init__(
        self,
        *,
        parts: int = 16,
        full_every_n_steps: int = 500,
        every_n_steps: int = 1,
        action: Action = None,
    ) -> None:
        self.parts, self.full_every_n_steps = parts, full_every_n_steps
        super().__init__(every_n_steps=every_n_steps, action=action)

    def _forget(self) -> None:
        self._slices, self._parts = RotatingSlices(self.parts), PartReplicas(self.parts)
        self._judged = ComparedParameters({})
        self._structure = 0
        self._is_first_step = True

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the snapshot of DDP's state."""
        self.runner.shared(DDPSnapshot)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Drop references to the fit."""
        self._judged = ComparedParameters({})

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return a hash of the names, one fingerprint of this stage's slices, and at the start the shards."""
        if not is_replicated(trainer):
            return []
        is_step = stage == CheckStage.AFTER_STEP
        # looked up once per batch. At other stages they may be others
        parameters = self.runner.replicated_parameters() if is_step else replicated_parameters(trainer, module)
        if stage == CheckStage.BEFORE_WRAP:
            self._judged = ComparedParameters(parameters)
            return [hash_lines(_descriptions(module, parameters, buffers=True))]
        if self._slices.update(parameters):
            self._structure = hash_lines(_descriptions(module, parameters, buffers=False))
        shards: list[int] = []
        if stage == CheckStage.TRAIN_START:
            self._parts.start(trainer, module)
            for shard in class_shards(module).values():
                shards += (shard.start, shard.stop, shard.num_classes)
        choose = partial(self._due_slices, is_full=self._is_full(stage))
        slices = choose(self._slices)
        compared = ComparedParameters(
            parameters,
            SentFingerprints.of(slices, parameters),
            self._parts.measure(choose),
            StepState(self.runner, parameters, slices),
        )
        if is_step:
            return partial(self._read, compared)
        return [*self._read(compared), *shards]

    def _read(self, compared: ComparedParameters) -> list[int]:
        """Return the row, with the numbers that have arrived. Keep the parameters for the explanation."""
        assert compared.sent is not None
        self._judged = compared
        parts = 0 if compared.parts is None else compared.parts.combined()
        return [*ParameterRow(self._structure, compared.sent.combined(), self._parts.place, parts)]

    def _is_full(self, stage: CheckStage) -> bool:
        """Return whether this stage compares all parameters."""
        if stage != CheckStage.AFTER_STEP:
            return True
        is_first, self._is_first_step = self._is_first_step, False
        return is_first or self.runner.step % self.full_every_n_steps == 0

    def _due_slices(self, slices: RotatingSlices, *, is_full: bool) -> list[TensorSlice]:
        return slices.all() if is_full else slices.turn(self.runner.step // self.every_n_steps)

    # ------------------------------------------------------------------ judge

    def judge(self, table: Rows, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Compare structures first, then values, then the shards' ranges."""
        if not table[0]:
            return []
        # different names or shapes: values cannot be lined up
        found = differing([row[0] for row in table], "F12", "unnamed", name="parameters")
        if found or stage == CheckStage.BEFORE_WRAP:
            return found
        own = len(ParameterRow._fields)
        rows = [ParameterRow(*row[:own]) for row in table]
        fault = "SYNC"
        if stage == CheckStage.TRAIN_START:
            fault = "F04"
            found += _judge_shards([row[own:] for row in table], list(class_shards(module)))
        # the same names with other values
        values = [row.values for row in rows]
        if len(set(values)) > 1:
            found.append(Finding(fault, "parameters", "equal values on all ranks", odd_ranks(values), name="values"))
        # the same part with other values
        odd = _odd_replicas([row.place for row in rows], [row.parts for row in rows])
        if odd:
            found.append(Finding(fault, _PARTS, "equal values on the ranks that hold the same part", odd, name=_PARTS))
        return found

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> str | None:
        """Return this rank's names, or its parameters' fingerprints with the state of their gradients and optimizers."""
        if finding.name == "parameters":
            before_wrap = finding.moment == CheckStage.BEFORE_WRAP.value
            return json.dumps(_descriptions(module, self._judged.parameters, buffers=before_wrap))
        if finding.name == _PARTS and self._judged.parts is not None:
            return json.dumps({"place": self._parts.place, "values": self._judged.parts.values()})
        if finding.name != "values" or self._judged.state is None or self._judged.sent is None:
            return None
        return json.dumps({"values": self._judged.sent.values(), **self._judged.state.describe()})

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name the parameters, and why they differ."""
        states = [json.loads(text) for text in texts]
        if finding.name == "parameters":
            return [_name_first_difference(finding, states)]
        # by name, between the ranks that hold the same part: all ranks, unless parts have replicas
        places = [state.get("place") for state in states]
        found = []
        for name in states[0]["values"]:
            odd = _odd_replicas(places, [state["values"][name] for state in states])
            if not odd:
                continue
            if finding.name == _PARTS:
                holders = tuple(_holders(places, rank) for rank in range(len(places)))
                found.append(replace(finding, what=f"parameter `{name}`", name=name, ranks=odd, values=holders))
            else:
                cause = ddp_state.explain_desync(name, states, at_start=finding.fault == "F04")
                found.append(cause.finding(finding, f"parameter `{name}`", name, odd))
        return found[:MOST_NAMES] or [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the parameter itself."""
        return self._judged.parameters.get(finding.name)


def _descriptions(module: LightningModule, parameters: Mapping[str, Tensor], *, buffers: bool) -> list[str]:
    """Describe every parameter, class shard and, if asked, buffer in a line."""
    lines = []
    for name, parameter in parameters.items():
        line = f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device.type}"
        if not parameter.requires_grad:
            line += " frozen"
        lines.append(line)
    for name, shard in class_shards(module).items():
        lines.append(f"{name} shard of {shard.num_classes} classes")
    if buffers:
        for name, buffer in module.named_buffers():
            if not is_lazy(buffer):
                lines.append(f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def _name_first_difference(finding: Finding, lines_by_rank: Sequence[list[str]]) -> Finding:
    """Name the differences of the ranks' descriptions, by position."""
    # line the ranks up by position. A rank with fewer lines has "nothing" there
    longest = max(map(len, lines_by_rank))
    padded = [lines + ["nothing"] * (longest - len(lines)) for lines in lines_by_rank]
    positions = [position for position, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]
    values = [_lines_at(lines, positions[:MOST_NAMES]) for lines in padded]
    first_names = dict.fromkeys(lines[positions[0]].split(" ")[0] for lines in padded)
    name = ", ".join(first_names)
    numbers: dict[str, Any] = {"number": len(positions), "longest": longest}
    return finding.refine("F12", ranks=finding.ranks, name=name, values=tuple(values), **numbers)


def _lines_at(lines: Sequence[str], positions: Sequence[int]) -> str:
    return "; ".join(f"position {position}: {lines[position]}" for position in positions)


def _judge_shards(ranges: Sequence[Sequence[int]], names: Sequence[str]) -> list[Finding]:
    """Find class shards that do not cover each class once."""
    found = []
    for number, name in enumerate(names):
        place = _SHARD_NUMBERS * number
        shards = [ClassShard(*row[place : place + _SHARD_NUMBERS]) for row in ranges]
        if first_holders(shards) is None:
            values = tuple(f"classes {shard.start} to {shard.stop} of {shard.num_classes}" for shard in shards)
            found.append(Finding.of("F16", name=name, values=values))
    return found


# ---------------------------------------------------------------------- findings of parts


def _odd_replicas(places: Sequence[object], values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks that differ from most ranks with the same part."""
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
    """Return a rank's coordinates along the dimensions of the mesh that divide a parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    return str([coordinate for coordinate, placement in zip(place, placements, strict=True) if placement.is_shard()])
