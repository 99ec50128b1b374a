"""`OptimizerCheck`: the optimizers contain all trained parameters, with equal settings and equal steps on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.ddp_state import OptimizerSettings, differing_settings, send_gradient_scale
from lightning_ddp_losses.callbacks.facts.fact import Fact, Numbers
from lightning_ddp_losses.callbacks.facts.rules import compare_optimizers
from lightning_ddp_losses.callbacks.findings import MOST_NAMES, CheckStage, Finding, shown_names
from lightning_ddp_losses.callbacks.replicas import is_replicated, optimizer_parameters
from lightning_ddp_losses.core import inputs, lightning_compat
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.core.modules import unregistered_modules
from lightning_ddp_losses.distributed.fingerprint import combine, fingerprints, hash_lines, start_fingerprints


class OptimizerCheck(RankCheck, default=True):
    """Checks that optimizers contain each trained parameter once and that their settings, scales and steps are equal on all ranks.

    Steps must also change parameters. A step is judged in the next step, before a checkpoint is saved and at the end of training
    (``runner``), so that the check does not wait for a device. The finding names the step that it is about.

    Covers F01 (a parameter with a gradient that is not in any optimizer), F02 (an unregistered parameter), F03 (memory shared under
    spawn), F14 (a step that a gradient scaler skipped on some ranks), F15 (gradient scales), F17 (learning rate and other settings,
    restored state), F37 (a step that the program makes on some ranks), and steps without an effect.

    Args:
        every_n_steps: Same as in ``RankCheck``.
        action: Same as in ``RankCheck``.

    Communication: at most 40 bytes in the shared gathers.

    Example:
        >>> checks = DDPChecks([OptimizerCheck(action={"warning": "log"})])
    """

    faults = ("F01", "F02", "F03", "TWICE", "F14", "F15", "F17", "F37", "STEP")
    needs_peers = False

    def _forget(self) -> None:
        self._settings: list[dict[str, Any]] = []  # the settings that were judged last
        self._before: dict[str, int] | None = None  # fingerprints before the first step
        self._steps_seen = 0

    def see_gradients(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Store fingerprints of the parameters before the first step, which should change them."""
        moving = {name: p for name, p in self.runner.parameters.current().items() if _has_gradient(p)}
        self._before = dict(zip(moving, fingerprints(moving.values()), strict=True))
        self.runner.stop_observing(self, "see_gradients")

    # ------------------------------------------------------------------ facts

    def _read_start(self) -> Numbers:
        """Look for parameters that should not be in an optimizer, and return the numbers that must be equal."""
        trainer = self.runner.trainer
        settings, scale = OptimizerSettings(self.runner), send_gradient_scale(trainer)
        self._find_misplaced(trainer, self.runner.module)
        state = self._state(trainer) if is_replicated(trainer) else 0
        return self._numbers(settings, scale, state=state)

    def _read_step(self) -> Callable[[], Numbers]:
        """Look, once, for parameters that are not in any optimizer, and return the numbers of a step."""
        trainer = self.runner.trainer
        settings, scale = OptimizerSettings(self.runner), send_gradient_scale(trainer)
        if self._steps_seen == 0:  # done only once, because reading all gradients waits for the device
            self._find_forgotten(trainer, self.runner.module)
        before, now = list[int](), HostNumbers([])
        if self._steps_seen < 2 and self._is_second_step(trainer) and self._before:
            parameters = self.runner.parameters.current()
            before, now = [*self._before.values()], start_fingerprints(parameters[name] for name in self._before)
        stepped = self.runner.batch.stepped

        def read() -> Numbers:
            stood_still = bool(before) and now.read() == before
            return self._numbers(settings, scale, stepped=stepped, stood_still=stood_still)

        return read

    def _numbers(
        self,
        settings: OptimizerSettings,
        scale: HostNumbers,
        *,
        state: int = 0,
        stepped: int = 0,
        stood_still: bool = False,
    ) -> Numbers:
        """Return the numbers that must be equal, and store the settings for the explanation.

        Args:
            settings: Settings of the optimizers.
            scale: Gradient scale. Empty without a scaler.
            state: Hash of the tensors in the optimizers' states, at the start of training.
            stepped: Number of optimizers that made a step.
            stood_still: True if two steps changed no parameter.
        """
        self._settings = settings.read()
        numbers = {"settings": hash_lines(map(str, self._settings)), "scale": float(sum(scale.read()))}
        return {**numbers, "state": state, "stepped": stepped, "stood_still": stood_still}

    def _is_second_step(self, trainer: Trainer) -> bool:
        """Return whether this is the second step, and the two steps should have changed parameters."""
        if not self.runner.batch.stepped or self._before is None:
            return False
        self._steps_seen += 1
        if self._steps_seen == 1:
            return False
        # if a learning rate is zero, the step is not expected to have an effect
        rates = [group.get("lr", 1.0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return min(map(float, rates), default=1.0) > 0

    def _state(self, trainer: Trainer) -> int:
        """Return a hash of the tensors in the optimizers' states, which are not empty after a restart."""
        replicated = {id(parameter) for parameter in self.runner.parameters.current().values()}
        found: list[int] = []
        for optimizer in trainer.optimizers:
            if "ZeroRedundancy" in type(optimizer).__name__:  # each rank stores a different part
                return 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in replicated:
                        found += fingerprints(_state_tensors(optimizer, parameter))
        return combine(found)

    facts = (
        Fact("optimizers at the start", CheckStage.TRAIN_START, _read_start, compare_optimizers),
        Fact(
            *("optimizers of a step", CheckStage.AFTER_STEP, _read_step, compare_optimizers),
            equal=("settings", "scale", "state", "stepped"),
            zero=("stood_still",),
        ),
    )

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return the settings of this rank."""
        return self._settings if finding.name == "settings" else None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the settings of the first parameter group that differs."""
        found = differing_settings(texts)
        if found is None:
            return [replace(finding, values=tuple(f"{len(groups)} parameter groups" for groups in texts))]
        group, keys, values = found
        name = ", ".join(keys)
        return [replace(finding, what=f"{name} of parameter group {group}", name=name, values=values)]

    # ------------------------------------------------------------------ the parameters of an optimizer

    def _add(self, fault: str, names: Sequence[str]) -> None:
        if names:
            self.add(fault, "optimizer", name=", ".join(names[:MOST_NAMES]), shown=shown_names(names))

    def _find_misplaced(self, trainer: Trainer, module: LightningModule) -> None:
        """Find parameters in optimizers that are unregistered, occur twice, or are in memory that ranks share."""
        names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
        is_spawned = lightning_compat.start_method(trainer.strategy) == "spawn"
        unregistered: dict[str, Tensor] = {}
        in_shared_memory: list[str] = []
        twice: list[str] = []
        seen: set[int] = set()
        for place, parameter in optimizer_parameters(trainer):
            name = names.get(id(parameter), place)
            if id(parameter) not in names:
                unregistered[place] = parameter
            if is_spawned and parameter.is_shared():  # type: ignore[no-untyped-call]
                in_shared_memory.append(name)
            if id(parameter) in seen:
                twice.append(name)
            seen.add(id(parameter))
        # find the paths of unregistered parameters in the user's notation. The search is slow
        paths: dict[int, str] = {}
        if unregistered:
            paths = {id(parameter): path for path, parameter in _hidden_parameters(module)}
        self._add("F02", [paths.get(id(parameter), place) for place, parameter in unregistered.items()])
        self._add("F03", in_shared_memory)
        self._add("TWICE", twice)

    def _find_forgotten(self, trainer: Trainer, module: LightningModule) -> None:
        """Find parameters with a gradient that are not in any optimizer. Copies that are not trained do not have gradients."""
        in_optimizers = {id(parameter) for _, parameter in optimizer_parameters(trainer)}
        named = module.named_parameters()
        self._add("F01", [name for name, p in named if id(p) not in in_optimizers and _has_gradient(p)])


def _has_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter is trainable and has a nonzero gradient."""
    gradient = parameter.grad
    if not parameter.requires_grad or gradient is None:
        return False
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return bool(gradient.count_nonzero())


def _state_tensors(optimizer: Optimizer, parameter: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in an optimizer's state of a parameter, by name."""
    for _, value in sorted(optimizer.state.get(parameter, {}).items()):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            yield value


def _hidden_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of unregistered modules and the tensors in the module's attributes, by path."""
    for path, inner in unregistered_modules(module, {}):
        yield from ((f"{path}.{name}", parameter) for name, parameter in inner.named_parameters())
    for key, value in vars(module).items():
        if not key.startswith("_"):
            yield from inputs.leaves(value, f"self.{key}")
