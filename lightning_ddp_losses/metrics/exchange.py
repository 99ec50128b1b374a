"""Exchanges the states of several metrics among all ranks at once: values of all ranks, gradient through this rank's own states.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum. Each metric packs its states into a ``Packet``. A
state is of one of three kinds:

| kind | state | gathered |
|---|---|---|
| ``stack`` | a tensor, equal in shape on all ranks | (W, ...) |
| ``rows`` | a tensor or a list reduced by "cat": tensors (B, ...) | (G, ...), or no tensor if no rank has one |
| ``list`` | any other list | the tensors of all ranks, each with its own shape |

A handshake compares the metrics and their states. It carries the shapes of this rank's tensors, and their bytes if they fit (*inline*).
If a rank has more, the bytes follow in one all-reduce, in place in the buffer that they are read from. There is no barrier and no
collective in backward: every rank computes the same value from the same bytes, so its own slice gets its own gradient times W.

Each rank makes the same plan of the buffer from the shapes of all ranks. Tensors of a list are ordered as one process would have appended
them: by update first, by rank second. A rank without data holds defaults, and some metrics widen these at their first update. Such a
default takes the shape of the other ranks' state. Any other difference is an error, the same on every rank.

What the names, kinds and fixed shapes of the states decide is kept by the metric or collection that is called (``ExchangePlan``): the text
of what must match and, if no state has rows or items, the description of this rank's tensors.

Metrics of a collection's compute group share their states. A rank sends them once, and they get one place in the buffer if they are shared
on every rank. (A rank without data has no groups yet. Its defaults are compared.)

Measured (torchmetrics 1.9, torch 2.13, 2026): its own sync is one gather with a barrier for each state, 5 collectives for one
``MeanSquaredError`` and 58 for a collection of six. Here it is one.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_mean

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed import handshake, messages, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.gathered_batch import aligned
from lightning_ddp_losses.distributed.global_values import micro_batch_to_match
from lightning_ddp_losses.distributed.messages import Agreement, Instance
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_slices_, as_bytes, host_bytes, travels_on_device
from lightning_ddp_losses.errors import RankMismatchError

Kind = Literal["stack", "rows", "list"]
Entry: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""


# ---------------------------------------------------------------------- a metric's message


class State(NamedTuple):
    """A state on its way to the other ranks.

    Attributes:
        name: Names of the metric and the state, for messages.
        kind: How the state is gathered.
        reduction: Name of the reduction, to compare between ranks.
        untouched: Whether the value is still the default.
        value: Tensor, or list of tensors or of other objects (text, nests of tensors). Such objects are pickled.
        device: Device of the metric. Tensors of a list on other devices are moved there.
        reduce: torchmetrics' reduction, a function of the stacked tensors or of the list, or None.
        weight: Number of this rank's rows, as a weight of means over ranks.
    """

    name: str
    kind: Kind
    reduction: str
    untouched: bool
    value: Tensor | list[Any]
    device: torch.device
    reduce: Callable[..., Any] | None
    weight: float = 1.0

    @property
    def holds_objects(self) -> bool:
        """Whether the list has an item that is not a tensor."""
        return isinstance(self.value, list) and not all(isinstance(item, Tensor) for item in self.value)

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Return the tensors to send, on one device. Rows have at least one dimension, and one dtype."""
        if isinstance(self.value, Tensor):
            tensors = [self.value]
        else:
            tensors = list(self.value)
            if self.holds_objects:
                return [_pickled(self.name, item).to(device) for item in tensors]
        if self.kind == "rows":
            tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
            dtypes = [tensor.dtype for tensor in tensors]
            if len(set(dtypes)) > 1:  # as torch.cat joins them
                wide = functools.reduce(torch.promote_types, dtypes)
                tensors = [tensor.to(wide) for tensor in tensors]
        return [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]

    def reduced(self, gathered: list[Tensor], rows: Sequence[float]) -> Any:
        """Reduce the tensors of all ranks as torchmetrics does. Means are weighted by the ``rows`` of each rank."""
        if self.kind == "rows":
            return gathered[0] if gathered else []
        if self.reduce is None or not gathered:
            return gathered[0] if self.kind == "stack" else gathered
        if self.kind == "list":
            return self.reduce(gathered)
        stacked = gathered[0]
        if self.reduce is dim_zero_mean and len(set(rows)) > 1 and stacked.is_floating_point():
            ranks = [rank for rank, n in enumerate(rows) if n]  # a mean without rows is NaN
            shares = stacked.new_tensor([rows[rank] for rank in ranks]) / sum(rows)
            return torch.tensordot(shares, stacked[ranks], 1)
        return self.reduce(stacked)


