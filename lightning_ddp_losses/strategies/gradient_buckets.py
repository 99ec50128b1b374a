"""Gradients on their way to their mean over ranks: small ones in one buffer, large ones each in its own memory.

The buffer opens with a has-gradient flag per managed parameter. All of it may travel while the encoder's backward still
runs: the losses come first in backward, so their gradients are complete when it starts. What is added to a gradient
afterwards is noticed, and sent too. A few bytes need no collective: they ride in the frame (``Passengers``).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from lightning_ddp_losses.distributed import process_groups, raw_collectives


class Departure:
    """The gradients of one backward, under way: the packed ones first, then the large ones, in this order on every rank.

    Args:
        parameters: All managed ones.
        small: Which of them travel packed.
        large: Which of them travel alone. They have no gradient until ``finish``.
        dtype: Of the buffer.
        wire: dtype of the large ones on the wire; None: their own, which needs no copy.
        with_flags: Whether a flag per parameter travels with the packed ones.

    Communication: one all-reduce (for few bytes on the CPU one gather), one more for each large one; started here,
        awaited in ``finish``.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        small: Sequence[bool],
        large: Sequence[bool],
        dtype: torch.dtype,
        wire: torch.dtype | None,
        *,
        with_flags: bool = True,
    ) -> None:
        self._parameters, self._small, self._wire = parameters, list(small), wire
        self._dtype, self._with_flags = dtype, with_flags
        self._flags = [gradient_flag(p.grad) for p in parameters]
        self._stamps = [_stamp(p.grad) for p in parameters]
        self._packed = self._pack()
        self._large = {i: _LargeMean(parameters[i], wire) for i in compress(range(len(parameters)), large)}

    def grown(self) -> list[int]:
        """Places of the parameters to whose gradients something was added since."""
        grads = [p.grad for p in self._parameters]
        return [
            i
            for i, (stamp, grad) in enumerate(zip(self._stamps, grads, strict=True))
            if (grad is not None if i in self._large else stamp != _stamp(grad))
        ]

    def finish(self, grown: Collection[int] = ()) -> list[int]:
        """Wait for everything, put it in place, and return the sums of the flags; what has grown is sent too."""
        if any(i not in self._large for i in grown):
            self._packed.finish(write=False)
            self._flags = [
                flag if i in self._large else gradient_flag(p.grad)
                for i, (flag, p) in enumerate(zip(self._flags, self._parameters, strict=True))
            ]
            self._packed = self._pack()
        counts = self._packed.finish()
        for index, mean in self._large.items():
            mean.finish(grown=index in grown)
        return counts

    @property
    def aboard(self) -> list[bool]:
        """Which of the parameters travel."""
        return [small or i in self._large for i, small in enumerate(self._small)]

    @property
    def flags(self) -> list[int]:
        """This rank's flags."""
        return self._flags

    def _pack(self) -> _PackedMean:
        flags = self._flags if self._with_flags else []
        return _PackedMean(compress(self._parameters, self._small), flags, self._dtype)


