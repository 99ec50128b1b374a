"""`GradientFlowCheck`: the gradients that the optimizer used are present, finite, not zero, and equal on all ranks.

Before backward it finds the parameters that the loss does not reach. DDP waits for the gradient of each parameter, so a rank without such a
gradient blocks the other ranks. After the step it reads the gradients that the optimizer used, after the module's hooks and after
clipping, but not in a step that only accumulates. They are judged in the next step. Before the first step it compares gradients with
derivatives (``gradient_scale.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

# a module's gradient is reported as zero if it is zero in both of these steps. A head that is initialised with zeros is not a fault
_FIRST_ZERO_STEP = 0
_ZERO_STEPS = (_FIRST_ZERO_STEP, 3)


@dataclass(kw_only=True, eq=False, repr=False)
class GradientFlowCheck(RankCheck, default=True):
    """Checks that gradients are present, finite, not zero for whole modules, and equal on all ranks.

    Gradients of a step are judged in the next step, before a checkpoint is saved and at the end of training (``runner``), so that the check
    does not wait for a device. The finding names the step of its gradients. Parameters that a loss does not reach are judged before its
    backward, which would hang.

    Covers F02, F05-F11, F13 (a gradient that was not reduced, and why), F20, F21, F23, F24 and F27 (gradients off by W or 1/W),
    F32 and F37 (a parameter that some ranks' losses do not reach, found before backward would hang), F38 (a parameter that no
    rank's loss reaches while DDP waits for it), F79 (a gradient that is not finite).

    Args:
        parts: Number of parts. Each step reads one part, 1/``parts`` of the bytes. A small model has fewer parts.
        full_every_n_steps: Number of steps between passes over all gradients. The first and fourth steps also read all gradients.
        probe_scale: If True, compare gradients with derivatives before the first step (``gradient_scale.py``). This runs a forward and a
            backward, and two forwards for each child of the module, in float64 on a copy.
        every_n_steps: Same as in ``RankCheck``.
        action: Same as in ``RankCheck``.

    Communication: 8 bytes in the gather before backward, and 48 bytes in the gather after the step.

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
    shares = (("_snapshot", ddp_state.DDPSnapshot),)
    _snapshot: ddp_state.DDPSnapshot = field(init=False)

    parts: int = 32
    full_every_n_steps: int = 500
    probe_scale: bool = True

    def _forget(self) -> None:
        self._unused = UnusedParameterFinder()
        self._missing: list[str] = []
        self._loss: Tensor | None = None
        self._slices = replicas.RotatingSlices(self.parts)
        # the gradients of the current step, and of the step that was judged last
        self._gradients = StepGradients()
        self._judged = StepGradients()
        # gradients of parts that are stored only on this rank are checked for values that are not finite
        self._part_slices = replicas.RotatingSlices(self.parts)
        self._zero_modules: set[str] = set()

    # ------------------------------------------------------------------ observe

    def dry_run(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Compare gradients with derivatives."""
        # a module that fully_shard divides cannot be run as a copy
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
        """Read the gradients of this step's slices, for the parameters of these optimizers. ``place`` is a constant of `ddp_state`."""
        step, trainer = self.runner.step, self.runner.trainer
        if step % self.every_n_steps:
            return
        parameters = all_parameters = self.runner.parameters.current()
        if len(trainer.optimizers) > len(optimizers):  # only the parameters that these optimizers step
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
        # the snapshot stores them, to find out later where a difference first occurred. Optimizers and backwards of one batch add theirs
        if self.runner.parameters.is_replicated:
            self._snapshot.gradients.setdefault(place, {}).update(started)

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
        self._gradients, self._judged, self._loss = StepGradients(), StepGradients(), None

    # ------------------------------------------------------------------ facts

    def _read_graph(self) -> Numbers:
        """Return a hash of the unreached parameters."""
        return {"missing": hash_lines(self._missing)}

    def _read_step(self) -> Callable[[], Numbers]:
        """Return the numbers of the gradients since the last step.

        ``stepped`` is the number of optimizers that made a step, ``absent`` a hash of the names of parameters without a gradient,
        ``expected`` the number of absent gradients that DDP waits for, ``values`` one fingerprint of the slices of this step,
        ``not_finite`` the number of gradients that are not finite, and ``detached`` the number of modules with only zero gradients.
        """
        gradients, self._gradients = self._gradients, StepGradients()
        gradients.send_(self._loss)
        if self.runner.steps in _ZERO_STEPS:
            gradients.zero_step = self.runner.steps
        waited_for = self._snapshot.expected_parameters() if gradients.absent else {}
        expected = sum(name in waited_for for name in gradients.absent)
        # the compared gradients have already been read, so the state reads no further ones
        gradients.state = ddp_state.StepState(
            self.runner, self._snapshot, self.runner.parameters.current(), compared=[]
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
        """Return the modules whose gradients are all zero, both in the first and in the fourth step."""
        # children of the module whose largest gradient element is zero
        sizes: dict[str, list[float]] = {}
        for name, size in gradients.sizes():
            sizes.setdefault(name.split(".")[0], []).append(size)
        zero = {owner for owner, of_owner in sizes.items() if not any(of_owner)}
        if gradients.loss_is_zero(without=True):  # a zero loss is a separate fault
            zero = set()
        # zero in the first step may result from the initialisation. Zero in both steps is a fault
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
        """Return names, or the state of the step if gradients differ."""
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
        """Add the names of parameters, and the reasons."""
        return _explain_differences(finding, texts) if finding.name == "gradients" else [_named(finding, texts)]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the gradient, or None if the finding is about an earlier step."""
        if finding.step != self.runner.step:
            return None
        parameter = self.runner.parameters.current().get(finding.name)
        if parameter is None or finding.fault == "F79":
            return None
        return parameter.grad


def _stepped_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the ids of the parameters that optimizers step."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _named(finding: Finding, states: Sequence[Mapping[str, Any]]) -> Finding:
    """Add the names of the parameters to a finding."""
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
    # if parameters are missing on some ranks, the loss of these ranks is zero, or they executed a different branch
    has_zero_loss = all(states[rank]["zero_loss"] for rank in ranks)
    values = tuple(f"{len(state['names'])} of {len(names)} without" for state in states)
    return Finding.of("F32" if has_zero_loss else finding.fault, ranks=some_ranks, values=values, **shown)


def _kind_of_absent(module: LightningModule, trainer: Trainer, names: Sequence[str]) -> tuple[str, str]:
    """Return the case of F38 for parameters without a gradient, and the path of the copy that contains them, or an empty path."""
    absent = set(names)
    # a copy that averages parameters, or that is not in any optimizer
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
    """Return a finding with its cause for each gradient that differs."""
    columns = ddp_state.differing_gradients(states)
    found = []
    for name, column in columns.items():
        difference = replace(finding, what=f"gradient of `{name}`", name=name, ranks=odd_ranks(column))
        found.append(ddp_state.explain_gradient(difference, states, columns))
    found.sort(key=lambda each: each.fault in ("F13", "SYNC"))  # causes before effects
    return found[:MOST_NAMES] or [finding]


# ---------------------------------------------------------------------- the gradients of one step


class StepGradients:
    """Stores fingerprints and largest elements of the gradients of one step, and the names of absent gradients.

    Attributes:
        absent: Names of trainable parameters without a gradient.
        started: Fingerprints of the gradients, on the device that computes them.
        values: The same fingerprints, being copied to the host.
        zero_step: Number of the step, if the check looks for modules with only zeros.
        state: Further data about the step that may explain a difference.
    """

    zero_step: int | None = None
    state: ddp_state.StepState | None = None

    def __init__(self) -> None:
        self.absent: list[str] = []
        self.started: ddp_state.StartedGradients = {}
        # names and largest elements of slices of gradients, and of parts that are stored only on this rank
        self._sizes: list[tuple[str, float | Tensor]] = []
        self._part_sizes: list[tuple[str, float | Tensor]] = []
        # copies to the host, which send_ starts
        self.values = self._sent_sizes = self._sent_loss = HostNumbers([])

    def add(self, slices: Sequence[replicas.TensorSlice], parameters: Mapping[str, Tensor], *, largest: bool) -> None:
        """Add slices of the parameters' gradients. If ``largest`` is False, only record whether they are finite."""
        self.absent += [name for name, p in parameters.items() if p.requires_grad and p.grad is None]
        for each, piece in replicas.dense_gradients(slices, parameters):
            self.started.setdefault(each.name, []).append(start_fingerprint(piece))
            self._sizes.append((each.name, _size_of(piece, largest=largest)))

    def add_part(self, name: str, piece: Tensor) -> None:
        """Add a slice of the gradient of a part of a parameter, to record whether it is finite."""
        self._part_sizes.append((name, _size_of(piece, largest=False)))

    def send_(self, loss: Tensor | None) -> None:
        """Start the copies to the host, including the copy of the last loss. No gradients are added after this call."""
        self.values = HostNumbers([*chain.from_iterable(self.started.values())])
        self._sent_sizes = HostNumbers([size for _, size in [*self._sizes, *self._part_sizes]])
        if loss is not None:
            self._sent_loss = HostNumbers([loss.reshape(())])

    def loss_is_zero(self, *, without: bool = False) -> bool:
        """Return whether the loss before the step was exactly zero. ``without`` is returned for a step without a loss."""
        return all(loss == 0.0 for loss in self._sent_loss.read() or [float(not without)])

    def not_finite(self) -> list[str]:
        """Return the names of the gradients that are not finite."""
        names = [name for name, _ in [*self._sizes, *self._part_sizes]]
        sizes = zip(names, self._sent_sizes.read(), strict=True)
        return list(dict.fromkeys(name for name, size in sizes if not size < math.inf))

    def sizes(self) -> list[tuple[str, float]]:
        """Return the names of slices with the value of ``_size_of`` for their gradient."""
        return [(name, size) for (name, _), size in zip(self._sizes, self._sent_sizes.read(), strict=False)]


def _size_of(piece: Tensor, *, largest: bool) -> float | Tensor:
    """Return the largest magnitude, or NaN if an element is NaN. If not ``largest``, the value only shows if all elements are finite."""
    if not largest and piece.device.type == "cpu":
        # a sum is not finite if one of its elements is not
        total = abs(piece.sum().item())
        if math.isfinite(total):
            return total
    # (torch's infinity norm takes ten times as long; torch 2.13, measured 2026)
    if piece.is_complex():
        piece = torch.view_as_real(piece.resolve_conj())
    found = torch.maximum(piece.amax(), -piece.amin()).double()
    return found if largest or piece.device.type != "cpu" else float(found)
