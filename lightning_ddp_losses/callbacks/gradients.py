"""What one step's gradients were, as the optimizers used them: looked at right after each step, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.callbacks.tracked import Unit
from lightning_ddp_losses.fingerprint import fingerprint

__all__ = ["Gradients", "combine"]

_ODD = -7046029254386353131


class Gradients:
    """Fingerprints and largest elements of the gradients looked at, and who has none."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.absent: list[str] = []
        self._prints: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def look(self, units: Sequence[Unit], parameters: Mapping[str, Tensor]) -> None:
        """Add these pieces of the parameters' gradients."""
        for unit in units:
            grad = parameters[unit.name].grad
            if grad is None or grad.is_sparse or not grad.numel():
                continue
            piece = unit.of(grad)
            self.units.append(unit)
            self._prints.append(fingerprint(piece))
            self._sizes.append(_largest(piece))

    def note_absent(self, parameters: Mapping[str, Tensor]) -> None:
        """Add the names of those that take part in training and have no gradient."""
        self.absent += [name for name, p in parameters.items() if p.requires_grad and p.grad is None]

    def values(self) -> dict[str, list[int]]:
        """Fingerprints by parameter."""
        found: dict[str, list[int]] = {}
        for unit, value in zip(self.units, _numbers(self._prints), strict=True):
            found.setdefault(unit.name, []).append(value)
        return found

    def combined(self) -> int:
        """One number of all fingerprints, by their order."""
        return combine(_numbers(self._prints))

    def largest(self) -> dict[str, float]:
        """The largest element of each gradient; not finite where one is not."""
        found: dict[str, float] = {}
        sizes = torch.stack([s.cpu() for s in self._sizes]).tolist() if self._sizes else []
        for unit, size in zip(self.units, sizes, strict=True):
            before = found.get(unit.name, 0.0)
            found[unit.name] = size if math.isnan(size) else max(before, size)
        return found


def _largest(piece: Tensor) -> Tensor:
    """The largest magnitude, NaN where there is one. (torch's infinity norm takes ten times as long.)"""
    real = torch.view_as_real(piece) if piece.is_complex() else piece
    return torch.maximum(real.amax(), -real.amin()).double()


def _numbers(prints: Sequence[Tensor]) -> list[int]:
    """To the CPU, in one go where they are on one device."""
    if not prints:
        return []
    one = len({p.device for p in prints}) == 1
    values: list[int] = (torch.stack(list(prints)) if one else torch.stack([p.cpu() for p in prints])).tolist()
    return values


def combine(values: Sequence[int]) -> int:
    """An order-sensitive sum in 64 bits."""
    if not values:
        return 0
    numbers = torch.tensor(values, dtype=torch.int64)
    weights = torch.arange(1, len(values) + 1).mul_(_ODD).bitwise_or_(1)
    return int((numbers * weights).sum())
