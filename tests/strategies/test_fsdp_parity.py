"""W ranks under `fsdp2_ddp_losses` train as one process does, and as `ddp_losses` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.fsdp_jobs import alone, fit_sharded_model

# kind, optimizer, world size, whether ranks have equally many rows, options of the trainer
CASES: list[tuple[str, str, int, bool, dict[str, Any]]] = [
    ("arcface", "sgd", 2, True, {}),
    ("arcface", "adamw", 2, False, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    ("divided", "adamw", 2, False, {"gradient_clip_val": 0.3}),
    ("divided", "sgd", 2, False, {"accumulate_grad_batches": 2}),
    ("supcon", "adamw", 2, False, {}),
    ("three", "adamw", 2, False, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}),
    ("clip", "adamw", 2, False, {"gradient_clip_val": 0.3}),
    ("three", "adamw", 4, True, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    ("divided", "adamw", 4, False, {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"}),
]


def joined(states: list[dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """The ranks' states as one: equal, but for a divided weight."""
    whole = dict(states[0])
    if kind == "divided":
        whole["loss.W"] = torch.cat([state["loss.W"] for state in states], 1)
    for state in states:
        assert all(torch.equal(state[name], whole[name]) for name in state if (kind, name) != ("divided", "loss.W"))
    return whole


@pytest.mark.parametrize(("kind", "optimizer", "world_size", "even", "options"), CASES, ids=str)
def test_a_fit_equals_one_process(
    pool: RankPool, kind: str, optimizer: str, world_size: int, even: bool, options: dict[str, Any]
) -> None:
    expected = alone(kind, optimizer, **options)
    states = pool.run(world_size, fit_sharded_model, kind, optimizer, even=even, **options)
    assert_close(joined(states, kind), expected, rtol=1e-8)
