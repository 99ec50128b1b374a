"""`BufferSyncCheck`: memory queues, batch norm, metric states and the user's buffers must be equal on all ranks.

The first three sections each read one kind of state from modules: buffers, statistics of batch norm, and states of metrics. The check
follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BatchReader
from lightning_ddp_losses.callbacks.facts.fact import Fact, Numbers
from lightning_ddp_losses.callbacks.facts.rules import (
    BUFFERS,
    OWN_BUFFERS,
    compare_buffers,
    compare_forwards,
    compare_metric_states,
    compare_norms,
    compare_own_buffers,
    of_own_buffer,
)
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing_columns, odd_ranks
from lightning_ddp_losses.callbacks.replicas import DDP_IGNORES
from lightning_ddp_losses.core import lightning_compat, metrics_compat, torch_compat
from lightning_ddp_losses.core.fault_rules import fault_of_memory
from lightning_ddp_losses.core.host_copy import HostCopy, HostNumbers
from lightning_ddp_losses.core.modules import plain_norms, unregistered_modules
from lightning_ddp_losses.core.transparent import wrapped_module
from lightning_ddp_losses.distributed.fingerprint import hash_tables, hash_text, row_tables, start_fingerprints
from lightning_ddp_losses.metrics.states import ExchangingMetric

_QUEUE_WORDS = ("queue", "memory", "bank")
_QUEUE_ROWS = 1024  # of a larger queue, the first rows and about as many evenly spaced rows are compared
_MASK = (1 << 62) - 1
MAX_CHANNELS = 48  # largest number of compared channels over all layers
_SEARCH_EVERY = 64  # interval in steps, because walking through a large model takes time
_AFTER_STEPS = (CheckStage.VALIDATION_START, CheckStage.TRAIN_END)
_EPOCH_ENDS = (CheckStage.VALIDATION_EPOCH_END, CheckStage.TRAIN_EPOCH_END)
_EQUAL = ("number", "values")  # columns about buffers that are equal on healthy ranks


# ---------------------------------------------------------------------- buffers


class SentBuffer:
    """Fingerprints of a buffer, whose copy to the host has been started.

    Args:
        value: Buffer. Only some rows of a large queue are read.
        is_queue: True if the buffer contains rows of earlier batches.

    Attributes:
        is_queue: True if its rows are also compared regardless of their order.
        shape: Shape of the buffer.
    """

    def __init__(self, value: Tensor, *, is_queue: bool) -> None:
        value = value.detach()
        self.shape = tuple(value.shape)
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
        """Return a hash of the rows in order, a hash that does not depend on their order, and whether the buffer is a queue."""
        hashes = hash_tables([table.read() for table in self._tables], self._rows)
        return self._in_order.read()[0], sum(hashes) & _MASK, self.is_queue


class ReadBuffers:
    """The compared buffers of one kind.

    Attributes:
        values: Buffers that were read last, by path.
        judged: Fingerprints of the buffers that were judged last, by path.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.judged: dict[str, SentBuffer] = {}

    def start(self, slots: Sequence[BufferSlot]) -> Callable[[], Numbers]:
        """Start to read buffers. Return a function for their number and a hash of their names and fingerprints."""
        self.values = {}
        sent: dict[str, SentBuffer] = {}
        for slot in slots:
            value = torch_compat.buffer_slots(slot.owner).get(slot.name)
            if value is not None and not value.is_meta and is_plain_memory(value):
                self.values[slot.path] = value.int_repr() if value.is_quantized else value
                sent[slot.path] = SentBuffer(self.values[slot.path], is_queue=slot.is_queue)

        def read() -> Numbers:
            self.judged = sent  # for the explanation
            named = [(name, *buffer.read()) for name, buffer in sent.items()]
            return {"number": len(named), "values": hash_text(repr(named))}

        return read


class BufferSlot(NamedTuple):
    """Identifies a buffer by its owner and name, since the tensor may be replaced.

    Attributes:
        path: Name of the buffer in the root module.
        owner: Module in which the buffer is registered.
        name: Name of the buffer in its owner.
        is_queue: True if the buffer contains rows of earlier batches.
        is_own: True if the buffer is not a queue, and its owner is neither a loss nor a metric.
    """

    path: str
    owner: nn.Module
    name: str
    is_queue: bool = False
    is_own: bool = False


