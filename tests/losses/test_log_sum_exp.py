"""The running log-sum-exp equals torch's, however the entries arrive."""

from __future__ import annotations

import pytest
import torch

from lightning_ddp_losses.losses.products import RunningLogSumExp

ROWS, COLUMNS = 5, 12


def entries(dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator, dtype=dtype) * size
    values[2, :7] = torch.finfo(dtype).min  # a row whose first pieces count nothing
    return values


def log_sum_exp(running: RunningLogSumExp) -> torch.Tensor:
    return running.maximum + running.above_maximum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("width", [1, 5, COLUMNS])
def test_pieces_are_the_whole(dtype: torch.dtype, size: float, width: int) -> None:
    values, running = entries(dtype, size), RunningLogSumExp.empty(ROWS, torch.zeros((), dtype=dtype))
    running.accumulate_(values[:, :0].clone())
    for piece in values.split(width, 1):
        for rows in (slice(0, 2), slice(2, ROWS)):
            running.accumulate_(piece[rows].clone(), rows=rows)
    torch.testing.assert_close(log_sum_exp(running), values.logsumexp(1))
    assert (running.sum_exp > 0).all()


def test_rows_without_entries_have_a_sum_of_nothing() -> None:
    running = RunningLogSumExp.empty(ROWS, torch.zeros(()))
    assert not running.sum_exp.any()
    assert running.maximum.isfinite().all()


def test_merged_parts_are_the_whole() -> None:
    values, parts = entries(torch.float64), []
    for piece in values.split(5, 1):
        parts.append(RunningLogSumExp.empty(ROWS, values))
        parts[-1].accumulate_(piece.clone())
    merged = RunningLogSumExp.merged(
        torch.stack([part.maximum for part in parts]), torch.stack([part.sum_exp for part in parts])
    )
    torch.testing.assert_close(log_sum_exp(merged), values.logsumexp(1))


def test_one_entry_that_outweighs_all_others_leaves_exactly_nothing_above_it() -> None:
    running = RunningLogSumExp.empty(1, torch.zeros(()))
    running.accumulate_(torch.tensor([[0.0, -1000.0]]))
    running.accumulate_(torch.tensor([[500.0, 100.0]]))
    assert running.above_maximum().item() == 0.0


@pytest.mark.parametrize("pieces", [1, 3])
def test_pieces_that_are_kept(pieces: int) -> None:
    values = entries(torch.float64)
    before, running = values.clone(), RunningLogSumExp.empty(ROWS, values)
    for piece in values.chunk(pieces, 1):
        running.accumulate_(piece, keep=True)
    torch.testing.assert_close(log_sum_exp(running), values.logsumexp(1), rtol=1e-12, atol=0)
    assert torch.equal(values, before)


def test_relative_to_an_entry_that_outweighs_all() -> None:
    """What is added to the difference does not round it."""
    running = RunningLogSumExp.empty(1, torch.zeros(()))
    running.accumulate_(torch.tensor([[100.0, 80.0]]))
    assert float(running.relative_to(torch.tensor([99.5]))) == 0.5
