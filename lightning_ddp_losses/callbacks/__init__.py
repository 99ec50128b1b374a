"""Checks that find faults between ranks in the step where they happen, on all ranks, by name.

`DDPChecks` runs them. Each check is a `RankCheck` in a separate file named after its class. Legend: ``W`` ranks, ``n`` numbers in the row
of a check.

=========================  ==========================================================================================================
base                       `RankCheck`, a check as a callback. `DDPChecks`, all checks in one callback
runner                     `CheckRunner`: a fit from start to end, the schedule of checks, one gather at each stage
check                      `Check`, the methods of a check
facts                      `Fact`: numbers that ranks compare, their stage and their rule. All rules. Rows of checks of users
row_exchange               `RowExchange`: facts read, exchanged and judged
findings                   `CheckStage`, `Finding`. Findings of one rank. Findings by their cause
report                     errors, warnings, a file, the logger, a table
batch_check                `BatchCheck`, and the losses that compare samples. batch_reader reads for it
buffer_sync                `BufferSyncCheck`
checkpoint_check           `CheckpointCheck`
communication_monitor      `CommunicationMonitor`
device_check               `DeviceCheck`
gradient_flow              `GradientFlowCheck`. Its dry run before the first step is in gradient_scale
loss_check                 `LossCheck`, and logged values. loss_reader reads the losses of a rank and their graphs
optimizer_check            `OptimizerCheck`
parameter_sync             `ParameterSyncCheck`
replicas                   parameters that must be equal on all ranks, slices of them, and fingerprints of slices
ddp_state                  the state of DDP at the start, and the reasons for differences between ranks since
=========================  ==========================================================================================================

To add a check:

1. ``callbacks/<name>.py``: ``class NameCheck(RankCheck, default=True)``. With ``default=True``, ``DDPChecks()`` runs it. Set its
   ``faults`` (ids of ``FAULTS``), and ``needs_peers``. Its options are fields of a ``dataclass(kw_only=True, eq=False)``. Observe in
   ``start``, ``see_batch``, ``see_loss``, ``see_gradients``, ``see_step``, ``see_batch_end`` and ``stop``: local, no communication, cheap.
   ``self.runner`` has ``step``, ``synchronising``, ``backwards``, ``stepping``, ``checkpoint``, ``shared``, ``before_forward`` and
   ``stop_observing``, for an observation that a check needs in the first steps only.
   Objects that several checks use (the reader of batches) are listed in ``shares``.
2. ``facts``: the numbers that the check reads, the stage, and the rule for them. ``read`` returns this rank's numbers by name. Do not wait
   for numbers on a device: return a function that reads a ``HostNumbers`` when they are sent. All numbers share a handshake, whose size
   grows with them, so return only a few. Define the rule in ``facts/rules.py``. It receives the columns of all ranks by the same names, and
   returns findings. Its result must depend only on the columns, so that every rank has the same findings. It is not called if the columns
   in ``equal`` and ``zero`` imply that it finds nothing. Add evidence of earlier steps as a column in ``see``. Lists may have different
   lengths on different ranks. A check outside this package may define ``stages``, ``measure`` and ``judge`` instead, which use a row of
   numbers and the table of all rows (``facts/user_rows.py``).
3. Facts after a step are judged in the next step, except for the first facts, which are judged immediately (``runner``). Nothing is read in
   between, so ``describe`` can use the values that the reader has stored. If a finding needs more than the columns contain, ``describe``
   returns a text of this rank (or another JSON value), ``explain`` returns findings based on all texts, and ``tensor`` returns the tensor
   for the largest difference. They are called only for a finding, on every rank. A fault that a single rank can detect does not require a
   rule: call ``self.add`` while reading.
4. ``figures`` returns numbers for the logger, and ``remarks`` returns lines for the summary.
5. Export the check here, add one row for each rule to ``tests/callbacks/test_rules.py``, and add a faulty and a healthy run to another file
   in that folder. (A check of this package also has a line in ``configs/checks_all.yaml``, and a new fault has a row in ``faults.yaml``.)

An error in a check becomes a finding of that check on all ranks.
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
