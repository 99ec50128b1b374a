"""`BufferSyncCheck`: what ranks hold beside parameters is the same where it must be: batch norm, memory queues, metric states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_norm import distances, hidden_norms, plain_norms, statistics
from lightning_ddp_losses.callbacks.batch_reader import BUCKETS, Batches
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.local_findings import LocalFacts
from lightning_ddp_losses.callbacks.metric_states import compare_states, states_of
from lightning_ddp_losses.callbacks.queues import Buffer, Place, places, remembering
from lightning_ddp_losses.distributed.fingerprint import fingerprint, hash_text

_NOISE = 0.5  # standard deviations times the root of the rows
_LOOK_AGAIN = 64  # steps; a large model takes a while to walk through
_METRICS = (Moment.VALIDATION_EPOCH_END, Moment.TRAIN_EPOCH_END)


class BufferSyncCheck(RankCheck):
    """Batch norm's statistics, memory queues and metric states are alike on all ranks.

    Covers F26, F41, F49, F51, F52, F59, F60 and F64.

    Args:
        tolerance: Batch-norm statistics may be so many standard deviations apart (and 0.5 divided by the root of the rows per
            rank, which is what chance does); plain DDP keeps a tenth of what the latest batches differ by.
        **options: As ``RankCheck``.

    Communication: 16 bytes before backward, 32 after the step; at validation 0.9 KiB.
    """

    moments = (
        Moment.TRAIN_START,
        Moment.BEFORE_BACKWARD,
        Moment.AFTER_STEP,
        Moment.VALIDATION_START,
        *_METRICS,
        Moment.TRAIN_END,
    )
    faults = ("F26", "F41", "F49", "F51", "F52", "F59", "F60", "F64")

    def __init__(
        self, tolerance: float = 0.1, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.tolerance = tolerance
        self._handles: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._facts = LocalFacts(self.faults)
        self._buffers: dict[str, Buffer] = {}
        self._states: dict[str, list[Any]] = {}
        self._looked: list[Place] | None = None
        self._forwards: dict[int, int] = {}
        self._before_second = 0

    # ------------------------------------------------------------------ look

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Count forwards of every DDP that broadcasts buffers."""
        self._begin()
        wrapped = {trainer.strategy.model, *module.modules()}
        wrapped |= {value for value in vars(module).values() if isinstance(value, nn.Module)}
        watched = [w for w in wrapped if isinstance(w, DistributedDataParallel) and w.broadcast_buffers]
        known = {id(found) for found in watched}

        # a function and no method: a copy of the module (the scale probe makes one) must not copy the check along
        def see(found: nn.Module, _: Any) -> None:
            if id(found) in known:
                self._see_forward(found)

        self._handles = [found.register_forward_pre_hook(see) for found in watched]

    def _see_forward(self, wrapped: nn.Module) -> None:
        if not torch.is_grad_enabled() or not wrapped.training:
            return
        self._forwards[id(wrapped)] = self._forwards.get(id(wrapped), 0) + 1
        if self._forwards[id(wrapped)] == 2:  # the broadcast comes after this hook
            norms = {id(b) for norm in plain_norms(wrapped).values() for b in norm.buffers()}
            values = [fingerprint(b) for b in wrapped.buffers() if id(b) not in norms]
            self._before_second = hash_text(repr(values)) if values else 0

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Read rows and labels, for the advice."""
        self.session.shared(Batches).see(batch, batch_idx)

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int] | list[float]:
        """Digests of buffers or states, or channels of batch norm."""
        if moment == Moment.TRAIN_START:
            self._facts.found = []
            self._find_unconverted(trainer, module)
            return self._facts.row()
        if moment == Moment.BEFORE_BACKWARD:
            row = [max(self._forwards.values(), default=0), self._before_second]
            self._forwards, self._before_second = {}, 0
            return row
        if moment == Moment.AFTER_STEP:
            if self._looked is None or self.session.step % _LOOK_AGAIN == 0:
                self._looked = places(module)
            self._buffers = remembering(self._looked)
            pairs = [(name, *buffer.digests()) for name, buffer in self._buffers.items()]
            return [len(pairs), hash_text(repr(pairs)) if pairs else 0]
        if moment in _METRICS:
            self._states = states_of(module)
            # an empty list of a state that is concatenated says nothing
            codes = [
                0 if n < 0 and kind[0] is None else hash_text(repr((n, kind))) for n, *kind in self._states.values()
            ]
            return [hash_text(repr(list(self._states))), *codes]
        batches = self.session.shared(Batches)
        channels = statistics(plain_norms(module))
        mean_rows = batches.total_rows / max(batches.number, 1)
        return [mean_rows, *map(float, batches.counts), *channels]

    def _find_unconverted(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if getattr(trainer.strategy, "_layer_sync", None) is None:
            return
        fix = "Register the module (an attribute or nn.ModuleList) before the fit, or convert it before the wrap."
        for path in [*plain_norms(module), *hidden_norms(module)]:
            self._facts.found.append(
                Finding("F60", f"batch norm `{path}` was not converted", "synchronised batch norm", name=path, fix=fix)
            )

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[Any]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Compare what the ranks hold."""
        if moment == Moment.TRAIN_START:
            return self._facts.judge(table)
        if moment == Moment.BEFORE_BACKWARD:
            return _two_forwards(table)
        if moment == Moment.AFTER_STEP:
            digests = [tuple(row) for row in table]
            what = "buffers of losses and metrics"
            return [Finding("F64", what, "", odd_ranks(digests), "buffers")] if len(set(digests)) > 1 else []
        if moment in _METRICS:
            return self._judge_states(table)
        return self._judge_norms(table, trainer)

    def _judge_states(self, rows: list[list[int]]) -> list[Finding]:
        if len({row[0] for row in rows}) > 1:  # other metrics per rank: they cannot be lined up
            return []
        found = []
        for place, name in enumerate(self._states):
            column = [row[1 + place] for row in rows]
            if len(set(column) - {0}) > 1:
                found.append(Finding("F52", f"metric state `{name}`", "", odd_ranks(column), name))
        return found

    def _judge_norms(self, rows: list[list[float]], trainer: pl.Trainer) -> list[Finding]:
        apart = distances([row[1 + BUCKETS :] for row in rows])
        own = [row[0] for row in rows]
        allowed = max(self.tolerance, _NOISE / max(min(own), 1.0) ** 0.5)
        if max(apart) <= allowed:
            return []
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rate, total = float(rates[0]) if rates else 0.0, sum(own)
        scaled = rate * total / max(*own, 1.0)
        labels = [[int(n) for n in row[1 : 1 + BUCKETS]] for row in rows]
        fix = (
            f"Rows per rank {max(own):.4g}, of all ranks {total:.4g}; learning rate {rate:g}, by linear scaling {scaled:g}; "
            f"labels between ranks {_shares(labels)}. Shuffle the data over the ranks, or normalise over all of them: "
            "Trainer(sync_batchnorm=True)."
        )
        values = tuple(f"{d:.3g} standard deviations from the mean of all ranks" for d in apart)
        what = f"batch norm's running statistics are apart by more than {allowed:.2g}"
        return [Finding("F59", what, "", (), "batch norm", values, fix)]

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """This rank's digests, states or own findings."""
        if finding.name == "buffers":
            return json.dumps({name: (*buffer.digests(), buffer.queue) for name, buffer in self._buffers.items()})
        if finding.fault == "F52":
            return json.dumps(self._states.get(finding.name))
        return self._facts.describe(finding)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name the buffers or states."""
        if finding.name == "buffers":
            return _different_buffers(finding, [json.loads(text) for text in texts])
        if finding.fault == "F52":
            return [compare_states(finding, texts)]
        return self._facts.explain(finding, texts)

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """The buffer itself."""
        buffer = self._buffers.get(finding.name)
        return buffer.tensor if buffer is not None else None


def _two_forwards(rows: list[list[int]]) -> list[Finding]:
    digests = [row[1] for row in rows]
    if min(row[0] for row in rows) < 2 or len(set(digests)) == 1:
        return []
    what = "DDP ran forward twice before backward while buffers differed between ranks; the second broadcast overwrote what the first used"
    fix = "Run one forward on the concatenated input, or set broadcast_buffers=False."
    return [Finding("F41", what, "", odd_ranks(digests), "DistributedDataParallel", fix=fix)]


def _different_buffers(finding: Finding, everyone: list[dict[str, list[Any]]]) -> list[Finding]:
    found = []
    for name in dict.fromkeys(name for held in everyone for name in held):
        column = [tuple(held.get(name, (0, 0, False))) for held in everyone]
        if len(set(column)) == 1:
            continue
        queue = any(entry[2] for entry in column)
        reordered = queue and len({entry[1] for entry in column}) == 1
        if reordered:
            fault, what = "F26", f"queue `{name}`: the same rows in another order"
            fix = "Gather in rank order, the same on every rank (GlobalBatchLoss(CrossBatchMemory(...)) does)."
        elif queue:
            fault, what = "F64", f"queue `{name}`: each rank remembers other rows"
            fix = "Gather before rows are remembered (GlobalBatchLoss(CrossBatchMemory(...)) does); DDP's broadcast keeps rank 0's only."
        else:
            fault, what = (
                "F49",
                f"buffer `{name}` of a loss or metric differs; DDP's broadcast will replace it by rank 0's",
            )
            fix = "Reduce it over the ranks, or list it in _ddp_params_and_buffers_to_ignore of the LightningModule."
        found.append(replace(finding, fault=fault, what=what, name=name, fix=fix, ranks=odd_ranks(column)))
    return found


def _shares(counts: list[list[int]]) -> str:
    """How unlike the ranks' labels are."""
    everyone = [sum(column) for column in zip(*counts, strict=True)]
    if not sum(everyone):
        return "unknown"
    worst = 0.0
    for own in counts:
        if sum(own):
            parts = zip(own, everyone, strict=True)
            worst = max(worst, sum(abs(a / sum(own) - b / sum(everyone)) for a, b in parts) / 2)
    return f"{worst:.0%} unlike those of all"
