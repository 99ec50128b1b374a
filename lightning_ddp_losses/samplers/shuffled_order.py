"""A random order of the numbers 0 to n - 1 that is computed number by number: nothing is shuffled, kept, or skipped.

A Feistel network is a bijection of the numbers of a fixed count of bits, whatever its round function: each round adds to one half
a hash of the other, which can be taken off again. What falls outside 0 to n - 1 goes through it again until it falls inside
("cycle walking"). It is a bijection of 0 to n - 1; with fewer than 2 n numbers of that many bits that takes two goes at most in the mean.

So every rank computes its own rows and nothing else, and an epoch that is resumed begins at its place at once.

Legend: ``n`` rows of the data set, ``W`` ranks, ``G`` rows of a global batch.

Source: Luby, Rackoff 1988 (the network); Black, Rogaway 2002 (cycle walking); Steele, Lea, Flood 2014 (the hash, splitmix64).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.samplers.epoch_place import EpochPlace, batches_behind
from lightning_ddp_losses.samplers.seeded_draw import GlobalDraw, share

_ROUNDS = 8  # even, so that both halves come back to their places
_TABLE_BITS = 16  # halves of up to 2**32 rows: tables of 4 MiB in all at most
_PIECE = 1 << 16  # about so many numbers are computed at once
_EPOCH_BITS = 29  # of a key; the seed has 32, and each round a number of its own
_WORD = (1 << 64) - 1


class ShuffledOrder(Sampler[int]):
    """The numbers 0 to n - 1 in an order of its own for each key.

    Args:
        length: n.
    """

    _tables: tuple[int, list[Tensor]] | None = None  # of the key that was asked for last

    def __init__(self, length: int) -> None:
        self.length = length
        bits = max((length - 1).bit_length(), 2)
        # the halves may differ by one bit
        self._left_bits, self._right_bits = bits // 2, bits - bits // 2

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.length, _PIECE):
            yield from self.at(torch.arange(start, min(start + _PIECE, self.length)), key=0).tolist()

    def at(self, positions: Tensor, key: int) -> Tensor:
        """Return the numbers at some positions of the order that belongs to a key.

        Args:
            positions: int64, each from 0 to n - 1.
            key: 0 to 2**61 - 1; another one is another order.

        Returns:
            int64, of the shape of ``positions``.
        """
        rounds = self._rounds(key)
        numbers = self._permuted(positions, rounds)
        # what is no row goes on until it is one
        outside = (numbers >= self.length).nonzero()[:, 0]
        while len(outside):
            again = self._permuted(numbers[outside], rounds)
            numbers[outside] = again
            outside = outside[again >= self.length]
        return numbers

    def _rounds(self, key: int) -> list[Tensor]:
        """Return what each round adds: a table of all halves, or, where there are too many of them, a key to compute it by."""
        if self._tables is not None and self._tables[0] == key:
            return self._tables[1]
        rounds = [torch.tensor(_signed(_mixed_word(key * _ROUNDS + number))) for number in range(_ROUNDS)]
        if self._right_bits <= _TABLE_BITS:
            # the halves swap places, and with them their sizes: the other one is what is hashed
            bits = [self._right_bits, self._left_bits]
            rounds = [
                (_mix_bits(torch.arange(1 << bits[number % 2]) ^ own) & ((1 << bits[1 - number % 2]) - 1)).int()
                for number, own in enumerate(rounds)
            ]
        self._tables = (key, rounds)
        return rounds

    def _permuted(self, numbers: Tensor, rounds: list[Tensor]) -> Tensor:
        """Return numbers of the network's bits as other such numbers, each from exactly one."""
        left_bits, right_bits = self._left_bits, self._right_bits
        left, right = numbers >> right_bits, numbers & ((1 << right_bits) - 1)
        if rounds[0].dim() > 0:
            # halves are small: half the memory is twice as fast
            left, right = left.int(), right.int()
            for table in rounds:
                left, right = right, table.index_select(0, right).bitwise_xor_(left)
            return (left.long() << right_bits).bitwise_or_(right)
        for own in rounds:
            # the halves swap places, and with them their sizes
            left, right = right, (left ^ _mix_bits(right ^ own)) & ((1 << left_bits) - 1)
            left_bits, right_bits = right_bits, left_bits
        return (left << right_bits) | right


