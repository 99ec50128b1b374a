"""Numbers on their way from an accelerator are computed with before they arrive, as numbers that are there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.doors import LateNumber, host_copy


def test_products_and_quotients_are_those_of_numbers_that_are_there() -> None:
    three, four, zero = (LateNumber.of(torch.tensor([value])) for value in (3.0, 4.0, 0.0))
    assert float(2 * three * four / 6) == 4.0
    assert float(12 / (three * four)) == 1.0
    assert float(-three / four) == -0.75
    assert float(zero * three) == 0.0
    assert math.isnan(float(three / zero))


def test_memory_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert host_copy.anonymous_bytes() > 0
    monkeypatch.setattr(host_copy, "_STATM", tmp_path / "absent")
    assert host_copy.anonymous_bytes() == 0
