"""`ParameterSyncCheck`: every rank has the same parameters, bit for bit, by name.

The facts are a hash of names, shapes, dtypes and order, and one fingerprint of the parameters that are compared at a stage. At the start
the ranges of the class shards are added. Parameters are compared one by one only if ranks differ.

Parts of a divided model may be stored on several ranks (HSDP: ``fully_shard`` over a mesh of replicas x shards). They are compared with two
numbers: a hash that identifies the parts of the rank, and one fingerprint of their values. Ranks with the same first number must have the
same second number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks import ddp_state, findings, replicas
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import DDPSnapshot, StepState
from lightning_ddp_losses.callbacks.facts.fact import Fact, Numbers
from lightning_ddp_losses.callbacks.facts.rules import (
    PARTS,
    SHARD,
    compare_parameters,
    compare_starts,
    compare_structures,
    odd_replicas,
)
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing_columns
from lightning_ddp_losses.distributed.fingerprint import combine, hash_lines, start_fingerprints
from lightning_ddp_losses.distributed.shard import local_part
from lightning_ddp_losses.strategies.fsdp_losses import replicated_dim

_EQUAL = ("structure", "values", "place", "parts")  # equal on all healthy ranks, unless parts have replicas


class SentFingerprints:
    """Fingerprints of slices, whose copy to the host has been started.

    Ranks compare one number, and compare the fingerprints by name only if it differs.

    Args:
        slices: Slices of tensors.
        tensors: The sliced tensors by name.
    """

    def __init__(self, slices: Sequence[replicas.TensorSlice], tensors: Mapping[str, Tensor]) -> None:
        self._slices = slices
        self._numbers = start_fingerprints(each.of(tensors[each.name]) for each in slices)

    def combined(self) -> int:
        """Return one number for all fingerprints, which depends on their order."""
        return combine(self._numbers.read())

    def values(self) -> dict[str, list[int]]:
        """Return the fingerprints by name."""
        found: dict[str, list[int]] = {}
        for each, value in zip(self._slices, self._numbers.read(), strict=True):
            found.setdefault(each.name, []).append(value)
        return found


@dataclass(kw_only=True, eq=False, repr=False)
class ParameterSyncCheck(RankCheck, default=True):
    """Checks that parameters are equal on all ranks, including values, names, order, shapes, dtypes, and whether they are trainable.

    In a model that ``fully_shard`` divides, each part is compared between the ranks that store it, if there are several.

    Parameters after a step are judged in the next step, before a checkpoint is saved and at the end of training (``runner``), so that the
    check does not wait for a device. The finding names the step of its parameters.

    Covers F04, F11, F12 and F16. Gradients and learning rates are used to distinguish F05-F10 (a gradient that was not synchronised) from
    F14, F15 and F17 (optimizers that differ).

    Args:
        parts: Number of parts. Each step compares one part, 1/``parts`` of the bytes. A small model has fewer parts.
        full_every_n_steps: Number of steps between passes over all parameters. All parameters are also compared at the start, after the
            first step, and at the end.
        **options: Same as in ``RankCheck``.

    Communication: 32 bytes in the shared gather, and three numbers for each class shard at the start.

    Example:
        >>> checks = DDPChecks([ParameterSyncCheck(parts=1)])  # all parameters in every step
    """

    faults = ("F04", "F05", "F06", "F07", "F08", "F09", "F10", "F11", "F12", "F14", "F15", "F16", "F17", "F37", "SYNC")
    shares = (("_snapshot", DDPSnapshot),)
    _snapshot: DDPSnapshot = field(init=False)

    parts: int = 16
    full_every_n_steps: int = 500

    def _forget(self) -> None:
        self._slices, self._structure = replicas.RotatingSlices(self.parts), 0
        self._described: dict[str, Tensor] | None = None  # parameters from which the structure was computed
        # parts that several ranks store, and a hash that identifies the parts of this rank
        self._part_slices, self._place = replicas.RotatingSlices(self.parts), 0
        self._parts: dict[str, Tensor] = {}
        # for the stage that is judged: parameters, fingerprints of slices and of parts, and data that may explain a difference
        self._parameters: Mapping[str, Tensor] = {}
        self._judged: tuple[SentFingerprints, SentFingerprints, StepState] | None = None
        self._is_first_step = True

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Drop references to the fit."""
        self._parameters, self._parts, self._judged = {}, {}, None
        self._described = None

    # ------------------------------------------------------------------ facts

    def _read_structure(self) -> Numbers | None:
        """Return a hash of the names before the wrap."""
        trainer, module = self.runner.trainer, self.runner.module
        if not replicas.is_replicated(trainer):
            return None
        self._parameters = replicas.replicated_parameters(trainer, module)
        return {"structure": hash_lines(_descriptions(module, self._parameters, buffers=True))}

    def _read_start(self) -> Numbers | None:
        """Return the numbers of all parameters, and for each class shard its first class, its end, and the number of classes."""
        self._find_parts(self.runner.module)
        numbers = self._read_all()
        if numbers is None:
            return None
        shards = replicas.class_shards(self.runner.module)
        ranges = {SHARD + name: (shard.start, shard.stop, shard.num_classes) for name, shard in shards.items()}
        return {**numbers, **ranges}

    def _read_all(self) -> Numbers | None:
        """Return the numbers of all parameters, which are looked up again."""
        trainer = self.runner.trainer
        if not replicas.is_replicated(trainer):
            return None
        return self._read(replicas.replicated_parameters(trainer, self.runner.module), is_full=True)()

    def _read_step(self) -> Callable[[], Numbers] | None:
        """Return the numbers of the parameters that are compared in this step."""
        parameters = self.runner.parameters.current()
        if not self.runner.parameters.is_replicated:
            return None
        is_first, self._is_first_step = self._is_first_step, False
        is_full = is_first or self.runner.step % self.full_every_n_steps == 0
        return self._read(parameters, is_full=is_full)

    def _read(self, parameters: dict[str, Tensor], *, is_full: bool) -> Callable[[], Numbers]:
        """Start to compute fingerprints, and return a function for the structure hash and the combined fingerprints."""
        if parameters is not self._described:
            self._described = parameters
            self._structure = hash_lines(_descriptions(self.runner.module, parameters, buffers=False))
        number = self.runner.step // self.every_n_steps
        slices = self._slices.turn(parameters, number, is_full=is_full)
        sent = SentFingerprints(slices, parameters)
        part_slices = self._part_slices.turn(self._parts, number, is_full=is_full)
        parts = SentFingerprints(part_slices, self._parts)
        state = StepState(self.runner, self._snapshot, parameters, slices)
        structure, place = self._structure, self._place

        def read() -> Numbers:
            self._parameters, self._judged = parameters, (sent, parts, state)  # for the explanation
            return {"structure": structure, "values": sent.combined(), "place": place, "parts": parts.combined()}

        return read

    def _find_parts(self, module: LightningModule) -> None:
        """Find the parts of divided parameters that are also stored on other ranks. Parameters must not be gathered at this time."""
        divided = replicas.divided_parameters(self.runner.trainer)
        named = {name: p for name, p in module.named_parameters() if name in divided and replicated_dim(p) is not None}
        # these objects and their memory remain valid while fully_shard replaces them with gathered parameters
        self._parts = {name: local_part(p.detach()) for name, p in named.items()}
        self._place = hash_lines([f"{name} {_place_of(p)}" for name, p in named.items()])

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's names, or its parameters' fingerprints with the state of their gradients and optimizers."""
        if finding.name == "parameters":
            before_wrap = finding.moment == CheckStage.BEFORE_WRAP.value
            return _descriptions(module, self._parameters, buffers=before_wrap)
        if self._judged is None or finding.name not in ("values", PARTS):
            return None
        sent, parts, state = self._judged
        if finding.name == PARTS:
            return {"place": self._place, "values": parts.values()}
        return {"place": 0, "values": sent.values(), **state.describe()}

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Add the names of the parameters, and the reasons for their differences."""
        if finding.name == "parameters":
            return [_name_first_difference(finding, texts)]
        # compare by name between the ranks that store the same part, which are all ranks unless parts have replicas
        places = [state["place"] for state in texts]
        found = []
        for name, column in differing_columns([state["values"] for state in texts]).items():
            odd = odd_replicas(places, column)
            difference = replace(finding, what=f"parameter `{name}`", name=name, ranks=odd)
            if odd and finding.name == PARTS:
                holders = tuple(_holders(places, rank) for rank in range(len(places)))
                found.append(replace(difference, values=holders))
            elif odd:
                found.append(ddp_state.explain_desync(difference, texts))
        return found[: findings.MOST_NAMES] or [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the parameter itself."""
        return self._parameters.get(finding.name)

    facts = (
        Fact("names before the wrap", CheckStage.BEFORE_WRAP, _read_structure, compare_structures),
        Fact("all parameters and class shards", CheckStage.TRAIN_START, _read_start, compare_starts),
        Fact("parameters of a step", CheckStage.AFTER_STEP, _read_step, compare_parameters, equal=_EQUAL),
        Fact("all parameters", CheckStage.TRAIN_END, _read_all, compare_parameters, equal=_EQUAL),
    )


def _descriptions(module: LightningModule, parameters: Mapping[str, Tensor], *, buffers: bool) -> list[str]:
    """Describe every parameter and class shard, and with ``buffers`` every buffer, in a line."""
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
    """Return the finding with the positions at which the descriptions of ranks differ."""
    columns = differing_columns([dict(enumerate(lines)) for lines in lines_by_rank])
    # a rank with fewer lines has "nothing" at the remaining positions
    shown = [(position, [line or "nothing" for line in column]) for position, column in columns.items()]
    shown = shown[: findings.MOST_NAMES]
    values = ["; ".join(f"position {at}: {column[rank]}" for at, column in shown) for rank in range(len(lines_by_rank))]
    first_names = dict.fromkeys(line.split(" ")[0] for line in shown[0][1])
    numbers: dict[str, Any] = {"number": len(columns), "longest": max(map(len, lines_by_rank))}
    return Finding.of("F12", ranks=finding.ranks, name=", ".join(first_names), values=tuple(values), **numbers)


def _holders(places: Sequence[object], rank: int) -> str:
    others = [str(other) for other, place in enumerate(places) if place == places[rank] and other != rank]
    return f"holds the same part as rank {', '.join(others)}"


def _place_of(parameter: nn.Parameter) -> str:
    """Return a rank's coordinates along the dimensions of the mesh that divide a parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    return str([coordinate for coordinate, placement in zip(place, placements, strict=True) if placement.is_shard()])
