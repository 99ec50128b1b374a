"""No check speaks of a module as people write them, of any field, that trains as one process would."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankPool
from tests.audit.realistic.base import Realistic
from tests.lightning_ranks import make_trainer
from tests.slow.test_realistic_audits import HEALTHY, STRATEGIES, pytestmark  # noqa: F401 - the marks of these modules


def fit_all(modules: Sequence[type[Realistic]], strategy: str) -> dict[str, list[tuple[str, str, str]]]:
    """Train each module on this rank for two batches; by module, what its checks found: severity, fault, text."""
    said = {}
    for module in modules:
        setup = HEALTHY[module]
        options = setup.trainer()
        checks = DDPChecks(action="log", summary=False, file=False)
        options["callbacks"] = [*options.get("callbacks", []), checks]
        trainer = make_trainer(setup.strategy(strategy), use_distributed_sampler=True, limit_train_batches=2, **options)
        trainer.fit(module())
        said[module.__name__] = [(found.severity, found.fault, str(found)) for found in checks.findings]
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_check_speaks_of_healthy_modules(pool: RankPool, strategy: str) -> None:
    for by_module in pool.run(2, fit_all, list(HEALTHY), strategy, seconds=600.0):
        assert {name: found for name, found in by_module.items() if found} == {}
        assert len(by_module) == len(HEALTHY)
