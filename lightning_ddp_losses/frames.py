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
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import NoReturn, TypeVar

from lightning_ddp_losses import groups
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.sending import FRAME_BYTES, Channel, ChannelName, Sending, room
from lightning_ddp_losses.verdicts import AGREE, ERROR, VERSION, verdict

__all__ = [
    "FRAME_BYTES",
    "PATIENCE",
    "ChannelName",
    "Exchange",
    "exchange",
    "fail_together",
    "heard_in",
    "room",
    "start",
]

E = TypeVar("E", bound=Exception)
PATIENCE = timedelta(seconds=60)
"""How long a rank that failed waits for its peers to hear of it."""


def exchange(
    what: str,
    agreed: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: ChannelName = "frames",
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
    channel: ChannelName = "frames",
    frame_bytes: int | None = None,
) -> Exchange:
    """As ``exchange``, in two halves: the frame leaves now, and ``finish`` waits for the others'."""
    if groups.world_size(group) == 1:
        return Exchange(payload)
    return Exchange(payload, Sending(AGREE, _text(what, agreed), payload, group, channel, frame_bytes))


def _text(what: str, agreed: Mapping[str, object]) -> str:
    return "\n".join([what, *(f"{key}={value}" for key, value in agreed.items())])


class Exchange:
    """A frame on its way. What opens another on the same channel in between receives this one first."""

    def __init__(self, payload: bytes, sending: Sending | None = None) -> None:
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
    _told(error, Channel.of(group, "frames"))
    ours = isinstance(error, DDPLossError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    report = json.dumps({"class": type(error).__name__ if ours else "", "text": text, "where": where})
    try:
        sending = Sending(ERROR, where, report.encode(), group, frame_bytes=frame_bytes, patience=patience)
        frames = sending.receive(patience)
    except RuntimeError:  # the peers are gone or do not come: this rank's own error is what matters
        raise error from None
    if not ours:
        raise error
    raise _told(verdict(frames), sending.channel) from error


def _told(error: E, channel: Channel) -> E:
    with contextlib.suppress(AttributeError):
        error._heard_in = channel.group  # type: ignore[attr-defined]
    return error
