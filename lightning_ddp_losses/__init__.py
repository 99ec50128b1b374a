"""Distributed losses that are right: W ranks compute the gradient of one process, exactly.

Importing the package registers the strategy names (``Trainer(strategy="ddp_losses")``).
"""

from lightning_ddp_losses.audit import AuditReport, assert_parity, audit
from lightning_ddp_losses.errors import (
    AuditError,
    ConfigurationError,
    DDPLossError,
    HiddenLossError,
    InputError,
    LossCallError,
    PeerError,
    RankMismatchError,
)
from lightning_ddp_losses.losses import GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.strategies import DDPLossStrategy, register_loss_type, use_global_wrapper

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "AuditReport",
    "ConfigurationError",
    "DDPLossError",
    "DDPLossStrategy",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "GlobalBatchSampler",
    "HiddenLossError",
    "InputError",
    "LossCallError",
    "PeerError",
    "RankMismatchError",
    "assert_parity",
    "audit",
]

# losses and strategies are siblings; here, above both, they are introduced to each other
register_loss_type(GlobalBatchLoss)
use_global_wrapper(GlobalBatchLoss)
