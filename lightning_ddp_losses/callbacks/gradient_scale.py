"""The scale probe: is the gradient that DDP will average the derivative of the loss that training_step returns?

Let M be the mean over ranks of the returned value, as a function of each rank's own copy of the parameters. Where gathers, sums
over ranks and factors are right, M's derivative along any directions v_r equals (1/W) sum_r <g_r, v_r>, with g_r what backward
gives on rank r. A gather that cuts the graph leaves 1/W of it.

It runs once, before the first step, in float64, on a copy of the module: a forward with its gradient, and two more for each
part of the module. It is relative to the value returned, so a constant factor on that value is not seen. Ratios other than 1/W
and W say nothing: a stop-gradient or a straight-through estimator is no fault.

Legend: ``W`` ranks, ``v`` a random direction, ``g`` the gradient on one rank.
"""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ddp_losses.callbacks.meeting import Meeting
from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.core.random_state import global_generators, preserve_random_state
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.shard import shard_of

STEP = 1e-5
MOST_BYTES = 1 << 29  # of the copy, in float64
MOST_PARTS = 4
_CLOSE = 1e-3  # float64 derivatives of smooth losses agree to 1e-6; a kink between the two points spoils that


@dataclass(frozen=True)
class Part:
    """The figures of one child of the module.

    Attributes:
        name: Its name.
        ratio: Gradient over derivative; 1 is right.
        shared: Whether moving rank 0's copy alone moves what other ranks return (asked where the ratio is 1/W or W).
    """

    name: str
    ratio: float
    shared: bool

    def is_about(self, ratio: float) -> bool:
        """Whether the ratio is that one."""
        return abs(self.ratio / ratio - 1) < _CLOSE


@dataclass(frozen=True)
class Probed:
    """What the probe found.

    Attributes:
        parts: Children of the module whose derivative is not zero.
        operations: Collectives that the forward ran.
        multiplied: Whether the returned value is W times a loss: by pytorch-metric-learning's wrapper, or in the graph.
    """

    parts: list[Part]
    operations: list[str]
    multiplied: bool


def probe(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int, meeting: Meeting) -> Probed | None:
    """Compare the gradient with the derivative, part by part; None where the module cannot be probed.

    Communication: what 1 + 2 * parts forwards of the module and one backward run, a frame after each, and one gather for each part.
    """
    twin = _Twin(trainer, module, batch, index)
    if not _everywhere(meeting, twin.is_ready):
        return None
    with _Names() as names:
        value = twin.value({})
    if not _everywhere(meeting, value is not None) or value is None:
        return None
    if not _everywhere(meeting, value.requires_grad):
        return None
    multiplied = _is_multiple(value, process_groups.world_size()) or any(
        type(m).__name__ == "DistributedLossWrapper" for m in module.modules()
    )
    gradients = twin.gradients(value)
    parts = []
    for name, members in _parts(module).items():
        moves = twin.directions(members)
        given = sum(float((g * v).sum()) for n, v in moves.items() if (g := gradients.get(n)) is not None)
        ends = [twin.value(moves, sign * STEP) for sign in (1, -1)]
        own = [given, *(None if end is None else float(end.detach()) for end in ends)]
        everyone = [json.loads(row) for row in meeting.swap("scale probe", json.dumps(own).encode())]
        if any(number is None for row in everyone for number in row):
            return None
        world = len(everyone)
        sharded = any(shard_of(parameter) is not None for parameter in members.values())
        wanted = sum(plus - minus for _, plus, minus in everyone) / world / (2 * STEP)
        if abs(wanted) <= 1e-6 * max(1e-9, *(abs(plus) for _, plus, _ in everyone)):
            continue
        ratio = sum(row[0] for row in everyone) / (1 if sharded else world) / wanted
        part = Part(name, ratio, shared=False)
        if part.is_about(world) or part.is_about(1 / world):
            alone = twin.value(moves if process_groups.rank() == 0 else {}, 1e-2)
            moved = (
                alone is not None
                and process_groups.rank() > 0
                and abs(float(alone.detach() - value.detach())) > 1e-12 * abs(float(value.detach()))
            )
            shared = any(map(bool, map(json.loads, meeting.swap("scale probe", json.dumps(moved).encode()))))
            part = Part(name, ratio, shared)
        parts.append(part)
    return Probed(parts, names.seen, multiplied)


