"""What `fsdp2_ddp_losses` refuses: models that `fully_shard` divides in other ways, and replicas that differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_ddp_losses import DDPChecks, ModelParallelLossStrategy
from tests.doors import local_part
from tests.refusals import Refused, refusals
from tests.strategies import test_fsdp_replicas as replicas
from tests.strategies.fsdp_jobs import Towers, fit_sharded_model, shard
from tests.strategies.test_fsdp_features import a_tied_layer, fit_under_an_older_torch


def configured(how: Callable[[Towers], None], module: Towers) -> None:
    module.configure_model = partial(how, module)  # type: ignore[method-assign]


def nothing(module: Towers) -> None:
    """Shards nothing."""


def the_loss_too(module: Towers) -> None:
    shard(module, module.encoder)
    fully_shard(module.loss, mesh=module.device_mesh["data_parallel"])


def a_tied_weight(module: Towers) -> None:
    a_tied_layer(module)
    shard(module, module.encoder)


def another_mesh(module: Towers) -> None:
    """Each rank has the whole for itself."""
    fully_shard(module.encoder, mesh=module.device_mesh["tensor_parallel"])


def a_fused_group(module: Towers) -> None:
    """One call steps the encoder's parts and the loss."""
    shard(module, module.encoder)
    module.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        module.parameters(), lr=0.1, foreach=True
    )


def made_late(module: Towers) -> None:
    """`configure_model` makes the loss too."""
    own, loss, module.loss = module.configure_model, module.loss, None

    def configure_model() -> None:
        own()
        module.loss = loss
        module.loss.W = nn.Parameter(loss.W.detach().clone())

    module.configure_model = configure_model  # type: ignore[method-assign]


def drifting(module: Towers) -> None:
    replicas.on_a_plane(module)

    def drift(*_: Any) -> None:
        if dist.get_rank() == 3:
            local_part(dict(module.encoder.named_parameters())["0.weight"].detach()).add_(1e-6)

    module.on_train_batch_end = drift  # type: ignore[method-assign]


def on_two_planes(module: Towers) -> None:
    """Layers with replicas on other ranks each."""

    def configure_model() -> None:
        ranks = torch.arange(4).reshape(2, 2)
        for layer, mesh in zip((module.encoder[0], module.encoder[2]), (ranks, ranks.t().contiguous()), strict=True):
            names = ("replicate", "shard")
            fully_shard(layer, mesh=torch.distributed.DeviceMesh("cpu", mesh, mesh_dim_names=names))

    module.configure_model = configure_model  # type: ignore[method-assign]


def dividing(
    prepare: Callable[[Towers], None] | None, *words: str, row: dict[str, Any] | None = None, **options: Any
) -> Refused:
    return Refused(lambda _: fit_sharded_model("arcface", prepare=prepare, **options), words, **row or {})


def under_an_older_torch(prepare: Callable[[Towers], None], *words: str) -> Refused:
    return Refused(lambda _: fit_under_an_older_torch(prepare), words)


TIED = ("parameters loss.W", "shared with a module that fully_shard has divided")
FULLY_SHARD: dict[str, Refused] = {
    "nothing is divided": dividing(partial(configured, nothing), "got no parameter that fully_shard has divided"),
    "the loss is divided": dividing(
        partial(configured, the_loss_too), "GlobalBatchLoss `loss`", "got W inside one of them"
    ),
    "a weight of a loss is divided": dividing(partial(configured, a_tied_weight), *TIED),
    "a fused group": dividing(partial(configured, a_fused_group), "foreach or fused", "got bias, loss.W among such"),
    "another mesh": dividing(
        partial(configured, another_mesh), "encoder.0.weight (S(0) over 1 ranks)", "over all 2 ranks"
    ),
    "a precision that Lightning refuses": dividing(
        None, "precision", precision="transformer-engine", row={"kind": "Exception", "same": False}
    ),
    "tensor parallelism": Refused(
        lambda _: ModelParallelLossStrategy(tensor_parallel_size=2),
        "tensor_parallel_size: expected 1",
        "ConfigurationError",
        0,
    ),
    "a tied layer under an older torch": under_an_older_torch(a_tied_layer, *TIED),
    "a loss made late under an older torch": under_an_older_torch(
        made_late, "parameters of GlobalBatchLoss `loss`", "made inside it", "Make the loss in __init__"
    ),
    "a replica that drifts": dividing(
        drifting,
        "parameter `encoder.0.weight` (rank 3)",
        "rank 3: holds the same part as rank 1",
        "rank 0: holds the same part as rank 2",
        callbacks=[DDPChecks()],
        max_epochs=2,
        row={"ranks": 4},
    ),
    "replicas on several meshes": dividing(on_two_planes, "encoder.2.weight", "one mesh", row={"ranks": 4}),
    "a factor that gloo cannot multiply by": dividing(
        partial(replicas.set_factor, factor=7.0, forced=False),
        "set_gradient_divide_factor(7) of `encoder",
        "set_force_sum_reduction_for_comms(True)",
        row={"kind": "ConfigurationError", "same": False},
    ),
    "a factor of not every module": dividing(
        partial(replicas.set_factor, factor=7.0, everywhere=False),
        *("one divisor for all parameters", "`encoder.0` by 7", "`encoder.2` by 2"),
        row={"kind": "ConfigurationError", "same": False},
    ),
}
test_fully_shard = refusals(__name__, "FULLY_SHARD")
