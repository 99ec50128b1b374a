"""`ParameterSyncCheck`: every rank holds the same parameters, bit for bit, by name.

A row is three numbers: a digest of names, shapes, dtypes and order, one fingerprint of all that is looked at, and a digest of
the class shards' sizes. Only where ranks differ are the parameters compared one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import lightning.pytorch as pl
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks import causes
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.ddp_state import Wrap
from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import Unit, divide, is_replicated, shards, tracked
from lightning_ddp_losses.distributed.fingerprint import combine, fingerprints, hash_lines

_SHOWN = 6  # parameters named in one go


class ParameterSyncCheck(RankCheck):
    """Parameters are equal on all ranks: values, names, order, shapes, dtypes, and whether they train.

    Covers F04, F11, F12 and F16, and by looking at gradients and learning rates tells F05-F10 (a gradient that was not
    synchronised) from F14, F15 and F17 (an optimizer that went apart).

    Args:
        parts: Each step looks at one part of the parameters, 1/``parts`` of their bytes; a small model has fewer parts.
        full_every_n_steps: A pass over all of them that often; also at the start, after the first step, and at the end.
        **options: As ``RankCheck``.

    Communication: 24 bytes in the shared gather, and three numbers for each class shard at the start.
    """

    moments = (Moment.BEFORE_WRAP, Moment.TRAIN_START, Moment.AFTER_STEP, Moment.TRAIN_END)
    faults = ("F04", "F05", "F06", "F07", "F08", "F09", "F10", "F11", "F12", "F14", "F15", "F16", "F17", "SYNC")

    def __init__(
        self,
        parts: int = 16,
        full_every_n_steps: int = 500,
        *,
        every_n_steps: int = 1,
        action: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.parts = parts
        self.full_every_n_steps = full_every_n_steps
        self._divided: list[list[Unit]] = []
        self._digest = 0
        self._seen: dict[str, Tensor] = {}
        self._looked_at: list[Unit] = []
        self._first = True

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin with a full pass."""
        self._first = True
        self.session.shared(Wrap)

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int]:
        """Names, one fingerprint of this moment's part, and at the start the shards."""
        if not is_replicated(trainer):
            return []
        before, self._seen = (
            self._seen,
            self.session.tracked() if moment == Moment.AFTER_STEP else tracked(trainer, module),
        )
        if moment == Moment.BEFORE_WRAP:
            return [hash_lines(_descriptions(module, self._seen, buffers=True))]
        if self._seen is not before:
            self._divided = divide(self._seen, self.parts)
            self._digest = hash_lines(_descriptions(module, self._seen, buffers=False))
        row = [self._digest]
        self._looked_at = self._due(moment)
        row.append(combine(fingerprints(unit.of(self._seen[unit.name]) for unit in self._looked_at)))
        if moment == Moment.TRAIN_START:
            row += [n for shard in shards(module).values() for n in (shard.start, shard.stop, shard.num_classes)]
        return row

    def _due(self, moment: Moment) -> list[Unit]:
        step = self.session.step
        full = moment != Moment.AFTER_STEP or self._first or step % self.full_every_n_steps == 0
        self._first = self._first and moment != Moment.AFTER_STEP
        if full:
            return [unit for part in self._divided for unit in part]
        return self._divided[(step // self.every_n_steps) % len(self._divided)]

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Compare digests first, then values, then the shards' ranges."""
        columns = list(zip(*table, strict=True))
        if not columns:
            return []
        digests = columns[0]
        if len(set(digests)) > 1:
            return [
                Finding(
                    "F12", "names, shapes, dtypes or order of parameters", ranks=odd_ranks(digests), name="parameters"
                )
            ]
        if len(columns) == 1:
            return []
        found = _tiling(table, list(shards(module))) if moment == Moment.TRAIN_START else []
        values = columns[1]
        if len(set(values)) > 1:
            fault = "F04" if moment == Moment.TRAIN_START else "SYNC"
            found.append(Finding(fault, "parameters", "equal values on all ranks", odd_ranks(values), name="values"))
        return found

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """This rank's names, or its parameters' fingerprints with what is known of their gradients and optimizers."""
        if finding.name == "parameters":
            before_wrap = finding.moment == Moment.BEFORE_WRAP.value
            return json.dumps(_descriptions(module, self._seen, buffers=before_wrap))
        if finding.name != "values":
            return None
        values = fingerprints(unit.of(self._seen[unit.name]) for unit in self._looked_at)
        differ: dict[str, list[int]] = {}
        for unit, value in zip(self._looked_at, values, strict=True):
            differ.setdefault(unit.name, []).append(value)
        return json.dumps({"values": differ, **causes.circumstances(self.session, self._seen)})

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name the parameters, and why they differ."""
        everyone = [json.loads(text) for text in texts]
        if finding.name == "parameters":
            return [_first_difference(finding, everyone)]
        names = [n for n in everyone[0]["values"] if len({json.dumps(e["values"][n]) for e in everyone}) > 1]
        found = []
        for name in names[:_SHOWN]:
            ranks = odd_ranks([e["values"][name] for e in everyone])
            why = causes.why_apart(name, everyone, at_start=finding.fault == "F04")
            what = f"parameter `{name}`"
            better = replace(
                finding, fault=why.fault, what=what, name=name, ranks=ranks, values=why.values, fix=why.fix
            )
            found.append(better)
        return found or [finding]

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """The parameter itself."""
        return self._seen.get(finding.name)


def _descriptions(module: pl.LightningModule, seen: Mapping[str, Tensor], *, buffers: bool) -> list[str]:
    lines = [
        f"{n} {tuple(t.shape)} {t.dtype} {t.device.type}{'' if t.requires_grad else ' frozen'}" for n, t in seen.items()
    ]
    lines += [f"{name} shard of {shard.num_classes} classes" for name, shard in shards(module).items()]
    if buffers:
        lines += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in module.named_buffers() if not is_lazy(b)]
    return lines


def _first_difference(finding: Finding, everyone: list[list[str]]) -> Finding:
    longest = max(map(len, everyone))
    padded = [lines + ["nothing"] * (longest - len(lines)) for lines in everyone]
    places = [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]
    return replace(
        finding,
        what=f"{len(places)} of {longest} parameters and buffers, by position",
        expected="the same names, shapes and dtypes in the same order on every rank",
        values=tuple("; ".join(f"position {i}: {lines[i]}" for i in places[:_SHOWN]) for lines in padded),
        name=", ".join(dict.fromkeys(lines[places[0]].split(" ")[0] for lines in padded)),
        fix="Register submodules in a fixed order (sort names; no iteration over sets), with the same sizes on every rank.",
    )


def _tiling(table: list[list[int]], names: list[str]) -> list[Finding]:
    """Class shards must cover the classes, each once."""
    found = []
    for i, name in enumerate(names):
        own = [row[2 + 3 * i : 5 + 3 * i] for row in table]
        edges = sorted((start, stop) for start, stop, _ in own)
        whole = [0, *(stop for _, stop in edges)] == [*(start for start, _ in edges), own[0][2]]
        if not whole or len({number for *_, number in own}) > 1:
            values = tuple(f"classes {start} to {stop} of {number}" for start, stop, number in own)
            fix = "Give every rank its own block: build the loss after the process group exists, with the same num_classes."
            found.append(
                Finding("F16", f"class shards of `{name}`", "ranges that tile the classes", (), name, values, fix)
            )
    return found
