"""One tile of the matrix of pairs: some rows against columns, and which of its entries are positives and negatives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Listed(NamedTuple):
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
    with itself, once each, unless ``far`` says how often each counts.

    Attributes:
        matrix: (T, C), scaled, contiguous; belongs to whoever gets the tile, to overwrite.
        rows: Which of this rank's rows.
        columns: Which columns of the whole batch; a block of a ring, else all.
        near: The positives.
        selves: (m,) places of rows with themselves, where they are among the columns.
        far: (T, C) how often each entry counts as a negative; None: see above.
        band: The columns that may have positives, counted in the tile.
        triplets: (anchor, positive, negative) where a miner names them: anchors count the tile's rows; all else then means nothing.
    """

    matrix: Tensor
    rows: slice
    columns: slice
    near: Listed
    selves: Tensor | None
    far: Tensor | None
    band: slice
    triplets: tuple[Tensor, Tensor, Tensor] | None = None

    def positives(self) -> Tensor:
        """(n,) entries of the positives."""
        return self.matrix.view(-1)[self.near.places]

    def add_at_positives(self, values: Tensor) -> None:
        """Add (n,) to the entries of the positives."""
        self.matrix.view(-1).index_add_(0, self.near.places, values)

    def banded(self, values: Tensor) -> Tensor:
        """(n,) values of the positives as a matrix, (T, b) for the b columns of ``band``."""
        out = values.new_zeros(self.matrix.shape[0], self.band.stop - self.band.start)
        places = self.near.rows * out.shape[1] + (self.near.columns - self.band.start)
        out.view(-1).index_add_(0, places, values)
        return out

    def keep_negatives(self, values: Tensor, fill: float) -> Tensor:
        """Overwrite with ``fill`` what is no negative in ``values``, (T, C); returns it."""
        if self.far is not None:
            return values.masked_fill_(self.far == 0, fill)
        values.view(-1).index_fill_(0, self.near.places, fill)
        return self._without_selves(values, fill)

    def keep_partners(self, values: Tensor, fill: float) -> Tensor:
        """The same with what is neither a negative nor a positive."""
        if self.far is None:
            return self._without_selves(values, fill)
        stranger = self.far == 0
        stranger.view(-1).index_fill_(0, self.near.places, 0)
        return values.masked_fill_(stranger, fill)

    def counted(self, values: Tensor) -> Tensor:
        """``values``, (T, C), times how often each entry counts as a negative; overwrites them."""
        return self.keep_negatives(values, 0) if self.far is None else values.mul_(self.far)

    def number_of_negatives(self) -> Tensor:
        """(T,), counted as often as they count."""
        if self.far is not None:
            return self.far.sum(1)
        number = self.matrix.new_full((self.matrix.shape[0],), self.matrix.shape[1])
        number.index_add_(0, self.near.rows, number.new_full(self.near.rows.shape, -1))
        return number if self.selves is None else number.sub_(1)

    def _without_selves(self, values: Tensor, fill: float) -> Tensor:
        if self.selves is not None:
            values.view(-1).index_fill_(0, self.selves, fill)
        return values
