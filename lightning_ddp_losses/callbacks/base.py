"""The base of all checks, and `DDPChecks`, which holds several of them.

A check is two pure pieces: ``measure`` on each rank, ``judge`` on the table of all ranks' measurements. Every rank judges the
same table, so every rank comes to the same findings. All communication is the runner's (``runner.py``): one gather for
all checks that are due at one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_losses.callbacks.findings import Finding, LocalFindings
from lightning_ddp_losses.callbacks.report import DEFAULT_ACTION, Action, Settings, validated_actions
from lightning_ddp_losses.callbacks.row_exchange import Check
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.errors import expect, expect_count, format_error


class CheckCallback(Callback):
    """A callback that holds checks. The first one of a trainer runs the checks of all of them."""

    _own_runner: CheckRunner | None = None
    _report_settings: Settings | None = None  # what happens with findings; None leaves it to other callbacks
    findings: Sequence[Finding] = ()
    """What the checks of the latest fit found, each fault once."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the runner before the module is wrapped; it is a callback of the trainer until the fit ends."""
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, CheckCallback)]  # type: ignore[attr-defined]
        # checks are for training, and one runner serves all callbacks
        if stage != "fit" or callbacks[0] is not self:
            return
        settings = Settings()
        for callback in reversed(callbacks):  # the first that says something decides
            settings = callback._report_settings or settings
        self._own_runner = CheckRunner(_all_checks(callbacks), settings, trainer, pl_module)
        trainer.callbacks.insert(trainer.callbacks.index(self) + 1, self._own_runner)  # type: ignore[attr-defined]
        self._own_runner.open()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, or learn which of them failed first. (Lightning calls no ``teardown`` after an error.)"""
        if self._own_runner:
            try:
                self._own_runner.fail(exception)
            finally:  # also where a peer's failure takes this exception's place
                self._close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        if self._own_runner:
            self.findings = self._own_runner.report.findings
            self._own_runner.close()
            # it comes later in the list that Lightning is going through, so no other callback is left out
            trainer.callbacks.remove(self._own_runner)  # type: ignore[attr-defined]
        self._own_runner = None


class RankCheck(Check, CheckCallback):
    """Base class of the checks: subclass it, say when it runs, and write ``measure`` and ``judge``.

    A check is a Lightning callback of its own (``Trainer(callbacks=[ParameterSyncCheck()])``) or one of those in ``DDPChecks``;
    either way all checks of a trainer share one gather.

    Args:
        every_n_steps: How often it runs at the two stages of a step.
        action: What happens with its findings by severity, where that differs from ``DDPChecks``
            (``{"error": "warn"}``; ``raise``, ``warn`` or ``log``).

    Attributes:
        stages: When it measures and judges.
        faults: Ids of the faults that it covers.
        needs_peers: Whether it has nothing to say in a world of one.
        runner: While a fit runs, what runs its checks.

    Communication: none by itself; its row travels in the shared gather.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import RankCheck
        >>> from lightning_ddp_losses.callbacks import CheckStage, Finding, odd_ranks
        >>> class EpochCheck(RankCheck):
        ...     stages = (CheckStage.AFTER_STEP,)
        ...     faults = ("F36",)
        ...     def measure(self, trainer, module, stage):
        ...         return torch.tensor([trainer.current_epoch])
        ...     def judge(self, table, trainer, module, stage):
        ...         epochs = table[:, 0].tolist()
        ...         if len(set(epochs)) == 1:
        ...             return []
        ...         return [Finding("F36", "epoch", "equal on all ranks", odd_ranks(epochs), values=tuple(epochs))]
    """

    _joined: CheckRunner | None = None

    def __init_subclass__(cls, *, default: bool = False, **kwargs: Any) -> None:
        """Take in a subclass; one with ``default=True`` is among those that ``DDPChecks()`` runs."""
        super().__init_subclass__(**kwargs)
        if default:
            DEFAULT_CHECKS.append(cls)

    def __init__(self, *, every_n_steps: int = 1, action: Action = None) -> None:
        expect_count(f"{type(self).__name__}: every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.action = validated_actions(action, type(self).__name__)
        self._forget()

    @property
    def runner(self) -> CheckRunner:
        """The runner of the fit."""
        assert self._joined is not None
        return self._joined

    def join(self, runner: CheckRunner | None) -> None:
        """Become part of a run, without what an earlier one has left; or leave it."""
        self._joined = runner
        if runner is not None:
            self._forget()

    def _forget(self) -> None:
        """Set what a check keeps of one fit to its start; called by the constructor and at the start of a fit."""


class LocalCheck(RankCheck):
    """A check some of whose findings one rank makes by itself, with ``self.local.add``; it sends ``self.local.row()``.

    Attributes:
        local: The findings of this rank at this stage; empty it before they are looked for anew.
    """

    def _forget(self) -> None:
        self.local = LocalFindings(self.faults)

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the texts of what this rank found by itself."""
        return self.local.describe(finding)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Bring the texts of all ranks together."""
        return self.local.explain(finding, texts)


DEFAULT_CHECKS: list[type[RankCheck]] = []
"""What ``DDPChecks()`` runs: the classes that say ``default=True``, each of which must work without arguments."""


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
        action: Action = None,
        file: bool = True,
        summary: bool = True,
        log_figures: bool = False,
        stall_seconds: float = 120.0,
    ) -> None:
        if checks is None:
            checks = [check() for check in DEFAULT_CHECKS]
        wrong = [type(check).__name__ for check in checks if not isinstance(check, RankCheck)]
        expect(not wrong, "DDPChecks: checks", expected="instances of RankCheck", got=", ".join(wrong))
        self.checks: list[RankCheck] = list(checks)
        actions = DEFAULT_ACTION | validated_actions(action, "DDPChecks")
        self._report_settings = Settings(actions, file, summary, log_figures, stall_seconds)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the runner; say so where a trainer has several of these."""
        together = [callback for callback in trainer.callbacks if isinstance(callback, DDPChecks)]  # type: ignore[attr-defined]
        if stage == "fit" and len(together) > 1 and together[0] is self:
            fix = "Keep one, which may hold any checks: DDPChecks(checks=[...]). Until then the first one decides what happens "
            fix += "with findings, and a check that several hold runs once, with the options of the first."
            what = "DDPChecks in Trainer(callbacks=[...])"
            rank_zero_warn(format_error(what, expected="one", got=len(together), fix=fix))
        super().setup(trainer, pl_module, stage)


def _all_checks(callbacks: Sequence[CheckCallback]) -> list[RankCheck]:
    """Collect the checks, each class once.

    One that is registered by itself replaces that of ``DDPChecks``; a second ``DDPChecks`` adds what the first one lacks.
    """
    taken = {type(callback) for callback in callbacks}
    checks: list[RankCheck] = []
    for callback in callbacks:
        added: list[RankCheck] = [callback] if isinstance(callback, RankCheck) else []
        if isinstance(callback, DDPChecks):
            added = [check for check in callback.checks if type(check) not in taken]
        checks += added
        taken.update(map(type, added))
    return sorted(checks, key=lambda check: check.title)
