"""Checkpoints of `fsdp2_ddp_losses` go on in any strategy and on any number of ranks as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.strategies import whole_checkpoint
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.strategies.fsdp_jobs import Towers, fit_kind_alone, fit_sharded_model
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
        return fit_kind_alone("divided", "adamw", ckpt_path=options.pop("load", None), **options)
    is_ddp = how in ("ddp", "shards")
    strategy = {"sharded_checkpoints": how == "shards"} if is_ddp else {"save_distributed_checkpoint": how == "folder"}
    states = pool.run(world_size, fit_sharded_model, "divided", "adamw", strategy, ddp=is_ddp, **options)
    return joined(states, "divided")


@pytest.mark.parametrize(("before", "after"), ROUTES, ids=str)
def test_training_goes_on(pool: RankPool, tmp_path: Path, before: Who, after: Who) -> None:
    expected = fit_kind_alone("divided", "adamw", max_epochs=2)
    path = str(tmp_path / "checkpoint")
    if before[0] == "one":
        fit_kind_alone("divided", "adamw", save=path)
    else:
        train(pool, before, save=path)
        assert Path(path).is_dir() == (before[0] in IS_FOLDER)
    if (before[0], after[0]) == ("folder", "one"):
        torch.save(whole_checkpoint(path), path := f"{path}.ckpt")
    assert_close(train(pool, after, load=path, max_epochs=2), expected, rtol=1e-8)


def read_by_torch(folder: str, keys: dict[str, tuple[tuple[int, ...], int]]) -> dict[str, Tensor]:
    """What torch's own loader puts into DTensors of a mesh of its own, by key: shape, and the dimension that is divided."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {
        key: zeros(*shape, dtype=torch.float64, device_mesh=mesh, placements=[Shard(dim)])
        for key, (shape, dim) in keys.items()
    }
    dcp.load(places, checkpoint_id=folder)
    return {key: place.full_tensor() for key, place in places.items()}


def test_torch_alone_reads_the_folder_on_another_number_of_ranks(pool: RankPool, tmp_path: Path) -> None:
    """Divided classes too: they lie there as the parts of a DTensor would."""
    folder, file = tmp_path / "folder", tmp_path / "whole.pt"
    state = train(pool, ("folder", 3), save=str(folder))
    weight, layer = state["loss.W"], state["encoder.0.weight"]
    keys = {
        "state_dict.loss.W": (tuple(weight.shape), 1),
        "state_dict.encoder.0.weight": (tuple(layer.shape), 0),
        "optimizer_0.state.loss.W.exp_avg": (tuple(weight.shape), 1),
    }
    both = pool.run(2, read_by_torch, str(folder), keys)
    for found in both:
        assert torch.equal(found["state_dict.loss.W"], weight)
        assert torch.equal(found["state_dict.encoder.0.weight"], layer)
    dcp_to_torch_save(folder, file)
    whole = torch.load(file, weights_only=False)
    assert torch.equal(whole["state_dict"]["loss.W"], weight)
    momentum = whole["optimizer_0"]["state"]["loss.W"]["exp_avg"]
    assert torch.equal(momentum, both[0]["optimizer_0.state.loss.W.exp_avg"])
    assert momentum.abs().sum() > 0


class Plain(Towers):  # the module of one process
    kind, is_global = "divided", False


def test_a_folder_becomes_a_file_for_one_process(pool: RankPool, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "whole.ckpt"
    state = train(pool, ("folder", 2), save=str(folder))
    torch.save(whole_checkpoint(folder), file)
    module = Plain.load_from_checkpoint(file, weights_only=True)
    assert_close(dict(module.state_dict()), state, rtol=0)
    with pytest.raises(InputError, match=r"expected a folder with meta.pt.* got a file"):
        whole_checkpoint(file)
    with pytest.raises(InputError, match="got nothing there"):
        whole_checkpoint(tmp_path / "nowhere")
