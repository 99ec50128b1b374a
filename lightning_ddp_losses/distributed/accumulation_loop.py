"""`accumulation_window`: the accumulation window of a loop without Lightning; what a window is stands in ``accumulation``.

With the model's DistributedDataParallel, and ``cross_entropy`` a ``GlobalBatchLoss(CrossEntropyLoss())``::

    optimizer.zero_grad()  # a window starts without gradients
    with accumulation_window(model, micro_batches=4):
        for i, (rows, labels) in enumerate(micro_batches):
            model.require_backward_grad_sync = i == 3  # what model.no_sync() sets
            cross_entropy(model(rows), labels).backward()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.accumulation import AccumulationWindow, active, is_open, step_inside_window
from lightning_ddp_losses.errors import ConfigurationError


@contextlib.contextmanager
def accumulation_window(model: nn.Module, *losses: nn.Module, micro_batches: int = 1) -> Iterator[AccumulationWindow]:
    """Make the micro-batches inside the block one batch: after it, gradients are those of one process on all their rows.

    Equivalent to: in one process, ``loss(all rows of all ranks and micro-batches).backward()``.

    Args:
        model: The model, or its DDP; ``no_sync`` stays the caller's.
        losses: Modules with further parameters.
        micro_batches: About how many there will be. Only the size of gradients inside the block depends on it, which matters for a
            scaler of half precision.

    Yields:
        The window; its ``expect_counts`` is for losses whose counts are not in proportion.

    A micro-batch ends with its ``backward``. Losses: ``GlobalBatchLoss`` in mode ``elements``, ``ClassShardedLoss``, ``global_mean``, and
    as differentiable metrics MeanSquaredError and MeanAbsoluteError.

    Gradient: inside the block in proportion to the true one; on leaving it all gradients of ``model`` and ``losses`` are corrected.

    Communication: what the losses do, and one handshake on leaving. The host divides by what is counted: a loss whose count an
        accelerator alone knows (targets that are ignored, what passes a reducer's limits) is waited for once a micro-batch.

    Raises:
        ConfigurationError: for another term in what is back-propagated, for losses with different divisors, an optimizer step inside the
            block, or windows inside windows.
        RankMismatchError: on every rank, where ranks have different numbers of micro-batches.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import accumulation_window, global_mean
        >>> model = torch.nn.Linear(3, 1)
        >>> with accumulation_window(model):
        ...     for rows in (torch.ones(4, 3), torch.ones(2, 3)):
        ...         global_mean(model(rows).square().sum(), len(rows)).backward()
    """
    if is_open():
        raise ConfigurationError("accumulation_window", expected="no window around it", got="one that is open")
    parameters = {}
    for i, module in enumerate((model, *losses)):
        named = module.named_parameters(prefix=f"losses[{i - 1}]" if i else "")
        parameters.update(dict(named))
    window = AccumulationWindow(parameters, micro_batches)
    try:
        window.refuse_left_gradients()
        with active(window), _backward_commits(window), _refuses_steps(window):
            yield window
    except Exception as error:  # the peers are inside their blocks, or wait at the end of them
        handshake.raise_on_all_ranks(error, "accumulation_window")
    # before anything is judged, ranks with another number of micro-batches are found
    handshake.all_gather("end of accumulation_window", {"micro-batches": window.micro_batch - 1})
    window.correct_()


@contextlib.contextmanager
def _backward_commits(window: AccumulationWindow) -> Iterator[None]:
    """Look at what is back-propagated inside the block; ``Tensor.backward`` calls this function of torch too."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        window.commit(roots)
        plain(roots, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain


@contextlib.contextmanager
def _refuses_steps(window: AccumulationWindow) -> Iterator[None]:
    """Refuse a step of an optimizer inside the block."""

    def refuse(optimizer: Any, *_: Any) -> None:
        raise step_inside_window(type(optimizer).__name__)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
