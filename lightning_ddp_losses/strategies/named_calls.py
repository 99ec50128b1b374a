"""Calls of a strategy that every rank must make, as meetings by name.

``if trainer.is_global_zero: trainer.save_checkpoint(...)`` lets rank 0 wait for ranks that never make this call. So ranks exchange a
handshake before the strategy runs Lightning's code. A rank at another place in the program is paired with it in its own next handshake,
and every rank raises the same error. It names the call, the ranks that made it, the user's line and what to do.

| call | what ranks compare |
|---|---|
| ``trainer.save_checkpoint`` | nothing: this handshake begins it, and the strategy's own handshakes end it |
| ``self.log(name, ..., sync_dist=True)``, ``strategy.reduce`` | its name if it was logged for an epoch, shape, dtype, reduction |
| ``strategy.all_gather`` (``self.all_gather``) | shape and dtype |
| ``strategy.broadcast`` | the sending rank |
| ``strategy.barrier`` | nothing: ranks may wait on different lines (rank 0 after some work, other ranks before it) |
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.user_line import ProgramCall, callers, logged_value, users_line


def is_of_all_ranks(group: Any) -> bool:
    """Return whether a call on a group is one of the whole world, which has several ranks."""
    return process_groups.is_world(group) and process_groups.world_size() > 1


def meet_to_save() -> None:
    """Exchange a handshake in ``trainer.save_checkpoint``, except in a signal handler, which runs at a different place on each rank."""
    frames = [*callers(inspect.currentframe())]
    is_saving = any(map(lightning_compat.is_saving_frame, frames))
    if is_saving and not any(map(lightning_compat.is_signal_frame, frames)):
        meet_in("trainer.save_checkpoint", {})


def meet_to_reduce(tensor: Tensor, reduce_op: object) -> None:
    """Meet before a value is reduced, with its name if it was logged for an epoch."""
    must_match = {**shape_and_dtype(tensor), "reduce_op": reduce_op}
    logged = logged_value([*callers(inspect.currentframe())])
    if logged is None:
        meet_in("strategy.reduce", must_match)
    else:
        handshake.meet_by_name(logged, must_match)


def meet_in(operation: str, must_match: dict[str, object]) -> None:
    """Meet before a call of the program, at its line."""
    handshake.meet_by_name(ProgramCall(operation, users_line(inspect.currentframe())), must_match)


def shape_and_dtype(tensor: Tensor) -> dict[str, object]:
    """Return what ranks compare of a tensor that is reduced or gathered."""
    return {"shape": tuple(tensor.shape), "dtype": tensor.dtype}
