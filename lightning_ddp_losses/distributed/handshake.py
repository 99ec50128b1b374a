"""Handshakes: ranks that disagree raise the same error instead of aborting or hanging.

gloo kills the process when collectives of different sizes are matched with each other (torch 2.13). Each operation across ranks therefore
begins with a handshake: a gather of one header per rank, of the same size everywhere, on a separate gloo group. Ranks at different places
of the program are still matched in equally sized handshakes, read each other's position from the headers, and raise the same error. A rank
that failed on its own sends its error in a handshake, and its peers receive it in their next handshake, whichever operation that belongs
to. (torch's debug wrapper calls the header a collective fingerprint.)

A header contains the operation, the values that *must match* (shapes, dtypes, configuration: equal on all ranks, otherwise an error), and
the *payload*, which is this rank's own data. A payload that does not fit is sent in one additional gather, and subsequent handshakes on
the channel are large enough for it. As a result, an operation of a handshake and a gather often needs only the handshake.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from lightning_ddp_losses.core import precision, torch_compat
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
from lightning_ddp_losses.errors import DDPLossError, InputError, PeerError

ChannelName: TypeAlias = Literal["handshakes", "checks"]
"""Which of our process groups carries a handshake (``process_groups.ProcessGroups``)."""

HANDSHAKE_BYTES = 1024
"""Size of a handshake on a channel that has not carried a longer one."""

PEER_TIMEOUT = timedelta(seconds=60)
"""How long a rank that failed waits for its peers to receive its error."""

# limits for inline payloads, per rank and over all ranks: up to this size they cost less than a separate gather
_INLINE_BYTES, _INLINE_BYTES_OF_ALL = 8 << 10, 256 << 10
_LARGEST_HANDSHAKE = 64 << 10
_LINE_CHARACTERS = 200  # limit for the source line of a call of the program
_LEFT_OUT = "a rank left out what the others did (a branch on rank or on local data)."
_WINDOW = 64  # number of handshakes without a longer one, after which the size of the longest is discarded


def inline_capacity(group: Group = None) -> int:
    """Return the payload size in bytes up to which a handshake is cheaper than a separate gather, equal on all ranks."""
    return _largest_inline(process_groups.world_size(group)) - HEADER_BYTES - TEXT_BYTES


def _largest_inline(world_size: int) -> int:
    return max(_INLINE_BYTES, _INLINE_BYTES_OF_ALL // world_size)


def number_sent() -> int:
    """Return how many handshakes this rank has sent in the world's group of losses and layers. The world must have at least two ranks."""
    return Channel.of(None, "handshakes").sent


def number_opened() -> int:
    """Return how many handshakes of losses and layers this rank has opened in the world's group. 0 in a world of one rank."""
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
    """Exchange payloads among all ranks of ``group``, after checking that they call the same operation.

    Args:
        what: The operation, the same on every rank, or an agreement about the operation and the values that many calls share.
        must_match: Further values that must be equal on every rank, by name. They are compared as text, an ``Instance`` as described
            in ``Meetings``.
        payload: This rank's own bytes, at most ``messages.LARGEST_PAYLOAD``.
        group: Process group. None is the world.
        channel: Internal group that carries the handshake. The checks use a separate one.
        handshake_bytes: Size of this handshake, if the caller's ranks have already agreed on one. If None, the channel's size.
        of_user: Whether the payload comes from the user's program and may have any length.

    Returns:
        The payloads in rank order.

    Raises:
        RankMismatchError: on every rank, when ``what`` or ``must_match`` differ.
        DDPLossError: on every rank, the error of a rank that called ``raise_on_all_ranks``.
        PeerError: on every rank, for a rank that announces a longer payload.

    Communication:
        One gather of a handshake per rank. One more gather, of the longest payload, when a payload does not fit (the channel's next
        handshakes are then long enough for it). None in a world of one rank.
    """
    pending = start(
        what, must_match, payload, group=group, channel=channel, handshake_bytes=handshake_bytes, of_user=of_user
    )
    return pending.finish()


