"""`DDPChecks`: all checks in one callback, with one shared gather at each of the two stages of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_losses.callbacks.base import DEFAULT_CHECKS, CheckCallback, RankCheck
from lightning_ddp_losses.callbacks.report import DEFAULT_ACTION, Settings, validated_actions
from lightning_ddp_losses.errors import ConfigurationError, format_error


class DDPChecks(CheckCallback):
    """Finds what goes wrong between ranks on the step where it happens, on all ranks, by name.

    Args:
        checks: Which checks run; None is all of them, with their defaults. Checks that are registered beside this callback join in,
            and replace the default of their class.
        action: What happens with a finding: one word for errors and warnings (``"warn"``), or one by severity; default
            ``{"error": "raise", "warning": "warn", "note": "log"}``. Findings of one cause give one warning, headed by the one that tells
            most; ``follows`` names that one's fault in the others.
        file: Write each new finding to ``ddp_checks.jsonl`` in the run's folder (rank 0), each fit to a file of its own.
        summary: Print a table at the end of the fit.
        log_figures: Send what the checks measure (collectives, rows, losses, memory) to the loggers too, not only how much was found.
        stall_seconds: Say which rank is where when a rank stands still for longer.

    Communication: at start one handshake and one gather; then at most two gathers in a checked step, one of them in the strategy's own
        handshake under ``"ddp_losses"``. None in a world of one.

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
        action: Mapping[str, str] | str | None = None,
        file: bool = True,
        summary: bool = True,
        log_figures: bool = False,
        stall_seconds: float = 120.0,
    ) -> None:
        if checks is None:
            checks = [check() for check in DEFAULT_CHECKS]
        wrong = [type(check).__name__ for check in checks if not isinstance(check, RankCheck)]
        if wrong:
            raise ConfigurationError("DDPChecks: checks", expected="instances of RankCheck", got=", ".join(wrong))
        self.checks: list[RankCheck] = list(checks)
        actions = DEFAULT_ACTION | validated_actions(action, "DDPChecks")
        self._settings = Settings(
            actions, file=file, summary=summary, log_figures=log_figures, stall_seconds=stall_seconds
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start the runner; say so where a trainer has several of these."""
        together = [callback for callback in trainer.callbacks if isinstance(callback, DDPChecks)]  # type: ignore[attr-defined]
        if stage == "fit" and len(together) > 1 and together[0] is self:
            rank_zero_warn(
                format_error(
                    "DDPChecks in Trainer(callbacks=[...])",
                    expected="one",
                    got=len(together),
                    fix="Keep one, which may hold any checks: DDPChecks(checks=[...]). Until then the first one decides what happens "
                    "with findings, and a check that several hold runs once, with the options of the first.",
                )
            )
        super().setup(trainer, pl_module, stage)

    def checks_to_run(self) -> list[RankCheck]:
        """Return its checks."""
        return self.checks

    def settings(self) -> Settings:
        """Return what happens with findings, for all checks of the trainer."""
        return self._settings
