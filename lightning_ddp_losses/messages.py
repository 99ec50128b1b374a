"""Tensors from one rank to another, whose shapes are agreed already: to the next one in a ring, or to one by its number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.transport import carrier

__all__ = ["around", "receive", "send"]


def around(rows: Tensor, counts: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's rows in turn, own ones first: two ranks' rows are here at a time, and the next travel while these are used.

    Args:
        rows: (B, ...), this rank's.
        counts: B of each rank.
        group: Process group.

    Returns:
        (rank, its rows), W times; every rank must go all the way.

    Communication: W - 1 messages to the next rank.
    """
    world, source = groups.world_size(group), groups.rank(group)
    here = rows.detach().contiguous()
    if world == 1:
        yield source, here
        return
    family = groups.family(group)
    channel, rank = carrier(rows, group), groups.rank(group)
    after, before = family.ranks[(rank + 1) % world], family.ranks[(rank - 1) % world]
    for step in range(world):
        coming = (source - 1) % world
        arriving = here.new_empty((counts[coming], *here.shape[1:]))
        messages = [
            dist.P2POp(what, tensor, peer, channel)
            for what, tensor, peer in ((dist.isend, here, after), (dist.irecv, arriving, before))
            if step + 1 < world and tensor.numel()
        ]
        works = dist.batch_isend_irecv(messages) if messages else []
        yield source, here
        for work in works:
            work.wait()
        here, source = arriving, coming


def send(tensor: Tensor, to: int) -> None:
    """Give a tensor to one rank of the world, which calls ``receive``."""
    own = tensor.detach().contiguous()
    dist.send(own, to, group=carrier(own, None))


def receive(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """The tensor of this shape that one rank of the world sends, in the dtype and on the device of ``like``."""
    out = like.new_empty(tuple(shape))
    dist.recv(out, source, group=carrier(out, None))
    return out
