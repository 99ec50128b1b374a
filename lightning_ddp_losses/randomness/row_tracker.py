"""`RowTracker`: follows the rows of the batch through the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.randomness.places import OF_PARAMETER, UNKNOWN, Candidates, RowPlace
from lightning_ddp_losses.randomness.propagation import propagation_of
from lightning_ddp_losses.randomness.row_table import RowTable


class RowTracker:
    """Knows where the rows are in each tensor of a step.

    Args:
        rows: Number of rows of this rank, 1 or more.
        takes_by_size: Whether a tensor from outside of the step has rows if its first dimension has as many entries. Otherwise only
            tensors that were marked have some for certain.

    Attributes:
        rows: Number of rows of this rank.
        shapes_of_parameters: Shapes of the parameters that were seen.
    """

    def __init__(self, rows: int, *, takes_by_size: bool) -> None:
        self.rows = rows
        self.shapes_of_parameters: set[tuple[int, ...]] = set()
        self._takes_by_size = takes_by_size
        self._table = RowTable()
        self._propagation = propagation_of(rows)

    def mark(self, tensor: Tensor, candidates: Candidates) -> None:
        """Say where the rows of a tensor are."""
        self._table.write_(tensor, candidates)

    def candidates(self, tensor: Tensor) -> Candidates:
        """Return where the rows of a tensor may be."""
        known = self._table.read(tensor)
        if known is not None:
            return known
        # a tensor from outside of the step
        if isinstance(tensor, nn.Parameter):
            self.shapes_of_parameters.add(tuple(tensor.shape))
            known = OF_PARAMETER
        else:
            known = self._propagation.by_size(tensor.shape)
            if self._takes_by_size and RowPlace(0) in known:
                known = (RowPlace(0),)
        self._table.write_(tensor, known)
        return known

    def prefer(self, tensor: Tensor, dim: int) -> None:
        """Leave out the candidates of a tensor in other dimensions, if there is one in this dimension."""
        candidates = self.candidates(tensor)
        in_dim = tuple(place for place in candidates if place is not None and place.dim == dim)
        if in_dim:
            self.mark(tensor, in_dim)

    def certain_place(self, tensor: Tensor) -> RowPlace | None:
        """Return the place of the rows of a tensor. None if it has no rows, or if their place is not certain."""
        candidates = self.candidates(tensor)
        if len(candidates) != 1 or candidates[0] == UNKNOWN:
            return None
        return candidates[0]

    def by_size(self, shape: Sequence[int]) -> Candidates:
        """Return the candidates of a tensor that is made from sizes which were not read from a tensor."""
        return self._propagation.by_size(shape)

    def follow(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        candidates: Sequence[Candidates],
        outputs: Sequence[Tensor],
    ) -> None:
        """Remember where the rows of an operator's results are (``Propagation.results``)."""
        places = self._propagation.results(function, args, kwargs, candidates, outputs)
        for output, place in zip(outputs, places, strict=True):
            self._table.write_(output, place)