def compared_buffers(module: nn.Module) -> list[BufferSlot]:
    """Return the buffers to compare, excluding buffers of batch norm and buffers that DDP ignores.

    These are the buffers of losses and metrics, all queues, and floating-point or complex buffers of other modules if they are saved in a
    checkpoint (running means, centres, codebooks). Buffers that are not saved in a checkpoint are caches, which may differ between ranks.
    """
    ignored = frozenset(getattr(module, DDP_IGNORES, ()))
    found: list[BufferSlot] = []
    for path, inner in module.named_modules():
        if isinstance(inner, torch_compat.NORM_TYPES):
            continue
        # identified by class name, because neither losses nor metrics have a common base class
        kinds = [type(inner), type(wrapped_module(inner) or inner)]
        names = [cls.__name__ for kind in kinds for cls in kind.__mro__]
        is_objective = any(name.endswith(("Loss", "Metric", "CrossBatchMemory")) for name in names)
        for name, buffer in torch_compat.buffer_slots(inner).items():
            full_name = f"{path}.{name}".removeprefix(".")
            if full_name in ignored:
                continue
            is_queue = any(word in name.lower() for word in _QUEUE_WORDS) or "CrossBatchMemory" in names
            has_rows = buffer is not None and not is_lazy(buffer) and buffer.ndim >= 1 and buffer.shape[0] > 1
            is_number = buffer is not None and (buffer.is_floating_point() or buffer.is_complex())
            if is_objective or (is_queue and has_rows):
                found.append(BufferSlot(full_name, inner, name, is_queue=is_queue and has_rows))
            elif is_number and torch_compat.is_persistent(inner, name):
                found.append(BufferSlot(full_name, inner, name, is_own=True))
    return found


