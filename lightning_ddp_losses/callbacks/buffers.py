"""What modules hold beside parameters, read for comparison: memory queues and running sums, batch norm's statistics, metric states."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.callbacks.replicated_parameters import DDP_IGNORES
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.core.module_search import unregistered_modules
from lightning_ddp_losses.distributed.fingerprint import hash_tables, row_tables, start_fingerprints

_QUEUE_WORDS = ("queue", "memory", "bank")
_QUEUE_ROWS = 1024  # of a larger queue its first rows are compared, and as many others
_MASK = (1 << 62) - 1
MAX_CHANNELS = 48  # of all layers together that are compared
_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MIN_VARIANCE = 1e-12


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


def cross_batch_memories(module: nn.Module) -> dict[str, Any]:
    """Return pytorch-metric-learning's cross-batch memories, by path."""
    return {
        name: inner
        for name, inner in module.named_modules()
        if "CrossBatchMemory" in _class_names(inner) and hasattr(inner, "queue_idx")
    }


def has_lost_position(memory: Any) -> bool:
    """Say whether a memory holds rows and says that it holds none."""
    # rows came back with the state_dict, the position did not: it is no buffer (PML 2.9)
    is_filled = bool(getattr(memory, "embedding_memory", torch.zeros(0)).any())
    return is_filled and int(memory.queue_idx) == 0 and not memory.has_been_filled


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
