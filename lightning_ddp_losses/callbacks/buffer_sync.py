"""`BufferSyncCheck`: state next to the parameters is equal on all ranks if it must be: memory queues, batch norm, metric states.

Three sections read modules, each for one kind of state: queues and running sums of losses, statistics of batch norm, states of metrics.
The check follows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.base import LocalCheck
from lightning_ddp_losses.callbacks.batch_reader import BUCKETS, BatchReader, label_imbalance
from lightning_ddp_losses.callbacks.ddp_state import learning_rate
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, LocalFindings, LocalRow, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import DDP_IGNORES
from lightning_ddp_losses.callbacks.row_exchange import Row
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.core.host_copy import HostCopy, HostNumbers
from lightning_ddp_losses.core.module_search import unregistered_modules
from lightning_ddp_losses.distributed.fingerprint import hash_tables, hash_text, row_tables, start_fingerprints

_QUEUE_WORDS = ("queue", "memory", "bank")
_QUEUE_ROWS = 1024  # of a larger queue its first rows are compared, and as many others
_MASK = (1 << 62) - 1
MAX_CHANNELS = 48  # of all layers together that are compared
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MIN_VARIANCE = 1e-12
_NOISE = 0.5  # standard deviations times the root of the rows
_SEARCH_EVERY = 64  # steps; a large model takes a while to walk through
_METRIC_STAGES = (CheckStage.VALIDATION_EPOCH_END, CheckStage.TRAIN_EPOCH_END)


def _class_names(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


# ---------------------------------------------------------------------- queues and running sums


class SentBuffer:
    """A buffer's value on its way to the host, as numbers that tell values apart.

    Args:
        value: The buffer, or of a large queue some of its rows.
        is_queue: Whether it holds rows of earlier batches.
    """

    def __init__(self, value: Tensor, *, is_queue: bool) -> None:
        self._in_order = start_fingerprints([value])
        self._rows = value.shape[0] if is_queue else 0
        self._tables: list[HostCopy] = []
        if is_queue:
            self._tables = [HostCopy(table) for table in row_tables([value], self._rows, self._rows)]

    def read(self) -> tuple[int, int]:
        """Return a number of the rows in their order, and one of the rows in any order (0 of what is no queue)."""
        hashes = hash_tables([table.read() for table in self._tables], self._rows)
        return self._in_order.read()[0], sum(hashes) & _MASK


@dataclass(frozen=True)
class ComparedBuffer:
    """A buffer that is to be equal on all ranks.

    Attributes:
        tensor: Its value.
        is_queue: Whether it holds rows of earlier batches.
    """

    tensor: Tensor
    is_queue: bool

    def send(self) -> SentBuffer:
        """Start to look at it."""
        value = self.tensor.detach()
        if not self.is_queue or value.ndim == 0 or not value.shape[0]:
            return SentBuffer(value, is_queue=False)
        rows = value.shape[0]
        if rows > 2 * _QUEUE_ROWS:
            others = torch.arange(_QUEUE_ROWS, rows, rows // _QUEUE_ROWS, device=value.device)
            value = torch.cat([value[:_QUEUE_ROWS], value[others]])
        return SentBuffer(value, is_queue=True)


class BufferSlot(NamedTuple):
    """Names where a buffer is: it may be assigned anew."""

    path: str
    owner: nn.Module
    name: str
    is_queue: bool


def compared_slots(module: nn.Module) -> list[BufferSlot]:
    """Return the buffers of losses and metrics, and queues wherever they are; not batch norm's, nor what DDP is told to ignore."""
    ignored = frozenset(getattr(module, DDP_IGNORES, ()))
    found: list[BufferSlot] = []
    for path, inner in module.named_modules():
        buffers = compat.buffer_slots(inner)
        if isinstance(inner, compat.NORM_TYPES) or not buffers:
            continue
        # known by name: neither losses nor metrics have one base class
        names = _class_names(inner)
        is_objective = any(name.endswith(("Loss", "Metric", "CrossBatchMemory")) for name in names)
        for name, buffer in buffers.items():
            full_name = name
            if path:
                full_name = f"{path}.{name}"
            sounds_like_queue = any(word in name.lower() for word in _QUEUE_WORDS) or "CrossBatchMemory" in names
            is_queue = sounds_like_queue and buffer is not None and not is_lazy(buffer)
            is_queue = is_queue and buffer.ndim >= 1 and buffer.shape[0] > 1  # type: ignore[union-attr]
            if full_name not in ignored and (is_queue or is_objective):
                found.append(BufferSlot(full_name, inner, name, is_queue))
    return found


