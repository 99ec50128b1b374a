"""Cross entropies whose targets enumerate the rows of a batch, as in contrastive losses, where row i belongs to column i.

If the columns are the rows of all ranks, the targets of a rank start at the index of its first row.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.user_line import users_line


class CountedTargets(NamedTuple):
    """A cross entropy with consecutive targets.

    Attributes:
        rows: Number of rows.
        columns: Number of columns of its logits.
        first: Target of the first row.
        line: The user's line.
    """

    rows: int
    columns: int
    first: int
    line: str


class TargetTrace(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the cross entropies of one forward whose targets are consecutive.

    Attributes:
        found: Cross entropies found so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[CountedTargets] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func is torch.ops.aten.nll_loss_forward.default:
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, logits: Tensor, targets: Tensor) -> None:
        if logits.ndim != 2 or targets.ndim != 1 or not len(targets):
            return
        first = int(targets[0])
        expected = torch.arange(first, first + len(targets), device=targets.device)
        if torch.equal(targets, expected):
            self.found.append(CountedTargets(len(targets), logits.shape[1], first, users_line(inspect.currentframe())))
