"""A tile: the distances of a few rows to all columns, and the masks that tell which of its entries are positives and negatives.

Distances are PML's by its own code, and the common ones as one matrix product. A matrix comes multiplied by ``scale``, which a loss would
otherwise have to do in one more pass over memory.

A formula of ``tile_functions`` is written once, for any of these masks:

* ``WholePairs``: masks of all columns, from the labels of rows and columns. The host does not read them and never waits.
* ``SortedPairs``: masks of a band of columns. Rows and columns are sorted by label, so the positives of a tile's rows lie in a few
  neighbouring columns. Outside the band every entry is a negative. The host reads the bands once a call.
* ``NamedPairs``: counts for all columns: how often a miner names each entry.

``NamedTriplets`` are no masks: each triplet has its own three rows.

Legend: ``T`` rows of a tile, ``C`` columns, ``D`` embedding size, ``b`` columns of a band, ``B`` rows on this rank.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.losses import products
from lightning_ddp_losses.losses.pml_registry import DISTANCES

# torch.cdist subtracts row by row up to so many rows on either side, and multiplies matrices beyond (torch 2.13, measured 2026)
_DIRECT_ROWS = 25


# ---------------------------------------------------------------------- masks


class LabelKeys(NamedTuple):
    """Tensors from which a compiled function makes its own masks, so that ``torch.compile`` fuses them with the rest.

    Attributes:
        row_labels: (T,).
        column_labels: (C,).
        own_columns: (T, 1), the column of each row itself. None: rows and columns are different samples.
    """

    row_labels: Tensor
    column_labels: Tensor
    own_columns: Tensor | None


class Masks:
    """Masks of a tile with pairs that follow from labels. Each is made when it is first needed.

    Args:
        row_labels: (T,).
        column_labels: (b,), of the band.
        own_columns: (T, 1), the column in the band of each row itself, or the first of them, if they follow each other. None: rows and
            columns are different samples.
        band: The columns that may hold positives. None: all of them.
        most_positives: The number of positives of the row with the most. None: the host does not know.
        counts: (T,), the number of positives of each row. None: it is counted in the mask.
        overwrites: The tile's matrix may be overwritten, with a band.
        lowest: Returns the lowest number of the tile's dtype, 0-dim, which costs a launch. None: it is made from a Python number.
        functional: The masks are made inside a compiled function.
    """

    counted = False

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
        # the CPU copies faster than it compares labels, or fills a part of a matrix
        self._copies = band is not None and row_labels.is_cpu
        self._same: Tensor | None = None
        self._positives: Tensor | None = None

    @property
    def are_one_batch(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._own_columns is not None

    @property
    def same(self) -> Tensor:
        """(T, b), entries of the same label, with the rows themselves."""
        if self._same is None:
            self._same = self._row_labels == self._column_labels
        return self._same

    @property
    def positives(self) -> Tensor:
        """(T, b), entries of the same label without the rows themselves. May take the memory of ``same``, which is then made again."""
        if self._positives is None:
            same, self._same = self.same, None
            if self._copies:
                same, self._same = same.clone(), same
            self._positives = self.fill_itself(same, False)
        return self._positives

    @property
    def same_or_positives(self) -> Tensor:
        """Either of both that exists, for values that are 0 or overwritten at the rows themselves."""
        return self.same if self._positives is None else self._positives

    def in_band(self, values: Tensor) -> Tensor:
        """Return the part (T, b) or (b,) of values (T, C) or (C,) that may belong to positives. A view."""
        return values if self.band is None else values[..., self.band]

    def fill_itself(self, values: Tensor, fill: float) -> Tensor:
        """Overwrite (T, b) values of the rows with themselves. Return them (in new memory inside a compiled function)."""
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
        """Return a matrix (T, C) with ``fill`` for entries that are no pairs. It may be overwritten."""
        if self.band is None:
            return self.fill_itself(matrix, fill)
        self.fill_itself(self.in_band(matrix), fill)
        return matrix

    def split(self, matrix: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """Return (T, C) negatives, ``fill`` elsewhere, and the entries (T, b) that may be positives, which nothing overwrites."""
        if self.band is None:
            return matrix.masked_fill(self.same, fill), matrix
        entries, negatives = self.in_band(matrix), matrix
        if self._overwrites:
            entries = entries.clone()
        else:
            negatives = matrix.clone()
        self._overwrite_same(self.in_band(negatives), fill)
        return negatives, entries

    def lowest_but(self, mask: Tensor, values: Tensor) -> Tensor:
        """Return a copy of values with the lowest number outside of a mask."""
        if self._lowest is None:
            return torch.where(mask, values, torch.finfo(values.dtype).min)
        return torch.where(mask, values, self._lowest())

    def weigh_negatives_(self, values: Tensor) -> Tensor:
        """Multiply (T, C) values by how often each entry counts as a negative. Return them."""
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
        """Subtract (T, b) values from the gradient of the positives, and clear that of entries that are no pairs. Return it."""
        band = self.in_band(grad).addcmul_(values, self.same_or_positives, value=-1)
        filled = self.fill_itself(band, 0)
        return filled if self.band is None else grad

    def _overwrite_same(self, band: Tensor, fill: float) -> None:
        """Overwrite (T, b) entries of the same label."""
        if self._copies:
            band.copy_(torch.where(self.same, fill, band))
        else:
            band.masked_fill_(self.same, fill)


class CountedMasks(Masks):
    """Masks of a tile with pairs that a miner names, of all columns. It names no row with itself.

    Args:
        positives: (T, C), how often each entry is named as a positive.
        negatives: (T, C), how often as a negative.
        most_positives: The number of positives of the row with the most.
        repeats_negatives: True if an entry may be named more than once as a negative.
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
        # a negative that is named n times is as large as n of them
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
"""Pairs of a tile, as a formula gets them."""


