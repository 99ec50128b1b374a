"""`BufferSyncCheck`: memory queues, batch norm and metric states, which must be equal on all ranks.

Three sections read modules, each for one kind of state: queues and running sums of losses, statistics of batch norm, states of metrics.
The check follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BUCKETS, BatchReader, label_imbalance
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing, differing_columns, odd_ranks
from lightning_ddp_losses.callbacks.replicas import DDP_IGNORES
from lightning_ddp_losses.callbacks.row_exchange import Row, Rows
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.host_copy import HostCopy, HostNumbers
from lightning_ddp_losses.core.modules import synchronises, unregistered_modules
from lightning_ddp_losses.distributed.fingerprint import hash_tables, hash_text, row_tables, start_fingerprints
from lightning_ddp_losses.metrics.states import ExchangingMetric

_QUEUE_WORDS = ("queue", "memory", "bank")
_QUEUE_ROWS = 1024  # compared rows of a larger queue: the first ones, and as many others
_MASK = (1 << 62) - 1
MAX_CHANNELS = 48  # compared channels of all layers together
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MIN_VARIANCE = 1e-12
_NOISE = 0.5  # standard deviations times the root of the rows
_SEARCH_EVERY = 64  # steps; a large model takes a while to walk through
_METRIC_STAGES = (CheckStage.VALIDATION_EPOCH_END, CheckStage.TRAIN_EPOCH_END)


# ---------------------------------------------------------------------- queues and running sums


class SentBuffer:
    """Fingerprints of a buffer on their way to the host.

    Args:
        value: Buffer. Only some rows of a large queue are read.
        is_queue: True if it holds rows of earlier batches.

    Attributes:
        is_queue: True if its rows are also compared without their order.
    """

    def __init__(self, value: Tensor, *, is_queue: bool) -> None:
        value = value.detach()
        self.is_queue = is_queue and value.ndim > 0 and value.shape[0] > 0
        if self.is_queue and value.shape[0] > 2 * _QUEUE_ROWS:
            rows = value.shape[0]
            others = torch.arange(_QUEUE_ROWS, rows, rows // _QUEUE_ROWS, device=value.device)
            value = torch.cat([value[:_QUEUE_ROWS], value[others]])
        self._in_order = start_fingerprints([value])
        self._rows = value.shape[0] if self.is_queue else 0
        tables = row_tables([value], self._rows, self._rows) if self.is_queue else []
        self._tables = [HostCopy(table) for table in tables]

    def read(self) -> tuple[int, int, bool]:
        """Return a hash of the rows in their order, one without the order, and whether it is a queue."""
        hashes = hash_tables([table.read() for table in self._tables], self._rows)
        return self._in_order.read()[0], sum(hashes) & _MASK, self.is_queue


class BufferSlot(NamedTuple):
    """Names the place of a buffer. The tensor there may be replaced."""

    path: str
    owner: nn.Module
    name: str
    is_queue: bool


def compared_slots(module: nn.Module) -> list[BufferSlot]:
    """Return the buffers of losses and metrics, and all queues, except those of batch norm and those that DDP ignores."""
    ignored = frozenset(getattr(module, DDP_IGNORES, ()))
    found: list[BufferSlot] = []
    for path, inner in module.named_modules():
        if isinstance(inner, compat.NORM_TYPES):
            continue
        # known by name: neither losses nor metrics have one base class
        names = [cls.__name__ for cls in type(inner).__mro__]
        is_objective = any(name.endswith(("Loss", "Metric", "CrossBatchMemory")) for name in names)
        for name, buffer in compat.buffer_slots(inner).items():
            full_name = f"{path}.{name}".removeprefix(".")
            is_queue = any(word in name.lower() for word in _QUEUE_WORDS) or "CrossBatchMemory" in names
            has_rows = buffer is not None and not is_lazy(buffer) and buffer.ndim >= 1 and buffer.shape[0] > 1
            if full_name not in ignored and (is_objective or (is_queue and has_rows)):
                found.append(BufferSlot(full_name, inner, name, is_queue and has_rows))
    return found


def is_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is its value: not for a sparse or an uninitialised one."""
    return not is_lazy(tensor) and tensor.layout == torch.strided


# ---------------------------------------------------------------------- batch norm


