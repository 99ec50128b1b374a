"""The Lightning strategy that gives learnable losses distributed data parallelism of their own."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.discovery import register_loss_type
from lightning_ddp_losses.strategies.globalise import use_global_wrapper

__all__ = ["DDPLossStrategy", "register_loss_type", "use_global_wrapper"]

DDPLossStrategy.register_strategies(StrategyRegistry)
