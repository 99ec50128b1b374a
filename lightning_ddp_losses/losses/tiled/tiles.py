"""A tile: the distances of a few rows to all columns (``distances``), and masks of the positives and negatives among its entries.

Each formula of ``tile_functions`` is written once and works with any of these masks:

* ``WholePairs``: masks of all columns, from the labels of rows and columns. The host does not read them and never waits.
* ``SortedPairs``: masks of a band of columns. Rows and columns are sorted by label, so the positives of a tile's rows are in a few
  adjacent columns. Outside the band every entry is a negative. The host reads the bands once per call.
* ``NamedPairs``: counts for all columns, i.e. how often a miner selects each entry.

``NamedTriplets`` do not use masks: each triplet consists of three rows.

Legend: ``T`` rows of a tile, ``C`` columns, ``b`` columns of a band, ``B`` rows on this rank.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# ---------------------------------------------------------------------- masks


class LabelKeys(NamedTuple):
    """Tensors from which a compiled function builds its masks, so that ``torch.compile`` fuses them with the formula.

    Attributes:
        row_labels: (T,).
        column_labels: (C,).
        own_columns: (T, 1), the column that contains each row itself. None if rows and columns are different samples.
    """

    row_labels: Tensor
    column_labels: Tensor
    own_columns: Tensor | None


class Masks:
    """Masks of a tile whose pairs are determined by labels. Each mask is created on first use.

    Args:
        row_labels: (T,).
        column_labels: (b,), labels of the band.
        own_columns: (T, 1), the column of the band that contains each row itself, or an int, the first of these columns, if they are
            consecutive. None if rows and columns are different samples.
        band: The columns that may contain positives. If None, all columns.
        most_positives: The largest number of positives of any row. None if the host has not read it.
        counts: (T,), the number of positives of each row. If None, the mask is summed.
        overwrites: True if the tile's matrix may be overwritten. Applies only with a band.
        lowest: Returns the lowest number of the tile's dtype, 0-dim, whose creation costs a launch. If None, a Python number is used.
        functional: True if the masks are created inside a compiled function.

    Attributes:
        places: (T, b), the column of each entry that may be a positive. None if they are the columns of a band.
    """

    counted = False
    places: Tensor | None = None

    def __init__(
        self,
        row_labels: Tensor,
        column_labels: Tensor,
        own_columns: Tensor | int | None,
        *,
        band: slice | None = None,
        most_positives: int | None = None,
        counts: Tensor | None = None,
        overwrites: bool = False,
        lowest: Callable[[], Tensor] | None = None,
        functional: bool = False,
    ) -> None:
        self._row_labels, self._column_labels, self._own_columns = row_labels.unsqueeze(1), column_labels, own_columns
        self.band, self.most_positives, self._counts = band, most_positives, counts
        self._overwrites, self._lowest, self._functional = overwrites, lowest, functional
        # on the CPU, copying is faster than comparing labels or filling part of a matrix
        self._copies = band is not None and row_labels.is_cpu
        self._same: Tensor | None = None
        self._positives: Tensor | None = None

    @property
    def are_one_batch(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._own_columns is not None

    @property
    def same(self) -> Tensor:
        """(T, b), entries with equal labels, including each row with itself."""
        if self._same is None:
            self._same = self._row_labels == self._column_labels
        return self._same

    @property
    def positives(self) -> Tensor:
        """(T, b), entries with equal labels, excluding each row with itself. May reuse the memory of ``same``, which is then recomputed."""
        if self._positives is None:
            same, self._same = self.same, None
            if self._copies:
                same, self._same = same.clone(), same
            self._positives = self.fill_itself(same, False)
        return self._positives

    @property
    def same_or_positives(self) -> Tensor:
        """``positives`` if they have been computed, else ``same``, for values that are 0 or overwritten at pairs of a row with itself."""
        return self.same if self._positives is None else self._positives

    def in_band(self, values: Tensor) -> Tensor:
        """Return a view of the part (T, b) or (b,) of values (T, C) or (C,) that may belong to positives."""
        return values if self.band is None else values[..., self.band]

    def fill_itself(self, values: Tensor, fill: float) -> Tensor:
        """Overwrite (T, b) values where a row is paired with itself, and return them (in new memory inside a compiled function)."""
        own = self._own_columns
        if own is None:
            return values
        if isinstance(own, int):
            values[:, own : own + len(values)].diagonal().fill_(fill)
            return values
        if self._functional:
            return values.masked_fill(torch.arange(values.shape[1], device=values.device) == own, fill)
        return values.scatter_(1, own, fill)

    def without_strangers(self, matrix: Tensor, fill: float) -> Tensor:
        """Return a matrix (T, C) with ``fill`` in entries that are not pairs. May overwrite ``matrix``."""
        if self.band is None:
            return self.fill_itself(matrix, fill)
        self.fill_itself(self.in_band(matrix), fill)
        return matrix

    def split(self, matrix: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """Return (T, C) negatives, ``fill`` elsewhere, and the entries (T, b) that may be positives, which are not overwritten."""
        if self.band is None:
            return matrix.masked_fill(self.same, fill), matrix
        entries, negatives = self.in_band(matrix), matrix
        if self._overwrites:
            entries = entries.clone()
        else:
            negatives = matrix.clone()
        self._overwrite_same(self.in_band(negatives), fill)
        return negatives, entries

    def hide_(self, matrix: Tensor, fill: float) -> Tensor:
        """Overwrite entries of a matrix (T, C) with equal labels, and return the entries for ``restore_``. Requires a band."""
        entries = self.in_band(matrix).clone()
        self._overwrite_same(self.in_band(matrix), fill)
        return entries

    def restore_(self, matrix: Tensor, entries: Tensor) -> None:
        """Undo ``hide_``."""
        self.in_band(matrix).copy_(entries)

    def add_in_band_(self, values: Tensor, added: Tensor, alpha: float) -> None:
        """Add ``alpha`` times (T, b) numbers, which are 0 for entries that are not positives, to values (T, C)."""
        self.in_band(values).add_(added, alpha=alpha)

    def lowest_but(self, mask: Tensor, values: Tensor) -> Tensor:
        """Return a copy of values with the lowest number outside the mask."""
        if self._lowest is None:
            return torch.where(mask, values, torch.finfo(values.dtype).min)
        return torch.where(mask, values, self._lowest())

    def weigh_negatives_(self, values: Tensor) -> Tensor:
        """Multiply (T, C) values in place by how often each entry counts as a negative, and return them."""
        self._overwrite_same(self.in_band(values), 0)
        return values

    def number_of_positives(self, like: Tensor) -> Tensor:
        """Return (T,), the number of positives of each row, in the dtype of ``like``."""
        if self._counts is not None:
            return self._counts.to(like.dtype)
        return self.positives.sum(1, dtype=like.dtype)

    def number_of_negatives(self, matrix: Tensor) -> Tensor:
        """Return (T,), the number of negatives of each row of a matrix (T, C), in its dtype."""
        return matrix.shape[1] - self.same.sum(1, dtype=matrix.dtype)

    def subtract_at_positives_(self, grad: Tensor, values: Tensor) -> Tensor:
        """Subtract (T, b) values from the gradient of the positives, zero the gradient of entries that are not pairs, and return it."""
        band = self.in_band(grad).addcmul_(values, self.same_or_positives, value=-1)
        filled = self.fill_itself(band, 0)
        return filled if self.band is None else grad

    def _overwrite_same(self, band: Tensor, fill: float) -> None:
        """Overwrite (T, b) entries with equal labels."""
        if self._copies:
            band.copy_(torch.where(self.same, fill, band))
        else:
            band.masked_fill_(self.same, fill)


class PackedMasks(Masks):
    """Masks of a tile whose columns are sorted by label, with the b entries of each row that may be positives in place of a band.

    If there are many classes, these are far fewer entries than the columns from the first to the last positive of any row.

    Args:
        starts: (T,), the first column with the label of each row.
        stops: (T,), the end of the columns with the label of each row.
        columns: C. Other columns have no label of the rows.
        most: b, at least 1, and at least the number of columns with the label of any row.
        own: Column of the first row itself if the rows are the columns from there on, else None.
        overwrites: True if the tile's matrix may be overwritten.
    """

    def __init__(
        self, starts: Tensor, stops: Tensor, columns: int, most: int, own: int | None, *, overwrites: bool
    ) -> None:
        starts, stops = (each.clamp(0, columns).unsqueeze(1) for each in (starts, stops))
        places = starts + torch.arange(most, device=starts.device)
        self._starts, self._stops, self._own_columns, self._overwrites = starts, stops, own, overwrites
        self._same, self._positives, self._lowest = places < stops, None, None
        # a row with fewer columns repeats its last one. If it has none, it repeats any other column
        self.places: Tensor = torch.minimum(places, (stops - 1).clamp_min_(0))
        self.band = self._counts = None

    @property
    def positives(self) -> Tensor:
        if self._positives is None:
            self._positives = self.same
            if isinstance(self._own_columns, int):
                own = torch.arange(self._own_columns, self._own_columns + len(self.same)).unsqueeze(1)
                self._positives = self.same & (self.places != own)
        return self._positives

    def in_band(self, values: Tensor) -> Tensor:
        """Return the (T, b) entries of values (T, C) or (C,) that may belong to positives, in new memory."""
        return values[self.places] if values.ndim == 1 else values.gather(1, self.places)

    def split(self, matrix: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        negatives = matrix if self._overwrites else matrix.clone()
        return negatives, self.hide_(negatives, fill)

    def hide_(self, matrix: Tensor, fill: float) -> Tensor:
        entries = self.in_band(matrix)
        matrix.scatter_(1, self.places, torch.where(self._starts < self._stops, fill, entries))
        return entries

    def restore_(self, matrix: Tensor, entries: Tensor) -> None:
        matrix.scatter_(1, self.places, entries)

    def weigh_negatives_(self, values: Tensor) -> Tensor:
        self.hide_(values, 0)
        return values

    def subtract_at_positives_(self, grad: Tensor, values: Tensor) -> Tensor:
        self.add_in_band_(grad, values * self.same, -1)
        return self.fill_itself(grad, 0)

    def add_in_band_(self, values: Tensor, added: Tensor, alpha: float) -> None:
        values.scatter_add_(1, self.places, added * alpha)


class CountedMasks(Masks):
    """Masks over all columns of a tile whose pairs are selected by a miner, which never pairs a row with itself.

    Args:
        positives: (T, C), how often each entry is selected as a positive.
        negatives: (T, C), how often each entry is selected as a negative.
        most_positives: The largest number of positives of any row.
        repeats_negatives: True if an entry may be selected more than once as a negative.
    """

    counted = True

    def __init__(self, positives: Tensor, negatives: Tensor, most_positives: int, *, repeats_negatives: bool) -> None:
        self._positives, self.negatives, self.most_positives = positives, negatives, most_positives
        self._repeats_negatives = repeats_negatives
        self.band = self._own_columns = self._counts = None

    @property
    def same(self) -> Tensor:
        return self.positives > 0

    def without_strangers(self, matrix: Tensor, fill: float) -> Tensor:
        return matrix.masked_fill(self._are_strangers(), fill)

    def split(self, matrix: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        negatives = matrix.masked_fill(self.negatives == 0, fill)
        # a negative that is selected n times contributes like n negatives
        if self._repeats_negatives:
            negatives.add_(self.negatives.clamp(min=1).log_())
        return negatives, matrix

    def lowest_but(self, mask: Tensor, values: Tensor) -> Tensor:
        return torch.where(mask > 0, values, torch.finfo(values.dtype).min)

    def weigh_negatives_(self, values: Tensor) -> Tensor:
        return values.mul_(self.negatives)

    def number_of_negatives(self, matrix: Tensor) -> Tensor:
        return self.negatives.sum(1, dtype=matrix.dtype)

    def subtract_at_positives_(self, grad: Tensor, values: Tensor) -> Tensor:
        return grad.masked_fill_(self._are_strangers(), 0).addcmul_(values, self.positives, value=-1)

    def _are_strangers(self) -> Tensor:
        return (self.positives + self.negatives) == 0


Keys = Masks | LabelKeys
"""Pairs of a tile, in the form that a formula receives."""


def masks_of(keys: Keys) -> Masks:
    """Return the masks of a tile. Inside a compiled function they are created here from labels."""
    if not isinstance(keys, LabelKeys):
        return keys
    return Masks(*keys, functional=True)


# ---------------------------------------------------------------------- pairs of a batch, tile by tile


class Pairs:
    """Pairs of all rows and columns.

    Attributes:
        row_order: (B,), the tiles' order of this rank's rows. If None, they are not reordered.
        column_order: (C,), order of the columns. If None, they are not reordered.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def masks(self, rows: slice, *, overwrites: bool) -> Keys | Triplets:
        """Return the masks, or the triplets, of some rows. If ``overwrites``, masks with a band may overwrite the tile's matrix."""
        raise NotImplementedError


