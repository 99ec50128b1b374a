"""The nearest rows of a gallery that is distributed over the ranks, without a matrix of all distances.

Each rank keeps its part of the gallery. A block of queries is passed around the ranks, each of which adds its nearest rows, and the results
are merged by distance, then by number: the same rows in the same order as found by one process. Memory is used for one tile of scores and,
for each query of the block, as many rows as it requests.

In a tile, groups of ``_GROUP`` neighbouring columns are first reduced to their largest score, in one pass over the tile. The k-th largest
of these is a lower bound of the k best scores, so only the few scores that reach it are read again and sorted. Rows with many equal scores
at the bound are searched in slower passes.

This order requires that products of equal rows are equal, regardless of the position of the rows in a tile. This is the case for float32 on
a CPU if tiles have 16 rows and columns or multiples of that (torch 2.13 with MKL, measured), so tiles are padded with zeros. Products of
float64 may differ in the last bit.

Legend: ``n`` queries, ``D`` embedding size, ``g`` rows of this rank's gallery, ``T`` columns of a tile, ``k`` rows to find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytorch_metric_learning.distances as pml_distances
import torch
from pytorch_metric_learning.distances import BaseDistance, CosineSimilarity, DotProductSimilarity, SNRDistance
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.metrics.retrieval_rows import ABSENT, places_in

_GROUP = 32  # columns
_ROW_STEP, _COLUMN_STEP = 16, 64  # tiles have multiples of these
_HOST_BYTES, _DEVICE_BYTES = 32 << 20, 256 << 20  # size of a tile
_PAIR_BYTES = 32 << 20  # size of the row differences that a distance computes at a time
_EXACT_BYTES = 8 << 20  # size of the counters in the pass over rows with equal scores
_NAMES = ("CosineSimilarity", "DotProductSimilarity", "LpDistance", "SNRDistance")


# ---------------------------------------------------------------------- scores


class Scores:
    """A distance expressed as scores, where larger scores are nearer.

    Args:
        distance: Name of a distance of pytorch-metric-learning, or an instance with its options.

    Raises:
        ConfigurationError: for anything else.
    """

    def __init__(self, distance: str | BaseDistance) -> None:
        if isinstance(distance, str) and distance in _NAMES:
            distance = getattr(pml_distances, distance)()
        if not isinstance(distance, BaseDistance):
            raise ConfigurationError(
                "EmbeddingRetrieval: distance",
                expected=f"one of {', '.join(_NAMES)}, or an instance of a distance of pytorch-metric-learning",
                got=repr(distance),
            )
        self.distance = distance
        self._is_product = type(distance) in (CosineSimilarity, DotProductSimilarity) and distance.power == 1

    def __str__(self) -> str:
        of_distance = self.distance
        options = (
            f"normalize_embeddings={of_distance.normalize_embeddings}, p={of_distance.p}, power={of_distance.power}"
        )
        return f"{type(of_distance).__name__}({options})"

    @property
    def needs_variance(self) -> bool:
        """Whether the numbers of a row must not all be equal."""
        return isinstance(self.distance, SNRDistance)

    def prepared(self, rows: Tensor) -> Tensor:
        """Return rows (n, D) in the form in which they are compared."""
        prepared: Tensor = self.distance.maybe_normalize(rows)
        return prepared

    def write(self, queries: Tensor, columns: Tensor, out: Tensor) -> None:
        """Write the scores of prepared queries (n, D) and columns (T, D) to ``out`` (n, T)."""
        if self._is_product:
            torch.mm(queries, columns.t(), out=out)
            return
        row_bytes = queries.numel() * queries.element_size()
        step = max(_ROW_STEP, _PAIR_BYTES // max(row_bytes, 1))
        for start in range(0, len(columns), step):
            part = slice(start, start + step)
            found = self.distance.compute_mat(queries, columns[part])
            if self.distance.power != 1:
                found = found**self.distance.power
            out[:, part] = found if self.distance.is_inverted else -found


# ---------------------------------------------------------------------- results of a search


class Nearest(NamedTuple):
    """The nearest rows of some queries, in order: by score, then by number.

    Attributes:
        scores: (n, k). Minus infinity for missing rows.
        numbers: (n, k) int64, of the rows in the gallery. ``ABSENT`` for missing rows.
    """

    scores: Tensor
    numbers: Tensor

    def packed(self) -> Tensor:
        """Return both in one tensor (n, 2 k) of integers, to be sent."""
        integer = torch.int32 if self.scores.dtype == torch.float32 else torch.int64
        return torch.cat([self.scores.view(integer), self.numbers.to(integer)], 1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Nearest:
        """Return the value that ``packed`` was called on."""
        scores, numbers = packed.chunk(2, 1)
        floating = torch.float32 if packed.dtype == torch.int32 else torch.float64
        return cls(scores.contiguous().view(floating), numbers.long())

    def merged(self, other: Nearest, k: int) -> Nearest:
        """Return the k nearest rows, or fewer, out of these and others."""
        if not self.scores.shape[1]:
            return other
        numbers, order = torch.cat([self.numbers, other.numbers], 1).sort(1)
        scores = torch.cat([self.scores, other.scores], 1).gather(1, order)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Nearest(scores[:, :k].contiguous(), numbers.gather(1, order[:, :k]))


def merge_packed(first: Tensor, second: Tensor) -> Tensor:
    """Merge two results of ``Nearest.packed``."""
    nearest = Nearest.unpacked(first)
    return nearest.merged(Nearest.unpacked(second), nearest.scores.shape[1]).packed()


class Queries(NamedTuple):
    """A block of queries on the rank that it visits.

    Attributes:
        rows: (n, D), prepared.
        own: (n,), number of the gallery's row that is the query itself, or -1.
        labels: (n,).
    """

    rows: Tensor
    own: Tensor
    labels: Tensor


class GalleryPart:
    """This rank's rows of the gallery.

    Args:
        scores: How rows are compared.
        rows: (g, D), prepared, in the order of their numbers.
        numbers: (g,), ascending.
        labels: (g,).
    """

    def __init__(self, scores: Scores, rows: Tensor, numbers: Tensor, labels: Tensor) -> None:
        self._scores = scores
        self._rows = _filled_up(rows, _COLUMN_STEP)
        self._numbers = numbers.new_full((len(self._rows),), ABSENT)
        self._numbers[: len(rows)] = numbers
        self._labels = labels.new_zeros(len(self._rows))
        self._labels[: len(rows)] = labels
        self._count = len(rows)
        self._buffer = rows.new_empty(0)

    def nearest(self, queries: Queries, k: int) -> Nearest:
        """Return the k nearest rows of each query."""
        n = len(queries.rows)
        found = self._none(n, 0)
        for columns, scores in self._tiles(queries):
            best, places = best_columns(scores, min(k, scores.shape[1]))
            found = found.merged(self._numbered(best, places + columns.start), k)
        missing = k - found.scores.shape[1]
        return self._none(n, missing).merged(found, k) if missing else found

    def nearest_relevant(self, queries: Queries) -> Nearest:
        """Return the nearest row of each query's label."""
        found = self._none(len(queries.rows), 1)
        for columns, scores in self._tiles(queries):
            scores.masked_fill_(self._labels[columns] != queries.labels.unsqueeze(1), -torch.inf)
            best, places = scores.max(1, keepdim=True)  # the first one if several are equal
            found = found.merged(self._numbered(best, places + columns.start), 1)
        return found

    def count_nearer(self, queries: Queries, than: Nearest) -> Tensor:
        """Return how many rows (n, 1) of other labels are nearer than one row of each query."""
        found = torch.zeros_like(than.numbers)
        for columns, scores in self._tiles(queries):
            is_earlier = self._numbers[columns] < than.numbers
            is_nearer = (scores > than.scores) | ((scores == than.scores) & is_earlier)
            is_nearer &= self._labels[columns] != queries.labels.unsqueeze(1)
            found += is_nearer.sum(1, keepdim=True)
        return found

    def _numbered(self, scores: Tensor, columns: Tensor) -> Nearest:
        """Return columns with their numbers."""
        return Nearest(scores, self._numbers[columns].masked_fill(scores == -torch.inf, ABSENT))

    def _none(self, n: int, k: int) -> Nearest:
        """Return results (n, k) without rows."""
        return Nearest(self._rows.new_full((n, k), -torch.inf), self._numbers.new_full((n, k), ABSENT))

    def _tiles(self, queries: Queries) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores (n, T) of each part of the gallery, -inf for a query itself. A tile is valid until the next one."""
        n = len(queries.rows)
        if n == 0 or self._count == 0:
            return
        rows = _filled_up(queries.rows, _ROW_STEP)
        own = places_in(self._numbers, queries.own)
        budget = _HOST_BYTES if rows.device.type == "cpu" else _DEVICE_BYTES
        step = budget // (len(rows) * rows.element_size()) // _COLUMN_STEP * _COLUMN_STEP
        step = max(step, _COLUMN_STEP)
        # tiles of equal widths
        tiles = -(-len(self._rows) // step)
        step = -(-len(self._rows) // (tiles * _COLUMN_STEP)) * _COLUMN_STEP
        if self._buffer.numel() < len(rows) * step:
            self._buffer = rows.new_empty(len(rows) * step)
        for start in range(0, len(self._rows), step):
            columns = self._rows[start : start + step]
            scores = self._buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            self._scores.write(rows, columns, scores)
            scores = scores[:n]
            # a query whose own row is in another tile overwrites the score of the first column by itself
            is_here = (own >= start) & (own < start + len(columns))
            place = torch.where(is_here, own - start, 0).unsqueeze(1)
            score = torch.where(is_here.unsqueeze(1), -torch.inf, scores.gather(1, place))
            scores.scatter_(1, place, score)
            # padding columns
            scores[:, max(self._count - start, 0) :] = -torch.inf
            yield slice(start, start + len(columns)), scores


def _filled_up(rows: Tensor, step: int) -> Tensor:
    """Return rows (n, D) padded with rows of zeros to a multiple of ``step``."""
    missing = -len(rows) % step
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])


# ---------------------------------------------------------------------- the best columns of a tile


def best_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores (n, k) of each row of (n, T), and their columns. Among equal scores the first columns are chosen.

    NaN counts as the largest. Rows with fewer than k scores above minus infinity are padded with it, and with arbitrary columns.
    """
    n, width = scores.shape
    # 1. the best score of each group of columns. k groups reach the k-th largest of these, so none of the k best scores is lower
    size = _GROUP if width % _GROUP == 0 and width // _GROUP >= 2 * k else 1
    groups = scores if size == 1 else scores.view(n, width // size, size).amax(2)
    lowest = groups.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
    lowest = lowest.clamp(min=torch.finfo(scores.dtype).min)  # exclude columns of minus infinity
    # 2. the groups with such scores. Rows in which far more than k are equal are processed at the end
    is_chosen = ~(groups < lowest)
    chosen_counts = is_chosen.sum(1, keepdim=True)
    is_crowded = chosen_counts > 2 * k
    is_chosen &= ~is_crowded
    rows, chosen = is_chosen.nonzero().unbind(1)
    # 3. their scores, in the order of the columns
    candidates = scores.reshape(-1, size).index_select(0, rows * (width // size) + chosen)
    is_candidate = ~(candidates < lowest[rows])
    pairs, lanes = is_candidate.nonzero().unbind(1)
    rows, columns = rows[pairs], chosen[pairs] * size + lanes
    best, places = _best_of_sorted(candidates[pairs, lanes], rows, columns, n, k)
    # 4. rows with many equal scores
    crowded = is_crowded.squeeze(1).nonzero().squeeze(1)
    for some in torch.split(crowded, max(1, _EXACT_BYTES // (8 * width))):
        best[some], places[some] = _best_of_crowded(scores[some], k)
    return best, places


def _best_of_sorted(scores: Tensor, rows: Tensor, columns: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of some scores of each row, and their columns. The input is sorted by row, then by column."""
    counts = torch.bincount(rows, minlength=n)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(rows), device=rows.device) - starts[rows]
    width = max(int(counts.max()), k)
    padded = scores.new_full((n, width), -torch.inf)
    padded[rows, places] = scores
    padded_columns = columns.new_zeros(n, width)
    padded_columns[rows, places] = columns
    # sorting keeps the order of equal scores
    best, order = padded.sort(dim=1, descending=True, stable=True)
    return best[:, :k], padded_columns.gather(1, order[:, :k])


def _best_of_crowded(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the result of ``best_columns`` for any scores, in passes over all of them."""
    finite = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    last = finite.topk(k, 1, sorted=False).values.amin(1, keepdim=True)
    columns = _first_of_equal(finite, last, k)
    best, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return best, columns.gather(1, order)


def _first_of_equal(scores: Tensor, last: Tensor, k: int) -> Tensor:
    """Return the columns (n, k), ascending, of scores above ``last`` (n, 1) and of the first scores equal to it."""
    is_better = scores > last
    is_equal = scores == last
    missing = k - is_better.sum(1, keepdim=True)
    is_chosen = is_better | (is_equal & (is_equal.cumsum(1) <= missing))
    return is_chosen.nonzero()[:, 1].view(len(scores), k)


@contextlib.contextmanager
def search_precision(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Search without gradient, autocast and TF32 for the duration of a block."""
    before: Any = torch.get_float32_matmul_precision()
    with torch.no_grad(), precision.full_precision(dtype, [device.type]):
        if device.type == "cpu" or before == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
