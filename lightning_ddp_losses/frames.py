"""Frames: how ranks that disagree get the same error instead of an abort or a hang.

gloo kills the process when collectives of different sizes meet. So whatever this package does together opens with a gather
of one frame per rank, of the same size everywhere, on a gloo group of its own. Ranks at different places of the program
still meet in equal frames, see who is where, and raise the same error. A rank that failed by itself sends its error in a
frame: the peers get it at their next frame, wherever that is.

A frame holds: version, kind, a digest of the *agreed* text (what is being done, with which shapes, dtypes, configuration:
equal on all ranks or an error), the text itself as far as it fits, and the *payload* (this rank's own data). A payload that
does not fit follows in one more gather, which all ranks know of from the frames; so does the text, where digests differ.

Frames start at ``FRAME_BYTES`` and follow what a channel carries: the next one has room for the longest that was just seen,
up to a bound, and the room goes when nobody needs it any more. Every rank sees the same frames, so all agree on the size
without a word about it, wherever they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import Literal, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.transport import start_gather, wait
from lightning_ddp_losses.verdicts import AGREE, ERROR, VERSION, Frame, verdict

__all__ = ["FRAME_BYTES", "PATIENCE", "Channel", "Exchange", "exchange", "fail_together", "heard_in", "room", "start"]

Channel: TypeAlias = Literal["frames", "checks"]
"""Which of our process groups carries a frame (``groups.Family``)."""

E = TypeVar("E", bound=Exception)
FRAME_BYTES = 1024
PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for its peers to hear of it."""

_TEXT_BYTES = 448  # at most; the rest of the frame is the payload's
_WHOLE_TEXT = 8 << 10  # where ranks disagree and a frame could not show on what
_HEADER = struct.Struct("<HHHxxI16s")  # version, kind, bytes of text, bytes of payload, digest of the whole text
_ROOM, _ROOM_OF_ALL = 8 << 10, 256 << 10  # of a rank, and over all ranks: what a gather of its own costs less than
_LARGEST_FRAME = 64 << 10
_MEMORY = 64  # frames without a longer one after which the room for it goes


def exchange(
    what: str,
    agreed: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: Channel = "frames",
    frame_bytes: int | None = None,
) -> list[bytes]:
    """Meet all ranks of ``group`` at this place and swap payloads.

    Args:
        what: The operation, the same on every rank.
        agreed: What must be equal on every rank, by name; values are compared as text.
        payload: This rank's own bytes, of any length.
        group: Process group; None is the world.
        channel: Which of our groups carries the frame; the checks have one of their own.
        frame_bytes: Size of this frame, for a caller whose ranks have agreed on it before; None: the channel's.

    Returns:
        The payloads in rank order.

    Raises:
        RankMismatchError: on every rank, when ``what`` or ``agreed`` differ.
        DDPLossError: on every rank, the error of a rank that came here through ``fail_together``.

    Communication:
        One gather of a frame per rank; one more, of the longest payload, when a payload does not fit (the channel's next
        frames then have room for it). None in a world of one.
    """
    return start(what, agreed, payload, group=group, channel=channel, frame_bytes=frame_bytes).finish()


def start(
    what: str,
    agreed: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: Channel = "frames",
    frame_bytes: int | None = None,
) -> Exchange:
    """As ``exchange``, in two halves: the frame leaves now, and ``finish`` waits for the others'."""
    if groups.world_size(group) == 1:
        return Exchange(payload)
    return Exchange(payload, _Sending(AGREE, _text(what, agreed), payload, group, channel, frame_bytes))


def room(group: Group = None) -> int:
    """Bytes of payload that are better sent in a frame than in a gather of their own; equal on all ranks."""
    return _room(groups.world_size(group)) - _HEADER.size - _TEXT_BYTES