class WholePairs(Pairs):
    """Pairs of all rows and columns, from labels.

    Args:
        labels: (B,), labels of this rank's rows.
        column_labels: (C,).
        first: Column of this rank's first row, if rows and columns are the same samples (a row is not its own partner), else None.
        like: Tensor of the tiles' dtype and device.
        compiled: True if the tile functions are compiled.
    """

    def __init__(
        self, labels: Tensor, column_labels: Tensor, first: int | None, like: Tensor, *, compiled: bool
    ) -> None:
        self._labels, self._column_labels, self._first, self._compiled = labels, column_labels, first, compiled
        # created by the first tile that needs it and shared by all tiles
        self._lowest = functools.cache(lambda: like.new_full((), torch.finfo(like.dtype).min))

    def masks(self, rows: slice, *, overwrites: bool) -> Keys:
        """Return the masks of some rows against all columns."""
        labels, own = self._labels[rows], None
        if self._first is not None:
            own = rows.start + self._first
        if not self._compiled:
            return Masks(labels, self._column_labels, own, lowest=self._lowest)
        if own is None:
            return LabelKeys(labels, self._column_labels, None)
        own_columns = torch.arange(own, own + len(labels), device=labels.device)
        return LabelKeys(labels, self._column_labels, own_columns.unsqueeze(1))


