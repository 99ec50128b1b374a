"""`RankCheck`: the base of all checks, and the callback hooks through which they run.

A check is two pure pieces: ``measure`` on each rank, ``judge`` on the table of all ranks' measurements. Every rank judges the
same table, so every rank comes to the same verdict. All communication is the session's (``session.py``): one gather for
all checks that are due at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.report import Settings, check_actions
from lightning_ddp_losses.callbacks.rows import Measured
from lightning_ddp_losses.callbacks.runner import Session
from lightning_ddp_losses.errors import ConfigurationError


class Host(Callback):
    """A callback that brings checks along. The first host of a trainer runs the session for all of them."""

    _session: Session | None = None
    findings: Sequence[Finding] = ()
    """What the session of the latest fit found, each fault once."""

    def bring(self) -> list[RankCheck]:
        """The checks that this callback brings."""
        raise NotImplementedError

    def settings(self) -> Settings | None:
        """What happens with findings; None leaves it to other hosts."""
        return None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the session before the module is wrapped."""
        hosts = [callback for callback in trainer.callbacks if isinstance(callback, Host)]  # type: ignore[attr-defined]
        self._session = None
        if stage == "fit" and hosts[0] is self:
            settings = next((found for host in hosts if (found := host.settings()) is not None), Settings())
            self._session = Session(_merge(hosts), settings, trainer, pl_module)
            self._session.open()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge what every rank starts from."""
        if self._session:
            self._session.train_start()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge the data of the epoch."""
        if self._session:
            self._session.at(Moment.EPOCH_START)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Let the checks see the batch."""
        if self._session:
            self._session.batch_start(batch, batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Judge losses, batches and graphs, unless that happened in the strategy's own frame."""
        if self._session:
            self._session.before_backward(loss)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the checks see the reduced gradients, before clipping."""
        if self._session:
            self._session.before_step(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge gradients, optimizers and parameters after a step."""
        if self._session:
            self._session.batch_end()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge what validation will see."""
        if self._session and not trainer.sanity_checking:
            self._session.at(Moment.VALIDATION_START)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge metrics before they are computed."""
        if self._session and not trainer.sanity_checking:
            self._session.at(Moment.VALIDATION_EPOCH_END)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge metrics before they are computed."""
        if self._session:
            self._session.at(Moment.TRAIN_EPOCH_END)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge what validation gave."""
        if self._session and not trainer.sanity_checking:
            self._session.at(Moment.VALIDATION_END)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Judge what is saved, unless a rank that failed saves alone."""
        if self._session and trainer.state.status != TrainerStatus.INTERRUPTED:
            self._session.checkpoint = checkpoint
            self._session.at(Moment.SAVE)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Judge what was loaded."""
        if self._session:
            self._session.checkpoint = checkpoint
            self._session.at(Moment.LOAD)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Judge what training leaves, and sum up."""
        if self._session:
            self._session.train_end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the other ranks, or learn which of them failed first. (Lightning calls no ``teardown`` after an error.)"""
        if self._session:
            try:
                self._session.failed(exception)
            finally:
                self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._end()

    def _end(self) -> None:
        if self._session:
            self.findings = self._session.report.findings
            self._session.close()
        self._session = None


class RankCheck(Host):
    """Base class of the checks: subclass it, say when it runs, and write ``measure`` and ``judge``.

    A check is a Lightning callback of its own (``Trainer(callbacks=[ParameterSyncCheck()])``) or one of those in ``DDPChecks``;
    either way all checks of a trainer share one gather.

    Args:
        every_n_steps: How often it runs at the two moments of a step.
        action: What happens with its findings by severity, where that differs from ``DDPChecks``
            (``{"error": "warn"}``; ``raise``, ``warn`` or ``log``).

    Attributes:
        moments: When it measures and judges.
        faults: Ids of the faults that it covers.
        needs_peers: Whether it has nothing to say in a world of one.

    Communication: none by itself; its row rides in the shared gather.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import RankCheck
        >>> from lightning_ddp_losses.callbacks import Finding, Moment, odd_ranks
        >>> class EpochCheck(RankCheck):
        ...     moments = (Moment.AFTER_STEP,)
        ...     faults = ("F36",)
        ...     def measure(self, trainer, module, moment):
        ...         return torch.tensor([trainer.current_epoch])
        ...     def judge(self, table, trainer, module, moment):
        ...         epochs = table[:, 0].tolist()
        ...         if len(set(epochs)) == 1:
        ...             return []
        ...         return [Finding("F36", "epoch", "equal on all ranks", odd_ranks(epochs), values=tuple(epochs))]
    """

    moments: ClassVar[tuple[Moment, ...]] = ()
    faults: ClassVar[tuple[str, ...]] = ()
    needs_peers: ClassVar[bool] = True

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            title = f"{type(self).__name__}: every_n_steps"
            raise ConfigurationError(title, expected="a positive integer", got=repr(every_n_steps))
        self.every_n_steps = every_n_steps
        self.action = check_actions(action, type(self).__name__)

    # ------------------------------------------------------------------ what a check writes

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> Measured:
        """This rank's row, without communication: a 1-D tensor of int64, float64 or uint8, or a list of ints or floats."""
        raise NotImplementedError

    def judge(self, table: Any, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[Finding]:
        """What the rows of all ranks amount to: a tensor (W, n), or a list of lists where ``measure`` gives lists.

        Decide from the table: it is all that every rank knows.
        """
        raise NotImplementedError

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """What this rank can add to a new finding, as a text for ``explain``; None: nothing."""
        return None

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """The finding, made richer (or divided into several) by the texts of all ranks."""
        return [finding]

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """This rank's tensor that a new finding is about; its largest difference between ranks will be told."""
        return None

    # ------------------------------------------------------------------ what a check may look at, without communication

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Training starts; forget an earlier fit."""

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """A training batch, on the device."""

    def rehearse(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Before the first step, on all ranks together: may communicate, must come to the same findings everywhere."""
        return []

    def see_loss(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """The loss before each backward, those of accumulation steps too."""

    def see_gradients(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Reduced and unscaled gradients, before the module's own hook and before clipping."""

    def see_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Right after a step that was made: gradients are those that the optimizer used."""

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """The fit is over, also after an error."""

    def figures(self) -> dict[str, float]:
        """Figures for the logger and the summary, by name."""
        return {}

    def remarks(self) -> list[str]:
        """Lines for the summary."""
        return []

    # ------------------------------------------------------------------

    @property
    def title(self) -> str:
        """Its class, for messages."""
        return type(self).__name__

    @property
    def session(self) -> Session:
        """The session that it runs in."""
        assert self._joined is not None
        return self._joined

    _joined: Session | None = None

    def join(self, session: Session | None) -> None:
        """Become part of a session, or leave it."""
        self._joined = session

    def options(self) -> dict[str, object]:
        """What must be equal on all ranks: its plain attributes."""
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        return {k: v for k, v in vars(self).items() if not k.startswith("_") and isinstance(v, plain)}

    def bring(self) -> list[RankCheck]:
        """Itself."""
        return [self]


def _merge(hosts: list[Host]) -> list[RankCheck]:
    """All checks, each class once: one that is registered by itself replaces that of ``DDPChecks``."""
    brought = [check for host in hosts for check in host.bring()]
    alone = {type(check) for check in hosts if isinstance(check, RankCheck)}
    checks = [c for c in brought if c in hosts or type(c) not in alone]
    return sorted(checks, key=lambda check: check.title)
