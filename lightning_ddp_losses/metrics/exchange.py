"""Exchanges the states of several metrics among all ranks together: values of all ranks, gradient through this rank's own states.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum. Each metric packs its states into a ``Packet``. A
state has one of three kinds:

| kind | state | gathered |
|---|---|---|
| ``stack`` | a tensor, equal in shape on all ranks | (W, ...) |
| ``rows`` | a tensor or a list reduced by "cat": tensors (B, ...) | (G, ...), or no tensor if no rank has one |
| ``list`` | any other list | the tensors of all ranks, each with its own shape |

A handshake compares the metrics and their states. It contains the shapes of this rank's tensors, and their bytes if they fit (*inline*).
If the bytes of any rank do not fit, they follow in one all-reduce, in place in the buffer from which they are read. There is no barrier
and no collective in backward: every rank computes the same value from the same bytes, so its own slice receives its own gradient times W.

Each rank derives the same plan of the buffer from the shapes of all ranks (``buffer_plan``).

Everything determined by the names, kinds and fixed shapes of the states is stored by the metric or collection that is called
(``ExchangePlan``): the text of what must match and, if states do not have rows or items, the description of this rank's tensors.

The exchange in ``compute`` may be disabled (``sync_on_compute``). Ranks compare that setting in each exchange, because a metric for which
it is disabled does not take part.

Measured (torchmetrics 1.9, torch 2.13, 2026): torchmetrics' own sync is one gather with a barrier for each state, 5 collectives for one
``MeanSquaredError`` and 58 for a collection of six. With this module it is one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean

from lightning_ddp_losses.core import inputs, safe_values
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import Place, own_slices_with_grad
from lightning_ddp_losses.distributed.global_values import micro_batch_to_match, reduction_to_match
from lightning_ddp_losses.distributed.messages import Agreement, Instance
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_slices_, as_bytes, host_bytes, travels_on_device
from lightning_ddp_losses.errors import PeerError
from lightning_ddp_losses.metrics.attributes import attributes_digest, missing_attributes
from lightning_ddp_losses.metrics.buffer_plan import BufferPlan, Kind, plan_buffer

# the first byte of a payload
_INLINE, _IN_GATHER = b"1", b"0"
_CACHED = (
    "A metric that had no update since its last compute() returns that value and exchanges nothing: where only some ranks had "
    "updates, call compute() once after the updates of all ranks, or make the metric with compute_with_cache=False."
)


# ---------------------------------------------------------------------- a metric's message


class State(NamedTuple):
    """A state to be sent to the other ranks.

    Attributes:
        name: Names of the metric and the state, for messages.
        kind: How the state is gathered.
        reduction: Name of the reduction, to compare between ranks.
        untouched: Whether the value is still the default.
        value: Tensor, or list of tensors or of other objects (text, nests of tensors), which are pickled.
        device: Device of the metric. Tensors of a list on other devices are moved to it.
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
        """Return the tensors to send, on one device. Rows have at least one dimension and a common dtype."""
        if isinstance(self.value, Tensor):
            if self.kind == "stack" and self.value.device == device:
                return [self.value]
            tensors = [self.value]
        else:
            tensors = list(self.value)
            if self.holds_objects:
                return [_pickled(self.name, item).to(device) for item in tensors]
        if self.kind == "rows":
            tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
            dtypes = [tensor.dtype for tensor in tensors]
            if len(set(dtypes)) > 1:  # promote them as torch.cat does
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
        sync_on_compute: Whether the metric's ``compute`` will exchange its states.
        upstream_grads: Text of the upstream gradients of its values.
        instance: Identity among metrics of one kind.
        metric: The metric, if its update may set attributes that are not states.
    """

    states: Sequence[State]
    group: Group = None
    configuration: str = ""
    sync_on_compute: bool = True
    upstream_grads: str = ""
    instance: Instance | None = None
    metric: Metric | None = None


class Received(NamedTuple):
    """What one metric receives.

    Attributes:
        states: States, reduced over all ranks, in the order of the packet.
        attributes: Attributes that other ranks' updates have set, by name. Empty on a rank that had an update.
    """

    states: list[Any]
    attributes: Mapping[str, Any] = {}  # never modified


# ---------------------------------------------------------------------- plans that are computed once


def plans_of(owner: object) -> Plans[ExchangePlan]:
    """Return the plans that a metric or collection stores."""
    attributes = vars(owner)
    if "_plans" not in attributes:
        attributes["_plans"] = Plans()
    plans: Plans[ExchangePlan] = attributes["_plans"]
    return plans


@dataclass(frozen=True)
class ExchangePlan:
    """What the signature of an exchange determines.

    Attributes:
        agreement: What must match, apart from the values that change in each call.
        states: Names and kinds of the states.
        contents: Contents of this rank's message (``_pack_contents``). None if a state has rows or items, whose number may change.
        has_equal_tensors: Whether this rank's tensors always have one dtype and one shape, and are joined by one operation.
    """

    agreement: Agreement
    states: tuple[tuple[str, Kind], ...]
    contents: bytes | None
    has_equal_tensors: bool


def _plan_of(
    title: str,
    states: Sequence[State],
    tensors: Sequence[Sequence[Tensor]],
    holders: Sequence[int],
    packets: Sequence[Packet],
    plans: Plans[ExchangePlan],
) -> ExchangePlan:
    """Return the plan of an exchange, creating it if the signature is new."""
    device = states[0].device.type if states else "cpu"
    options = tuple([(packet.configuration, packet.sync_on_compute) for packet in packets])
    described = tuple([state[:4] for state in states])
    fixed = None
    if all(state.kind == "stack" for state in states):
        fixed = tuple([(tensor.dtype, tensor.shape) for sent in tensors for tensor in sent]), tuple(holders)
    signature = (title, torch.is_grad_enabled(), device, options, described, fixed)
    plan: ExchangePlan | None = plans.get(signature)
    if plan is None:
        must_match = {
            "gradients": "on" if torch.is_grad_enabled() else "off",
            "configuration": "; ".join([packet.configuration for packet in packets]),
            "sync_on_compute": ", ".join([str(packet.sync_on_compute) for packet in packets]),
            "device": device,
            "states": ", ".join([f"{name} ({kind}, {reduction})" for name, kind, reduction, _ in described]),
        }
        kinds = tuple([(state.name, state.kind) for state in states])
        contents = None if fixed is None else _pack_contents(states, tensors, holders)
        has_equal_tensors = fixed is not None and len(set(fixed[0])) == 1
        plan = ExchangePlan(Agreement(title, must_match), kinds, contents, has_equal_tensors)
        plans.add(signature, plan)
    return plan


# ---------------------------------------------------------------------- the exchange


def exchange(title: str, packets: Sequence[Packet], plans: Plans[ExchangePlan]) -> list[Received]:
    """Exchange the states of several metrics and reduce them.

    Args:
        title: Name of the operation, for the handshake.
        packets: One packet for each metric, with the same metrics in the same order on every rank.
        plans: Plans of the metric or collection that is called.

    Returns:
        The states of each packet, reduced over all ranks, with the same bits on every rank, and the attributes that this rank lacks.

    Gradient: this rank's own states receive W times the upstream gradient (which is the same on every rank).

    Communication:
        For each process group and kind of device one handshake. If the bytes of a rank do not fit in it, one all-reduce in place, on the
        device. One more gather at a size that the handshakes have not grown to yet. One more handshake for a metric whose update sets
        attributes that its compute reads, if some ranks had no update, or if these attributes differ.

    Raises:
        RankMismatchError: on every rank, naming the state, when ranks disagree in a way without a right result.
    """
    has_one_group = len({packet.group for packet in packets}) == 1
    by_ranks: dict[Any, list[Packet]] = {}
    for packet in packets:
        ranks = None if has_one_group else process_groups.members(packet.group)
        by_ranks.setdefault(ranks, []).append(packet)
    reduced: dict[int, Any] = {}
    attributes: dict[int, Mapping[str, Any]] = {}
    for together in by_ranks.values():
        if has_one_group:
            attributes.update(_exchange_in_group(title, together, plans, reduced))
            continue
        # the caller raises an error only on the ranks of one group
        with handshake.raising_on_all_ranks(title, group=together[0].group):
            attributes.update(_exchange_in_group(title, together, plans, reduced))
    received = []
    for packet in packets:
        states = [reduced[id(state)] for state in packet.states]
        received.append(Received(states, attributes.get(id(packet), {})))
    return received


@contextlib.contextmanager
def naming_caches() -> Iterator[None]:
    """Extend the error of a ``compute`` without an answer: a peer may have returned its value from torchmetrics' cache."""
    try:
        yield
    except PeerError as error:
        # for a peer that failed or exited, the cache is not the reason
        if "no answer" not in str(error.got):
            raise
        parts = {**error.parts_as_text(), "fix": f"{error.fix} {_CACHED}"}
        raise PeerError(**parts, collective=True, page=error.page) from error