class SortedPairs(Pairs):
    """Pairs of all rows and columns, from labels, with rows and columns sorted by label.

    Args:
        labels: (B,), labels of this rank's rows.
        column_labels: (C,).
        first: Column of this rank's first row, if rows and columns are the same samples (a row is not its own partner), else None.
        all_labels: (G,), labels of all ranks' rows.

    Attributes:
        matching: Over all ranks' rows, the number of pairs of a row and a column with equal labels, including each row with itself.
    """

    def __init__(self, labels: Tensor, column_labels: Tensor, first: int | None, all_labels: Tensor) -> None:
        if labels.dtype == torch.bool:  # torch.searchsorted does not support bool
            labels, column_labels, all_labels = labels.byte(), column_labels.byte(), all_labels.byte()
        self._labels, self.row_order = torch.sort(labels, stable=True)
        self._columns, self.column_order = torch.sort(column_labels, stable=True)
        # the positives of a row are the columns from the first to the last with its label
        starts = torch.searchsorted(self._columns, self._labels)
        stops = torch.searchsorted(self._columns, self._labels, right=True)
        self._own_columns: Tensor | None = None
        self._positive_counts = stops - starts
        if first is not None:
            self._positive_counts -= 1
            # the column of each row itself, after sorting
            places = torch.empty_like(self.column_order)
            places[self.column_order] = torch.arange(len(places), device=places.device)
            self._own_columns = places[first : first + len(labels)][self.row_order].unsqueeze(1)
        matching = torch.searchsorted(self._columns, all_labels, right=True)
        matching = (matching - torch.searchsorted(self._columns, all_labels)).sum().view(1)
        # one transfer to the host
        on_host: list[int] = torch.cat([starts, stops, matching]).tolist()
        self._starts, self._stops, self.matching = on_host[: len(labels)], on_host[len(labels) : -1], on_host[-1]

    def masks(self, rows: slice, *, overwrites: bool) -> Masks:
        """Return the masks of some rows against their band of columns."""
        band = slice(self._starts[rows.start], self._stops[rows.stop - 1])
        longest = max(map(operator.sub, self._stops[rows], self._starts[rows]))
        own = None
        if self._own_columns is not None:
            own, longest = self._own_columns[rows] - band.start, longest - 1
        labels, columns, counts = self._labels[rows], self._columns[band], self._positive_counts[rows]
        return Masks(labels, columns, own, band=band, most_positives=longest, counts=counts, overwrites=overwrites)


