"""Asynchronous copies of values from an accelerator to the host: started now, and read later, when they have long completed.

Reading a value immediately blocks the host until the device has completed all previously queued work, after which the device waits for the
host. An asynchronous copy avoids both waits. One step later it has completed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_STATM = "/proc/self/statm"  # Linux. In pages: size, resident, the part of these backed by files or shared, ...


def anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process (RssAnon of ``/proc/self/status``). 0 if the system does not expose it."""
    try:
        # a text file takes twice as long to open, and this is read in every step
        with open(_STATM, "rb", buffering=0) as file:
            resident, shared = file.read().split()[1:3]
    except OSError:  # the file does not exist on macOS
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class HostCopy:
    """A copy of a small tensor on the host, which ``read`` returns.

    Args:
        values: Tensor on any device. On the CPU it is copied immediately.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        if values.device.type == "cpu":
            self._values = values.detach().clone()
            return
        # torch uses pinned memory, which the device writes to while the host continues
        self._values = values.detach().to("cpu", non_blocking=True)
        self._event = torch.Event(values.device)
        self._event.record(torch.accelerator.current_stream(values.device))

    def read(self) -> Tensor:
        """Return the values, waiting for the copy if it has not completed yet."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


class HostNumbers:
    """Numbers in transit to the host, which ``read`` returns in order. There is one copy for each device and dtype.

    Args:
        numbers: Python numbers, or 0-dim tensors on any device.
    """

    def __init__(self, numbers: Sequence[float | Tensor]) -> None:
        self._numbers: list[Any] = [*numbers]
        # indices in the list, by device and dtype of the tensors
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, number in enumerate(numbers):
            if not isinstance(number, Tensor):
                continue
            if number.device.type == "cpu":
                self._numbers[place] = number.item()
            else:
                places.setdefault((number.device, number.dtype), []).append(place)
        self._copies: list[tuple[list[int], HostCopy]] = []
        for together in places.values():
            stacked = torch.stack([self._numbers[place].detach() for place in together])
            self._copies.append((together, HostCopy(stacked)))

    def read(self) -> list[Any]:
        """Return Python numbers, waiting for copies that have not completed yet."""
        for together, copy in self._copies:
            for place, value in zip(together, copy.read().tolist(), strict=True):
                self._numbers[place] = value
        self._copies = []
        return self._numbers


class LateNumber:
    """A product or quotient of numbers, some of which are in transit to the host. ``float`` reads it.

    Args:
        read: Function that returns the number, waiting for a copy that has not completed yet.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    @classmethod
    def of(cls, value: Tensor) -> LateNumber:
        """Return the number that a tensor on an accelerator holds."""
        copy = HostCopy(value.reshape(()))
        return cls(lambda: float(copy.read()))

    def __mul__(self, other: float | LateNumber) -> LateNumber:
        return LateNumber(lambda: float(self) * float(other))

    __rmul__ = __mul__

    def __truediv__(self, other: float | LateNumber) -> LateNumber:
        return LateNumber(lambda: _divided_or_nan(float(self), float(other)))

    def __rtruediv__(self, other: float) -> LateNumber:
        return LateNumber(lambda: _divided_or_nan(other, float(self)))

    def __neg__(self) -> LateNumber:
        return self * -1.0

    def __float__(self) -> float:
        return self._read()


def _divided_or_nan(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
