"""Messages between ranks: the header of a handshake, the one error for headers that disagree, and values that are read safely.

Every rank reads the same headers, so every rank makes the same error of them. The header of a rank that failed carries its report.

A header also says which of several losses of one kind a rank calls: a rank that calls them in another order would compare one with
another. A loss that a strategy finds is known by its path, and one that the user names by that name: both are equal on all ranks, and
travel as text. Others are numbered per kind as they are made. If all ranks made as many, the numbers that meet must be equal. If some
rank made one more for itself, its numbers are higher from there on. Then pairs of numbers that meet must keep one order: no two of them
cross, and none is met by two.

Values of other processes are read without running their content. ``torch.load`` with ``weights_only`` knows tensors, plain values and
containers. numpy's arrays and numbers, and named tuples and dataclasses of modules that this process has imported, are made too: they hold
values and run no code. Any other class is refused. (A pickle may run anything when it is read.) Trusted classes are named on every rank,
with ``torch.serialization.add_safe_globals([Class])``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_ddp_losses.distributed.user_line import ProgramCall
from lightning_ddp_losses.errors import (
    DDPLossError,
    InputError,
    PeerError,
    RankMismatchError,
    error_class,
    format_error,
    listed,
)

VERSION = 2
CALL, FAILURE = 0, 1
"""Kinds: a rank that calls an operation, and one that failed by itself."""

OURS, OF_USER, NAMED = 0, 0x5AFE, 0x11E
"""Origin of a payload. A payload of the user's program may have any length. ``NAMED``: it is the line of a call of the program."""

TEXT_BYTES = 448
"""Largest part of the text that is sent with the header. Ranks that disagree gather the rest."""

LARGEST_PAYLOAD = 64 << 20
"""Largest payload or text in bytes that a header may announce: a broken peer must not make all ranks allocate more."""

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
"""What to do about a value that differs, by its name."""

_SHOWN_CHARACTERS = 200  # of a long value in a message
_SHOWN_BEFORE = 80  # of those, before the place where the ranks' values part


# ---------------------------------------------------------------------- which loss

_KEPT = 64  # meetings of one kind that are remembered: losses may be made in each step

_made: Counter[str] = Counter()


class Instance:
    """Identity of a loss, miner or metric among others of its kind. A copy, or an unpickled one, has another identity.

    Args:
        kind: Name of the kind in messages.
        name: Name that the user gave. None: there is none.

    Attributes:
        path: Its place in the module that a strategy trains. Empty: unknown.
        number: Number of those made on this rank before it.
    """

    def __init__(self, kind: str, name: str | None = None) -> None:
        self.kind, self.name, self.path = kind, name, ""
        self.number = _made[kind]
        _made[kind] += 1

    @property
    def label(self) -> str:
        """The name or path. Empty if the number identifies it."""
        return self.name or self.path

    def numbers(self) -> tuple[int, int]:
        """Return its number, and how many of the kind this rank has made: what travels of one without a label."""
        return self.number, _made[self.kind]

    def __str__(self) -> str:
        return self.label

    def __reduce__(self) -> tuple[Any, ...]:
        return Instance, (self.kind, self.name)


def with_name(operation: str, name: str | None) -> str:
    """Return an operation with the name that the user gave this call of it. None: there is none."""
    return operation if name is None else f"{operation} `{name}`"


