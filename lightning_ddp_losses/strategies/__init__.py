"""The Lightning strategy that gives learnable losses distributed data parallelism of their own."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses.strategies.ddp_losses import DDPLossStrategy
from lightning_ddp_losses.strategies.ddp_setup import use_layer_sync
from lightning_ddp_losses.strategies.global_batch_option import use_global_wrapper
from lightning_ddp_losses.strategies.loss_discovery import register_loss_type

__all__ = ["DDPLossStrategy", "register_loss_type", "use_global_wrapper", "use_layer_sync"]

DDPLossStrategy.register_strategies(StrategyRegistry)
