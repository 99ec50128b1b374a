"""A metric's state on its way to the other ranks: which tensors of it travel, and how those of all ranks become one value.

A state is of one of three kinds:

| kind | of | gathered |
|---|---|---|
| ``stack`` | a tensor, equal in shape on all ranks | (W, ...) |
| ``rows`` | a tensor or a list reduced by "cat": tensors (B, ...) | (G, ...), or no tensor where no rank has one |
| ``list`` | any other list | the tensors of all ranks, each with its own shape |

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

Kind = Literal["stack", "rows", "list"]


@dataclass(frozen=True)
class State:
    """A state on its way to the other ranks.

    Attributes:
        name: As messages name it: metric and state.
        value: A tensor, or a list of tensors.
        device: Where the metric lives; tensors of a list that lie elsewhere are moved there.
        reduce: torchmetrics' reduction: a function of the stacked tensors or of the list; None: none.
        weight: This rank's rows; a mean over ranks is one over their rows.
        untouched: Nothing was ever put in: the default.
    """

    name: str
    value: Tensor | list[Tensor]
    device: torch.device
    reduce: Callable[..., Any] | None
    weight: float = 1.0
    untouched: bool = False

    @property
    def kind(self) -> Kind:
        """How the state is gathered."""
        if self.reduce is dim_zero_cat:
            return "rows"
        if isinstance(self.value, Tensor):
            return "stack"
        return "list"

    @property
    def reduction(self) -> str:
        """Name of the reduction, for messages."""
        return getattr(self.reduce, "__qualname__", "none")

    @property
    def is_mean(self) -> bool:
        """Whether ranks count by their rows."""
        return self.reduce is dim_zero_mean

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Return the tensors that travel, on one device; where they are rows, with at least one dimension and in one dtype."""
        tensors = [self.value] if isinstance(self.value, Tensor) else list(self.value)
        if self.kind == "rows":
            tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
            if len({tensor.dtype for tensor in tensors}) > 1:  # as torch.cat joins them
                wide = tensors[0].dtype
                for tensor in tensors:
                    wide = torch.promote_types(wide, tensor.dtype)
                tensors = [tensor.to(wide) for tensor in tensors]
        return [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]

    def reduced(self, gathered: list[Tensor], rows: Sequence[float] | None) -> Any:
        """Reduce what all ranks hold as torchmetrics does; ``rows`` of each rank weigh a mean."""
        if self.kind == "rows":
            return gathered[0] if gathered else []
        if self.kind == "list" and self.reduce is None:
            return gathered
        if self.kind == "list":
            return self.reduce(gathered)  # type: ignore[misc]
        (stacked,) = gathered
        if self.reduce is None:
            return stacked
        if rows is not None and len(set(rows)) > 1 and stacked.is_floating_point():
            ranks = [rank for rank, n in enumerate(rows) if n]  # the mean over no rows is not a number
            shares = stacked.new_tensor([rows[rank] for rank in ranks]) / sum(rows)
            return torch.tensordot(shares, stacked[ranks], 1)
        return self.reduce(stacked)
