"""What one step's gradients were, as the optimizers used them: looked at right after each step, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.callbacks.replicated_parameters import Unit
from lightning_ddp_losses.distributed.fingerprint import Started, combine, finish_fingerprints, start_fingerprint


class Gradients:
    """Fingerprints and largest elements of the gradients looked at, and who has none."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.absent: list[str] = []
        self._prints: list[Started] = []
        self._sizes: list[float | Tensor] = []

    def look(self, units: Sequence[Unit], parameters: Mapping[str, Tensor], *, sizes: bool) -> None:
        """Add these pieces of the parameters' gradients; without ``sizes`` it is enough to know which are finite."""
        for unit in units:
            grad = parameters[unit.name].grad
            if grad is None or grad.is_sparse or not grad.numel():
                continue
            piece = unit.of(grad)
            self.units.append(unit)
            self._prints.append(start_fingerprint(piece))
            self._sizes.append(_largest(piece) if sizes or piece.device.type != "cpu" else _bound(piece))

    def note_absent(self, parameters: Mapping[str, Tensor]) -> None:
        """Add the names of those that take part in training and have no gradient."""
        self.absent += [name for name, p in parameters.items() if p.requires_grad and p.grad is None]

    def values(self) -> dict[str, list[int]]:
        """Fingerprints by parameter."""
        found: dict[str, list[int]] = {}
        for unit, value in zip(self.units, finish_fingerprints(self._prints), strict=True):
            found.setdefault(unit.name, []).append(value)
        return found

    def combined(self) -> int:
        """One number of all fingerprints, by their order."""
        return combine(finish_fingerprints(self._prints))

    def largest(self) -> dict[str, float]:
        """The largest element of each gradient (without ``sizes`` some number); not finite where one is not."""
        found: dict[str, float] = {}
        for unit, size in zip(self.units, map(float, self._sizes), strict=True):
            before = found.get(unit.name, 0.0)
            found[unit.name] = size if math.isnan(size) else max(before, size)
        return found


def _largest(piece: Tensor) -> Tensor:
    """The largest magnitude, NaN where there is one. (torch's infinity norm takes ten times as long.)"""
    real = torch.view_as_real(piece) if piece.is_complex() else piece
    return torch.maximum(real.amax(), -real.amin()).double()


def _bound(piece: Tensor) -> float:
    """Some finite number where all elements are finite: a sum is not finite once one element is not. Else the largest."""
    total = abs(piece.sum().item())
    return total if math.isfinite(total) else float(_largest(piece))
