"""Frames: how ranks that disagree get the same error instead of an abort or a hang.

gloo kills the process when collectives of different sizes meet. So whatever this package does together opens with a gather
of one frame per rank, of the same size everywhere, on a gloo group of its own. Ranks at different places of the program
still meet in equal frames, see who is where, and raise the same error. A rank that failed by itself sends its error in a
frame: the peers get it at their next frame, wherever that is.

A frame holds: version, kind, a digest of the *agreed* text (what is being done, with which shapes, dtypes, configuration:
equal on all ranks or an error), the text itself as far as it fits, and the *payload* (this rank's own data). A payload that
does not fit follows in one more gather. How a frame travels, and how long it is, is said in ``sending``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import start_gather, wait
from lightning_ddp_losses.errors import DDPLossError, PeerError, RankMismatchError, error_class, format_error

E = TypeVar("E", bound=Exception)
PEER_TIMEOUT = timedelta(seconds=60)
"""How long a rank that failed waits for its peers to hear of it."""


def all_gather(
    what: str,
    must_match: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: ChannelName = "handshakes",
    handshake_bytes: int | None = None,
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
        RankMismatchError: on every rank, when ``what`` or ``must_match`` differ.
        DDPLossError: on every rank, the error of a rank that came here through ``raise_on_all_ranks``.

    Communication:
        One gather of a frame per rank; one more, of the longest payload, when a payload does not fit (the channel's next
        frames then have room for it). None in a world of one.
    """
    return start(what, must_match, payload, group=group, channel=channel, handshake_bytes=handshake_bytes).finish()


def start(
    what: str,
    must_match: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: ChannelName = "handshakes",
    handshake_bytes: int | None = None,
) -> PendingHandshake:
    """As ``all_gather``, in two halves: the frame leaves now, and ``finish`` waits for the others'."""
    if process_groups.world_size(group) == 1:
        return PendingHandshake(payload)
    return PendingHandshake(payload, Sending(AGREE, _text(what, must_match), payload, group, channel, handshake_bytes))


def _text(what: str, must_match: Mapping[str, object]) -> str:
    return "\n".join([what, *(f"{key}={value}" for key, value in must_match.items())])


