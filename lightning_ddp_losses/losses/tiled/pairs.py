"""Which columns are positives and negatives of which rows, tile by tile, without a mask over the whole batch.

Legend: ``T`` rows of a tile, ``C`` columns, ``B`` rows on this rank. Rows and columns are sorted by label: the positives of a
tile's rows then lie in one narrow *band* of columns, and every column outside the band is a negative of every row. Only the band
needs weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["LabelPairs", "Pairs", "TripletTuples", "TuplePairs"]


class Pairs(Protocol):
    """Positives and negatives.

    Attributes:
        single: No pair is named more than once.
    """

    single: bool

    @property
    def row_order(self) -> Tensor | None:
        """(B,) in which order tiles take this rank's rows; None: as they are."""
        ...

    @property
    def column_order(self) -> Tensor | None:
        """(C,) in which order columns lie; None: as they are."""
        ...

    def band(self, rows: slice) -> slice:
        """The columns that need weights; each one outside is a negative of each of the rows, once."""
        ...

    def weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(T, b) each: how often a column of the band counts as a positive and as a negative."""
        ...

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor] | None:
        """Triplets of the rows, where they are named one by one."""
        ...


class LabelPairs:
    """All pairs that labels make.

    Args:
        labels: (B,) of this rank's rows.
        column_labels: (C,).
        first: The column that is this rank's first row, where rows and columns are the same samples (a row is not its own positive);
            None where they are not.
        dtype: Of the weights.
    """

    single = True

    def __init__(self, labels: Tensor, column_labels: Tensor, first: int | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        if labels.dtype == torch.bool:  # which torch does not search
            labels, column_labels = labels.byte(), column_labels.byte()
        self._labels, self.row_order = torch.sort(labels, stable=True)
        self._columns, self.column_order = torch.sort(column_labels, stable=True)
        self._own = None if first is None else self.row_order + first
        self._starts: list[int] = torch.searchsorted(self._columns, self._labels).tolist()
        self._stops: list[int] = torch.searchsorted(self._columns, self._labels, right=True).tolist()

    def band(self, rows: slice) -> slice:
        return slice(self._starts[rows.start], self._stops[rows.stop - 1])

    def weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        band = self.band(rows)
        same = self._labels[rows].unsqueeze(1) == self._columns[band].unsqueeze(0)
        positive = same
        if self._own is not None:
            positive = same & (self._own[rows].unsqueeze(1) != self.column_order[band].unsqueeze(0))
        return positive.to(self._dtype), (~same).to(self._dtype)

    def triplets(self, rows: slice) -> None:
        return None


class TuplePairs:
    """Pairs that a miner names.

    Args:
        tuples: (anchor, positive, negative), or (anchor, positive, anchor, negative): anchors count this rank's rows, the others
            columns.
        rows: B.
        columns: C.
        dtype: Of the weights.
    """

    single = False
    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype) -> None:
        anchors, positives, *rest = tuples
        pairs = [(anchors, positives), (rest[0], rest[1]) if len(rest) == 2 else (anchors, rest[0])]
        self._columns, self._dtype = columns, dtype
        self._sorted = [_by_anchor(*pair, rows) for pair in pairs]

    def band(self, rows: slice) -> slice:
        return slice(0, self._columns)

    def weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        first, second = (self._count(rows, *pairs) for pairs in self._sorted)
        return first, second

    def triplets(self, rows: slice) -> None:
        return None

    def contradict(self) -> bool:
        """Whether a pair is named as a positive and as a negative."""
        first, second = (anchors * self._columns + others for anchors, others, _ in self._sorted)
        return bool(torch.isin(first, second).any())

    def _count(self, rows: slice, anchors: Tensor, others: Tensor, starts: list[int]) -> Tensor:
        part = slice(starts[rows.start], starts[rows.stop])
        out = torch.zeros(rows.stop - rows.start, self._columns, dtype=self._dtype, device=anchors.device)
        one = torch.ones((), dtype=self._dtype, device=anchors.device)
        return out.index_put_((anchors[part] - rows.start, others[part]), one, accumulate=True)


class TripletTuples:
    """Triplets that a miner names, for a loss over triplets.

    Args:
        tuples: (anchor, positive, negative): anchors count this rank's rows, the others columns.
        rows: B.
        dtype: Of the weights, of which there are none.
    """

    single = False
    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, dtype: torch.dtype) -> None:
        self._anchors, order = torch.sort(tuples[0], stable=True)
        self._positives, self._negatives = tuples[1][order], tuples[2][order]
        self._starts = _starts(self._anchors, rows)
        self._none = torch.empty(rows, 0, dtype=dtype, device=order.device)

    def band(self, rows: slice) -> slice:
        return slice(0, 0)

    def weights(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self._none[rows], self._none[rows]

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(self._starts[rows.start], self._starts[rows.stop])
        return self._anchors[part] - rows.start, self._positives[part], self._negatives[part]


def _by_anchor(anchors: Tensor, others: Tensor, rows: int) -> tuple[Tensor, Tensor, list[int]]:
    anchors, order = torch.sort(anchors, stable=True)
    return anchors, others[order], _starts(anchors, rows)


def _starts(anchors: Tensor, rows: int) -> list[int]:
    """Where each row's tuples begin, and where the last one's end."""
    return torch.searchsorted(anchors, torch.arange(rows + 1, device=anchors.device)).tolist()
