"""Warnings of the strategy: each once, on rank 0, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.errors import format_error


class Advice:
    """Warns, and remembers of what."""

    def __init__(self) -> None:
        self._uneven: set[str] = set()
        self._waste = False

    def uneven_rows(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Warn of losses whose ranks saw different numbers of rows.

        Args:
            rows: By the loss's title, the rows of each rank.
        """
        for title, per_rank in rows.items():
            if title in self._uneven:
                continue
            self._uneven.add(title)
            rank_zero_warn(
                format_error(
                    f"rows of {title} differ between ranks",
                    ranks=per_rank,
                    fix="DDP weighs ranks equally, not rows, so this is not the gradient of one process on the whole batch. Wrap "
                    "the loss in GlobalBatchLoss, or give every rank the same number of rows (drop_last=True, a batch size that "
                    "the number of ranks divides).",
                )
            )

    def global_already(self, tensor: object) -> None:
        """Warn of a value that is about to be reduced over ranks although every rank holds the same."""
        if self._waste or not isinstance(tensor, Tensor) or tensor.ndim or not tensor.is_floating_point():
            return  # Lightning reduces integers of its own, lengths of data
        # to compare values on an accelerator waits for it; a zero may be anything
        if tensor.device.type != "cpu" or tensor == 0:
            return
        values = [v for v in autograd_graph.global_values() if v.device.type == "cpu"]
        if any(torch.equal(tensor, value.to(tensor)) for value in values):
            self._waste = True
            rank_zero_warn("A logged value is a global loss already, equal on every rank: leave out sync_dist=True.")
