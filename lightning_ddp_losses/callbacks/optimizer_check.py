"""`OptimizerCheck`: the optimizers hold what trains, with the same settings on every rank, and every rank makes the same steps."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import OptimizerSettings, differing_settings, send_gradient_scale
from lightning_ddp_losses.callbacks.findings import MOST_NAMES, CheckStage, Finding, odd_ranks, shown_names
from lightning_ddp_losses.callbacks.replicated_parameters import is_replicated, optimizer_parameters
from lightning_ddp_losses.callbacks.row_exchange import Row
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed.fingerprint import combine, fingerprints, hash_lines, start_fingerprints

_MAX_DEPTH = 3  # lists inside lists that are searched for parameters


# faults whose findings name parameters, once they are explained
_OF_PARAMETERS = ("F01", "F02", "F03", "TWICE", "F75")


class OptimizerStartRow(NamedTuple):
    """What travels at the start of training.

    Attributes:
        unregistered: How many parameters of the optimizers are not the module's.
        in_shared_memory: How many are in memory that ranks share.
        twice: How many are stepped twice.
        settings: A hash of the optimizers' settings.
        scale: The bits of the gradient scale.
        state: One number of the tensors in the optimizers' states.
    """

    unregistered: int
    in_shared_memory: int
    twice: int
    settings: int
    scale: int
    state: int


class OptimizerStepRow(NamedTuple):
    """What travels after a step.

    Attributes:
        forgotten: How many parameters with a gradient are in no optimizer.
        stood_still: 1 where two steps changed nothing.
        stepped: How many optimizers made a step.
        settings: As ``OptimizerStartRow``.
        scale: As ``OptimizerStartRow``.
    """

    forgotten: int
    stood_still: int
    stepped: int
    settings: int
    scale: int


@dataclass(frozen=True)
class SeenStep:
    """Holds what was seen after a step, parts of it on their way to the host.

    Attributes:
        named: Parameters by problem.
        stepped: As ``OptimizerStepRow``.
        settings: Of all optimizers.
        scale: Of the gradient scaler, where there is one.
        before: Fingerprints before the first step; empty where nothing is to be compared with them.
        now: The same after the second step.
    """

    named: dict[str, list[str]]
    stepped: int
    settings: OptimizerSettings
    scale: HostNumbers
    before: list[int]
    now: HostNumbers


class OptimizerCheck(RankCheck, default=True):
    """Optimizers hold what trains, once, with equal settings, scales and steps on all ranks, and their steps change something.

    A step is judged at the next one, before a checkpoint is saved and at the end of training (``runner``): the check does not wait for a
    device. The finding names its step.

    Covers F01 (a parameter with a gradient in no optimizer), F02 (an unregistered one), F03 (memory shared under spawn), F14 (a
    step skipped on some ranks), F15 (gradient scales), F17 (learning rate and other settings, restored state), F75
    (missing from a checkpoint), and steps that change nothing.

    Args:
        every_n_steps: As ``RankCheck``.
        action: As ``RankCheck``.

    Communication: at most 56 bytes in the shared gathers.

    Example:
        >>> checks = DDPChecks([OptimizerCheck(action={"warning": "log"})])
    """

    stages = (CheckStage.TRAIN_START, CheckStage.AFTER_STEP, CheckStage.SAVE)
    faults = ("F01", "F02", "F03", "F14", "F15", "F17", "F75", "STEP")
    needs_peers = False

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | str | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._forget()

    def _forget(self) -> None:
        self._named: dict[str, list[str]] = {}  # this rank's parameters by problem
        self._settings: list[dict[str, Any]] = []  # that were judged
        self._before: dict[str, int] | None = None  # fingerprints before the first step
        self._steps_seen = 0

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Forget an earlier fit."""
        self._forget()

    def see_gradients(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Remember before the first step what it should change."""
        if self._before is not None:
            return
        moving = {name: p for name, p in self.runner.replicated_parameters().items() if _has_gradient(p)}
        self._before = dict(zip(moving, fingerprints(moving.values()), strict=True))

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> Row:
        """Return numbers of problems, then what must be equal."""
        if stage == CheckStage.SAVE:
            self._named = {"F75": _unsaved(trainer, module, self.runner.checkpoint or {})}
            return [len(self._named["F75"])]
        # equal on all ranks
        sent_settings, sent_scale = OptimizerSettings(self.runner), send_gradient_scale(trainer)
        if stage == CheckStage.TRAIN_START:
            self._named = _misplaced(trainer, module)
            state = 0
            if is_replicated(trainer):
                state = self._state(trainer)
            self._settings = sent_settings.read()
            settings, scale = _compared(sent_settings, sent_scale)
            row = OptimizerStartRow(
                unregistered=len(self._named["F02"]),
                in_shared_memory=len(self._named["F03"]),
                twice=len(self._named["TWICE"]),
                settings=settings,
                scale=scale,
                state=state,
            )
            return [*row]
        named: dict[str, list[str]] = {"F01": []}
        if self._steps_seen == 0:  # looking at all gradients waits for the device: once is enough
            named["F01"] = _forgotten(trainer, module)
        before: list[int] = []
        now = HostNumbers([])
        if self._is_second_step(trainer) and self._before:
            parameters = self.runner.replicated_parameters()
            before, now = [*self._before.values()], start_fingerprints(parameters[name] for name in self._before)
        seen = SeenStep(named, len(self.runner.stepped), sent_settings, sent_scale, before, now)
        return partial(self._read, seen)

    def _read(self, seen: SeenStep) -> list[int]:
        """Return the row of a step, which is kept for the explanation."""
        self._named, self._settings = seen.named, seen.settings.read()
        stood_still = bool(seen.before) and seen.now.read() == seen.before
        settings, scale = _compared(seen.settings, seen.scale)
        return [*OptimizerStepRow(len(seen.named["F01"]), int(stood_still), seen.stepped, settings, scale)]

    def _is_second_step(self, trainer: pl.Trainer) -> bool:
        """Say whether the first two steps have been made, and something should have changed."""
        if not self.runner.stepped or self._before is None or self._steps_seen > 1:
            return False
        self._steps_seen += 1
        if self._steps_seen == 1:
            return False
        # a rate of zero changes nothing by intent
        rates = [group.get("lr", 1.0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return min(map(float, rates), default=1.0) > 0

    def _state(self, trainer: pl.Trainer) -> int:
        """Return one number for the tensors in the optimizers' states (there are some after a restart)."""
        alike = {id(parameter) for parameter in self.runner.replicated_parameters().values()}
        found: list[int] = []
        for optimizer in trainer.optimizers:
            if "ZeroRedundancy" in type(optimizer).__name__:  # each rank holds its part
                return 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in alike:
                        found += fingerprints(_state_tensors(optimizer, parameter))
        return combine(found)

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> list[Finding]:
        """Report local problems of any rank first; then what differs."""
        if stage == CheckStage.SAVE:
            return _count_problems("F75", [row[0] for row in table])
        if stage == CheckStage.TRAIN_START:
            start = [OptimizerStartRow(*row) for row in table]
            found = _count_problems("F02", [row.unregistered for row in start])
            found += _count_problems("F03", [row.in_shared_memory for row in start])
            found += _count_problems("TWICE", [row.twice for row in start])
            found += _compare_settings(start)
            states = [row.state for row in start]
            if len(set(states)) > 1:
                found.append(Finding.of("F17", "state", ranks=odd_ranks(states), name="state"))
            return found
        step = [OptimizerStepRow(*row) for row in table]
        found = _count_problems("F01", [row.forgotten for row in step])
        if all(row.stood_still for row in step):
            found.append(Finding.of("STEP", name="step"))
        # where ranks made other steps, their scales and settings differ for that reason
        stepped = [row.stepped for row in step]
        if len(set(stepped)) > 1:
            values = tuple(f"{number} optimizer steps" for number in stepped)
            return [*found, Finding.of("F14", "desync", ranks=odd_ranks(stepped), name="step", values=values)]
        return found + _compare_settings(step)

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Return names, and settings."""
        return json.dumps({"named": self._named, "settings": self._settings}, default=str)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name parameters and settings."""
        states = [json.loads(text) for text in texts]
        if finding.name == "settings":
            return [_name_settings(finding, [state["settings"] for state in states])]
        if finding.name not in _OF_PARAMETERS:
            return [finding]
        names = [*dict.fromkeys(name for state in states for name in state["named"].get(finding.name, ()))]
        what = f"{shown_names(names)} {FAULTS[finding.name].explain('optimizer').what}"
        return [replace(finding, what=what, name=", ".join(names[:MOST_NAMES]))]


def _compared(settings: OptimizerSettings, scale: HostNumbers) -> tuple[int, int]:
    """Return what ranks compare of settings and of the gradient scale, 0.0 without a scaler."""
    # the bits of the float, which travel and compare exactly as an int
    (bits,) = struct.unpack("<q", struct.pack("<d", sum(scale.read())))
    return hash_lines(map(str, settings.read())), bits


def _has_gradient(parameter: Tensor) -> bool:
    """Say whether a parameter trains and has a dense gradient other than zero."""
    if not parameter.requires_grad or parameter.grad is None or parameter.grad.is_sparse:
        return False
    return bool(parameter.grad.count_nonzero())


def _state_tensors(optimizer: Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's state of a parameter, by name."""
    for _, value in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            yield value


# ---------------------------------------------------------------------- findings


def _count_problems(fault: str, counts: Sequence[int]) -> list[Finding]:
    """Report a problem that any rank has; the names follow when it is explained."""
    ranks = tuple(rank for rank, count in enumerate(counts) if count)
    if not ranks:
        return []
    if len(ranks) == len(counts):
        ranks = ()
    what = f"{max(counts)} parameters"
    return [Finding(fault, what, "", ranks, fault, fix=FAULTS[fault].explain("optimizer").fix)]


def _compare_settings(rows: Sequence[OptimizerStartRow] | Sequence[OptimizerStepRow]) -> list[Finding]:
    found = []
    scales = [row.scale for row in rows]
    if len(set(scales)) > 1:
        values = struct.unpack(f"<{len(scales)}d", struct.pack(f"<{len(scales)}q", *scales))
        found.append(Finding.of("F15", "desync", ranks=odd_ranks(scales), name="scale", values=values))
    settings = [row.settings for row in rows]
    if len(set(settings)) > 1:
        found.append(Finding.of("F17", "desync", ranks=odd_ranks(settings), name="settings"))
    return found


def _name_settings(finding: Finding, settings_by_rank: Sequence[list[dict[str, Any]]]) -> Finding:
    """Name the settings of the first parameter group that differs."""
    differing = differing_settings(settings_by_rank)
    if differing is not None:
        name = ", ".join(differing.keys)
        what = f"{name} of parameter group {differing.group}"
        return replace(finding, what=what, name=name, values=differing.values)
    return replace(finding, values=tuple(f"{len(groups)} parameter groups" for groups in settings_by_rank))


# ---------------------------------------------------------------------- which parameters an optimizer holds


def _misplaced(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, list[str]]:
    """Return by problem the names of parameters that optimizers hold wrongly."""
    names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
    is_spawned = compat.start_method(trainer.strategy) == "spawn"
    unregistered: list[tuple[str, Tensor]] = []
    in_shared_memory: list[str] = []
    twice: list[str] = []
    seen: set[int] = set()
    for place, parameter in optimizer_parameters(trainer):
        name = names.get(id(parameter), place)
        if id(parameter) not in names:
            unregistered.append((place, parameter))
        if is_spawned and parameter.is_shared():  # type: ignore[no-untyped-call]
            in_shared_memory.append(name)
        if id(parameter) in seen:
            twice.append(name)
        seen.add(id(parameter))
    # where the unregistered ones are, as the user would write it; the search takes a while
    paths: dict[int, str] = {}
    if unregistered:
        paths = {id(parameter): path for path, parameter in _hidden_parameters(module)}
    hidden = [paths.get(id(parameter), place) for place, parameter in unregistered]
    return {"F02": hidden, "F03": in_shared_memory, "TWICE": twice}


def _hidden_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters in plain attributes of the module: lists, dicts, modules inside those."""
    queue: list[tuple[str, Any, int]] = []
    for key, value in vars(module).items():
        if not key.startswith("_"):
            queue.append((f"self.{key}", value, 0))
    for path, value, depth in queue:
        if isinstance(value, nn.Module):
            yield from ((f"{path}.{name}", parameter) for name, parameter in value.named_parameters())
        elif isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, (list, tuple)) and depth < _MAX_DEPTH:
            queue += [(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        elif isinstance(value, Mapping) and depth < _MAX_DEPTH:
            queue += [(f"{path}[{key!r}]", item, depth + 1) for key, item in value.items()]


def _forgotten(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Return parameters with a gradient that no optimizer holds; copies that nobody trains have none."""
    in_optimizers = {id(parameter) for _, parameter in optimizer_parameters(trainer)}
    forgotten = []
    for name, parameter in module.named_parameters():
        if id(parameter) in in_optimizers or not parameter.requires_grad or parameter.grad is None:
            continue
        gradient = parameter.grad
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        if gradient.count_nonzero():
            forgotten.append(name)
    return forgotten


def _unsaved(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return what optimizers hold and the checkpoint does not, by name: an averaged copy may stand for a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    saved = set(checkpoint.get("state_dict", ()))
    unsaved = []
    for place, parameter in optimizer_parameters(trainer):
        own_names = names.get(id(parameter), [])
        if parameter.requires_grad and not saved.intersection(own_names):
            unsaved.append((*own_names, place)[0])
    return unsaved
