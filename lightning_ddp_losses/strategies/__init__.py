"""The Lightning strategy that gives learnable losses distributed data parallelism of their own."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.discovery import register_loss_type

__all__ = ["DDPLossStrategy", "register_loss_type"]

DDPLossStrategy.register_strategies(StrategyRegistry)