def _exchange_in_group(
    title: str, packets: Sequence[Packet], plans: Plans[ExchangePlan], reduced: dict[int, Any]
) -> dict[int, Mapping[str, Any]]:
    """Exchange the states of one group's packets, separately on each kind of device, and add the results to ``reduced`` by id of the state.

    Returns:
        Attributes that this rank lacks, by identity of the packet.
    """
    states = list(itertools.chain.from_iterable([packet.states for packet in packets]))
    devices = list(dict.fromkeys([state.device.type for state in states])) or ["cpu"]
    buffer_plans: list[tuple[list[State], BufferPlan]] = []
    digests: dict[int, list[str | None]] = {}
    for device in devices:
        name = title if len(devices) == 1 else f"{title}, on {device}"
        on_device = [state for state in states if state.device.type == device]
        values, buffer_plan, of_ranks = _exchange_states(name, on_device, packets, plans)
        digests.update(of_ranks)
        reduced.update(zip(map(id, on_device), values, strict=True))
        buffer_plans.append((on_device, buffer_plan))
    attributes: dict[int, Mapping[str, Any]] = {}
    for index in sorted(digests):
        packet = packets[index]
        without_update = _ranks_without_update(packet.states[0], buffer_plans)
        with_update = {digest for rank, digest in enumerate(digests[index]) if rank not in without_update}
        must_exchange = len(with_update) > 1 or (without_update and with_update)
        if packet.metric is not None and must_exchange:
            attributes[id(packet)] = missing_attributes(title, packet.metric, without_update, packet.group)
    return attributes