def compared_buffers(slots: list[BufferSlot]) -> dict[str, ComparedBuffer]:
    """Return the buffers that are in these slots now, by path."""
    found: dict[str, ComparedBuffer] = {}
    for slot in slots:
        value = compat.buffer_slots(slot.owner).get(slot.name)
        if value is None or value.is_meta or not is_plain_memory(value):
            continue
        if value.is_quantized:
            value = value.int_repr()
        found[slot.path] = ComparedBuffer(value, slot.is_queue)
    return found


def is_plain_memory(tensor: Tensor) -> bool:
    """Say whether a tensor's memory is its value: not of a sparse one, nor of one that nobody has initialised."""
    return not is_lazy(tensor) and tensor.layout == torch.strided


# ---------------------------------------------------------------------- batch norm


def plain_norms(module: nn.Module) -> dict[str, Any]:
    """Return the layers of torch's own plain batch norm on this rank's rows, by path; a subclass may synchronise by itself."""
    return {
        name: inner for name, inner in module.named_modules() if type(inner) in _PLAIN_NORMS and not synchronises(inner)
    }


def hidden_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return batch norm in modules that are held in a list, a dict or a partial, where no conversion finds it."""
    found: dict[str, nn.Module] = {}
    for path, outer in unregistered_modules(module, {}):
        for name, norm in plain_norms(outer).items():
            found[f"{path}.{name}".rstrip(".")] = norm
    return found


def norm_statistics(norms: Mapping[str, Any]) -> list[float]:
    """Return means, then variances, of channels spread evenly over all layers."""
    tracked = [norm for norm in norms.values() if norm.running_mean is not None and norm.running_var is not None]
    total = sum(norm.num_features for norm in tracked)
    chosen = list(range(total))
    if total > MAX_CHANNELS:
        chosen = sorted({i * total // MAX_CHANNELS for i in range(MAX_CHANNELS)})
    means: list[float] = []
    variances: list[float] = []
    start = 0
    for norm in tracked:
        # the chosen channels of this layer
        stop = start + norm.num_features
        channels = [channel - start for channel in chosen if start <= channel < stop]
        start = stop
        if channels:
            means += norm.running_mean.detach()[channels].double().tolist()
            variances += norm.running_var.detach()[channels].double().tolist()
    return means + variances


def norm_distances(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return how far each rank's statistics are from those of all ranks.

    Of the means in standard deviations, of the variances in natural logarithms, the larger of the two, root mean square over channels.
    """
    channels = len(rows[0]) // 2
    if not channels:
        return [0.0] * len(rows)
    # the mean over ranks of each number
    middle = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    distances = []
    for row in rows:
        of_means = of_variances = 0.0
        for i in range(channels):
            usual = max(middle[channels + i], _MIN_VARIANCE)
            of_means += (row[i] - middle[i]) ** 2 / usual
            of_variances += math.log(max(row[channels + i], _MIN_VARIANCE) / usual) ** 2
        distances.append(math.sqrt(max(of_means, of_variances) / channels))
    return distances


# ---------------------------------------------------------------------- metric states


class StateKind(NamedTuple):
    """What makes a gather of a metric's state pair up wrongly.

    Attributes:
        tensors: How many tensors will be gathered one by one; -1 of a list that is concatenated first and may be empty on some ranks.
        ndim: Their dimensions; None of an empty list.
        dtype: Their dtype, likewise.
    """

    tensors: int
    ndim: int | None = None
    dtype: str | None = None


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Return torchmetrics' metrics by path, without Lightning's records of what was logged."""
    found: dict[str, Any] = {}
    for name, inner in module.named_modules():
        bases = type(inner).__mro__
        is_metric = any(cls.__module__ == "torchmetrics.metric" and cls.__name__ == "Metric" for cls in bases)
        if is_metric and compat.state_reductions(inner) is not None:
            found[name] = inner
    return found


def metric_states(module: nn.Module) -> dict[str, StateKind]:
    """Return the kind of every metric state, by path, as it is about to be gathered."""
    found: dict[str, StateKind] = {}
    for path, metric in metrics_of(module).items():
        for name, reduction in (compat.state_reductions(metric) or {}).items():
            value = getattr(metric, name, None)
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = StateKind(1, value.ndim, str(value.dtype))
            elif isinstance(value, list):
                number = -1
                if reduction is None:
                    number = len(value)
                kinds = {(item.ndim or 1, str(item.dtype)) for item in value if isinstance(item, Tensor)}
                kind = StateKind(number)
                if kinds:
                    kind = StateKind(number, *min(kinds))
                found[f"{path}.{name}"] = kind
    return found


def compare_states(finding: Finding, texts: Sequence[str]) -> Finding:
    """Say what a state that differs is on all ranks, from the ranks' ``StateKind`` as JSON."""
    kinds = [StateKind(*(json.loads(text) or [0])) for text in texts]
    numbers = [kind.tensors for kind in kinds]
    if len(set(numbers)) > 1:
        updates = tuple(f"{number} updates" for number in numbers)
        return finding.refine("F51", ranks=odd_ranks(numbers), name=finding.name, values=updates)
    values = []
    for kind in kinds:
        value = "empty"
        if kind.ndim is not None:
            value = f"{kind.ndim} dimensions, {kind.dtype}"
        values.append(value)
    ranks = odd_ranks([(kind.ndim, kind.dtype) for kind in kinds])
    return finding.refine("F52", ranks=ranks, name=finding.name, values=tuple(values))


