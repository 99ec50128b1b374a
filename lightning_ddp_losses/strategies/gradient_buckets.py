"""Gradients replaced by their means over ranks: small ones flat in one buffer, large ones each in its own memory.

What is complete while backward still runs leaves then (``EarlyGradients``); few bytes need no collective of their own and travel in a
handshake that is exchanged anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.compat import tensor_version
from lightning_ddp_losses.distributed import process_groups, raw_collectives


class GradientBucket:
    """The small gradients of one backward in one flat buffer, which opens with flags.

    Args:
        parameters: Whose gradients travel; one without a gradient contributes zeros and keeps none.
        dtype: Of the buffer.
        flags: This rank's small integers, as many on every rank.

    Communication: one all-reduce (for few bytes on the CPU one gather), started by ``launch`` and awaited by ``finish``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, flags: Sequence[int] = ()) -> None:
        self._parameters, self._dtype, self._flags = parameters, dtype, flags
        self._grads = [dense_gradient(parameter) for parameter in parameters]
        self._wait: Callable[[], Tensor] | None = None

    def launch(self) -> None:
        """Pack flags and gradients, and start their mean over ranks."""
        pieces = []
        if self._flags:
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            pieces.append(torch.tensor(self._flags, dtype=self._dtype, device=device))
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            own = parameter.new_zeros(parameter.numel()) if grad is None else grad.detach().reshape(-1)
            pieces.append(own.to(self._dtype))
        if pieces:
            self._wait = raw_collectives.start_mean(torch.cat(pieces))

    def finish(self) -> list[int]:
        """Wait, write the means into the gradients, and return the sums of the flags over ranks."""
        if self._wait is None:
            return []
        mean, world_size = self._wait(), process_groups.world_size()
        num_flags, sums = len(self._flags), list[int]()
        if num_flags:
            sums = [round(value * world_size) for value in mean[:num_flags].tolist()]
        unpack_mean_(mean[num_flags:], self._parameters, self._grads)
        return sums

    def discard(self) -> None:
        """Wait for the means, and leave the gradients as they are."""
        if self._wait is not None:
            self._wait()


