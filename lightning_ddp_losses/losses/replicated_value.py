"""The value that every rank computes in full: it is the same on all ranks, or their losses differ in something that no comparison reads."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import RankMismatchError

_COMPARED_ON_DEVICE = 16  # calls of which an accelerator compares one: a copy to the host is a launch
_SENT = struct.Struct("<?d")  # whether there is a value, and the value


class ReplicatedValue:
    """Remembers the value of a call until the next one, in which ranks compare it. To read it immediately would wait for an accelerator.

    Args:
        wanted: False if ranks may differ for a while, as if they average weights every few steps.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._value: float | HostCopy | None = None
        self._dtype = torch.float32
        self._calls = 0

    def note(self, value: Any, group: Group) -> None:
        """Remember a value. Of a nest of values, the first one that has a gradient, or else the first."""
        if not self._wanted or process_groups.world_size(group) == 1:
            return
        found = [tensor for tensor in inputs.tensors_in(value) if tensor.is_floating_point()]
        if not found:
            return
        number = next((tensor for tensor in found if tensor.requires_grad), found[0]).detach()
        self._calls += 1
        if not number.is_cpu and self._calls % _COMPARED_ON_DEVICE != 1:
            return
        total = number.sum() if number.ndim else number
        self._value = total.item() if total.is_cpu else HostCopy(total)
        self._dtype = total.dtype

    def take(self) -> bytes:
        """Return the value of the call before as bytes for a handshake. It is not returned again."""
        value = self._value
        self._value = None
        if isinstance(value, HostCopy):
            value = value.read().item()
        return _SENT.pack(value is not None, value or 0.0)

    def refuse_other(self, title: str, sent: Sequence[bytes]) -> None:
        """Refuse values that differ.

        Args:
            title: Name of the loss in messages.
            sent: The bytes of all ranks.

        Raises:
            RankMismatchError: on every rank.
        """
        if len(set(sent)) == 1:
            return
        known, values = zip(*(_SENT.unpack(each) for each in sent), strict=True)
        # a different order of summation does not count as a difference
        rounding = torch.finfo(self._dtype).eps ** 0.5
        if not all(known) or all(_is_close(value, values[0], rounding) for value in values):
            return
        raise RankMismatchError(
            f"{title}: value of the call before, which each rank computes from the rows of all ranks",
            expected="the same on every rank",
            ranks=[f"{value:.8g}" for value in values],
            fix="The ranks' losses differ in something that is not compared: a number inside an object or a function, a buffer, a random "
            "number, or an argument that is no batch. Make it equal on all ranks.",
            collective=True,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy has computed nothing yet
        return functools.partial(ReplicatedValue, wanted=self._wanted), ()


def _is_close(value: float, other: float, rounding: float) -> bool:
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) == math.isnan(other)
    # a small loss is the difference of larger numbers
    return math.isclose(value, other, rel_tol=rounding, abs_tol=rounding)
