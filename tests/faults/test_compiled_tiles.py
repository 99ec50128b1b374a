"""``compile_tiles=True`` with the compiler of this machine: value and gradient of one process, in one graph for all sizes."""

from __future__ import annotations

import warnings
from typing import Any

from lightning_ddp_losses.testing import RankPool
from tests.losses.test_tiled import TILE_BYTES, judged, on_ranks, truth_of

NAMES = ["SupCon, ", "Contrastive, "]


def compiled(names: list[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Inductor's own; to fall back would be an error
        return on_ranks(names, TILE_BYTES, {"compile_tiles": True})


def test_compiled_tiles_are_one_process(pool: RankPool) -> None:
    results = pool.run(1, compiled, NAMES, seconds=240)
    problems = [p for name in NAMES if (p := judged(name, results, truth_of(name), statistics=False))]
    assert not problems, "\n".join(problems)
