"""Compares scales before the first step: is the gradient that DDP will average the derivative of the loss that training_step returns?

The mean of the returned values over ranks, M, is a function of the copies of the parameters on all ranks. If gathers, sums over ranks and
factors are correct, the derivative of M along any directions v_r equals (1/W) sum_r <g_r, v_r>, where g_r is the gradient that backward
computes on rank r. With a gather that cuts the graph, only 1/W of the derivative remains.

The comparison runs once, before the first step, in float64, on a copy of the module. It runs a forward with its gradient, and two more
forwards for each part of the module. It is relative to the returned value, so a constant factor on that value is not found. Ratios other
than 1/W and W do not prove a fault, because they may result from a stop-gradient or a straight-through estimator. With two ranks, a
stop-gradient on one side of a symmetric loss over rows of all ranks (a memory that contains the batch itself) also has the ratio 1/W. If
the gradient passes through a gather with a gradient, 1/W is therefore not evidence of a cut.

A part may receive one share of its gradient through a cut gather and another share correctly, in which case its ratio is arbitrary. For
this reason, the first forward is traced (``collective_trace.py``). If a ratio is not 1, findings name the collectives that cut the graph,
with the user's line.

Legend: ``W`` ranks, ``v`` a random direction, ``g`` the gradient on one rank.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.buffer_sync import metrics_of
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.row_exchange import RowExchange
from lightning_ddp_losses.core import inputs, lightning_compat, precision, torch_compat
from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.core.fault_rules import FAULT_OF_CUT, Scale, fault_of_scale, scale_of
from lightning_ddp_losses.core.random_state import global_generators, preserve_random_state
from lightning_ddp_losses.core.transparent import all_modules
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collective_trace import CollectiveTrace
from lightning_ddp_losses.distributed.shard import shard_of

STEP = 1e-5
MOVE_TO_SHARE = 1e-2  # distance by which one rank's copy is moved, to test whether the values of other ranks change
MAX_BYTES = 1 << 29  # largest size of the copy in float64
MAX_PARTS = 4
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_PLACE = "scale probe"  # name of this operation in handshakes
_CLOSE = 1e-3  # float64 derivatives of smooth losses agree to 1e-6, unless there is a kink between the two points
_TOO_FLAT = 1e-6  # ratio of derivative to loss below which rounding errors dominate
_MAX_NODES = 64  # number of graph nodes next to the loss that are searched for a factor
# modules of collectives with a backward that exchanges gradients, ours and torch's
_WITH_GRADIENT = ("lightning_ddp_losses.distributed.", "torch.distributed.")
# operations between the loss and a factor on it
_ARITHMETIC = ("Mul", "Div", "Add", "Sub", "Neg", "Sum", "Mean", "Clone", "View", "ToCopy")


@dataclass(frozen=True)
class PartScale:
    """Holds the figures of one child of the module.

    Attributes:
        name: Name of the child.
        ratio: Gradient divided by derivative. The correct ratio is 1.
        is_shared: True if moving only rank 0's copy changes the values of other ranks (measured if the ratio is 1/W or W).
        is_gathered: True if the gradient passes through a differentiable collective on any rank.
    """

    name: str
    ratio: float
    is_shared: bool = False
    is_gathered: bool = False

    @property
    def scale(self) -> Scale:
        """The kind of ratio that the measured ratio equals, up to rounding."""
        return scale_of(self.ratio, process_groups.world_size(), _CLOSE)

    @property
    def is_cut(self) -> bool:
        """Whether only this rank's share of the gradient arrives."""
        return self.scale == "cut"


def find_wrong_scales(
    trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, row_exchange: RowExchange
) -> list[Finding]:
    """Measure the scales, and return findings for scales that prove a fault, equal on all ranks.

    The result is empty if the trial fails on any rank.

    Communication: the collectives of 1 + 2 * parts forwards of the module and one backward, a handshake after each, one gather for each
        part, and one of the lines.
    """
    # the copy must run on every rank and return a loss with a gradient
    trial = _Trial(trainer, module, batch, batch_idx, row_exchange)
    if not all(trial.gather(trial.is_ready)):
        return []
    with CollectiveTrace() as trace:
        value = trial.value({})
    if not all(trial.gather(value is not None and value.requires_grad)) or value is None:
        return []
    # compute gradients locally. A rank that fails reports the failure before other ranks wait for it
    if not all(trial.gather(trial.prepare(value))):
        if trial.own_error is not None:  # raised only after the peers have been informed
            raise trial.own_error
        return []
    parts = _measure_parts(trial, module, value)
    if parts is None:
        return []
    return _judge_scales(parts, trial, trace.names, _cut_lines(trial, trace, value))


