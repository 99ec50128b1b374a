"""`FabricRefusal`: what ``Fabric(strategy="ddp_losses")`` says, as Fabric's loops are the caller's and need no strategy of ours.

A hand-written loop is exact under Fabric's own ``"ddp"``, with every learnable loss set up like a model::

    fabric = Fabric(strategy="ddp", devices=2)
    fabric.launch()
    encoder = fabric.setup_module(encoder)
    loss = fabric.setup_module(GlobalBatchLoss(ArcFaceLoss(num_classes=10, embedding_size=32)))
    optimizer = fabric.setup_optimizers(torch.optim.SGD([*encoder.parameters(), *loss.parameters()], lr=0.1))
    for images, labels in loader:
        optimizer.zero_grad()
        fabric.backward(loss(encoder(images), labels))
        optimizer.step()
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_ddp_losses.errors import ConfigurationError


class FabricRefusal(DDPStrategy):
    """Stands under our strategies' names in Fabric's registry.

    Args:
        asked: The name under which it is registered.

    Raises:
        ConfigurationError: always, with what to do instead.
    """

    def __init__(self, *, asked: str, **_: Any) -> None:
        raise ConfigurationError(
            f"Fabric(strategy={asked!r})",
            expected="a strategy of Fabric: ours is for lightning.pytorch.Trainer",
            got="a hand-written loop, in which nothing calls a Trainer's hooks",
            fix='Take Fabric(strategy="ddp"), wrap losses in GlobalBatchLoss, and hand learnable ones to fabric.setup_module like a model. '
            "Loops whose gradients are those of one process: ddp-losses explain migrate fabric, for FSDP2 migrate fabric-fsdp2.",
        )


def register_refusals(names: list[str], registry: Any) -> None:
    """Register the refusal under each of our names that Fabric does not know."""
    for name in names:
        if name not in registry:
            registry.register(name, FabricRefusal, description="for lightning.pytorch.Trainer only", asked=name)