class Packet(NamedTuple):
    """The states that one metric exchanges.

    Attributes:
        states: States, with the same names in the same order on every rank.
        group: Process group. None is the world.
        configuration: Text of the metric's configuration.
        upstream_grads: Text of the factors that came back into its values in backward.
        instance: Identity among metrics of one kind.
    """

    states: Sequence[State]
    group: Group = None
    configuration: str = ""
    upstream_grads: str = ""
    instance: Instance | None = None


# ---------------------------------------------------------------------- what is decided once


def plans_of(owner: object) -> Plans[ExchangePlan]:
    """Return the plans that a metric or collection stores."""
    attributes = vars(owner)
    if "_plans" not in attributes:
        attributes["_plans"] = Plans()
    plans: Plans[ExchangePlan] = attributes["_plans"]
    return plans


@dataclass(frozen=True)
class ExchangePlan:
    """What the signature of an exchange decides.

    Attributes:
        agreement: What must match, apart from the values that change in each call.
        states: Names and kinds of the states.
        contents: Contents of this rank's message (``pack_contents``). None if a state has rows or items, whose number may change.
    """

    agreement: Agreement
    states: tuple[tuple[str, Kind], ...]
    contents: str | None


def _plan_of(
    title: str,
    states: Sequence[State],
    tensors: Sequence[Sequence[Tensor]],
    holders: Sequence[int],
    packets: Sequence[Packet],
    plans: Plans[ExchangePlan],
) -> ExchangePlan:
    """Return the plan of an exchange. It is made if the signature of the exchange is new."""
    device = states[0].device.type if states else "cpu"
    configuration = tuple([packet.configuration for packet in packets])
    described = tuple([state[:4] for state in states])
    fixed = None
    if all(state.kind == "stack" for state in states):
        fixed = tuple([(tensor.dtype, tensor.shape) for sent in tensors for tensor in sent]), tuple(holders)
    signature = (title, torch.is_grad_enabled(), device, configuration, described, fixed)
    plan: ExchangePlan | None = plans.get(signature)
    if plan is None:
        compared = [f"{name} ({kind}, {reduction})" for name, kind, reduction, _ in described]
        must_match = {
            "gradients": "on" if torch.is_grad_enabled() else "off",
            "configuration": "; ".join(configuration),
            "device": device,
            "states": ", ".join(compared),
        }
        kinds = tuple([(state.name, state.kind) for state in states])
        contents = None if fixed is None else pack_contents(states, tensors, holders)
        plan = ExchangePlan(Agreement(title, must_match), kinds, contents)
        plans.add(signature, plan)
    return plan


# ---------------------------------------------------------------------- the exchange


def exchange(title: str, packets: Sequence[Packet], plans: Plans[ExchangePlan]) -> list[list[Any]]:
    """Exchange the states of several metrics and reduce them.

    Args:
        title: Name of the operation, for the handshake.
        packets: One packet for each metric, with the same metrics in the same order on every rank.
        plans: Plans of the metric or collection that is called.

    Returns:
        The states of each packet, reduced over all ranks, with the same bits on every rank.

    Gradient: this rank's own states receive W times the gradient that comes back (which is the same on every rank).

    Communication:
        For each process group and kind of device one handshake. If the bytes of a rank do not fit in it, one all-reduce in place, on the
        device. One more gather at a size that the handshakes have not grown to yet.

    Raises:
        RankMismatchError: on every rank, naming the state, when ranks disagree in a way that has no right result.
    """
    by_ranks: dict[tuple[int, ...], list[Packet]] = {}
    ranks_of = {group: process_groups.members(group) for group in {packet.group for packet in packets}}
    for packet in packets:
        by_ranks.setdefault(ranks_of[packet.group], []).append(packet)
    reduced: dict[int, Any] = {}
    for chosen in by_ranks.values():
        states = list(itertools.chain.from_iterable([packet.states for packet in chosen]))
        devices = list(dict.fromkeys([state.device.type for state in states])) or ["cpu"]
        with handshake.raising_on_all_ranks(title, group=chosen[0].group):
            for device in devices:
                name = title if len(devices) == 1 else f"{title}, on {device}"
                on_device = [state for state in states if state.device.type == device]
                values = _exchange_states(name, on_device, chosen, plans)
                reduced.update(zip(map(id, on_device), values, strict=True))
    return [[reduced[id(state)] for state in packet.states] for packet in packets]


