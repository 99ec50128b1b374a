"""Checks that find what goes wrong between ranks on the step where it happens, on all ranks, by name.

`DDPChecks` runs them; each is a `RankCheck` in a file of its own, named for its class. Legend: ``W`` ranks, ``n`` numbers that a check
measures.

=========================  ==========================================================================================================
base                       `RankCheck`, what a check writes; `CheckCallback`, the Lightning hooks through which checks run
ddp_checks                 `DDPChecks`: all checks in one callback
check_stage                `CheckStage`: when checks measure and judge
findings                   `Finding`, and `LocalFindings` that one rank makes by itself
runner                     `CheckRunner`: a fit from start to end, one gather at each stage
check_evaluator            `CheckEvaluator`: rows to findings, the same on all ranks; a check that fails by itself is one too
row_exchange               rows as bytes, and their way between ranks
report                     where findings go: errors, warnings, a file, the logger, a table
batch_check                `BatchCheck`; batch_reader and loss_observations read for it
buffer_sync                `BufferSyncCheck`; what it reads is in buffers
checkpoint_check           `CheckpointCheck`
communication_monitor      `CommunicationMonitor`
device_check               `DeviceCheck`
gradient_flow              `GradientFlowCheck`; its dry run before the first step is in gradient_scale
loss_check                 `LossCheck`; element_weights reads the loss's graph, micro_batches judges what Lightning accumulates,
                           logged_means what it logs of an epoch; logged_values names that are reduced, values that decide
optimizer_check            `OptimizerCheck`
parameter_sync             `ParameterSyncCheck`
replicated_parameters      which parameters ranks must hold alike, and slices of them
ddp_state                  what DDP saw at the start, and why ranks went apart since
=========================  ==========================================================================================================

To add a check:

1. ``callbacks/<name>.py``: ``class NameCheck(RankCheck, default=True)``, which makes it one of those that ``DDPChecks()`` runs. Say
   ``stages`` (when), ``faults`` (which ids of ``faults.FAULTS``) and whether it ``needs_peers``. Look at things in ``start``,
   ``see_batch``, ``see_loss``, ``see_gradients``, ``see_step``, ``see_batch_end``, ``stop``: local, no communication, cheap.
   ``measure`` returns this rank's row: a short 1-D tensor of int64, float64 or uint8, or a list of ints or floats, which is faster
   (rows share a handshake, which grows with them: keep yours small; ours are ``NamedTuple``, so that ``judge`` reads them by name).
   ``judge`` gets the table (W, n), a tensor or a list of such lists, and returns findings; it decides from the table alone (and from
   what is the same on every rank), so that every rank comes to the same findings. Rows of unequal length are padded with zeros.
   ``self.runner`` has ``step``, ``synchronising``, ``backwards``, ``stepping``, ``checkpoint`` and ``shared``.
2. Where a finding needs more than the row holds, ``describe`` gives a text of this rank, ``explain`` makes findings of all texts, and
   ``tensor`` names the tensor whose largest difference is to be told. They run only when there is a finding, on every rank. What one
   rank can find by itself it adds to the ``local`` findings of a ``LocalCheck``, which do all this.
3. ``figures`` returns numbers for the logger and the summary.
4. Export it here, and write one row, sick and healthy, in a file of ``tests/callbacks``. (A check of ours also has its line in
   ``configs/checks_all.yaml``, and a new fault its row in ``faults.yaml``.)

What a check raises becomes a finding of that check on all ranks.
"""

from lightning_ddp_losses.callbacks.base import DDPChecks, RankCheck
from lightning_ddp_losses.callbacks.batch_check import BatchCheck
from lightning_ddp_losses.callbacks.buffer_sync import BufferSyncCheck
from lightning_ddp_losses.callbacks.checkpoint_check import CheckpointCheck
from lightning_ddp_losses.callbacks.communication_monitor import CommunicationMonitor
from lightning_ddp_losses.callbacks.device_check import DeviceCheck
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, odd_ranks
from lightning_ddp_losses.callbacks.gradient_flow import GradientFlowCheck
from lightning_ddp_losses.callbacks.loss_check import LossCheck
from lightning_ddp_losses.callbacks.optimizer_check import OptimizerCheck
from lightning_ddp_losses.callbacks.parameter_sync import ParameterSyncCheck
from lightning_ddp_losses.core.faults import FAULTS

__all__ = [
    "FAULTS",
    "BatchCheck",
    "BufferSyncCheck",
    "CheckStage",
    "CheckpointCheck",
    "CommunicationMonitor",
    "DDPChecks",
    "DeviceCheck",
    "Finding",
    "GradientFlowCheck",
    "LossCheck",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "RankCheck",
    "odd_ranks",
]
