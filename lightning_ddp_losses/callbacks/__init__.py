"""Checks that find what goes wrong between ranks on the step where it happens, on all ranks, by name.

`DDPChecks` runs them; each is a `RankCheck` in a file of its own. Legend: ``W`` ranks, ``n`` numbers that a check measures.

To add a check:

1. ``callbacks/<name>.py``: subclass `RankCheck`; say ``moments`` (when), ``faults`` (which ids of ``faults.FAULTS``) and whether it
   ``needs_peers``. Look at things in ``start``, ``see_batch``, ``see_loss``, ``see_gradients``, ``see_step``, ``stop``: local, no
   communication, cheap. ``measure`` returns this rank's row: a short 1-D tensor of int64, float64 or uint8, or a list of ints or
   floats, which is faster (rows share frames, which grow with them: keep yours small). ``judge`` gets the table (W, n), a tensor or
   a list of such lists, and returns findings; it decides from the table alone (and
   from what is the same on every rank), so that every rank comes to the same verdict. Rows of unequal length are padded with
   zeros. ``self.session`` has ``step``, ``synchronising``, ``backwards``, ``stepping``, ``checkpoint`` and ``shared``.
2. Where a finding needs more than the row holds, ``describe`` gives a text of this rank, ``explain`` makes findings of all texts, and
   ``tensor`` names the tensor whose largest difference is to be told. They run only when there is a finding, on every rank.
3. ``figures`` returns numbers for the logger and the summary.
4. One line in ``ddp_checks.DEFAULT_CHECKS``, one in the exports, and in ``tests/callbacks/cases.py`` one healthy and one sabotaged row.

What a check raises becomes a finding of that check on all ranks.
"""

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_check import BatchCheck
from lightning_ddp_losses.callbacks.buffers import BufferSyncCheck
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.checkpoint import CheckpointCheck
from lightning_ddp_losses.callbacks.communication import CommunicationMonitor
from lightning_ddp_losses.callbacks.ddp_checks import DDPChecks
from lightning_ddp_losses.callbacks.device import DeviceCheck
from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.gradient_flow import GradientFlowCheck
from lightning_ddp_losses.callbacks.loss_check import LossCheck
from lightning_ddp_losses.callbacks.optimizer_check import OptimizerCheck
from lightning_ddp_losses.callbacks.parameter_sync import ParameterSyncCheck
from lightning_ddp_losses.core.faults import FAULTS

__all__ = [
    "FAULTS",
    "BatchCheck",
    "BufferSyncCheck",
    "CheckpointCheck",
    "CommunicationMonitor",
    "DDPChecks",
    "DeviceCheck",
    "Finding",
    "GradientFlowCheck",
    "LossCheck",
    "Moment",
    "OptimizerCheck",
    "ParameterSyncCheck",
    "RankCheck",
    "odd_ranks",
]
