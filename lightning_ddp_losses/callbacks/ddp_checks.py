"""`DDPChecks`: all checks in one callback, with one shared gather at each of the two judging points of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_ddp_losses.callbacks.base import Host, RankCheck
from lightning_ddp_losses.callbacks.batch_check import BatchCheck
from lightning_ddp_losses.callbacks.buffers import BufferSyncCheck
from lightning_ddp_losses.callbacks.checkpoint import CheckpointCheck
from lightning_ddp_losses.callbacks.communication import CommunicationMonitor
from lightning_ddp_losses.callbacks.device import DeviceCheck
from lightning_ddp_losses.callbacks.gradient_flow import GradientFlowCheck
from lightning_ddp_losses.callbacks.loss_check import LossCheck
from lightning_ddp_losses.callbacks.optimizer_check import OptimizerCheck
from lightning_ddp_losses.callbacks.parameter_sync import ParameterSyncCheck
from lightning_ddp_losses.callbacks.report import DEFAULT_ACTION, Settings, check_actions
from lightning_ddp_losses.errors import ConfigurationError

DEFAULT_CHECKS: tuple[type[RankCheck], ...] = (
    BatchCheck,
    BufferSyncCheck,
    CheckpointCheck,
    CommunicationMonitor,
    DeviceCheck,
    GradientFlowCheck,
    LossCheck,
    OptimizerCheck,
    ParameterSyncCheck,
)
"""What ``DDPChecks()`` runs: each must work without arguments."""


class DDPChecks(Host):
    """Finds what goes wrong between ranks on the step where it happens, on all ranks, by name.

    Args:
        checks: Which checks run; None is all of them, with their defaults. Checks that are registered beside this callback join in,
            and replace the default of their class.
        action: What happens with a finding by severity; default ``{"error": "raise", "warning": "warn", "note": "log"}``.
        file: Write each new finding to ``ddp_checks.jsonl`` in the log folder (rank 0).
        summary: Print a table at the end of the fit.
        stall_seconds: Say which rank is where when a rank stands still for longer.

    Communication: at start one frame and one gather; then at most two gathers in a checked step, one of them in the strategy's own
        frame under ``"ddp_losses"``. None in a world of one.

    Raises:
        DDPLossError: on every rank, for findings whose action is ``raise``; they are in its ``findings``.
        ConfigurationError: on every rank, when ranks run different checks.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_losses import DDPChecks
        >>> trainer = Trainer(callbacks=[DDPChecks()], accelerator="cpu", devices=2)
    """

    def __init__(
        self,
        checks: Sequence[RankCheck] | None = None,
        *,
        action: Mapping[str, str] | None = None,
        file: bool = True,
        summary: bool = True,
        stall_seconds: float = 120.0,
    ) -> None:
        wrong = [type(c).__name__ for c in checks or () if not isinstance(c, RankCheck)]
        if wrong:
            raise ConfigurationError("DDPChecks: checks", expected="instances of RankCheck", got=", ".join(wrong))
        self.checks: list[RankCheck] = [make() for make in DEFAULT_CHECKS] if checks is None else list(checks)
        actions = DEFAULT_ACTION | check_actions(action, "DDPChecks")
        self._settings = Settings(actions, file=file, summary=summary, stall_seconds=stall_seconds)

    def bring(self) -> list[RankCheck]:
        """Its checks."""
        return self.checks

    def settings(self) -> Settings:
        """What happens with findings, for all checks of the trainer."""
        return self._settings
