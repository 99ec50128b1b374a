"""The same losses in other hosts than Lightning's Trainer: one file per host, imported only when used.

| file | host |
|---|---|
| ``fabric`` | Lightning Fabric: ``Fabric(strategy="ddp_losses")``, losses inside and next to the module |
| ``hf_trainer`` | Hugging Face's Trainer: ``hf_loss``, the gradient of one process under DDP and accumulation |
| ``sentence_transformers`` | sentence-transformers: four of its losses over the rows of all ranks |

``TESTED`` lists the releases of hosts with which the tests run. accelerate does not need a file:
``ddp-losses explain migrate accelerate``. There is a recipe for each host.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy

from lightning_ddp_losses.strategies.ddp_setup import register_aliases

__all__ = ["register_fabric_strategies"]

TESTED = {"sentence-transformers": ("6.2",), "transformers": ("5.23", "5.24"), "accelerate": ("1.15",)}
"""Releases with which the tests run, by distribution."""


def _make_fabric_strategy(**options: Any) -> FabricDDPStrategy:
    from lightning_ddp_losses.integrations.fabric import FabricDDPLossStrategy

    return FabricDDPLossStrategy(**options)


def register_fabric_strategies() -> None:
    """Register an alias of every name under which Fabric registers ``ddp``: ``Fabric(strategy="ddp_losses")``."""
    register_aliases(STRATEGY_REGISTRY, FabricDDPStrategy, _make_fabric_strategy)


def warn_untested(host: str, check: str) -> None:
    """Warn about a release with which the tests do not run.

    Args:
        host: Name of the distribution.
        check: A way to check whether the release works.
    """
    found = version(host)
    if found.rpartition(".")[0] not in TESTED[host]:
        tested = ", ".join(f"{release}.*" for release in TESTED[host])
        warnings.warn(f"{host} {found} is not among the tested releases ({tested}). {check}", stacklevel=3)
