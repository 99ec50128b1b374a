"""Messages between ranks: the header of a handshake and the common error for headers that disagree.

Every rank reads the same headers and therefore derives the same error from them. The header of a rank that failed carries its report.

A header also identifies which of several losses of one kind a rank calls: without this, a rank that calls them in another order would
compare different losses with each other. A loss found by a strategy is identified by its path, and a loss named by the user by that name:
both are equal on all ranks and are sent as text. All other losses are numbered per kind in order of construction. If all ranks have
constructed the same number, matched numbers must be equal. If a rank has constructed an additional loss, its numbers are higher from that
point on. In that case matched pairs of numbers must preserve the order: no two pairs may cross, and no number may be matched twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_ddp_losses.distributed.user_line import ProgramCall
from lightning_ddp_losses.errors import (
    DDPLossError,
    PeerError,
    RankMismatchError,
    error_class,
    format_error,
    listed,
)

VERSION = 2
CALL, FAILURE = 0, 1
"""Kinds of header: a rank that calls an operation, and a rank that failed on its own."""

OURS, OF_USER, NAMED = 0, 0x5AFE, 0x11E
"""Origin of a payload. ``OF_USER``: from the user's program, of any length. ``NAMED``: the source line of a call of the program."""

TEXT_BYTES = 448
"""Largest part of the text that is sent with the header. Ranks that disagree gather the remainder."""

LARGEST_PAYLOAD = 64 << 20
"""Largest payload or text in bytes that a header may announce, so that a broken peer cannot make all ranks allocate more."""

DIGEST_BYTES = 16
_WIRE = struct.Struct(f"<BBHIIII{DIGEST_BYTES}s")
HEADER_BYTES = _WIRE.size
_OF_RANK = slice(2, 5)  # the words of a header that may differ by rank: payload_bytes, number, made

_FIXES = {
    "weights": "Wrap the loss in DistributedDataParallel, or put it in the model that is wrapped. Where nothing is trained, load or seed "
    "the same weights on all ranks. Where ranks average weights every few steps, give check_weights=False.",
    "configuration": "Set options alike on all ranks. A note of one rank (its rows, a time, a log) belongs elsewhere than in an attribute "
    "of the loss.",
    "autocast": "Run the same code under autocast on all ranks.",
    "gradients": "Run the same code under no_grad on all ranks.",
}
"""Advice for a value that differs, by the name of the value."""

_SHOWN_CHARACTERS = 200  # limit for a long value in a message
_SHOWN_BEFORE = 80  # number of those characters that precede the first difference between the ranks' values


# ---------------------------------------------------------------------- identity of a loss

_KEPT = 64  # limit for stored meetings of one kind, because losses may be constructed in each step

_made: Counter[str] = Counter()


class Instance:
    """Identity of a loss, miner or metric among others of its kind. A copied or unpickled object has a different identity.

    Args:
        kind: Name of the kind in messages.
        name: Name that the user gave, or None.

    Attributes:
        path: Path of the object in the module that a strategy trains. Empty if unknown.
        number: Number of objects of this kind that were constructed on this rank before it.
    """

    def __init__(self, kind: str, name: str | None = None) -> None:
        self.kind, self.name, self.path = kind, name, ""
        self.number = _made[kind]
        _made[kind] += 1

    def numbers(self) -> tuple[int, int]:
        """Return its number and how many of its kind this rank has constructed, which a header contains if there is no label."""
        return self.number, _made[self.kind]

    def __str__(self) -> str:
        """Return the name or path. Empty if the object is identified by its number."""
        return self.name or self.path

    def __reduce__(self) -> tuple[Any, ...]:
        return Instance, (self.kind, self.name)


def with_name(operation: str, name: str | None) -> str:
    """Return an operation with the name that the user gave this call of it. If None, the operation is returned unchanged."""
    return operation if name is None else f"{operation} `{name}`"


class Meetings:
    """Records which instances of the ranks have been called together, identically on all ranks."""

    def __init__(self) -> None:
        self._met: dict[str, dict[tuple[int, ...], None]] = {}

    def fit(self, kind: str, numbers: Sequence[int], made: Sequence[int]) -> bool:
        """Record a meeting and return whether it may be one of the same instance on all ranks.

        Args:
            kind: Kind of the instances.
            numbers: Number of the instance, by rank.
            made: Number of constructed instances of the kind, by rank.
        """
        met = self._met.setdefault(kind, {})
        pair = tuple(numbers)
        if pair in met:
            return True
        if min(made) == max(made) and min(numbers) != max(numbers):
            return False
        for earlier in met:
            if len({(a > b) - (a < b) for a, b in zip(numbers, earlier, strict=True)}) > 1:
                return False
        if len(met) == _KEPT:
            del met[next(iter(met))]
        met[pair] = None
        return True


