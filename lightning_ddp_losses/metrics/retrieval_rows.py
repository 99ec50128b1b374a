"""The rows of a retrieval metric: the rows of this rank, and the information about all rows that every rank has.

Embeddings stay on their rank. Labels, indices and roles are gathered, 24 bytes per row, so that every rank derives the same plan from them
without further communication: which rows are repeated, how many relevant rows each query has, and which queries are passed around the ranks
together.

Legend: ``B`` rows on this rank, ``G`` of all ranks, ``D`` embedding size, ``g`` rows of the gallery, ``q`` queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError, RankMismatchError, expect, expect_option

Role: TypeAlias = Literal["both", "query", "gallery"]
"""Role of a row: a query, a row of the gallery that queries are compared with, or both."""

ABSENT = torch.iinfo(torch.int32).max
"""Number of a missing row. A gallery may have fewer rows than are requested."""

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_IS_QUERY, _IS_GALLERY = 1, 2
_ROLES = {"both": _IS_QUERY | _IS_GALLERY, "query": _IS_QUERY, "gallery": _IS_GALLERY}


# ---------------------------------------------------------------------- rows of this rank


@dataclass
class RetrievalRows:
    """The rows that were passed on this rank since ``reset``.

    Attributes:
        embeddings: (B, D) of each batch, at least float32.
        labels: (B,) int64 of each batch.
        indices: (B,) int64 of each batch. Empty if rows do not have indices.
        roles: (B,) int64 of each batch.
        version: Number of changes.
    """

    embeddings: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    indices: list[Tensor] = field(default_factory=list)
    roles: list[Tensor] = field(default_factory=list)
    version: int = 0

    def add(self, title: str, embeddings: Tensor, labels: Tensor, index: Tensor | None, role: Role) -> None:
        """Store one batch.

        Args:
            title: Name of the metric in messages.
            embeddings: (B, D), floating point.
            labels: (B,), integers.
            index: (B,), integers, or None.
            role: Role of all of its rows.

        Raises:
            ConfigurationError: for an unknown role.
            InputError: for tensors that are incompatible with each other.
        """
        expect_option(f"{title}: role", role, get_args(Role))
        self._check(title, embeddings, labels, index)
        device = embeddings.device
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        self.embeddings.append(embeddings.detach().to(wide))
        self.labels.append(labels.detach().to(device, torch.int64))
        if index is not None:
            self.indices.append(index.detach().to(device, torch.int64))
        self.roles.append(torch.full((len(labels),), _ROLES[role], device=device))
        self.version += 1

    def _check(self, title: str, embeddings: Tensor, labels: Tensor, index: Tensor | None) -> None:
        """Reject tensors that are incompatible with each other, or with the previous batches."""
        is_matrix = isinstance(embeddings, Tensor) and embeddings.ndim == 2 and embeddings.is_floating_point()
        expected = "a floating tensor (B, D)"
        expect(
            is_matrix,
            f"{title}: embeddings",
            expected=expected,
            got=_shape_and_dtype(embeddings),
            error=InputError,
            fix="Convert integers by float(), and flatten the features of each row by flatten(1).",
        )
        rows = len(embeddings)
        for name, column in (("labels", labels), ("index", index)):
            if column is None and name == "index":
                continue
            fits = isinstance(column, Tensor) and column.shape == (rows,) and column.dtype in _INTEGERS
            expected = f"integers ({rows},), one for each row of the embeddings"
            fix = "Give each row one class number. Labels of several classes a row are not supported."
            if name == "index":
                fix = "Give each row its position in the data set."
            expect(fits, f"{title}: {name}", expected=expected, got=_shape_and_dtype(column), fix=fix, error=InputError)
        if not self.embeddings:
            return
        width, device = self.embeddings[0].shape[1], self.embeddings[0].device
        for what, before, now in (("width", width, embeddings.shape[1]), ("device", device, embeddings.device)):
            expected = f"{before}, as in the batches before"
            expect(
                before == now,
                f"{title}: {what} of the embeddings",
                expected=expected,
                got=now,
                error=InputError,
                fix="Call reset() before embeddings of another model, and keep all batches on one device.",
            )
        is_indexed = bool(self.indices)
        expect(
            is_indexed == (index is not None),
            f"{title}: index",
            expected="given in every update since reset, or in none",
            got="none here" if is_indexed else "none in the updates before",
            fix="Give index= in each update. Rows with and without one cannot be told apart.",
            error=InputError,
        )

    def reset(self) -> None:
        """Remove all rows."""
        for batches in (self.embeddings, self.labels, self.indices, self.roles):
            batches.clear()
        self.version += 1

    def join_(self) -> None:
        """Join the batches, so that they are in memory only once. Rows of several dtypes are cast to the widest."""
        for batches in (self.embeddings, self.labels, self.indices, self.roles):
            if len(batches) > 1:
                batches[:] = [torch.cat(batches)]

    def to_(self, device: torch.device) -> None:
        """Move the rows to a device."""
        for batches in (self.embeddings, self.labels, self.indices, self.roles):
            batches[:] = [batch.to(device) for batch in batches]

    def summary(self) -> RankSummary:
        """Return the information that other ranks need before the search. It requires joined batches and waits for the device."""
        if not self.embeddings:
            return RankSummary()
        (rows,) = self.embeddings
        # the squares of distances must also be finite
        lengths = rows.square().sum(1)
        bad = (~torch.isfinite(4 * lengths)).sum()
        dtype = str(rows.dtype).removeprefix("torch.")
        return RankSummary(len(rows), rows.shape[1], dtype, rows.device.type, bool(self.indices), int(bad))


def _shape_and_dtype(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------------- agreement of ranks


class RankSummary(NamedTuple):
    """The rows of one rank. Without an update, width, dtype and device are None.

    Attributes:
        rows: B.
        width: D.
        dtype: Name of the dtype of embeddings.
        device: Type of their device.
        is_indexed: Whether rows have indices.
        bad: Number of rows with NaN, infinity, or numbers whose squares are infinite.
    """

    rows: int = 0
    width: int | None = None
    dtype: str | None = None
    device: str | None = None
    is_indexed: bool | None = None
    bad: int = 0


class CommonRows(NamedTuple):
    """The common properties of the rows of all ranks.

    Attributes:
        counts: B of each rank.
        width: D.
        dtype: Widest dtype of any rank's embeddings.
        device: Type of the device of all embeddings.
        is_indexed: Whether rows have indices.
    """

    counts: list[int]
    width: int
    dtype: torch.dtype
    device: str
    is_indexed: bool

    @classmethod
    def of(cls, title: str, ranks: Sequence[RankSummary]) -> CommonRows:
        """Join the summaries of all ranks, in rank order.

        Raises:
            RankMismatchError: on every rank, for rows of different widths, devices, or with and without an index.
            InputError: on every rank, for rows that are not finite.
        """
        known = [rank for rank in ranks if rank.width is not None]
        fix = "Update with embeddings of the same kind on every rank."
        for name in ("width", "device", "is_indexed"):
            if len({getattr(rank, name) for rank in known}) > 1:
                of_ranks = ["no rows" if rank.width is None else getattr(rank, name) for rank in ranks]
                what = f"{title}: {name} of the rows"
                raise RankMismatchError(what, expected="one on all ranks", ranks=of_ranks, fix=fix, collective=True)
        counts = [rank.rows for rank in ranks]
        bad = sum([rank.bad for rank in ranks])
        if bad:
            raise InputError(
                f"{title}: embeddings",
                expected="finite numbers",
                got=f"{bad} rows of {sum(counts)} with NaN, infinity or too large numbers",
                ranks=[f"{rank.bad} of {rank.rows}" for rank in ranks],
                fix="The training diverged, or the inputs hold NaN: lower the learning rate, or check the features.",
                collective=True,
            )
        dtype = torch.float32
        for rank in known:
            dtype = torch.promote_types(dtype, getattr(torch, rank.dtype or "float32"))
        first = known[0] if known else RankSummary(0, 1, None, "cpu", False)
        return cls(counts, first.width or 0, dtype, first.device or "cpu", bool(first.is_indexed))


# ---------------------------------------------------------------------- rows of all ranks


class Round(NamedTuple):
    """Queries that are passed around the ranks together.

    Attributes:
        blocks: Numbers of the queries of each rank.
        depth: Number of nearest rows that they require.
    """

    blocks: list[Tensor]
    depth: int


@dataclass(frozen=True)
class RetrievalPlan:
    """What the labels, indices and roles of all ranks determine, equal on all ranks. All tensors are on the CPU.

    Rows of the gallery are numbered in the order of their indices (without indices, in rank order), and repeated rows are counted once.
    Queries are numbered in the same way. From this point on, numbers are used instead of indices.

    Attributes:
        gallery_labels: (g,), by number.
        gallery_rows: (g,), position among the rows of all ranks in rank order.
        query_labels: (q,), by number.
        query_rows: (q,), position among the rows of all ranks.
        own: (q,), number of the gallery's row that is the query itself, or -1.
        relevant: (q,), R of each query.
        offsets: (W + 1,), positions at which the rows of each rank begin, and G.
        repeated: Number of repeated rows.
    """

    gallery_labels: Tensor
    gallery_rows: Tensor
    query_labels: Tensor
    query_rows: Tensor
    own: Tensor
    relevant: Tensor
    offsets: Tensor
    repeated: int

    @classmethod
    def of(cls, title: str, table: Tensor, counts: Sequence[int], *, shared_index: bool) -> RetrievalPlan:
        """Create the plan from a table (G, 3) of labels, indices and roles.

        Raises:
            InputError: on every rank, for rows with one index and several labels.
        """
        labels, indices, roles = table.unbind(1)
        gallery = _Unique.of(indices, (roles & _IS_GALLERY) > 0)
        queries = _Unique.of(indices, (roles & _IS_QUERY) > 0)
        for unique in (gallery, queries):
            unique.check_labels(title, labels, indices)
        own = places_in(gallery.indices, queries.indices)
        if not shared_index:
            is_both = (roles[queries.rows] & _IS_GALLERY) > 0
            own = torch.where(is_both, own, -1)
        gallery_labels, query_labels = labels[gallery.rows], labels[queries.rows]
        _check_own_labels(title, gallery_labels, query_labels, own, queries.indices)
        in_order = gallery_labels.sort().values
        above = torch.searchsorted(in_order, query_labels, right=True)
        relevant = above - torch.searchsorted(in_order, query_labels) - (own >= 0).long()
        offsets = torch.tensor([0, *counts]).cumsum(0)
        repeated = gallery.repeated + queries.repeated
        return cls(gallery_labels, gallery.rows, query_labels, queries.rows, own, relevant, offsets, repeated)

    def rank_of(self, rows: Tensor) -> Tensor:
        """Return the rank of rows, given by their positions among the rows of all ranks."""
        return torch.searchsorted(self.offsets, rows, right=True) - 1

    def numbers_on(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the gallery's rows on one rank, ascending, and their positions among its rows."""
        numbers = (self.rank_of(self.gallery_rows) == rank).nonzero().squeeze(1)
        return numbers, self.gallery_rows[numbers] - self.offsets[rank]

    def rounds(self, queries: Tensor, depths: Tensor, most_queries: int, most_neighbours: int) -> list[Round]:
        """Split queries into rounds.

        Args:
            queries: Numbers of queries.
            depths: Number of nearest rows of each.
            most_queries: Largest number of a rank's queries in a round.
            most_neighbours: Largest number of neighbours of a rank's queries in a round.
        """
        ranks = self.rank_of(self.query_rows[queries])
        # sort by descending depth, so that the queries of a round require similar depths
        order = depths.sort(descending=True, stable=True).indices
        remaining = []
        for rank in range(len(self.offsets) - 1):
            own = order[ranks[order] == rank]
            remaining.append((queries[own], depths[own]))
        found = []
        while any(len(own) for own, _ in remaining):
            depth = max([int(needed[0]) for _, needed in remaining if len(needed)])
            size = max(1, min(most_queries, most_neighbours // max(depth, 1)))
            found.append(Round([own[:size] for own, _ in remaining], depth))
            remaining = [(own[size:], needed[size:]) for own, needed in remaining]
        return found


class _Unique(NamedTuple):
    """Rows of one role, each index once.

    Attributes:
        indices: (u,), ascending.
        rows: (u,), positions of the first row with each index.
        members: Positions of all rows of the role.
        number_of: Number of the index of each member.
    """

    indices: Tensor
    rows: Tensor
    members: Tensor
    number_of: Tensor

    @classmethod
    def of(cls, indices: Tensor, has_role: Tensor) -> _Unique:
        members = has_role.nonzero().squeeze(1)
        unique, number_of = torch.unique(indices[members], return_inverse=True)
        first = torch.full((len(unique),), len(indices))
        first.scatter_reduce_(0, number_of, members, "amin")
        return cls(unique, first, members, number_of)

    @property
    def repeated(self) -> int:
        return len(self.members) - len(self.rows)

    def check_labels(self, title: str, labels: Tensor, indices: Tensor) -> None:
        """Reject an index with several labels."""
        differs = labels[self.members] != labels[self.rows][self.number_of]
        if differs.any():
            row = self.members[differs][0]
            first = self.rows[self.number_of[differs]][0]
            _raise_two_labels(title, indices[row], labels[first], labels[row])


def places_in(ascending: Tensor, values: Tensor) -> Tensor:
    """Return the position of each value in an ascending tensor, or -1 for a value that it does not contain."""
    if not len(ascending):
        return torch.full_like(values, -1)
    places = torch.searchsorted(ascending, values).clamp(max=len(ascending) - 1)
    return torch.where(ascending[places] == values, places, -1)


def _check_own_labels(title: str, gallery_labels: Tensor, query_labels: Tensor, own: Tensor, indices: Tensor) -> None:
    """Reject a query whose label differs from the label of the gallery's row with its index."""
    has_own = own >= 0
    differs = gallery_labels[own[has_own]] != query_labels[has_own]
    if differs.any():
        query = has_own.nonzero().squeeze(1)[differs][0]
        _raise_two_labels(title, indices[query], query_labels[query], gallery_labels[own[query]])


def _raise_two_labels(title: str, index: Tensor, first: Tensor, second: Tensor) -> None:
    raise InputError(
        f"{title}: label of index {int(index)}",
        expected="one label",
        got=f"{int(first)} and {int(second)}",
        fix="An index is the position of a row in the whole data set, on every rank and for queries and gallery together. "
        "If queries and gallery are numbered apart, make the metric with shared_index=False.",
        collective=True,
    )
