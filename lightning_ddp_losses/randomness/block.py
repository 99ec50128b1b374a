"""`global_randomness`: a block in which dropout, noise and all other draws of W ranks are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.randomness.step import RandomStep, active_step, rows_in


@contextmanager
def global_randomness(rows: Any, *, row_dim: int = 0, group: Group = None) -> Iterator[None]:
    """Draw random numbers inside the block as one process with the rows of all ranks draws them.

    A draw with rows makes the numbers of all rows, in rank order, on every rank, and keeps those of this rank's rows. So row i of the
    global batch loses the units that it loses in one process, and noise is that of one process.

    Equivalent to: the block in one process on the concatenated batch, with the generators of rank 0, without this block.

    Rows are told by where a tensor comes from. They are followed from the batch through operators that keep rows in their places, whatever
    dimension they are in: ``(T, B, E)``, ``(B * H, T, T)`` in attention, two views after each other. A tensor that is made from sizes has
    rows if one of them was read from such a tensor (``x.shape[0]``). Any other draw is an error, at the end of the block, until you say
    what it is: ``with_rows(tensor)``, or ``shared_draws()`` around numbers that all rows share.

    An order of rows, as in Mixup, is one of all rows if each rank has rows: ``order = torch.randperm(x.shape[0])``, also ``randint``,
    ``multinomial`` with replacement or without, and ``argsort`` of draws, one number for each row. ``x[order]`` picks rows of all ranks,
    and their gradients go back to the ranks that have them. Any other use of an order is an error.

    Args:
        rows: The batch of this rank: a tensor, or a nest of tensors with rows.
        row_dim: Dimension of the batch that counts its rows.
        group: Process group. None is the world.

    Gradient: put forward, loss and backward into the block. Activation checkpointing draws again in backward, which outside of the block
        would be other numbers.

    Communication: one handshake when the block begins and one when it ends. One more each if generators are in different states, as after
        a step in which a rank had no rows. For each ``x[order]`` a handshake and a gather of all rows, and an exchange of as many in
        backward. None in a world of one, where nothing changes.

    Raises:
        ConfigurationError: on every rank, for an operator whose numbers cannot be drawn row by row (fused attention with dropout,
            ``poisson``, ``rrelu``), for draws that decide the order of rows otherwise than above, and for a draw whose rows are not
            certain, with the user's line.
        InputError: on every rank, for a batch without rows.
        RankMismatchError: on every rank, at the end of the block, if ranks with rows drew differently.

    The price: each rank draws for all rows, so a draw takes W times as long, and each operator is followed in Python. A step of an encoder
    layer (1024 tokens of 256, on one thread) takes 1.4 times as long on 2 ranks and 2.2 times on 8. A rank with one row runs each
    call of forward for two rows as well, as one row does not show which dimension counts rows. Not followed:
    generators that the user makes in numpy or Python, branches on ``len(x)``, and loops that draw once for each row of the rank. Batch norm
    without synchronisation is another layer on W ranks, with draws or without.

    Example:
        >>> import torch
        >>> x = torch.randn(8, 3)
        >>> with global_randomness(rows=x):
        ...     loss = torch.nn.functional.dropout(x, 0.5).sum()
    """
    outer = active_step()
    is_inner = outer is not None and outer.takes_blocks
    if is_inner or process_groups.world_size(group) == 1:
        rows_in(rows, row_dim)
        yield
        return
    step = RandomStep(rows, row_dim=row_dim, group=group)
    with handshake.raising_on_all_ranks("the block of global_randomness", group=group), step.active():
        yield
    step.end()


@contextmanager
def shared_draws() -> Iterator[None]:
    """Draw numbers that all rows of all ranks share, as Mixup's coefficient: from torch's, numpy's or Python's generator.

    Outside of ``global_randomness`` nothing happens.

    Raises:
        ConfigurationError: on every rank, at the end of ``global_randomness``, if a rank has no rows, for draws from a tensor with rows,
            and for rows that are picked or reordered in such a step.

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
    """Say that a dimension of a tensor counts the rows of the batch, in their order. Outside of ``global_randomness`` nothing happens.

    Args:
        tensor: A tensor that will be drawn into, or that a draw takes its shape from.
        dim: The dimension.

    Returns:
        The tensor.

    Raises:
        InputError: for a dimension that the tensor does not have.

    Example:
        >>> import torch
        >>> noise = with_rows(torch.empty(4, 4), dim=1).normal_()
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise InputError("with_rows: dim", expected=f"a dimension of a tensor of {tensor.ndim}", got=dim)
    step = active_step()
    if step is not None:
        step.mark(tensor, dim)
    return tensor


def without_rows(tensor: Tensor) -> Tensor:
    """Say that no dimension of a tensor counts rows of the batch (a mask of as many entries).

    Outside of ``global_randomness`` nothing happens.

    Example:
        >>> import torch
        >>> mask = without_rows(torch.ones(4, 4))
    """
    step = active_step()
    if step is not None:
        step.mark(tensor, None)
    return tensor
