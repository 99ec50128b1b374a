"""Every metric of torchmetrics that says it is differentiable: value and gradient of one process on W ranks."""

from __future__ import annotations

import pytest

from tests.doors import WITHOUT_GRADIENT
from tests.each_rank import each_rank
from tests.metrics.cases import CASES, NOT_FED, differentiable_classes
from tests.metrics.harness import compare

FAMILIES = sorted({cls.__module__.split(".")[1] for name, cls in differentiable_classes().items() if name in CASES})


def test_the_table_knows_every_class() -> None:
    """A new release of torchmetrics with a new class ends here: give it a row, or say why not."""
    assert set(differentiable_classes()) == set(CASES) | set(WITHOUT_GRADIENT) | set(NOT_FED)
    assert not set(CASES) & (set(WITHOUT_GRADIENT) | set(NOT_FED))


@pytest.mark.parametrize(
    ("family", "world_size", "even"),
    [
        # images take seconds, and travel as others do
        pytest.param(family, *way, marks=[pytest.mark.slow] if family == "image" and way != (2, False) else [])
        for family in FAMILIES
        for way in ((2, True), (2, False), (3, False))
    ],
)
@each_rank()
def test_value_and_gradient_are_those_of_one_process(family: str, even: bool) -> None:
    off = {}
    for name, cls in differentiable_classes().items():
        if name in CASES and cls.__module__.split(".")[1] == family:
            off |= {f"{name} {index}": compare(case, even) for index, case in enumerate(CASES[name])}
    assert off
    assert {name: number for name, number in off.items() if not number < 1} == {}