def _exchange_states(
    title: str, states: Sequence[State], packets: Sequence[Packet], plans: Plans[ExchangePlan]
) -> list[Any]:
    """Exchange the states of some packets that are on one kind of device, and reduce them."""
    group = packets[0].group
    device = states[0].device if states else torch.device("cpu")
    holders = _first_holders(states)
    tensors = [state.tensors(device) if holders[index] == index else [] for index, state in enumerate(states)]
    own = list(itertools.chain.from_iterable(tensors))
    plan = _plan_of(title, states, tensors, holders, packets, plans)
    # handshake: shapes and row counts, and the bytes themselves if they fit
    contents = plan.contents or pack_contents(states, tensors, holders)
    payload = _head(True, states, contents)
    is_inline = len(payload) + sum([tensor.nbytes for tensor in own]) <= handshake.inline_capacity(group)
    if own and travels_on_device(own[0], group):
        is_inline = False  # a copy to the host would wait for the device
    payload = payload + _joined_bytes(own, device) if is_inline else _head(False, states, contents)
    of_call = {
        "which": packets[0].instance,
        "factor that came back in the last backward": ", ".join([packet.upstream_grads for packet in packets]),
        **micro_batch_to_match(),
    }
    received = [sent.partition(b"\n") for sent in handshake.all_gather(plan.agreement, of_call, payload, group=group)]
    inline, weights, all_contents = zip(*[json.loads(head) for head, _, _ in received], strict=True)

    # gather: the tensors of all ranks in one buffer, in the order of one process
    buffer_plan = plan_buffer(title, plan.states, all_contents)
    if all(inline):
        buffer = _buffer_from_bytes(buffer_plan, [data for _, _, data in received]).to(device)
    else:
        buffer = _gather_buffer(buffer_plan, own, device, group)

    # read: this rank's own slices with their graph, then reduce
    gathered = _read_with_grad(buffer_plan, buffer, own, group)
    for index in buffer_plan.objects:
        gathered[index] = [_unpickled(tensor, states[index].device) for tensor in gathered[index]]
    rows_of_means = zip(*weights, strict=True)
    found = []
    for state, values in zip(states, gathered, strict=True):
        rows = next(rows_of_means) if state.reduce is dim_zero_mean else ()
        found.append(state.reduced(values, rows))
    return found


def _first_holders(states: Sequence[State]) -> list[int]:
    """Return for each state the first state with the same tensors, which is itself if no earlier one has them."""
    holder_of: dict[Any, int] = {}
    found = []
    for index, state in enumerate(states):
        value = state.value
        held: tuple[Any, ...] = (id(value),)
        if isinstance(value, list):
            held = tuple(map(id, value))
        elif state.untouched and value.device.type == "cpu":
            held = (value.dtype, value.shape, host_bytes(value))  # each metric has its own defaults
        found.append(holder_of.setdefault((state.kind, state.reduce, *held), index))
    return found


def _joined_bytes(tensors: Sequence[Tensor], device: torch.device) -> bytes:
    if device.type != "cpu" and tensors:  # one copy to the host, not one per tensor
        flat = torch.cat([as_bytes(tensor) for tensor in tensors])
        return flat.cpu().numpy().tobytes()
    return b"".join(map(host_bytes, tensors))


def _head(is_inline: bool, states: Sequence[State], contents: str) -> bytes:
    """Return the first line of a message: whether the tensors' bytes follow, the rows behind each mean, and the contents."""
    weights = [state.weight for state in states if state.reduce is dim_zero_mean]
    return json.dumps([is_inline, weights, contents], separators=(",", ":")).encode() + b"\n"


def _pickled(name: str, item: Any) -> Tensor:
    item = inputs.map_tensors(lambda tensor: tensor.detach().cpu(), item)
    data = messages.pack_readable(item, f"state `{name}`")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickled(data: Tensor, device: torch.device) -> Any:
    return inputs.map_tensors(lambda tensor: tensor.to(device), messages.unpack(host_bytes(data)))