def _judge_scales(
    parts: list[PartScale], trial: _Trial, collectives: list[str], cut_lines: dict[str, list[str]]
) -> list[Finding]:
    """Return findings for ratios that prove a fault. ``cut_lines`` contains the user's lines that cut the graph, by kind of collective."""
    world = process_groups.world_size()
    names = " ".join(collectives)
    kind = "reduce" if "reduce" in names and "gather" not in names else "gather"
    # a ratio of 1/W or W proves a fault if the values of other ranks depend on this part
    # (but a stop-gradient may halve the gradient of rows that are gathered with it)
    proved = [part for part in parts if part.is_shared and not (part.is_cut and part.is_gathered)]
    found = [_finding(fault_of_scale("large"), part, world) for part in proved if part.scale == "large"]
    cut = [part for part in proved if part.is_cut]
    # a factor W compensates for a cut graph, so the gradient of a part that is not cut is W times too large
    if trial.is_multiplied:
        full = [replace(part, ratio=part.ratio * world) for part in parts if cut and part.scale == "right"]
        return found + [_finding(fault_of_scale("right", is_multiplied=True), part, world) for part in full]
    if not cut:
        # report collectives that cut one share of a part's gradient, unless all gradients equal the derivatives
        wrong = ", ".join(f"`{part.name}`" for part in parts if part.scale != "right")
        for of_kind, fault in FAULT_OF_CUT.items():
            lines = cut_lines.get(of_kind, []) if wrong else []
            found += [Finding.of(fault, "line", name=line, line=line, names=wrong) for line in lines]
        return found
    fault = fault_of_scale("cut", has_metrics=trial.has_metrics, kind=kind)
    lines = [] if trial.has_metrics else cut_lines.get(kind, [])
    return found + [_finding(fault, part, world, *lines[:1]) for part in cut]


def _cut_lines(trial: _Trial, trace: CollectiveTrace, value: Tensor) -> dict[str, list[str]]:
    """Return the user's lines that cut the graph of the value on any rank, by kind of collective."""
    local = [[cut.kind, cut.line] for cut in trace.reaching(value) if not cut.is_meant]
    found: dict[str, list[str]] = {}
    for kind, line in itertools.chain.from_iterable(trial.gather(local)):
        found.setdefault(kind, [])
        if line not in found[kind]:
            found[kind].append(line)
    return found


def _finding(fault: str, part: PartScale, world: int, line: str = "") -> Finding:
    known = "W" if part.ratio > 1 else "1/W"
    place = f" ({line})" if line else ""
    return Finding.of(fault, "scale", name=part.name, ratio=part.ratio, known=known, world=world, line=place)


# ---------------------------------------------------------------------- measure


def _measure_parts(trial: _Trial, module: LightningModule, value: Tensor) -> list[PartScale] | None:
    """Compare gradient and derivative for each child whose derivative is not zero. Return None if the trial fails on any rank."""
    world = process_groups.world_size()
    parts = []
    for name, members in _trained_parts(module).items():
        # compute <g, v>, and the value at both points along v
        direction = trial.directions[name]
        moved = [trial.value(direction, distance) for distance in (STEP, -STEP)]
        values = [None if each is None else float(each.detach()) for each in moved]
        rows = trial.gather([trial.along[name], *values])
        if any(None in row for row in rows):
            return None
        derivative = sum(row[1] - row[2] for row in rows) / world / (2 * STEP)
        if abs(derivative) <= _TOO_FLAT * max(1e-9, *(abs(row[1]) for row in rows)):
            continue
        # compute (1/W) sum_r <g_r, v_r>. The gradient of a shard is complete on its rank and not averaged
        gradient = sum(row[0] for row in rows)
        if all(shard_of(parameter) is None for parameter in members.values()):
            gradient /= world
        part = PartScale(name, gradient / derivative)
        if part.scale in ("large", "cut"):
            part = replace(part, is_shared=_moves_others(trial, value, direction))
            gathered = not trial.gathered.isdisjoint(members)
            part = replace(part, is_gathered=any(trial.gather(gathered)))
        parts.append(part)
    return parts


