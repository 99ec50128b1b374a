"""The state of DDP when training started, and the reasons for subsequent differences between ranks.

DDP lists parameters once and registers its hooks on those objects. A parameter that is created, replaced, cast or unfrozen later does not
have a hook, and a forward that bypasses the wrapper does not activate the hooks. `DDPSnapshot` stores the parameters that DDP listed. When
ranks differ, each rank sends its `StepState` (gradients, parameters that DDP does not reduce, optimizer settings, scaler). From the states
of all ranks, `explain_gradient` and `explain_desync` find the reason. After a step, this happens one step later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.callbacks.findings import Finding, differing_columns
from lightning_ddp_losses.callbacks.replicas import TensorSlice, dense_gradients
from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.core.autograd_graph import WrappedParameter, event_after_wrap
from lightning_ddp_losses.core.fault_rules import agree_at, fault_of_unreduced, faults_of_optimizers
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed.fingerprint import StartedFingerprint, start_fingerprint

AFTER_BACKWARD, BEFORE_STEP, OF_STEP = "after backward", "before the step", "of the step"
"""Points at which gradients are fingerprinted: after DDP's reduction; before hooks and clipping, when every strategy has reduced them; and
after the step, with the values that the optimizer used."""

_PLAIN = (bool, int, float, str, tuple, list)  # types of an optimizer's settings, besides tensors of one number
_MAX_OTHERS = 4  # largest number of parameters named in addition to the parameter that differs


StartedGradients: TypeAlias = "dict[str, list[StartedFingerprint]]"
"""Fingerprints of slices of gradients, by the name of the parameter."""


def start_gradients(slices: Sequence[TensorSlice], parameters: Mapping[str, Tensor]) -> StartedGradients:
    """Start to compute the fingerprints of slices of the gradients."""
    found: StartedGradients = {}
    for each, piece in dense_gradients(slices, parameters):
        found.setdefault(each.name, []).append(start_fingerprint(piece))
    return found


class DDPSnapshot:
    """Stores the parameters that DDP listed at the start of training. All checks of a fit share one snapshot.

    Attributes:
        forwards: Number of forward passes through DDP since the last batch ended.
        gradients: Fingerprints of the current step's gradients by place, if a check has read them.
    """

    def __init__(self, runner: CheckRunner) -> None:
        self._runner = runner
        self._handle: Any = None
        self._counted: weakref.ref[DistributedDataParallel] | None = None  # an earlier DDP is freed
        self.forwards = 0
        self.gradients: dict[str, StartedGradients] = {}
        # all parameters, and the parameters on which DDP has hooks
        self._known: dict[str, WrappedParameter] = {}
        self._hooked: dict[str, Tensor] = {}

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """List the parameters, after the wrap."""
        self.see_batch_end(trainer, module)
        ignored: Any = () if self.ddp is None else self.ddp.parameters_to_ignore
        for name, parameter in module.named_parameters():
            is_seen = name not in ignored
            self._known[name] = WrappedParameter.of(parameter, is_hooked=is_seen and self.ddp is not None)
            if is_seen and parameter.requires_grad:
                self._hooked[name] = parameter

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP wrapper of the model, or None."""
        model = self._runner.trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    def _count_forward(self, *_: Any) -> None:
        self.forwards += 1

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Reset the counters of a step, also if `DDPLossStrategy` has wrapped the model again because parameters were frozen."""
        ddp = self.ddp
        counted = None if self._counted is None else self._counted()
        if ddp is not counted:
            self.stop(trainer, module)
            self._counted = self._handle = None
            if ddp is not None:
                self._counted = weakref.ref(ddp)
                self._handle = ddp.register_forward_pre_hook(self._count_forward)
        self.forwards = 0
        self.gradients = {}

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def expected_parameters(self) -> dict[str, Tensor]:
        """Return the parameters whose gradients DDP requires in every backward. Empty if a backward may end without some of them."""
        if self.ddp is None or self.ddp.find_unused_parameters or self.ddp.static_graph:
            return {}
        return {name: parameter for name, parameter in self._hooked.items() if parameter.requires_grad}

    def reduced(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters whose gradients DDP reduces. Another reducer reduces the remaining gradients later."""
        if self.ddp is None:
            return {}
        return {name: parameter for name, parameter in parameters.items() if name in self._hooked}

    def unreduced_fault(self, name: str, parameter: Tensor, *, backwards: int, forwards: int) -> str:
        """Return the fault that prevents DDP from reducing this parameter's gradient, judged on this rank. Empty if there is none.

        Args:
            name: Name of the parameter.
            parameter: Parameter at the step.
            backwards: Number of backward passes through Lightning in this step.
            forwards: Number of forward passes through DDP in this step.
        """
        return fault_of_unreduced(
            is_registered=not name.startswith("optimizer "),
            event=event_after_wrap(self._known.get(name), parameter),
            has_backward=backwards > 0,
            has_forward=self.ddp is None or forwards > 0,
            is_automatic=self._runner.module.automatic_optimization,
        )


