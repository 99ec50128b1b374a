"""The base of all checks, and `DDPChecks`, which holds several of them.

A check is two pure pieces: ``measure`` on each rank, ``judge`` on the table of all ranks' measurements. Every rank judges the
same table, so every rank comes to the same findings. All communication is the runner's (``runner.py``): one gather for
all checks that are due at one stage.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, LocalFindings
from lightning_ddp_losses.callbacks.report import DEFAULT_ACTION, Settings, validated_actions
from lightning_ddp_losses.callbacks.row_exchange import Row
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.errors import expect, expect_count, format_error


class CheckCallback(Callback):
    """A callback that holds checks. The first one of a trainer runs the checks of all of them."""

    _own_runner: CheckRunner | None = None
    findings: Sequence[Finding] = ()
    """What the checks of the latest fit found, each fault once."""

    def checks_to_run(self) -> list[RankCheck]:
        """Return the checks that this callback holds."""
        raise NotImplementedError

    def settings(self) -> Settings | None:
        """Return what happens with findings; None leaves it to other callbacks."""
        return None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start the runner before the module is wrapped; it is a callback of the trainer until the fit ends."""
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, CheckCallback)]  # type: ignore[attr-defined]
        # checks are for training, and one runner serves all callbacks
        if stage != "fit" or callbacks[0] is not self:
            return
        settings = Settings()
        for callback in reversed(callbacks):  # the first that says something decides
            settings = callback.settings() or settings
        self._own_runner = CheckRunner(_all_checks(callbacks), settings, trainer, pl_module)
        trainer.callbacks.insert(trainer.callbacks.index(self) + 1, self._own_runner)  # type: ignore[attr-defined]
        self._own_runner.open()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, or learn which of them failed first. (Lightning calls no ``teardown`` after an error.)"""
        if self._own_runner:
            try:
                self._own_runner.fail(exception)
            finally:  # also where a peer's failure takes this exception's place
                self._close(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._close(trainer)

    def _close(self, trainer: pl.Trainer) -> None:
        if self._own_runner:
            self.findings = self._own_runner.report.findings
            self._own_runner.close()
            # it comes later in the list that Lightning is going through, so no other callback is left out
            trainer.callbacks.remove(self._own_runner)  # type: ignore[attr-defined]
        self._own_runner = None


class RankCheck(CheckCallback):
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

    stages: ClassVar[tuple[CheckStage, ...]] = ()
    faults: ClassVar[tuple[str, ...]] = ()
    needs_peers: ClassVar[bool] = True

    def __init_subclass__(cls, *, default: bool = False, **kwargs: Any) -> None:
        """Take in a subclass; one with ``default=True`` is among those that ``DDPChecks()`` runs."""
        super().__init_subclass__(**kwargs)
        if default:
            DEFAULT_CHECKS.append(cls)

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | str | None = None) -> None:
        expect_count(f"{type(self).__name__}: every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps
        self.action = validated_actions(action, type(self).__name__)

    # ------------------------------------------------------------------ what a check writes

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> Row:
        """Return this rank's row, without communication: a 1-D tensor of int64, float64 or uint8, or a list of ints or floats.

        A function that returns such a row is called when the row travels: after a step that is one step later, when numbers that come off
        a device (``host_copy.HostNumbers``) have long arrived.
        """
        raise NotImplementedError

    def judge(self, table: Any, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> list[Finding]:
        """Return what is wrong with the rows of all ranks: a tensor (W, n), or a list of lists where ``measure`` gives lists.

        Decide from the table: it is all that every rank knows.
        """
        raise NotImplementedError

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Return what this rank can add to a new finding, as a text for ``explain``; None: nothing."""
        return None

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Return the finding, made richer (or divided into several) by the texts of all ranks."""
        return [finding]

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """Return this rank's tensor that a new finding is about; its largest difference between ranks is added to the finding."""
        return None

    # ------------------------------------------------------------------ what a check may observe, without communication

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Forget an earlier fit: training starts."""

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at a training batch, on the device."""

    def dry_run(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Try out the first batch before its step, on all ranks together.

        Here alone a check may communicate by itself; it must come to the same findings everywhere.
        """
        return []

    def see_loss(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """Look at the loss before each backward, those of accumulation steps too."""

    def see_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at gradients right after each backward, those of accumulation steps too, before the module's own hook."""

    def see_gradients(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Look at reduced and unscaled gradients, before the module's own hook and before clipping."""

    def see_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Look at what a step left, right after it was made: gradients are those that the optimizer used."""

    def see_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at what a batch of training or validation (``trainer.validating``) has left, before the module's own hook."""

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave nothing behind: the fit is over, also after an error. It may be called twice."""

    def figures(self) -> dict[str, float]:
        """Return figures for the logger and the summary, by name."""
        return {}

    def remarks(self) -> list[str]:
        """Return lines for the summary."""
        return []

    # ------------------------------------------------------------------ for the runner

    _joined: CheckRunner | None = None

    @property
    def title(self) -> str:
        """The name of its class, for messages."""
        return type(self).__name__

    @property
    def runner(self) -> CheckRunner:
        """The runner of the fit."""
        assert self._joined is not None
        return self._joined

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of this package: a fault of its own switches it off, where a user's raises."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def join(self, runner: CheckRunner | None) -> None:
        """Become part of a run, or leave it."""
        self._joined = runner

    def overrides(self, method: str) -> bool:
        """Say whether this check has its own of a method that does nothing by default."""
        return _class_overrides(type(self), method)  # type: ignore[arg-type] # mypy takes a class for unhashable

    def options(self) -> dict[str, object]:
        """Return what must be equal on all ranks: its plain attributes."""
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        return {
            name: value for name, value in vars(self).items() if not name.startswith("_") and isinstance(value, plain)
        }

    def checks_to_run(self) -> list[RankCheck]:
        """Return itself."""
        return [self]


class LocalCheck(RankCheck):
    """A check some of whose findings one rank makes by itself, with ``self.local.add``; it sends ``self.local.row()``.

    Attributes:
        local: The findings of this rank at this stage; empty it before they are looked for anew.
    """

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | str | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.local = LocalFindings(self.faults)

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
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
        action: Mapping[str, str] | str | None = None,
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


@functools.cache
def _class_overrides(cls: type[RankCheck], method: str) -> bool:
    return getattr(cls, method) is not getattr(RankCheck, method)


def _all_checks(callbacks: Sequence[CheckCallback]) -> list[RankCheck]:
    """Collect the checks, each class once.

    One that is registered by itself replaces that of ``DDPChecks``; a second ``DDPChecks`` adds what the first one lacks.
    """
    taken = {type(callback) for callback in callbacks}
    checks: list[RankCheck] = []
    for callback in callbacks:
        added = [check for check in callback.checks_to_run() if check is callback or type(check) not in taken]
        checks += added
        taken.update(map(type, added))
    return sorted(checks, key=lambda check: check.title)