class _Twin:
    """A copy of the module in float64 whose training_step leaves no trace."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        self._trainer, self._index, self._device = trainer, index, module.device
        self.is_ready = (
            module.automatic_optimization
            and 2 * sum(p.nbytes for p in module.parameters()) <= MOST_BYTES
            and not any(hasattr(m, "_orig_mod") for m in module.modules())  # compiled: it would compile again
        )
        if self.is_ready:
            try:
                self._pristine = copy.deepcopy(module).double()
                for inner in self._pristine.modules():
                    set_dtype = getattr(inner, "set_dtype", None)  # a metric ignores double()
                    if callable(set_dtype):
                        set_dtype(torch.float64)
                self._batch = precision.cast_floating(copy.deepcopy(batch), torch.float64)
            except Exception:  # what cannot be copied is not probed
                self.is_ready = False

    def value(self, moves: Mapping[str, Tensor], by: float = 0.0) -> Tensor | None:
        """The loss with parameters moved, always from the same random state and buffers; None where that fails on any rank."""
        with _undisturbed(self._device):
            try:
                copied = self._copied = copy.deepcopy(self._pristine)
                parameters = dict(copied.named_parameters())
                with torch.no_grad():
                    for name, direction in moves.items():
                        parameters[name].add_(direction, alpha=by)
                copied._trainer = self._trainer
                for name in ("log", "log_dict"):
                    object.__setattr__(copied, name, lambda *_, **__: None)
                result = copied.training_step(copy.deepcopy(self._batch), self._index)
                handshake.all_gather("scale probe", {})
            except Exception as error:  # the real step will say it better
                _end_together(error)
                return None
        loss = result.get("loss") if isinstance(result, dict) else result
        return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None

    def gradients(self, value: Tensor) -> dict[str, Tensor | None]:
        """What backward gives on this rank, by name."""
        trained = {name: p for name, p in self._copied.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(value.sum(), list(trained.values()), allow_unused=True)
        return dict(zip(trained, found, strict=True))

    def directions(self, members: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's own random direction, in proportion to each parameter's size."""
        generator = torch.Generator().manual_seed(1009 * process_groups.rank() + len(members))
        parameters = dict(self._pristine.named_parameters())
        found = {}
        for name in members:
            p = parameters[name].detach()
            size = float(p.square().mean().sqrt()) + 1e-3
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * size
            found[name] = noise.to(p.device)
        return found


def _parts(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Trainable parameters by child: the largest child takes in what is beyond ``MOST_PARTS``."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parts.setdefault(name.split(".")[0], {})[name] = parameter
    by_size = sorted(parts, key=lambda name: -sum(p.numel() for p in parts[name].values()))
    for name in by_size[MOST_PARTS:]:
        parts[by_size[0]] |= parts.pop(name)
    return parts


def _end_together(error: Exception) -> None:
    """A forward that failed here ends on all ranks: the peers stand in a frame of a loss, or have come through to the one behind it.

    Raises:
        Exception: this one, where they stand in a collective of somebody else's.
    """
    begun = time.monotonic()
    try:
        handshake.raise_in_all_groups(error, "scale probe")
    except Exception:
        if time.monotonic() - begun > handshake.PEER_TIMEOUT.total_seconds():
            raise


def _everywhere(meeting: Meeting, mine: bool) -> bool:
    return all(json.loads(row) for row in meeting.swap("scale probe", json.dumps(mine).encode()))


def _is_multiple(value: Tensor, world: int) -> bool:
    """Whether the graph of the value begins with a product by W, among sums and products of numbers."""
    for node, _ in itertools.islice(walk_graph([value], through=_is_arithmetic), 64):
        factor = getattr(node, "_saved_other", None) if node.name().startswith(("Mul", "Div")) else None
        if isinstance(factor, Tensor) and factor.numel() == 1 and float(factor) in (float(world), 1 / world):
            return True
    return False


def _is_arithmetic(node: Any) -> bool:
    name: str = node.name()
    return name.startswith(("Mul", "Div", "Add", "Sub", "Neg", "Sum", "Mean", "Clone", "View", "ToCopy"))


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the random state of torch, Python and numpy."""
    with preserve_random_state(global_generators([device])), torch.enable_grad():
        yield


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what belongs to c10d."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(func._schema.name.rpartition("::")[2])
        return func(*args, **(kwargs or {}))
