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
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ddp_losses.distributed import handshake, raw_collectives
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError, format_error
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


def describe_reshuffle(dataloader: object, *, injecting: bool = True) -> str | None:
    """What Lightning did to the order of a structured sampler, as an error text; None where it left the order alone.

    Args:
        dataloader: When Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``; without it, a shuffle around a batch sampler is the user's own.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    sampler, batch_sampler = dataloader.sampler, dataloader.batch_sampler
    if isinstance(sampler, DistributedSamplerWrapper) and sampler.shuffle:
        inner = getattr(sampler.dataset, "_sampler", sampler)
        return _text(type(inner).__name__, "shuffled over all its batches", "global_batch_size")
    if injecting and batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        held = getattr(batch_sampler, "__dict__", {}).values()
        if any(isinstance(value, DistributedSampler) and value.shuffle for value in held):
            return _text(type(batch_sampler).__name__, "built anew around a shuffling DistributedSampler", "")
    return None


def warn_of_reshuffle(dataloader: object, *, injecting: bool = True) -> None:
    """Warn on rank zero when Lightning replaced the order of a structured sampler.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it, when Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``.
    """
    text = describe_reshuffle(dataloader, injecting=injecting)
    if text is not None:
        rank_zero_warn(text)


def _text(name: str, got: str, size: str) -> str:
    arguments = ", ".join(filter(None, [f"{name}(...)", size]))
    return format_error(
        f"{name} under DDP",
        expected="its own order",
        got=f"{got} by Lightning, which destroys batches that belong together (M per class, hierarchical, weighted)",
        fix=f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({arguments})), or set "
        "Trainer(use_distributed_sampler=False) where the sampler itself gives each rank its own rows.",
    )


def refuse_other_batches(dataloader: object) -> None:
    """Refuse a DataLoader whose batches are not those of its global sampler.

    Such a sampler is known by its ``local_batch_size``; it cannot see what the DataLoader makes of its indices.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it.

    Raises:
        ConfigurationError: another batch size, or ``drop_last`` on the DataLoader, which can leave ranks with different
            numbers of batches.
    """
    if not isinstance(dataloader, DataLoader):
        return
    # under a batch sampler of its own, dataloader.sampler is torch's placeholder; in prediction the sampler is inside
    sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    expected = getattr(sampler, "local_batch_size", None)
    if expected is None or not isinstance(sampler, DistributedSampler):
        return
    name = type(sampler).__name__
    size = getattr(dataloader.batch_sampler, "batch_size", None)
    if size != expected:
        raise ConfigurationError(
            f"batch_size of the DataLoader around {name}",
            expected=f"{expected}, as in {name}(sampler, local_batch_size={expected})",
            got=repr(size),
            fix="Give both the same number of rows per rank.",
        )
    if getattr(dataloader.batch_sampler, "drop_last", False) and not sampler.drop_last:
        raise ConfigurationError(
            f"drop_last of the DataLoader around {name}",
            expected=f"drop_last=True on the {name}, which leaves out the same batch on every rank",
            got="drop_last=True on the DataLoader alone",
            fix=f"Write {name}(sampler, {expected}, drop_last=True).",
        )


_NOT_TORCHS = ("cpu", "mps")
_exact: list[type[LayerSync]] = []


def use_layer_sync(kind: type[LayerSync]) -> None:
    """Say what synchronises batch norm on any device (``SyncBatchNorm``)."""
    _exact[:] = [kind]


def choose_layer_sync(device: torch.device, chosen: LayerSync | None) -> LayerSync | None:
    """The plugin that Lightning chose, or the exact one where torch's would fail in the first training step."""
    return _exact[0]() if type(chosen) is TorchSyncBatchNorm and device.type in _NOT_TORCHS else chosen


def syncs_in_backward(chosen: LayerSync | None) -> bool:
    """Whether layers will meet their peers during backward, so that what the ranks have to say must be said before."""
    return isinstance(chosen, _exact[0])
