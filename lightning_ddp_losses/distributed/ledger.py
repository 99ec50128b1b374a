"""`Ledger`: what several parts of a program send to the other ranks at one place, in one handshake.

In a synchronising backward ranks compare how often their losses ran. Checks, signals and the gradients of losses also exchange data at this
place. Each of them posts a note, which consists of a name and some bytes. The meeting at that place sends all notes of this rank in one
message, and returns the notes of all ranks. The part that posted a note decides what follows from it.

The content of a meeting depends only on what was posted before it, by code that all ranks run, and never on data received from others. The
names of the notes are compared like all values that must match, so ranks that post different notes raise the same error. A meeting
consumes its notes: if it ends in an error on all ranks, they are not sent in a later meeting.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TypeAlias

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.messages import Agreement

Notes: TypeAlias = "dict[str, list[bytes]]"
"""The notes of all ranks: by name, in rank order."""

_SIZE = struct.Struct("<I")  # size of a note, stored in front of it


class Ledger:
    """The notes of this rank that are pending until the next meeting of all ranks."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def post(self, name: str, note: bytes) -> None:
        """Add a note to the next meeting, replacing a note with the same name."""
        self._notes[name] = note

    def drop(self) -> None:
        """Remove the notes that were posted since the last meeting, because their meeting did not take place."""
        self._notes = {}

    def meet(self, place: str | Agreement, must_match: Mapping[str, object]) -> Notes:
        """Send what was posted since the last meeting, and return the notes of all ranks.

        Args:
            place: The operation, the same on every rank, or an agreement about it.
            must_match: Further values that must be equal on every rank, by name.

        Raises:
            RankMismatchError: on every rank, when ranks are at different places, or posted notes with different names.

        Communication: one handshake (``handshake.all_gather``).
        """
        notes, self._notes = self._notes, {}
        own = b"".join(map(sized, notes.values()))
        must_match = {**must_match, "notes": ", ".join(notes)}
        payloads = handshake.all_gather(place, must_match, own)
        by_name = zip(*map(read_sized, payloads), strict=True)
        return {name: list(of_ranks) for name, of_ranks in zip(notes, by_name, strict=True)}


def sized(part: bytes) -> bytes:
    """Return a part of a payload preceded by its size, so that other parts may follow."""
    return _SIZE.pack(len(part)) + part


def read_sized(payload: bytes) -> list[bytes]:
    """Split a payload into the parts that ``sized`` produced."""
    parts: list[bytes] = []
    offset = 0
    while offset < len(payload):
        (size,) = _SIZE.unpack_from(payload, offset)
        start = offset + _SIZE.size
        offset = start + size
        parts.append(payload[start:offset])
    return parts