def _room(world: int) -> int:
    return max(_ROOM, _ROOM_OF_ALL // world)


def _text(what: str, agreed: Mapping[str, object]) -> str:
    return "\n".join([what, *(f"{key}={value}" for key, value in agreed.items())])


class Exchange:
    """A frame on its way. What opens another on the same channel in between receives this one first."""

    def __init__(self, payload: bytes, sending: _Sending | None = None) -> None:
        self._payload, self._sending = payload, sending

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to each other."""
        return self._sending.bytes if self._sending is not None else 0

    def arrived(self) -> bool:
        """Whether ``finish`` would not wait (for a payload longer than the frame it may)."""
        return self._sending is None or self._sending.work.is_completed()

    def finish(self) -> list[bytes]:
        """The payloads in rank order, or the error of ``exchange``."""
        if self._sending is None:
            return [self._payload]
        frames = self._sending.receive()
        first = frames[0]
        if all(f.kind == AGREE and f.digest == first.digest and f.version == VERSION for f in frames):
            return [f.payload for f in frames]
        raise _told(verdict(frames), self._sending.channel)


def heard_in(error: Exception) -> Group:
    """The group in whose frame this error was raised on all its members; None: in no frame."""
    return getattr(error, "_heard_in", None)


def fail_together(
    error: Exception,
    where: str,
    *,
    group: Group = None,
    patience: timedelta = PATIENCE,
    frame_bytes: int | None = None,
) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next frame of each peer.

    Args:
        error: What this rank met by itself. One that the peers know of already is raised without a word to them.
        where: The place, as the user knows it (``training_step``).
        group: Process group; None is the world.
        patience: How long to wait for peers that do not come.
        frame_bytes: As the peers' next ``exchange``.

    Raises:
        DDPLossError: the same text on all ranks. A foreign error is raised as it is on its own rank and as ``PeerError``
            on the others.

    Communication:
        One frame (and a second gather for a long text), met by the peers' next frame; given up after ``patience``.
    """
    if groups.world_size(group) == 1 or getattr(error, "collective", False):
        raise error
    with contextlib.suppress(AttributeError):  # an exception class may forbid it
        error.collective = True  # type: ignore[attr-defined]
    _told(error, _Channel.of(group, "frames"))
    ours = isinstance(error, DDPLossError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    report = json.dumps({"class": type(error).__name__ if ours else "", "text": text, "where": where})
    try:
        sending = _Sending(ERROR, where, report.encode(), group, frame_bytes=frame_bytes, patience=patience)
        frames = sending.receive(patience)
    except RuntimeError:  # the peers are gone or do not come: this rank's own error is what matters
        raise error from None
    if not ours:
        raise error
    raise _told(verdict(frames), sending.channel) from error


def _told(error: E, channel: _Channel) -> E:
    with contextlib.suppress(AttributeError):
        error._heard_in = channel.group  # type: ignore[attr-defined]
    return error


class _Channel:
    """What the ranks know of a channel: the size of the next frame, from the frames that all have seen."""

    def __init__(self, group: dist.ProcessGroup, world: int) -> None:
        self.group = group
        self.frame_bytes = FRAME_BYTES
        self.under_way: _Sending | None = None
        self._largest = max(_LARGEST_FRAME, _room(world))
        self._seen, self._longest = 0, 0

    @classmethod
    def of(cls, group: Group, name: Channel) -> _Channel:
        family = groups.family(group)
        carrier = getattr(family, name)
        key = cls, carrier  # where two names share a group, they share its frames
        if key not in family.notes:
            family.notes[key] = cls(carrier, len(family.ranks))
        found: _Channel = family.notes[key]
        return found

    def learn(self, needed: int) -> None:
        """Take note of the longest that a rank has just sent."""
        self._seen, self._longest = self._seen + 1, max(self._longest, min(needed, self._largest))
        if self._longest > self.frame_bytes or self._seen == _MEMORY:
            step = max(FRAME_BYTES, 1 << self._longest.bit_length() >> 3)
            self.frame_bytes = -(-self._longest // step) * step
            self._seen, self._longest = 0, 0


class _Sending:
    """One rank's frame, on its way to all others."""

    def __init__(
        self,
        kind: int,
        text: str,
        payload: bytes,
        group: Group,
        channel: Channel = "frames",
        frame_bytes: int | None = None,
        patience: timedelta | None = None,
    ) -> None:
        self._text = encoded = text.encode()
        shown = encoded[:_TEXT_BYTES]
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        head = _HEADER.pack(VERSION, kind, len(shown), len(payload), digest) + shown
        self.channel = _Channel.of(group, channel)
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
        first = heads[0]
        agreeing = all(head[:2] == (VERSION, AGREE) for head in heads)
        if agreeing and any(h[4] != first[4] for h in heads) and any(len(t) == _TEXT_BYTES for t in texts):
            own = bytearray(self._text[:_WHOLE_TEXT].ljust(_WHOLE_TEXT, b"\0"))
            texts = _finish_bytes(*_start_bytes(own, self.channel.group), _WHOLE_TEXT, patience)
        return [
            Frame(version, kind, digest, text.rstrip(b"\0").decode(errors="replace"), data)
            for (version, kind, _, _, digest), text, data in zip(heads, texts, payloads, strict=True)
        ]


def _start_bytes(own: bytearray, channel: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    return start_gather(torch.frombuffer(own, dtype=torch.uint8), group=channel)


def _finish_bytes(everyone: Tensor, work: dist.Work, size: int, patience: timedelta | None) -> list[bytes]:
    if patience is None:
        wait(work)
    else:
        work.wait(patience)
    data = everyone.numpy().tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]