def is_plain_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is its value, which excludes sparse and uninitialised tensors."""
    return not is_lazy(tensor) and tensor.layout == torch.strided


# ---------------------------------------------------------------------- batch norm


def norm_statistics(norms: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Return means and variances of channels spread evenly over all layers."""
    tracked = [norm for norm in norms.values() if norm.running_mean is not None and norm.running_var is not None]
    total = sum(norm.num_features for norm in tracked)
    if not total:
        return [], []
    chosen = sorted({i * total // MAX_CHANNELS for i in range(MAX_CHANNELS)})
    means = torch.cat([norm.running_mean.detach().double() for norm in tracked])
    variances = torch.cat([norm.running_var.detach().double() for norm in tracked])
    of_means, of_variances = torch.stack([means[chosen], variances[chosen]]).tolist()
    return of_means, of_variances


# ---------------------------------------------------------------------- metric states


class StateKind(NamedTuple):
    """Properties of a metric's state that must be equal on all ranks for its gathers to match.

    Attributes:
        tensors: Number of tensors that are gathered one by one. -1 for a list that is concatenated first and may be empty on some ranks.
        ndim: Number of dimensions of the tensors. None for an empty list.
        dtype: Data type of the tensors. None for an empty list.
    """

    tensors: int
    ndim: int | None = None
    dtype: str | None = None


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Return torchmetrics' metrics by path."""
    return {name: inner for name, inner in module.named_modules() if metrics_compat.state_reductions(inner) is not None}


def metric_states(module: nn.Module) -> dict[str, StateKind]:
    """Return the kind of every metric state before its gather, by path, except for metrics that exchange any number of tensors."""
    metrics = {
        f"{path}.{name}".strip("."): each for path, outer in _roots(module) for name, each in metrics_of(outer).items()
    }
    found: dict[str, StateKind] = {}
    for path, metric in metrics.items():
        if isinstance(metric, ExchangingMetric):
            continue
        for name, reduction in (metrics_compat.state_reductions(metric) or {}).items():
            value = getattr(metric, name, None)
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = StateKind(1, value.ndim, str(value.dtype))
            elif isinstance(value, list):
                number = len(value) if reduction is None else -1
                kinds = {(item.ndim or 1, str(item.dtype)) for item in value if isinstance(item, Tensor)}
                found[f"{path}.{name}"] = StateKind(number, *min(kinds, default=()))
    return found


def _roots(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the module, and modules in its lists, dicts and partials, by path."""
    return [("", module), *unregistered_modules(module, {})]


def compare_states(finding: Finding, kinds: Sequence[StateKind]) -> Finding:
    """Return the finding for a state that differs between ranks, given its kind on each rank."""
    numbers = [kind.tensors for kind in kinds]
    if len(set(numbers)) > 1:
        updates = tuple(f"{number} updates" for number in numbers)
        return Finding.of("F51", ranks=odd_ranks(numbers), name=finding.name, values=updates)
    shown = tuple("empty" if kind.ndim is None else f"{kind.ndim} dimensions, {kind.dtype}" for kind in kinds)
    return Finding.of("F52", ranks=odd_ranks(shown), name=finding.name, values=shown)


# ---------------------------------------------------------------------- the check


@dataclass(kw_only=True, eq=False, repr=False)
class BufferSyncCheck(RankCheck, default=True):
    """Checks that batch-norm statistics, memory queues, metric states and the user's buffers are equal on all ranks.

    Buffers of losses and queues are compared in every step. Other floating-point buffers that are saved in a checkpoint are compared after
    the first step and every 64th step, before a validation and at the end of training. A difference in these is a warning. Buffers after a
    step are judged in the next step, before a checkpoint is saved and at the end of training (``runner``), so that the check does not wait
    for a device. The finding names the step of its buffers.

    Covers F26, F41, F49, F51, F52, F59, F60 and F64.

    Args:
        tolerance: Allowed distance of batch-norm statistics in standard deviations. The limit is never below 0.5 divided by the square root
            of the rows per rank, which is the distance by chance. Plain DDP keeps a tenth of the difference of the latest batches.
        **options: Same as in ``RankCheck``.

    Communication: 24 bytes before backward, 16 after the step, and 16 more if all buffers are compared. 0.9 KiB at validation.

    Example:
        >>> checks = DDPChecks([BufferSyncCheck(tolerance=0.2)])
    """

    faults = ("F26", "F41", "F49", "F51", "F52", "F59", "F60", "F64")
    shares = (("_batches", BatchReader),)
    _batches: BatchReader = field(init=False)

    tolerance: float = 0.1

    def _forget(self) -> None:
        self._slots: list[BufferSlot] | None = None
        self._read_by_name = {BUFFERS: ReadBuffers(), OWN_BUFFERS: ReadBuffers()}  # by the name of their finding
        self._states: dict[str, StateKind] = {}
        # number of forwards of each DDP since the last backward, and its buffers before the second forward
        self._forwards: dict[int, int] = {}
        self._before_second: HostNumbers | None = None
        self._last_forwards: tuple[int, HostNumbers | None, int] | None = None

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Count forwards of every DDP that broadcasts buffers."""
        # the strategy's wrapper, and wrappers in the user's module, including those that are not registered as submodules
        modules = {trainer.strategy.model, *module.modules()}
        modules.update(value for value in vars(module).values() if isinstance(value, nn.Module))
        for wrapped in modules:
            if isinstance(wrapped, DistributedDataParallel) and wrapped.broadcast_buffers:
                self.runner.before_forward(self, wrapped, partial(self._see_forward, wrapped))

    def _see_forward(self, wrapped: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled() or not wrapped.training:
            return
        self._forwards[id(wrapped)] = self._forwards.get(id(wrapped), 0) + 1
        if self._forwards[id(wrapped)] == 2:  # DDP broadcasts buffers after this hook
            # statistics of batch norm differ under plain DDP by design
            of_norms: set[int] = set()
            for norm in plain_norms(wrapped).values():
                of_norms.update(map(id, norm.buffers()))
            self._before_second = start_fingerprints(
                buffer for buffer in wrapped.buffers() if id(buffer) not in of_norms and is_plain_memory(buffer)
            )

    def see_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Reset the count of forwards, also after a backward that only accumulates, because buffers are no longer used after it."""
        self._forwards, self._before_second = {}, None

    # ------------------------------------------------------------------ facts

    def _read_start(self) -> Numbers:
        """Find plain batch norm in spite of the trainer's option to synchronise it."""
        # include unregistered modules, which the trainer does not convert
        if lightning_compat.has_layer_sync(self.runner.trainer.strategy):
            for path, outer in _roots(self.runner.module):
                for name in plain_norms(outer):
                    self.add("F60", name=f"{path}.{name}".strip("."))
        return {}

    def _read_forwards(self) -> Numbers:
        """Return the largest number of forwards of a DDP with buffers, a hash of its buffers before the second forward, and the step.

        The first call returns the numbers of the first backward, because autograd may raise an error in it. Later calls return the numbers
        of the previous backward.
        """
        seen = max(self._forwards.values(), default=0), self._before_second, self.runner.step
        self._forwards, self._before_second = {}, None
        (forwards, before_second, step), self._last_forwards = self._last_forwards or seen, seen
        values = [] if before_second is None else before_second.read()
        return {"forwards": forwards, "buffers": hash_text(repr(values)) if values else 0, "step": step}

    def _read_buffers(self) -> Callable[[], Numbers]:
        """Start to read the compared buffers, and return a function for their number and a hash of names and fingerprints."""
        if self._slots is None or self.runner.step % _SEARCH_EVERY == 0:
            self._slots = [slot for slot in compared_buffers(self.runner.module) if not slot.is_own]
        return self._read_by_name[BUFFERS].start(self._slots)

    def _read_own_buffers(self) -> Callable[[], Numbers]:
        """Start to read the buffers of the user's modules, and return a function for their number and hash."""
        slots = [slot for slot in compared_buffers(self.runner.module) if slot.is_own]
        return self._read_by_name[OWN_BUFFERS].start(slots)

    def _read_own_after_step(self) -> Callable[[], Numbers] | None:
        """Start to read the buffers of the user's modules after the first step and every 64th step. Otherwise return None."""
        if self.runner.steps and self.runner.step % _SEARCH_EVERY:
            return None
        return self._read_own_buffers()

    def _read_states(self) -> Numbers:
        """Return a hash of the names of the states, followed by a hash of each state's kind."""
        self._states = metric_states(self.runner.module)
        numbers = {"names": hash_text(repr(list(self._states)))}
        for name, kind in self._states.items():
            # an empty list of a state that is concatenated matches any other
            numbers[name] = 0 if kind == StateKind(-1) else hash_text(repr(kind))
        return numbers

    def _read_norms(self) -> Numbers:
        """Return the rows per batch, the labels of the epoch by bucket, statistics of some channels, and numbers for the advice."""
        read = self._batches
        means, variances = norm_statistics(plain_norms(self.runner.module))
        rates = [group["lr"] for optimizer in self.runner.trainer.optimizers for group in optimizer.param_groups]
        return {
            "rows": read.total_rows / max(read.number, 1),
            "labels": read.counts,
            "means": means,
            "variances": variances,
            "tolerance": float(self.tolerance),
            "rate": float(rates[0]) if rates else 0.0,
        }

    facts = (
        Fact("kinds of batch norm", CheckStage.TRAIN_START, _read_start),
        Fact("forwards", CheckStage.BEFORE_BACKWARD, _read_forwards, compare_forwards, equal=("buffers",)),
        Fact("buffers", CheckStage.AFTER_STEP, _read_buffers, compare_buffers, equal=_EQUAL),
        Fact("own buffers", CheckStage.AFTER_STEP, _read_own_after_step, compare_own_buffers, equal=_EQUAL),
        Fact("own buffers", _AFTER_STEPS, _read_own_buffers, compare_own_buffers, equal=_EQUAL),
        Fact("metric states", _EPOCH_ENDS, _read_states, compare_metric_states),
        Fact("batch norm", _AFTER_STEPS, _read_norms, compare_norms),
    )

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's fingerprints, or the kind of a state."""
        if finding.name in self._read_by_name:
            judged = self._read_by_name[finding.name].judged.items()
            return {name: [*sent.read(), list(sent.shape)] for name, sent in judged}
        if finding.fault != "F52":
            return None
        return [self._states.get(name, StateKind(0)) for name in finding.name.split(", ")]

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the buffers or states."""
        if finding.name == BUFFERS:
            return _name_buffers(texts)
        if finding.name == OWN_BUFFERS:
            columns = differing_columns(texts).items()
            return [of_own_buffer(name, column, _differing_shapes(column)) for name, column in columns]
        # states of one metric differ for one reason, which is explained for the first state
        return [compare_states(finding, [StateKind(*kinds[0]) for kinds in texts])]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return the buffer itself."""
        values = [read.values[finding.name] for read in self._read_by_name.values() if finding.name in read.values]
        return values[0] if values else None


def _differing_shapes(column: Sequence[list[Any] | None]) -> tuple[str, ...]:
    """Return the shape of a buffer on each rank, as text, if they differ."""
    shapes = tuple("no such buffer" if value is None else f"shape {tuple(value[-1])}" for value in column)
    return shapes if len(set(shapes)) > 1 else ()


def _name_buffers(fingerprints_by_rank: Sequence[Mapping[str, list[Any]]]) -> list[Finding]:
    """Name each buffer that differs, with the fault of its kind."""
    found = []
    for name, values in differing_columns(fingerprints_by_rank).items():
        # for each rank: hash of rows in order, hash of rows in any order, whether the buffer is a queue
        column = [tuple((value or (0, 0, False))[:3]) for value in values]
        is_queue = any(is_queue for _, _, is_queue in column)
        fault = "F49"
        if is_queue:
            fault = fault_of_memory([rows for _, rows, _ in column])
        found.append(Finding.of(fault, ranks=odd_ranks(column), name=name, values=_differing_shapes(values)))
    return found
