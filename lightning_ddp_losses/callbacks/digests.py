"""Texts as numbers that fit a row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

__all__ = ["digest"]


def digest(lines: Iterable[str]) -> int:
    """64 bits of a hash; 0 for nothing at all."""
    text = "\n".join(lines)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True) if text else 0
