"""Which of several losses of one kind a rank calls: a rank that calls them in another order would compare one with another.

A loss that a strategy finds is known by its path, and one that the user names by that name: both are equal on all ranks, and travel as
text. Others are numbered per kind as they are made. If all ranks made as many, the numbers that meet must be equal. If some rank
made one more for itself, its numbers are higher from there on. Then pairs of numbers that meet must keep one order: no two of them
cross, and none is met by two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

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
        return (0, 0) if self.label else (self.number, _made[self.kind])

    def __str__(self) -> str:
        return self.label

    def __deepcopy__(self, memo: dict[int, Any]) -> Instance:
        return Instance(self.kind, self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Instance, (self.kind, self.name)


class Meetings:
    """Remembers which instances of the ranks have met, as all ranks have seen it."""

    def __init__(self) -> None:
        self._met: dict[str, dict[tuple[int, ...], None]] = {}

    def fit(self, kind: str, numbers: tuple[int, ...], made: Sequence[int]) -> bool:
        """Note a meeting. Return whether it may be one of the same instance on all ranks.

        Args:
            kind: Kind of the instances.
            numbers: Number of the instance, by rank.
            made: Number of instances of the kind, by rank.
        """
        met = self._met.setdefault(kind, {})
        if numbers in met:
            return True
        if min(made) == max(made) and min(numbers) != max(numbers):
            return False
        for earlier in met:
            if len({(a > b) - (a < b) for a, b in zip(numbers, earlier, strict=True)}) > 1:
                return False
        if len(met) == _KEPT:
            del met[next(iter(met))]
        met[numbers] = None
        return True