# ---------------------------------------------------------------------- agreements between ranks


class Agreement:
    """An operation and the values that must be equal on all ranks, as a text with its hash. One object serves many calls.

    Args:
        operation: The operation, the same on every rank.
        must_match: Values that must be equal on every rank, by name. They are compared as text.

    Attributes:
        operation: The operation.
        text: The operation and the values, one per line.
    """

    def __init__(self, operation: str, must_match: Mapping[str, object] | None = None) -> None:
        self.operation = operation
        lines = [operation]
        for name, value in (must_match or {}).items():
            lines.append(f"{name}={value}")
        self.text = "\n".join(lines).encode()
        self._hash = hashlib.blake2b(self.text, digest_size=DIGEST_BYTES)
        self._digest = self._hash.digest()

    def of_call(self, must_match: Mapping[str, object]) -> tuple[bytes, bytes]:
        """Return the text extended by the values of one call, and its digest."""
        added = ""
        for name, value in must_match.items():
            text = str(value)
            # an instance without a label is compared by its numbers
            if text or not isinstance(value, Instance):
                added += f"\n{name}={text}"
        if not added:
            return self.text, self._digest
        encoded = added.encode()
        whole = self._hash.copy()
        whole.update(encoded)
        return self.text + encoded, whole.digest()


# ---------------------------------------------------------------------- the header


class Header(NamedTuple):
    """The message of a rank: header, text (its first ``TEXT_BYTES``), then the payload if it fits. The remainder is sent later.

    Attributes:
        version: The version of the format.
        kind: ``CALL`` or ``FAILURE``.
        origin: ``OURS``, ``OF_USER`` or ``NAMED``.
        text_bytes: Length of the whole text.
        payload_bytes: Length of the payload.
        number: Number of the calling loss among several of one kind (``Instance.numbers``).
        made: Number of losses of that kind which the rank has constructed. 0 if the text names the loss or the operation has no loss.
        digest: A hash of the whole text.
        text: Operation and values that must match, one per line. For a failure, its place.
        payload: Data of the rank. For a failure, its report.
    """

    version: int
    kind: int
    origin: int
    text_bytes: int
    payload_bytes: int
    number: int
    made: int
    digest: bytes
    text: bytes = b""
    payload: bytes = b""

    @classmethod
    def pack(
        cls,
        kind: int,
        text: bytes,
        digest: bytes,
        payload_bytes: int,
        origin: int = OURS,
        instance: Instance | None = None,
    ) -> bytes:
        """Return the beginning of a message: the header and the part of the text that is sent with it."""
        number, made = (0, 0) if instance is None else instance.numbers()
        return _WIRE.pack(VERSION, kind, origin, len(text), payload_bytes, number, made, digest) + text[:TEXT_BYTES]

    @classmethod
    def read(cls, message: memoryview) -> Header:
        """Parse the part of a rank's message that was sent. For another version, only the header is parsed."""
        header = cls(*_WIRE.unpack_from(message))
        if header.version != VERSION:
            return header
        start = header.payload_start
        text, payload = message[HEADER_BYTES:start], message[start : start + header.payload_bytes]
        return cls(*header[:-2], bytes(text), bytes(payload))

    @property
    def payload_start(self) -> int:
        """The offset of the payload in the message."""
        return HEADER_BYTES + min(self.text_bytes, TEXT_BYTES)

    @property
    def message_bytes(self) -> int:
        """The length of header, text and payload together."""
        return self.payload_start + self.payload_bytes

    @property
    def lines(self) -> list[str]:
        """The operation, and the values that must match."""
        return self.text.decode(errors="replace").split("\n")


