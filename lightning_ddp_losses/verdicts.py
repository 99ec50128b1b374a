"""What frames that do not agree amount to: one error, the same text on every rank."""

from __future__ import annotations

import json
from typing import NamedTuple

from lightning_ddp_losses.errors import DDPLossError, PeerError, RankMismatchError, error_class, format_error

__all__ = ["AGREE", "ERROR", "VERSION", "Frame", "verdict"]

VERSION = 1
AGREE, ERROR = 0, 1


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
    values = [dict(line.split("=", 1) for line in text.split("\n")[1:] if "=" in line) for text in texts]
    names = [k for k in values[0] if any(v.get(k) != values[0][k] for v in values)]
    what = f"{heads[0]}: {', '.join(names)}" if names else heads[0]
    return format_error(
        what,
        expected="the same on every rank",
        ranks=[", ".join(f"{k}={v.get(k)}" for k in names) or _one_line(t) for v, t in zip(values, texts, strict=True)],
        fix="Make these equal on all ranks.",
    )


def _one_line(text: str) -> str:
    head, *rest = text.split("\n")
    return f"{head} ({', '.join(rest)})" if rest else head