def masks_of(keys: Keys) -> Masks:
    """Return the masks of a tile. Those of labels inside a compiled function are made here."""
    if not isinstance(keys, LabelKeys):
        return keys
    return Masks(*keys, functional=True)


# ---------------------------------------------------------------------- pairs of a batch, tile by tile


class Pairs:
    """Pairs of all rows and columns.

    Attributes:
        row_order: (B,), the tiles' order of this rank's rows. None: as they are.
        column_order: (C,), order of the columns. None: as they are.
    """

    row_order: Tensor | None = None
    column_order: Tensor | None = None

    def masks(self, rows: slice, *, overwrites: bool) -> Keys | Triplets:
        """Return the masks, or the triplets, of some rows. ``overwrites``: the tile's matrix may be overwritten, with a band."""
        raise NotImplementedError


class WholePairs(Pairs):
    """Pairs of all rows and columns, from labels.

    Args:
        labels: (B,) of this rank's rows.
        column_labels: (C,).
        first: Column of this rank's first row, if rows and columns are the same samples (a row is not its own partner), else None.
        like: Tensor of the tiles' dtype and device.
        compiled: True if the tile functions are compiled.
    """

    def __init__(
        self, labels: Tensor, column_labels: Tensor, first: int | None, like: Tensor, *, compiled: bool
    ) -> None:
        self._labels, self._column_labels, self._first, self._compiled = labels, column_labels, first, compiled
        # made by the first tile that needs it, for all of them
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
    """Pairs of all rows and columns, from labels, with rows and columns sorted by them.

    Args:
        labels: (B,) of this rank's rows.
        column_labels: (C,).
        first: Column of this rank's first row, if rows and columns are the same samples (a row is not its own partner), else None.
        all_labels: (G,) of all ranks' rows.

    Attributes:
        matching: The number of pairs of all ranks' rows and columns that have the same label, each row with itself included.
    """

    def __init__(self, labels: Tensor, column_labels: Tensor, first: int | None, all_labels: Tensor) -> None:
        if labels.dtype == torch.bool:  # torch does not search among these
            labels, column_labels, all_labels = labels.byte(), column_labels.byte(), all_labels.byte()
        self._labels, self.row_order = torch.sort(labels, stable=True)
        self._columns, self.column_order = torch.sort(column_labels, stable=True)
        # the positives of a row are the columns from the first to the last of its label
        starts = torch.searchsorted(self._columns, self._labels)
        stops = torch.searchsorted(self._columns, self._labels, right=True)
        self._own_columns: Tensor | None = None
        self._positive_counts = stops - starts
        if first is not None:
            self._positive_counts -= 1
            # columns of the rows themselves, after sorting
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
    """Pairs that a miner names.

    Args:
        tuples: (anchor, positive, negative), or (anchor, positive, anchor, negative): anchors count this rank's rows, the others
            columns.
        rows: B.
        columns: C.
        dtype: Dtype of the counts.
        once: A pair counts once, however often it is named.

    Attributes:
        contradict: True if a pair is named as a positive and as a negative. Known if each counts once.
    """

    def __init__(self, tuples: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype, *, once: bool) -> None:
        anchors, positives, *rest = tuples
        negative_anchors, negatives = (anchors, *rest) if len(rest) == 1 else rest
        self._columns, self._dtype, self._once = columns, dtype, once
        # places in the flattened matrix of all pairs, sorted, so that those of a tile are neighbours
        pairs = ((anchors, positives), (negative_anchors, negatives))
        self._places = [torch.sort(own * columns + others).values for own, others in pairs]
        # the first place of each row, and the end of the last one. With both flags in one transfer to the host
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
        """Count how often each entry of some rows is named, (T, C): as a positive (0) or a negative (1)."""
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
    """Return whether two ascending lists have a place in common, 0-dim."""
    if not len(others):
        return torch.zeros((), dtype=torch.bool, device=places.device)
    return (others[torch.searchsorted(others, places).clamp_max(len(others) - 1)] == places).any()


