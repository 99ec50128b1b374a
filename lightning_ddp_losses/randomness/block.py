"""`global_randomness`: a block in which dropout, noise and all other draws on W ranks are the same as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import InputError, expect_option
from lightning_ddp_losses.randomness.pieces import in_one_process
from lightning_ddp_losses.randomness.step import RandomStep, rows_in
from lightning_ddp_losses.randomness.step_draws import active_step


@contextmanager
def global_randomness(
    rows: Any, *, row_dim: int = 0, group: Group = None, randomness: Literal["global", "by_row"] = "global"
) -> Iterator[None]:
    """Draw the same random numbers inside the block as one process with the rows of all ranks.

    A draw with rows draws the numbers of all rows on every rank, in rank order, and keeps the numbers of this rank's rows. Dropout thus
    removes the same units of row i of the global batch as in one process, and noise is the same as in one process.

    Equivalent to: the block in one process on the concatenated batch, with the generators of rank 0, without this block.

    Rows are identified by the origin of a tensor. They are tracked from the batch through operators that keep rows in place, in any
    dimension: ``(T, B, E)``, ``(B * H, T, T)`` in attention, two consecutive views. A tensor that is created from sizes has rows if one of
    the sizes was read from a tensor with rows (``x.shape[0]``). Any other draw raises an error at the end of the block, unless you declare
    it: with ``with_rows(tensor)``, or with ``shared_draws()`` around numbers that all rows share.

    If each rank has rows, an order of rows, as in Mixup, is an order of the rows of all ranks: ``order = torch.randperm(x.shape[0])``, also
    ``randint``, ``multinomial`` with or without replacement, and ``argsort`` of draws, with one number per row. ``x[order]`` selects rows
    of all ranks, and their gradients are sent back to the ranks that hold them. Any other use of an order raises an error.

    Args:
        rows: The batch of this rank: a tensor, or a nest of tensors with rows.
        row_dim: Dimension of the rows in the batch.
        group: Process group. None is the world.
        randomness: ``"global"``: each rank draws for all rows. ``"by_row"``: each rank draws for its own rows only. The numbers of a row
            are then different from those of plain torch, and depend on its index among all rows, not on the number of ranks: the block on
            W ranks is equivalent to the same block in one process. (``multinomial`` and orders of rows are drawn for all rows.)

    Gradient: run forward, loss and backward inside the block. Activation checkpointing draws again in backward, which outside the block
        would yield different numbers.

    Communication: one handshake when the block begins and one when it ends. One more each if generators are in different states, such as
        after a step in which a rank had zero rows. For each ``x[order]`` a handshake and a gather of all rows, and an exchange of the same
        size in backward. None in a world of one, where the block only has an effect with ``randomness="by_row"``.

    Raises:
        ConfigurationError: on every rank, for an operator whose numbers cannot be drawn row by row (fused attention with dropout,
            ``poisson``, ``rrelu``), for draws that determine the order of rows in other ways than above, and for a draw whose rows are
            uncertain, with the user's line.
        InputError: on every rank, for a batch without rows.
        RankMismatchError: on every rank, at the end of the block, if ranks with rows drew differently.

    ``microbatched`` inside the block draws what one run on all rows of all ranks draws, in forward and again in backward: pieces decide
    memory and no numbers, whatever their size is and also in one process. With ``"global"`` each piece draws for all rows. An error in a
    piece are rows of other pieces (``torch.randperm``), a generator of your own, and a checkpoint inside the encoder.

    Cost: each rank draws for all rows, so a draw takes W times as long, and each operator of forward is tracked in Python. A step of an
    encoder layer (1024 tokens of 256, on one thread) takes 1.27 times as long on 2 ranks and 2.3 times as long on 8. With
    ``randomness="by_row"``, it takes 1.15 times as long on any number of ranks, and a block with 8 times as much work takes 1.04
    times as long. A rank with one row also runs each call of forward for two rows, because one row does not show which dimension contains
    the rows.

    Not tracked, and no error if all ranks with rows do the same: numbers from generators that you create in numpy or Python
    (``numpy.random.default_rng()``), which are right only where all rows share them; branches on ``len(x)``; loops that draw once for each
    row in ``shared_draws()``; a false declaration (``without_rows`` of rows). Batch norm without synchronization is a different layer on
    W ranks, with or without draws.

    Example:
        >>> import torch
        >>> x = torch.randn(8, 3)
        >>> with global_randomness(rows=x):
        ...     loss = torch.nn.functional.dropout(x, 0.5).sum()
    """
    outer = active_step()
    is_inner = outer is not None and outer.takes_blocks
    expect_option("global_randomness: randomness", randomness, ("global", "by_row"))
    by_row = randomness == "by_row"
    if is_inner or (process_groups.world_size(group) == 1 and not by_row):
        rows_in(rows, row_dim)
        with in_one_process():
            yield
        return
    step = RandomStep(rows, row_dim=row_dim, group=group, by_row=by_row)
    with handshake.raising_on_all_ranks("the block of global_randomness", group=group), step.active():
        yield
    step.end()


@contextmanager
def shared_draws() -> Iterator[None]:
    """Draw numbers that all rows of all ranks share, such as Mixup's coefficient, from torch's, numpy's or Python's generator.

    Outside ``global_randomness``, this has no effect.

    Raises:
        ConfigurationError: on every rank, at the end of ``global_randomness``, if a rank has zero rows, for draws from a tensor with rows,
            and for rows that are selected or reordered in such a step.

    Example:
        >>> import torch
        >>> with shared_draws():
        ...     coefficient = torch.rand(())
    """
    step = active_step()
    if step is None:
        yield
        return
    with step.sharing():
        yield


def with_rows(tensor: Tensor, dim: int = 0) -> Tensor:
    """Declare that a dimension of a tensor contains the rows of the batch, in order. Has no effect outside ``global_randomness``.

    Args:
        tensor: A tensor that a draw will write into, or from which a draw takes its shape.
        dim: The dimension.

    Returns:
        The tensor.

    Raises:
        InputError: if the tensor does not have the dimension.

    Example:
        >>> import torch
        >>> noise = with_rows(torch.empty(4, 4), dim=1).normal_()
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise InputError(
            "with_rows: dim",
            expected=f"a dimension of a tensor of {tensor.ndim}",
            got=dim,
            fix="Count dimensions from 0, or from the end with a negative number.",
        )
    step = active_step()
    if step is not None:
        step.mark(tensor, dim)
    return tensor


def without_rows(tensor: Tensor) -> Tensor:
    """Declare that no dimension of a tensor contains rows of the batch (such as a mask with as many entries).

    Outside ``global_randomness``, this has no effect.

    Example:
        >>> import torch
        >>> mask = without_rows(torch.ones(4, 4))
    """
    step = active_step()
    if step is not None:
        step.mark(tensor, None)
    return tensor
