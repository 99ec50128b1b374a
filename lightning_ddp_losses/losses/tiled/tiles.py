"""Which columns are positives and negatives of which rows, tile by tile, without a mask over the whole batch.

Legend: ``T`` rows of a tile, ``C`` columns, ``B`` rows on this rank, ``n`` positives of a tile's rows. Rows and columns are sorted by
label: the positives of a row are then neighbours, and those of a tile's rows lie in one *band* of columns.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Pairs(Protocol):
    """Positives and negatives."""

    @property
    def row_order(self) -> Tensor | None:
        """(B,) in which order tiles take this rank's rows; None: as they are."""
        ...

    @property
    def column_order(self) -> Tensor | None:
        """(C,) in which order columns lie; None: as they are."""
        ...

    def band(self, rows: slice) -> slice:
        """The columns among which all positives are."""
        ...

    def near(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(n,) each: row, counted from the first and ascending, and column of each positive, as often as it counts."""
        ...

    def selves(self, rows: slice) -> Tensor | None:
        """(T,) the columns of the rows themselves, which are neither positives nor negatives; None: they are not there."""
        ...

    def far(self, rows: slice) -> Tensor | None:
        """(T, C) how often each column counts as a negative; None: once, but for the positives and the rows themselves."""
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
    """

    def __init__(self, labels: Tensor, column_labels: Tensor, first: int | None) -> None:
        if labels.dtype == torch.bool:  # which torch does not search
            labels, column_labels = labels.byte(), column_labels.byte()
        labels, self.row_order = torch.sort(labels, stable=True)
        columns, self.column_order = torch.sort(column_labels, stable=True)
        self._starts = torch.searchsorted(columns, labels)
        stops = torch.searchsorted(columns, labels, right=True)
        self._own: Tensor | None = None
        if first is not None:
            places = torch.empty_like(self.column_order)
            places[self.column_order] = torch.arange(len(places), device=places.device)
            self._own = places[first : first + len(labels)][self.row_order]
        self._number = stops - self._starts - int(first is not None)
        self._begin: list[int] = self._starts.tolist()
        self._end: list[int] = stops.tolist()

    def band(self, rows: slice) -> slice:
        return slice(self._begin[rows.start], self._end[rows.stop - 1])

    def near(self, rows: slice) -> tuple[Tensor, Tensor]:
        number, device = self._number[rows], self._number.device
        total = sum(self._end[rows]) - sum(self._begin[rows]) - (self._own is not None) * len(number)
        owners = torch.arange(len(number), device=device).repeat_interleave(number, output_size=total)
        first = self._starts[rows] - number.cumsum(0) + number
        columns = torch.arange(total, device=device).add_(first[owners])
        if self._own is not None:  # leave it out
            columns += columns >= self._own[rows][owners]
        return owners, columns

    def selves(self, rows: slice) -> Tensor | None:
        return None if self._own is None else self._own[rows]

    def far(self, rows: slice) -> None:
        return None

    def triplets(self, rows: slice) -> None:
        return None


class TuplePairs:
    """Pairs that a miner names.

    Args:
        tuples: (anchor, positive, negative), or (anchor, positive, anchor, negative): anchors count this rank's rows, the others
            columns.
        rows: B.
        columns: C.
        dtype: Of the numbers of negatives.
        once: A pair counts once, however often it is named.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype, *, once: bool) -> None:
        anchors, positives, *rest = tuples
        pairs = [(anchors, positives), (rest[0], rest[1]) if len(rest) == 2 else (anchors, rest[0])]
        self._columns, self._dtype = columns, dtype
        places = [torch.sort(a * columns + others).values for a, others in pairs]
        if once:
            places = [place[place.diff(prepend=place[:1] - 1) != 0] for place in places]
        ends = torch.arange(rows + 1, device=anchors.device) * columns
        self._starts: list[list[int]] = [torch.searchsorted(place, ends).tolist() for place in places]
        self._places = places

    def band(self, rows: slice) -> slice:
        return slice(0, self._columns)

    def near(self, rows: slice) -> tuple[Tensor, Tensor]:
        places = self._of(rows, 0)
        return places // self._columns, places % self._columns

    def selves(self, rows: slice) -> None:
        return None

    def far(self, rows: slice) -> Tensor:
        places = self._of(rows, 1)
        number = torch.zeros(rows.stop - rows.start, self._columns, dtype=self._dtype, device=places.device)
        ones = torch.ones((), dtype=self._dtype, device=places.device).expand(len(places))
        number.view(-1).index_add_(0, places, ones)
        return number

    def triplets(self, rows: slice) -> None:
        return None

    def contradict(self) -> bool:
        """Whether a pair is named as a positive and as a negative."""
        return bool(torch.isin(*self._places).any())

    def _of(self, rows: slice, kind: int) -> Tensor:
        places, starts = self._places[kind], self._starts[kind]
        found: Tensor = places[starts[rows.start] : starts[rows.stop]] - rows.start * self._columns
        return found


class TripletTuples:
    """Triplets that a miner names, for a loss over triplets.

    Args:
        tuples: (anchor, positive, negative): anchors count this rank's rows, the others columns.
        rows: B.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(self, tuples: tuple[Tensor, ...], rows: int) -> None:
        self._anchors, order = torch.sort(tuples[0], stable=True)
        self._positives, self._negatives = tuples[1][order], tuples[2][order]
        self._starts = _starts(self._anchors, rows)

    def band(self, rows: slice) -> slice:
        return slice(0, 0)

    def near(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self._anchors[:0], self._anchors[:0]

    def selves(self, rows: slice) -> None:
        return None

    def far(self, rows: slice) -> None:
        return None

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(self._starts[rows.start], self._starts[rows.stop])
        return self._anchors[part] - rows.start, self._positives[part], self._negatives[part]


def _starts(anchors: Tensor, rows: int) -> list[int]:
    """Where each row's tuples begin, and where the last one's end."""
    return torch.searchsorted(anchors, torch.arange(rows + 1, device=anchors.device)).tolist()
