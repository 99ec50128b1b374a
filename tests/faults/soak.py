"""A long run to which something happens every 200 steps ends as the one to which nothing did: `nox -s soak`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.faults.ranks import run_ranks
from tests.faults.test_faults import assert_same_end, states
from tests.faults.training import Strike, fit

STEPS, EVERY, SEED, W = 2000, 200, 0, 3
SAVED_EVERY = 20
KINDS = ("killed in forward", "killed in backward", "killed in a ring", "killed while saving", "raises", "SIGTERM")


def strikes() -> list[Strike]:
    """One for each stretch of the run, at a step that is saved."""
    draw = random.Random(SEED)
    found = []
    for first in range(0, STEPS, EVERY):
        kind, step = draw.choice(KINDS), first + SAVED_EVERY * draw.randrange(1, EVERY // SAVED_EVERY)
        rank = 0 if kind == "killed while saving" else draw.randrange(W)
        found.append(Strike(kind, rank, step))
    return found


def test_two_thousand_steps_with_a_fault_every_two_hundred(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    ended = run_ranks(W, fit, Strike(), calm, STEPS, SAVED_EVERY, folder=calm, seconds=600)
    assert ended.codes == [0] * W, ended
    for strike in strikes():
        struck = run_ranks(W, fit, strike, rough, STEPS, SAVED_EVERY, folder=rough, seconds=600)
        assert None not in struck.codes, struck
        assert list(rough.glob("struck-*")), (strike, struck)
        for mark in rough.glob("struck-*"):
            mark.unlink()
    ended = run_ranks(W, fit, Strike(), rough, STEPS, SAVED_EVERY, folder=rough, seconds=600)
    assert ended.codes == [0] * W, ended
    assert_same_end(states(rough, W), states(calm, W))