class NamedTriplets(Pairs):
    """Triplets that a miner names, for a loss over triplets.

    Args:
        tuples: (anchor, positive, negative): anchors count this rank's rows, the others columns.
        rows: B.
    """

    def __init__(self, tuples: tuple[Tensor, ...], rows: int) -> None:
        self._anchors, order = torch.sort(tuples[0], stable=True)
        self._positives, self._negatives = tuples[1][order], tuples[2][order]
        # the first triplet of each row, and the end of the last one
        ends = torch.arange(rows + 1, device=self._anchors.device)
        self._starts: list[int] = torch.searchsorted(self._anchors, ends).tolist()

    def masks(self, rows: slice, *, overwrites: bool) -> Triplets:
        """Return the triplets of some rows."""
        part = slice(self._starts[rows.start], self._starts[rows.stop])
        return Triplets(self._anchors[part] - rows.start, self._positives[part], self._negatives[part])


class Triplets(NamedTuple):
    """Triplets of a tile, (n,) each: the row of the tile and two columns."""

    anchors: Tensor
    positives: Tensor
    negatives: Tensor


class Tile(NamedTuple):
    """A few rows against all columns, or some.

    Attributes:
        matrix: (T, C), scaled distances. The formulas of a loss may overwrite entries of rows with themselves, and with a band all.
        rows: Rows of this rank.
        keys: Its pairs.
        columns: Its columns. None: all.
    """

    matrix: Tensor
    rows: slice
    keys: Keys | Triplets
    columns: slice | None = None


# ---------------------------------------------------------------------- distances, and their gradients


class Side(NamedTuple):
    """Rows, or columns, of a tile on their way to a gradient.

    Attributes:
        kept: n rows, from ``kept_rows`` or ``kept_columns``.
        sums: (n, D), sums that ``vjp_`` adds to, zeros at first. None: not wanted.
        as_columns: Rows of the tile from ``kept_columns``, if the sums of its columns are those of rows too. None: they are not.
        first: The first of the columns with sums, (n - first, D).
    """

    kept: products.Operand
    sums: Tensor | None
    as_columns: products.Operand | None = None
    first: int = 0

    def addmm_(self, matrix_grad: Tensor, partners: Side, alpha: float) -> None:
        """Add the product of a matrix's gradient, (n, m), with the m partners."""
        if self.sums is not None:
            kept = partners.as_columns or partners.kept
            wanted = matrix_grad[self.first :] if self.first else matrix_grad
            self.sums.addmm_(wanted, kept.rows, alpha=alpha)


