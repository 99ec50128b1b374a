"""A miner's tuples as weights of rows: how classification losses of pytorch-metric-learning (PML) use them.

A row weighs as often as it is named, over the most often named row's count; without tuples all rows weigh 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError


def counts_of(indices_tuple: Sequence[Tensor], rows: int, *, only_anchors: bool, title: str) -> Tensor:
    """How often each of ``rows`` rows is named, int64.

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
    picked = (
        indices_tuple if not only_anchors else indices_tuple[0::2] if len(indices_tuple) == 4 else indices_tuple[:1]
    )
    index = torch.cat([part.reshape(-1) for part in picked])
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= rows):
        raise InputError(
            f"{title}: indices_tuple",
            expected=f"0 to {rows - 1}, the rows of this call",
            got=f"{int(index.min())} to {int(index.max())}",
            fix="Mine the embeddings that the loss gets.",
        )
    return torch.bincount(index.to(torch.int64), minlength=rows)


def weights_of(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """(G,) weights from the counts over all ranks."""
    highest = counts.max()
    return torch.where(highest > 0, counts.to(dtype) / highest.clamp(min=1), torch.ones((), dtype=dtype))
