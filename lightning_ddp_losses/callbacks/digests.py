"""Texts as numbers that fit a row."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ddp_losses.distributed.fingerprint import hash_bytes


def digest(lines: Iterable[str]) -> int:
    """64 bits of a hash; 0 for nothing at all."""
    text = "\n".join(lines)
    return hash_bytes(text.encode()) if text else 0
