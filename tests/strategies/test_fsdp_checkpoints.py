"""Checkpoints of `fsdp2_ddp_losses` go on in any strategy and on any number of ranks as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.fsdp_jobs import alone, fit_sharded_model
from tests.strategies.test_fsdp_parity import joined

# who trains: "file" and "folder" under FSDP2, "ddp", or "one" process, and on how many ranks; before, after
Who = tuple[str, int]
ROUTES: list[tuple[Who, Who]] = [
    (("folder", 2), ("folder", 3)),
    (("file", 2), ("one", 1)),
    (("file", 3), ("ddp", 2)),
    (("one", 1), ("file", 2)),
    (("ddp", 3), ("folder", 2)),
]


def train(pool: RankPool, who: Who, **options: object) -> dict[str, Tensor]:
    how, world_size = who
    if how == "one":
        options.pop("save", None)
        return alone("divided", "adamw", ckpt_path=options.pop("load", None), **options)
    strategy = {} if how == "ddp" else {"save_distributed_checkpoint": how == "folder"}
    states = pool.run(world_size, fit_sharded_model, "divided", "adamw", strategy, ddp=how == "ddp", **options)
    return joined(states, "divided")


@pytest.mark.parametrize(("before", "after"), ROUTES, ids=str)
def test_training_goes_on(pool: RankPool, tmp_path: Path, before: Who, after: Who) -> None:
    expected = alone("divided", "adamw", max_epochs=2)
    path = str(tmp_path / "checkpoint")
    if before[0] == "one":
        alone("divided", "adamw", save=path)
    else:
        train(pool, before, save=path)
        assert Path(path).is_dir() == (before[0] == "folder")
    assert_close(train(pool, after, load=path, max_epochs=2), expected, rtol=1e-8)
