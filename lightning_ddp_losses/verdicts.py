"""What frames that do not agree amount to: one error, the same text on every rank."""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

from lightning_ddp_losses.errors import DDPLossError, PeerError, RankMismatchError, error_class, format_error

__all__ = ["AGREE", "ERROR", "VERSION", "Frame", "verdict"]

VERSION = 1
AGREE, ERROR = 0, 1
_LONG, _BEFORE = 200, 40  # characters


class Frame(NamedTuple):
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


def verdict(frames: list[Frame]) -> DDPLossError:
    """The one error, the same on every rank, that frames which do not agree amount to."""
    versions = [f.version for f in frames]
    if len(set(versions)) > 1:
        return RankMismatchError(
            format_error(
                "lightning_ddp_losses: expected one version on all ranks",
                ranks=[f"frame version {v}" for v in versions],
                fix="Install the same release on every node.",
            ),
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