def _inner_product(gradients: Mapping[str, Tensor | None], direction: Mapping[str, Tensor]) -> float:
    total = 0.0
    for name, step in direction.items():
        gradient = gradients.get(name)
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        # torch gives dL/dRe + i dL/dIm for a complex parameter: real and imaginary part count as two numbers
        total += float((gradient.conj() * step).sum().real)
    return total


def _moves_others(trial: _Trial, value: Tensor, direction: Mapping[str, Tensor]) -> bool:
    """Move only rank 0's copy, and return whether the value on another rank changes."""
    is_first = process_groups.rank() == 0
    moved = trial.value(direction if is_first else {}, MOVE_TO_SHARE)
    has_moved = False
    if moved is not None and not is_first:
        has_moved = abs(float(moved.detach() - value.detach())) > 1e-12 * abs(float(value.detach()))
    return any(trial.gather(has_moved))


class _Trial:
    """A copy of the module in float64. Its training_step does not change the module.

    Attributes:
        is_ready: True if the copy could be made.
        gather: Function that returns a JSON value from each rank.
        own_error: Error of the probe itself on this rank.
        directions: Random direction of this rank, by part of the module. ``prepare`` sets ``directions``, ``along``, ``gathered`` and
            ``is_multiplied``.
        along: Inner product of this rank's gradient with the direction, by part.
        gathered: Names of the parameters that the value reaches through a differentiable collective.
        has_metrics: True if the module has metrics.
        is_multiplied: True if the returned value is W times a loss: by pytorch-metric-learning's wrapper, or in the graph.
    """

    own_error: Exception | None = None
    gathered: set[str]
    is_multiplied: bool

    def __init__(
        self, trainer: Trainer, module: LightningModule, batch: Any, index: int, row_exchange: RowExchange
    ) -> None:
        self.gather = functools.partial(row_exchange.gather_json, _PLACE)
        self._trainer, self._index, self._device = trainer, index, module.device
        self.directions: dict[str, dict[str, Tensor]] = {}
        self.along: dict[str, float] = {}
        self.is_ready, self.has_metrics = _can_be_copied(module), bool(metrics_of(module))
        if self.is_ready:
            try:
                self._pristine = _double_(copy.deepcopy(module))
                floating = precision.cast_floating(copy.deepcopy(batch), torch.float64)
                self._batch = inputs.map_tensors(functools.partial(precision.as_dtype, dtype=torch.float64), floating)
            except Exception:  # the trial is skipped if the module cannot be copied
                self.is_ready = False

    def value(self, direction: Mapping[str, Tensor], distance: float = 0.0) -> Tensor | None:
        """Return the loss with moved parameters, from the same random state and buffers, or None if this fails on any rank."""
        random_state = preserve_random_state(global_generators([self._device]))
        with random_state, torch.enable_grad():
            try:
                # make a new copy with moved parameters and without logging
                copied = self._copied = copy.deepcopy(self._pristine)
                parameters = dict(copied.named_parameters())
                with torch.no_grad():
                    for name, step in direction.items():
                        parameters[name].add_(step, alpha=distance)
                lightning_compat.attach_trainer(copied, self._trainer)
                for name in ("log", "log_dict"):
                    object.__setattr__(copied, name, lambda *_, **__: None)
                # run training_step, and wait until it has ended on all ranks
                result = copied.training_step(copy.deepcopy(self._batch), self._index)
                handshake.all_gather(_PLACE, {})
            except Exception as error:  # the real step will raise it
                _end_together(error)
                return None
        if isinstance(result, dict):
            result = result.get("loss")
        return result if isinstance(result, Tensor) and result.numel() == 1 else None

    def prepare(self, value: Tensor) -> bool:
        """Compute gradients and directions, and return whether this succeeds on this rank."""
        try:
            # read the graph before backward, which frees its saved tensors
            self.is_multiplied = _has_factor(value, process_groups.world_size())
            for inner in self._pristine.modules():
                self.is_multiplied |= type(inner).__name__ == "DistributedLossWrapper"
            self.gathered = _reached_through_collectives(value, dict(self._copied.named_parameters()))
            trained = {name: p for name, p in self._copied.named_parameters() if p.requires_grad}
            try:
                found = torch.autograd.grad(value.sum(), list(trained.values()), allow_unused=True)
            except Exception:  # the real backward will raise it
                return False
            gradients = dict(zip(trained, found, strict=True))
            for name, members in _trained_parts(self._pristine).items():
                self.directions[name] = self._direction(members)
                self.along[name] = _inner_product(gradients, self.directions[name])
        except Exception as error:  # a bug in this probe
            self.own_error = error
        return self.own_error is None

    def _direction(self, members: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Draw this rank's own random direction, in proportion to each parameter's size."""
        generator = torch.Generator().manual_seed(1009 * process_groups.rank() + len(members))
        parameters = dict(self._pristine.named_parameters())
        found = {}
        for name in members:
            parameter = parameters[name].detach()
            size = float(parameter.abs().square().mean().sqrt()) + 1e-3
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            found[name] = (noise * size).to(parameter.device)
        return found


def _can_be_copied(module: LightningModule) -> bool:
    """Return whether a copy in float64 is small enough, and runs like the module."""
    # ranks would initialise a lazy parameter of the copy differently
    if not module.automatic_optimization or any(map(is_lazy, module.parameters())):
        return False
    num_bytes = 2 * sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    is_compiled = any(torch_compat.uncompiled(inner) is not inner for inner in all_modules(module))  # copies recompile
    return num_bytes <= MAX_BYTES and not is_compiled


def _double_(module: ModuleT) -> ModuleT:
    """Convert a module to float64, including its metrics."""
    precision.cast_module_(module, torch.float64)
    for inner in module.modules():
        set_dtype = getattr(inner, "set_dtype", None)  # a metric ignores Module.to
        if callable(set_dtype):
            set_dtype(torch.float64)
    return module


def _trained_parts(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the trainable parameters by child. Children beyond ``MAX_PARTS`` are joined with the largest."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parts.setdefault(name.split(".")[0], {})[name] = parameter
    by_size = sorted(parts, key=lambda part: -sum(parameter.numel() for parameter in parts[part].values()))
    for name in by_size[MAX_PARTS:]:
        parts[by_size[0]] |= parts.pop(name)
    return parts


def _end_together(error: Exception) -> None:
    """End a forward that failed on this rank on all ranks. The peers wait in a handshake of a loss, or after their forward.

    Raises:
        Exception: the given error, if the peers wait in a foreign collective.
    """
    began = time.monotonic()
    try:
        handshake.raise_in_all_groups(error, _PLACE)
    except Exception:
        if time.monotonic() - began > handshake.PEER_TIMEOUT.total_seconds():
            raise


def _reached_through_collectives(value: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters that the value reaches through a differentiable collective in its graph."""
    collectives = [node for node, _ in walk_graph([value]) if _is_collective(node)]
    leaves = [node for node, children in walk_graph([], nodes=collectives) if not children]
    reached = {id(node.variable) for node in leaves if hasattr(node, "variable")}
    return {name for name, parameter in parameters.items() if id(parameter) in reached}


def _is_collective(node: Any) -> bool:
    function = torch_compat.function_of_node(node)
    return function is not None and function.__module__.startswith(_WITH_GRADIENT)


def _has_factor(value: Tensor, world: int) -> bool:
    """Return whether the value is multiplied by W, searching its graph through sums and products with numbers."""
    walk = walk_graph([value], through=lambda node: node.name().startswith(_ARITHMETIC))
    for node, _ in itertools.islice(walk, _MAX_NODES):
        if node.name().startswith(("Mul", "Div")):
            factor = torch_compat.saved_by_node(node, "other")
            if isinstance(factor, Tensor) and factor.numel() == 1 and float(factor) in (float(world), 1 / world):
                return True
    return False
