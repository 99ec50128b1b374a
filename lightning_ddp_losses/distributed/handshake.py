"""Handshakes: how ranks that disagree get the same error instead of an abort or a hang.

gloo kills the process when collectives of different sizes meet (torch 2.13). So each operation of several ranks opens with
a handshake: a gather of one header per rank, of the same size everywhere, on a separate gloo group. Ranks at different places
of the program still meet in equal handshakes, see who is where, and raise the same error. A rank that failed by itself sends its
error in one: the peers get it at their next handshake, wherever that is. (torch's debug wrapper calls the header a collective
fingerprint.)

A header names the operation and what *must match* (shapes, dtypes, configuration: equal on all ranks or an error), and carries
the *payload*, this rank's own data. A payload that does not fit follows in one more gather, and the channel's next handshakes
are long enough for it. So an operation of a handshake and a gather often costs the handshake alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from lightning_ddp_losses.core import compat, precision
from lightning_ddp_losses.core.inputs import capture_error, is_capturing
from lightning_ddp_losses.distributed import liveness, process_groups
from lightning_ddp_losses.distributed.messages import (
    CALL,
    FAILURE,
    HEADER_BYTES,
    NAMED,
    OF_USER,
    OURS,
    TEXT_BYTES,
    VERSION,
    Agreement,
    Header,
    Instance,
    Meetings,
    ReceivedMessages,
    failure_report,
    hides_mismatch,
    mismatch_error,
    other_instances_error,
    refuse_long_payloads,
)
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import start_gather, wait
from lightning_ddp_losses.distributed.user_line import ProgramCall
from lightning_ddp_losses.errors import DDPLossError, PeerError

ChannelName: TypeAlias = Literal["handshakes", "checks"]
"""Which of our process groups carries a handshake (``process_groups.ProcessGroups``)."""

HANDSHAKE_BYTES = 1024
"""Size of a handshake on a channel that has carried no longer one."""

PEER_TIMEOUT = timedelta(seconds=60)
"""How long a rank that failed waits for its peers to receive its error."""

# inline payloads, of a rank and over all ranks: so many bytes cost less than a separate gather
_INLINE_BYTES, _INLINE_BYTES_OF_ALL = 8 << 10, 256 << 10
_LARGEST_HANDSHAKE = 64 << 10
_LINE_CHARACTERS = 200  # of a call of the program
_WINDOW = 64  # handshakes without a longer one, after which the channel forgets the longest


def inline_capacity(group: Group = None) -> int:
    """Return the bytes of payload that are better sent in a handshake than in a separate gather, equal on all ranks."""
    return _largest_inline(process_groups.world_size(group)) - HEADER_BYTES - TEXT_BYTES


def _largest_inline(world_size: int) -> int:
    return max(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // world_size)


def number_sent() -> int:
    """Return how many handshakes this rank has sent in the world's group of losses and layers. It has at least two ranks."""
    return Channel.of(None, "handshakes").sent


def number_opened() -> int:
    """Return how many handshakes of losses and layers this rank has opened in the world's group. 0 in a world of one."""
    return Channel.of(None, "handshakes").opened if process_groups.world_size() > 1 else 0


def all_gather(
    what: str | Agreement,
    must_match: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: ChannelName = "handshakes",
    handshake_bytes: int | None = None,
    of_user: bool = False,
) -> list[bytes]:
    """Meet all ranks of ``group`` at this place and exchange payloads.

    Args:
        what: The operation, the same on every rank, or an agreement about it and about values that many calls have in common.
        must_match: Further values that must be equal on every rank, by name. They are compared as text, an ``Instance`` as ``Meetings``
            does.
        payload: This rank's own bytes, at most ``messages.LARGEST_PAYLOAD``.
        group: Process group. None is the world.
        channel: Our group that carries the handshake. The checks have a separate one.
        handshake_bytes: Size of this handshake, for a caller with a size that its ranks have agreed on before. None: the channel's.
        of_user: The payload is of the user's program, and may have any length.

    Returns:
        The payloads in rank order.

    Raises:
        RankMismatchError: on every rank, when ``what`` or ``must_match`` differ.
        DDPLossError: on every rank, the error of a rank that came here through ``raise_on_all_ranks``.
        PeerError: on every rank, for a rank that announces a longer payload.

    Communication:
        One gather of a handshake per rank. One more, of the longest payload, when a payload does not fit (the channel's next
        handshakes are then long enough for it). There is none in a world of one.
    """
    pending = start(
        what, must_match, payload, group=group, channel=channel, handshake_bytes=handshake_bytes, of_user=of_user
    )
    return pending.finish()


