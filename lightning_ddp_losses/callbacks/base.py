"""The base class of all checks, and `DDPChecks`, which runs several of them.

A check reads facts on each rank, and a pure rule judges the columns of all ranks. Every rank judges the same columns, so every rank has
the same findings. The runner (``runner.py``) does all communication: one gather for all checks that are due at one stage.
"""

# annotations are not postponed in this file, because constructors of checks in other modules inherit them and LightningCLI reads them
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from lightning_ddp_losses.callbacks.check import Check
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.report import Action, Settings, validated_actions
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.errors import expect, expect_count, format_error

_IN_VALIDATION = {
    *(CheckStage.VALIDATION_START, CheckStage.VALIDATION_EPOCH_END),
    *(CheckStage.VALIDATION_LOGGED, CheckStage.VALIDATION_END),
}


class CheckCallback(Callback):
    """A callback that contains checks. The first such callback of a trainer runs the checks of all of them."""

    _own_runner: CheckRunner | None = None
    findings: Sequence[Finding] = ()
    """Findings of the latest fit, ``trainer.validate`` or ``trainer.test``, each fault once."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the runner before the module is wrapped, as a callback of the trainer until the fit or validation ends."""
        given: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks = [*dict.fromkeys(callback for callback in given if isinstance(callback, CheckCallback))]
        # one runner serves all callbacks. If the user passes the same callback twice, Lightning calls this method twice
        if stage not in ("fit", "validate", "test") or callbacks[0] is not self or self._own_runner in given:
            return
        # use the settings of the first callback that has any
        settings = next((callback for callback in callbacks if isinstance(callback, Settings)), Settings())
        checks = _all_checks(callbacks)
        if stage != "fit":
            checks = [check for check in checks if not _IN_VALIDATION.isdisjoint(check.stages)]
        self._own_runner = CheckRunner(checks, settings, trainer, pl_module)
        given.insert(given.index(self) + 1, self._own_runner)
        self._own_runner.open()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report the error to the other ranks, or raise the error of the first rank that failed.

        Lightning does not call ``teardown`` after an error, so the runner is closed in this method.
        """
        if self._own_runner:
            try:
                self._own_runner.fail(exception)
            finally:  # also if a peer's failure replaces this exception
                self._close(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop the runner."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        if self._own_runner:
            self.findings = self._own_runner.row_exchange.report.findings
            self._own_runner.close()
            # the runner follows this callback in the list that Lightning iterates over, so removing it does not skip another callback
            trainer.callbacks.remove(self._own_runner)  # type: ignore[attr-defined]
        self._own_runner = None


@dataclass(kw_only=True, eq=False, repr=False)
class RankCheck(Check, CheckCallback):
    """Base class of the checks: subclass it, set its stages, and write ``measure`` and ``judge``.

    A check needs a Trainer, which calls it at its stages. A training loop without a Trainer uses ``parity`` to compare its ranks with one
    process.

    Pass a check to the trainer as a callback (``Trainer(callbacks=[ParameterSyncCheck()])``), or to ``DDPChecks``. In both cases all checks
    of a trainer share one gather. The options of a subclass are the fields of a dataclass like this one.

    Args:
        every_n_steps: Period of the check at the two stages of a step.
        action: Actions for its findings by severity, if they differ from ``DDPChecks``
            (``{"error": "warn"}``; ``raise``, ``warn`` or ``log``).

    Attributes:
        stages: Stages at which the check measures and judges.
        faults: Ids of the faults that the check covers.
        needs_peers: True if the check does not run in a world of one.
        runner: Runner of the fit.

    Communication: no separate communication. The row is sent in the shared gather.

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

    every_n_steps: int = 1
    action: Action = None
    runner: CheckRunner = field(init=False)

    def __init_subclass__(cls, *, default: bool = False, **kwargs: Any) -> None:
        """Register a subclass. With ``default=True``, ``DDPChecks()`` runs it."""
        super().__init_subclass__(**kwargs)
        if "facts" in vars(cls):
            cls.stages = tuple(dict.fromkeys(chain.from_iterable(fact.stages for fact in cls.facts)))
        if default:
            DEFAULT_CHECKS.append(cls)

    def __post_init__(self) -> None:
        expect_count(f"{self.title}: every_n_steps", self.every_n_steps)
        self.action = validated_actions(self.action, self.title)
        self._forget()


