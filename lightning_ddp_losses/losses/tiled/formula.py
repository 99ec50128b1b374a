"""What a loss has to say about one tile: the interface of the formulas.

Legend: ``T`` rows of a tile, ``C`` columns, ``n`` listed positives, ``B`` rows on this rank, ``k`` statistics of a row.

A formula reads tiles of the scaled matrix twice. In forward it adds up rows and keeps ``k`` numbers of each (a log-sum-exp, how
much the row counts). In backward these are enough to turn a tile into its slope; where the matrix is symmetric, the other ranks'
numbers turn the same tile into the slope of the transposed entries too, so no gradient has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from lightning_ddp_losses.losses.tiled.accumulators import Reduction, Total
from lightning_ddp_losses.losses.tiled.tile import Listed, Tile


class Formula:
    """One loss on tiles.

    Args:
        loss: pytorch-metric-learning's, for its numbers.
        reductions: One per sub-loss.
        rows: B.
        like: Gives dtype and device.

    Attributes:
        sub_losses: Their names.
        width: k.
        scale: By which the distances come multiplied.
        revisits: A second look at the positives is needed, once the first has seen all columns.
        symmetric: Slopes of transposed entries follow from the statistics.
        by_mask: A pair counts once, however often it is named.
        immediate: A tile's slope follows from the tile alone, but for one factor per sub-loss; it can be had in forward.
    """

    sub_losses: ClassVar[tuple[str, ...]] = ("loss",)
    revisits: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    by_mask: ClassVar[bool] = False
    immediate: bool = False
    width: int = 0
    scale: float = 1.0

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        self.loss, self.reductions, self.rows, self.like = loss, reductions, rows, like
        self.sign = -1.0 if loss.distance.is_inverted else 1.0  # of a distance: large is far

    @classmethod
    def takes(cls, loss: Any) -> bool:
        """Whether the loss, as configured, is this formula."""
        return True

    @classmethod
    def reduces(cls, reduction: Reduction) -> bool:
        """Whether a sub-loss may be reduced so."""
        return True

    def look(self, tile: Tile) -> None:
        """Add up the rows of a tile; overwrites its matrix."""
        raise NotImplementedError

    def look_with_slopes(self, tile: Tile, spare: Tensor) -> list[tuple[slice, Tensor]]:
        """``look``, where the slope is ``immediate``; leaves the tile's matrix as it is.

        Args:
            tile: The tile.
            spare: Like the tile's matrix; may be overwritten.

        Returns:
            For each sub-loss the columns of the tile that have a slope, and the derivative of the sub-loss's sum by them.
        """
        raise NotImplementedError

    def look_again(self, rows: slice, near: Listed, values: Tensor) -> None:
        """Add up what needs complete rows.

        Args:
            rows: Which rows.
            near: Their positives.
            values: (n,) their entries.
        """

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        """Reduce.

        Args:
            labels: (B,), in the tiles' order.

        Returns:
            One total per sub-loss, and (B, k) statistics.
        """
        raise NotImplementedError

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        """Before backward.

        Args:
            own: (B, k), in the tiles' order.
            others: (G, k), in the columns' order; None: only this rank's own entries are wanted.
            factors: What each sub-loss's sum is multiplied with.
        """
        raise NotImplementedError

    def slope(self, tile: Tile) -> None:
        """Overwrite a tile's matrix with its derivative (of the transposed entries too, after ``ready`` with ``others``)."""
        raise NotImplementedError


def at_positives(term: Callable[..., Tensor], tile: Tile, own: Tensor, others: Tensor | None) -> Tensor:
    """(n,): ``term`` of the statistics of the positives' rows, plus that of their columns' where there are any.

    Args:
        term: Takes k statistics, (n,) each.
        tile: The tile.
        own: (B, k).
        others: (G, k) or None.
    """
    total = term(*own[tile.rows][tile.near.rows].unbind(1))
    return total if others is None else total + term(*others[tile.columns][tile.near.columns].unbind(1))