# ---------------------------------------------------------------------- rows, and the check


class ForwardRow(NamedTuple):
    """What travels before backward.

    Attributes:
        forwards: The most often that a DDP with buffers ran forward since the last backward.
        buffers: A hash of its buffers before the second forward; 0 if there was none, or it has none.
        step: Optimizer steps before that backward: the first of a fit, then the one before this one, whose buffers have arrived.
    """

    forwards: int
    buffers: int
    step: int


class SeenForwards(NamedTuple):
    """Forwards before one backward.

    Attributes:
        forwards: As ``ForwardRow``.
        before_second: Fingerprints of the buffers, on their way to the host.
        step: As ``ForwardRow``.
    """

    forwards: int
    before_second: HostNumbers | None
    step: int


class NormRow(NamedTuple):
    """What travels where batch norm is compared, all as floats.

    Attributes:
        mean_rows: Rows per batch of this rank.
        labels: Labels of the epoch by bucket.
        statistics: Means, then variances, of some channels.
    """

    mean_rows: float
    labels: list[float]
    statistics: list[float]

    def pack(self) -> list[float]:
        """Return the numbers as they travel."""
        return [self.mean_rows, *self.labels, *self.statistics]

    @classmethod
    def unpack(cls, row: Sequence[float]) -> NormRow:
        """Return what ``pack`` was given."""
        return cls(row[0], list(row[1 : 1 + BUCKETS]), list(row[1 + BUCKETS :]))