class NamedPairs(Pairs):
    """Pairs that a miner selects.

    Args:
        tuples: (anchor, positive, negative), or (anchor, positive, anchor, negative). Anchors are indices of this rank's rows, positives
            and negatives are indices of columns.
        rows: B.
        columns: C.
        dtype: Dtype of the counts.
        once: True if a pair counts once, however often it is selected.

    Attributes:
        contradict: True if a pair is selected both as a positive and as a negative. Determined only if ``once``.
    """

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype, *, once: bool) -> None:
        anchors, positives, *rest = tuples
        negative_anchors, negatives = (anchors, *rest) if len(rest) == 1 else rest
        self._columns, self._dtype, self._once = columns, dtype, once
        # sorted indices into the flattened matrix of all pairs, so that the pairs of a tile are contiguous
        pairs = ((anchors, positives), (negative_anchors, negatives))
        self._places = [torch.sort(own * columns + others).values for own, others in pairs]
        # start of each row's indices and end of the last row, transferred to the host together with both flags
        ends = torch.arange(rows + 1, device=anchors.device) * columns
        starts = [torch.searchsorted(places, ends) for places in self._places]
        repeats = (self._places[1].diff() == 0).any().view(1)
        contradict = torch.zeros_like(repeats)
        if once:
            contradict = _have_common(*self._places).view(1)
        on_host: list[int] = torch.cat([*starts, repeats, contradict]).tolist()
        self._starts = on_host[: rows + 1], on_host[rows + 1 : -2]
        self._repeats_negatives, self.contradict = bool(on_host[-2]) and not once, bool(on_host[-1])

    def masks(self, rows: slice, *, overwrites: bool) -> CountedMasks:
        """Return the counts of some rows against all columns."""
        starts = self._starts[0][rows.start : rows.stop + 1]
        longest = max(stop - start for start, stop in itertools.pairwise(starts))
        positives, negatives = self._counts(rows, 0), self._counts(rows, 1)
        return CountedMasks(positives, negatives, longest, repeats_negatives=self._repeats_negatives)

    def _counts(self, rows: slice, kind: int) -> Tensor:
        """Count how often each entry of some rows is selected, (T, C), as a positive (kind 0) or a negative (kind 1)."""
        starts = self._starts[kind]
        places = self._places[kind][starts[rows.start] : starts[rows.stop]] - rows.start * self._columns
        counts = torch.zeros(rows.stop - rows.start, self._columns, dtype=self._dtype, device=places.device)
        one = torch.ones((), dtype=self._dtype, device=places.device)
        if self._once:
            counts.view(-1).index_fill_(0, places, 1)
        else:
            counts.view(-1).index_add_(0, places, one.expand(len(places)))
        return counts


