"""Checkpoints of `fsdp2_ddp_losses` go on in any strategy and on any number of ranks as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.strategies import whole_checkpoint
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.fsdp_jobs import Towers, alone, fit_sharded_model
from tests.strategies.test_calls import assert_same_error
from tests.strategies.test_fsdp_parity import joined

# who trains: "file" and "folder" under FSDP2, "ddp", "shards" (DDP, each rank's classes by themselves), or "one" process, and on how
# many ranks; before, after
Who = tuple[str, int]
ROUTES: list[tuple[Who, Who]] = [
    (("folder", 2), ("folder", 3)),
    (("file", 2), ("one", 1)),
    (("file", 3), ("ddp", 2)),
    (("one", 1), ("file", 2)),
    (("ddp", 3), ("folder", 2)),
    (("folder", 2), ("ddp", 3)),
    (("folder", 3), ("one", 1)),
    (("shards", 3), ("folder", 2)),
]
IS_FOLDER = ("folder", "shards")


def train(pool: RankPool, who: Who, **options: object) -> dict[str, Tensor]:
    how, world_size = who
    if how == "one":
        options.pop("save", None)
        return alone("divided", "adamw", ckpt_path=options.pop("load", None), **options)
    is_ddp = how in ("ddp", "shards")
    strategy = {"sharded_checkpoints": how == "shards"} if is_ddp else {"save_distributed_checkpoint": how == "folder"}
    states = pool.run(world_size, fit_sharded_model, "divided", "adamw", strategy, ddp=is_ddp, **options)
    return joined(states, "divided")


@pytest.mark.parametrize(("before", "after"), ROUTES, ids=str)
def test_training_goes_on(pool: RankPool, tmp_path: Path, before: Who, after: Who) -> None:
    expected = alone("divided", "adamw", max_epochs=2)
    path = str(tmp_path / "checkpoint")
    if before[0] == "one":
        alone("divided", "adamw", save=path)
    else:
        train(pool, before, save=path)
        assert Path(path).is_dir() == (before[0] in IS_FOLDER)
    if (before[0], after[0]) == ("folder", "one"):
        torch.save(whole_checkpoint(path), path := f"{path}.ckpt")
    assert_close(train(pool, after, load=path, max_epochs=2), expected, rtol=1e-8)


class Plain(Towers):
    """The module of one process."""

    kind, is_global = "divided", False


def test_a_folder_becomes_a_file_for_one_process(pool: RankPool, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "whole.ckpt"
    state = train(pool, ("folder", 2), save=str(folder))
    torch.save(whole_checkpoint(folder), file)
    module = Plain.load_from_checkpoint(file, weights_only=True)
    assert_close(dict(module.state_dict()), state, rtol=0)
    # cut off: every rank of another strategy says so
    next(folder.glob("*.distcp")).write_bytes(b"")
    errors = pool.errors(2, fit_sharded_model, "divided", "adamw", ddp=True, load=str(folder))
    assert_same_error(errors, f"checkpoint {folder}", "damaged")
    with pytest.raises(InputError, match=r"expected a folder with meta.pt.* got a file"):
        whole_checkpoint(file)
    with pytest.raises(InputError, match="got nothing there"):
        whole_checkpoint(tmp_path / "nowhere")