class TileDistance:
    """Any distance of pytorch-metric-learning on tiles, by its own ``compute_mat`` and autograd.

    Args:
        distance: The loss's distance.

    Attributes:
        needs_matrix_in_vjp: ``vjp_`` reads the matrix itself beside its gradient.
    """

    needs_matrix_in_vjp: bool = False
    _form: products.ProductForm = "float32"

    def __init__(self, distance: Any) -> None:
        self._distance = distance

    @torch.no_grad()
    def prepare(self, embeddings: Tensor) -> products.Operand:
        """Return (n, D) embeddings as they are compared, without graph. Divided by their lengths if the distance does so."""
        distance = self._distance
        if distance.normalize_embeddings and distance.p != 2:
            return products.Operand(distance.normalize(embeddings))
        return products.Operand.prepare(embeddings, self._form, normalize=distance.normalize_embeddings)

    def prepare_vjp(self, embeddings: Tensor, prepared: products.Operand, grad: Tensor) -> Tensor:
        """Return the gradient of (n, D) embeddings, from the sums of their prepared rows."""
        if self._distance.normalize_embeddings and prepared.lengths is None:
            with own_graph():
                leaf = embeddings.detach().requires_grad_()
                (found,) = torch.autograd.grad(self._distance.normalize(leaf), leaf, grad)
            return found
        if prepared.lengths is not None:
            prepared.vjp(grad, grad)
        return grad

    def kept_rows(self, prepared: products.Operand) -> products.Operand:
        """Return the kept form of this rank's rows."""
        return prepared

    def kept_columns(self, prepared: products.Operand) -> products.Operand:
        """Return the kept form of the columns."""
        return prepared

    def row_bytes(self, columns: int, like: Tensor) -> int:
        """Return how many bytes one row of a tile takes, of rows ``like`` these."""
        entries = columns
        if DISTANCES[type(self._distance)].form == "differences":  # PML subtracts row by row: (T, C, D)
            entries *= like.shape[1]
        return entries * like.element_size()

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        """Compute (T, C), ``scale`` times the distances of kept rows and columns, into ``out``."""
        return torch.mul(self._compute(rows.rows, columns.rows), scale, out=out)

    def rows_grad_(self, rows: products.Operand, sums: Tensor) -> Tensor:
        """Return the sums (n, D) of the prepared rows, from those that ``vjp_`` has added up for the kept ones. Overwrite these."""
        return sums

    def columns_grad_(self, columns: products.Operand, sums: Tensor) -> Tensor:
        """Return the same for columns."""
        return sums

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        """Add a matrix's gradients to rows and columns. ``rows_grad_`` and ``columns_grad_`` make gradients of the sums.

        Args:
            rows: Rows of the tile. Their sums are always wanted.
            columns: Its columns.
            scale: Same as in ``matrix``.
            matrix: (T, C), as ``matrix`` gave it, or as an earlier call left it. May be overwritten.
            matrix_grad: (T, C), may be overwritten.
        """
        with own_graph():
            leaves = [side.kept.rows.detach().requires_grad_(side.sums is not None) for side in (rows, columns)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(self._compute(*leaves), wanted, matrix_grad * scale)
        for side, grad in zip((rows, columns), grads, strict=False):
            if side.sums is not None:
                side.sums.add_(grad[side.first :])

    def _compute(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix: Tensor = self._distance.compute_mat(rows, columns)
        return matrix if self._distance.power == 1 else matrix**self._distance.power


class DotProduct(TileDistance):
    """Similarity as a product: two matrix products."""

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        return torch.addmm(out, rows.rows, columns.rows.T, beta=0, alpha=scale, out=out)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        rows.addmm_(matrix_grad, columns, scale)
        columns.addmm_(matrix_grad.T, rows, scale)


class TensorCoreProduct(TileDistance):
    """The same of bf16 rows, on tensor cores."""

    _form = "bf16"

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        factors = rows.factors
        factors = out.new_full((1,), scale) if factors is None else factors * scale
        return products.add_factors_(products.product(rows.rows, columns.rows, out=out), factors, columns.factors)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        factors = rows.kept.factors, columns.kept.factors
        terms = products.split(matrix_grad, *factors, products.splits("bf16", matrix_grad.device))
        if rows.sums is not None:
            products.add_to_left_(rows.sums, terms, columns.kept.rows, scale=scale)
        if columns.sums is not None:
            wanted = tuple(term[:, columns.first :] for term in terms)
            products.add_to_right_(columns.sums, wanted, rows.kept.rows, scale=scale)


class EuclideanDistance(TileDistance):
    """Euclidean distance as torch computes it for many rows: the root of |x|^2 - 2xy + |y|^2, in one matrix product.

    Kept rows are (-2x, 1, |x|^2), kept columns (y, |y|^2, 1): products of the matrix's gradient with these sum up at once what multiplies
    a row's partners and what multiplies the row itself.
    """

    needs_matrix_in_vjp = True  # the root's derivative divides by the distance

    def kept_rows(self, prepared: products.Operand) -> products.Operand:
        rows = prepared.rows
        kept = rows.new_empty(len(rows), rows.shape[1] + 2)
        torch.mul(rows, -2, out=kept[:, :-2])
        kept[:, -2] = 1
        torch.sum(rows.square(), 1, out=kept[:, -1])
        return products.Operand(kept)

    def kept_columns(self, prepared: products.Operand) -> products.Operand:
        squares = prepared.rows.square().sum(1, keepdim=True)
        return products.Operand(torch.cat([prepared.rows, squares, torch.ones_like(squares)], 1))

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        with products.without_tf32(out.device):  # squares of close points cancel
            torch.mm(rows.rows, columns.rows.T, out=out)
        out.clamp_min_(0).sqrt_()
        if scale != 1:
            out.mul_(scale)
        return out

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        # gradient over |scale x distance|, 0 if points coincide. The rest of scale x scale has its sign
        scaled_distance = matrix if scale > 0 else matrix.abs_()
        ratio = matrix_grad.div_(torch.threshold_(scaled_distance, 0, torch.inf))
        factor = scale * abs(scale)
        with products.without_tf32(ratio.device):
            rows.addmm_(ratio, columns, -factor)
            columns.addmm_(ratio.T, rows, -factor)

    def rows_grad_(self, rows: products.Operand, sums: Tensor) -> Tensor:
        # of r_ij (x_i - y_j): the sum of r_ij y_j is there, and that of r_ij next to it
        return sums[:, :-2].addcmul_(rows.rows[:, :-2], sums[:, -1:], value=0.5)

    def columns_grad_(self, columns: products.Operand, sums: Tensor) -> Tensor:
        return sums[:, :-2].mul_(-0.5).addcmul_(columns.rows[:, :-2], sums[:, -2:-1], value=-1)


def is_one_product(distance: Any) -> bool:
    """Return whether tiles of a distance are products of rows with rows, which may run on tensor cores."""
    facts = DISTANCES.get(type(distance))
    return facts is not None and facts.form == "product" and bool(distance.power == 1)


def tile_distance(distance: Any, columns: int, form: products.ProductForm = "float32") -> TileDistance:
    """Choose how tiles of a distance are computed.

    Args:
        distance: One of pytorch-metric-learning's own.
        columns: C. Torch computes Euclidean distances of few rows another way.
        form: Form of plain products of rows.
    """
    if is_one_product(distance):
        return DotProduct(distance) if form == "float32" else TensorCoreProduct(distance)
    is_norm = DISTANCES[type(distance)].form == "norm" and distance.power == 1
    if is_norm and distance.p == 2 and columns > _DIRECT_ROWS:
        return EuclideanDistance(distance)
    return TileDistance(distance)