class ReceivedMessages:
    """The messages of all ranks. Their headers are compared as bytes, so that a thousand ranks take little longer than two.

    Args:
        table: (W, n) numpy array of uint8, the messages as sent.

    Attributes:
        longest: Bytes of the longest message, if all of them have the same text.
        are_one_call: Whether all ranks call the same operation with the same values.
        are_in_full: Whether they do, and every message was received completely.
        numbers: Number of the calling loss, by rank.
        made: Number of constructed losses of its kind, by rank.
    """

    def __init__(self, table: Any) -> None:
        world_size, message_bytes = table.shape
        heads = table[:, :HEADER_BYTES].tobytes()
        head = heads[:HEADER_BYTES]
        first = Header(*_WIRE.unpack(head))
        self._table, self._payload_start = table, first.payload_start
        # 1. the contents of all headers, which are usually the same
        self._payload_bytes: list[int] | None = None  # by rank, if they differ
        self.numbers, self.made = [first.number] * world_size, [first.made] * world_size
        agree, longest = True, first.payload_bytes
        if heads != head * world_size:
            agree, self._payload_bytes, self.numbers, self.made = _read_columns(table)
            longest = max(self._payload_bytes)
        # 2. whether they belong to one call
        self.longest = self._payload_start + longest
        self.are_one_call = agree and first.kind == CALL and first.version == VERSION
        self.are_in_full = self.are_one_call and self.longest <= min(message_bytes, LARGEST_PAYLOAD)
        self._completed: list[Header] | None = None

    def complete_(self, headers: list[Header]) -> None:
        """Replace the headers by those that include the parts of messages that were sent later."""
        self._completed = headers
        kinds = {(header.kind, header.version, header.digest) for header in headers}
        self.are_one_call = len(kinds) == 1 and headers[0].kind == CALL

    def payloads(self) -> list[bytes]:
        """Return the payloads of one call, in rank order."""
        if self._completed is not None:
            return [header.payload for header in self._completed]
        size = self.longest - self._payload_start
        if size == 0:
            return [b""] * len(self._table)
        columns = self._table[:, self._payload_start : self.longest].copy()
        # numpy converts a whole column to a list of bytes in one call
        padded: list[bytes] = columns.view(f"V{size}")[:, 0].tolist()
        if self._payload_bytes is None:
            return padded
        return [payload[:length] for payload, length in zip(padded, self._payload_bytes, strict=True)]

    def headers(self) -> list[Header]:
        """Return the headers with the parts of the messages received so far."""
        if self._completed is not None:
            return self._completed
        return [Header.read(memoryview(message)) for message in self._table]


def _read_columns(table: Any) -> tuple[bool, list[int], list[int], list[int]]:
    """Return whether headers agree where ranks may not differ, and by rank: payload length, number, number constructed."""
    words = table[:, :HEADER_BYTES].copy().view("<u4")
    payload_bytes, numbers, made = words[:, _OF_RANK].T.tolist()
    words[:, _OF_RANK] = 0
    heads = words.tobytes()
    agree = heads == heads[:HEADER_BYTES] * len(table)
    return agree, payload_bytes, numbers, made


def hides_mismatch(headers: Sequence[Header]) -> bool:
    """Return whether ranks disagree about one operation and the difference may be in the unsent remainder of a text.

    A rank at another place of the program may have exited and would not send its whole text, so it is not requested in that case.
    """
    if len({header.digest for header in headers}) == 1:
        return False
    all_call = all(header.kind == CALL for header in headers)
    operations = {header.lines[0] for header in headers}
    return all_call and len(operations) == 1 and any(header.text_bytes > TEXT_BYTES for header in headers)


def refuse_long_payloads(headers: Sequence[Header]) -> None:
    """Reject headers that announce more than ``LARGEST_PAYLOAD``, before memory is allocated for the payloads.

    Raises:
        PeerError: on every rank that reads these headers, naming the ranks that sent them.
    """
    too_long = {}
    for rank, header in enumerate(headers):
        limited = header.text_bytes if header.origin == OF_USER else max(header.text_bytes, header.payload_bytes)
        if limited > LARGEST_PAYLOAD:
            too_long[rank] = f"{limited:,} bytes"
    if too_long:
        raise PeerError(
            "handshake",
            expected=f"payloads of at most {LARGEST_PAYLOAD:,} bytes",
            ranks=too_long,
            fix="Those ranks are broken, or run another release of lightning_ddp_losses: install the same one on every node.",
            collective=True,
        )


# ---------------------------------------------------------------------- the error


def failure_report(error: Exception, where: str) -> bytes:
    """Return the report that is sent to peers: the class and parts of one of our errors, or the text of another, and the place."""
    report: dict[str, Any] = {"class": "", "where": where, "text": f"{type(error).__name__}: {error}"}
    if isinstance(error, DDPLossError):
        report |= {"class": type(error).__name__, "text": str(error)}
        parts = error.parts_as_text()
        if format_error(**parts) == report["text"]:
            report["parts"] = parts
            del report["text"]
    return json.dumps(report).encode()


class _Report(NamedTuple):
    """A failure as received by a peer."""

    class_name: str
    where: str
    text: str
    parts: dict[str, Any]

    @classmethod
    def read(cls, payload: bytes) -> _Report:
        found = json.loads(payload)
        parts = found.get("parts", {})
        if "ranks" in parts:  # the keys of a JSON object are strings
            parts["ranks"] = {int(rank): entry for rank, entry in parts["ranks"].items()}
        text = found["text"] if "text" in found else format_error(**parts)
        return cls(found["class"], found["where"], text, parts)


