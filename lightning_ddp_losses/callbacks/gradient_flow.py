"""`GradientFlowCheck`: the gradients that the optimizer used are there, finite, not zero, and equal on all ranks.

Before backward it finds the parameters that the loss does not reach. DDP waits for the gradient of each parameter, so that a rank without
one leaves the others waiting. After the step it reads gradients as the optimizer used them: after the module's hooks, after clipping, never
on a step that only accumulates. They are judged at the next step. Before the first step it compares gradient and derivative
(``gradient_scale.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_ddp_losses.callbacks import ddp_state, replicas
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.facts.fact import Fact, Numbers
from lightning_ddp_losses.callbacks.facts.rules import compare_gradients, compare_graphs
from lightning_ddp_losses.callbacks.findings import MOST_NAMES, CheckStage, Finding, odd_ranks, shown_names
from lightning_ddp_losses.callbacks.gradient_scale import find_wrong_scales
from lightning_ddp_losses.core.autograd_graph import UnusedParameterFinder
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed.fingerprint import combine, hash_lines, start_fingerprint
from lightning_ddp_losses.distributed.shard import local_part

# steps at which a module's gradient must be zero to be called so: a head that starts at zero is no fault
_FIRST_ZERO_STEP = 0
_ZERO_STEPS = (_FIRST_ZERO_STEP, 3)


@dataclass(kw_only=True, eq=False, repr=False)
class GradientFlowCheck(RankCheck, default=True):
    """Gradients are present, finite, not zero for whole modules, and equal on all ranks.

    Gradients of a step are judged at the next one, before a checkpoint is saved and at the end of training (``runner``), so that the check
    does not wait for a device. The finding names the step of its gradients. Parameters that a loss does not reach are judged before its
    backward, which would hang.

    Covers F02, F05-F11, F13 (a gradient that was not reduced, and why), F20, F21, F23, F24 and F27 (gradients off by W or 1/W),
    F32 and F37 (a parameter that some ranks' losses do not reach, before backward would hang), F38 (one that no rank's loss
    reaches while DDP waits for it), F79 (a gradient that is not finite).

    Args:
        parts: Number of parts. Each step reads one of them, 1/``parts`` of the bytes. A small model has fewer parts.
        full_every_n_steps: Period of a pass over all gradients. Such a pass is also at the first and fourth step.
        probe_scale: If True, compare gradient and derivative before the first step (``gradient_scale.py``): a forward and a backward,
            and two forwards for each child of the module, in float64 on a copy.
        every_n_steps: Same as in ``RankCheck``.
        action: Same as in ``RankCheck``.

    Communication: 8 bytes in the gather before backward, 48 in the one after the step.

    Example:
        >>> checks = DDPChecks([GradientFlowCheck(probe_scale=False)])
    """

    faults = (
        # not reduced
        *("F02", "F05", "F06", "F07", "F08", "F09", "F10", "F11", "F13", "SYNC"),
        # off by W or 1/W
        *("F20", "F21", "F23", "F24", "F27"),
        # missing, zero or not finite
        *("F32", "F37", "F38", "F79", "DETACHED"),
    )
    needs_peers = False

    parts: int = 32
    full_every_n_steps: int = 500
    probe_scale: bool = True

    def _forget(self) -> None:
        self._unused = UnusedParameterFinder()
        self._missing: list[str] = []
        self._loss: Tensor | None = None
        self._slices = replicas.RotatingSlices(self.parts)
        # the gradients of the current step, and of the last one that was judged
        self._gradients = StepGradients()
        self._judged = StepGradients()
        # gradients of parts of the model on this rank alone: are they finite?
        self._part_slices = replicas.RotatingSlices(self.parts)
        self._zero_modules: set[str] = set()

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Make the snapshot of DDP's state."""
        self._snapshot = self.runner.shared(ddp_state.DDPSnapshot)

    def dry_run(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Compare gradient and derivative."""
        # a copy of a module that fully_shard divides cannot be tried out
        is_whole = replicas.is_replicated(trainer) and not replicas.divided_parameters(trainer)
        if not self.probe_scale or not is_whole or trainer.global_step:
            return []
        return find_wrong_scales(trainer, module, batch, batch_idx, self.runner.row_exchange)

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Find the parameters that the loss does not reach."""
        self._loss = loss.detach()
        self._missing = []
        if self.runner.synchronising and self.runner.step % self.every_n_steps == 0:
            expected = self._snapshot.expected_parameters()
            if expected:
                self._missing = self._unused.find(loss, expected)

    def see_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Read the gradients that DDP has reduced."""
        if self.runner.synchronising:
            self._see(ddp_state.AFTER_BACKWARD, trainer.optimizers)

    def see_gradients(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Read the gradients that the strategy has reduced, before hooks and clipping."""
        self._see(ddp_state.BEFORE_STEP, [optimizer])

    def see_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Read the gradients that this step used."""
        self._see(ddp_state.OF_STEP, [optimizer])

    def _see(self, place: str, optimizers: Sequence[Optimizer]) -> None:
        """Read the gradients of the slices of this step, at one place on their way to these optimizers."""
        step, trainer = self.runner.step, self.runner.trainer
        if step % self.every_n_steps:
            return
        parameters = all_parameters = self.runner.replicated_parameters()
        if len(trainer.optimizers) > len(optimizers):  # each steps its own parameters
            stepped = _stepped_by(optimizers)
            parameters = {name: p for name, p in parameters.items() if id(p) in stepped}
        if place == ddp_state.AFTER_BACKWARD:
            parameters = self._snapshot.reduced(parameters)
        looks_for_zeros = self.runner.steps in _ZERO_STEPS
        is_full = looks_for_zeros or step % self.full_every_n_steps == 0
        turn = self._slices.turn(all_parameters, step // self.every_n_steps, is_full=is_full)
        slices = [each for each in turn if each.name in parameters]
        started: ddp_state.StartedGradients
        if place == ddp_state.OF_STEP:
            self._gradients.add(slices, parameters, largest=looks_for_zeros)
            if self.runner.parameters.divided:
                self._see_parts(optimizers)
            started = self._gradients.started
        else:
            started = ddp_state.start_gradients(slices, parameters)
        # the snapshot remembers them, to find the place of a difference later
        if self.runner.parameters.is_replicated:
            self._snapshot.see_gradients(place, started)

    def _see_parts(self, optimizers: Sequence[Optimizer]) -> None:
        """Read the gradients of this rank's parts of parameters that ``fully_shard`` divides."""
        names = self.runner.parameters.divided
        stepped = _stepped_by(optimizers)
        parts: dict[str, Tensor] = {}
        for name, parameter in self.runner.module.named_parameters():
            if name in names and id(parameter) in stepped and parameter.grad is not None:
                parts[name] = local_part(parameter.grad)
        for each in self._part_slices.turn(parts, self.runner.step // self.every_n_steps):
            self._gradients.add_part(each.name, each.of(parts[each.name]))

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Drop references to the fit."""
        vars(self).pop("_snapshot", None)
        self._gradients, self._judged, self._loss = StepGradients(), StepGradients(), None

    # ------------------------------------------------------------------ facts

    def _read_graph(self) -> Numbers:
        """Return a hash of the unreached parameters."""
        return {"missing": hash_lines(self._missing)}

    def _read_step(self) -> Callable[[], Numbers]:
        """Return the numbers of the gradients since the last step.

        ``stepped`` is the number of optimizers that made a step, ``absent`` a hash of the names of parameters without a gradient,
        ``expected`` the number of these that DDP waits for, ``values`` one fingerprint of the slices of this step, ``not_finite`` the
        number of gradients that are not finite, and ``detached`` the number of modules with zeros only.
        """
        gradients, self._gradients = self._gradients, StepGradients()
        gradients.send_(self._loss)
        if self.runner.steps in _ZERO_STEPS:
            gradients.zero_step = self.runner.steps
        waited_for = self._snapshot.expected_parameters() if gradients.absent else {}
        expected = sum(name in waited_for for name in gradients.absent)
        # all gradients that are compared have been read
        gradients.state = ddp_state.StepState(
            self.runner, self._snapshot, self.runner.replicated_parameters(), compared=[]
        )
        stepped, compares = self.runner.batch.stepped, self.runner.parameters.is_replicated

        def read() -> Numbers:
            self._judged = gradients  # for the explanation
            return {
                "stepped": stepped,
                "absent": hash_lines(gradients.absent) if compares else 0,
                "expected": expected,
                "values": combine(gradients.values.read()) if compares else 0,
                "not_finite": len(gradients.not_finite()),
                "detached": 0 if gradients.zero_step is None else len(self._detached_modules(gradients)),
            }

        return read

    def _detached_modules(self, gradients: StepGradients) -> list[str]:
        """Return the modules with only zero gradients, at the first step and still at the fourth."""
        # children of the module with zero as the largest element
        sizes: dict[str, list[float]] = {}
        for name, size in gradients.sizes():
            sizes.setdefault(name.split(".")[0], []).append(size)
        zero = {owner for owner, of_owner in sizes.items() if not any(of_owner)}
        if gradients.loss_is_zero(without=True):  # a zero loss is another matter
            zero = set()
        # zero at the first step is a start, zero at both is a fault
        if gradients.zero_step == _FIRST_ZERO_STEP:
            self._zero_modules = zero
            return []
        self._zero_modules &= zero
        return sorted(self._zero_modules)

    facts = (
        Fact("unreached parameters", CheckStage.BEFORE_BACKWARD, _read_graph, compare_graphs, equal=("missing",)),
        Fact(
            *("gradients of a step", CheckStage.AFTER_STEP, _read_step, compare_gradients),
            equal=("stepped", "absent", "values"),
            zero=("expected", "not_finite", "detached"),
        ),
    )

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return names, or for gradients that differ the state of the step."""
        judged = self._judged
        if finding.name == "gradients":
            assert judged.state is not None
            return judged.state.describe()
        if finding.name == "graph":
            is_zero = self._loss is not None and float(self._loss) == 0.0
            return {"names": self._missing, "zero_loss": is_zero}
        names = {"absent": judged.absent, "finite": judged.not_finite(), "zero": sorted(self._zero_modules)}
        kind = _kind_of_absent(module, trainer, judged.absent)
        return {"names": names[finding.name], "zero_loss": judged.loss_is_zero(), "kind": kind}

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name parameters and reasons."""
        return _explain_differences(finding, texts) if finding.name == "gradients" else [_named(finding, texts)]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the gradient itself, unless it is that of a step before."""
        if finding.step != self.runner.step:
            return None
        parameter = self.runner.replicated_parameters().get(finding.name)
        if parameter is None or finding.fault == "F79":
            return None
        return parameter.grad


def _stepped_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the ids of the parameters that optimizers step."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _named(finding: Finding, states: Sequence[Mapping[str, Any]]) -> Finding:
    """Name the parameters of a finding."""
    names = [*dict.fromkeys(name for state in states for name in state["names"])]
    ranks = tuple(rank for rank, state in enumerate(states) if state["names"])
    shown: dict[str, Any] = {"name": ", ".join(names[:MOST_NAMES]), "shown": shown_names(names)}
    if finding.fault == "F79":
        return Finding.of("F79", "gradients", ranks=ranks, **shown)
    some_ranks = ranks if len(ranks) < len(states) else ()
    if finding.fault == "F38":
        case, copied = states[0]["kind"]
        return Finding.of("F38", case, ranks=some_ranks, copy=copied, **shown)
    if finding.fault == "DETACHED":
        return Finding.of(finding.fault, ranks=some_ranks, **shown)
    # parameters that are missing on some ranks: their loss is zero, or they took a different branch
    has_zero_loss = all(states[rank]["zero_loss"] for rank in ranks)
    values = tuple(f"{len(state['names'])} of {len(names)} without" for state in states)
    return Finding.of("F32" if has_zero_loss else finding.fault, ranks=some_ranks, values=values, **shown)


def _kind_of_absent(module: LightningModule, trainer: Trainer, names: Sequence[str]) -> tuple[str, str]:
    """Return the case of F38 for parameters without a gradient, and the path of the copy that they are of, if it is one."""
    absent = set(names)
    # a copy that keeps an average, or that no optimizer has
    copies = [path for path, inner in module.named_modules() if isinstance(inner, AveragedModel)]
    of_copies = [path for path in copies if any(name.startswith(f"{path}.") for name in absent)]
    if of_copies and all(name.startswith(tuple(f"{path}." for path in of_copies)) for name in absent):
        return "copy", f"self.{of_copies[0]}"
    stepped = _stepped_by(trainer.optimizers)
    parameters = {name: parameter for name, parameter in module.named_parameters() if name in absent}
    if parameters and all(id(parameter) not in stepped for parameter in parameters.values()):
        first = next(iter(parameters))
        return "copy", f"self.{first.split('.')[0]}"
    # adapters of a frozen model
    owners = {name.split(".")[0] for name in absent}
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if any(name.split(".")[0] in owners for name in frozen):
        return "beside_frozen", ""
    return "check", ""


def _explain_differences(finding: Finding, states: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Name the gradients that differ, and why."""
    columns = ddp_state.differing_gradients(states)
    found = []
    for name, column in columns.items():
        difference = replace(finding, what=f"gradient of `{name}`", name=name, ranks=odd_ranks(column))
        found.append(ddp_state.explain_gradient(difference, states, columns))
    found.sort(key=lambda each: each.fault in ("F13", "SYNC"))  # causes before effects
    return found[:MOST_NAMES] or [finding]


# ---------------------------------------------------------------------- the gradients of one step


class StepGradients:
    """Keeps fingerprints and largest elements of the gradients of one step, and the names of absent ones.

    Attributes:
        absent: Names of the parameters that train and have no gradient.
        started: Fingerprints of the gradients, on the device that computes them.
        values: The same on their way to the host.
        zero_step: Number of the step, if the check looks for modules with only zeros.
        state: Further knowledge of the step that may explain a difference.
    """

    zero_step: int | None = None
    state: ddp_state.StepState | None = None

    def __init__(self) -> None:
        self.absent: list[str] = []
        self.started: ddp_state.StartedGradients = {}
        # names and sizes of slices of gradients, and of parts on this rank alone
        self._sizes: list[tuple[str, float | Tensor]] = []
        self._part_sizes: list[tuple[str, float | Tensor]] = []
        # on their way to the host
        self.values = self._sent_sizes = self._sent_loss = HostNumbers([])

    def add(self, slices: Sequence[replicas.TensorSlice], parameters: Mapping[str, Tensor], *, largest: bool) -> None:
        """Add these pieces of the parameters' gradients. Without ``largest``, only whether they are finite."""
        self.absent += [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
        for each, piece in replicas.dense_gradients(slices, parameters):
            self.started.setdefault(each.name, []).append(start_fingerprint(piece))
            self._sizes.append((each.name, _size_of(piece, largest=largest)))

    def add_part(self, name: str, piece: Tensor) -> None:
        """Add a piece of the gradient of a part of a parameter: is it finite?"""
        self._part_sizes.append((name, _size_of(piece, largest=False)))

    def send_(self, loss: Tensor | None) -> None:
        """Start the copies to the host, including that of the last loss. No gradients are added after that."""
        self.values = HostNumbers([*chain.from_iterable(self.started.values())])
        self._sent_sizes = HostNumbers([size for _, size in [*self._sizes, *self._part_sizes]])
        if loss is not None:
            self._sent_loss = HostNumbers([loss.reshape(())])

    def loss_is_zero(self, *, without: bool = False) -> bool:
        """Return whether the loss before the step was exactly zero. ``without`` is the answer for a step without a loss."""
        return all(loss == 0.0 for loss in self._sent_loss.read() or [float(not without)])

    def not_finite(self) -> list[str]:
        """Return the names of the gradients that are not finite."""
        names = [name for name, _ in [*self._sizes, *self._part_sizes]]
        sizes = zip(names, self._sent_sizes.read(), strict=True)
        return list(dict.fromkeys(name for name, size in sizes if not size < math.inf))

    def sizes(self) -> list[tuple[str, float]]:
        """Return the names of slices with the largest element of their gradient, or a bound, not finite if an element is not."""
        return [(name, size) for (name, _), size in zip(self._sizes, self._sent_sizes.read(), strict=False)]


def _size_of(piece: Tensor, *, largest: bool) -> float | Tensor:
    """Return the largest magnitude, or NaN if an element is. Without ``largest``, return any finite number if all elements are finite."""
    if not largest and piece.device.type == "cpu":
        # a sum is not finite once one element is not
        total = abs(piece.sum().item())
        if math.isfinite(total):
            return total
    # (torch's infinity norm takes ten times as long; torch 2.13, measured 2026)
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    found = torch.maximum(piece.amax(), -piece.amin()).double()
    return found if largest or piece.device.type != "cpu" else float(found)
