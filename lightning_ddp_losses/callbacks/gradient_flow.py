"""`GradientFlowCheck`: the gradients that the optimizer used are there, finite, not zero, and equal on all ranks.

Before backward it asks which parameters the loss reaches: DDP waits for each of them, and a rank whose loss does not reach one
leaves the others waiting. After the step it looks at gradients as the optimizer used them: after the module's own hooks, after
clipping, never on a step that only accumulates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks import causes
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.ddp_state import Wrap
from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.gradient_scale import probe
from lightning_ddp_losses.callbacks.gradients import Gradients
from lightning_ddp_losses.callbacks.replicated_parameters import Unit, divide, is_replicated
from lightning_ddp_losses.callbacks.scale_verdict import scale_verdict
from lightning_ddp_losses.core.autograd_graph import UnusedParameterFinder
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_lines

_SHOWN = 6
_ZERO_AT = (0, 3)  # steps at which a module's gradient must be zero to be called so: a zero start is no fault


class GradientFlowCheck(RankCheck):
    """Gradients are present, finite, not zero for whole modules, and equal on all ranks.

    Covers F02, F05-F11, F13 (a gradient that was not reduced, and why), F20, F21, F23, F24 and F27 (gradients off by W or 1/W),
    F32 and F37 (a parameter that some ranks' losses do not reach, before backward would hang), F38 (one that no rank's loss
    reaches while DDP waits for it), F79 (a gradient that is not finite).

    Args:
        parts: Each step looks at one part of the gradients, 1/``parts`` of their bytes; small models have fewer parts.
        full_every_n_steps: A look at all of them that often, and at the first and fourth step.
        probe_scale: Before the first step, compare gradient and derivative (``scale_probe``): a forward and a backward, and two
            forwards for each child of the module, in float64 on a copy.
        every_n_steps: As ``RankCheck``.
        action: As ``RankCheck``.

    Communication: 16 bytes in the gather before backward, 48 in the one after the step.
    """

    moments = (Moment.BEFORE_BACKWARD, Moment.AFTER_STEP)
    faults = (
        "F02",
        "F05",
        "F06",
        "F07",
        "F08",
        "F09",
        "F10",
        "F11",
        "F13",
        "F20",
        "F21",
        "F23",
        "F24",
        "F27",
        "F32",
        "F37",
        "F38",
        "F79",
        "SYNC",
        "DETACHED",
    )
    needs_peers = False

    def __init__(
        self,
        parts: int = 32,
        full_every_n_steps: int = 500,
        probe_scale: bool = True,
        *,
        every_n_steps: int = 1,
        action: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.probe_scale = probe_scale
        self.parts = parts
        self.full_every_n_steps = full_every_n_steps
        self.start_over()

    def start_over(self) -> None:
        """Forget an earlier fit."""
        self._unused = UnusedParameterFinder()
        self._gradients = Gradients()
        self._missing: list[str] = []
        self._loss: Tensor | None = None
        self._divided: list[list[Unit]] = []
        self._parameters: dict[str, Tensor] = {}
        self._zero: set[str] = set()
        self._norm = 0.0

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Remember what DDP knows now."""
        self.start_over()
        self.session.shared(Wrap)

    def rehearse(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Compare gradient and derivative."""
        if not self.probe_scale or not is_replicated(trainer) or trainer.global_step:
            return []
        probed = probe(trainer, module, batch, batch_idx, self.session.meeting)
        return scale_verdict(probed, process_groups.world_size(), module) if probed is not None else []

    def see_loss(self, trainer: pl.Trainer, module: pl.LightningModule, loss: Tensor) -> None:
        """See which parameters it does not reach."""
        self._loss = loss.detach()
        self._missing = []
        if self.session.synchronising and self._is_due():
            awaited = self.session.shared(Wrap).awaited()
            self._missing = self._unused.find(loss, awaited) if awaited else []

    def see_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Look at the gradients that this step used."""
        if not self._is_due():
            return
        parameters = self.session.tracked()
        if len(trainer.optimizers) > 1:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            parameters = {name: p for name, p in parameters.items() if id(p) in own}
        self._gradients.note_absent(parameters)
        self._gradients.look(
            [unit for unit in self._due() if unit.name in parameters], parameters, sizes=self._zero_due
        )

    def _is_due(self) -> bool:
        return self.session.step % self.every_n_steps == 0

    @property
    def _zero_due(self) -> bool:
        return self.session.steps in _ZERO_AT

    @property
    def _full(self) -> bool:
        return self._zero_due or self.session.step % self.full_every_n_steps == 0

    def _due(self) -> list[Unit]:
        parameters = self.session.tracked()
        if parameters is not self._parameters:
            self._parameters, self._divided = parameters, divide(parameters, self.parts)
        if self._full:
            return [unit for part in self._divided for unit in part]
        return self._divided[(self.session.step // self.every_n_steps) % len(self._divided)]

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int]:
        """Who is not reached; or fingerprints, absence, what is not finite and what is zero."""
        if moment == Moment.BEFORE_BACKWARD:
            return [hash_lines(self._missing), len(self._missing)]
        seen = self._seen = self._gradients
        self._gradients = Gradients()
        replicated = is_replicated(trainer)
        awaited = self.session.shared(Wrap).awaited() if seen.absent else {}
        largest = seen.largest()
        self._wild = [name for name, size in largest.items() if not size < float("inf")]
        return [
            len(self.session.stepped),
            hash_lines(seen.absent) if replicated else 0,
            sum(name in awaited for name in seen.absent),
            seen.combined() if replicated else 0,
            len(self._wild),
            len(self._idle(largest)),
        ]

    def _idle(self, largest: Mapping[str, float]) -> list[str]:
        """Modules all of whose gradients are zero at the first step and still at the fourth."""
        if not self._zero_due:
            return []
        owners: dict[str, float] = {}
        for name, size in largest.items():
            owner = name.split(".")[0]
            owners[owner] = max(owners.get(owner, 0.0), size)
        zero = {owner for owner, size in owners.items() if size == 0.0}
        if self._loss is None or float(self._loss) == 0.0:  # a zero loss is another matter
            zero = set()
        self._zero = zero if self.session.steps == _ZERO_AT[0] else self._zero & zero
        return sorted(self._zero) if self.session.steps == _ZERO_AT[-1] else []

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Compare; what to say of it needs the ranks' texts."""
        columns = zip(*table, strict=True)
        if moment == Moment.BEFORE_BACKWARD:
            missing = next(columns)
            if len(set(missing)) == 1:
                return []
            return [Finding("F37", "the loss's graph", ranks=odd_ranks(missing), name="graph")]
        stepped, absent, awaited, values, wild, idle = columns
        if len(set(stepped)) > 1:
            return []  # OptimizerCheck says who skipped a step
        found = []
        if len(set(absent)) > 1:
            found.append(Finding("F37", "missing gradients", ranks=odd_ranks(absent), name="absent"))
        elif awaited[0]:
            found.append(Finding("F38", "missing gradients", name="absent"))
        elif len(set(values)) > 1:
            found.append(Finding("SYNC", "gradients", "equal on all ranks", odd_ranks(values), name="gradients"))
        if any(wild):
            ranks = tuple(rank for rank, number in enumerate(wild) if number)
            found.append(Finding("F79", "gradients that are not finite", ranks=ranks, name="finite"))
        if all(idle):
            found.append(Finding("DETACHED", "modules without gradient", name="zero"))
        return found

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Names, fingerprints and circumstances."""
        zero = self._loss is not None and float(self._loss) == 0.0
        told: dict[str, Any] = {"missing": self._missing, "zero": zero}
        if finding.name == "graph":
            return json.dumps(told)
        told |= {"absent": self._seen.absent, "wild": self._wild, "idle": sorted(self._zero)}
        if finding.name == "gradients":
            told |= {"values": self._seen.values(), **causes.circumstances(self.session, self.session.tracked())}
        return json.dumps(told)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name parameters and reasons."""
        everyone = [json.loads(text) for text in texts]
        key = {"graph": "missing", "absent": "absent", "finite": "wild", "zero": "idle"}.get(finding.name)
        if key is None:
            return self._unreduced(finding, everyone)
        names = list(dict.fromkeys(name for e in everyone for name in e[key]))
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        )
        ranks = tuple(rank for rank, e in enumerate(everyone) if e[key])
        better = replace(finding, name=", ".join(names[:_SHOWN]), ranks=() if len(ranks) == len(everyone) else ranks)
        if finding.name == "finite":
            fix = "Lower the learning rate or clip; LossCheck says on which rank a loss was not finite."
            return [replace(better, what=f"gradient of {shown} is not finite", ranks=ranks, fix=fix)]
        if finding.name == "zero":
            fix = "The loss does not depend on them: look for detach(), .data, numpy() or no_grad() in between."
            return [replace(better, what=f"all gradients of {shown} are zero", fix=fix)]
        if finding.fault == "F38":
            fix = "Use them in every loss (times 0 where they should not count), or find_unused_parameters=True."
            return [replace(better, what=f"{shown} got no gradient, and DDP waits for one", fix=fix)]
        on = [f"{len(e[key])} of {len(names)} without" for e in everyone]
        if all(everyone[rank]["zero"] for rank in ranks):
            fix = (
                "Add 0 * sum(p.sum() for p in loss.parameters()) to a zero loss, or train under strategy='ddp_losses'."
            )
            what = f"{shown} not in the graph of a loss that is exactly zero"
            return [
                replace(
                    better,
                    fault="F32",
                    what=what,
                    expected="the same parameters on every rank",
                    values=tuple(on),
                    fix=fix,
                )
            ]
        fix = "Take the branch on all ranks together, or add the unused outputs times 0."
        what = f"{shown} not in the graph of the loss"
        return [replace(better, what=what, expected="the same parameters on every rank", values=tuple(on), fix=fix)]

    @staticmethod
    def _unreduced(finding: Finding, everyone: list[dict[str, Any]]) -> list[Finding]:
        values = [e["values"] for e in everyone]
        names = [n for n in values[0] if len({json.dumps(v.get(n)) for v in values}) > 1]
        found = []
        for name in names:
            why = causes.why_unreduced(name, everyone, names)
            ranks = odd_ranks([v.get(name) for v in values])
            what = f"gradient of `{name}`"
            found.append(
                replace(finding, fault=why.fault, what=what, name=name, ranks=ranks, values=why.values, fix=why.fix)
            )
        found.sort(key=lambda f: f.fault in ("F13", "SYNC"))  # culprits first
        return found[:_SHOWN] or [finding]

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """The gradient itself."""
        parameter = self.session.tracked().get(finding.name)
        return None if parameter is None or finding.fault == "F79" else parameter.grad
