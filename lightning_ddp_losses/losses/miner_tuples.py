"""What a miner of pytorch-metric-learning (PML) returns: tuples over the rows of all ranks, malformed ones, and tuples as weights of rows.

Legend: ``G`` rows over all ranks, ``n`` tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.anchor_tuples import count_indices, named_anchors


class GlobalTuples(tuple[Tensor, ...]):
    """A miner's tuples over the global batch, the same on every rank: indices count rows of all ranks.

    Attributes:
        rows_of_ranks: How many rows those are, by global rank, in their order.
        references: How many rows positives and negatives count: the same ones, or others that the miner was given.
    """

    rows_of_ranks: dict[int, int]
    references: int

    @classmethod
    def of(cls, tuples: Iterable[Tensor], rows_of_ranks: dict[int, int], references: int) -> GlobalTuples:
        """Make them from tuples that count the rows of some ranks, in this order, and their references."""
        made = cls(tuples)
        made.rows_of_ranks, made.references = rows_of_ranks, references
        return made

    @property
    def rows(self) -> int:
        """How many rows they count."""
        return sum(self.rows_of_ranks.values())

    def counts_of(self, counts: Tensor, rows_of_ranks: dict[int, int], title: str) -> Tensor:
        """Take what belongs to the rows of some of the ranks, in their order.

        Args:
            counts: (G,), a number for each row that the tuples count.
            rows_of_ranks: The rows that a loss gets, by global rank.
            title: For the message.

        Raises:
            InputError: for tuples of another batch, or of other ranks.
        """
        missing = [rank for rank, rows in rows_of_ranks.items() if self.rows_of_ranks.get(rank) != rows]
        if missing:
            expected = ", ".join(f"rank {rank}: {rows_of_ranks[rank]}" for rank in missing)
            got = ", ".join(f"rank {rank}: {self.rows_of_ranks.get(rank)}" for rank in missing)
            raise InputError(
                f"{title}: indices_tuple of GlobalBatchMiner",
                expected=f"of the rows that the loss gets ({expected})",
                got=f"of other rows ({got})",
                fix="Mine the embeddings that the loss gets, over all ranks or over the group of the loss.",
            )
        parts = torch.split(counts, list(self.rows_of_ranks.values()))
        by_rank = dict(zip(self.rows_of_ranks, parts, strict=True))
        return torch.cat([by_rank[rank] for rank in rows_of_ranks])

    def check(self, title: str, rows: int, references: int | None) -> None:
        """Refuse tuples of another batch, or of another group's.

        Args:
            title: For the message.
            rows: That the loss gets, over its ranks.
            references: Likewise; None: it has some of its own.

        Raises:
            InputError: naming both numbers of rows.
        """
        if self.rows != rows:
            raise InputError(
                f"{title}: indices_tuple of GlobalBatchMiner",
                expected=f"of the {rows} rows that the loss gets",
                got=f"of {self.rows} rows",
                fix="Mine the embeddings that the loss gets, over the same process group.",
            )
        if references is not None and self.references > references:
            raise InputError(
                f"{title}: indices_tuple of GlobalBatchMiner",
                expected=f"of the {references} references that the loss gets",
                got=f"of {self.references} references",
                fix="Give the loss the ref_emb that the miner got.",
            )


def refuse_malformed_tuples(what: str, tuples: Sequence[Tensor]) -> None:
    """Refuse a miner's tuples that name no rows, or that torch would match with each other by broadcasting or as masks.

    Raises:
        InputError: saying what they are.
    """
    if not len(tuples):
        return
    expected, fix = "3 or 4 tensors of row numbers (torch.int64), (n,) each", "Pass what a miner returns."
    if not all(isinstance(index, Tensor) for index in tuples):
        raise InputError(what, expected=expected, got=", ".join(type(index).__name__ for index in tuples), fix=fix)
    # bool and uint8 are masks
    are_numbers = all(index.dtype in (torch.int64, torch.int32, torch.int16) for index in tuples)
    if len(tuples) not in (3, 4) or not are_numbers or any(index.ndim != 1 for index in tuples):
        got = ", ".join(f"{index.dtype} {tuple(index.shape)}" for index in tuples)
        raise InputError(what, expected=expected, got=f"{len(tuples)}: {got}", fix=fix)
    lengths = [len(index) for index in tuples]
    matched = [lengths[:2], lengths[2:]] if len(tuples) == 4 else [lengths]
    if any(len(set(each)) > 1 for each in matched):
        expected = "as many anchors as positives, and as negatives"
        raise InputError(what, expected=expected, got=f"lengths {', '.join(map(str, lengths))}", fix=fix)


def miner_counts(indices_tuple: Sequence[Tensor], rows: int, *, only_anchors: bool, title: str) -> Tensor:
    """Return how often each of ``rows`` rows is named, int64.

    Args:
        indices_tuple: Triplets (anchor, positive, negative), or pairs (anchor, positive, anchor, negative).
        rows: Number of rows that the indices count.
        only_anchors: Count anchors alone.
        title: For the message.

    Raises:
        InputError: for an index of a row that is not there, or another number of index tensors.
    """
    if len(indices_tuple) not in (3, 4):
        raise InputError(f"{title}: indices_tuple", expected="3 or 4 index tensors", got=len(indices_tuple))
    counted = named_anchors(tuple(indices_tuple)) if only_anchors else indices_tuple
    index = torch.cat([part.reshape(-1) for part in counted])
    # ours are in range; to look at others an accelerator is waited for once, as their miner did
    are_in_range = isinstance(indices_tuple, GlobalTuples) and (only_anchors or indices_tuple.references <= rows)
    if index.numel() and not are_in_range:
        low, high = torch.stack(torch.aminmax(index)).tolist()
        if low < 0 or high >= rows:
            raise InputError(
                f"{title}: indices_tuple",
                expected=f"0 to {rows - 1}, the rows of this call",
                got=f"{low} to {high}",
                fix="Mine the embeddings that the loss gets.",
            )
    return count_indices(index, rows)


def miner_weights(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the (G,) weights of PML's classification losses: a row's count over the highest one; without tuples all rows weigh 1."""
    highest = counts.max()
    return torch.where(highest > 0, counts.to(dtype) / highest.clamp(min=1), torch.ones((), dtype=dtype))
