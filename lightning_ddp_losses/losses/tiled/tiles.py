"""Tiles of the matrix of pairs: which of their entries are positives and negatives.

Two concepts that only make sense together: a `Tile` (a few rows against columns) and the pairs of a batch (`LabelPairs` where labels
make them, `TuplePairs` and `TripletTuples` where a miner names them). These make no mask over the whole batch: rows and columns are
sorted by label, so the positives of a row are neighbours, and those of a tile's rows lie in one range of columns. To list them the
host has to know their number; where it would have to wait for it, a `MaskedTile` has masks (`MaskedPairs`), tile by tile.

Legend: ``T`` rows of a tile, ``C`` columns, ``B`` rows on this rank, ``n`` positives of a tile's rows.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.tile_functions import Keys, PairKeys, PairMasks


class PairList(NamedTuple):
    """Pairs one by one.

    Attributes:
        rows: (n,) of the tile, ascending.
        columns: (n,) of the tile.
        places: (n,) in the flattened tile.
    """

    rows: Tensor
    columns: Tensor
    places: Tensor


class Tile(NamedTuple):
    """A few rows against columns.

    Positives are few and listed, each as often as it counts. Negatives are many: all entries that are neither a positive nor of a row
    with itself, once each, unless ``negative_counts`` says how often each counts.

    Attributes:
        matrix: (T, C), scaled distances, contiguous; belongs to whoever gets the tile, to overwrite.
        rows: Which of this rank's rows.
        columns: Which columns of the whole batch; a block of a ring, else all.
        positives: The positive pairs.
        self_pairs: (m,) places of rows with themselves, where they are among the columns.
        negative_counts: (T, C) how often each entry counts as a negative; None: see above.
        positive_columns: The columns that may have positives, counted in the tile.
        triplets: (anchor, positive, negative) where a miner names them: anchors count the tile's rows; all else then means nothing.
        most_positives: How many positives the row with the most has.
        repeats_negatives: Whether some entry counts as a negative more than once.
    """

    matrix: Tensor
    rows: slice
    columns: slice
    positives: PairList
    self_pairs: Tensor | None
    negative_counts: Tensor | None
    positive_columns: slice
    triplets: tuple[Tensor, Tensor, Tensor] | None = None
    most_positives: int = 0
    repeats_negatives: bool = False

    def positive_entries(self) -> Tensor:
        """Copies the entries of the positives, (n,)."""
        return self.matrix.view(-1)[self.positives.places]

    def add_at_positives_(self, values: Tensor) -> None:
        """Adds (n,) values to the entries of the positives."""
        self.matrix.view(-1).index_add_(0, self.positives.places, values)

    def scatter_positives(self, values: Tensor) -> Tensor:
        """Makes a matrix of (n,) values of the positives, (T, b) for the b columns of ``positive_columns``."""
        out = values.new_zeros(self.matrix.shape[0], self.positive_columns.stop - self.positive_columns.start)
        places = self.positives.rows * out.shape[1] + (self.positives.columns - self.positive_columns.start)
        out.view(-1).index_add_(0, places, values)
        return out

    def keep_negatives_(self, values: Tensor, fill: float) -> Tensor:
        """Overwrites with ``fill`` what is no negative in ``values``, (T, C); returns it."""
        if self.negative_counts is not None:
            return values.masked_fill_(self.negative_counts == 0, fill)
        values.view(-1).index_fill_(0, self.positives.places, fill)
        return self._fill_self_pairs_(values, fill)

    def keep_partners_(self, values: Tensor, fill: float) -> Tensor:
        """Overwrites with ``fill`` what is neither a negative nor a positive in ``values``, (T, C); returns it."""
        if self.negative_counts is None:
            return self._fill_self_pairs_(values, fill)
        is_stranger = self.negative_counts == 0
        is_stranger.view(-1).index_fill_(0, self.positives.places, 0)
        return values.masked_fill_(is_stranger, fill)

    def weight_negatives_(self, values: Tensor) -> Tensor:
        """Multiplies ``values``, (T, C), by how often each entry counts as a negative; returns it."""
        if self.negative_counts is None:
            return self.keep_negatives_(values, 0)
        return values.mul_(self.negative_counts)

    def number_of_negatives(self) -> Tensor:
        """Computes (T,), how many negatives each row has, each as often as it counts."""
        if self.negative_counts is not None:
            return self.negative_counts.sum(1)
        number = self.matrix.new_full((self.matrix.shape[0],), self.matrix.shape[1])
        number.index_add_(0, self.positives.rows, number.new_full(self.positives.rows.shape, -1))
        if self.self_pairs is not None:
            number.sub_(1)
        return number

    def _fill_self_pairs_(self, values: Tensor, fill: float) -> Tensor:
        if self.self_pairs is not None:
            values.view(-1).index_fill_(0, self.self_pairs, fill)
        return values


class MaskedTile(NamedTuple):
    """A few rows against columns, whose pairs are masks that follow from labels.

    Attributes:
        matrix: (T, C), scaled distances; entries of rows with themselves may be overwritten.
        rows: Which of this rank's rows.
        columns: Which columns of the whole batch; a block of a ring, else all.
        keys: What tells positives from negatives: labels for a compiled function, else masks, which backward finds where it finds the
            tile.
    """

    matrix: Tensor
    rows: slice
    columns: slice
    keys: Keys


class MaskedPairs:
    """All pairs that labels make, as masks: nothing of them has a length that the host must learn.

    Args:
        labels: (B,) of this rank's rows.
        column_labels: (C,).
        first: Where this rank's first row would be among the columns, if they went on both ways, where rows and columns are the same
            samples (a row is not its own partner); None where they are not.
        like: Gives the tiles' dtype and device.
        compiled: Keys go to a compiled function.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(
        self, labels: Tensor, column_labels: Tensor, first: int | None, like: Tensor, *, compiled: bool
    ) -> None:
        self._labels, self._column_labels, self._first, self._compiled = labels, column_labels, first, compiled
        # by the first tile that needs it, for all of them
        self._lowest = functools.cache(lambda: like.new_full((), torch.finfo(like.dtype).min))

    def keys(self, rows: slice) -> Keys:
        """Takes those of some rows."""
        labels, column_labels, first = self._labels[rows], self._column_labels, self._first
        if not self._compiled:
            itself = None
            if first is not None:
                # the diagonal of these rows and columns, as far as it is in the tile
                low = max(rows.start + first, 0)
                high = max(low, min(rows.stop + first, len(column_labels)))
                itself = (slice(low - first - rows.start, high - first - rows.start), slice(low, high))
            return PairMasks(labels, column_labels, itself, lowest=self._lowest)
        row_ids = column_ids = None
        if first is not None:
            column_ids = torch.arange(len(column_labels), device=labels.device)
            row_ids = torch.arange(rows.start + first, rows.stop + first, device=labels.device)
        return PairKeys(labels, column_labels, row_ids, column_ids)