class PendingHandshake:
    """A frame on its way. What opens another on the same channel in between receives this one first."""

    def __init__(self, payload: bytes, sending: Sending | None = None) -> None:
        self._payload, self._sending = payload, sending

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends to each other."""
        return self._sending.bytes if self._sending is not None else 0

    def is_completed(self) -> bool:
        """Whether ``finish`` would not wait (for a payload longer than the frame it may)."""
        return self._sending is None or self._sending.work.is_completed()

    def finish(self) -> list[bytes]:
        """The payloads in rank order, or the error of ``all_gather``."""
        if self._sending is None:
            return [self._payload]
        frames = self._sending.receive()
        first = frames[0]
        if all(f.kind == AGREE and f.digest == first.digest and f.version == VERSION for f in frames):
            return [f.payload for f in frames]
        raise _mark_received(mismatch_error(frames), self._sending.channel)


def error_group(error: Exception) -> Group:
    """The group in whose frame this error was raised on all its members; None: in no frame."""
    return getattr(error, "_received_in", None)


def raise_on_all_ranks(
    error: Exception,
    where: str,
    *,
    group: Group = None,
    timeout: timedelta = PEER_TIMEOUT,
    handshake_bytes: int | None = None,
) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next frame of each peer.

    Args:
        error: What this rank met by itself. One that the peers know of already is raised without a word to them.
        where: The place, as the user knows it (``training_step``).
        group: Process group; None is the world.
        patience: How long to wait for peers that do not come.
        frame_bytes: As the peers' next ``all_gather``.

    Raises:
        DDPLossError: the same text on all ranks. A foreign error is raised as it is on its own rank and as ``PeerError``
            on the others.

    Communication:
        One frame (and a second gather for a long text), met by the peers' next frame; given up after ``timeout``.
    """
    if process_groups.world_size(group) == 1 or getattr(error, "collective", False):
        raise error
    with contextlib.suppress(AttributeError):  # an exception class may forbid it
        error.collective = True  # type: ignore[attr-defined]
    _mark_received(error, Channel.of(group, "handshakes"))
    ours = isinstance(error, DDPLossError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    report = json.dumps({"class": type(error).__name__ if ours else "", "text": text, "where": where})
    try:
        sending = Sending(ERROR, where, report.encode(), group, handshake_bytes=handshake_bytes, timeout=timeout)
        frames = sending.receive(timeout)
    except RuntimeError:  # the peers are gone or do not come: this rank's own error is what matters
        raise error from None
    if not ours:
        raise error
    raise _mark_received(mismatch_error(frames), sending.channel) from error


def _mark_received(error: E, channel: Channel) -> E:
    with contextlib.suppress(AttributeError):
        error._received_in = channel.group  # type: ignore[attr-defined]
    return error


# ---------- from sending.py

ChannelName: TypeAlias = Literal["handshakes", "checks"]
"""Which of our process groups carries a frame (``process_groups.ProcessGroups``)."""

HANDSHAKE_BYTES = 1024
_TEXT_BYTES = 448  # at most; the rest of the frame is the payload's
_WHOLE_TEXT = 8 << 10  # where ranks disagree and a frame could not show on what
_HEADER = struct.Struct("<HHHxxI16s")  # version, kind, bytes of text, bytes of payload, digest of the whole text
_ROOM, _ROOM_OF_ALL = 8 << 10, 256 << 10  # of a rank, and over all ranks: what a gather of its own costs less than
_LARGEST_FRAME = 64 << 10
_MEMORY = 64  # frames without a longer one after which the room for it goes


def inline_capacity(group: Group = None) -> int:
    """Bytes of payload that are better sent in a frame than in a gather of their own; equal on all ranks."""
    return _room(process_groups.world_size(group)) - _HEADER.size - _TEXT_BYTES


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
        self.handshake_bytes = HANDSHAKE_BYTES
        self.under_way: Sending | None = None
        self._largest = max(_LARGEST_FRAME, _room(world))
        self._seen, self._longest = 0, 0

    @classmethod
    def of(cls, group: Group, name: ChannelName) -> Channel:
        """The channel of a user's group by this name."""
        internal_groups = process_groups.internal_groups(group)
        group_for = getattr(internal_groups, name)
        key = cls, group_for  # where two names share a group, they share its frames
        if key not in internal_groups.notes:
            internal_groups.notes[key] = cls(group_for, len(internal_groups.ranks))
        found: Channel = internal_groups.notes[key]
        return found

    def learn(self, needed: int) -> None:
        """Take note of the longest that a rank has just sent."""
        self._seen, self._longest = self._seen + 1, max(self._longest, min(needed, self._largest))
        if self._longest > self.handshake_bytes or self._seen == _MEMORY:
            step = max(HANDSHAKE_BYTES, 1 << self._longest.bit_length() >> 3)
            self.handshake_bytes = -(-self._longest // step) * step
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
        channel: ChannelName = "handshakes",
        handshake_bytes: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self._text = encoded = text.encode()
        shown = encoded[:_TEXT_BYTES]
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        head = _HEADER.pack(VERSION, kind, len(shown), len(payload), digest) + shown
        self.channel = Channel.of(group, channel)
        if self.channel.under_way is not None:  # its peers' frames say how long this one is
            self.channel.under_way.receive(timeout)
        self._sized = handshake_bytes is None
        self._size = size = handshake_bytes or self.channel.handshake_bytes
        self._fits = len(head) + len(payload) <= size
        self._payload, self._received = payload, list[Header]()
        self.bytes = size if self._fits else size + len(payload)
        own = bytearray(head + payload if self._fits else head)
        own.extend(bytes(size - len(own)))
        self._everyone, self.work = _start_bytes(own, self.channel.group)
        self.channel.under_way = self

    def receive(self, timeout: timedelta | None = None) -> list[Header]:
        """All ranks' frames, in rank order; ``timeout``: how long to wait, None: as long as the group does."""
        if self.channel.under_way is self:
            self.channel.under_way = None
            self._received = self._receive(timeout)
        return self._received

    def _receive(self, timeout: timedelta | None) -> list[Header]:
        size = self._size
        rows = _finish_bytes(self._everyone, self.work, size, timeout)
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
            more_rows = _finish_bytes(*_start_bytes(more, self.channel.group), longest, timeout)
            for rank, row in enumerate(more_rows):
                if needed[rank] > size:
                    payloads[rank] = row[: heads[rank][3]]
        texts = [row[_HEADER.size : _HEADER.size + head[2]] for row, head in zip(rows, heads, strict=True)]
        if self._hides_what_differs(heads, texts):
            own = bytearray(self._text[:_WHOLE_TEXT].ljust(_WHOLE_TEXT, b"\0"))
            texts = _finish_bytes(*_start_bytes(own, self.channel.group), _WHOLE_TEXT, timeout)
        return [
            Header(version, kind, digest, text.rstrip(b"\0").decode(errors="replace"), data)
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


def _finish_bytes(everyone: Tensor, work: dist.Work, size: int, timeout: timedelta | None) -> list[bytes]:
    if timeout is None:
        wait(work)
    else:
        work.wait(timeout)
    data = everyone.numpy().tobytes()
    return [data[i : i + size] for i in range(0, len(data), size)]


# ---------- from verdicts.py

VERSION = 1
AGREE, ERROR = 0, 1
_LONG, _BEFORE = 200, 40  # characters


class Header(NamedTuple):
    """What a rank sent.

    Attributes:
        version: Of the format.
        kind: ``AGREE``, or ``ERROR`` from a rank that failed by itself.
        digest: Of the whole text.
        text: The operation and what must be equal, a line each; of a failure, where.
        payload: The rank's own data; of a failure, its report as JSON.
    """

    version: int
    kind: int
    digest: bytes
    text: str
    payload: bytes


def mismatch_error(frames: list[Header]) -> DDPLossError:
    """The one error, the same on every rank, that frames which do not agree amount to."""
    versions = [f.version for f in frames]
    if len(set(versions)) > 1:
        return RankMismatchError(
            "lightning_ddp_losses: expected one version on all ranks",
            ranks=[f"frame version {v}" for v in versions],
            fix="Install the same release on every node.",
            collective=True,
        )
    reports = {rank: json.loads(f.payload) for rank, f in enumerate(frames) if f.kind == ERROR}
    if reports:
        return _peer_error(reports, len(frames))
    return RankMismatchError(_mismatch_text([f.text for f in frames]), collective=True)


def _peer_error(reports: dict[int, dict[str, str]], world: int) -> DDPLossError:
    ours = [r for r in reports.values() if r["class"]]
    cls = error_class(ours[0]["class"]) if len(ours) == len(reports) else PeerError
    texts = {r["text"] for r in reports.values()}
    where = ", ".join(sorted({r["where"] for r in reports.values()}))
    ranks = ", ".join(map(str, reports))
    if len(texts) == 1:
        text = f"{texts.pop()}\n(rank {ranks} of {world}, in {where})"
    else:
        text = format_error(
            f"{len(reports)} of {world} ranks failed in {where}", ranks={k: r["text"] for k, r in reports.items()}
        )
    return cls(text, collective=True)


def _mismatch_text(texts: list[str]) -> str:
    """Say what differs: the operation, or the named values under the same operation."""
    heads = [text.split("\n", 1)[0] for text in texts]
    if len(set(heads)) > 1:
        return format_error(
            "ranks met at different places of the program",
            expected="the same operation on every rank",
            ranks=[_one_line(text) for text in texts],
            fix="Call every loss, metric and backward on all ranks, in the same order (no branch on rank or on local data).",
        )
    values: list[dict[str, str | None]] = [_values(text) for text in texts]
    names = [k for k in dict.fromkeys(k for v in values for k in v) if len({v.get(k) for v in values}) > 1]
    for name in names:
        for own, shown in zip(values, _shown([v.get(name) for v in values]), strict=True):
            own[name] = shown
    what = f"{heads[0]}: {', '.join(names)}" if names else heads[0]
    return format_error(
        what,
        expected="the same on every rank",
        ranks=[", ".join(f"{k}={v.get(k)}" for k in names) or _one_line(t) for v, t in zip(values, texts, strict=True)],
        fix="Make these equal on all ranks.",
    )


def _values(text: str) -> dict[str, str | None]:
    pairs = (line.partition("=") for line in text.split("\n")[1:])
    return {name: value for name, sign, value in pairs if sign}


def _shown(values: list[str | None]) -> list[str | None]:
    """Long values from a little before where they part."""
    columns = zip(*(v or "" for v in values), strict=False)
    start = max(0, sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns)) - _BEFORE)
    return [v if v is None or len(v) <= _LONG else f"...{v[start : start + _LONG]}" for v in values]


def _one_line(text: str) -> str:
    head, *rest = text.split("\n")
    return f"{head} ({', '.join(rest)})" if rest else head


# ---------- from failing.py


def notify_subgroups(error: Exception, where: str) -> bool:
    """Let the next frame of each part of the world that this rank belongs to be an error, with this one as the reason.

    Returns:
        Whether there are parts: then an error that a part raised together is news to the rest of the world.

    Communication: one frame for each part, not awaited.
    """
    parts = process_groups.subgroups()
    text = "; ".join(f"rank {process_groups.rank()} failed in {where}: {type(error).__name__}: {error}".splitlines())
    for part in parts:
        if part is error_group(error):
            continue
        with contextlib.suppress(RuntimeError):  # its members may be gone
            start(text, {}, group=part)
    return bool(parts)


def raise_in_all_groups(error: Exception, where: str) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next frame of each peer.

    Raises:
        DDPLossError: as ``handshake.raise_on_all_ranks``; a peer that heard of it in a part says so.

    Communication: one frame of the world, one for each part.
    """
    if (
        notify_subgroups(error, where) and error_group(error) is not process_groups.internal_groups().handshakes
    ):  # all have heard what the world said
        with contextlib.suppress(AttributeError):  # an exception class may forbid it
            error.collective = False  # type: ignore[attr-defined]
    raise_on_all_ranks(error, where)
