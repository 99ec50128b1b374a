"""Pickles of ``ClassShardedLoss`` that release 0.1 wrote: what is a part of the loss now was attributes of it then."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_ddp_losses.losses.class_heads import head_of, penalty_of
from lightning_ddp_losses.losses.partial_fc import ClassSampler, SampledGradient
from lightning_ddp_losses.losses.sharded_weight import ShardedWeight


def parts_of_release_0_1(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a loss that release 0.1 pickled, with its parts."""
    former = dict(state)
    loss = former["_modules"]["loss"]
    head = head_of(loss)
    sharded = ShardedWeight(
        f"ClassShardedLoss({type(loss).__name__})", head, former["_whole_shape"], seed=former["_seed"]
    )
    sharded.shard, sharded.world_size = former["shard"], former["_world"]
    sampler = former["sampler"]
    if sampler is not None:
        sampler = ClassSampler(sampler.rate, sampler.unbiased)
    kept_by_module = {name: value for name, value in former.items() if name in vars(nn.Module())}
    return {
        **kept_by_module,
        "_head": head,
        "_penalty": penalty_of(loss, head.per_class),
        "_sharded": sharded,
        "chunk_size": former["chunk_size"],
        "_group": former["_group"],
        "_replica_group": former["_replicas"],
        "sampler": sampler,
        "_sampled_gradient": SampledGradient(),
        "_row_optimizer": None,
        "_fingerprint": former["_fingerprint"],
        "_upstream_grads": former["_coefficients"],
        "_value_reading": former["_reading"],
    }
