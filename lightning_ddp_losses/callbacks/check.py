"""The methods of a check: methods that a subclass implements, observers of a fit, and methods for the runner.

The base class of all checks is `base.RankCheck`, which is also a callback. Checks of this package list their facts (``facts``). Checks of
users may measure and judge rows instead (``facts.user_rows``).
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
        facts: Numbers that the check compares, each with its stage and rule. A check of a user may have ``measure`` and ``judge`` instead.
        stages: Stages at which the check measures and judges.
        faults: Ids of the faults that the check covers.
        needs_peers: True if the check does not run in a world of one.
        shares: Pairs of an attribute and the function that creates its object, which all checks share (``CheckRunner.shared``). The
            object's observations are called before the observations of checks.
    """

    facts: ClassVar[tuple[Fact, ...]] = ()
    stages: ClassVar[tuple[CheckStage, ...]] = ()
    faults: ClassVar[tuple[str, ...]] = ()
    needs_peers: ClassVar[bool] = True
    shares: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]] = ()
    every_n_steps: int
    action: Any  # actions by severity
    _found: list[Finding]  # findings that this rank has added since ``measure`` was called

    # ------------------------------------------------------------------ written by a check

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return this rank's row, without communication: a 1-D tensor of int64, float64 or uint8, or a list of ints or floats.

        It may also return a function that returns such a row. The function is called when the row is sent. After a step that is one step
        later, when copies of numbers from a device (``host_copy.HostNumbers``) have been completed.
        """
        raise NotImplementedError

    def judge(self, table: Any, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Return the findings in the rows of all ranks: a tensor (W, n), or a list of lists if ``measure`` returns lists.

        The result must depend only on the table, which is equal on all ranks.
        """
        return []

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's text about a new finding, or another JSON value, to be passed to ``explain``. None if there is no text."""
        return None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Return the finding with details from the texts of all ranks, or other findings of the same check and stage."""
        return [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return this rank's tensor for a new finding, to which its largest difference between ranks is added."""
        return None

    def add(self, fault: str, case: str = "check", *, name: str, **fields: Any) -> None:
        """Add a finding of this rank during ``measure``, with the arguments of ``Finding.of``. All ranks report it."""
        self._found.append(Finding.of(fault, case, name=name, **fields))

    # ------------------------------------------------------------------ observations of a check, without communication

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare for a fit. Called when training starts."""

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Read a training batch on the device."""

    def dry_run(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Run the module on the first batch before its step. Collective.

        This is the only method in which a check may communicate. It must return the same findings on every rank.
        """
        return []

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Read the loss before each backward, including accumulation steps."""

    def see_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Read gradients immediately after each backward, including accumulation steps, before the module's own hook."""

    def see_gradients(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Read reduced and unscaled gradients, before the module's own hook and before clipping."""

    def see_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Read the module immediately after a step, with the gradients that the optimizer used."""

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Read the module after a batch of training or validation (``trainer.validating``), before the module's own hook."""

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove hooks and drop references at the end of a fit, possibly after an error. It may be called twice."""

    def figures(self) -> dict[str, float]:
        """Return figures for the logger and the summary, by name."""
        return {}

    def remarks(self) -> list[str]:
        """Return lines for the summary."""
        return []

    # ------------------------------------------------------------------ for the runner

    @property
    def title(self) -> str:
        """The name of the class, used in messages."""
        return type(self).__name__

    @property
    def is_built_in(self) -> bool:
        """Whether the check belongs to this package. Such a check is switched off when it fails, whereas a user's check raises."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def join(self, runner: Any) -> None:
        """Join a run with a new state, or leave the run if ``runner`` is None."""
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
        """Return the options that must be equal on all ranks, which are the plain public attributes."""
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        own = vars(self).items()
        return {name: value for name, value in own if not name.startswith("_") and isinstance(value, plain)}