# ---------------------------------------------------------------------- the state of one rank


class OptimizerSettings:
    """The plain settings of every parameter group. Tensors (a capturable learning rate) are copied to the host asynchronously."""

    def __init__(self, runner: CheckRunner) -> None:
        self._names: list[list[str]] = []  # names of the settings in each group
        values: list[Any] = []
        for optimizer in runner.trainer.optimizers:
            for group in optimizer.param_groups:
                self._names.append([])
                for name, value in group.items():
                    if isinstance(value, Tensor) and value.numel() == 1:
                        values.append(value.reshape(()))
                    elif name != "params" and isinstance(value, _PLAIN):
                        values.append(value)
                    else:
                        continue
                    self._names[-1].append(name)
        self._values = HostNumbers(values)

    def read(self) -> list[dict[str, Any]]:
        """Return the settings of each group. Waits for copies that have not been completed."""
        values = iter(self._values.read())
        return [dict(zip(names, values, strict=False)) for names in self._names]


def send_gradient_scale(trainer: Trainer) -> HostNumbers:
    """Start to copy the factor of the gradient scaler to the host: one number, or an empty result without a scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is None:
        return HostNumbers([])
    # ``get_scale`` would wait for the device. Scaling the number 1 gives the scale on the device
    return HostNumbers([scaler.scale(torch.ones((), device=trainer.strategy.root_device))])


class StepState:
    """Data of this rank about a step that may explain a difference.

    Args:
        runner: Runner of the fit, at the end of the step.
        snapshot: State of DDP that all checks share.
        parameters: Parameters that must be equal on all ranks.
        compared: Slices whose gradients are fingerprinted now, because later steps overwrite them.
    """

    def __init__(
        self,
        runner: CheckRunner,
        snapshot: DDPSnapshot,
        parameters: Mapping[str, Tensor],
        compared: Sequence[TensorSlice],
    ) -> None:
        self._runner, self._snapshot, self._parameters = runner, snapshot, parameters
        # values that the end of the batch resets
        self._forwards, self._backwards, self._stepped = snapshot.forwards, runner.batch.backwards, runner.batch.stepped
        self._is_first = runner.steps == 0
        known = snapshot.gradients.get(OF_STEP, {})
        others = [each for each in compared if each.name not in known]
        self._gradients = snapshot.gradients | {OF_STEP: known | start_gradients(others, parameters)}

    def describe(self) -> dict[str, Any]:
        """Return the state as a JSON value, with the current settings and scale."""
        gradients, seen = self._gradients.items(), {"backwards": self._backwards, "forwards": self._forwards}
        faults = {name: self._snapshot.unreduced_fault(name, p, **seen) for name, p in self._parameters.items()}
        return {
            "gradients": {at: {name: HostNumbers(x).read() for name, x in each.items()} for at, each in gradients},
            "unreduced": {name: fault for name, fault in faults.items() if fault},
            "settings": OptimizerSettings(self._runner).read(),
            "scale": next(iter(send_gradient_scale(self._runner.trainer).read()), None),
            "stepped": self._stepped,
            "clips": bool(self._runner.trainer.gradient_clip_val),
            "static": bool(getattr(self._snapshot.ddp, "static_graph", False)) and self._is_first,
        }


# ---------------------------------------------------------------------- reasons, from the states of all ranks


def _caused_by(
    found: Finding, fault: str, case: str = "desync", *, values: tuple[str, ...] = (), others: str = ""
) -> Finding:
    """Return the finding of a difference, with the fault that caused it.

    Args:
        found: Finding of a difference.
        fault: Id of the fault.
        case: Name of the fault's case in the table of faults.
        values: Values of the ranks that are evidence of the fault.
        others: Parameters that caused the difference, for the text.
    """
    return replace(found, fault=fault, values=values, fix=FAULTS[fault].explain(case, others=others).fix)


def explain_gradient(found: Finding, states: Sequence[Mapping[str, Any]], differing: Iterable[str]) -> Finding:
    """Find the cause of a gradient's difference, given the states of all ranks and the names of all gradients that differ."""
    unreduced: dict[str, str] = {}
    for state in states:
        unreduced |= state["unreduced"]
    # DDP does not reduce this gradient
    if found.name in unreduced:
        return _caused_by(found, unreduced[found.name])
    # DDP does not reduce another gradient, and clipping spreads the difference
    others = [other for other in differing if other in unreduced]
    if others and any(state["clips"] for state in states):
        shown = ", ".join(f"`{other}`" for other in others[:_MAX_OTHERS])
        return _caused_by(found, "F13", "spread", others=shown)
    # the gradient was changed after the reduction, or not reduced
    gradients = [state["gradients"] for state in states]
    before_step = agree_at(gradients, BEFORE_STEP, found.name)
    if before_step:
        return _caused_by(found, "F13", "clipped")
    if agree_at(gradients, AFTER_BACKWARD, found.name):
        return _caused_by(found, "F09", "changed")
    if any(state["static"] for state in states):
        return _caused_by(found, "F11")
    return _caused_by(found, "F09", "unknown" if before_step is None else "not_reduced")