def _ranks_without_update(state: State, buffer_plans: Sequence[tuple[list[State], BufferPlan]]) -> list[int]:
    """Return the ranks whose state is the default."""
    for states, plan in buffer_plans:
        places = [index for index, other in enumerate(states) if other is state]
        if places:
            return [rank for rank, defaults in enumerate(plan.defaults) if places[0] in defaults]
    return []


def _exchange_states(
    title: str, states: Sequence[State], packets: Sequence[Packet], plans: Plans[ExchangePlan]
) -> tuple[list[Any], BufferPlan, dict[int, list[str | None]]]:
    """Exchange the states of some packets that are on one kind of device, and reduce them.

    Returns:
        The states, the plan of the buffer, and by index of a packet whose metric has attributes of an update on some rank their digest
        on each rank.
    """
    group = packets[0].group
    device = states[0].device if states else torch.device("cpu")
    holders = _first_holders(states)
    tensors = [state.tensors(device) if holders[index] == index else [] for index, state in enumerate(states)]
    own = list(itertools.chain.from_iterable(tensors))
    plan = _plan_of(title, states, tensors, holders, packets, plans)
    # handshake: weights of means, shapes and row counts, and the bytes themselves if they fit
    weights = [state.weight for state in states if state.reduce is dim_zero_mean]
    contents = plan.contents or _pack_contents(states, tensors, holders)
    may_have_attributes = any(packet.metric is not None for packet in packets)
    values: list[Any] = weights
    if may_have_attributes:
        values = [*weights, [attributes_digest(packet.metric) for packet in packets]]
    head = b"%s\n%s\n" % (json.dumps(values).encode(), contents)
    is_inline = 1 + len(head) + sum([tensor.nbytes for tensor in own]) <= handshake.inline_capacity(group)
    if own and travels_on_device(own[0], group):
        is_inline = False  # a copy to the host would wait for the device
    payload = _IN_GATHER + head
    if is_inline:
        payload = _INLINE + head + _joined_bytes(own, device, plan.has_equal_tensors)
    of_call = {
        "which": packets[0].instance,
        "factor that came back in the last backward": ", ".join([packet.upstream_grads for packet in packets]),
        **micro_batch_to_match(),
        **reduction_to_match(),
    }
    payloads = handshake.all_gather(plan.agreement, of_call, payload, group=group)
    received = [sent.split(b"\n", 2) for sent in payloads]

    # gather: the tensors of all ranks in one buffer, in the order of one process
    buffer_plan = plan_buffer(title, plan.states, tuple([contents for _, contents, _ in received]))
    if all(head[:1] == _INLINE for head, _, _ in received):
        buffer = _buffer_from_bytes(buffer_plan, [data for _, _, data in received]).to(device)
    else:
        buffer = _gather_buffer(buffer_plan, own, device, group)

    # read: this rank's own slices with their graph, then reduce
    gathered = _read_with_grad(buffer_plan, buffer, own, group)
    for index in buffer_plan.objects:
        gathered[index] = [_unpickled(tensor, states[index].device) for tensor in gathered[index]]
    values_of_ranks = [json.loads(head[1:]) for head, _, _ in received] if values else []
    digests: dict[int, list[str | None]] = {}
    if may_have_attributes:
        by_packet = zip(*[of_rank.pop() for of_rank in values_of_ranks], strict=True)
        digests = {index: list(of_ranks) for index, of_ranks in enumerate(by_packet) if any(of_ranks)}
    rows_of_means = zip(*values_of_ranks, strict=True)
    found = []
    for state, of_ranks in zip(states, gathered, strict=True):
        rows = next(rows_of_means) if state.reduce is dim_zero_mean else ()
        found.append(state.reduced(of_ranks, rows))
    return found, buffer_plan, digests


