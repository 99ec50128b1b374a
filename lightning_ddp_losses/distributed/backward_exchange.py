"""Exchanges in backward, each opened by a handshake that says which exchange in forward it belongs to.

autograd runs backward in whatever order a rank asks for: two losses that are back-propagated in another order on one rank would swap
their gradients without a word, or, where sizes differ, abort gloo (torch 2.13, measured 2026). So every exchange in forward gets a
number, which all ranks agree on since they meet its handshake in the same order, and its exchange in backward names it.

Few bytes on the CPU ride in that handshake: then it is the one collective. Else it costs one more, which does not wait for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_rows,
    host_bytes,
    reduce_scatter_rows,
    sum_over_ranks,
)

_NUMBER = "number of the forward call whose gradient this is (back-propagate in the same order on all ranks)"


class BackwardExchange:
    """What the ranks exchange when the gradient of one exchange in forward is taken. Make it right after that one's handshake.

    Args:
        title: How messages name the loss or layer; the same on every rank.
        group: Process group; None is the world.
    """

    def __init__(self, title: str, group: Group) -> None:
        self._title, self._group = title, group
        self._world_size = process_groups.world_size(group)
        self._number, self._times = 0, 0
        if self._world_size > 1:
            notes = process_groups.internal_groups(group).notes
            self._number = notes[BackwardExchange] = notes.get(BackwardExchange, 0) + 1

    def open(self, payload: bytes = b"") -> list[bytes]:
        """Meet all ranks in the backward of this exchange; returns their payloads in rank order.

        Raises:
            RankMismatchError: on every rank, when one back-propagates something else, or this once more.

        Communication: one handshake.
        """
        self._times += 1
        must_match = {_NUMBER: self._number, "times back-propagated": self._times}
        return handshake.all_gather(f"backward of {self._title}", must_match, payload, group=self._group)

    def reduce_scatter(self, gradients: Sequence[Tensor], counts: Sequence[list[int]]) -> list[Tensor]:
        """Return this rank's rows of the sum over ranks, added in rank order, of each gradient.

        Args:
            gradients: (G, ...) each, of the same shapes and dtypes on all ranks.
            counts: For each, the rows of every rank.

        Communication: one handshake, which carries few bytes on the CPU; else one exchange of the rows per dtype.
        """
        if not self._fits(gradients):
            self.open()
            return _reduce_scatter_packed(gradients, counts, self._group)
        payloads = self.open(b"".join(map(host_bytes, gradients)))
        rank, offset, found = process_groups.rank(self._group), 0, []
        for gradient, rows in zip(gradients, counts, strict=True):
            row_numbers = gradient.shape[1:].numel()
            first, number = sum(rows[:rank]) * row_numbers, rows[rank] * row_numbers
            start = offset + first * gradient.element_size()
            own = _sum_of_payloads(payloads, gradient, start, number)
            found.append(own.view(rows[rank], *gradient.shape[1:]))
            offset += gradient.nbytes
        return found

    def all_reduce(self, gradient: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order where it rides in the handshake. Communication: as ``reduce_scatter``."""
        if not self._fits([gradient]):
            self.open()
            return sum_over_ranks(gradient, self._group)
        payloads = self.open(host_bytes(gradient))
        return _sum_of_payloads(payloads, gradient, 0, gradient.numel()).view(gradient.shape)

    def all_gather(self, gradient: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of all ranks in rank order; ``counts``: of each. Communication: as ``reduce_scatter``."""
        # what the longest rank sends: the same answer on all ranks
        longest = max(counts) * gradient.shape[1:].numel() * gradient.element_size()
        if gradient.device.type != "cpu" or longest > handshake.inline_capacity(self._group):
            self.open()
            return all_gather_rows(gradient, counts, self._group)
        data = bytearray().join(self.open(host_bytes(gradient)))
        shape = sum(counts), *gradient.shape[1:]
        if not data:
            return gradient.new_empty(shape)
        return torch.frombuffer(data, dtype=gradient.dtype).view(shape)

    def _fits(self, gradients: Sequence[Tensor]) -> bool:
        """Say whether the gradients ride in the handshake; decided by what is equal on all ranks."""
        on_host = all(gradient.device.type == "cpu" for gradient in gradients)
        return on_host and sum(gradient.nbytes for gradient in gradients) <= handshake.inline_capacity(self._group)


def _sum_of_payloads(payloads: list[bytes], like: Tensor, start: int, number: int) -> Tensor:
    """Sum the same part of each rank's payload, in at least float32: ``number`` elements from byte ``start`` on."""
    dtype = like.dtype
    if number == 0:
        return like.new_empty(0)
    parts = [torch.frombuffer(bytearray(sent), dtype=dtype, count=number, offset=start) for sent in payloads]
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return torch.stack(parts).to(wide).sum(0).to(dtype)


def _reduce_scatter_packed(gradients: Sequence[Tensor], counts: Sequence[list[int]], group: Group) -> list[Tensor]:
    """Return this rank's rows of each gradient's sum over ranks; gradients of one dtype travel together."""
    dtypes = {gradient.dtype for gradient in gradients}
    if len(gradients) < 2 or len(dtypes) > 1:
        return [reduce_scatter_rows(gradient, rows, group) for gradient, rows in zip(gradients, counts, strict=True)]
    # each rank's rows of all gradients, one behind the other
    rank, world_size = process_groups.rank(group), len(counts[0])
    parts = [torch.split(gradient, rows) for gradient, rows in zip(gradients, counts, strict=True)]
    pieces, sizes = [], []
    for receiver in range(world_size):
        own = [part[receiver].reshape(-1) for part in parts]
        pieces += own
        sizes.append([piece.numel() for piece in own])
    received = reduce_scatter_rows(torch.cat(pieces), [sum(each) for each in sizes], group)
    flat = torch.split(received, sizes[rank])
    return [piece.view(part[rank].shape) for piece, part in zip(flat, parts, strict=True)]
