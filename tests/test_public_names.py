"""The public names, pinned: whoever adds one adds it here, on purpose."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import lightning_ddp_losses

PINNED = [
    "AuditError",
    "AuditReport",
    "BatchCheck",
    "BufferSyncCheck",
    "CheckpointCheck",
    "ClassShardedLoss",
    "ClipLoss",
    "CommunicationMonitor",
    "ConfigurationError",
    "DDPChecks",
    "DDPLossError",
    "DDPLossStrategy",
    "DeviceCheck",
    "DifferentiableMetric",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "GlobalBatchSampler",
    "GradientFlowCheck",
    "HiddenLossError",
    "InputError",
    "LossCallError",
    "LossCheck",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "PeerError",
    "RankCheck",
    "RankMismatchError",
    "SigLipLoss",
    "SyncBatchNorm",
    "assert_parity",
    "audit",
    "differentiable",
    "microbatched",
]
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(lightning_ddp_losses.__path__, "lightning_ddp_losses.")
    if not found.name.endswith("__main__")
)


def test_top_level_names() -> None:
    assert lightning_ddp_losses.__all__ == PINNED
    assert sorted(PINNED) == PINNED
    assert all(getattr(lightning_ddp_losses, name).__doc__ for name in PINNED)


@pytest.mark.parametrize("name", MODULES)
def test_the_names_of_each_module_are_there(name: str) -> None:
    module = importlib.import_module(name)
    assert all(hasattr(module, public) for public in module.__all__)  # ruff keeps them sorted
    assert module.__doc__ or name.rpartition(".")[2].startswith("_")


def test_names_promised_below_the_top_level() -> None:
    from lightning_ddp_losses.collectives import (  # noqa: F401
        all_gather_with_grad,
        all_reduce_with_grad,
        reduce_scatter_with_grad,
    )
    from lightning_ddp_losses.sharding import ClassShard  # noqa: F401
    from lightning_ddp_losses.strategies import register_loss_type  # noqa: F401


def test_the_version_is_a_release_number() -> None:
    assert [part.isdigit() for part in lightning_ddp_losses.__version__.split(".")] == [True] * 3
