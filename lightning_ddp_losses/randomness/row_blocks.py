"""`draw_own_blocks`: a draw with rows in which each rank draws for its own rows only (``randomness="by_row"``).

The rows of all ranks are divided into blocks of about 4096 numbers (a million on an accelerator). The step's generator draws one key for
each draw, equal on all ranks. A block is drawn by a generator with the seed ``key + number of the block``, so its numbers depend neither on
the rank nor on the number of ranks. A rank draws the blocks that contain its rows, and keeps the numbers of its rows.

A block has the rows first and is contiguous, and its size follows from the size of a row, so the memory order of a tensor does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.randomness.places import RowPlace, Rows, rows_first
from lightning_ddp_losses.randomness.shared_states import generators_put_back
from lightning_ddp_losses.randomness.whole_draws import DrawCall, rule_of_draw

_NUMBERS = 4096  # of a block on the CPU, where seeding a generator takes as long as 200 to 500 numbers
_NUMBERS_ON_DEVICE = 1 << 20  # where each block is a launch
_FIRST = RowPlace(0)


def draw_own_blocks(call: DrawCall, place: RowPlace, rows: Rows) -> Any:
    """Return this rank's result of an operator that draws. Arguments are those of ``draw_own_part``.

    ``multinomial`` draws for all rows, because its arguments have a dimension that is not drawn.

    Equivalent to: the same call in one process with the rows of all ranks.

    Raises:
        CannotDrawError: for an operator that cannot be drawn for the rows of all ranks.
    """
    draw = rule_of_draw(call, place)
    is_in_place = call.name.endswith("_")
    if call.name == "multinomial":
        return draw(call, place, rows)
    # 1. arguments with the rows first
    given = call.tensors
    like = torch.empty(call.shape, device=call.kwargs.get("device"))
    if given:
        like = torch.broadcast_tensors(*given)[0]  # type: ignore[no-untyped-call]
    by_row = {id(tensor): _by_row(tensor.expand(like.shape), place, rows) for tensor in given}
    width = max(1, like.numel() // rows.local)
    numbers = _NUMBERS if like.device.type == "cpu" else _NUMBERS_ON_DEVICE
    size = max(1, numbers // width)
    results, buffers = [], []
    if is_in_place:
        results, buffers = [given[0]], [by_row[id(given[0])]]
    # 2. draw each block, or its whole if other ranks have a part of it
    key = _draw_key(call.kwargs.get("generator"))
    call = call.without_generator()
    with generators_put_back(None):
        for number, own, of_block in _blocks_with_rows(rows, size):

            def in_block(part: Any, own: slice = own) -> Any:
                return by_row[id(part)][own] if isinstance(part, Tensor) else part

            block = call.mapped(in_block)
            if not given:
                block = block.with_size([of_block.local, width])
            _seed_((key + number) % (1 << 63), like.device)
            found = block.run() if of_block.local == size else draw(block, _FIRST, of_block)
            if is_in_place:
                continue  # drawn in place
            parts = found if isinstance(found, tuple) else (found,)
            if not results:
                results = [torch.empty_like(like, dtype=part.dtype) for part in parts]
                buffers = [_by_row(result, place, rows) for result in results]
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[own] = part
    # 3. put the rows where they belong
    for result, buffer in zip(results, buffers, strict=True):
        _put_back_(result, buffer, place, rows)
    return results[0] if len(results) == 1 else tuple(results)


def _by_row(tensor: Tensor, place: RowPlace, rows: Rows) -> Tensor:
    """Return a contiguous matrix with the numbers of each row, as a view if possible."""
    flat = rows_first(tensor, place, rows.local).flatten(1).contiguous()
    width = max(1, flat.shape[1])
    return flat.as_strided(flat.shape, (width, 1))  # one row may have other strides, and would be drawn transposed


def _put_back_(tensor: Tensor, by_row: Tensor, place: RowPlace, rows: Rows) -> None:
    """Write the numbers of each row into a tensor, unless the matrix of them is a view of it."""
    target = rows_first(tensor, place, rows.local)
    if target.data_ptr() != by_row.data_ptr():
        target.copy_(by_row.view(target.shape))


def _draw_key(generator: torch.Generator | None) -> int:
    """Draw the key of a draw from the CPU's generator of the step, or from the user's generator."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def _seed_(seed: int, device: torch.device) -> None:
    """Seed the generator of a device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def _blocks_with_rows(rows: Rows, size: int) -> Iterator[tuple[int, slice, Rows]]:
    """Yield the number of each block with rows of this rank, the positions of these rows in the rank, and in the block."""
    assert rows.order is None
    end = rows.start + rows.local
    for number in range(rows.start // size, -(-end // size)):
        first, last = max(rows.start, number * size), min(end, (number + 1) * size)
        yield number, slice(first - rows.start, last - rows.start), Rows(last - first, first - number * size, size)