def all_gather_between_steps(
    what: str | Agreement, must_match: Mapping[str, object], payload: bytes = b"", *, group: Group = None
) -> list[bytes]:
    """Gather like ``all_gather``, between calls of losses and layers: ``number_opened`` does not count this handshake."""
    payloads = all_gather(what, must_match, payload, group=group)
    if process_groups.world_size(group) > 1:
        Channel.of(group, "handshakes").opened -= 1
    return payloads


def all_gather_json(what: str, must_match: Mapping[str, object], own: object, *, group: Group = None) -> list[Any]:
    """Exchange lists, dicts, texts and numbers in rank order, with the same accounting as ``all_gather_between_steps``."""
    payloads = all_gather_between_steps(what, must_match, json.dumps(own).encode(), group=group)
    return [json.loads(payload) for payload in payloads]


def meet_by_name(call: ProgramCall, must_match: Mapping[str, object]) -> None:
    """Verify that all ranks of the world make this call of the user's program, before sending anything that only some ranks wait for.

    Args:
        call: The call, with the source line on this rank.
        must_match: Values that must be equal on every rank, by name.

    Raises:
        RankMismatchError: on every rank, with the ranks that made the call, their lines, and the position of the other ranks.
        PeerError: if a rank does not take part.

    Communication: one gather of a handshake, which ``number_opened`` does not count. None in a world of one rank.
    """
    if process_groups.world_size() == 1:
        return
    channel = Channel.of(None, "handshakes")
    text, digest = Agreement(call.operation).of_call(must_match)
    line = call.line[:_LINE_CHARACTERS].encode()  # sent as payload, because ranks may make one call on different lines
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
    """Start the exchange of ``all_gather``: the message is sent now, and ``finish`` waits for the messages of the peers."""
    agreement = Agreement(what) if isinstance(what, str) else what
    if is_capturing():
        operation = agreement.operation
        raise_on_all_ranks(capture_error(operation), operation, group=group)
    if process_groups.world_size(group) == 1:
        return _OwnHandshake(payload)
    # the first condition is a call into C, since every handshake evaluates it
    if torch_compat.innermost_transform() is not None and torch_compat.is_in_transform():
        raise_on_all_ranks(transform_error(agreement.operation), agreement.operation, group=group)
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


# ---------------------------------------------------------------------- a pending handshake