DEFAULT_CHECKS: list[type[RankCheck]] = []
"""Checks of ``DDPChecks()``: the classes with ``default=True``. Each of them works without arguments."""


@dataclass(eq=False, repr=False)
class DDPChecks(CheckCallback, Settings):
    """Finds faults between ranks on the step where they happen, on all ranks, by name.

    Args:
        checks: Checks to run. If None, all checks run with their defaults. Checks that are registered as separate callbacks also run, and
            replace the default of their class.
        action: Action for a finding: one word for errors and warnings (``"warn"``), or one for each severity. Default
            ``{"error": "raise", "warning": "warn", "note": "log"}``. Findings with the same cause are reported in one warning, with the
            most informative one first. In the other findings, ``follows`` contains its fault. Findings after which ranks would wait
            for each other are always raised: F32, F35 and F37 before backward, F46, F51 and F52 before the end of an epoch.
        file: Write each new finding to ``ddp_checks.jsonl`` in the run's folder (rank 0), each fit to a separate file. Without a logger the
            folder is ``ddp_checks`` in the trainer's ``default_root_dir``.
        summary: Print a table at the end of the fit.
        log_figures: Send the measurements of the checks (collectives, rows, losses, memory) to the loggers too, not only the counts.
        stall_seconds: Report the position of every rank if a rank does not make progress for longer than this.

    It also runs in ``trainer.validate`` and ``trainer.test``, with the checks that have stages of validation.

    Communication: at start one handshake and one gather. Then at most two gathers in a checked step, one of them in the strategy's
        handshake under ``"ddp_losses"``. None in a world of one.

    Raises:
        DDPLossError: on every rank, for findings with the action ``raise``, which are listed in its ``findings``.
        ConfigurationError: on every rank, when ranks run different checks.
        Any other error: if a step fails on some rank, pending rows of the previous step are judged first. Their findings precede the text
            of the error and are added to its ``findings``. If ranks do not send their rows within 10 s, the error lists them: "the last
            step was not judged". (For errors such as ``OSError``, whose text is built from other attributes, findings are added as notes.)

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_ddp_losses import DDPChecks
        >>> trainer = Trainer(callbacks=[DDPChecks()], accelerator="cpu", devices=2)
    """

    checks: Sequence[RankCheck] | None = None
    log_figures: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checks is None:
            self.checks = [check() for check in DEFAULT_CHECKS]
        wrong = [type(check).__name__ for check in self.checks if not isinstance(check, RankCheck)]
        expect(
            not wrong,
            "DDPChecks: checks",
            expected="instances of RankCheck",
            got=", ".join(wrong),
            fix="Pass objects: DDPChecks(checks=[MyCheck()]).",
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the runner. Warn if the trainer has several ``DDPChecks``."""
        together = [callback for callback in trainer.callbacks if isinstance(callback, DDPChecks)]  # type: ignore[attr-defined]
        if stage == "fit" and len(together) > 1 and together[0] is self:
            fix = "Keep one, which may hold any checks: DDPChecks(checks=[...]). Until then the first one decides on "
            fix += "findings, and a check that several hold runs once, with the options of the first."
            what = "DDPChecks in Trainer(callbacks=[...])"
            rank_zero_warn(format_error(what, expected="one", got=len(together), fix=fix))
        super().setup(trainer, pl_module, stage)


def _all_checks(callbacks: Sequence[CheckCallback]) -> list[RankCheck]:
    """Collect the checks, each class once.

    A separately registered check replaces the check of the same class in ``DDPChecks``. A second ``DDPChecks`` only adds checks that the
    first one does not contain.
    """
    taken = {type(callback) for callback in callbacks}
    checks: list[RankCheck] = []
    for callback in callbacks:
        added: list[RankCheck] = [callback] if isinstance(callback, RankCheck) else []
        if isinstance(callback, DDPChecks):
            added = [check for check in callback.checks or () if type(check) not in taken]
        checks += added
        taken.update(map(type, added))
    return sorted(checks, key=lambda check: check.title)