class Pairs(Protocol):
    """Positives and negatives of this rank's rows, tile by tile."""

    @property
    def row_order(self) -> Tensor | None:
        """(B,), in which order tiles take this rank's rows; None: as they are."""
        ...

    @property
    def column_order(self) -> Tensor | None:
        """(C,), in which order columns lie; None: as they are."""
        ...

    @property
    def repeats_negatives(self) -> bool:
        """Whether some pair counts as a negative more than once."""
        ...

    def positive_columns(self, rows: slice) -> slice:
        """Tells the columns among which all positives are."""
        ...

    def positives(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Lists (n,) each: row, counted from the first and ascending, and column of each positive, as often as it counts."""
        ...

    def most_positives(self, rows: slice) -> int:
        """Counts the positives of the row with the most."""
        ...

    def self_pairs(self, rows: slice) -> Tensor | None:
        """Lists (T,) the columns of the rows themselves, which are neither positives nor negatives; None: they are not there."""
        ...

    def negative_counts(self, rows: slice) -> Tensor | None:
        """Counts (T, C) how often each column is a negative; None: once, but for the positives and the rows themselves."""
        ...

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor] | None:
        """Lists the triplets of the rows, where they are named one by one."""
        ...


class LabelPairs:
    """All pairs that labels make.

    Args:
        labels: (B,) of this rank's rows.
        column_labels: (C,).
        first: The column that is this rank's first row, where rows and columns are the same samples (a row is not its own positive);
            None where they are not.
        all_labels: (G,) of all ranks' rows; None: ``matching`` is not wanted.

    Attributes:
        matching: How many of all ranks' rows and columns have the same label, each with itself too.
    """

    repeats_negatives = False

    def __init__(
        self, labels: Tensor, column_labels: Tensor, first: int | None, all_labels: Tensor | None = None
    ) -> None:
        all_labels = labels[:0] if all_labels is None else all_labels
        if labels.dtype == torch.bool:  # which torch does not search
            labels, column_labels, all_labels = labels.byte(), column_labels.byte(), all_labels.byte()
        # sorted by label, the positives of a row are the columns from the first to the last of its label
        labels, self.row_order = torch.sort(labels, stable=True)
        columns, self.column_order = torch.sort(column_labels, stable=True)
        self._starts = torch.searchsorted(columns, labels)
        stops = torch.searchsorted(columns, labels, right=True)
        self._own_columns: Tensor | None = None
        if first is not None:
            # where sorting has put the column of each row itself
            places = torch.empty_like(self.column_order)
            places[self.column_order] = torch.arange(len(places), device=places.device)
            self._own_columns = places[first : first + len(labels)][self.row_order]
        self._number = stops - self._starts - int(first is not None)
        # of all positives listed row by row, the column of the k-th is k and what its row adds
        listed = self._number.cumsum(0)
        self._to_column = self._starts - listed + self._number
        matching = torch.searchsorted(columns, all_labels, right=True) - torch.searchsorted(columns, all_labels)
        # the sizes of all lists to come: what the host has to know, in one transfer
        on_host: list[int] = torch.cat([self._starts, stops, listed, matching.sum().view(1)]).tolist()
        rows = len(labels)
        self._begin, self._end = on_host[:rows], on_host[rows : 2 * rows]
        self._listed_before, self.matching = [0, *on_host[2 * rows : -1]], on_host[-1]

    def positive_columns(self, rows: slice) -> slice:
        return slice(self._begin[rows.start], self._end[rows.stop - 1])

    def positives(self, rows: slice) -> tuple[Tensor, Tensor]:
        # how many there are before them, and of them: a GPU need not be waited for
        start, stop = self._listed_before[rows.start], self._listed_before[rows.stop]
        owners = torch.repeat_interleave(self._number[rows], output_size=stop - start)
        columns = torch.arange(start, stop, device=owners.device).add_(self._to_column[rows][owners])
        if self._own_columns is not None:  # leave it out
            columns += columns >= self._own_columns[rows][owners]
        return owners, columns

    def most_positives(self, rows: slice) -> int:
        longest = max(end - begin for begin, end in zip(self._begin[rows], self._end[rows], strict=True))
        return longest - (self._own_columns is not None)

    def self_pairs(self, rows: slice) -> Tensor | None:
        return None if self._own_columns is None else self._own_columns[rows]

    def negative_counts(self, rows: slice) -> None:
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

    Attributes:
        contradict: Whether a pair is named as a positive and as a negative, where each counts once; else this is not looked at.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype, *, once: bool) -> None:
        anchors, positives, *rest = tuples
        negative_anchors, negatives = (anchors, *rest) if len(rest) == 1 else rest
        self._columns, self._dtype = columns, dtype
        # places in the flattened matrix of all pairs, sorted, so that a tile's are neighbours
        pairs = ((anchors, positives), (negative_anchors, negatives))
        places = [torch.sort(own * columns + others).values for own, others in pairs]
        if once:
            places = [_without_repeats(place, rows * columns) for place in places]
        # where each row's begin, and where the last one's end; with both flags in one transfer to the host
        ends = torch.arange(rows + 1, device=anchors.device) * columns
        starts = [torch.searchsorted(place, ends) for place in places]
        repeats = (places[1].diff() == 0).any().view(1)
        contradict = _have_common(places[0], places[1], rows * columns).view(1) if once else torch.zeros_like(repeats)
        on_host: list[int] = torch.cat([*starts, repeats, contradict]).tolist()
        self._starts = on_host[: rows + 1], on_host[rows + 1 : -2]
        self.repeats_negatives, self.contradict = bool(on_host[-2]) and not once, bool(on_host[-1])
        self._places = places

    def positive_columns(self, rows: slice) -> slice:
        return slice(0, self._columns)

    def positives(self, rows: slice) -> tuple[Tensor, Tensor]:
        places = self._places_in(rows, 0)
        return places // self._columns, places % self._columns

    def most_positives(self, rows: slice) -> int:
        starts = self._starts[0][rows.start : rows.stop + 1]
        return max(stop - start for start, stop in itertools.pairwise(starts))

    def self_pairs(self, rows: slice) -> None:
        return None

    def negative_counts(self, rows: slice) -> Tensor:
        places = self._places_in(rows, 1)
        number = torch.zeros(rows.stop - rows.start, self._columns, dtype=self._dtype, device=places.device)
        ones = torch.ones((), dtype=self._dtype, device=places.device).expand(len(places))
        number.view(-1).index_add_(0, places, ones)
        return number

    def triplets(self, rows: slice) -> None:
        return None

    def _places_in(self, rows: slice, kind: int) -> Tensor:
        """Lists the places of positives (0) or negatives (1) in the flattened tile of some rows."""
        places, starts = self._places[kind], self._starts[kind]
        found: Tensor = places[starts[rows.start] : starts[rows.stop]] - rows.start * self._columns
        return found


def _without_repeats(places: Tensor, beyond: int) -> Tensor:
    """Takes ascending places once each; those that would be there again may be ``beyond`` in their place, at the end."""
    repeats = places.diff(prepend=places[:1] - 1) == 0
    if places.device.type == "cpu":
        return places[~repeats]
    # to select them would wait for their number
    return places.masked_fill(repeats, beyond).sort().values


def _have_common(places: Tensor, others: Tensor, beyond: int) -> Tensor:
    """Tells whether two ascending lists have a place in common that is not ``beyond``; 0-dim."""
    if not len(others):
        return torch.zeros((), dtype=torch.bool, device=places.device)
    found = others[torch.searchsorted(others, places).clamp_max(len(others) - 1)] == places
    return (found & (places < beyond)).any()


class TripletTuples:
    """Triplets that a miner names, for a loss over triplets.

    Args:
        tuples: (anchor, positive, negative): anchors count this rank's rows, the others columns.
        rows: B.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None
    repeats_negatives = False

    def __init__(self, tuples: tuple[Tensor, ...], rows: int) -> None:
        self._anchors, order = torch.sort(tuples[0], stable=True)
        self._positives, self._negatives = tuples[1][order], tuples[2][order]
        # where each row's triplets begin, and where the last one's end
        ends = torch.arange(rows + 1, device=self._anchors.device)
        self._starts: list[int] = torch.searchsorted(self._anchors, ends).tolist()

    def positive_columns(self, rows: slice) -> slice:
        return slice(0, 0)

    def positives(self, rows: slice) -> tuple[Tensor, Tensor]:
        return self._anchors[:0], self._anchors[:0]

    def most_positives(self, rows: slice) -> int:
        return 0

    def self_pairs(self, rows: slice) -> None:
        return None

    def negative_counts(self, rows: slice) -> None:
        return None

    def triplets(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = slice(self._starts[rows.start], self._starts[rows.stop])
        return self._anchors[part] - rows.start, self._positives[part], self._negatives[part]
