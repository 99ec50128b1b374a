"""The methods of a check: those that a check writes, its observations of a fit, and those that its runner calls.

The base class of all checks is `base.RankCheck`, which makes a callback of it. Checks of this package list their facts (``facts``).
Checks of users may measure and judge rows instead (``facts.user_rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.facts.fact import Fact
from lightning_ddp_losses.callbacks.facts.user_rows import Row
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding


class Check:
    """Defines the methods of a check.

    Attributes:
        facts: Numbers that it compares, each with its stage and its rule. A check of a user may have ``measure`` and ``judge`` instead.
        stages: Places where it measures and judges.
        faults: Ids of the faults that it covers.
        needs_peers: True if it is left out in a world of one.
        shares: Pairs of an attribute and of what makes the object in it, which all checks share (``CheckRunner.shared``).
    """

    facts: ClassVar[tuple[Fact, ...]] = ()
    stages: ClassVar[tuple[CheckStage, ...]] = ()
    faults: ClassVar[tuple[str, ...]] = ()
    needs_peers: ClassVar[bool] = True
    shares: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()
    every_n_steps: int
    action: Any  # by severity
    _found: list[Finding]  # of this rank alone, since ``measure`` began

    # ------------------------------------------------------------------ written by a check

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return this rank's row, without communication: a 1-D tensor of int64, float64 or uint8, or a list of ints or floats.

        A function that returns such a row is called when the row travels: after a step that is one step later, when numbers that come off
        a device (``host_copy.HostNumbers``) have long arrived.
        """
        raise NotImplementedError

    def judge(self, table: Any, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Return the findings in the rows of all ranks: a tensor (W, n), or a list of lists if ``measure`` returns lists.

        Decide from the table alone. It is the same on every rank.
        """
        return []

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's text about a new finding, or another value that JSON has, for ``explain``. None for nothing."""
        return None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Return the finding with details from the texts of all ranks, or other findings for its check and place."""
        return [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return this rank's tensor for a new finding. Its largest difference between ranks is added to the finding."""
        return None

    def add(self, fault: str, case: str = "check", *, name: str, **fields: Any) -> None:
        """Add a finding that this rank makes by itself in ``measure``, as ``Finding.of`` makes it. All ranks report it."""
        self._found.append(Finding.of(fault, case, name=name, **fields))

    # ------------------------------------------------------------------ observations of a check, without communication

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Forget an earlier fit: training starts."""

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at a training batch, on the device."""

    def dry_run(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Try out the first batch before its step, on all ranks together.

        Only here may a check communicate by itself. It must make the same findings on every rank.
        """
        return []

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Look at the loss before each backward, those of accumulation steps too."""

    def see_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at gradients right after each backward, those of accumulation steps too, before the module's own hook."""

    def see_gradients(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Look at reduced and unscaled gradients, before the module's own hook and before clipping."""

    def see_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the module right after a step: gradients are those that the optimizer used."""

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at the module after a batch of training or validation (``trainer.validating``), before the module's own hook."""

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove hooks and drop references: the fit is over, maybe after an error. It may be called twice."""

    def figures(self) -> dict[str, float]:
        """Return figures for the logger and the summary, by name."""
        return {}

    def remarks(self) -> list[str]:
        """Return lines for the summary."""
        return []

    # ------------------------------------------------------------------ for the runner

    @property
    def title(self) -> str:
        """The name of its class, for messages."""
        return type(self).__name__

    @property
    def is_built_in(self) -> bool:
        """Whether it is a check of this package: such a check is switched off when it fails, but a user's check raises."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def join(self, runner: Any) -> None:
        """Join a run with a fresh state, or leave it."""
        for name in ("runner", *dict(self.shares)):
            vars(self).pop(name, None)
        if runner is None:
            return
        self.runner = runner
        for name, make in self.shares:
            setattr(self, name, runner.shared(make))
        self._forget()

    def _forget(self) -> None:
        """Reset the state of one fit. Called by the constructor and at the start of a fit."""

    def overrides(self, method: str) -> bool:
        """Return whether this check overrides a method with an empty default."""
        return getattr(type(self), method) is not getattr(Check, method)

    def options(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks: its plain attributes."""
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        own = vars(self).items()
        return {name: value for name, value in own if not name.startswith("_") and isinstance(value, plain)}
