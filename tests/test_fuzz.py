"""The fuzzer itself: each domain runs a few cases, and a wrong factor, a differing error or a lost gradient is found and made small."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.testing import RankPool
from tests.fuzz import torch_losses
from tests.fuzz.__main__ import DOMAINS
from tests.fuzz.engine import Count, Domain, Found, explore


@pytest.mark.slow
@pytest.mark.parametrize("name", DOMAINS)
def test_a_few_cases_of_each_domain(pool: RankPool, name: str) -> None:
    domain: Domain = importlib.import_module(f"tests.fuzz.{name}").DOMAIN
    count = Count()
    finding = explore(pool, domain, examples=3, number=1, count=count, shrink=False)
    assert finding is None, finding.text
    assert count.exact > 0


def twice_too_large(case: torch_losses.Case) -> Found:
    found = torch_losses.DOMAIN.on_rank(case)
    return {**found, "rank x": found["rank x"] * (2 if len(case.ranks) > 1 and sum(case.ranks) > 2 else 1)}


def other_errors(case: torch_losses.Case) -> Found:
    raise ConfigurationError(f"rank {dist.get_rank()}")


def no_gradient(case: torch_losses.Case) -> Found:
    return {name: tensor for name, tensor in torch_losses.DOMAIN.on_rank(case).items() if name != "rank x"}


@pytest.mark.parametrize(
    ("sabotage", "text"),
    [
        (twice_too_large, "rank x on rank"),
        (other_errors, "not the same error on all ranks"),
        (no_gradient, "expected ['rank x', 'value v'], got"),
    ],
)
def test_what_is_wrong_is_found_and_made_small(pool: RankPool, sabotage: Any, text: str) -> None:
    domain = replace(torch_losses.DOMAIN, on_rank=sabotage)
    finding = explore(pool, domain, examples=60, number=3, count=Count())
    assert finding is not None
    assert text in finding.text
    assert "Case(rows=Rows(ranks=" in finding.text
