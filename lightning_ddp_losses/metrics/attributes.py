"""Attributes other than states that ``update`` sets and ``compute`` reads, and that a rank without an update does not have.

Examples are ``orig_dtype`` of torchmetrics' ``FrechetInceptionDistance``, ``num_classes`` of ``MeanIoU`` and ``rmse_map`` of
``RootMeanSquaredErrorUsingSlidingWindow`` (torchmetrics 1.9). States are exchanged but attributes are not, so that ``compute`` would fail
on that rank, or return a different value.

These attributes are determined from the code of the class, equally on every rank. If a class has such attributes, ranks compare a digest of
them with the states, and exchange the attributes if the digests differ, or if only some ranks had an update. If all ranks with an update
have the same value, the ranks without one use it in ``compute``. Otherwise an error is raised on all ranks, as each rank would compute
another result. The digest contains the device, dtype and shape of a tensor on an accelerator, but not its numbers, since the host would
have to wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_losses.core import inputs, safe_values
from lightning_ddp_losses.core.class_code import names_read, names_written
from lightning_ddp_losses.core.option_values import hash_of
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import InputError, RankMismatchError

_SHOWN_CHARACTERS = 60
_SHOWN_NUMBERS = 3  # of a tensor
_OWN_DEVICE = b"device"
_FIRST = "Give every rank an update before compute. "
_OF_TORCHMETRICS = names_written(Metric, "__init__")
# attributes that do not affect the value: compute only asserts that they exist
_WITHOUT_EFFECT = frozenset({("RootMeanSquaredErrorUsingSlidingWindow", "rmse_map")})


class _Attribute(NamedTuple):
    """An attribute as a rank sends it.

    Attributes:
        shown: Its value, for an error.
        digest: Hash of its content.
        payload: The value. None if it cannot be sent.
    """

    shown: str
    digest: str
    payload: bytes | None

    @classmethod
    def of(cls, value: Any, name: str) -> _Attribute:
        """Read a value."""
        if isinstance(value, torch.device):  # each rank uses its own device
            return cls(value.type, value.type, _OWN_DEVICE)
        plain = inputs.map_tensors(_host_copy, value)
        try:
            payload = safe_values.pack_readable(plain, name)
        except InputError as error:
            return cls(f"{error.got}, which cannot be sent", "", None)
        return cls(_shown_value(plain), hash_of(payload), payload)


def set_by_update(metric: Metric) -> tuple[str, ...]:
    """Return the names of the attributes that ``update`` sets and ``compute`` reads, excluding states."""
    cls = type(metric)
    names = names_written(cls, "update") - vars(metric)["_defaults"].keys()
    if names:
        names = (names & names_read(cls, "compute")) - _OF_TORCHMETRICS
    return tuple(sorted(names))


def attributes_digest(metric: Metric | None) -> str | None:
    """Return a hash of the attributes that ``update`` sets and ``compute`` reads. None without such an attribute."""
    if metric is None:
        return None
    attributes = vars(metric)
    names = [name for name in set_by_update(metric) if name in attributes]
    if not names:
        return None
    known = []
    for name in names:
        if not _is_without_effect(metric, name):
            value = inputs.map_tensors(_readable_now, attributes[name])
            known.append(f"{name}: {_Attribute.of(value, name).digest}")
    return hash_of("; ".join(known).encode())


def _readable_now(tensor: Tensor) -> Tensor | str:
    """Return a tensor that the host can read without waiting, or the description of another one."""
    return tensor if tensor.device.type == "cpu" else f"{_layout(tensor)} on {tensor.device.type}"


def missing_attributes(title: str, metric: Metric, without_update: Sequence[int], group: Group) -> dict[str, Any]:
    """Return the attributes that this rank, if it had no update, copies from a rank that had one.

    Args:
        title: Name of the operation, for messages.
        metric: The metric, which has attributes ``set_by_update``.
        without_update: Ranks without an update, but not all ranks. None if the ranks' digests differ.
        group: Process group of the metric.

    Returns:
        Values by name. Empty on a rank that had an update.

    Communication: one handshake, with the values.

    Raises:
        RankMismatchError: on every rank, if ranks with an update have different values, or a value that cannot be sent.
    """
    names = set_by_update(metric)
    own = {name: tuple(_Attribute.of(vars(metric)[name], name)) for name in names if name in vars(metric)}
    what = f"{title}: attributes of {type(metric).__name__}"
    payloads = handshake.all_gather(
        what, {"attributes": ", ".join(names)}, safe_values.pack(own), group=group, of_user=True
    )
    table = [safe_values.unpack_from(payload, what, rank) for rank, payload in enumerate(payloads)]
    found = {}
    rank = process_groups.rank(group)
    for name in names:
        by_rank = [None if name not in of_rank else _Attribute(*of_rank[name]) for of_rank in table]
        source = _source(what, metric, name, by_rank, without_update)
        if source is None or rank not in without_update:
            continue
        found[name] = metric.device
        if source.payload != _OWN_DEVICE:
            value = safe_values.unpack(source.payload or b"")
            found[name] = inputs.map_tensors(lambda tensor: tensor.to(metric.device), value)
    return found


def _source(
    what: str, metric: Metric, name: str, by_rank: Sequence[_Attribute | None], without_update: Sequence[int]
) -> _Attribute | None:
    """Return the attribute that ranks without an update copy, or None if they have it or it does not exist on any rank."""
    with_update = [found for rank, found in enumerate(by_rank) if rank not in without_update]
    source = next(filter(None, with_update), None)
    is_equal = len({found and found.digest for found in with_update}) == 1 or _is_without_effect(metric, name)
    if is_equal and not without_update:
        return None
    if is_equal:
        digests = {found and found.digest for found in map(by_rank.__getitem__, without_update)}
        if source is None or digests == {source.digest}:
            return None
        if source.payload is not None:
            return source
    described = []
    for rank, found in enumerate(by_rank):
        shown = "no such attribute" if found is None else found.shown
        described.append(f"{shown}, without an update" if rank in without_update else shown)
    raise RankMismatchError(
        f"{what}: `{name}`, which update sets",
        expected="one value on all ranks that had an update, as compute reads it",
        ranks=described,
        fix=f"{_FIRST if without_update else ''}Set the attribute in __init__, or declare it as a state: "
        f"add_state({name!r}, ..., dist_reduce_fx=...).",
        collective=True,
        page="F52",
    )


def _is_without_effect(metric: Metric, name: str) -> bool:
    bases = [base for base in type(metric).__mro__ if base.__module__.startswith("torchmetrics.")]
    return any((base.__name__, name) in _WITHOUT_EFFECT for base in bases)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _shown_value(value: Any) -> str:
    if isinstance(value, Tensor):
        first = ", ".join(f"{number:.6g}" for number in value.flatten()[:_SHOWN_NUMBERS].tolist())
        return f"{_layout(value)}: {first}"
    return repr(value)[:_SHOWN_CHARACTERS]


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
