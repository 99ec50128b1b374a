"""Losses over the global batch in tiles: the value, gradient and statistics of pytorch-metric-learning, never a whole matrix of pairs."""

from lightning_ddp_losses.losses.tiled.call import TiledCall
from lightning_ddp_losses.losses.tiled.plan import TILED, Plan, plan_of

__all__ = ["TILED", "Plan", "TiledCall", "plan_of"]