def all_gather_between_steps(
    what: str | Agreement, must_match: Mapping[str, object], payload: bytes = b"", *, group: Group = None
) -> list[bytes]:
    """Gather as ``all_gather``, between calls of losses and layers: ``number_opened`` does not count it."""
    payloads = all_gather(what, must_match, payload, group=group)
    if process_groups.world_size(group) > 1:
        Channel.of(group, "handshakes").opened -= 1
    return payloads


def all_gather_json(what: str, must_match: Mapping[str, object], own: object, *, group: Group = None) -> list[Any]:
    """Exchange lists, dicts, texts and numbers in rank order, as ``all_gather_between_steps`` does bytes."""
    payloads = all_gather_between_steps(what, must_match, json.dumps(own).encode(), group=group)
    return [json.loads(payload) for payload in payloads]


def meet_by_name(call: ProgramCall, must_match: Mapping[str, object]) -> None:
    """Meet all ranks of the world at a call of the user's program, before anything is sent that only some ranks may wait for.

    Args:
        call: The call, with the line of this rank.
        must_match: Values that must be equal on every rank, by name.

    Raises:
        RankMismatchError: on every rank, with the ranks that made the call, their lines, and where the other ranks are.
        PeerError: if a rank does not come.

    Communication: one gather of a handshake. None in a world of one. ``number_opened`` does not count it.
    """
    if process_groups.world_size() == 1:
        return
    channel = Channel.of(None, "handshakes")
    text, digest = Agreement(call.operation).of_call(must_match)
    line = call.line[:_LINE_CHARACTERS].encode()  # a payload, as ranks may make one call on different lines
    pending = PendingHandshake(CALL, text, digest, line, channel, handshake_bytes=None, origin=NAMED)
    pending.finish()
    channel.opened -= 1


def start(
    what: str | Agreement,
    must_match: Mapping[str, object],
    payload: bytes = b"",
    *,
    group: Group = None,
    channel: ChannelName = "handshakes",
    handshake_bytes: int | None = None,
    of_user: bool = False,
) -> PendingHandshake:
    """Start what ``all_gather`` does: the message leaves now, and ``finish`` waits for the others'."""
    agreement = Agreement(what) if isinstance(what, str) else what
    if is_capturing():
        operation = agreement.operation
        raise_on_all_ranks(capture_error(operation), operation, group=group)
    if process_groups.world_size(group) == 1:
        return _OwnHandshake(payload)
    if channel == "handshakes" and precision.is_autocast_on():
        must_match = {**must_match, "autocast": "on"}
    text, digest = agreement.of_call(must_match)
    return PendingHandshake(
        CALL,
        text,
        digest,
        payload,
        Channel.of(group, channel),
        handshake_bytes=handshake_bytes,
        origin=OF_USER if of_user else OURS,
        instance=next((value for value in must_match.values() if isinstance(value, Instance)), None),
    )


# ---------------------------------------------------------------------- a handshake on its way