def explain_desync(found: Finding, states: Sequence[Mapping[str, Any]]) -> Finding:
    """Find the cause of a parameter's difference: its gradient was not reduced, or the optimizers differ."""
    if found.fault == "F04":  # at the start
        return _caused_by(found, "F04")
    # a step that some ranks skipped, or scaled differently
    columns = {"steps": [state["stepped"] for state in states], "scale": [state["scale"] for state in states]}
    for name, fault in faults_of_optimizers(columns).items():
        word = "stepped" if name == "steps" else name
        return _caused_by(found, fault, values=tuple(f"{word} {value}" for value in columns[name]))
    # a gradient that was not reduced
    differing = differing_gradients(states)
    if found.name in differing:
        return explain_gradient(found, states, differing)
    # an optimizer with other settings
    settings = differing_settings([state["settings"] for state in states])
    if settings is not None:
        return _caused_by(found, "F17", values=settings[-1])
    return _caused_by(found, "SYNC")


def differing_gradients(states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the gradients used by the optimizer that differ between ranks, with the fingerprints of all ranks."""
    return differing_columns([state["gradients"][OF_STEP] for state in states])


def differing_settings(by_rank: Sequence[list[dict[str, Any]]]) -> tuple[int, list[str], tuple[str, ...]] | None:
    """Return the first parameter group whose settings differ between ranks, the names of these settings, and each rank's values as text.

    Returns None if all groups are equal.
    """
    for number, groups in enumerate(zip(*by_rank, strict=False)):
        keys = list(differing_columns(groups))
        if keys:
            values = tuple(", ".join(f"{key} {group.get(key)}" for key in keys) for group in groups)
            return number, keys, values
    return None