class BufferSyncCheck(LocalCheck, default=True):
    """Batch norm's statistics, memory queues and metric states are alike on all ranks.

    Buffers after a step are judged at the next one, before a checkpoint is saved and at the end of training (``runner``): the check does
    not wait for a device. The finding names its step.

    Covers F26, F41, F49, F51, F52, F59, F60 and F64.

    Args:
        tolerance: Batch-norm statistics may be so many standard deviations apart (and 0.5 divided by the root of the rows per
            rank, which is what chance does); plain DDP keeps a tenth of what the latest batches differ by.
        **options: As ``RankCheck``.

    Communication: 24 bytes before backward, 32 after the step; at validation 0.9 KiB.

    Example:
        >>> checks = DDPChecks([BufferSyncCheck(tolerance=0.2)])
    """

    stages = (
        CheckStage.TRAIN_START,
        CheckStage.BEFORE_BACKWARD,
        CheckStage.AFTER_STEP,
        CheckStage.VALIDATION_START,
        *_METRIC_STAGES,
        CheckStage.TRAIN_END,
    )
    faults = ("F26", "F41", "F49", "F51", "F52", "F59", "F60", "F64")

    def __init__(
        self, *, tolerance: float = 0.1, every_n_steps: int = 1, action: Mapping[str, str] | str | None = None
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self.tolerance = tolerance
        self._handles: list[Any] = []
        self._forget()

    def _forget(self) -> None:
        self.local = LocalFindings(self.faults)
        self._slots: list[BufferSlot] | None = None
        self._buffers: dict[str, ComparedBuffer] = {}
        self._judged: dict[str, tuple[SentBuffer, bool]] = {}
        self._states: dict[str, StateKind] = {}
        # forwards of each DDP since the last backward, and its buffers before the second
        self._forwards: dict[int, int] = {}
        self._before_second: HostNumbers | None = None
        self._last_forwards: SeenForwards | None = None

    # ------------------------------------------------------------------ observe

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Count forwards of every DDP that broadcasts buffers."""
        self._forget()
        # the strategy's wrapper, and what users wrap themselves, also where that is hidden from nn.Module
        modules = {trainer.strategy.model, *module.modules()}
        modules.update(value for value in vars(module).values() if isinstance(value, nn.Module))
        watched = [each for each in modules if isinstance(each, DistributedDataParallel) and each.broadcast_buffers]
        known = {id(wrapped) for wrapped in watched}

        def see_forward(wrapped: nn.Module, _: Any) -> None:
            if id(wrapped) in known:
                self._see_forward(wrapped)

        hook = self.runner.guarded(self, see_forward)
        self._handles = [wrapped.register_forward_pre_hook(hook) for wrapped in watched]

    def _see_forward(self, wrapped: nn.Module) -> None:
        if not torch.is_grad_enabled() or not wrapped.training:
            return
        self._forwards[id(wrapped)] = self._forwards.get(id(wrapped), 0) + 1
        if self._forwards[id(wrapped)] == 2:  # the broadcast comes after this hook
            # batch norm's statistics differ on plain DDP by design
            of_norms: set[int] = set()
            for norm in plain_norms(wrapped).values():
                of_norms.update(map(id, norm.buffers()))
            self._before_second = start_fingerprints(
                buffer for buffer in wrapped.buffers() if id(buffer) not in of_norms and is_plain_memory(buffer)
            )

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Read rows and labels, for the advice."""
        self.runner.shared(BatchReader).see(batch, batch_idx)

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> Row:
        """Return fingerprints of buffers or states, or channels of batch norm."""
        if stage == CheckStage.TRAIN_START:
            self._find_unconverted(trainer, module)
            return [*self.local.row()]
        if stage == CheckStage.BEFORE_BACKWARD:
            return self._forward_row()
        if stage == CheckStage.AFTER_STEP:
            return self._measure_buffers(module)
        if stage in _METRIC_STAGES:
            return self._measure_states(module)
        read = self.runner.shared(BatchReader)
        mean_rows = read.total_rows / max(read.number, 1)
        statistics = norm_statistics(plain_norms(module))
        return NormRow(mean_rows, [*map(float, read.counts)], statistics).pack()

    def _forward_row(self) -> list[int]:
        """Return the forwards of the first backward at once, for autograd may fail in it; then those of the backward before this one."""
        seen = SeenForwards(max(self._forwards.values(), default=0), self._before_second, self.runner.step)
        self._forwards, self._before_second = {}, None
        judged, self._last_forwards = self._last_forwards or seen, seen
        values = [] if judged.before_second is None else judged.before_second.read()
        buffers_hash = hash_text(repr(values)) if values else 0
        return [*ForwardRow(judged.forwards, buffers_hash, judged.step)]

    def _measure_buffers(self, module: nn.Module) -> Row:
        """Look at the buffers that are compared."""
        if self._slots is None or self.runner.step % _SEARCH_EVERY == 0:
            self._slots = compared_slots(module)
        self._buffers = compared_buffers(self._slots)
        sent = {name: (buffer.send(), buffer.is_queue) for name, buffer in self._buffers.items()}
        return partial(self._read_buffers, sent)

    def _read_buffers(self, sent: dict[str, tuple[SentBuffer, bool]]) -> list[int]:
        """Return how many buffers are compared, and a hash of their names and fingerprints, which are kept for the explanation."""
        self._judged = sent
        if not sent:
            return [0, 0]
        named = [(name, *buffer.read()) for name, (buffer, _) in sent.items()]
        return [len(named), hash_text(repr(named))]

    def _measure_states(self, module: nn.Module) -> list[int]:
        """Return a hash of the states' names, then one for the kind of each."""
        self._states = metric_states(module)
        row = [hash_text(repr(list(self._states)))]
        for kind in self._states.values():
            if kind.tensors < 0 and kind.ndim is None:
                row.append(0)  # an empty list of a state that is concatenated says nothing
            else:
                row.append(hash_text(repr(kind)))
        return row

    def _find_unconverted(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find plain batch norm where the trainer was asked to synchronise it."""
        self.local.found = []
        if not compat.has_layer_sync(trainer.strategy):
            return
        for path in [*plain_norms(module), *hidden_norms(module)]:
            self.local.add("F60", name=path)

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[Any]], trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> list[Finding]:
        """Compare what the ranks hold."""
        if stage == CheckStage.TRAIN_START:
            return self.local.judge([LocalRow(*row) for row in table])
        if stage == CheckStage.BEFORE_BACKWARD:
            return _two_forwards([ForwardRow(*row) for row in table])
        if stage == CheckStage.AFTER_STEP:
            hashes = [tuple(row) for row in table]
            if len(set(hashes)) == 1:
                return []
            return [Finding.of("F64", "unnamed", ranks=odd_ranks(hashes), name="buffers")]
        if stage in _METRIC_STAGES:
            return self._judge_states(table)
        return self._judge_norms([NormRow.unpack(row) for row in table], trainer)

    def _judge_states(self, table: list[list[int]]) -> list[Finding]:
        names, *columns = zip(*table, strict=True)
        if len(set(names)) > 1:  # other metrics per rank: they cannot be lined up
            return []
        found = []
        for name, column in zip(self._states, columns, strict=True):
            if len(set(column) - {0}) > 1:
                found.append(Finding.of("F52", ranks=odd_ranks(column), name=name))
        return found

    def _judge_norms(self, rows: Sequence[NormRow], trainer: pl.Trainer) -> list[Finding]:
        # further apart than the tolerance, and than chance puts them
        distances = norm_distances([row.statistics for row in rows])
        local_rows = [row.mean_rows for row in rows]
        allowed = max(self.tolerance, _NOISE / max(min(local_rows), 1.0) ** 0.5)
        if max(distances) <= allowed:
            return []
        # advice: what normalising over all ranks would mean
        largest, global_rows, rate = max(local_rows), sum(local_rows), learning_rate(trainer)
        labels = [row.labels for row in rows]
        unlike = "unknown"
        if any(map(sum, labels)):
            unlike = f"{label_imbalance(labels):.0%} unlike those of all"
        values = tuple(f"{distance:.3g} standard deviations from the mean of all ranks" for distance in distances)
        return [
            Finding.of(
                "F59",
                name="batch norm",
                values=values,
                allowed=allowed,
                largest=largest,
                global_rows=global_rows,
                rate=rate,
                scaled=rate * global_rows / max(largest, 1.0),
                unlike=unlike,
            )
        ]

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Return this rank's fingerprints, states or own findings."""
        if finding.name == "buffers":
            return json.dumps({name: (*sent.read(), is_queue) for name, (sent, is_queue) in self._judged.items()})
        if finding.fault == "F52":
            return json.dumps(self._states.get(finding.name))
        return super().describe(finding, trainer, module)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Name the buffers or states."""
        if finding.name == "buffers":
            return _name_buffers(finding, [json.loads(text) for text in texts])
        if finding.fault == "F52":
            return [compare_states(finding, texts)]
        return super().explain(finding, texts)

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """Return the buffer itself."""
        buffer = self._buffers.get(finding.name)
        if buffer is None:
            return None
        return buffer.tensor


def _two_forwards(rows: Sequence[ForwardRow]) -> list[Finding]:
    """Report a second forward that overwrote buffers which the first one used."""
    hashes = [row.buffers for row in rows]
    if min(row.forwards for row in rows) < 2 or len(set(hashes)) == 1:
        return []
    found = Finding.of("F41", ranks=odd_ranks(hashes), name="DistributedDataParallel")
    return [replace(found, step=rows[0].step, moment=CheckStage.BEFORE_BACKWARD.value)]


def _name_buffers(finding: Finding, fingerprints_by_rank: Sequence[Mapping[str, list[Any]]]) -> list[Finding]:
    """Name each buffer that differs, and say by its kind what that means."""
    names: dict[str, None] = {}
    for of_rank in fingerprints_by_rank:
        names |= dict.fromkeys(of_rank)
    found = []
    for name in names:
        # by rank: rows in their order, rows in any order, whether it is a queue
        column = [tuple(of_rank.get(name, (0, 0, False))) for of_rank in fingerprints_by_rank]
        if len(set(column)) == 1:
            continue
        is_queue = any(is_queue for _, _, is_queue in column)
        unordered = {rows for _, rows, _ in column}
        if is_queue and len(unordered) == 1:
            fault = "F26"
        elif is_queue:
            fault = "F64"
        else:
            fault = "F49"
        found.append(finding.refine(fault, ranks=odd_ranks(column), name=name))
    return found
