"""The same losses in other hosts than Lightning's Trainer: one file for each host. It is imported when it is asked for.

| file | host |
|---|---|
| ``fabric`` | Lightning Fabric: ``Fabric(strategy="ddp_losses")``, losses inside and next to the module |
| ``hf_trainer`` | Hugging Face's Trainer: ``hf_loss``, the gradient of one process under DDP and accumulation |
| ``sentence_transformers`` | sentence-transformers: four of its losses over the rows of all ranks |

``hosts`` names the releases of hosts that the tests run with. accelerate needs no file: ``ddp-losses explain migrate accelerate``. There is
a recipe for each host.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy

__all__ = ["register_fabric_strategies"]


def _make_fabric_strategy(**options: Any) -> FabricDDPStrategy:
    from lightning_ddp_losses.integrations.fabric import FabricDDPLossStrategy

    return FabricDDPLossStrategy(**options)


def register_fabric_strategies() -> None:
    """Register an alias of every name under which Fabric registers ``ddp``: ``Fabric(strategy="ddp_losses")``."""
    for name, entry in list(STRATEGY_REGISTRY.items()):
        if entry["strategy"] is FabricDDPStrategy:
            alias = name.replace("ddp", "ddp_losses", 1)
            description = f"{entry['description']}, with learnable losses next to it"
            STRATEGY_REGISTRY.register(alias, _make_fabric_strategy, description, override=True, **entry["init_params"])
