"""Every check over parameters and buffers of every kind: a healthy fit is as without checks, a sick one is reported by name."""

from __future__ import annotations

import pytest

from tests.callbacks.parameter_kinds import KINDS, every_check, fit_kind
from tests.rank_pool import RankPool

WITH_A_SICK_TWIN = ["SparseGradient", "Complex", "ComplexHalf", "Parametrised", "Orthogonal", "Tied", "Odd"]


UNDER_PLAIN_DDP = ["SparseGradient", "Complex", "Quantised", "Lazy", "Tied"]
ALONE = ["SparseGradient", "Tied"]
RUNS = [(name, 2, "ddp_losses") for name in KINDS]
RUNS += [(name, 2, "ddp") for name in UNDER_PLAIN_DDP]
RUNS += [(name, 1, "ddp") for name in ALONE]


@pytest.mark.parametrize(("name", "world_size", "strategy"), RUNS)
def test_a_healthy_fit_is_as_without_checks(pool: RankPool, name: str, world_size: int, strategy: str) -> None:
    without = pool.run(world_size, fit_kind, name, strategy, list)
    assert not without[0].error, "the fit is healthy without checks"
    checked = pool.run(world_size, fit_kind, name, strategy, every_check)
    for plain, watched in zip(without, checked, strict=True):
        assert not watched.error
        assert watched.findings == []
        assert watched.trained == plain.trained


@pytest.mark.parametrize("name", WITH_A_SICK_TWIN)
def test_a_rank_that_goes_apart_is_reported_by_name(pool: RankPool, name: str) -> None:
    outcomes = pool.run(2, fit_kind, name, "ddp", every_check, True)
    assert len({outcome.error for outcome in outcomes}) == 1
    found = [each for each in outcomes[0].findings if KINDS[name].odd_one in each["name"]]
    assert found, outcomes[0]
    assert found[0]["check"] == "ParameterSyncCheck"
    assert tuple(found[0]["ranks"]) == (1,)
