"""The errors that ranks raise together: reports of failed ranks, and the one error for headers that disagree.

Every rank reads the same headers, so every rank makes the same error of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_ddp_losses.errors import DDPLossError, PeerError, RankMismatchError, error_class, format_error

VERSION = 2
CALL, FAILURE = 0, 1
"""Kinds: a rank that calls an operation, and one that failed by itself."""

_FIXES = {
    "weights": "Wrap the loss in DistributedDataParallel, or put it in the model that is wrapped. Where nothing is trained, load or seed "
    "the same weights on all ranks. Where ranks average weights every few steps, give check_weights=False.",
    "autocast": "Run the same code under autocast on all ranks.",
    "gradients": "Run the same code under no_grad on all ranks.",
}
"""What to do about a value that differs, by its name."""

_SHOWN_CHARACTERS = 200  # of a long value in a message
_SHOWN_BEFORE = 80  # of those, before the place where the ranks' values part


class Header(NamedTuple):
    """Message of a rank, complete.

    Attributes:
        version: The version of the format.
        kind: ``CALL`` or ``FAILURE``.
        digest: A hash of the whole text.
        text: Operation and values that must match, a line each. A failure has its place here.
        payload: Data of the rank. A failure has its report as JSON here.
        number: Number of the calling loss among several of one kind.
        made: Number of losses of that kind which the rank has made.
    """

    version: int
    kind: int
    digest: bytes
    text: str
    payload: bytes
    number: int = 0
    made: int = 0


# ---------------------------------------------------------------------- the error


def failure_report(error: Exception, where: str) -> bytes:
    """Return the report that peers get: the class and parts of one of our errors, its text, the place."""
    report: dict[str, Any] = {"class": "", "where": where}
    if not isinstance(error, DDPLossError):
        report["text"] = f"{type(error).__name__}: {error}"
        return json.dumps(report).encode()
    report["class"] = type(error).__name__
    parts = error.parts_as_text()
    if format_error(**parts) != str(error):
        report["text"] = str(error)
        return json.dumps(report).encode()
    if "ranks" in parts:
        parts["ranks"] = list(parts["ranks"].items())  # JSON's keys are texts
    report["parts"] = parts
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
        if "ranks" in parts:
            parts["ranks"] = dict(parts["ranks"])
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
    return _different_calls([header.text for header in headers])


def other_instances_error(headers: Sequence[Header]) -> RankMismatchError:
    """Return the error for ranks that called one operation, of different losses."""
    return RankMismatchError(
        f"{headers[0].text.splitlines()[0]}: which of several on a rank",
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


def _different_calls(texts: Sequence[str]) -> RankMismatchError:
    """Return the error for ranks that called different things: other operations, or one with other values."""
    operations = [text.split("\n", 1)[0] for text in texts]
    if len(set(operations)) > 1:
        return RankMismatchError(
            "ranks met at different places of the program",
            expected="the same operation on every rank",
            ranks=[_one_line(text) for text in texts],
            fix="Call every loss, metric and backward on all ranks, in the same order (no branch on rank or on local data).",
            collective=True,
        )
    values = [_values_in(text) for text in texts]
    all_names = dict.fromkeys(itertools.chain.from_iterable(values))  # in the order in which they stand
    shown = {}
    for name in all_names:
        of_ranks = [own.get(name) for own in values]
        if len(set(of_ranks)) > 1:
            shown[name] = _around_difference(of_ranks)
    entries = []
    for rank, text in enumerate(texts):
        differing = ", ".join(f"{name}={of_ranks[rank]}" for name, of_ranks in shown.items())
        entries.append(differing or _one_line(text))
    what = operations[0]
    if shown:
        what = f"{what}: {', '.join(shown)}"
    return RankMismatchError(
        what,
        expected="the same on every rank",
        ranks=entries,
        fix=" ".join(dict.fromkeys(_FIXES.get(name, "Make these equal on all ranks.") for name in shown)),
        collective=True,
    )


def _values_in(text: str) -> dict[str, str]:
    """Return what must match, by name."""
    pairs = (line.partition("=") for line in text.split("\n")[1:])
    return {name: value for name, sign, value in pairs if sign}


def _around_difference(values: Sequence[str | None]) -> list[str | None]:
    """Return the values of the ranks, long ones from a little before the place where they part."""
    columns = zip(*(value or "" for value in values), strict=False)
    equal = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    start = max(0, equal - _SHOWN_BEFORE)
    shown: list[str | None] = []
    for value in values:
        if value is not None and len(value) > _SHOWN_CHARACTERS:
            shown.append(f"...{value[start : start + _SHOWN_CHARACTERS]}")
        else:
            shown.append(value)
    return shown


def _one_line(text: str) -> str:
    operation, *rest = text.split("\n")
    return f"{operation} ({', '.join(rest)})" if rest else operation