def _have_common(places: Tensor, others: Tensor) -> Tensor:
    """Return whether two ascending lists have an element in common, 0-dim."""
    if not len(others):
        return torch.zeros((), dtype=torch.bool, device=places.device)
    return (others[torch.searchsorted(others, places).clamp_max(len(others) - 1)] == places).any()


class NamedTriplets(Pairs):
    """Triplets that a miner selects, for a loss over triplets.

    Args:
        tuples: (anchor, positive, negative). Anchors are indices of this rank's rows, positives and negatives are indices of columns.
        rows: B.
    """

    def __init__(self, tuples: tuple[Tensor, ...], rows: int) -> None:
        self._anchors, order = torch.sort(tuples[0], stable=True)
        self._positives, self._negatives = tuples[1][order], tuples[2][order]
        # start of each row's triplets, and end of the last row
        ends = torch.arange(rows + 1, device=self._anchors.device)
        self._starts: list[int] = torch.searchsorted(self._anchors, ends).tolist()

    def masks(self, rows: slice, *, overwrites: bool) -> Triplets:
        """Return the triplets of some rows."""
        part = slice(self._starts[rows.start], self._starts[rows.stop])
        return Triplets(self._anchors[part] - rows.start, self._positives[part], self._negatives[part])


class Triplets(NamedTuple):
    """Triplets of a tile, (n,) each: a row of the tile and two columns."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor


class Tile(NamedTuple):
    """A few rows against all columns, or against some of them.

    Attributes:
        matrix: (T, C), scaled distances. The formulas may overwrite entries of rows with themselves, and all entries if there is a band.
        rows: Rows of this rank.
        keys: Its pairs.
        columns: Its columns. If None, all columns.
        places: If the matrix has only a few entries (T, p) of each row, the index of each entry's column among the tile's columns.
    """

    matrix: Tensor
    rows: slice
    keys: Keys | Triplets
    columns: slice | None = None
    places: Tensor | None = None