class Meetings:
    """Remembers which instances of the ranks have met, as all ranks have seen it."""

    def __init__(self) -> None:
        self._met: dict[str, dict[tuple[int, ...], None]] = {}

    def fit(self, kind: str, numbers: Sequence[int], made: Sequence[int]) -> bool:
        """Note a meeting. Return whether it may be one of the same instance on all ranks.

        Args:
            kind: Kind of the instances.
            numbers: Number of the instance, by rank.
            made: Number of instances of the kind, by rank.
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


# ---------------------------------------------------------------------- what ranks agree on


class Agreement:
    """An operation and the values that must be equal on all ranks, as a text with its hash. Made once, it serves many calls.

    Args:
        operation: The operation, the same on every rank.
        must_match: Values that must be equal on every rank, by name. They are compared as text.

    Attributes:
        operation: The operation.
        text: The operation and the values, a line each.
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
        """Return the text with the values of one call added, and its digest."""
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
    """The message of a rank: header, text (its first ``TEXT_BYTES``), then the payload if it fits. What did not fit comes later.

    Attributes:
        version: The version of the format.
        kind: ``CALL`` or ``FAILURE``.
        origin: ``OURS`` or ``OF_USER``.
        text_bytes: Length of the whole text.
        payload_bytes: Length of the payload.
        number: Number of the calling loss among several of one kind (``Instance.numbers``).
        made: Number of losses of that kind which the rank has made. 0: the text names the loss, or there is none.
        digest: A hash of the whole text.
        text: Operation and values that must match, a line each. A failure has its place here.
        payload: Data of the rank. A failure has its report here.
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
        """Read the message of a rank, as far as it was sent. Of another version only the header is known."""
        header = cls(*_WIRE.unpack_from(message))
        if header.version != VERSION:
            return header
        start = header.payload_start
        text, payload = message[HEADER_BYTES:start], message[start : start + header.payload_bytes]
        return cls(*header[:-2], bytes(text), bytes(payload))

    @property
    def payload_start(self) -> int:
        """The place of the payload in the message."""
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
    """The messages of all ranks. Their headers are compared as bytes: a thousand ranks take little longer than two.

    Args:
        table: (W, n) uint8 of numpy, the messages as they were sent.

    Attributes:
        longest: Bytes of the longest message, if all of them have the same text.
        are_one_call: Whether all ranks call the same operation with the same values.
        are_in_full: Whether they do, and no part of a message is still to come.
        numbers: Number of the calling loss, by rank.
        made: How many losses of its kind were made, by rank.
    """

    def __init__(self, table: Any) -> None:
        world_size, message_bytes = table.shape
        heads = table[:, :HEADER_BYTES].tobytes()
        head = heads[:HEADER_BYTES]
        first = Header(*_WIRE.unpack(head))
        self._table, self._payload_start = table, first.payload_start
        # 1. what all headers say, usually the same
        self._payload_bytes: list[int] | None = None  # by rank, if they differ
        self.numbers, self.made = [first.number] * world_size, [first.made] * world_size
        agree, longest = True, first.payload_bytes
        if heads != head * world_size:
            agree, self._payload_bytes, self.numbers, self.made = _read_columns(table)
            longest = max(self._payload_bytes)
        # 2. whether that is one call
        self.longest = self._payload_start + longest
        self.are_one_call = agree and first.kind == CALL and first.version == VERSION
        self.are_in_full = self.are_one_call and self.longest <= min(message_bytes, LARGEST_PAYLOAD)
        self._completed: list[Header] | None = None

    def complete_(self, headers: list[Header]) -> None:
        """Take over the headers with the parts of messages that came later."""
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
        # numpy makes a list of bytes of a whole column at once
        padded: list[bytes] = columns.view(f"V{size}")[:, 0].tolist()
        if self._payload_bytes is None:
            return padded
        return [payload[:length] for payload, length in zip(padded, self._payload_bytes, strict=True)]

    def headers(self) -> list[Header]:
        """Return each header, as far as its message was received."""
        if self._completed is not None:
            return self._completed
        return [Header.read(memoryview(message)) for message in self._table]


def _read_columns(table: Any) -> tuple[bool, list[int], list[int], list[int]]:
    """Return whether headers agree in what may not differ by rank, and by rank: length of the payload, number, number made."""
    words = table[:, :HEADER_BYTES].copy().view("<u4")
    payload_bytes, numbers, made = words[:, _OF_RANK].T.tolist()
    words[:, _OF_RANK] = 0
    heads = words.tobytes()
    agree = heads == heads[:HEADER_BYTES] * len(table)
    return agree, payload_bytes, numbers, made


def hides_mismatch(headers: Sequence[Header]) -> bool:
    """Return whether ranks disagree about one operation, and the difference may lie in the rest of a text.

    A rank at another place of the program may be gone and would not send its whole text, so it is not asked.
    """
    if len({header.digest for header in headers}) == 1:
        return False
    all_call = all(header.kind == CALL for header in headers)
    operations = {header.lines[0] for header in headers}
    return all_call and len(operations) == 1 and any(header.text_bytes > TEXT_BYTES for header in headers)


def refuse_long_payloads(headers: Sequence[Header]) -> None:
    """Refuse headers that announce more than ``LARGEST_PAYLOAD``, before anything is allocated for it.

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
    """Return the report that peers get: the class and parts of one of our errors, or its text, and the place."""
    report: dict[str, Any] = {"class": "", "where": where, "text": f"{type(error).__name__}: {error}"}
    if isinstance(error, DDPLossError):
        report |= {"class": type(error).__name__, "text": str(error)}
        parts = error.parts_as_text()
        if format_error(**parts) == report["text"]:
            report["parts"] = parts
            del report["text"]
    return json.dumps(report).encode()


class _Report(NamedTuple):
    """A failure as a peer reads it."""

    class_name: str
    where: str
    text: str
    parts: dict[str, Any]

    @classmethod
    def read(cls, payload: bytes) -> _Report:
        found = json.loads(payload)
        parts = found.get("parts", {})
        if "ranks" in parts:  # JSON's keys are texts
            parts["ranks"] = {int(rank): entry for rank, entry in parts["ranks"].items()}
        text = found["text"] if "text" in found else format_error(**parts)
        return cls(found["class"], found["where"], text, parts)


