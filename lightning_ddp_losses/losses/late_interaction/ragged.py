"""Texts of different lengths: the concatenated vectors of their tokens, without padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_ddp_losses.errors import InputError, expect

Mask = Tensor | None
"""(n, T) bool, True for a token that counts, in any places; (n,) whole numbers, how many of the first count; None, all."""


@dataclass(frozen=True)
class RaggedRows:
    """Rows of several vectors each.

    Attributes:
        tokens: (sum of ``lengths``, D), the vectors of all rows in their order.
        lengths: How many of them each row has.
    """

    tokens: Tensor
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, title: str, padded: Tensor, mask: Mask) -> RaggedRows:
        """Return padded rows, (n, T, D), without what a mask leaves out. The host waits for an accelerator."""
        counts = checked_mask(title, padded, mask)
        lengths = counts.sum(1).tolist()
        empty = [str(row) for row, length in enumerate(lengths) if not length]
        if empty:
            raise InputError(
                title,
                expected="a vector or more in each row",
                got=f"none in row {', '.join(empty[:8])}",
                fix="Leave the row out, or keep a token (a text without words still has its first special token).",
            )
        return cls(padded[counts], lengths)

    def tiles(self, most: int) -> Iterator[Tile]:
        """Cut the rows into runs, padded to the longest of each. A tile has ``most`` vectors at most, filled up ones too, or one row."""
        starts = [0, *itertools.accumulate(self.lengths)]
        for first, last in _runs(self.lengths, most):
            places = slice(starts[first], starts[last])
            padded, counts = pad(self.tokens[places], self.lengths[first:last])
            yield Tile(slice(first, last), places, padded.unsqueeze(1), counts.unsqueeze(1))


class Tile(NamedTuple):
    """Some rows, as scores take documents.

    Attributes:
        rows: Their places among all rows.
        places: Positions of their vectors among the vectors of all rows.
        padded: (n, 1, T, D).
        counts: (n, 1, T), what counts.
    """

    rows: slice
    places: slice
    padded: Tensor
    counts: Tensor


def pad(tokens: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows padded to the longest, (n, T, D), and the mask (n, T) of what counts."""
    padded = pad_sequence(list(torch.split(tokens, list(lengths))), batch_first=True)
    places = torch.arange(padded.shape[1], device=tokens.device)
    counts = places < torch.tensor(lengths, device=tokens.device).unsqueeze(1)
    return padded, counts


def _runs(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut rows into runs whose number times their longest length is at most ``most``."""
    runs = []
    first, longest = 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        if row > first and (row + 1 - first) * longest > most:
            runs.append((first, row))
            first, longest = row, length
    if first < len(lengths):
        runs.append((first, len(lengths)))
    return runs


def checked_mask(title: str, padded: Tensor, mask: Mask) -> Tensor:
    """Return which vectors of (n, T, D) rows count, (n, T) bool."""
    expect(
        padded.ndim == 3 and padded.is_floating_point(),
        title,
        expected="(rows, tokens, D) floating numbers",
        got=f"{tuple(padded.shape)} {padded.dtype}",
        error=InputError,
        fix="Pad the rows to one length, for example by torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).",
    )
    rows, most = padded.shape[:2]
    if mask is None:
        return torch.ones(rows, most, dtype=torch.bool, device=padded.device)
    if mask.shape == (rows, most):
        is_mask = mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())
        expect(
            is_mask,
            f"{title}: mask",
            expected="0 and 1, or bool",
            got=str(mask.dtype),
            error=InputError,
            fix="Compare weights with 0: mask > 0. Compare an additive mask with 0: mask == 0.",
        )
        return mask.bool()
    are_lengths = mask.shape == (rows,) and not mask.is_floating_point() and mask.dtype != torch.bool
    expect(
        are_lengths,
        f"{title}: mask",
        expected=f"({rows}, {most}) bool, or ({rows},) lengths",
        got=f"{tuple(mask.shape)} {mask.dtype}",
        error=InputError,
        fix="Pass the tokenizer's attention_mask, or the number of vectors of each row.",
    )
    outside = mask[(mask < 0) | (mask > most)]
    expect(
        not len(outside),
        f"{title}: lengths",
        expected=f"0 to {most}",
        got=outside.tolist(),
        error=InputError,
        fix="Count the vectors of each row after it was padded or cut.",
    )
    return torch.arange(most, device=padded.device) < mask.unsqueeze(1)
