"""The search for modules that nobody registered looks into what users keep, and not through their data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import nn

from tests.doors import modules, unregistered_modules


class Samples(Mapping[int, Any]):
    """A data set as a mapping, that notes what it was asked for."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, 0

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number))

    def __getitem__(self, index: int) -> list[int]:
        self.asked += 1
        return [index]


class Keeps(nn.Module):
    def __init__(self, samples: Samples) -> None:
        super().__init__()
        self.samples = samples
        self.numbers = list(range(100_000))
        self.nested = [[{"deep": (1, [nn.Linear(1, 1)])}]]
        self.late = [*range(500), nn.Linear(2, 2)]


def test_data_is_not_searched_through_and_modules_beside_it_are_found() -> None:
    samples = Samples(10_000_000)
    found = dict(unregistered_modules(Keeps(samples), {}))
    assert set(found) == {"self.nested[0][0]['deep'][1][0]", "self.late[500]"}
    assert samples.asked <= 1_000


def test_endless_objects_end_the_search() -> None:
    class Endless:
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            return {str(i): [Endless() for _ in range(900)] for i in range(900)}

    assert list(unregistered_modules(nn.Module(), {"endless": Endless()})) == []


def test_objects_without_items_are_not_asked_whether_they_are_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    # for each new class that question walks through all subclasses of Mapping, a second in all
    asked = []

    class Asked(type):
        def __instancecheck__(cls, value: object) -> bool:
            asked.append(value)
            return isinstance(value, dict)

    class AnyMapping(metaclass=Asked):
        pass

    monkeypatch.setattr(modules, "Mapping", AnyMapping)
    holder, inside = nn.Module(), {"a": nn.Linear(2, 2)}
    holder.things = [Thing(), inside]
    assert [path for path, _ in unregistered_modules(holder, {})] == ["self.things[1]['a']"]
    assert all(value is inside or isinstance(value, dict) for value in asked)


class Thing:
    pass
