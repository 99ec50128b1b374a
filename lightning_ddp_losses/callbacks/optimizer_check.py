"""`OptimizerCheck`: the optimizers hold what trains, with the same settings on every rank, and every rank makes the same steps."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.causes import FIXES, optimizer_settings
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import is_replicated, optimised
from lightning_ddp_losses.distributed.fingerprint import combine, fingerprint, fingerprints, hash_lines

_SHOWN = 6
_WORDS = {
    "F01": "gets a gradient and is in no optimizer",
    "F02": "is in an optimizer and not in module.parameters()",
    "F03": "is in memory that the ranks share: they all step the same tensor",
    "twice": "is in two optimizers or parameter groups",
    "F75": "trains and is not in the checkpoint",
}
_FIXES = {
    "F01": "Add it to configure_optimizers, or freeze it with requires_grad_(False).",
    "F02": "It is not synchronised, not moved and not saved: make its module an attribute (nn.ModuleList for several).",
    "F03": "Register its module, or use strategy='ddp' in place of spawn.",
    "twice": "Leave it in one of them: it is stepped twice.",
    "F75": "Register its module, so that state_dict holds it.",
}


class OptimizerCheck(RankCheck):
    """Optimizers hold what trains, once, with equal settings, scales and steps on all ranks, and their steps change something.

    Covers F01 (a parameter with a gradient in no optimizer), F02 (an unregistered one), F03 (memory shared under spawn), F14 (a
    step skipped on some ranks), F15 (gradient scales), F17 (learning rate and other settings, restored state), F75
    (missing from a checkpoint), and steps that change nothing.

    Args:
        every_n_steps: As ``RankCheck``.
        action: As ``RankCheck``.

    Communication: at most 56 bytes in the shared gathers.
    """

    moments = (Moment.TRAIN_START, Moment.AFTER_STEP, Moment.SAVE)
    faults = ("F01", "F02", "F03", "F14", "F15", "F17", "F75", "STEP")
    needs_peers = False

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._problems: dict[str, list[str]] = {}
        self._before: dict[str, int] | None = None
        self._made = 0

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Forget an earlier fit."""
        self._problems, self._before, self._made = {}, None, 0

    def see_gradients(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Before the first step, remember what it should change."""
        if self._before is None:
            self._before = self._values()

    def _values(self) -> dict[str, int]:
        moving = {
            name: p
            for name, p in self.session.tracked().items()
            if p.requires_grad and p.grad is not None and not p.grad.is_sparse and bool(p.grad.count_nonzero())
        }
        return dict(zip(moving, fingerprints(moving.values()), strict=True))

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int]:
        """Numbers of problems, then what must be equal."""
        if moment == Moment.SAVE:
            self._problems = {"F75": _unsaved(trainer, module, self.session.checkpoint or {})}
            return [len(self._problems["F75"])]
        row: list[int] = []
        if moment == Moment.TRAIN_START:
            self._problems = _misplaced(trainer, module)
            row = [len(self._problems[key]) for key in ("F02", "F03", "twice")]
            state = self._state(trainer) if is_replicated(trainer) else 0
        else:
            first = self._made == 0
            self._problems = {"F01": _forgotten(trainer, module) if first else []}
            row = [len(self._problems["F01"]), self._still(trainer), len(self.session.stepped)]
            state = 0
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 0.0 if scaler is None else float(scaler.get_scale())
        settings = hash_lines(map(str, optimizer_settings(self.session)))
        return [*row, settings, *struct.unpack("<q", struct.pack("<d", scale)), state]

    def _still(self, trainer: pl.Trainer) -> int:
        """Whether the first two steps left everything as it was, although there was something to do."""
        if not self.session.stepped or self._before is None or self._made > 1:
            return 0
        self._made += 1
        if self._made == 1:
            return 0
        parameters = self.session.tracked()
        rates = [group.get("lr", 1.0) for optimizer in trainer.optimizers for group in optimizer.param_groups]
        same = [name for name, value in self._before.items() if fingerprint(parameters[name]) == value]
        return int(bool(same) and len(same) == len(self._before) and all(float(rate) > 0 for rate in rates))

    def _state(self, trainer: pl.Trainer) -> int:
        """One number for the tensors in the optimizers' states (there are some after a restart)."""
        alike = {id(p) for p in self.session.tracked().values()}
        found: list[int] = []
        for optimizer in trainer.optimizers:
            if "ZeroRedundancy" in type(optimizer).__name__:  # each rank holds its part
                return 0
            for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in alike):
                state = sorted(optimizer.state.get(p, {}).items())
                found += fingerprints(t for _, t in state if isinstance(t, Tensor) and t.layout == torch.strided)
        return combine(found)

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Local problems of any rank first; then what differs."""
        columns = list(zip(*table, strict=True))
        if moment == Moment.SAVE:
            return _named(["F75"], columns)
        start = moment == Moment.TRAIN_START
        found = _named(["F02", "F03", "twice"] if start else ["F01"], columns)
        settings, scales, states = columns[-3:]
        if not start:
            _, still, stepped = columns[:3]
            if all(still):
                fix = "The optimizer may hold other objects than the model: build it after the model, from self.parameters()."
                found.append(Finding("STEP", "two optimizer steps changed no parameter", name="step", fix=fix))
            if len(set(stepped)) > 1:
                values = tuple(f"{n} optimizer steps" for n in stepped)
                what = "the optimizer step was skipped on some ranks"
                return [*found, Finding("F14", what, "", odd_ranks(stepped), "step", values, FIXES["F14"])]
        if len(set(scales)) > 1:
            values = tuple(struct.unpack("<d", struct.pack("<q", bits))[0] for bits in scales)
            found.append(
                Finding("F15", "gradient scale", "equal on all ranks", odd_ranks(scales), "scale", values, FIXES["F15"])
            )
        if len(set(settings)) > 1:
            found.append(Finding("F17", "optimizer settings", "equal on all ranks", odd_ranks(settings), "settings"))
        if len(set(states)) > 1:
            fix = "Restore the optimizer from one checkpoint on all ranks."
            found.append(
                Finding("F17", "state of the optimizers", "equal on all ranks", odd_ranks(states), "state", fix=fix)
            )
        return found

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Names, or settings."""
        return json.dumps({"problems": self._problems, "settings": optimizer_settings(self.session)}, default=str)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name parameters and settings."""
        everyone = [json.loads(text) for text in texts]
        if finding.name == "settings":
            return [_differing(finding, [e["settings"] for e in everyone])]
        if finding.name not in _WORDS:
            return [finding]
        names = list(dict.fromkeys(n for e in everyone for n in e["problems"].get(finding.name, ())))
        shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) + f" and {len(names) - _SHOWN} more" * (
            len(names) > _SHOWN
        )
        return [replace(finding, what=f"{shown} {_WORDS[finding.name]}", name=", ".join(names[:_SHOWN]))]


def _named(keys: list[str], columns: list[tuple[int, ...]]) -> list[Finding]:
    found = []
    for key, counts in zip(keys, columns, strict=False):
        if any(counts):
            ranks = tuple(rank for rank, count in enumerate(counts) if count)
            everywhere = len(ranks) == len(counts)
            fault = "TWICE" if key == "twice" else key
            found.append(
                Finding(fault, f"{max(counts)} parameters", "", () if everywhere else ranks, key, fix=_FIXES[key])
            )
    return found


def _differing(finding: Finding, everyone: list[list[dict[str, Any]]]) -> Finding:
    for index, groups in enumerate(zip(*everyone, strict=False)):
        keys = [k for k in groups[0] if any(g.get(k) != groups[0][k] for g in groups)]
        if keys:
            what = f"{', '.join(keys)} of parameter group {index}"
            values = tuple(", ".join(f"{k} {g.get(k)}" for k in keys) for g in groups)
            return replace(finding, what=what, name=", ".join(keys), values=values, fix=FIXES["F17"])
    return replace(finding, values=tuple(f"{len(groups)} parameter groups" for groups in everyone))


def _misplaced(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, list[str]]:
    registered = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    held = list(optimised(trainer))
    seen: set[int] = set()
    twice = [registered.get(id(p), place) for place, p in held if id(p) in seen or seen.add(id(p))]  # type: ignore[func-returns-value]
    spawned = getattr(trainer.strategy, "_start_method", None) == "spawn"
    strangers = [(place, p) for place, p in held if id(p) not in registered]
    paths = {id(p): path for path, p in _hidden(module)} if strangers else {}
    return {
        "F02": [paths.get(id(p), place) for place, p in strangers],
        "F03": [registered.get(id(p), place) for place, p in held if spawned and p.is_shared()],  # type: ignore[no-untyped-call]
        "twice": twice,
    }


def _hidden(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters in plain attributes of the module: lists, dicts, modules inside those."""
    queue: list[tuple[str, Any, int]] = [(f"self.{k}", v, 0) for k, v in vars(module).items() if not k.startswith("_")]
    for path, value, depth in queue:
        if isinstance(value, nn.Module):
            yield from ((f"{path}.{name}", p) for name, p in value.named_parameters())
        elif isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, (list, tuple)) and depth < 3:
            queue += [(f"{path}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        elif isinstance(value, Mapping) and depth < 3:
            queue += [(f"{path}[{k!r}]", item, depth + 1) for k, item in value.items()]


def _forgotten(trainer: pl.Trainer, module: pl.LightningModule) -> list[str]:
    """Parameters with a gradient that no optimizer holds; copies that nobody trains have none."""
    held = {id(p) for _, p in optimised(trainer)}
    return [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and id(p) not in held and p.grad is not None and bool(p.grad.count_nonzero())
    ]


def _unsaved(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Mapping[str, Any]) -> list[str]:
    """What optimizers hold and the checkpoint does not, by name: an averaged copy may stand for a parameter."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    keys = set(checkpoint.get("state_dict", ()))
    trained = [(place, p) for place, p in optimised(trainer) if p.requires_grad]
    return [names.get(id(p), [place])[0] for place, p in trained if not keys.intersection(names.get(id(p), ()))]
