"""The rules that checks and the audit share, on small tables: measured numbers on the left, the fault on the right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.doors import (
    agree_at,
    fault_of_memory,
    fault_of_same_rows,
    fault_of_scale,
    fault_of_unreduced,
    faults_of_optimizers,
    first_difference,
    scale_of,
)

STEP = [{"backward": {"w": 1, "b": 2}, "used": {"w": 1, "b": 2}}, {"backward": {"w": 1}, "used": {"w": 5, "b": 2}}]
ROWS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = [
    (scale_of, (1.0004, 4, 1e-3), {}, "right"),
    (scale_of, (0.25, 4, 1e-3), {}, "cut"),
    (scale_of, (4.1, 4, 0.05), {}, "large"),
    (scale_of, (4.1, 4, 1e-3), {}, ""),
    (scale_of, (-0.25, 4, 0.05), {}, ""),
    (scale_of, (None, 4, 0.05), {}, ""),
    (fault_of_scale, ("right",), {}, ""),
    (fault_of_scale, ("cut",), {}, "F20"),
    (fault_of_scale, ("cut",), {"kind": "reduce"}, "F23"),
    (fault_of_scale, ("cut",), {"kind": "reduce", "has_metrics": True}, "F27"),
    (fault_of_scale, ("large",), {"has_metrics": True}, "F21"),
    (fault_of_scale, ("right",), {"is_multiplied": True}, "F24"),
    (fault_of_scale, ("cut",), {"is_multiplied": True}, ""),
    (fault_of_scale, ("",), {"has_metrics": True}, ""),
    (fault_of_memory, ([3, 3, 3],), {}, "F26"),
    (fault_of_memory, ([3, 3, 4],), {}, "F64"),
    (fault_of_unreduced, (), {}, ""),
    (fault_of_unreduced, (), {"is_registered": False, "event": "replaced after the wrap"}, "F02"),
    (fault_of_unreduced, (), {"event": "unfrozen after the wrap", "has_backward": False}, "F08"),
    (fault_of_unreduced, (), {"has_backward": False, "has_forward": False}, "F09"),
    (fault_of_unreduced, (), {"has_backward": False, "is_automatic": False}, "F10"),
    (fault_of_unreduced, (), {"has_forward": False, "is_automatic": False}, "F09"),
    (faults_of_optimizers, ({"steps": (1, 1), "scale": (8.0, 8.0), "settings": (3, 3)},), {}, {}),
    (faults_of_optimizers, ({"steps": (1, 0), "scale": (8.0, 4.0)},), {}, {"steps": "F14"}),
    (faults_of_optimizers, ({"steps": (8.0, 4.0)},), {}, {"steps": "F14"}),
    (faults_of_optimizers, ({"steps": (1, 2), "scale": (8.0, 8.0), "settings": (3, 4)},), {}, {"steps": "F37"}),
    (faults_of_optimizers, ({"steps": (1, 0), "scale": (None, None)},), {}, {"steps": "F37"}),
    (faults_of_optimizers, ({"scale": (8.0, 4.0), "settings": (3, 4)},), {}, {"scale": "F15", "settings": "F17"}),
    (faults_of_optimizers, ({"scale": (None, 4.0)},), {}, {"scale": "F15"}),
    (fault_of_same_rows, (), {"is_iterable": True}, "F71"),
    (fault_of_same_rows, (), {"is_iterable": False}, "F67"),
    (agree_at, (STEP, "backward", "w"), {}, True),
    (agree_at, (STEP, "used", "w"), {}, False),
    (agree_at, (STEP, "backward", "b"), {}, None),
    (agree_at, (STEP, "reduced", "w"), {}, None),
    (first_difference, ([(1, 1), (None, None), (2, 3)],), {}, 2),
    (first_difference, ([(1, 1), (2, 2)],), {}, None),
    (first_difference, ([],), {}, None),
]


@pytest.mark.parametrize(("rule", "given", "options", "expected"), ROWS, ids=range(len(ROWS)))
def test_what_was_measured_has_one_explanation(
    rule: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any], expected: Any
) -> None:
    assert rule(*given, **options) == expected