class Channel:
    """The size of the next handshake on one of our groups, which all its ranks derive from those that they have seen.

    Attributes:
        group: One of our groups.
        groups: All of our groups over the same ranks.
        is_of_losses: Whether it carries the handshakes of losses and layers, over all ranks of the world.
        handshake_bytes: The size of the next handshake.
        pending: The one that was sent and not received yet.
        opened: Number of handshakes of losses and layers so far. It is equal on all ranks while they agree.
        sent: Number of all handshakes so far.
        meetings: Losses of the ranks that have met in them.
    """

    def __init__(self, group: dist.ProcessGroup, groups: process_groups.ProcessGroups) -> None:
        self.group, self.groups = group, groups
        self.is_of_losses = group is groups.handshakes and len(groups.ranks) == process_groups.world_size()
        self.handshake_bytes = HANDSHAKE_BYTES
        self.pending: PendingHandshake | None = None
        self.opened = self.sent = 0
        self.meetings = Meetings()
        self._largest = max(_LARGEST_HANDSHAKE, _largest_inline(len(groups.ranks)))
        self._seen, self._longest = 0, 0

    @classmethod
    def of(cls, group: Group, name: ChannelName) -> Channel:
        """Return the channel of a user's group by this name."""
        internal_groups = process_groups.internal_groups(group)
        known: Channel | None = internal_groups.notes.get((cls, name))
        if known is not None:
            return known
        if not internal_groups.has(name):
            all_gather_between_steps(f"the group of {name}", {}, group=group)  # all ranks come to make it
        carrier = internal_groups.get(name)
        # where two names share a group, they share its handshakes
        channel: Channel = internal_groups.notes.setdefault((cls, carrier), cls(carrier, internal_groups))
        internal_groups.notes[cls, name] = channel
        return channel

    def observe(self, message_bytes: int) -> None:
        """Take note of the longest message that a rank has just sent: sizes go up at once, and down after a window of shorter ones."""
        self._seen += 1
        self._longest = max(self._longest, min(message_bytes, self._largest))
        if self._longest > self.handshake_bytes or self._seen == _WINDOW:
            # in eighths of a power of two, so that payloads of about one size do not change it
            step = max(HANDSHAKE_BYTES, 1 << self._longest.bit_length() >> 3)
            self.handshake_bytes = -(-self._longest // step) * step
            self._seen, self._longest = 0, 0


class PendingHandshake:
    """One rank's message on its way to all others. What opens another on the same channel in between receives this one first.

    Args:
        kind: ``CALL`` or ``FAILURE``.
        text: Operation and values that must match, a line each.
        digest: A hash of the text.
        payload: This rank's own bytes.
        channel: Channel that carries it.
        handshake_bytes: Its size. None: the channel's.
        timeout: Time to wait for a handshake that is still pending on the channel. None: the group's.
        origin: ``OURS``, ``OF_USER`` or ``NAMED``.
        instance: Identity of the calling loss. None: there is one of its kind.
    """

    def __init__(
        self,
        kind: int,
        text: bytes,
        digest: bytes,
        payload: bytes,
        channel: Channel,
        *,
        handshake_bytes: int | None,
        timeout: timedelta | None = None,
        origin: int = OURS,
        instance: Instance | None = None,
    ) -> None:
        if instance is not None and instance.label:  # which is in the text
            instance = None
        self._text, self._payload, self._channel, self._instance = text, payload, channel, instance
        self._origin = origin
        self._received: ReceivedMessages | None = None
        self._error: DDPLossError | None = None  # who asks again gets the same one
        # 1. the peers' messages in the handshake before say how long this one is
        if channel.pending is not None and kind == CALL:
            channel.pending.finish()  # ranks that disagreed in it do not go on
        elif channel.pending is not None:
            channel.pending.receive(timeout)
        self._has_channel_size = handshake_bytes is None
        self._size = handshake_bytes or channel.handshake_bytes
        # 2. the header, the payload if it fits, zeros up to the agreed size
        message = Header.pack(kind, text, digest, len(payload), origin, instance)
        self._is_inline = len(message) + len(payload) <= self._size
        if self._is_inline:
            message += payload
        # 3. all of them to all ranks
        own = bytearray(message.ljust(self._size, b"\0"))
        self._messages, self._work = start_gather(torch.frombuffer(own, dtype=torch.uint8), group=channel.group)
        channel.pending = self
        channel.opened += 1
        channel.sent += 1
        self.number = channel.sent

    def is_completed(self) -> bool:
        """Return whether ``finish`` would not wait. (It may wait for a payload that did not fit.)"""
        return self._work.is_completed()

    def finish(self) -> list[bytes]:
        """Wait for the peers, and return the payloads in rank order or raise the error of ``all_gather``."""
        self.receive()
        received = self._received
        if self._error is None and received is not None:
            instance = self._instance
            if not received.are_one_call:
                self._error = mismatch_error(received.headers())
            elif instance is None or self._channel.meetings.fit(instance.kind, received.numbers, received.made):
                return received.payloads()
            else:
                self._error = other_instances_error(received.headers())
            mark_reported(self._error, self._channel.group)
            self._channel.groups.failures += 1
        assert self._error is not None
        raise self._error

    def receive(self, timeout: timedelta | None = None) -> None:
        """Wait for the peers' messages.

        Args:
            timeout: Time to wait. None: the group's.
        """
        if self._channel.pending is not self:
            return
        self._channel.pending = None
        watch = liveness.current_watch
        try:
            if watch is not None and self._channel.is_of_losses:
                watch.waits_in = self
            wait(self._work, timeout)
            received = ReceivedMessages(self._messages.numpy())
            if not received.are_in_full:
                received.complete_(self._receive_rest(received.headers(), timeout))
            elif self._has_channel_size:
                self._channel.observe(received.longest)
            self._received = received
        except DDPLossError as error:
            self._error = error
            raise
        except RuntimeError as error:  # gloo's own: a time-out, or a connection that was closed
            self._error = self._missing_peers(error)
            raise self._error from error
        finally:
            if watch is not None:
                watch.waits_in = None

    @property
    def call(self) -> ProgramCall:
        """The operation, with the user's line if it is a call of the program."""
        operation = self._text.decode(errors="replace").partition("\n")[0]
        line = self._payload.decode(errors="replace") if self._origin == NAMED else ""
        return ProgramCall(operation, line)

    def headers(self) -> list[Header]:
        """Return the headers that were received, in rank order."""
        assert self._received is not None
        return self._received.headers()

    def _missing_peers(self, error: RuntimeError) -> PeerError:
        call = self.call
        fix = "a rank left out what the others did (a branch on rank or on local data)."
        if self._origin == NAMED:
            fix = f"a rank did not make this call. {call.advice}"
        return liveness.lost_peer_error(error, str(call)) or PeerError(
            f"rank {self._channel.group.rank()} waited in {call}",
            expected="every rank to come to a loss, metric, layer or backward of this package",
            got=f"no answer from some rank ({str(error).splitlines()[0]})",
            fix=f"Look at the ranks' output for the first error; where there is none, {fix}",
            page="F37",
        )

    def _receive_rest(self, headers: list[Header], timeout: timedelta | None) -> list[Header]:
        """Return the headers with the parts of messages that did not fit. Communication: up to two gathers."""
        if any(header.version != VERSION for header in headers):  # the layout is unknown
            return headers
        refuse_long_payloads(headers)
        # 1. every rank has seen how long the messages would have been, and derives the size of the next handshake from that
        if self._has_channel_size:
            self._channel.observe(max(header.message_bytes for header in headers))
        # 2. the payloads that did not fit. Ranks that disagree come to this gather all the same
        missing = [header.payload_bytes if header.message_bytes > self._size else 0 for header in headers]
        if any(missing):
            rest = self._gather_rest(b"" if self._is_inline else self._payload, missing, timeout)
            headers = [h._replace(payload=late or h.payload) for h, late in zip(headers, rest, strict=True)]
        # 3. the whole texts, if ranks disagree and the sent parts may not show about what
        if hides_mismatch(headers):
            texts = self._gather_rest(self._text, [header.text_bytes for header in headers], timeout)
            headers = [header._replace(text=text) for header, text in zip(headers, texts, strict=True)]
        return headers

    def _gather_rest(self, own: bytes, sizes: Sequence[int], timeout: timedelta | None) -> list[bytes]:
        """Gather so many bytes of each rank. Communication: one gather of the longest."""
        part = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        everyone, work = start_gather(part, group=self._channel.group)
        wait(work, timeout)
        return [row[:size].tobytes() for row, size in zip(everyone.numpy(), sizes, strict=True)]


class _OwnHandshake(PendingHandshake):
    """The handshake of a world of one, which is complete."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def is_completed(self) -> bool:
        return True

    def finish(self) -> list[bytes]:
        return [self._payload]


# ---------------------------------------------------------------------- what fails on one rank


def raise_on_all_ranks(
    error: Exception,
    where: str,
    *,
    group: Group = None,
    timeout: timedelta = PEER_TIMEOUT,
    handshake_bytes: int | None = None,
) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next handshake of each peer.

    Args:
        error: Error of this rank. If the peers have received it already, no message is sent.
        where: Place in the user's words (``training_step``).
        group: Process group. None is the world.
        timeout: Time to wait for peers that do not come.
        handshake_bytes: Size of the peers' next ``all_gather``.

    Raises:
        DDPLossError: the same text on all ranks. A foreign error is raised as it is on its own rank and as ``PeerError``
            on the others.

    Communication:
        One handshake (and a second gather for a long text), met by the peers' next one. This rank gives up after ``timeout``.
    """
    if process_groups.world_size(group) == 1 or getattr(error, "collective", False):
        raise error
    # no failure: peers may not need this forward again, and then do not come
    if compat.stops_recomputation(error):
        raise error
    note_on(error, collective=True)
    report = failure_report(error, where)
    try:
        channel = Channel.of(group, "handshakes")  # peers that do not come do not make it either
        mark_reported(error, channel.group)
        text, digest = Agreement(where).of_call({})
        pending = PendingHandshake(
            FAILURE, text, digest, report, channel, handshake_bytes=handshake_bytes, timeout=timeout
        )
        pending.receive(timeout)
        headers = pending.headers()
        channel.groups.failures += 1
    except RuntimeError:  # the peers are gone or do not come: this rank's own error is what matters
        note_on(error, is_unheard=True)
        raise error from None
    if not isinstance(error, DDPLossError):
        raise error
    told = mismatch_error(headers)
    told.reported_in = error.reported_in  # type: ignore[attr-defined]  # who knows of the one knows of the other
    raise told from error


@contextlib.contextmanager
def raising_on_all_ranks(where: str, *, group: Group = None, handshake_bytes: int | None = None) -> Iterator[None]:
    """Raise an error that one rank has inside the block on every rank (``raise_on_all_ranks``). One that all ranks raise passes through."""
    try:
        yield
    except Exception as error:
        raise_on_all_ranks(error, where, group=group, handshake_bytes=handshake_bytes)


def notify_subgroups(error: Exception, where: str) -> bool:
    """Let the next handshake of each part of the world that this rank belongs to be an error, with this one as the reason.

    Parts that know of it are left out, so that each member of a part comes to one such handshake, wherever it learnt of the error: one
    without its members stays in the group. A rank that destroys the group would wait for it until the group's time-out.

    Returns:
        Whether there are parts: then an error that a part raised together is news to the rest of the world.

    Communication: one handshake for each part, not awaited.
    """
    subgroups = process_groups.subgroups()
    reason = f"{type(error).__name__}: {error}"
    text = "; ".join(f"rank {process_groups.rank()} failed in {where}: {reason}".splitlines())
    for subgroup in subgroups:
        if was_reported_in(subgroup, error):
            continue
        mark_reported(error, subgroup)
        with contextlib.suppress(RuntimeError):  # its members may be gone
            start(text, {}, group=subgroup)
    return bool(subgroups)


def raise_in_all_groups(error: Exception, where: str) -> NoReturn:
    """Raise ``error`` on every rank: here, and at the next handshake of each peer, in the world or in a part of it.

    Raises:
        DDPLossError: as ``raise_on_all_ranks``. A peer that received it in a part names the part.

    Communication: one handshake of the world, one for each part.
    """
    has_subgroups = notify_subgroups(error, where)
    # all ranks have received an error raised in a handshake of the world. An error of a part is new to the others
    if has_subgroups and not was_reported_in(process_groups.internal_groups().handshakes, error):
        note_on(error, collective=False)
    raise_on_all_ranks(error, where)


# ---------------------------------------------------------------------- who knows of an error


def was_reported_in(group: dist.ProcessGroup, error: Exception) -> bool:
    """Return whether the members of one of our groups receive this error in a handshake that this rank has joined."""
    return any(known is group for known in getattr(error, "reported_in", ()))


def has_reached_all(error: BaseException) -> bool:
    """Return whether every rank of the world raises this error, or the one that it has become there."""
    if getattr(error, "is_unheard", False):
        return False
    groups = getattr(error, "reported_in", ())
    if not groups:  # decided by all ranks, or by those that are left after a lost connection
        return getattr(error, "collective", False) and not isinstance(error, PeerError)
    return bool(process_groups.internal_groups().made().intersection(groups))


def mark_reported(error: Exception, group: dist.ProcessGroup) -> None:
    """Note that one more group receives an error: a loss over class shards sends it to its part first, then to the replicas."""
    note_on(error, reported_in=(*getattr(error, "reported_in", ()), group))


def note_on(error: BaseException, **notes: object) -> None:
    """Set attributes of an error, unless its class forbids that."""
    with contextlib.suppress(AttributeError):
        for name, value in notes.items():
            setattr(error, name, value)
