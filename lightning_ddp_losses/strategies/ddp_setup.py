"""What the wrap needs: DDP's options, DDP's ignore marks, and the comparison of names before the first broadcast."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.distributed import handshake, raw_collectives
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

IGNORE = "_ddp_params_and_buffers_to_ignore"
_FIRST_BUCKET = 1 << 20
_CHANGE_BUCKETS = ("bucket_cap_mb", "bucket_cap_mb_list", "delay_all_reduce_named_params", "find_unused_parameters")
_SHOWN = 6  # differing names shown in an error


def without_defaults(ddp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """DDP's options that differ from DDP's defaults.

    A YAML file fills in all of them with their defaults (``device_ids`` too, which Lightning passes itself); the settings
    must be those of Python code that names none.
    """
    defaults = {n: p.default for n, p in inspect.signature(DistributedDataParallel.__init__).parameters.items()}
    missing = object()
    return {k: v for k, v in ddp_kwargs.items() if v is not defaults.get(k, missing) and v != defaults.get(k, missing)}


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating dtype from itself or its name (``"bfloat16"``, ``"torch.bfloat16"``)."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            "loss_reduce_dtype", expected="a floating torch.dtype or its name, or None", got=repr(dtype)
        )
    return found


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@dataclass(frozen=True)
class WrapPlan:
    """Who reduces what.

    Attributes:
        reduced: Parameters that the model's DDP reduces; none, where DDP would refuse the module (a frozen encoder).
        ignored: Names that the model's DDP leaves alone: the losses', class shards, and the user's own.
        theirs: Names that the user told DDP to ignore, which nobody reduces.
        unsynchronised: Tensors that DDP will not broadcast and that ought to start equal.
    """

    reduced: list[nn.Parameter]
    ignored: set[str]
    theirs: set[str]
    unsynchronised: list[Tensor]


def plan(module: nn.Module, losses: Iterable[FoundLoss]) -> WrapPlan:
    """Divide a module's parameters between the model's DDP and the losses' reduction."""
    tensors = dict(named_tensors(module))
    mine = {f"{loss.name}.{name}" for loss in losses if loss.owned for name, _ in named_tensors(loss.module)}
    theirs = set(getattr(module, IGNORE, ()))
    shards = {name for name, tensor in tensors.items() if shard_of(tensor) is not None}
    ignored = mine | theirs | shards
    reduced = [p for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
    left = mine if reduced else set(tensors) - theirs
    return WrapPlan(reduced, ignored, theirs, [t for n, t in tensors.items() if n in left - shards])


def first_bucket(parameters: Iterable[Tensor], ddp_kwargs: Mapping[str, Any]) -> int:
    """Bytes of gradient of which DDP sends nothing before all are ready; 0 where that cannot be said.

    DDP fills buckets of one dtype and device each, the first up to 1 MiB, and sends them in order.
    """
    if any(ddp_kwargs.get(key) for key in _CHANGE_BUCKETS):
        return 0
    totals: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        totals[kind] = totals.get(kind, 0) + parameter.nbytes
    return min([_FIRST_BUCKET, *totals.values()])


def broadcast_buffers(module: nn.Module, losses: Iterable[FoundLoss], ddp_kwargs: Mapping[str, Any]) -> None:
    """Rank 0's buffers for all, as DDP's forward does, where there is no DDP around the model; the losses keep theirs."""
    if ddp_kwargs.get("forward_sync_buffers", ddp_kwargs.get("broadcast_buffers", True)) is False:
        return
    owned = tuple(f"{loss.name}." for loss in losses if loss.owned)
    buffers = [b for n, b in module.named_buffers() if not n.startswith(owned)]
    if buffers:
        raw_collectives.broadcast_(buffers)


@contextlib.contextmanager
def ignoring(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Let DDP be built without the tensors of these names; its marks on the module are gone afterwards.

    (DDP copies the names. A mark that stayed would follow a copy of the module into another strategy.)
    """
    before = module.__dict__.get(IGNORE)
    marked = [t for n, t in named_tensors(module) if n in names and not hasattr(t, "_ddp_ignored")]
    # a parameter of the module itself goes by its name in one part of DDP, and by "." and its name in another
    listed = sorted(names | {f".{name}" for name in names if "." not in name})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, listed)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for tensor in marked:
            del tensor._ddp_ignored  # type: ignore[attr-defined]
        if before is None:
            delattr(module, IGNORE)
        else:
            setattr(module, IGNORE, before)


def _shape_of(tensor: Tensor) -> str:
    shard = shard_of(tensor)
    return str(tuple(tensor.shape)) if shard is None else f"{shard.whole_shape(tensor)} divided over ranks"


def compare_names(module: nn.Module) -> None:
    """Compare names, shapes, dtypes and order of parameters and buffers between ranks.

    DDP pairs by position and would broadcast and average the wrong tensors without a word.

    Raises:
        RankMismatchError: on every rank, with the first names that differ.

    Communication: one frame; one more gather where ranks differ.
    """
    own = [
        f"{name} {_shape_of(t)} {t.dtype}{'' if t.requires_grad or not isinstance(t, nn.Parameter) else ' frozen'}"
        for name, t in named_tensors(module)
    ]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    if len(set(handshake.all_gather("names", {}, digest))) == 1:
        return
    everyone: list[list[str]] = [json.loads(p) for p in handshake.all_gather("all names", {}, json.dumps(own).encode())]
    longest = max(map(len, everyone))
    padded = [names + ["nothing"] * (longest - len(names)) for names in everyone]
    places = [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]
    ranks = ["; ".join(f"position {i}: {names[i]}" for i in places[:_SHOWN]) for names in padded]
    raise RankMismatchError(
        f"parameters and buffers ({len(places)} of {longest} positions)",
        expected="the same names, shapes and dtypes in the same order on every rank",
        ranks=ranks,
        fix="Register submodules in a fixed order (sort names; no iteration over sets), with the same sizes on every rank.",
        collective=True,
    )
