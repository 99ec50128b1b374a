"""One frame on its way, and what a channel has learnt of the sizes that it carries.

Frames start at ``FRAME_BYTES`` and follow what a channel carries: the next one has room for the longest that was just seen,
up to a bound, and the room goes when nobody needs it any more. Every rank sees the same frames, so all agree on the size
without a word about it, wherever they are.

A payload that does not fit follows in one more gather, which all ranks know of from the frames; so does the text, where ranks
disagree in one operation and the frames do not show on what.
"""

from __future__ import annotations

import hashlib
import struct
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.transport import start_gather, wait
from lightning_ddp_losses.verdicts import AGREE, VERSION, Frame

__all__ = ["FRAME_BYTES", "Channel", "ChannelName", "Sending", "room"]

ChannelName: TypeAlias = Literal["frames", "checks"]
"""Which of our process groups carries a frame (``groups.Family``)."""

FRAME_BYTES = 1024
_TEXT_BYTES = 448  # at most; the rest of the frame is the payload's
_WHOLE_TEXT = 8 << 10  # where ranks disagree and a frame could not show on what
_HEADER = struct.Struct("<HHHxxI16s")  # version, kind, bytes of text, bytes of payload, digest of the whole text
_ROOM, _ROOM_OF_ALL = 8 << 10, 256 << 10  # of a rank, and over all ranks: what a gather of its own costs less than
_LARGEST_FRAME = 64 << 10
_MEMORY = 64  # frames without a longer one after which the room for it goes


def room(group: Group = None) -> int:
    """Bytes of payload that are better sent in a frame than in a gather of their own; equal on all ranks."""
    return _room(groups.world_size(group)) - _HEADER.size - _TEXT_BYTES


def _room(world: int) -> int:
    return max(_ROOM, _ROOM_OF_ALL // world)


class Channel:
    """What the ranks know of a channel: the size of the next frame, from the frames that all have seen.

    Attributes:
        group: Of ours, which carries the frames.
        frame_bytes: Of the next one.
        under_way: What was sent and not received yet.
    """

    def __init__(self, group: dist.ProcessGroup, world: int) -> None:
        self.group = group
        self.frame_bytes = FRAME_BYTES
        self.under_way: Sending | None = None
        self._largest = max(_LARGEST_FRAME, _room(world))
        self._seen, self._longest = 0, 0

    @classmethod
    def of(cls, group: Group, name: ChannelName) -> Channel:
        """The channel of a user's group by this name."""
        family = groups.family(group)
        carrier = getattr(family, name)
        key = cls, carrier  # where two names share a group, they share its frames
        if key not in family.notes:
            family.notes[key] = cls(carrier, len(family.ranks))
        found: Channel = family.notes[key]
        return found

    def learn(self, needed: int) -> None:
        """Take note of the longest that a rank has just sent."""
        self._seen, self._longest = self._seen + 1, max(self._longest, min(needed, self._largest))
        if self._longest > self.frame_bytes or self._seen == _MEMORY:
            step = max(FRAME_BYTES, 1 << self._longest.bit_length() >> 3)
            self.frame_bytes = -(-self._longest // step) * step
            self._seen, self._longest = 0, 0


class Sending:
    """One rank's frame, on its way to all others.

    Args:
        kind: Of ``verdicts``.
        text: What is being done, and what must be equal, a line each.
        payload: This rank's own bytes.
        group: The user's.
        channel: Which of ours carries it.
        frame_bytes: Its size; None: the channel's.
        patience: How long to wait for a frame that is still under way.

    Attributes:
        channel: That carries it.
        work: Done when all frames are here.
        bytes: That this rank sends to each other.
    """

    def __init__(
        self,
        kind: int,
        text: str,
        payload: bytes,
        group: Group,
        channel: ChannelName = "frames",
        frame_bytes: int | None = None,
        patience: timedelta | None = None,
    ) -> None:
        self._text = encoded = text.encode()
        shown = encoded[:_TEXT_BYTES]
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        head = _HEADER.pack(VERSION, kind, len(shown), len(payload), digest) + shown
        self.channel = Channel.of(group, channel)
        if self.channel.under_way is not None:  # its peers' frames say how long this one is
            self.channel.under_way.receive(patience)
        self._sized = frame_bytes is None
        self._size = size = frame_bytes or self.channel.frame_bytes
        self._fits = len(head) + len(payload) <= size
        self._payload, self._received = payload, list[Frame]()
        self.bytes = size if self._fits else size + len(payload)
        own = bytearray(head + payload if self._fits else head)
        own.extend(bytes(size - len(own)))
        self._everyone, self.work = _start_bytes(own, self.channel.group)
        self.channel.under_way = self

    def receive(self, patience: timedelta | None = None) -> list[Frame]:
        """All ranks' frames, in rank order; ``patience``: how long to wait, None: as long as the group does."""
        if self.channel.under_way is self:
            self.channel.under_way = None
            self._received = self._receive(patience)
        return self._received

    def _receive(self, patience: timedelta | None) -> list[Frame]:
        size = self._size
        rows = _finish_bytes(self._everyone, self.work, size, patience)
        heads = [_HEADER.unpack_from(row) for row in rows]
        payloads = []
        for row, (_, _, text_bytes, payload_bytes, _) in zip(rows, heads, strict=True):
            start = _HEADER.size + text_bytes
            payloads.append(row[start : start + payload_bytes])
        needed = [_HEADER.size + t + n for _, _, t, n, _ in heads]
        if self._sized:
            self.channel.learn(max(needed))
        longest = max((head[3] for head, n in zip(heads, needed, strict=True) if n > size), default=0)
        if longest:
            more = bytearray(longest)
            if not self._fits:
                more[: len(self._payload)] = self._payload
            more_rows = _finish_bytes(*_start_bytes(more, self.channel.group), longest, patience)
            for rank, row in enumerate(more_rows):
                if needed[rank] > size:
                    payloads[rank] = row[: heads[rank][3]]
        texts = [row[_HEADER.size : _HEADER.size + head[2]] for row, head in zip(rows, heads, strict=True)]
        if self._hides_what_differs(heads, texts):
            own = bytearray(self._text[:_WHOLE_TEXT].ljust(_WHOLE_TEXT, b"\0"))
            texts = _finish_bytes(*_start_bytes(own, self.channel.group), _WHOLE_TEXT, patience)
        return [
            Frame(version, kind, digest, text.rstrip(b"\0").decode(errors="replace"), data)
            for (version, kind, _, _, digest), text, data in zip(heads, texts, payloads, strict=True)
        ]

    @staticmethod
    def _hides_what_differs(heads: list[tuple[Any, ...]], texts: list[bytes]) -> bool:
        """Whether ranks disagree in one operation and a text was cut; who is elsewhere may be gone, and would not send it whole."""
        if len({digest for *_, digest in heads}) == 1:
            return False
        together = (
            all(head[:2] == (VERSION, AGREE) for head in heads) and len({t.split(b"\n", 1)[0] for t in texts}) == 1
        )
        return together and any(len(text) == _TEXT_BYTES for text in texts)


def _start_bytes(own: bytearray, channel: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    return start_gather(torch.frombuffer(own, dtype=torch.uint8), group=channel)


def _finish_bytes(everyone: Tensor, work: dist.Work, size: int, patience: timedelta | None) -> list[bytes]:
    if patience is None:
        wait(work)
    else:
        work.wait(patience)
    data = everyone.numpy().tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]