def mismatch_error(headers: Sequence[Header]) -> DDPLossError:
    """Return the one error, the same on every rank, that headers which do not agree amount to."""
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
    """Return the error for ranks that called one operation, of different losses."""
    return RankMismatchError(
        f"{headers[0].lines[0]}: which of several on a rank",
        expected="the same one on every rank",
        ranks=[f"number {header.number + 1} of {header.made} made" for header in headers],
        fix="Call them in the same order on all ranks. Where ranks make them in different orders, or some for themselves, tell them "
        "apart by `name=`.",
        collective=True,
    )


def _peer_error(reports: Mapping[int, _Report], world_size: int) -> DDPLossError:
    """Return the error for failures of one rank or several."""
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
    """Return the error for a named call that some ranks make, while others are at another place of the program."""
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
    """Return the error for ranks that called different things: other operations, or one with other values."""
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
    all_names = dict.fromkeys(itertools.chain.from_iterable(values))  # in the order in which they stand
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
    """Return the values of the ranks, long ones from a little before the place where they part."""
    columns = zip(*(value or "" for value in values), strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    start = max(0, equal - _SHOWN_BEFORE)
    stop = start + _SHOWN_CHARACTERS
    return [f"...{value[start:stop]}" if value and len(value) > _SHOWN_CHARACTERS else value for value in values]


def _one_line(lines: list[str]) -> str:
    operation, *rest = lines
    return f"{operation} ({', '.join(rest)})" if rest else operation


# ---------------------------------------------------------------------- values that are read without running their content


_READABLE = "tensors, arrays and plain values in dicts, lists, tuples, named tuples and dataclasses"
_NUMPY_PARTS = re.compile(r"numpy\.(ndarray|dtype|_?core\.multiarray\.(_reconstruct|scalar))")
"""Names in a pickle of a numpy array or number. They fill memory with bytes, and run no code."""


def pack(value: Any) -> bytes:
    """Return a value as bytes: tensors, arrays, plain values, containers of such."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    """Return the value that ``pack`` was given.

    Raises:
        pickle.UnpicklingError: for a class that could do something when it is made.
    """
    allowed = _numpy_dtypes()
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload)):
        found = _imported(name)
        if _NUMPY_PARTS.fullmatch(name) or _is_record(found):
            allowed.append(found)
    with torch.serialization.safe_globals(allowed):
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def pack_readable(value: Any, what: str) -> bytes:
    """Return a value of the user's program as bytes that every rank will read.

    Args:
        value: The value.
        what: Name of the value in the message.

    Raises:
        InputError: naming what in it the other ranks would refuse, or what cannot be sent.
    """
    try:
        payload = pack(value)
        unpack(payload)
    except Exception as error:  # any error of a class that is pickled
        raise InputError(
            what,
            expected=f"{_READABLE}, which other ranks read without running anything",
            got=_reason(error),
            fix="Make it of such values (a state_dict of numbers, a batch of tensors in a dict). Where you trust the class, say so on "
            "every rank, before the fit: torch.serialization.add_safe_globals([TheClass]).",
        ) from error
    return payload


def unpack_from(payload: bytes, what: str, rank: int) -> Any:
    """Return the value that ``pack_readable`` was given on another rank.

    Raises:
        PeerError: for a payload that could run something, or is damaged. It is not run.
    """
    try:
        return unpack(payload)
    except Exception as error:
        raise PeerError(
            f"{what}, from rank {rank}",
            expected=_READABLE,
            got=_reason(error),
            fix="No rank of this package sends that: look at who can reach the run's ports (`ddp-losses explain security`).",
        ) from error


def _reason(error: Exception) -> str:
    """Return the class that ``torch.load`` refused, from its error, without its advice. For another error return its first line."""
    text = str(error)
    refused = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text)
    if refused is not None:
        return refused[1]
    lines = text.splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _numpy_dtypes() -> list[Any]:
    """Return the classes of numpy's dtypes. A pickle fills their instances. None if numpy is not loaded."""
    dtypes = getattr(sys.modules.get("numpy"), "dtypes", None)
    return [cls for cls in vars(dtypes).values() if isinstance(cls, type)] if dtypes is not None else []


def _imported(name: str) -> Any:
    """Return the object of this name in a module that is imported already. None if there is no such thing."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _is_record(cls: Any) -> bool:
    """Return whether this is a class of named values: making one runs no code of the sender."""
    is_named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or (isinstance(cls, type) and dataclasses.is_dataclass(cls))
