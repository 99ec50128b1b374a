"""One handshake for the batch norms of a forward on accelerators: what it costs, and errors where a rank leaves what was agreed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pretended.norms import BAD_STEP, ENDS, FAILS, LAYERS, ODD, SAME, STRATEGIES
from tests.pretended.test_pretend_device import found_by

WORDS = {  # what the error of every rank names
    "another layer": (
        "different places",
        "the batch norms of a forward",
        "left out=SyncBatchNorm `norms.2`",
        "instead=SyncBatchNorm `wide`",
    ),
    "another shape": ("different places", "left out=SyncBatchNorm `norms.2`", "'channels': 3"),
    "skips": ("different places", "left out=SyncBatchNorm `norms.2`", "batch norms that the loss depends on"),
    "skips the last": ("different places", "left out=SyncBatchNorm `norms.4`, instead=another handshake", "all_gather"),
    "evaluates": ("different places", "left out=SyncBatchNorm `norms.2`"),
    "one more": ("different places", "SyncBatchNorm `norms.0` call 6", "all_gather"),
    "raises": ("rank 1 alone",),
    "one row": ("Expected more than 1 value per channel", "`norms.2`", "rank 0: 1 value", "rank 1: 0 values"),
}


@pytest.mark.slow
def test_costs_numbers_and_errors_of_a_plan(tmp_path: Path) -> None:
    for world_size, ranks in found_by("norms", tmp_path).items():
        for found in ranks:
            for name in SAME:
                assert found[name]["off"] < 1e-4, (world_size, name)
            costs = found["the same"]
            # handshakes and collectives of forward, comparison and backward: each layer's, and then one and none for all
            own, planned = costs["device"][1], costs["device"][-1]
            assert own == [[LAYERS, 2 * LAYERS], [1, 1], [0, LAYERS]]
            assert planned == [[1, 1 + LAYERS], [1, 1], [0, LAYERS]]
            # what the CPU sends rides in the handshakes
            if world_size != "4":  # those of pairs go to the pair
                assert costs["cpu"][-1] == [[LAYERS, LAYERS], [1, 1], [LAYERS, LAYERS]]
            # all ranks left it at one call: the rest of its gathers, a handshake that says so, and one for each call from there on
            forward = found["all leave"]["device"][BAD_STEP][0]
            assert forward == [1 + 1 + 2, 1 + LAYERS + 1 + 2 * 2]
            assert found["waits of several forwards"] == 0
        for odd in (*ODD, *(f"one row, {end}" for end in ENDS)):
            told = ranks[:2] if (world_size, odd) == ("4", "one row, revert") else ranks  # no other pair is there
            errors = [found["errors"][odd] for found in told]
            for error in errors:
                assert all(words in error for words in WORDS[odd.partition(",")[0]]), (world_size, odd, error)
            if odd != "raises":
                assert len(set(errors)) == 1
        if world_size != "4":
            judge_fits([found["fits"] for found in ranks])


def judge_fits(ranks: list[dict[str, Any]]) -> None:
    """All ranks end with an error that names the rank which failed in the last step, and a fit after it is that of the CPU."""
    for strategy in STRATEGIES:
        for fails in FAILS:
            name = f"{strategy}, {fails}"
            for rank, found in enumerate(ranks):
                assert found[name]["off"] < 1e-4, (name, found[name])
                words = WORDS["one row" if fails == "one row" else "raises"]
                if fails != "one row":
                    words = (*words, "KeyError") if rank == 1 else (*words, "PeerError", "rank 1")
                assert all(word in found[name]["error"] for word in words), (name, rank, found[name])
