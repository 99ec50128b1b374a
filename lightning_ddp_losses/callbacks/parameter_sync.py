"""`ParameterSyncCheck`: every rank holds the same parameters, bit for bit, by name.

A row is a hash of names, shapes, dtypes and order, and one fingerprint of all parameters of a stage. At the start the ranges of the class
shards follow. Parameters are compared one by one only if ranks differ.

Parts of a divided model may lie on several ranks (HSDP: ``fully_shard`` over a mesh of replicas x shards). Two numbers of the row are for
them: a hash of the parts that the rank holds, and one fingerprint of their values. Ranks with the same first number must have the same
second one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks import ddp_state, findings, replicas
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import DDPSnapshot, StepState
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing_columns, odd_ranks
from lightning_ddp_losses.callbacks.row_exchange import Row, Rows
from lightning_ddp_losses.distributed.fingerprint import hash_lines
from lightning_ddp_losses.distributed.shard import ClassShard, first_holders, local_part
from lightning_ddp_losses.strategies.fsdp_losses import replicated_dim

_SHARD_NUMBERS = 3  # numbers of a class shard in a row
_PARTS = "parts of parameters"  # name of a finding before its parameters are known


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


@dataclass(kw_only=True, eq=False, repr=False)
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

    Communication: 32 bytes in the shared gather, and three numbers for each class shard at the start.

    Example:
        >>> checks = DDPChecks([ParameterSyncCheck(parts=1)])  # all parameters in every step
    """

    stages = (CheckStage.BEFORE_WRAP, CheckStage.TRAIN_START, CheckStage.AFTER_STEP, CheckStage.TRAIN_END)
    faults = ("F04", "F05", "F06", "F07", "F08", "F09", "F10", "F11", "F12", "F14", "F15", "F16", "F17", "SYNC")

    parts: int = 16
    full_every_n_steps: int = 500

    def _forget(self) -> None:
        self._slices, self._structure = replicas.RotatingSlices(self.parts), 0
        # parts that several ranks hold, and a hash of those of this rank
        self._part_slices, self._place = replicas.RotatingSlices(self.parts), 0
        self._parts: dict[str, Tensor] = {}
        # of the stage that is judged: parameters, fingerprints of slices and of parts, and knowledge that may explain a difference
        self._parameters: Mapping[str, Tensor] = {}
        self._judged: tuple[replicas.SentFingerprints, replicas.SentFingerprints, StepState] | None = None
        self._is_first_step = True

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the snapshot of DDP's state."""
        self.runner.shared(DDPSnapshot)

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Drop references to the fit."""
        self._parameters, self._parts, self._judged = {}, {}, None

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return a hash of the names, one fingerprint of this stage's slices, and at the start the shards."""
        if not replicas.is_replicated(trainer):
            return []
        is_step = stage == CheckStage.AFTER_STEP
        # looked up once per batch. At other stages they may be others
        parameters = self.runner.replicated_parameters() if is_step else replicas.replicated_parameters(trainer, module)
        if stage == CheckStage.BEFORE_WRAP:
            self._parameters = parameters
            return [hash_lines(_descriptions(module, parameters, buffers=True))]
        if self._slices.update(parameters):
            self._structure = hash_lines(_descriptions(module, parameters, buffers=False))
        shards: list[int] = []
        if stage == CheckStage.TRAIN_START:
            self._find_parts(trainer, module)
            for shard in replicas.class_shards(module).values():
                shards += (shard.start, shard.stop, shard.num_classes)
        number, is_full = self.runner.step // self.every_n_steps, self._is_full(stage)
        slices = self._slices.turn(number, is_full=is_full)
        sent = replicas.SentFingerprints(slices, parameters)
        parts = replicas.SentFingerprints(self._part_slices.turn(number, is_full=is_full), self._parts)
        state = StepState(self.runner, parameters, slices)

        def read() -> list[int]:
            self._parameters, self._judged = parameters, (sent, parts, state)  # for the explanation
            return [*ParameterRow(self._structure, sent.combined(), self._place, parts.combined()), *shards]

        return read if is_step else read()

    def _find_parts(self, trainer: Trainer, module: LightningModule) -> None:
        """Find the parts of divided parameters that other ranks hold too, while no parameter is gathered."""
        divided = replicas.divided_parameters(trainer)
        named = {name: p for name, p in module.named_parameters() if name in divided and replicated_dim(p) is not None}
        # the objects and their memory stay, also while fully_shard has others in their place
        self._parts = {name: local_part(p.detach()) for name, p in named.items()}
        self._place = hash_lines([f"{name} {_place_of(p)}" for name, p in named.items()])
        self._part_slices.update(self._parts)

    def _is_full(self, stage: CheckStage) -> bool:
        """Return whether this stage compares all parameters."""
        if stage != CheckStage.AFTER_STEP:
            return True
        is_first, self._is_first_step = self._is_first_step, False
        return is_first or self.runner.step % self.full_every_n_steps == 0

    # ------------------------------------------------------------------ judge

    def judge(self, table: Rows, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Compare structures first, then values, then the shards' ranges."""
        if not table[0]:
            return []
        # different names or shapes: values cannot be lined up
        found = findings.differing([row[0] for row in table], "F12", "unnamed", name="parameters")
        if found or stage == CheckStage.BEFORE_WRAP:
            return found
        own = len(ParameterRow._fields)
        rows = [ParameterRow(*row[:own]) for row in table]
        fault = "SYNC"
        if stage == CheckStage.TRAIN_START:
            fault = "F04"
            found += _judge_shards([row[own:] for row in table], list(replicas.class_shards(module)))
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

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's names, or its parameters' fingerprints with the state of their gradients and optimizers."""
        if finding.name == "parameters":
            before_wrap = finding.moment == CheckStage.BEFORE_WRAP.value
            return _descriptions(module, self._parameters, buffers=before_wrap)
        if self._judged is None or finding.name not in ("values", _PARTS):
            return None
        sent, parts, state = self._judged
        if finding.name == _PARTS:
            return {"place": self._place, "values": parts.values()}
        return {"place": 0, "values": sent.values(), **state.describe()}

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the parameters, and why they differ."""
        if finding.name == "parameters":
            return [_name_first_difference(finding, texts)]
        # by name, between the ranks that hold the same part: all ranks, unless parts have replicas
        places = [state["place"] for state in texts]
        found = []
        for name, column in differing_columns([state["values"] for state in texts]).items():
            odd = _odd_replicas(places, column)
            difference = replace(finding, what=f"parameter `{name}`", name=name, ranks=odd)
            if odd and finding.name == _PARTS:
                holders = tuple(_holders(places, rank) for rank in range(len(places)))
                found.append(replace(difference, values=holders))
            elif odd:
                found.append(ddp_state.explain_desync(difference, texts))
        return found[: findings.MOST_NAMES] or [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the parameter itself."""
        return self._parameters.get(finding.name)


def _descriptions(module: LightningModule, parameters: Mapping[str, Tensor], *, buffers: bool) -> list[str]:
    """Describe every parameter, class shard and, if asked, buffer in a line."""
    lines = []
    for name, parameter in parameters.items():
        line = f"{name} {tuple(parameter.shape)} {parameter.dtype} {parameter.device.type}"
        if not parameter.requires_grad:
            line += " frozen"
        lines.append(line)
    for name, shard in replicas.class_shards(module).items():
        lines.append(f"{name} shard of {shard.num_classes} classes")
    if buffers:
        for name, buffer in module.named_buffers():
            if not is_lazy(buffer):
                lines.append(f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}")
    return lines


def _name_first_difference(finding: Finding, lines_by_rank: Sequence[list[str]]) -> Finding:
    """Name the differences of the ranks' descriptions, by position."""
    columns = differing_columns([dict(enumerate(lines)) for lines in lines_by_rank])
    # a rank with fewer lines has "nothing" there
    shown = [(position, [line or "nothing" for line in column]) for position, column in columns.items()]
    shown = shown[: findings.MOST_NAMES]
    values = ["; ".join(f"position {at}: {column[rank]}" for at, column in shown) for rank in range(len(lines_by_rank))]
    first_names = dict.fromkeys(line.split(" ")[0] for line in shown[0][1])
    numbers: dict[str, Any] = {"number": len(columns), "longest": max(map(len, lines_by_rank))}
    return Finding.of("F12", ranks=finding.ranks, name=", ".join(first_names), values=tuple(values), **numbers)


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