def _first_holders(states: Sequence[State]) -> list[int]:
    """Return for each state the first state with the same tensors, which is the state itself if it is the first one."""
    holder_of: dict[Any, int] = {}
    found = []
    for index, state in enumerate(states):
        value = state.value
        held: Any = id(value)
        if isinstance(value, list):
            held = tuple(map(id, value))
        elif state.untouched and value.device.type == "cpu":
            held = value.dtype, value.shape, host_bytes(value)  # each metric has separate default tensors
        found.append(holder_of.setdefault((state.kind, state.reduce, held), index))
    return found


def _joined_bytes(tensors: Sequence[Tensor], device: torch.device, are_equal: bool) -> bytes:
    """Return the concatenated bytes of tensors, which may all have the same dtype and shape (``are_equal``)."""
    if are_equal:
        return host_bytes(torch.stack(tensors).detach().cpu())  # type: ignore[arg-type]
    if device.type != "cpu" and tensors:  # one copy to the host, not one per tensor
        return host_bytes(torch.cat([as_bytes(tensor) for tensor in tensors]).cpu())
    return b"".join(map(host_bytes, tensors))


def _pack_contents(states: Sequence[State], tensors: Sequence[Sequence[Tensor]], holders: Sequence[int]) -> bytes:
    """Return the description of this rank's tensors (``buffer_plan.Contents``) as JSON, with runs of equal dtypes and shapes."""
    counts = [len(sent) for sent in tensors]
    entries = [[str(tensor.dtype)[6:], list(tensor.shape)] for tensor in itertools.chain.from_iterable(tensors)]
    runs = [[len(list(run)), *entry] for entry, run in itertools.groupby(entries)]
    defaults = [index for index, state in enumerate(states) if state.untouched]
    objects = [index for index, state in enumerate(states) if state.holds_objects]
    return json.dumps([counts, runs, holders, defaults, objects], separators=(",", ":")).encode()


def _pickled(name: str, item: Any) -> Tensor:
    item = inputs.map_tensors(lambda tensor: tensor.detach().cpu(), item)
    data = safe_values.pack_readable(item, f"state `{name}`")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickled(data: Tensor, device: torch.device) -> Any:
    return inputs.map_tensors(lambda tensor: tensor.to(device), safe_values.unpack(host_bytes(data)))


# ---------------------------------------------------------------------- filling and reading the buffer


def _buffer_from_bytes(plan: BufferPlan, received: Sequence[bytes]) -> Tensor:
    """Copy inline bytes to their positions."""
    if plan.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    gathered = bytearray(plan.size)
    for data, slots in zip(received, plan.slots, strict=True):
        for slot in slots:
            gathered[slot.bytes] = data[slot.sent.bytes]
    return torch.frombuffer(gathered, dtype=torch.uint8)


def _gather_buffer(plan: BufferPlan, own: Sequence[Tensor], device: torch.device, group: Group) -> Tensor:
    """Copy this rank's tensors to their positions and gather the tensors of its peers. Communication: one all-reduce."""
    buffer = torch.zeros(plan.size, dtype=torch.uint8, device=device)
    for slot in plan.slots[process_groups.rank(group)]:
        tensor = own[slot.sent.number]
        if tensor.numel():
            buffer[slot.bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    all_gather_slices_(buffer, group)
    return buffer


def _read_with_grad(plan: BufferPlan, buffer: Tensor, own: Sequence[Tensor], group: Group) -> list[list[Tensor]]:
    """Read the tensors of each state from the buffer. Tensors that contain a part of this rank's are connected to its graph."""
    read = plan.read(buffer)
    # a single autograd node, because several tensors of this rank may be in one tensor that is read
    targets: dict[tuple[int, int], int] = {}
    sent: list[Tensor] = []
    places: list[Place] = []
    if torch.is_grad_enabled():
        for slot in plan.slots[process_groups.rank(group)]:
            tensor = own[slot.sent.number]
            if tensor.requires_grad:
                target = targets.setdefault((slot.state, slot.tensor), len(targets))
                sent.append(tensor)
                places.append((target, slot.first_row, slot.rows))
    if sent:
        whole = [read[state][index] for state, index in targets]
        joined = own_slices_with_grad(whole, sent, places, group=group)
        for (state, index), tensor in zip(targets, joined, strict=True):
            read[state][index] = tensor
    for state, twin in plan.twins.items():
        read[state] = list(read[twin])
    return read
