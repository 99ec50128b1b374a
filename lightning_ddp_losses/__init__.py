"""Distributed losses that are right: W ranks compute the gradient of one process, exactly.

Importing the package registers the strategy names (``Trainer(strategy="ddp_losses")``).
"""

from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.strategies import DDPLossStrategy

__version__ = "0.1.0"

__all__ = ["DDPLossError", "DDPLossStrategy"]