class Passengers:
    """The gradients of one backward as bytes in a frame: a flag for each parameter, then what is there, by the flags.

    Args:
        parameters: All managed ones.
        dtype: On the wire.
    """

    _flag = struct.Struct("<I")

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters, self._dtype = parameters, dtype
        self.flags = [gradient_flag(p.grad) for p in parameters]
        self._stamps = [_stamp(p.grad) for p in parameters]
        self._tickets: Sequence[bytes] = ()
        self.aboard = [True] * len(parameters)

    @classmethod
    def size(cls, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> int:
        """Bytes, when all have a gradient."""
        return sum(cls._flag.size + p.numel() * dtype.itemsize for p in parameters)

    def ticket(self) -> bytes:
        """This rank's bytes."""
        flags = b"".join(map(self._flag.pack, self.flags))
        own = [g.detach().reshape(-1).to(self._dtype) for g in map(_dense, self._parameters) if g is not None]
        return flags + (raw_collectives.host_bytes(torch.cat(own)) if own else b"")

    def board(self, tickets: Sequence[bytes]) -> None:
        """Take the bytes of all ranks, in rank order."""
        self._tickets = tickets

    def grown(self) -> list[int]:
        """Places of the parameters to whose gradients something was added since."""
        return [
            i
            for i, (stamp, p) in enumerate(zip(self._stamps, self._parameters, strict=True))
            if stamp != _stamp(p.grad)
        ]

    def finish(self, grown: Collection[int] = ()) -> list[int]:
        """Put the means in place and return the sums of the flags; what has grown is sent anew, with all others."""
        if grown:
            self.flags = [gradient_flag(p.grad) for p in self._parameters]
            return _PackedMean(self._parameters, self.flags, self._dtype).finish()
        world, num_bytes = len(self._tickets), self._flag.size * len(self._parameters)
        flags = [[flag for (flag,) in self._flag.iter_unpack(t[:num_bytes])] for t in self._tickets]
        counts = [sum(column) for column in zip(*flags, strict=True)]
        present = [p for p, count in zip(self._parameters, counts, strict=True) if count == world]
        if set(counts) - {0, world} or not present:  # the caller tells; nothing was touched
            return counts
        data = bytearray().join(t[num_bytes:] for t in self._tickets)
        mean = torch.frombuffer(data, dtype=self._dtype).view(world, -1).mean(0)
        offset = 0
        for parameter in present:
            assert parameter.grad is not None
            parameter.grad.copy_(mean[offset : offset + parameter.numel()].view(parameter.shape))
            offset += parameter.numel()
        return counts


class _PackedMean:
    """The mean of small gradients; a parameter without one contributes zeros and keeps none."""

    def __init__(self, parameters: Iterable[nn.Parameter], flags: Sequence[int], dtype: torch.dtype) -> None:
        self._parameters = list(parameters)
        self._grads = [_dense(p) for p in self._parameters]
        self._num_flags = len(flags)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        pieces = [torch.tensor(flags, dtype=dtype, device=device)] if flags else []
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            own = parameter.new_zeros(parameter.numel()) if grad is None else grad.detach().reshape(-1)
            pieces.append(own.to(dtype))
        self._finish = raw_collectives.start_mean(torch.cat(pieces)) if pieces else None

    def finish(self, *, write: bool = True) -> list[int]:
        if self._finish is None:
            return []
        mean, world = self._finish(), process_groups.world_size()
        counts = [round(value * world) for value in mean[: self._num_flags].tolist()]
        offset = self._num_flags
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is not None and write:
                grad.copy_(mean[offset : offset + grad.numel()].view(grad.shape))
            offset += parameter.numel()
        return counts


class _LargeMean:
    """The mean of one large gradient, in its own memory where dtypes allow.

    While it travels the parameter has no gradient: what backward adds lands beside it, and neither spoils the other.
    """

    def __init__(self, parameter: nn.Parameter, wire: torch.dtype | None) -> None:
        self._parameter, self._wire, self._grad = parameter, wire, parameter.grad
        self._dense = _dense(parameter)
        own = torch.zeros_like(parameter) if self._dense is None else self._dense.detach()
        self._mean = raw_collectives.start_mean((own if wire is None else own.to(wire)).contiguous())
        parameter.grad = None

    def finish(self, *, grown: bool) -> None:
        mean = self._mean()
        if self._dense is not None and mean.data_ptr() != self._dense.data_ptr():
            self._dense.copy_(mean)
        if grown:  # on every rank: the mean of a sum is the sum of the means
            late = _LargeMean(self._parameter, self._wire)
            late.finish(grown=False)
            self._grad = late._grad if self._grad is None or late._grad is None else self._grad.add_(late._grad)
        self._parameter.grad = self._grad


def gradient_flag(grad: Tensor | None) -> int:
    """0 without a gradient, 1 with one, more than all ranks together for one that cannot be reduced."""
    return 0 if grad is None else process_groups.world_size() + 1 if grad.is_sparse else 1


def _dense(parameter: nn.Parameter) -> Tensor | None:
    grad = parameter.grad
    return None if grad is None or grad.is_sparse else grad


def _stamp(grad: Tensor | None) -> tuple[int, int]:
    """Which tensor it is, and how often it was written to."""
    return (0, 0) if grad is None else (id(grad), grad._version)