def _mix_bits(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64, of int64 that wrap around."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed_word(number: int) -> int:
    """Return splitmix64's word for a number: keys of neighbouring seeds and rounds have nothing in common."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


class NaturalOrder(ShuffledOrder):
    """The numbers 0 to n - 1 as they come, for every key."""

    def at(self, positions: Tensor, key: int) -> Tensor:
        """Return the positions themselves."""
        return positions


class OwnBatches(Sequence[list[int]]):
    """This rank's part of each batch of an epoch, computed when it is asked for; some batches at a time.

    Args:
        order: What the rows are in.
        key: Of the order.
        global_batch_size: G.
        count: Number of batches.
        rows: Rows of all of them, all ranks together.
        world_size: W.
        rank: This rank.
    """

    def __init__(
        self,
        order: ShuffledOrder,
        key: int,
        *,
        global_batch_size: int,
        count: int,
        rows: int,
        world_size: int,
        rank: int,
    ) -> None:
        self._order, self._key, self._count, self._rows = order, key, count, rows
        self._global_batch_size, self._world_size, self._rank = global_batch_size, world_size, rank
        self._together = max(_PIECE * world_size // global_batch_size, 1)
        self._first, self._computed = 0, list[list[int]]()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> list[int]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[int]]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(self._count))]
        if not 0 <= number < self._count:
            raise IndexError(number)
        if not self._first <= number < self._first + len(self._computed):
            self._compute(number)
        return self._computed[number - self._first]

    def _compute(self, first: int) -> None:
        """Compute the batches from one on, all their rows in one call."""
        G, W, rank = self._global_batch_size, self._world_size, self._rank
        last = min(first + self._together, self._count)
        # 1. full batches are all cut at the same places
        full = min(last, self._rows // G) - first
        own = range(G)[share(G, W, rank)]
        starts = torch.arange(first * G, (first + full) * G, G)
        positions = (starts[:, None] + torch.arange(own.start, own.stop)).flatten()
        self._first = first
        self._computed = self._order.at(positions, self._key).view(full, len(own)).tolist()
        # 2. the last one may be shorter
        if last - first > full:
            batch = range((first + full) * G, self._rows)
            own = batch[share(len(batch), W, rank)]
            self._computed.append(self._order.at(torch.arange(own.start, own.stop), self._key).tolist())


class ShuffledDraw(GlobalDraw):
    """The batches of an order that no rank has to draw: memory and start do not grow with the data set.

    Args:
        order: What the rows are in.
        title: How errors name it.
        global_batch_size: G.
        local_batch_size: Instead of G, which is W times this.
        drop_last: Leave out a last batch of fewer than G rows.
        seed: Epoch ``e`` has the order that belongs to it and ``e``. None: 0, or the seed of a state that is loaded.
    """

    source: ShuffledOrder

    def __init__(
        self,
        order: ShuffledOrder,
        *,
        title: str = "GlobalBatchSampler.shuffled",
        global_batch_size: int | None = None,
        local_batch_size: int | None = None,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        super().__init__(
            order,
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            drop_last=drop_last,
            seed=seed,
        )
        self.title = title
        if seed is None:
            self._own_seed = 0  # ranks exchange none

    def _meet(self, epoch: int) -> Sequence[list[Any]]:
        W, rank = process_groups.world_size(), process_groups.rank()
        handshake.all_gather(self.title, self._must_match(epoch))
        G, count = self._global_rows(), self.count()
        assert G is not None
        key = self._offer() << _EPOCH_BITS | epoch
        own = OwnBatches(
            self.source, key, global_batch_size=G, count=count, rows=self._epoch_rows(G), world_size=W, rank=rank
        )
        # seed and length say all: there is no draw to compare
        self._kept = ((epoch, W, rank), b"", own)
        return own

    def _first_batch(self, place: EpochPlace | None) -> int:
        G = self._global_rows()
        assert G is not None
        if place is None:
            return 0
        if place.rows == self._epoch_rows(G):
            return self.count()
        if place.rows % G or place.rows > self._epoch_rows(G):
            return batches_behind(self.title, place, [G] * self.count(), length=len(self.source))
        return place.rows // G
