"""`PieceDraw`: draws for a piece that is cut from a dimension with several entries for each row, such as two views after each other.

Entry ``u`` of the dimension ``(outer, B, inner)`` belongs to one row. A piece draws for all entries of the rows that it touches, like a run
on the whole batch, and keeps its entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.randomness.places import RowPlace, Rows, empty_whole, own_part, put_own_, whole_shape
from lightning_ddp_losses.randomness.whole_draws import Draw, DrawCall


class PieceDraw:
    """Draws a piece's part of the draws for all rows.

    Args:
        rows: Rows of this rank among the rows of all ranks.
        place: Position of the rows in the dimension that is cut.
        piece: Entries of the piece.
        draw_part: Draws a rank's part of a draw with rows.
    """

    def __init__(self, rows: Rows, place: RowPlace, piece: slice, draw_part: Draw) -> None:
        self._draw_part = draw_part
        self._place = place
        # 1. rows that the piece touches
        of_block = rows.local * place.inner
        entries = range(piece.start, piece.stop)
        touched = [entry % of_block // place.inner for entry in entries]
        first, last = min(touched, default=0), max(touched, default=0) + 1
        order = None if rows.order is None else rows.order[first:last]
        self._touched = Rows(last - first, rows.start + first, rows.total, order)
        # 2. the piece among all entries of these rows
        count = self._touched.local * place.inner
        within = [entry // of_block * count + entry % of_block - first * place.inner for entry in entries]
        self._entries = Rows(len(within), 0, place.outer * count, tuple(within))

    def __call__(self, call: DrawCall, place: RowPlace, rows: Rows) -> Any:
        """Draw. Arguments are those of ``draw_own_part``, for the entries of the piece as rows."""
        given = call.tensors
        whole = RowPlace(place.dim, place.outer * self._place.outer, self._place.inner * place.inner)
        shape: Any = None
        if given:
            shape = torch.broadcast_tensors(*given)[0].shape  # type: ignore[no-untyped-call]

        def around(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            own = torch.empty_like(part) if call.name.endswith("_like") else part.expand(shape)
            tensor = empty_whole(own, place, self._entries.total).fill_(1)
            put_own_(tensor, own, place, self._entries)
            return tensor

        of_all = call.mapped(around)
        if not given:
            of_all = call.with_size(whole_shape(call.shape, place, self._entries.total))
        found = self._draw_part(of_all, whole, self._touched)
        if call.name.endswith("_"):
            return given[0].copy_(own_part(found, place, self._entries))
        if isinstance(found, tuple):
            return tuple(own_part(part, place, self._entries) for part in found)
        return own_part(found, place, self._entries)