# ---------------------------------------------------------------------- the plan of the buffer


class Sent(NamedTuple):
    """A tensor in the message of a rank.

    Attributes:
        number: Number among the tensors that the rank sends.
        bytes: Its bytes in the message.
        dtype: Data type.
        shape: Shape.
    """

    number: int
    bytes: slice
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def entry(self) -> Entry:
        """Return dtype and shape."""
        return self.dtype, self.shape

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return int(self.bytes.stop - self.bytes.start)


class Contents(NamedTuple):
    """Message of one rank.

    Attributes:
        tensors: For each state, its tensors.
        holders: For each state, the first state with the same tensors.
        defaults: Indices of states that are defaults.
        objects: Indices of states with pickled objects.
    """

    tensors: list[list[Sent]]
    holders: list[int]
    defaults: list[int]
    objects: list[int]


def pack_contents(states: Sequence[State], tensors: Sequence[Sequence[Tensor]], holders: Sequence[int]) -> str:
    """Return the contents as JSON, with runs of equal dtypes and shapes."""
    counts = [len(sent) for sent in tensors]
    entries = [[str(tensor.dtype)[6:], list(tensor.shape)] for tensor in itertools.chain.from_iterable(tensors)]
    runs = [[len(list(run)), *entry] for entry, run in itertools.groupby(entries)]
    defaults = [index for index, state in enumerate(states) if state.untouched]
    objects = [index for index, state in enumerate(states) if state.holds_objects]
    return json.dumps([counts, runs, list(holders), defaults, objects], separators=(",", ":"))


def _unpack_contents(text: str) -> Contents:
    counts, runs, holders, defaults, objects = json.loads(text)
    sent: list[Sent] = []
    offset = 0
    for count, dtype, shape in runs:
        for _ in range(count):
            start, offset = offset, offset + getattr(torch, dtype).itemsize * math.prod(shape)
            sent.append(Sent(len(sent), slice(start, offset), getattr(torch, dtype), tuple(shape)))
    remaining = iter(sent)
    tensors = [list(itertools.islice(remaining, count)) for count in counts]
    return Contents([tensors[holder] for holder in holders], holders, defaults, objects)


class Region(NamedTuple):
    """A tensor inside the buffer.

    Attributes:
        start: First byte.
        dtype: Data type.
        shape: Shape.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor in the buffer's memory. To autograd it is not a view, so that it may be changed in place."""
        # contiguous: torch computes the strides, which its types do not know
        empty: Any = buffer.new_empty(0, dtype=self.dtype)
        tensor: Tensor = empty.set_(buffer.untyped_storage(), self.start // self.dtype.itemsize, self.shape)
        return tensor


class Slot(NamedTuple):
    """The place of one tensor of one rank.

    Attributes:
        sent: The tensor in the rank's message.
        bytes: Its bytes in the buffer.
        state: Index of its state.
        tensor: Index of the tensor that is read for that state.
        first_row: First row in that tensor. None: it is all of it.
        rows: Number of rows in that tensor.
    """

    sent: Sent
    bytes: slice
    state: int
    tensor: int
    first_row: int | None
    rows: int


@dataclass
class BufferPlan:
    """The buffer that holds the states of all ranks.

    Attributes:
        slots: For each rank, the places of its tensors.
        objects: States with pickled objects.
        regions: For each state the tensors to read: one, none, or one per tensor of a ``list``.
        expanded: For each state with defaults that follow the other ranks, its dtype and shape.
        twins: For each state with the tensors of an earlier one on every rank, that one.
        size: Number of bytes.
    """

    slots: list[list[Slot]]
    objects: list[int]
    regions: list[list[Region]] = field(default_factory=list)
    expanded: dict[int, Entry] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)
    size: int = 0

    def add_rows(self, tensors: Sequence[Sequence[Sent]], dtype: torch.dtype, row_shape: tuple[int, ...]) -> None:
        """Place the tensors of the next state one after the other, to be read as one."""
        state, start, first_row = len(self.regions), self.size, 0
        for rank, sent in _in_one_process(tensors):
            rows = sent.shape[0] if sent.shape[1:] == row_shape else 0  # a tensor of shape (0,) has none
            self.slots[rank].append(Slot(sent, self._take(sent), state, 0, first_row, rows))
            first_row += rows
        regions = [Region(start, dtype, (first_row, *row_shape))] if any(tensors) else []
        self.regions.append(regions)
        self.size = aligned(self.size)

    def add_each(self, tensors: Sequence[Sequence[Sent]], stacked: Entry | None = None) -> None:
        """Place the tensors of the next state, to be read one by one, or stacked once they have this dtype and shape."""
        state = len(self.regions)
        self.regions.append([])
        if stacked is not None:
            self.expanded[state] = stacked
        for rank, sent in _in_one_process(tensors):
            slot = Slot(sent, self._take(sent), state, len(self.regions[state]), None, 0)
            self.slots[rank].append(slot if stacked is None else slot._replace(tensor=0, first_row=rank, rows=1))
            self.regions[state].append(Region(slot.bytes.start, sent.dtype, sent.shape))
            self.size = aligned(self.size)

    def _take(self, sent: Sent) -> slice:
        """Return the next bytes of the buffer, for a tensor."""
        start, self.size = self.size, self.size + sent.num_bytes
        return slice(start, self.size)

    def read(self, buffer: Tensor) -> list[list[Tensor]]:
        """Return the tensors of each state, in the buffer's memory."""
        found = [[region.of(buffer) for region in regions] for regions in self.regions]
        for state, (dtype, shape) in self.expanded.items():
            found[state] = [torch.stack([tensor.to(dtype).expand(shape) for tensor in found[state]])]
        return found


