"""`global_rows`: a formula of one's own over the rows of all ranks, without a module, from rows that stay on their rank.

The formula is written for one process. It is called on tensors with the shape of the rows of all ranks (``GlobalRows``): operators
that compute row by row stay on the rank, sums over rows are added over the ranks, and rows against rows take gathered rows. An operator
without such a rule gathers, which is exact and dearer. What cannot be exact is an error on every rank.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_ddp_losses.core import inputs, precision
from lightning_ddp_losses.core.function_loss import UNFINISHED, unfinished_error
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    micro_batch_to_match,
    reduction_to_match,
    remember_global_value,
)
from lightning_ddp_losses.distributed.messages import with_name
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.rows.evaluation import OpenedRows, evaluate_on_rows
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses.gathered_call import SeedCounter, same_draws, seed_of


@eager_recursive
def global_rows(
    formula: Callable[..., Any],
    *args: Any,
    batch_dims: Mapping[int | str, int | None] | None = None,
    name: str | None = None,
    group: Group = None,
    **kwargs: Any,
) -> Any:
    """Evaluate a formula over the rows of all ranks.

    Equivalent to: ``formula(*map(torch.cat, arguments of all ranks))`` in one process.

    Args:
        formula: Function of tensors, as for one process: a batch Dice, a covariance, a contrastive loss.
        args: Arguments of the formula, of this rank. Tensors, also in lists, tuples and dicts, are batches along dim 0, of any counts.
            0-dim tensors are not. Rows are concatenated rank by rank, so pass views one by one: after ``torch.cat([view1, view2])`` on
            each rank, row i and row B + i are not the views of a sample.
        batch_dims: Dimension that counts samples, by argument position or name (default 0). None marks a tensor that is not a batch: it
            must be equal on all ranks.
        name: Name in messages, equal on all ranks. If None, the name of the formula.
        group: Process group. None is the world.
        kwargs: Arguments of the formula by name.

    Returns:
        What the formula returns: tensors without rows, equal on every rank.

    Gradient:
        After DDP's mean over ranks the gradient is one process's, for the model and for parameters of the formula, if all ranks multiply
        the value by the same factor. Second derivatives inside the formula (``torch.autograd.grad(..., create_graph=True)``) are exact,
        not those that are taken outside of it.

    Communication:
        One handshake before the formula and one after it. The host waits for an accelerator in the second one. Sums over rows are
        exchanged together when a value is needed (an operand of rows, a number on the host, a branch): in one handshake, or in the
        one after the formula. The handshake contains them if they are few numbers on the CPU. Otherwise an all-reduce follows. If the
        previous call with as many rows has exchanged the same sums, they do not need a handshake, but only a gather of few numbers on
        the CPU, or an all-reduce. (Few numbers on the CPU at the end of the formula are sent in its handshake in each call.) Dice takes
        two handshakes. VICReg of 128 features takes four in its first call, and later one, and three exchanges without one. All ranks must
        read the same sums: printing one on rank 0 only is an error. Rows are gathered if rows are compared with rows, and for an operator
        without a rule. Backward takes one sum for each plain tensor that was combined with rows (a mean that is subtracted). Sums over rows
        do not communicate in backward.

    Raises:
        InputError: on every rank, for a result that still has rows, for reading memory (``data_ptr``, dlpack), and for a write in place
            that would be lost. ``item``, ``tolist``, ``numpy`` and ``bool`` read the rows of all ranks.
        ConfigurationError: on every rank, for a custom ``autograd.Function`` on rows, and for compiled code.
        RankMismatchError: on every rank, with both lines, where ranks take different branches, and for a tensor or number from outside
            that differs between ranks and is combined with rows. (If it is combined with sums only, their operators or the value differ.)

    Example:
        >>> import torch
        >>> def dice(probabilities, target):
        ...     return 1 - 2 * (probabilities * target).sum() / (probabilities + target).sum()
        >>> round(global_rows(dice, torch.full((4, 2), 0.5), torch.ones(4, 2)).item(), 4)
        0.3333
    """
    title = with_name("global_rows", name or getattr(formula, "__name__", None))
    with handshake.raising_on_all_ranks(title, group=group):
        expect(
            callable(formula),
            "global_rows: formula",
            expected="a function",
            got=repr(formula),
            error=InputError,
            fix="Pass the function itself: global_rows(dice, rows), not global_rows(dice(rows)).",
        )
        inputs.refuse_capture(title)
        given = inputs.tensors_in((args, kwargs))
        devices = {tensor.device.type for tensor in given}
        args, kwargs = precision.cast_floating((args, kwargs), precision.compute_dtype(given))
        watch = UpstreamGradWatch.of(title, group)
        must_match: dict[str, object] = {
            "coefficient of the last backward": watch.take(),
            **micro_batch_to_match(),
            **reduction_to_match(),
        }
        with precision.without_autocast(devices):
            opened = open_rows(title, args, kwargs, batch_dims or {}, must_match, _seeds, group)
            value = formula(*args, **kwargs) if opened is None else run_on_rows(formula, opened)
        if isinstance(value, UNFINISHED):
            raise unfinished_error(title, value)
    remember_global_value(value, title)
    return watch.watch(value, group=group)


_seeds = SeedCounter()


def open_rows(
    title: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_dims: Mapping[int | str, int | None],
    must_match: dict[str, object],
    seeds: SeedCounter,
    group: Group,
) -> OpenedRows | None:
    """Return the arguments of a call as rows of all ranks. None in a world of one.

    Args:
        title: Name of the loss in messages.
        args: Positional arguments of this rank.
        kwargs: The same by name.
        batch_dims: Dimension that counts samples, by position or name.
        must_match: Values that must be equal on all ranks.
        seeds: Seeds of its calls.
        group: Process group.

    Communication: one handshake.
    """
    if process_groups.world_size(group) == 1:
        return None
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            args, kwargs = inputs.map_tensors(torch.clone, (args, kwargs))
            return OpenedRows(title, args, kwargs, dict(batch_dims), must_match, seeds.next(), group)
    return OpenedRows(title, args, kwargs, dict(batch_dims), must_match, seeds.next(), group)


def run_on_rows(formula: Callable[..., Any], opened: OpenedRows) -> Any:
    """Return the value of a formula over the rows of all ranks. Random numbers in it are drawn from rank 0's seed on all ranks."""
    with contextlib.ExitStack() as stack:
        # inference mode does not count writes: copies of rows that are written to would not be noticed
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(same_draws(seed_of(opened.extras[0]), opened.own))
        return evaluate_on_rows(opened, formula)
