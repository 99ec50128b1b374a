"""HSDP: `fully_shard` over a mesh of 2 replicas x 2 parts trains as one process does, and replicas that differ are found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.slow_parameters import slow_parameters
from tests.strategies.fsdp_jobs import Towers, fit_kind_alone, fit_sharded_model
from tests.strategies.test_fsdp_checkpoints import train
from tests.strategies.test_fsdp_parity import joined

W = 4


def on_a_plane(module: Towers) -> None:
    """Ranks 0 and 2 hold the same parts, and so do 1 and 3; the second replicas are made with other values."""

    def configure_model() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if any(isinstance(p, DTensor) for p in module.parameters()):
            return
        if dist.get_rank() >= 2:
            with torch.no_grad():
                for parameter in module.encoder.parameters():
                    parameter.add_(1.0)
        fully_shard(module.encoder[0], mesh=mesh)
        fully_shard(module.encoder, mesh=mesh)

    module.configure_model = configure_model  # type: ignore[method-assign]


PARITY: list[tuple[str, dict[str, Any]]] = [
    ("three", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    ("divided", {"gradient_clip_val": 0.3, "callbacks": [DDPChecks()]}),
]


@pytest.mark.parametrize(("kind", "options"), PARITY, ids=[kind for kind, _ in PARITY])
def test_replicas_of_parts_equal_one_process(pool: RankPool, kind: str, options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if name != "callbacks"}
    states = pool.run(W, fit_sharded_model, kind, "adamw", even=False, prepare=on_a_plane, **options)
    assert_close(joined(states, kind), fit_kind_alone(kind, "adamw", **plain), rtol=1e-8)


@pytest.mark.parametrize("as_folder", slow_parameters([False, True], {True}))
def test_checkpoints_go_on_without_replicas(pool: RankPool, tmp_path: Path, as_folder: bool) -> None:
    path = str(tmp_path / "checkpoint")
    strategy = {"save_distributed_checkpoint": as_folder}
    pool.run(W, fit_sharded_model, "divided", "adamw", strategy, prepare=on_a_plane, save=path)
    expected = fit_kind_alone("divided", "adamw", max_epochs=2)
    assert_close(train(pool, ("folder", 2), load=path, max_epochs=2), expected, rtol=1e-8)
    again = pool.run(W, fit_sharded_model, "divided", "adamw", strategy, prepare=on_a_plane, load=path, max_epochs=2)
    assert_close(joined(again, "divided"), expected, rtol=1e-8)


# A model that `fully_shard` reduces by a sum or by a user's factor trains as one process does, beside exact losses of
# all kinds.


def set_factor(
    module: Towers, factor: float, *, forced: bool = True, everywhere: bool = True, replicas: int = 1
) -> None:
    """Set it after `configure_model` has divided the encoder; with replicas, over a mesh of two dimensions."""
    own = module.configure_model

    def configure() -> None:
        if replicas > 1 and not isinstance(module.encoder, FSDPModule):
            mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
            fully_shard(module.encoder, mesh=mesh)
        else:
            own()
        for each in module.modules() if everywhere else [module.encoder[0]]:
            if isinstance(each, FSDPModule):
                each.set_gradient_divide_factor(factor)
                each.set_force_sum_reduction_for_comms(forced)

    module.configure_model = configure  # type: ignore[method-assign]


CASES: list[tuple[str, float, int, int, dict[str, Any]]] = [
    ("arcface", 1.0, 2, 1, {}),
    ("arcface", 300.0, 3, 1, {"accumulate_grad_batches": 2}),
    ("divided", 1.0, 2, 1, {"accumulate_grad_batches": 2}),
    ("three", 7.0, 2, 1, {"gradient_clip_val": 0.1}),
    ("clip", 1.0, 2, 1, {}),
    ("siglip", 1.0, 2, 1, {}),
    ("arcface", 7.0, 2, 1, {"accumulate_grad_batches": 2, "strategy": {"accumulation": "window"}}),
    ("arcface", 1.0, 4, 2, {}),
    ("arcface", 300.0, 4, 2, {}),
]


@pytest.mark.parametrize(("kind", "factor", "world_size", "replicas", "options"), CASES, ids=str)
def test_a_fit_equals_one_process(
    pool: RankPool, kind: str, factor: float, world_size: int, replicas: int, options: dict[str, Any]
) -> None:
    prepare = partial(set_factor, factor=factor, replicas=replicas)
    states = pool.run(world_size, fit_sharded_model, kind, prepare=prepare, **options)
    whole = dict(states[0])
    if kind == "divided":
        whole["loss.W"] = torch.cat([state["loss.W"] for state in states], 1)
    assert_close(whole, fit_kind_alone(kind, **{k: v for k, v in options.items() if k != "strategy"}), rtol=1e-8)
