"""The Lightning strategy that gives learnable losses distributed data parallelism of their own."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.discovery import register_loss_type
from lightning_ddp_losses.strategies.globalise import use_global_wrapper
from lightning_ddp_losses.strategies.layer_sync import use_layer_sync

__all__ = ["DDPLossStrategy", "register_loss_type", "use_global_wrapper", "use_layer_sync"]

DDPLossStrategy.register_strategies(StrategyRegistry)