def _in_one_process(tensors: Sequence[Sequence[Sent]]) -> Iterator[tuple[int, Sent]]:
    """Yield ranks and their tensors of one state by update, then by rank: the order of appending in one process."""
    for of_update in itertools.zip_longest(*tensors):
        yield from ((rank, sent) for rank, sent in enumerate(of_update) if sent is not None)


@functools.lru_cache(maxsize=64)
def plan_buffer(title: str, states: tuple[tuple[str, Kind], ...], contents: tuple[str, ...]) -> BufferPlan:
    """Give every tensor of every rank its place.

    Args:
        title: Name of the operation, for messages.
        states: Names and kinds of the states.
        contents: Contents of each rank, from ``pack_contents``.

    Raises:
        RankMismatchError: if tensors of ranks do not fit together, naming the state.
    """
    by_rank = [_unpack_contents(text) for text in contents]
    objects = sorted(set().union(*(of_rank.objects for of_rank in by_rank)))
    plan = BufferPlan([[] for _ in contents], objects)
    first: dict[tuple[int, ...], int] = {}
    for index, (name, kind) in enumerate(states):
        what = f"{title}: state `{name}`"
        twin = first.setdefault(tuple(of_rank.holders[index] for of_rank in by_rank), index)
        tensors = [of_rank.tensors[index] for of_rank in by_rank]
        if index in objects:
            _refuse_other_items(what, tensors, [index in of_rank.objects for of_rank in by_rank])
        if twin != index:
            plan.twins[index] = twin
            plan.regions.append([])
        elif kind == "list":
            plan.add_each(tensors)
        elif kind == "rows":
            plan.add_rows(tensors, *_common_row(what, tensors))
        else:
            dtype, shape = _common_shape(what, tensors, [index in of_rank.defaults for of_rank in by_rank])
            if all(sent.entry == (dtype, shape) for (sent,) in tensors):  # each rank has one row of the stack
                plan.add_rows([[sent._replace(shape=(1, *shape))] for (sent,) in tensors], dtype, shape)
            else:
                plan.add_each(tensors, (dtype, shape))
    return plan


def _refuse_other_items(what: str, tensors: Sequence[Sequence[Sent]], has_objects: Sequence[bool]) -> None:
    """Refuse a list of other objects on some ranks and of tensors on others. A list may be empty."""
    found = ["objects" if objects else "tensors" for objects in has_objects]
    found = [items if sent else "nothing" for items, sent in zip(found, tensors, strict=True)]
    if len({*found} - {"nothing"}) > 1:
        fix = "Append the same kind of items on every rank."
        expected = "tensors, or other objects, on every rank"
        raise RankMismatchError(what, expected=expected, ranks=found, fix=fix, collective=True, page="F52")


