"""A model that `fully_shard` reduces by a sum or by a user's factor trains as one process does, beside exact losses of all kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.oracle import assert_close
from tests.strategies.fsdp_jobs import Towers, alone, fit_sharded_model


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
    assert_close(whole, alone(kind, **{k: v for k, v in options.items() if k != "strategy"}), rtol=1e-8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forced": False}, ["set_gradient_divide_factor(7) of `encoder", "set_force_sum_reduction_for_comms(True)"]),
        ({"everywhere": False}, ["one divisor for all parameters", "`encoder.0` by 7", "`encoder.2` by 2"]),
    ],
    ids=["gloo multiplies nothing", "not every module"],
)
def test_errors_on_every_rank(pool: RankPool, options: dict[str, bool], words: list[str]) -> None:
    prepare = partial(set_factor, factor=7.0, **options)
    errors = pool.errors(2, fit_sharded_model, "arcface", prepare=prepare)
    assert_errors(errors, *words, of="ConfigurationError")
