"""One handshake for the batch norms of a forward on accelerators: what it costs, and errors where a rank leaves what was agreed."""

from __future__ import annotations

from pathlib import Path

from tests.pretend_norms import BAD_STEP, LAYERS, ODD, SAME
from tests.test_pretend_device import found_by

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


def test_costs_numbers_and_errors_of_a_plan(tmp_path: Path) -> None:
    for world_size, ranks in found_by("pretend_norms", tmp_path).items():
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
        for odd in ODD:
            errors = [found["errors"][odd] for found in ranks]
            for error in errors:
                assert all(words in error for words in WORDS[odd]), (world_size, odd, error)
            if odd != "raises":
                assert len(set(errors)) == 1
