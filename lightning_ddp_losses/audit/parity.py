"""`parity`: the audit for any training loop. N ranks run the user's step or loop, one process runs it on the joined rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.audit.api import compare_with_one
from lightning_ddp_losses.audit.loop_run import PRECISIONS, LoopTarget, rows_first
from lightning_ddp_losses.audit.replay import take_rows
from lightning_ddp_losses.audit.report import AuditReport
from lightning_ddp_losses.core.nests import leaves
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option

_WRAPS = ("ddp", "fully_shard", None)
_SPLITS = ("even", "uneven")


def parity(
    build: Callable[[], Any],
    step: Callable[..., Any] | None = None,
    batches: Any = None,
    *,
    loop: Callable[..., Any] | None = None,
    ranks: int = 2,
    wrap: str | Callable[[nn.Module], Any] | None = "ddp",
    accumulate: int = 1,
    splits: str | Sequence[int] = "even",
    join: Any = "rows",
    dtype: torch.dtype | None = torch.float64,
    precision: torch.dtype | None = None,
    steps: int = 1,
    timeout_seconds: float = 60.0,
) -> AuditReport:
    """Train a few steps with any training loop on N ranks and in one process, and compare every gradient.

    The one process has no process group (a group of one if the loop asks for it), the plain model, the same weights, and the ranks'
    batches joined in rank order. Gradients are compared as the optimizer is about to use them, and parameters after its step. Processes are
    forked, so functions of a notebook, of ``__main__`` or inside other functions work.

    Args:
        build: Makes the model, the same on every rank, or the model and a function that makes its optimizer after the wrap:
            ``(model, lambda model: SGD(model.parameters(), 0.1))``.
        step: Maps model and batch to the loss: a scalar, or a dict with ``"loss"``. Its loss over ``accumulate`` is back-propagated.
        batches: Global batches, one for each micro-batch, or a function of ``(rank, world)`` that gives a rank its own.
        loop: A whole optimizer step in place of ``step``: ``loop(model, optimizer, micro_batches)``, with one ``optimizer.step()``.
            It divides by ``len(micro_batches)``, as the one process may get all rows as one.
        ranks: Number of ranks.
        wrap: ``"ddp"``, ``"fully_shard"``, None, or a function that wraps the model.
        accumulate: Micro-batches to an optimizer step.
        splits: Rows of a global batch for each rank: ``"even"``, ``"uneven"``, or the numbers.
        join: ``"rows"``: tensors are cut and joined along their first dimension. A dimension, or a nest like a batch with the
            dimension of each tensor (0 if it has none). None in it: every rank gets the whole tensor.
        dtype: Dtype of parameters and batches. None leaves them as they are.
        precision: Dtype of autocast (``torch.bfloat16``, ``torch.float16``), with a ``dtype`` other than float64.
        steps: Optimizer steps.
        timeout_seconds: Time limit of each run.

    Returns:
        The report. Its ``raise_if_different()`` makes a test of it.

    Raises:
        AuditError: a run failed, died or took too long. The rank and its stack are in the text.
        ConfigurationError: options that cannot work.
        InputError: batches that cannot be cut, a step without a scalar loss, models that differ by rank.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import parity
        >>> batches = [{"x": torch.randn(8, 3), "y": torch.randn(8, 1)}]
        >>> def step(model, batch):
        ...     return (model(batch["x"]) - batch["y"]).square().mean()
        >>> parity(lambda: torch.nn.Linear(3, 1), step, batches).equal
        True
    """
    _validate(ranks=ranks, accumulate=accumulate, step=step, loop=loop, wrap=wrap)
    expect_option("parity(dtype=...)", dtype, (*PRECISIONS, None))
    expect_option("parity(precision=...)", precision, (torch.bfloat16, torch.float16, None))
    expected, fix = "another dtype with it: autocast leaves float64 alone", "Add dtype=torch.float32."
    is_used = precision is None or dtype != torch.float64
    expect(is_used, "parity(precision=...)", expected=expected, got="dtype=torch.float64", fix=fix)
    dims = 0 if join == "rows" else join
    if not callable(batches):
        batches = _of_ranks(batches, steps * accumulate, ranks, splits, dims)
    name = wrap if isinstance(wrap, str) else getattr(wrap, "__name__", "no wrapper")

    def make_target(scratch: Path) -> LoopTarget:
        limits = name, scratch, timeout_seconds
        return LoopTarget(*limits, build, step, loop, batches, wrap, accumulate, dims, dtype, precision)

    return compare_with_one("parity", make_target, ranks, steps)


def _validate(*, ranks: int, accumulate: int, step: Any, loop: Any, wrap: Any) -> None:
    expect_count("parity(ranks=...)", ranks, at_least=2)
    expect_count("parity(accumulate=...)", accumulate)
    given = sum(each is not None for each in (step, loop))
    expect(given == 1, "parity", expected="one of step and loop", got=f"{given} of them")
    if not callable(wrap):
        expect_option("parity(wrap=...)", wrap, _WRAPS)


def _of_ranks(batches: Any, count: int, ranks: int, splits: str | Sequence[int], join: Any) -> list[list[Any]]:
    """Cut global batches into those of each rank."""
    is_list = isinstance(batches, Iterable) and not isinstance(batches, (Tensor, dict))
    expected = "a list of global batches, or a function of (rank, world)"
    expect(is_list, "parity(batches=...)", expected=expected, got=type(batches).__name__)
    given = list(batches)
    got, fix = f"{len(given)}", "Each micro-batch is one entry."
    what = "parity(batches=...)"
    expect(len(given) >= count, what, expected=f"{count} global batches", got=got, fix=fix, error=InputError)
    of_ranks: list[list[Any]] = [[] for _ in range(ranks)]
    for index, batch in enumerate(given[:count]):
        moved = rows_first(batch, join)
        rows, start = _rows_of(moved, f"batches[{index}]"), 0
        for own, size in zip(of_ranks, _sizes(rows, ranks, splits), strict=True):
            own.append(take_rows(moved, range(start, start + size)))
            start += size
    return of_ranks


def _rows_of(batch: Any, what: str) -> int:
    """Count the rows of a global batch, which all of its tensors have."""
    lengths = {path: leaf.shape[0] for path, leaf in leaves(batch, what) if isinstance(leaf, Tensor) and leaf.ndim}
    fix = 'Give join= the dimension of each tensor, such as {"x": 0, "mask": 1}, and None for what every rank gets.'
    is_common = len(set(lengths.values())) == 1
    expect(is_common, what, expected="tensors with a common first dimension", got=lengths, fix=fix, error=InputError)
    return next(iter(lengths.values()))


def _sizes(rows: int, ranks: int, splits: str | Sequence[int]) -> list[int]:
    """Return how many rows each rank gets."""
    expect(rows >= ranks, "batches", expected=f"a row for each of {ranks} ranks", got=rows, error=InputError)
    if not isinstance(splits, str):
        sizes = list(splits)
        fits = len(sizes) == ranks and sum(sizes) == rows and min(sizes) >= 0
        expected = f"{ranks} numbers that add up to {rows}"
        expect(fits, "parity(splits=...)", expected=expected, got=sizes, error=InputError)
        return sizes
    expect_option("parity(splits=...)", splits, _SPLITS)
    if splits == "even":
        fix = "Take splits='uneven' or numbers, or leave rows out."
        expected = f"a multiple of {ranks} rows"
        expect(rows % ranks == 0, "batches", expected=expected, got=rows, fix=fix, error=InputError)
        return [rows // ranks] * ranks
    # each rank one more share than the one before, and at least a row
    shares = [1 + (rows - ranks) * (rank + 1) * 2 // (ranks * (ranks + 1)) for rank in range(ranks)]
    return [*shares[:-1], rows - sum(shares[:-1])]
