"""Distributed losses that are right: W ranks compute the gradient of one process, exactly.

Importing the package registers the strategy names (``Trainer(strategy="ddp_losses")``).
"""

from lightning_ddp_losses.audit import AuditReport, assert_parity, audit
from lightning_ddp_losses.callbacks import (
    BatchCheck,
    BufferSyncCheck,
    CheckpointCheck,
    CommunicationMonitor,
    DDPChecks,
    DeviceCheck,
    GradientFlowCheck,
    LossCheck,
    OptimizerCheck,
    ParameterSyncCheck,
    RankCheck,
)
from lightning_ddp_losses.core import former_paths
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
from lightning_ddp_losses.layers import SyncBatchNorm
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from lightning_ddp_losses.metrics import DifferentiableMetric, differentiable
from lightning_ddp_losses.microbatch import microbatched
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.strategies import DDPLossStrategy, register_loss_type, use_global_wrapper, use_layer_sync

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "AuditReport",
    "BatchCheck",
    "BufferSyncCheck",
    "CheckpointCheck",
    "ClassShardedLoss",
    "ClipLoss",
    "CommunicationMonitor",
    "ConfigurationError",
    "DDPChecks",
    "DDPLossError",
    "DDPLossStrategy",
    "DeviceCheck",
    "DifferentiableMetric",
    "GlobalBatchLoss",
    "GlobalBatchMiner",
    "GlobalBatchSampler",
    "GradientFlowCheck",
    "HiddenLossError",
    "InputError",
    "LossCallError",
    "LossCheck",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "PeerError",
    "RankCheck",
    "RankMismatchError",
    "SigLipLoss",
    "SyncBatchNorm",
    "assert_parity",
    "audit",
    "differentiable",
    "microbatched",
]

# a pickle or a config names a public class by where it is documented, so that its file may move
for _name in __all__:
    globals()[_name].__module__ = __name__
former_paths.install()

# losses, layers and strategies are siblings; here, above them, they are introduced to each other
register_loss_type(GlobalBatchLoss)
register_loss_type(ClassShardedLoss)
register_loss_type(ClipLoss)
register_loss_type(SigLipLoss)
use_global_wrapper(GlobalBatchLoss)
use_layer_sync(SyncBatchNorm)
