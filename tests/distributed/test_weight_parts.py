"""The parts of a large weight that a loss compares, one in each call, cover all of its elements."""

from __future__ import annotations

import pytest
import torch

from tests.doors import WeightFingerprints, process_groups

CALLS = 64


@pytest.mark.parametrize("size", [100_000, 100_001, 99_999, 65_537])
def test_a_change_of_the_last_element_is_seen(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(process_groups, "world_size", lambda group=None: 2)
    seen = []
    for last in (0.0, 1.0):
        weight = torch.zeros(size)
        weight[-1] = last
        fingerprints = WeightFingerprints(wanted=True)
        seen.append([fingerprints.take([weight], None) for _ in range(CALLS)])
    assert seen[0] != seen[1]