def plain_norms(module: nn.Module) -> dict[str, Any]:
    """Return the layers of torch's plain batch norm on this rank's rows, by path. A subclass may synchronise by itself."""
    return {
        name: inner for name, inner in module.named_modules() if type(inner) in _PLAIN_NORMS and not synchronises(inner)
    }


def norm_statistics(norms: Mapping[str, Any]) -> list[float]:
    """Return means, then variances, of channels spread evenly over all layers."""
    tracked = [norm for norm in norms.values() if norm.running_mean is not None and norm.running_var is not None]
    total = sum(norm.num_features for norm in tracked)
    if not total:
        return []
    chosen = sorted({i * total // MAX_CHANNELS for i in range(MAX_CHANNELS)})
    means = torch.cat([norm.running_mean.detach().double() for norm in tracked])
    variances = torch.cat([norm.running_var.detach().double() for norm in tracked])
    return [*torch.stack([means[chosen], variances[chosen]]).flatten().tolist()]


def norm_distances(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the distance of each rank's statistics from those of all ranks.

    Means are compared in standard deviations, variances in natural logarithms. The larger of the two counts, as the root mean square over
    channels.
    """
    if not rows[0]:
        return [0.0] * len(rows)
    means, variances = torch.tensor(rows, dtype=torch.float64).chunk(2, dim=1)
    # the mean over ranks of each number
    usual = variances.mean(0).clamp(min=_MIN_VARIANCE)
    of_means = (means - means.mean(0)).square() / usual
    of_variances = (variances.clamp(min=_MIN_VARIANCE) / usual).log().square()
    return [*torch.maximum(of_means.mean(1), of_variances.mean(1)).sqrt().tolist()]


# ---------------------------------------------------------------------- metric states


class StateKind(NamedTuple):
    """Properties of a metric's state that must be equal on all ranks for its gathers to match.

    Attributes:
        tensors: Number of tensors that are gathered one by one. -1 for a list that is concatenated first and may be empty on some ranks.
        ndim: Their dimensions. None for an empty list.
        dtype: Their dtype. None for an empty list.
    """

    tensors: int
    ndim: int | None = None
    dtype: str | None = None


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Return torchmetrics' metrics by path."""
    return {name: inner for name, inner in module.named_modules() if compat.state_reductions(inner) is not None}


def metric_states(module: nn.Module) -> dict[str, StateKind]:
    """Return the kind of every metric state, by path, before it is gathered, unless one exchange takes any number of tensors."""
    metrics = {
        f"{path}.{name}".strip("."): each for path, outer in _roots(module) for name, each in metrics_of(outer).items()
    }
    found: dict[str, StateKind] = {}
    for path, metric in metrics.items():
        if isinstance(metric, ExchangingMetric):
            continue
        for name, reduction in (compat.state_reductions(metric) or {}).items():
            value = getattr(metric, name, None)
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = StateKind(1, value.ndim, str(value.dtype))
            elif isinstance(value, list):
                number = len(value) if reduction is None else -1
                kinds = {(item.ndim or 1, str(item.dtype)) for item in value if isinstance(item, Tensor)}
                found[f"{path}.{name}"] = StateKind(number, *min(kinds, default=()))
    return found


def _roots(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the module, and those that it holds in a list, a dict or a partial, by path."""
    return [("", module), *unregistered_modules(module, {})]


def compare_states(finding: Finding, kinds: Sequence[StateKind]) -> Finding:
    """Describe a state that differs between ranks, from its kind on each."""
    numbers = [kind.tensors for kind in kinds]
    if len(set(numbers)) > 1:
        updates = tuple(f"{number} updates" for number in numbers)
        return Finding.of("F51", ranks=odd_ranks(numbers), name=finding.name, values=updates)
    shown = tuple("empty" if kind.ndim is None else f"{kind.ndim} dimensions, {kind.dtype}" for kind in kinds)
    return Finding.of("F52", ranks=odd_ranks(shown), name=finding.name, values=shown)


# ---------------------------------------------------------------------- rows, and the check


class ForwardRow(NamedTuple):
    """Numbers that travel before backward.

    Attributes:
        forwards: Largest number of forwards of a DDP with buffers since the last backward.
        buffers: Hash of its buffers before the second forward. 0 without a second forward or buffers.
        step: Optimizer steps before the backward of these numbers: the first backward of a fit, later the one before this one.
    """

    forwards: int
    buffers: int
    step: int


@dataclass(kw_only=True, eq=False, repr=False)
class BufferSyncCheck(RankCheck, default=True):
    """Batch norm's statistics, memory queues and metric states are equal on all ranks.

    Buffers after a step are judged at the next one, before a checkpoint is saved and at the end of training (``runner``), so that the check
    does not wait for a device. The finding names the step of its buffers.

    Covers F26, F41, F49, F51, F52, F59, F60 and F64.

    Args:
        tolerance: Allowed distance of batch-norm statistics in standard deviations. At least 0.5 divided by the root of the rows per
            rank, the distance by chance. Plain DDP keeps a tenth of the difference of the latest batches.
        **options: As ``RankCheck``.

    Communication: 24 bytes before backward, 32 after the step. At validation 0.9 KiB.

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

    tolerance: float = 0.1

    def _forget(self) -> None:
        self._slots: list[BufferSlot] | None = None
        self._buffers: dict[str, Tensor] = {}
        self._judged: dict[str, SentBuffer] = {}
        self._states: dict[str, StateKind] = {}
        # forwards of each DDP since the last backward, and its buffers before the second
        self._forwards: dict[int, int] = {}
        self._before_second: HostNumbers | None = None
        self._last_forwards: tuple[int, HostNumbers | None, int] | None = None

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Count forwards of every DDP that broadcasts buffers."""
        # the strategy's wrapper, and wrappers of users, also those that nn.Module does not register
        modules = {trainer.strategy.model, *module.modules()}
        modules.update(value for value in vars(module).values() if isinstance(value, nn.Module))
        for wrapped in modules:
            if isinstance(wrapped, DistributedDataParallel) and wrapped.broadcast_buffers:
                self.runner.before_forward(self, wrapped, partial(self._see_forward, wrapped))

    def _see_forward(self, wrapped: nn.Module, *_: Any) -> None:
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

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Read rows and labels, for the advice."""
        self.runner.shared(BatchReader).see(batch, batch_idx)

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return fingerprints of buffers or states, or channels of batch norm."""
        if stage == CheckStage.TRAIN_START:
            self._find_unconverted(trainer, module)
            return []
        if stage == CheckStage.BEFORE_BACKWARD:
            return self._forward_row()
        if stage == CheckStage.AFTER_STEP:
            return self._measure_buffers(module)
        if stage in _METRIC_STAGES:
            return self._measure_states(module)
        read = self.runner.shared(BatchReader)
        mean_rows = read.total_rows / max(read.number, 1)
        return [mean_rows, *map(float, read.counts), *norm_statistics(plain_norms(module))]

    def _forward_row(self) -> list[int]:
        """Return the forwards of the first backward at once, because autograd may fail in it, and later those of the backward before."""
        seen = max(self._forwards.values(), default=0), self._before_second, self.runner.step
        self._forwards, self._before_second = {}, None
        (forwards, before_second, step), self._last_forwards = self._last_forwards or seen, seen
        values = [] if before_second is None else before_second.read()
        return [*ForwardRow(forwards, hash_text(repr(values)) if values else 0, step)]

    def _measure_buffers(self, module: nn.Module) -> Row:
        """Start to read the compared buffers."""
        if self._slots is None or self.runner.step % _SEARCH_EVERY == 0:
            self._slots = compared_slots(module)
        self._buffers = {}
        sent: dict[str, SentBuffer] = {}
        for slot in self._slots:
            value = compat.buffer_slots(slot.owner).get(slot.name)
            if value is not None and not value.is_meta and is_plain_memory(value):
                self._buffers[slot.path] = value.int_repr() if value.is_quantized else value
                sent[slot.path] = SentBuffer(self._buffers[slot.path], is_queue=slot.is_queue)
        return partial(self._read_buffers, sent)

    def _read_buffers(self, sent: dict[str, SentBuffer]) -> list[int]:
        """Return the number of compared buffers, and a hash of their names and fingerprints, which are kept for the explanation."""
        self._judged = sent
        named = [(name, *buffer.read()) for name, buffer in sent.items()]
        return [len(named), hash_text(repr(named))]

    def _measure_states(self, module: nn.Module) -> list[int]:
        """Return a hash of the states' names, then one for the kind of each."""
        self._states = metric_states(module)
        # an empty list of a state that is concatenated matches any other
        kinds = [0 if kind == StateKind(-1) else hash_text(repr(kind)) for kind in self._states.values()]
        return [hash_text(repr(list(self._states))), *kinds]

    def _find_unconverted(self, trainer: Trainer, module: LightningModule) -> None:
        """Find plain batch norm although the trainer synchronises it."""
        if not compat.has_layer_sync(trainer.strategy):
            return
        # also in unregistered modules, which the conversion does not find
        for path, outer in _roots(module):
            for name in plain_norms(outer):
                self.add("F60", name=f"{path}.{name}".strip("."))

    # ------------------------------------------------------------------ judge

    def judge(self, table: Rows, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Compare buffers, metric states or statistics of the ranks."""
        if stage == CheckStage.TRAIN_START:
            return []
        if stage == CheckStage.BEFORE_BACKWARD:
            return _two_forwards([ForwardRow(*row) for row in table])
        if stage == CheckStage.AFTER_STEP:
            return differing([tuple(row) for row in table], "F64", "unnamed", name="buffers")
        if stage in _METRIC_STAGES:
            return self._judge_states(table)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return _judge_norms(table, self.tolerance, float(rates[0]) if rates else 0.0)

    def _judge_states(self, table: list[list[int]]) -> list[Finding]:
        names, *columns = zip(*table, strict=True)
        if len(set(names)) > 1:  # different metrics per rank: they cannot be lined up
            return []
        found = []
        for name, column in zip(self._states, columns, strict=True):
            if len(set(column) - {0}) > 1:
                found.append(Finding.of("F52", ranks=odd_ranks(column), name=name))
        return found

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's fingerprints, or the kind of a state."""
        if finding.name == "buffers":
            return {name: sent.read() for name, sent in self._judged.items()}
        return self._states.get(finding.name, StateKind(0)) if finding.fault == "F52" else None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the buffers or states."""
        if finding.name == "buffers":
            return _name_buffers(finding, texts)
        return [compare_states(finding, [StateKind(*text) for text in texts])]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the buffer itself."""
        return self._buffers.get(finding.name)


def _two_forwards(rows: Sequence[ForwardRow]) -> list[Finding]:
    """Report a second forward that overwrote buffers which the first one used."""
    hashes = [row.buffers for row in rows]
    if min(row.forwards for row in rows) < 2 or len(set(hashes)) == 1:
        return []
    found = Finding.of("F41", ranks=odd_ranks(hashes), name="DistributedDataParallel")
    return [replace(found, step=rows[0].step, moment=CheckStage.BEFORE_BACKWARD.value)]


def _judge_norms(table: Rows, tolerance: float, rate: float) -> list[Finding]:
    """Compare batch norm: a row has the rows per batch, the labels of the epoch by bucket, and the statistics of some channels."""
    distances = norm_distances([row[1 + BUCKETS :] for row in table])
    local_rows, labels = [row[0] for row in table], [row[1 : 1 + BUCKETS] for row in table]
    # further apart than the tolerance, and than chance puts them
    largest, global_rows = max(local_rows), sum(local_rows)
    allowed = max(tolerance, _NOISE / max(min(local_rows), 1.0) ** 0.5)
    if max(distances) <= allowed:
        return []
    # advice: the effect of normalising over all ranks
    advice = {"allowed": allowed, "largest": largest, "global_rows": global_rows, "rate": rate}
    advice["scaled"] = rate * global_rows / max(largest, 1.0)
    unlike = f"{label_imbalance(labels):.0%} unlike those of all" if any(map(sum, labels)) else "unknown"
    values = tuple(f"{distance:.3g} standard deviations from the mean of all ranks" for distance in distances)
    return [Finding.of("F59", name="batch norm", values=values, unlike=unlike, **advice)]


def _name_buffers(finding: Finding, fingerprints_by_rank: Sequence[Mapping[str, list[Any]]]) -> list[Finding]:
    """Name each buffer that differs, with the fault of its kind."""
    found = []
    for name, values in differing_columns(fingerprints_by_rank).items():
        # by rank: rows in their order, rows in any order, whether it is a queue
        column = [tuple(value or (0, 0, False)) for value in values]
        is_queue = any(is_queue for _, _, is_queue in column)
        unordered = {rows for _, rows, _ in column}
        if is_queue and len(unordered) == 1:
            fault = "F26"
        elif is_queue:
            fault = "F64"
        else:
            fault = "F49"
        found.append(Finding.of(fault, ranks=odd_ranks(column), name=name))
    return found