def mismatch_error(headers: Sequence[Header]) -> DDPLossError:
    """Return the error, equal on every rank, that describes how headers disagree."""
    versions = [header.version for header in headers]
    if len(set(versions)) > 1:
        return RankMismatchError(
            "lightning_ddp_losses: expected one version on all ranks",
            ranks=[f"handshake version {version}" for version in versions],
            fix="Install the same release on every node.",
            collective=True,
        )
    reports = {rank: _Report.read(header.payload) for rank, header in enumerate(headers) if header.kind == FAILURE}
    if reports:
        return _peer_error(reports, len(headers))
    operations = [header.lines[0] for header in headers]
    if len(set(operations)) > 1 and any(header.origin == NAMED for header in headers):
        return _missed_call(operations, headers)
    return _different_calls([header.lines for header in headers])


def other_instances_error(headers: Sequence[Header]) -> RankMismatchError:
    """Return the error for ranks that called the same operation on different losses."""
    return RankMismatchError(
        f"{headers[0].lines[0]}: which of several on a rank",
        expected="the same one on every rank",
        ranks=[f"number {header.number + 1} of {header.made} made" for header in headers],
        fix="Call them in the same order on all ranks. Where ranks make them in different orders, or some for themselves, tell them "
        "apart by `name=`.",
        collective=True,
    )


def _peer_error(reports: Mapping[int, _Report], world_size: int) -> DDPLossError:
    """Return the error for failures of one or several ranks."""
    texts = {report.text for report in reports.values()}
    places = ", ".join(sorted({report.where for report in reports.values()}))
    first = next(iter(reports.values()))
    all_ours = all(report.class_name for report in reports.values())
    cls = error_class(first.class_name) if all_ours else PeerError
    if len(texts) > 1:
        what = f"{len(reports)} of {world_size} ranks failed in {places}"
        return cls(what, ranks={rank: report.text for rank, report in reports.items()}, collective=True)
    ranks = ", ".join(map(str, reports))
    error = cls(f"{first.text}\n(rank {ranks} of {world_size}, in {places})", collective=True)
    for name, part in first.parts.items():
        setattr(error, name, part)
    return error


def _missed_call(operations: Sequence[str], headers: Sequence[Header]) -> RankMismatchError:
    """Return the error for a named call that only some ranks make, while others are at another place of the program."""
    ranks_of: dict[str, list[str]] = {}
    advice: dict[str, None] = {}
    entries = []
    for rank, header in enumerate(headers):
        if header.origin != NAMED:
            entries.append(_one_line(header.lines))
            continue
        call = ProgramCall(operations[rank], header.payload.decode(errors="replace"))
        entries.append(str(call))
        ranks_of.setdefault(call.operation, []).append(str(rank))
        advice[call.advice] = None
    got = [f"{operation} on rank {listed(ranks, 8)} only" for operation, ranks in ranks_of.items()]
    return RankMismatchError(
        "ranks met at different places of the program",
        expected="the same call on every rank",
        got=", ".join(got),
        ranks=entries,
        fix=" ".join(advice),
        collective=True,
        page="F45",
    )


def _different_calls(texts: Sequence[list[str]]) -> RankMismatchError:
    """Return the error for ranks that made different calls: different operations, or one operation with different values."""
    operations = [lines[0] for lines in texts]
    if len(set(operations)) > 1:
        return RankMismatchError(
            "ranks met at different places of the program",
            expected="the same operation on every rank",
            ranks=[_one_line(lines) for lines in texts],
            fix="Call every loss, metric and backward on all ranks, in the same order (no branch on rank or on local data).",
            collective=True,
        )
    values = [dict(line.split("=", 1) for line in lines[1:] if "=" in line) for lines in texts]
    all_names = dict.fromkeys(itertools.chain.from_iterable(values))  # in order of appearance
    by_name = {name: [own.get(name) for own in values] for name in all_names}
    shown = {name: _around_difference(of_ranks) for name, of_ranks in by_name.items() if len(set(of_ranks)) > 1}
    entries = []
    for rank, lines in enumerate(texts):
        differing = ", ".join(f"{name}={of_ranks[rank]}" for name, of_ranks in shown.items())
        entries.append(differing or _one_line(lines))
    what = operations[0]
    if shown:
        what = f"{what}: {', '.join(shown)}"
    return RankMismatchError(
        what,
        expected="the same on every rank",
        ranks=entries,
        fix=" ".join(dict.fromkeys(_FIXES.get(name, "Make these equal on all ranks.") for name in shown)),
        collective=True,
        page="F02" if "weights" in shown else "",
    )


def _around_difference(values: Sequence[str | None]) -> list[str | None]:
    """Return the values of the ranks, with long ones cut to a window that starts shortly before their first difference."""
    columns = zip(*(value or "" for value in values), strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    start = max(0, equal - _SHOWN_BEFORE)
    stop = start + _SHOWN_CHARACTERS
    return [f"...{value[start:stop]}" if value and len(value) > _SHOWN_CHARACTERS else value for value in values]


def _one_line(lines: list[str]) -> str:
    operation, *rest = lines
    return f"{operation} ({', '.join(rest)})" if rest else operation