class Channel:
    """The size of the next handshake on an internal group, which all ranks derive from the handshakes that they have received.

    Attributes:
        group: One of the internal groups.
        groups: All internal groups over the same ranks.
        is_of_losses: Whether it carries the handshakes of losses and layers, over all ranks of the world.
        handshake_bytes: The size of the next handshake.
        pending: The handshake that was sent and not received yet.
        opened: Number of handshakes of losses and layers so far. It is equal on all ranks while they agree.
        sent: Number of all handshakes so far.
        meetings: Combinations of loss instances that the ranks have called together.
        before_message: Called before each handshake. None outside of a formula that follows a list of exchanges without handshakes.
    """

    def __init__(self, group: dist.ProcessGroup, groups: process_groups.ProcessGroups) -> None:
        self.group, self.groups = group, groups
        self.is_of_losses = group is groups.handshakes and len(groups.ranks) == process_groups.world_size()
        self.handshake_bytes = HANDSHAKE_BYTES
        self.pending: PendingHandshake | None = None
        self.before_message: Callable[[], None] | None = None
        self.opened = self.sent = 0
        self.meetings = Meetings()
        self._largest = max(_LARGEST_HANDSHAKE, _largest_inline(len(groups.ranks)))
        self._seen, self._longest = 0, 0

    @classmethod
    def of(cls, group: Group, name: ChannelName) -> Channel:
        """Return the channel with this name over the ranks of a user's group."""
        internal_groups = process_groups.internal_groups(group)
        known: Channel | None = internal_groups.notes.get((cls, name))
        if known is not None:
            return known
        if not internal_groups.has(name):
            all_gather_between_steps(f"the group of {name}", {}, group=group)  # all ranks must create it together
        carrier = internal_groups.get(name)
        # two names that share a group also share its handshakes
        channel: Channel = internal_groups.notes.setdefault((cls, carrier), cls(carrier, internal_groups))
        internal_groups.notes[cls, name] = channel
        return channel

    def observe(self, message_bytes: int) -> None:
        """Record the longest message of a handshake: sizes grow immediately and shrink after a window of shorter messages."""
        self._seen += 1
        self._longest = max(self._longest, min(message_bytes, self._largest))
        if self._longest > self.handshake_bytes or self._seen == _WINDOW:
            # round up to eighths of a power of two, so that payloads of similar size do not change it
            step = max(HANDSHAKE_BYTES, 1 << self._longest.bit_length() >> 3)
            self.handshake_bytes = -(-self._longest // step) * step
            self._seen, self._longest = 0, 0


class PendingHandshake:
    """One rank's message in transit to all others. An operation that opens another handshake on the channel receives this one first.

    Args:
        kind: ``CALL`` or ``FAILURE``.
        text: Operation and values that must match, one per line.
        digest: A hash of the text.
        payload: This rank's own bytes.
        channel: Channel that carries it.
        handshake_bytes: Size of the handshake. If None, the channel's size.
        timeout: Time to wait for a handshake that is still pending on the channel. If None, the group's timeout.
        origin: ``OURS``, ``OF_USER`` or ``NAMED``.
        instance: Identity of the calling loss. None if the operation does not belong to one of several instances.
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
        if instance is not None and str(instance):  # the text contains it
            instance = None
        self._text, self._payload, self._channel, self._instance = text, payload, channel, instance
        self._origin = origin
        self._received: ReceivedMessages | None = None
        self._error: DDPLossError | None = None  # raised again by each further call of `finish`
        if channel.before_message is not None:
            channel.before_message()
        # 1. the peers' messages in the previous handshake determine the size of this one
        if channel.pending is not None and kind == CALL:
            channel.pending.finish()  # ranks that disagreed in it stop with the error
        elif channel.pending is not None:
            channel.pending.receive(timeout)
        self._has_channel_size = handshake_bytes is None
        self._size = handshake_bytes or channel.handshake_bytes
        # 2. the header, the payload if it fits, and zeros up to the agreed size
        message = Header.pack(kind, text, digest, len(payload), origin, instance)
        self._is_inline = len(message) + len(payload) <= self._size
        if self._is_inline:
            message += payload
        # 3. send the message to all ranks
        own = bytearray(message.ljust(self._size, b"\0"))
        self._messages, self._work = start_gather(torch.frombuffer(own, dtype=torch.uint8), group=channel.group)
        channel.pending = self
        channel.opened += 1
        channel.sent += 1
        self.number = channel.sent

    def is_completed(self) -> bool:
        """Return whether ``finish`` would return without waiting, except for a payload that did not fit."""
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
            timeout: Time to wait. If None, the group's timeout.
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
        except RuntimeError as error:  # raised by gloo for a timeout or a closed connection
            self._error = self._missing_peers(error)
            raise self._error from error
        finally:
            if watch is not None:
                watch.waits_in = None

    @property
    def call(self) -> ProgramCall:
        """The operation, with the user's source line if it is a call of the program."""
        operation = self._text.decode(errors="replace").partition("\n")[0]
        line = self._payload.decode(errors="replace") if self._origin == NAMED else ""
        return ProgramCall(operation, line)

    def headers(self) -> list[Header]:
        """Return the headers that were received, in rank order."""
        assert self._received is not None
        return self._received.headers()

    def _missing_peers(self, error: RuntimeError) -> PeerError:
        call = self.call
        fix = _LEFT_OUT
        if self._origin == NAMED:
            fix = f"a rank did not make this call. {call.advice}"
        return missing_peers_error(error, str(call), self._channel.group, fix=fix)

    def _receive_rest(self, headers: list[Header], timeout: timedelta | None) -> list[Header]:
        """Return the headers completed by the parts of messages that did not fit. Communication: up to two gathers."""
        if any(header.version != VERSION for header in headers):  # the layout is unknown
            return headers
        refuse_long_payloads(headers)
        # 1. every rank has received the lengths of the complete messages, and derives the size of the next handshake from them
        if self._has_channel_size:
            self._channel.observe(max(header.message_bytes for header in headers))
        # 2. the payloads that did not fit. Ranks that disagree also take part in this gather
        missing = [header.payload_bytes if header.message_bytes > self._size else 0 for header in headers]
        if any(missing):
            rest = self._gather_rest(b"" if self._is_inline else self._payload, missing, timeout)
            headers = [h._replace(payload=late or h.payload) for h, late in zip(headers, rest, strict=True)]
        # 3. the complete texts, if ranks disagree and the parts sent so far may not contain the difference
        if hides_mismatch(headers):
            texts = self._gather_rest(self._text, [header.text_bytes for header in headers], timeout)
            headers = [header._replace(text=text) for header, text in zip(headers, texts, strict=True)]
        return headers

    def _gather_rest(self, own: bytes, sizes: Sequence[int], timeout: timedelta | None) -> list[bytes]:
        """Gather the given number of bytes from each rank. Communication: one gather of the longest."""
        part = torch.frombuffer(bytearray(own.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        everyone, work = start_gather(part, group=self._channel.group)
        wait(work, timeout)
        return [row[:size].tobytes() for row, size in zip(everyone.numpy(), sizes, strict=True)]


def missing_peers_error(
    error: RuntimeError, where: str, group: dist.ProcessGroup, *, fix: str = _LEFT_OUT
) -> PeerError:
    """Return the error for ranks that do not answer, from gloo's error for a timeout or a closed connection.

    Args:
        error: The error of gloo.
        where: What this rank waited in.
        group: The group of the collective.
        fix: The cause if no rank shows an error.
    """
    return liveness.lost_peer_error(error, where) or PeerError(
        f"rank {group.rank()} waited in {where}",
        expected="every rank to come to a loss, metric, layer or backward of this package",
        got=f"no answer from some rank ({str(error).splitlines()[0]})",
        fix=f"Look at the ranks' output for the first error; where there is none, {fix}",
        page="F37",
    )


class _OwnHandshake(PendingHandshake):
    """The handshake in a world of one rank, which is complete immediately."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def is_completed(self) -> bool:
        return True

    def finish(self) -> list[bytes]:
        return [self._payload]


# ---------------------------------------------------------------------- errors on a single rank


def raise_on_all_ranks(
    error: Exception,
    where: str,
    *,
    group: Group = None,
    timeout: timedelta = PEER_TIMEOUT,
    handshake_bytes: int | None = None,
) -> NoReturn:
    """Raise ``error`` on every rank: immediately on this rank, and at the next handshake of each peer.

    Args:
        error: Error of this rank. If the peers have received it already, no message is sent.
        where: Place in the user's words (``training_step``).
        group: Process group. None is the world.
        timeout: Time to wait for peers that do not take part.
        handshake_bytes: Size of the peers' next ``all_gather``.

    Raises:
        DDPLossError: the same text on all ranks. An error of another class is raised unchanged on its own rank and as ``PeerError``
            on the other ranks.

    Communication:
        One handshake (and a second gather for a long text), matched by the peers' next handshake. This rank stops waiting after
        ``timeout``.
    """
    if process_groups.world_size(group) == 1 or getattr(error, "collective", False):
        raise error
    # not a failure: peers may not recompute this forward, and then do not take part in a handshake
    if torch_compat.stops_recomputation(error):
        raise error
    if torch_compat.is_in_transform() and not isinstance(error, DDPLossError):
        # torch's own text, about the tensors of a transform, does not say why the call cannot be made
        cause, error = error, transform_error(where)
        error.__cause__ = cause
    note_on(error, collective=True)
    report = failure_report(error, where)
    try:
        channel = Channel.of(group, "handshakes")  # creating it also fails if peers do not take part
        mark_reported(error, channel.group)
        text, digest = Agreement(where).of_call({})
        with torch_compat.outside_transforms():
            pending = PendingHandshake(
                FAILURE, text, digest, report, channel, handshake_bytes=handshake_bytes, timeout=timeout
            )
            pending.receive(timeout)
        headers = pending.headers()
        channel.groups.failures += 1
    except RuntimeError:  # the peers have exited or do not respond: this rank's own error is the one to raise
        note_on(error, is_unheard=True)
        raise error from None
    if not isinstance(error, DDPLossError):
        raise error
    told = mismatch_error(headers)
    told.reported_in = error.reported_in  # type: ignore[attr-defined]  # groups that received one error received both
    raise told from error


@contextlib.contextmanager
def raising_on_all_ranks(where: str, *, group: Group = None, handshake_bytes: int | None = None) -> Iterator[None]:
    """Raise an error of one rank inside the block on every rank (``raise_on_all_ranks``). An error raised by all ranks passes through."""
    try:
        yield
    except Exception as error:
        raise_on_all_ranks(error, where, group=group, handshake_bytes=handshake_bytes)


def transform_error(title: str) -> InputError:
    """Return the error of a call inside a transform of ``torch.func``."""
    return InputError(
        f"{title}: transform",
        expected="a call outside of the transforms of torch.func, in whose backward ranks cannot exchange gradients",
        got="a call inside grad, vjp, jacrev, hessian, jvp or vmap",
        fix="Differentiate with autograd (backward, torch.autograd.grad), or transform only what each rank computes from its own rows. "
        "torch.func.functional_call is supported.",
    )


def notify_subgroups(error: Exception, where: str) -> bool:
    """Turn the next handshake of each part of the world that contains this rank into an error, with this error as the reason.

    Parts that have already received the error are skipped, so that each member of a part sends exactly one such handshake, regardless of
    how it received the error. A handshake without the other members would remain pending in the group, and a rank that destroys the group
    would wait for it until the group's timeout.

    Returns:
        Whether there are parts. If so, the remaining ranks of the world have not received an error that was raised within one part.

    Communication: one handshake for each part, not awaited.
    """
    subgroups = process_groups.subgroups()
    reason = f"{type(error).__name__}: {error}"
    text = "; ".join(f"rank {process_groups.rank()} failed in {where}: {reason}".splitlines())
    for subgroup in subgroups:
        if was_reported_in(subgroup, error):
            continue
        mark_reported(error, subgroup)
        with contextlib.suppress(RuntimeError):  # its members may have exited
            start(text, {}, group=subgroup)
    return bool(subgroups)


def raise_in_all_groups(error: Exception, where: str) -> NoReturn:
    """Raise ``error`` on every rank: immediately on this rank, and at each peer's next handshake in the world or in a part of it.

    Raises:
        DDPLossError: as ``raise_on_all_ranks``. A peer that received it in a part names the part.

    Communication: one handshake of the world, and one for each part.
    """
    has_subgroups = notify_subgroups(error, where)
    # an error raised in a handshake of the world has reached all ranks. An error of a part has not reached ranks outside the part
    if has_subgroups and not was_reported_in(process_groups.internal_groups().handshakes, error):
        note_on(error, collective=False)
    raise_on_all_ranks(error, where)


# ---------------------------------------------------------------------- which groups have received an error


def was_reported_in(group: dist.ProcessGroup, error: Exception) -> bool:
    """Return whether the members of an internal group receive this error in a handshake that this rank has joined."""
    return any(known is group for known in getattr(error, "reported_in", ()))


def has_reached_all(error: BaseException) -> bool:
    """Return whether every rank of the world raises this error, or the error derived from it on that rank."""
    if getattr(error, "is_unheard", False):
        return False
    groups = getattr(error, "reported_in", ())
    if not groups:  # all ranks decided on it, or the ranks that remain after a lost connection
        return getattr(error, "collective", False) and not isinstance(error, PeerError)
    return bool(process_groups.internal_groups().made().intersection(groups))


def mark_reported(error: Exception, group: dist.ProcessGroup) -> None:
    """Record that one more group receives an error: a loss over class shards sends it first to its part, then to the replicas."""
    note_on(error, reported_in=(*getattr(error, "reported_in", ()), group))


def note_on(error: BaseException, **notes: object) -> None:
    """Set attributes on an error, unless its class forbids it."""
    with contextlib.suppress(AttributeError):
        for name, value in notes.items():
            setattr(error, name, value)
