"""Findings that one rank can make by itself: what they are travels as two numbers, their texts only when there are any.

A row holds a mask (one bit for each fault of the check) and a digest of the texts. Where the digests agree, every rank has
the same texts already; else the ranks that found something tell the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.distributed.fingerprint import hash_text

_FIELDS = ("fault", "what", "expected", "name", "fix")


class LocalFacts:
    """Collects one rank's own findings and brings those of all ranks together.

    Args:
        faults: Which there may be; at most 62.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self._faults = tuple(faults)
        self.found: list[Finding] = []

    def row(self) -> list[int]:
        """Mask and digest."""
        if not self.found:
            return [0, 0]
        mask = sum({1 << self._faults.index(f.fault) for f in self.found})
        return [mask, hash_text(json.dumps([_fields(f) for f in self.found]))]

    def judge(self, table: Sequence[Sequence[int]]) -> list[Finding]:
        """Findings of all ranks, from their masks and digests (W, 2)."""
        masks, digests = [row[0] for row in table], [row[1] for row in table]
        if not any(masks):
            return []
        if len(set(digests)) == 1:
            return list(self.found)
        found: list[Finding] = []
        for bit, fault in enumerate(self._faults):
            ranks = tuple(rank for rank, mask in enumerate(masks) if mask >> bit & 1)
            if ranks:
                found.append(Finding(fault, FAULTS[fault].title, ranks=ranks, name=f"texts {digests}"))
        return found

    def describe(self, finding: Finding) -> str | None:
        """This rank's texts of that fault."""
        if not finding.name.startswith("texts "):
            return None
        return json.dumps([_fields(f) for f in self.found if f.fault == finding.fault])

    def explain(self, finding: Finding, texts: Sequence[str]) -> list[Finding]:
        """One finding for each text, with the ranks that have it."""
        if not finding.name.startswith("texts "):
            return [finding]
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, text in enumerate(texts):
            for fields in json.loads(text):
                ranks.setdefault(tuple(fields), []).append(rank)
        told: list[Finding] = []
        for fields, who in ranks.items():
            named = dict(zip(_FIELDS, fields, strict=True))
            told.append(replace(finding, **named, ranks=tuple(who)))  # type: ignore[arg-type]
        return told or [finding]


def _fields(finding: Finding) -> list[str]:
    return [str(getattr(finding, field)) for field in _FIELDS]