class EarlyGradients:
    """The gradients of one backward as they are once it has passed the losses, while the model's own are still to come.

    The call check's handshake carries which of them are there, and themselves where they are few bytes on the CPU. Other small ones on
    the CPU leave in a bucket then, beside the rest of backward.

    Args:
        parameters: All that the strategy reduces.
        dtype: On the wire.
        is_inline: Whether the gradients travel in the handshake; the same on every rank.
        is_small: Of each, whether it may travel in the bucket.

    Attributes:
        flags: ``gradient_flag`` of each.
        sums: The flags, summed over ranks; known after ``start``.

    Communication: one all-reduce (for few bytes one gather) between ``start`` and ``finish``; none where they are inline or on a device.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, *, is_inline: bool, is_small: Sequence[bool]
    ) -> None:
        self._parameters, self._dtype = parameters, dtype
        self._is_inline, self._is_small = is_inline, is_small
        self._flag_format = struct.Struct(f"<{len(parameters)}I")
        self._seen = [SeenGradient(parameter) for parameter in parameters]
        self._payloads: Sequence[bytes | memoryview] = ()
        self._bucket: GradientBucket | None = None
        self.flags = [gradient_flag(parameter.grad) for parameter in parameters]
        self.sums: list[int] = []

    @staticmethod
    def num_bytes(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> int:
        """Return how many bytes travel inline when all have a gradient."""
        return sum(4 + parameter.numel() * dtype.itemsize for parameter in parameters)

    def pack(self) -> bytes:
        """Return this rank's bytes for the handshake: a flag each, and what is there if inline."""
        packed = self._flag_format.pack(*self.flags)
        if not self._is_inline:
            return packed
        grads = [
            grad.detach().reshape(-1).to(self._dtype)
            for grad in map(dense_gradient, self._parameters)
            if grad is not None
        ]
        if grads:
            packed += raw_collectives.host_bytes(torch.cat(grads))
        return packed

    def start(self, payloads: Sequence[bytes | memoryview]) -> None:
        """Take what ``pack`` returned on each rank, in rank order, and let the bucket leave."""
        flags = [self._flag_format.unpack_from(payload) for payload in payloads]
        self.sums = [sum(column) for column in zip(*flags, strict=True)]
        self._payloads = payloads
        if self._is_inline or not {0, len(payloads)}.issuperset(self.sums):
            return  # ranks that hold different gradients: the caller raises
        packed = [
            p
            for p, total, is_small in zip(self._parameters, self.sums, self._is_small, strict=True)
            if total and is_small
        ]
        # on a device what is launched in backward would share its order with DDP's
        if packed and all(p.device.type == "cpu" for p in self._parameters):
            self._bucket = GradientBucket(packed, self._dtype)
            self._bucket.launch()

    def find_grown(self) -> list[int]:
        """Return the positions of the parameters whose gradients were written to or replaced since."""
        return [i for i, seen in enumerate(self._seen) if seen.has_changed()]

    def finish(self) -> list[bool]:
        """Put means in place; returns for each parameter whether its gradient is one."""
        if self._is_inline:
            self._unpack_()
            return [True] * len(self._parameters)
        if self._bucket is None:
            return [False] * len(self._parameters)
        self._bucket.finish()
        return list(self._is_small)

    def discard(self) -> None:
        """Wait for what is on its way, and leave the gradients as they are."""
        if self._bucket is not None:
            self._bucket.discard()

    def _unpack_(self) -> None:
        """Write the means of what all ranks packed into the gradients."""
        world_size = len(self._payloads)
        present = [p for p, total in zip(self._parameters, self.sums, strict=True) if total]
        if not present:
            return
        # (W, n) on every rank, added in rank order
        start = self._flag_format.size
        rows = bytearray().join([payload[start:] for payload in self._payloads])
        mean = torch.frombuffer(rows, dtype=self._dtype).view(world_size, -1).mean(0)
        grads = [dense_gradient(parameter) for parameter in present]
        assert all(grad is not None for grad in grads)  # the sums of the flags say so
        unpack_mean_(mean, present, grads)


def unpack_mean_(mean: Tensor, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Write a flat mean into gradients.

    Args:
        mean: (n,), of all parameters, one after the other.
        parameters: In the order in which they were packed.
        grads: Of each, what is overwritten; None: its part of the mean is left out.
    """
    offset = 0
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            grad.copy_(mean[offset : offset + parameter.numel()].view(grad.shape))
        offset += parameter.numel()


def launch_in_place(grad: Tensor, wire_dtype: torch.dtype | None) -> Callable[[], None]:
    """Start replacing one large gradient by its mean over ranks, in its own memory where dtypes allow.

    Args:
        grad: Dense, on every rank.
        wire_dtype: dtype on the wire; None: its own, which needs no copy.

    Returns:
        What waits for the mean and puts it in place.

    Communication: one all-reduce.
    """
    own = grad.detach()
    travelling = own if wire_dtype is None else own.to(wire_dtype)
    wait = raw_collectives.start_mean(travelling.contiguous())

    def finish() -> None:
        mean = wait()
        if mean is not own and mean.data_ptr() != own.data_ptr():
            own.copy_(mean)

    return finish


def gradient_flag(grad: Tensor | None) -> int:
    """Return 0 without a gradient, 1 with one, more than all ranks together for a sparse one, which cannot be reduced."""
    if grad is None:
        return 0
    return process_groups.world_size() + 1 if grad.is_sparse else 1


def dense_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient; None where there is none, or a sparse one."""
    grad = parameter.grad
    return None if grad is None or grad.is_sparse else grad


class SeenGradient:
    """A parameter's gradient as it is now, to know later whether it was written to or replaced.

    The tensor is held, and no id of it: a tensor that is made when it is gone may have the same id, and the same version.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter, self._grad = parameter, parameter.grad
        self._version = _version(self._grad)

    def has_changed(self) -> bool:
        """Say whether the parameter has another gradient by now, or one with other numbers."""
        grad = self._parameter.grad
        return grad is not self._grad or _version(grad) != self._version


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else tensor_version(grad)
