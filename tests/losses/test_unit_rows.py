"""Rows of unit length by hand: torch's own, bit for bit; and its gradient, also of rows too short to be given a length."""

from __future__ import annotations

import torch
from torch import nn

from lightning_ddp_losses.losses.products import divide_by_length, unit_rows


def test_rows_and_gradient_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    rows[1], rows[2], rows[3] = 0, 1e-14 * rows[2], 1e-11 * rows[3]  # none, shorter than 1e-12, longer
    expected, got = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    unit, theirs = unit_rows(got), nn.functional.normalize(expected, dim=1)
    assert torch.equal(unit.rows, theirs)
    (unit.rows * weight).sum().backward()
    (theirs * weight).sum().backward()
    torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert not unit.lengths.requires_grad


def test_without_gradient_there_is_no_graph() -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert unit_rows(rows).rows.grad_fn is None
    with torch.no_grad():
        assert torch.equal(unit_rows(rows.requires_grad_()).rows, divide_by_length(rows).rows)
