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
    "Certificate",
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
    "EmbeddingRetrieval",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "GlobalBatchSampler",
    "GradientFlowCheck",
    "HiddenLossError",
    "InputError",
    "LossCallError",
    "LossCheck",
    "MaxSimLoss",
    "ModelParallelLossStrategy",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "PeerError",
    "RankCheck",
    "RankMismatchError",
    "SigLipLoss",
    "SyncBatchNorm",
    "accumulation_window",
    "assert_parity",
    "audit",
    "certify",
    "differentiable",
    "gather_predictions",
    "global_mean",
    "global_randomness",
    "global_rows",
    "microbatched",
    "parity",
    "synced",
]
# what imports a host: tests/integrations
WITH_HOSTS = {f"lightning_ddp_losses.integrations.{host}" for host in ("hf_trainer", "sentence_transformers")}
# `nox -s kernels` has triton
WITH_HOSTS |= {f"lightning_ddp_losses.losses.kernels.{name}" for name in ("element_kernels", "launches")}
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(lightning_ddp_losses.__path__, "lightning_ddp_losses.")
    if not found.name.endswith("__main__") and found.name not in WITH_HOSTS
)


def test_top_level_names() -> None:
    assert lightning_ddp_losses.__all__ == PINNED
    assert sorted(PINNED) == PINNED
    assert all(getattr(lightning_ddp_losses, name).__doc__ for name in PINNED)


# beside those that have an example of their own
DOCUMENTED = {
    "callbacks": ["FAULTS", "DDPChecks", "RankCheck"],
    "cli": ["LossCLI", "main"],
    "errors": ["DDPLossError"],
    "ssl": ["Center", "barlow_twins", "koleo", "moments", "sinkhorn", "vicreg"],
    "strategies": ["DDPLossStrategy", "register_loss_type"],
}
# packages say what is public, and so do the modules that are documented paths of functions
SAYS_WHAT_IS_PUBLIC = {f"lightning_ddp_losses.{name}" for name in ("collectives", "sharding", "ssl", "testing")}


@pytest.mark.parametrize("name", MODULES)
def test_the_names_of_each_module_are_there(name: str) -> None:
    module = importlib.import_module(name)
    may_say = hasattr(module, "__path__") or name in SAYS_WHAT_IS_PUBLIC
    assert may_say or not hasattr(module, "__all__")
    assert all(hasattr(module, public) for public in getattr(module, "__all__", ()))  # ruff keeps them sorted
    assert module.__doc__


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in DOCUMENTED.items() for name in names])
def test_names_promised_below_the_top_level(path: str, name: str) -> None:
    assert hasattr(importlib.import_module(f"lightning_ddp_losses.{path}"), name)


def test_the_version_is_a_release_number() -> None:
    assert [part.isdigit() for part in lightning_ddp_losses.__version__.split(".")] == [True] * 3
