"""The losses' gradients: one mean over ranks, by name, once per synchronising backward.

Whatever this rank called, and in whatever order: gradients are read from the live module after backward, so parameters
that were created, replaced or unfrozen after the wrap take part, and no hook can be lost. It covers every trainable
parameter that the model's own DDP does not reduce (nor a shard, nor one the user told DDP to ignore).

Two steps per synchronising backward:

1. ``open``, before backward: one frame. Which losses ran, how often, on how many rows; whether they hold a gradient
   already. All ranks then know which losses are *expected* to have gradients, or raise together.
2. ``reduce``, after backward: one all-reduce of [a has-gradient flag per parameter | small gradients of expected losses]. It
   is started during backward, when that has passed through the last loss. Flags must sum to 0 or W. Gradients over
   ``LARGE_BYTES`` follow in place, one all-reduce each.

On an accelerator the flags travel by frame (host to host), so nothing waits for the device.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_ddp_losses import frames, groups, transport
from lightning_ddp_losses.errors import RankMismatchError, format_error
from lightning_ddp_losses.sharding import shard_of
from lightning_ddp_losses.strategies.disagreement import missing_calls, partial_gradients
from lightning_ddp_losses.strategies.discovery import FoundLoss
from lightning_ddp_losses.strategies.packing import PackedMean

__all__ = ["LARGE_BYTES", "LossReducer"]

LARGE_BYTES = 1 << 20
_CALL = struct.Struct("<IQ?")  # calls, rows, whether a gradient is there already


class CallCount(Protocol):
    """What the reducer needs of a guard."""

    loss: FoundLoss
    sees_global_batch: bool
    calls: int
    rows: int
    awaited: int

    def reset(self) -> None:
        """Forget the calls so far."""


@dataclass(frozen=True)
class _Managed:
    name: str
    parameter: nn.Parameter
    owner: int  # index of the loss, -1 for a parameter outside all losses


@dataclass
class Calls:
    """What the ranks said of their calls since the last synchronising backward.

    Attributes:
        expected: Per loss, whether its parameters may hold gradients.
        uneven: By title of a loss with differing rows, the rows of each rank.
    """

    expected: list[bool]
    uneven: dict[str, list[int]] = field(default_factory=dict)


class LossReducer:
    """Means the gradients of the parameters that the model's DDP leaves out.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user told DDP to leave alone.
        reduce_dtype: dtype on the wire; None: each gradient's own, and at least float32 for small ones.
    """

    def __init__(
        self,
        module: nn.Module,
        reduced_elsewhere: Sequence[Tensor],
        ignored: Sequence[str] = (),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._module = module
        # the tensors are kept, not only their ids: an id may be taken again
        self._elsewhere = {id(p): p for p in reduced_elsewhere}
        self._ignored = frozenset(ignored)
        self._reduce_dtype = reduce_dtype
        self._known: dict[str, nn.Parameter] = {}
        self._owners: dict[str, int] = {}
        self._counts: list[CallCount] = []
        self._signature: tuple[object, ...] = ()
        self._digest = ""
        self._opened: list[_Managed] | None = None
        self._calls: Calls | None = None
        self._outstanding = 0
        self._early: PackedMean | None = None

    def watch(self, counts: Sequence[CallCount]) -> None:
        """Say which losses there are; call after the first broadcast: what exists now counts as synchronised."""
        self._counts = list(counts)
        self._owners.clear()
        self._known.update({m.name: m.parameter for m in self.managed()})

    def managed(self) -> list[_Managed]:
        """Parameters to reduce, sorted by name, as the module holds them now."""
        found = []
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self._elsewhere or name in self._ignored or shard_of(parameter) is not None:
                continue
            if parameter.requires_grad or parameter.grad is not None:
                found.append(_Managed(name, parameter, self._owner(name)))
        return sorted(found, key=lambda m: m.name)

    def open(self, step: int) -> Calls:
        """Meet the peers before a synchronising backward.

        Raises:
            LossCallError: on every rank, when a learnable loss ran on some ranks only.
            RankMismatchError: on every rank, when parameters differ by name, shape or dtype, or a parameter created after
                the wrap does not start equal.

        Communication: one frame; one more in a step in which parameters appeared.
        """
        managed = self._opened = self.managed()
        self._early = None
        fresh = [m for m in managed if self._known.get(m.name) is not m.parameter]
        has_grad = {m.owner for m in managed if m.parameter.grad is not None}
        own = b"".join(_CALL.pack(c.calls, c.rows, i in has_grad) for i, c in enumerate(self._counts))
        agreed = {
            "step": step,
            "trainable parameters outside the model's DDP": self._describe(managed),
            "new parameters": ", ".join(m.name for m in fresh) or "none",
        }
        payloads = frames.exchange("backward", agreed, own, group=None)
        if fresh:
            self._admit(fresh)
        table = [list(_CALL.iter_unpack(p)) for p in payloads]
        expected: list[bool] = []
        uneven: dict[str, list[int]] = {}
        missing: list[tuple[str, Sequence[int], Sequence[int]]] = []
        for index, count in enumerate(self._counts):
            calls, rows, grads = zip(*(ranks[index] for ranks in table), strict=True)
            expected.append(any(calls) or any(grads))
            if count.loss.learnable and any(calls) and not all(calls):
                missing.append((count.loss.title, calls, rows))
            elif len(set(rows)) > 1 and not count.sees_global_batch:
                uneven[count.loss.title] = list(rows)
        self._outstanding = sum(count.awaited for count in self._counts)
        for count in self._counts:
            count.reset()
        if missing:
            raise missing_calls(missing)
        self._calls = Calls(expected, uneven)
        return self._calls

    def returned(self) -> bool:
        """Backward has passed through one call of a loss; the last one starts the small gradients on their way.

        Returns:
            Whether a backward is open that the call belongs to.
        """
        if self._opened is None:
            return False
        self._outstanding -= 1
        world = groups.world_size()
        if self._outstanding == 0 and world > 1 and self._flags_ride(self._opened):
            flags = [_flag(m.parameter.grad, world) for m in self._opened]
            self._early = self._pack(self._small(self._opened, self._calls), flags)
        return True

    def reduce(self, calls: Calls | None) -> None:
        """Replace each gradient by its mean over ranks.

        Args:
            calls: What ``open`` returned; None: nothing is known, so all small gradients take part.

        Raises:
            LossCallError: on every rank, when a parameter has a gradient on some ranks only.

        Communication: one all-reduce, one more for each gradient over ``LARGE_BYTES``; on an accelerator one frame.
        """
        # nothing is created or replaced between the two ends of a backward
        managed, world = self._opened or self.managed(), groups.world_size()
        early, self._early, self._opened, self._calls = self._early, None, None, None
        if not managed or world == 1:
            return
        flags = [_flag(m.parameter.grad, world) for m in managed]
        small = self._small(managed, calls)
        if early is not None and not early.still_holds([m.parameter for m in small], flags):
            # something was added after the losses were through; what was sent is void, and the peers must agree to that
            early.finish(write=False)
            frames.exchange("gradients that grew after their losses", {"parameters": self._describe(managed)})
            early = None
        if self._flags_ride(managed):
            counts = (early or self._pack(small, flags)).finish()
        else:
            own = json.dumps(flags).encode()
            everyone = frames.exchange("gradients", {"parameters": self._describe(managed)}, own)
            counts = [sum(column) for column in zip(*map(json.loads, everyone), strict=True)]
            small = [m for m, count in zip(managed, counts, strict=True) if count == world and m in small]
            if not set(counts) - {0, world}:
                self._pack(small, []).finish()
        if set(counts) - {0, world}:
            raise partial_gradients([m.name for m in managed], flags)
        packed = {m.name for m in small}
        for m, count in zip(managed, counts, strict=True):
            if count == world and m.name not in packed:
                self._reduce_in_place(m.parameter)

    @staticmethod
    def _flags_ride(managed: list[_Managed]) -> bool:
        # to read them back from an accelerator would wait for it
        return all(m.parameter.device.type == "cpu" for m in managed)

    def _small(self, managed: list[_Managed], calls: Calls | None) -> list[_Managed]:
        return [m for m in managed if m.parameter.nbytes <= LARGE_BYTES and self._is_expected(m, calls)]

    def _pack(self, small: list[_Managed], flags: list[int]) -> PackedMean:
        parameters = [m.parameter for m in small]
        return PackedMean(parameters, flags, self._wire_dtype(parameters))

    def _reduce_in_place(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        wire = grad.detach()
        if self._reduce_dtype is not None:
            wire = wire.to(self._reduce_dtype)
        wire = wire.contiguous()
        transport.reduce_mean_(wire)
        if wire.data_ptr() != grad.data_ptr():
            grad.copy_(wire)

    def _wire_dtype(self, parameters: Sequence[Tensor]) -> torch.dtype:
        if self._reduce_dtype is not None and groups.world_size() <= 256:  # bfloat16 counts flags exactly up to 256
            return self._reduce_dtype
        dtype = torch.float32
        for parameter in parameters:
            dtype = torch.promote_types(dtype, parameter.dtype)
        return dtype

    def _is_expected(self, m: _Managed, calls: Calls | None) -> bool:
        return calls is None or m.owner < 0 or calls.expected[m.owner]

    def _owner(self, name: str) -> int:
        if name not in self._owners:
            owner = [i for i, count in enumerate(self._counts) if name.startswith(f"{count.loss.name}.")]
            self._owners[name] = owner[0] if owner else -1
        return self._owners[name]

    def _describe(self, managed: list[_Managed]) -> str:
        signature = tuple((m.name, m.parameter.shape, m.parameter.dtype) for m in managed)
        if signature != self._signature or not self._digest:
            self._signature = signature
            text = "; ".join(f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in signature)
            self._digest = f"{text[:200]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        return self._digest

    def _admit(self, fresh: list[_Managed]) -> None:
        """Take parameters that appeared after the wrap, if they are equal on all ranks."""
        own = [hashlib.sha256(_bytes_of(m.parameter)).hexdigest() for m in fresh]
        everyone = [json.loads(p) for p in frames.exchange("new parameters", {}, json.dumps(own).encode())]
        differ = [m.name for m, column in zip(fresh, zip(*everyone, strict=True), strict=True) if len(set(column)) > 1]
        if differ:
            raise RankMismatchError(
                format_error(
                    "parameters created or replaced after the wrap",
                    expected="equal values on all ranks",
                    got=f"different values of {', '.join(f'`{name}`' for name in differ)}",
                    fix="Create them in __init__ or configure_model, where they are broadcast, or from the same seed on every rank.",
                ),
                collective=True,
            )
        self._known.update({m.name: m.parameter for m in fresh})


def _bytes_of(parameter: Tensor) -> bytes:
    return parameter.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _flag(grad: Tensor | None, world: int) -> int:
    """0 without a gradient, 1 with one, more than all ranks together for one that cannot be reduced."""
    return 0 if grad is None else world + 1 if grad.is_sparse else 1
