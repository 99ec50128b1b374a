"""Every metric of torchmetrics that says it is differentiable: value and gradient of one process on W ranks."""

from __future__ import annotations

import pytest

from lightning_ddp_losses.metrics.conversion import WITHOUT_GRADIENT
from lightning_ddp_losses.testing import RankPool
from tests.metrics.cases import CASES, NOT_FED, differentiable_classes
from tests.metrics.harness import compare

FAMILIES = sorted({cls.__module__.split(".")[1] for name, cls in differentiable_classes().items() if name in CASES})


def test_the_table_knows_every_class() -> None:
    """A new release of torchmetrics with a new class ends here: give it a row, or say why not."""
    assert set(differentiable_classes()) == set(CASES) | set(WITHOUT_GRADIENT) | set(NOT_FED)
    assert not set(CASES) & (set(WITHOUT_GRADIENT) | set(NOT_FED))


def differences(family: str, even: bool) -> dict[str, float]:
    """Each case of a family by name: its difference from one process over the tolerance."""
    found = {}
    for name, cls in differentiable_classes().items():
        if name in CASES and cls.__module__.split(".")[1] == family:
            for index, case in enumerate(CASES[name]):
                found[f"{name} {index}"] = compare(case, even)
    return found


@pytest.mark.parametrize(
    ("family", "world_size", "even"),
    [
        # images take seconds, and travel as others do
        pytest.param(family, *way, marks=[pytest.mark.slow] if family == "image" and way != (2, False) else [])
        for family in FAMILIES
        for way in ((2, True), (2, False), (3, False))
    ],
)
def test_value_and_gradient_are_those_of_one_process(pool: RankPool, family: str, world_size: int, even: bool) -> None:
    for found in pool.run(world_size, differences, family, even):
        assert found
        assert {name: off for name, off in found.items() if not off < 1} == {}
