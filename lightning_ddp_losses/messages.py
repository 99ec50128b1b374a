"""Tensors from one rank to another, whose shapes are agreed already: to the next one in a ring, or to one by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.transport import carrier

__all__ = ["around", "around_and_home", "receive", "send"]


def around(rows: Tensor, counts: Sequence[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's rows in turn, own ones first: two ranks' rows are here at a time, and the next travel while these are used.

    Args:
        rows: (B, ...), this rank's.
        counts: B of each rank.
        group: Process group.

    Returns:
        (rank, its rows), W times; every rank must go all the way.

    Communication: W - 1 messages to the next rank.
    """
    world, rank = groups.world_size(group), groups.rank(group)
    here = rows.detach().contiguous()
    neighbours = _Neighbours(here, group) if world > 1 else None
    for step in range(world):
        source, coming = (rank - step) % world, None
        if neighbours is not None and step + 1 < world:
            coming = neighbours.pass_on(here, counts[source - 1])
        yield source, here
        if coming is not None:
            here = coming()


def around_and_home(
    rows: Tensor,
    counts: Sequence[int],
    visit: Callable[[int, Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    found_counts: Sequence[int],
    group: Group,
) -> Tensor:
    """What all ranks find out about this rank's rows, which pass by all of them; what is found goes on behind the rows.

    Args:
        rows: (B, ...), this rank's.
        counts: B of each rank.
        visit: Rank and its rows -> what this rank finds, (n, ...), of one dtype and width for all; called W times.
        join: What one rank found and what those before it did -> both.
        found_counts: n of each rank.
        group: Process group.

    Returns:
        (n, ...), joined over all ranks: that of the next rank first, own last.

    Communication: 2 (W - 1) messages to the next rank. Each found block travels while the next one is computed.
    """
    own: Tensor | None = None
    before: Callable[[], Tensor] | None = None
    neighbours = _Neighbours(rows, group) if groups.world_size(group) > 1 else None
    for source, here in around(rows, counts, group):
        found = visit(source, here)
        if own is None or neighbours is None:
            own = found
            continue
        if before is not None:
            found, before = join(found, before()), None
        before = neighbours.pass_on(found, found_counts[source - 1])  # what comes last is about this rank's own
        del here, found  # else they would be held while the next are made
    assert own is not None
    return own if before is None else join(own, before())


class _Neighbours:
    """The ranks before and after this one in the ring."""

    def __init__(self, like: Tensor, group: Group) -> None:
        ranks, rank = groups.family(group).ranks, groups.rank(group)
        self._channel = carrier(like, group)
        self._after, self._before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]

    def pass_on(self, tensor: Tensor, rows: int) -> Callable[[], Tensor]:
        """Start to give a tensor to the next rank; the answer waits for what comes from the one before, so many rows.

        Both ranks know the sizes: what is empty is not sent.
        """
        arriving = tensor.new_empty((rows, *tensor.shape[1:]))
        ways = ((dist.isend, tensor, self._after), (dist.irecv, arriving, self._before))
        messages = [dist.P2POp(what, given, peer, self._channel) for what, given, peer in ways if given.numel()]
        works = dist.batch_isend_irecv(messages) if messages else []

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return arriving

        return arrived


def send(tensor: Tensor, to: int) -> None:
    """Give a tensor to one rank of the world, which calls ``receive``."""
    own = tensor.detach().contiguous()
    dist.send(own, to, group=carrier(own, None))


def receive(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """The tensor of this shape that one rank of the world sends, in the dtype and on the device of ``like``."""
    out = like.new_empty(tuple(shape))
    dist.recv(out, source, group=carrier(out, None))
    return out
