"""Rows of unit length, as ``torch.nn.functional.normalize`` makes them, and their gradient by hand.

Autograd's own backward of a norm, a clamp and a division is 14 passes over the rows; written out it is six. A row shorter than 1e-12 is
divided by that number, which is then a constant.

Legend: ``n`` rows, ``D`` their width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.losses.products import SMALLEST_LENGTH, lengths_of


class UnitRows(NamedTuple):
    """Rows that were divided by their lengths, without their graph.

    Attributes:
        rows: (n, D).
        lengths: (n, 1), what they were divided by.
    """

    rows: Tensor
    lengths: Tensor

    def vjp(self, grad: Tensor, out: Tensor | None = None, *, has_length: Tensor | None = None) -> Tensor:
        """Return the gradient of the rows as they were, from that of the unit rows.

        Args:
            grad: (n, D).
            out: Where it goes; may be ``grad``. None: new memory.
            has_length: (n, 1), ``have_length`` of the lengths, where that is known.
        """
        if has_length is None:
            has_length = have_length(self.lengths)
        # what points along the row changes its length only; a row that is too short to be given one is multiplied and no more
        along = (self.rows * grad).sum(1, keepdim=True).mul_(has_length)
        return torch.addcmul(grad, self.rows, along, value=-1, out=out).div_(self.lengths)


def have_length(lengths: Tensor) -> Tensor:
    """Tell which lengths are not too small to be given."""
    return lengths > SMALLEST_LENGTH


def divide_by_length(rows: Tensor) -> UnitRows:
    """Divide (n, D) rows by their lengths, without gradient."""
    lengths = lengths_of(rows).unsqueeze(1)
    return UnitRows(rows.detach() / lengths, lengths)


def unit_rows(rows: Tensor) -> UnitRows:
    """Divide (n, D) rows by their lengths; the unit rows have the gradient, which is not to be differentiated once more."""
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return divide_by_length(rows)
    return UnitRows(*_UnitRows.apply(rows))  # type: ignore[no-untyped-call]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        unit = divide_by_length(rows)
        ctx.save_for_backward(*unit)
        ctx.mark_non_differentiable(unit.lengths)
        ctx.set_materialize_grads(False)
        return unit.rows, unit.lengths

    @staticmethod
    @once_differentiable_strict("a loss of unit rows")
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return (None if grad is None else UnitRows(*ctx.saved_tensors).vjp(grad),)