def _common_row(what: str, tensors: Sequence[Sequence[Sent]]) -> Entry:
    """Return dtype and shape of one row. Tensors of shape (0,) are ignored, as in torch.cat, and so is the dtype of empty ones."""
    known = [sent.entry for sent in itertools.chain.from_iterable(tensors)]
    with_rows = [entry for entry in known if entry[1] != (0,)] or known
    dtypes = [dtype for dtype, shape in with_rows if shape[0]]
    found = {(dtype if shape[0] or not dtypes else dtypes[0], shape[1:]) for dtype, shape in with_rows}
    if len(found) > 1:
        rows = [[f"rows of shape {sent.shape[1:]} {str(sent.dtype)[6:]}" for sent in of_rank] for of_rank in tensors]
        by_rank = [", ".join(dict.fromkeys(of_rank)) or "no data" for of_rank in rows]
        fix = "Call update with inputs of the same number of dimensions, width and dtype on every rank."
        expected = "rows of one shape and dtype on every rank"
        raise RankMismatchError(what, expected=expected, ranks=by_rank, fix=fix, collective=True, page="F52")
    return found.pop() if found else (torch.float32, ())


def _common_shape(what: str, tensors: Sequence[Sequence[Sent]], is_default: Sequence[bool]) -> Entry:
    """Return the common dtype and shape of a state. Defaults follow the other ranks."""
    entries = [sent.entry for (sent,) in tensors]
    if len(set(entries)) == 1:
        return entries[0]
    described = [f"{shape} {str(dtype)[6:]}" for dtype, shape in entries]
    touched = {entry for entry, untouched in zip(entries, is_default, strict=True) if not untouched}
    expected = "one shape and dtype on every rank"
    fix = "Call update with inputs of the same width, number of dimensions and dtype on every rank."
    if len(touched) == 1:
        ((dtype, wanted),) = touched
        if all(_expands(shape, wanted) for _, shape in entries):
            return dtype, wanted
        expected = f"a default that fits the shape {wanted} of the ranks with data"
        fix = "Give every rank data before compute."
    raise RankMismatchError(what, expected=expected, ranks=described, fix=fix, collective=True, page="F52")


def _expands(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a tensor of one shape expands to another, as `Tensor.expand` does."""
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in ends)


# ---------------------------------------------------------------------- filling and reading the buffer


def _buffer_from_bytes(plan: BufferPlan, received: Sequence[bytes]) -> Tensor:
    """Put inline bytes in their places."""
    if plan.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    gathered = bytearray(plan.size)
    for data, slots in zip(received, plan.slots, strict=True):
        for slot in slots:
            gathered[slot.bytes] = data[slot.sent.bytes]
    return torch.frombuffer(gathered, dtype=torch.uint8)


def _gather_buffer(plan: BufferPlan, own: Sequence[Tensor], device: torch.device, group: Group) -> Tensor:
    """Put this rank's tensors in their places and gather the others'. Communication: one all-reduce."""
    buffer = torch.zeros(plan.size, dtype=torch.uint8, device=device)
    for slot in plan.slots[process_groups.rank(group)]:
        tensor = own[slot.sent.number]
        if tensor.numel():
            buffer[slot.bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    all_gather_slices_(buffer, group)
    return buffer


def _read_with_grad(plan: BufferPlan, buffer: Tensor, own: Sequence[Tensor], group: Group) -> list[list[Tensor]]:
    """Read the tensors of each state from the buffer. Those that hold a part of this rank's get its graph."""
    read = plan.read(buffer)
    slots = [slot for slot in plan.slots[process_groups.rank(group)] if own[slot.sent.number].requires_grad]
    if torch.is_grad_enabled() and slots:
        # one autograd node for all: several tensors of this rank may lie in one that is read
        targets = list(dict.fromkeys((slot.state, slot.tensor) for slot in slots))
        places = [(targets.index((slot.state, slot.tensor)), slot.first_row, slot.rows) for slot in slots]
        whole = [read[state][tensor] for state, tensor in targets]
        joined = own_slices_with_grad(whole, [own[slot.sent.number] for slot in slots], places, group=group)
        for (state, index), tensor in zip(targets, joined, strict=True):
            read[state][index] = tensor
    for state, twin in plan.twins.items():
        read[state] = list(read[twin])
    return read
