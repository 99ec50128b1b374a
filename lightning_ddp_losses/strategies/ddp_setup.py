"""What the set-up of DDP needs: its options, its ignore marks, equal names before the first broadcast, data loaders, batch norm.

* Options: a YAML file fills in all of DDP's with their defaults.
* Names: DDP pairs parameters by position and would broadcast and average the wrong tensors without a word.
* Loaders: under DDP, Lightning wraps any training sampler in a ``DistributedSamplerWrapper`` that shuffles, and builds a custom batch
  sampler anew around a shuffling ``DistributedSampler``. Batches with M rows per class are lost; nothing tells. (Lightning 2.6.6, 2026)
* Batch norm: ``Trainer(sync_batchnorm=True)`` on a device where torch's ``SyncBatchNorm`` does not run gets the exact one. Layers and
  strategies do not know each other; the package hands the plugin over when it is imported.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.precision import has_buffers
from lightning_ddp_losses.distributed import handshake, raw_collectives, rendezvous
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError, format_error
from lightning_ddp_losses.strategies import same_setup
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

_FIRST_BUCKET_BYTES = 1 << 20  # DDP's own (torch 2.13)
_OPTIONS_THAT_CHANGE_BUCKETS = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "delay_all_reduce_named_params",
    "find_unused_parameters",
)
_MAX_SHOWN = 6  # differing names shown in an error
_WITHOUT_TORCHS_BATCH_NORM = ("cpu", "mps")

# ---------------------------------------------------------------------- options


def without_defaults(ddp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return DDP's options that differ from DDP's defaults.

    A YAML file fills in all of them with their defaults (``device_ids`` too, which Lightning passes itself); the settings
    must be those of Python code that names none.
    """
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    missing = object()
    changed = {}
    for name, value in ddp_kwargs.items():
        default = parameters[name].default if name in parameters else missing
        if value is not default and value != default:
            changed[name] = value
    return changed


def refuse_unknown_options(strategy: type, ddp_kwargs: Collection[str]) -> None:
    """Refuse options that torch's DDP would refuse when it wraps the model, each with the option that it may have meant.

    Args:
        strategy: The class of the strategy, whose options are known too.
        ddp_kwargs: What is left for torch's DDP.

    Raises:
        ConfigurationError: for a name that nobody takes, and for what Lightning passes itself.
    """
    of_ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", "device_ids"}
    unknown = sorted(set(ddp_kwargs) - of_ddp)
    if not unknown:
        return
    # every option by name, of the strategy and what it is derived from
    known = set(of_ddp)
    for cls in strategy.__mro__:
        for name, parameter in inspect.signature(vars(cls).get("__init__", object)).parameters.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self":
                known.add(name)
    meant = [difflib.get_close_matches(name, sorted(known), n=1) for name in unknown]
    questions = [f"Did you mean {close[0]}?" for close in meant if close]
    raise ConfigurationError(
        f"{strategy.__name__}: options",
        expected="its own, those of Lightning's DDPStrategy, or those of torch's DistributedDataParallel",
        got=", ".join(unknown),
        fix=" ".join(questions) or None,
    )


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating dtype from itself or its name (``"bfloat16"``, ``"torch.bfloat16"``)."""
    if dtype is None:
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        expected = "a floating torch.dtype or its name, or None"
        raise ConfigurationError("loss_reduce_dtype", expected=expected, got=repr(dtype))
    return found


# ---------------------------------------------------------------------- the world


def start_strategy_world(strategy: DDPStrategy | ModelParallelStrategy, timeout: timedelta | None) -> None:
    """Start the default process group of a strategy's processes, as Lightning does, but over keys of its own (``rendezvous``)."""
    environment, device = strategy.cluster_environment, strategy.root_device
    assert environment is not None
    address, port = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    backend = strategy.process_group_backend or dist.get_default_backend_for_device(device)
    rendezvous.start_world(
        address,
        port,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        backend=backend,
        timeout=timeout,
        device=None if device.type == "cpu" else device,
    )
    rank_zero_info(f"All {strategy.world_size} ranks are here (backend {backend}).")


# ---------------------------------------------------------------------- who reduces what


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


@dataclass(frozen=True)
class WrapPlan:
    """Says who reduces what.

    Attributes:
        reduced: Parameters that the model's DDP reduces; none, where DDP would refuse the module (a frozen encoder).
        ignored: Names that the model's DDP leaves alone: the losses', class shards, and the user's own.
        ignored_by_user: Names that the user told DDP to ignore, which nobody reduces.
        unsynchronised: Tensors that DDP will not broadcast and that ought to start equal.
    """

    reduced: list[nn.Parameter]
    ignored: set[str]
    ignored_by_user: set[str]
    unsynchronised: list[Tensor]


def plan(module: nn.Module, losses: Iterable[FoundLoss]) -> WrapPlan:
    """Divide a module's parameters between the model's DDP and the losses' reduction."""
    tensors = dict(named_tensors(module))
    of_losses: set[str] = set()
    for loss in losses:
        if loss.owned:
            of_losses.update(f"{loss.name}.{name}" for name, _ in named_tensors(loss.module))
    by_user = compat.ddp_ignored_names(module)
    shards = {name for name, tensor in tensors.items() if shard_of(tensor) is not None}
    ignored = of_losses | by_user | shards
    reduced = [p for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    # without a DDP around the model nobody else broadcasts it
    left = of_losses if reduced else set(tensors) - by_user
    unsynchronised = [tensor for name, tensor in tensors.items() if name in left - shards]
    return WrapPlan(reduced, ignored, by_user, unsynchronised)


@contextlib.contextmanager
def ignoring(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let DDP be built inside the block without the tensors of these names."""
    marked = [tensor for name, tensor in named_tensors(module) if name in names]
    with compat.ddp_ignoring(module, names, marked):
        yield


def first_bucket(parameters: Iterable[Tensor], ddp_kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of gradient of which DDP sends nothing before all are ready; 0 where that cannot be said.

    DDP fills buckets of one dtype and device each, the first up to 1 MiB, and sends them in order.
    """
    if any(ddp_kwargs.get(option) for option in _OPTIONS_THAT_CHANGE_BUCKETS):
        return 0
    totals: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        totals[kind] = totals.get(kind, 0) + parameter.nbytes
    return min([_FIRST_BUCKET_BYTES, *totals.values()])


def broadcast_buffers(module: nn.Module, losses: Iterable[FoundLoss], ddp_kwargs: Mapping[str, Any]) -> None:
    """Give all ranks rank 0's buffers where there is no DDP around the model; the losses keep theirs.

    As DDP's forward does it, message for message: it may run on the other ranks, which have frozen less.
    """
    if ddp_kwargs.get("forward_sync_buffers", ddp_kwargs.get("broadcast_buffers", True)) is False:
        return
    # each step comes here, and most models have no buffer: names take ten times as long
    owned = [loss for loss in losses if loss.owned]
    if not dist.is_initialized() or not has_buffers(module, [loss.module for loss in owned]):
        return
    of_losses = tuple(f"{loss.name}." for loss in owned)
    by_user = compat.ddp_ignored_names(module)
    buffers = [
        buffer
        for name, buffer in module.named_buffers()
        if not name.startswith(of_losses) and name not in by_user and shard_of(buffer) is None
    ]
    if buffers:
        compat.broadcast_as_ddp_does(buffers, ddp_kwargs.get("process_group"))


def broadcast_unsynchronised(tensors: Sequence[Tensor], ddp_kwargs: Mapping[str, Any]) -> None:
    """Give all ranks rank 0's values of what DDP does not broadcast, unless its options say that nothing shall be."""
    if ddp_kwargs.get("init_sync", True):
        buffers = ddp_kwargs.get("broadcast_buffers", True) is not False
        raw_collectives.broadcast_([t for t in tensors if buffers or isinstance(t, nn.Parameter)])


# ---------------------------------------------------------------------- equal names


def compare_names(module: nn.Module, facts: Mapping[str, str]) -> None:
    """Compare what must be the same on every rank: names, shapes, dtypes and order of parameters and buffers, and what else is given.

    Args:
        module: That is trained.
        facts: Of releases and options (``same_setup``).

    Raises:
        RankMismatchError: on every rank, with the first names that differ.

    Communication: one handshake; one more gather where ranks differ.
    """
    own = [_describe_tensor(name, tensor) for name, tensor in named_tensors(module)]
    # which modules are gathered by themselves: ranks must do so in the same order
    own += [f"{name} divided by fully_shard" for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    received = handshake.all_gather("set-up", facts, digest + same_setup.pack_notes())
    same_setup.note_differences([payload[len(digest) :] for payload in received])
    if len({payload[: len(digest)] for payload in received}) == 1:
        return
    # swap all names, and show the first that differ
    payloads = handshake.all_gather("all names", {}, json.dumps(own).encode())
    tables: list[list[str]] = [json.loads(payload) for payload in payloads]
    longest = max(map(len, tables))
    padded = [names + ["nothing"] * (longest - len(names)) for names in tables]
    places = [i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1]
    ranks = []
    for names in padded:
        shown = [f"position {i}: {names[i]}" for i in places[:_MAX_SHOWN]]
        ranks.append("; ".join(shown))
    raise RankMismatchError(
        f"parameters and buffers ({len(places)} of {longest} positions)",
        expected="the same names, shapes and dtypes in the same order on every rank",
        ranks=ranks,
        fix="Register submodules in a fixed order (sort names; no iteration over sets), with the same sizes on every rank.",
        collective=True,
    )


def frozen_names(module: nn.Module, reduced: Iterable[Tensor]) -> list[str]:
    """Return the names of those parameters that DDP reduces and that do not train any more."""
    places = {id(tensor) for tensor in reduced if not tensor.requires_grad}
    return [name for name, parameter in module.named_parameters() if id(parameter) in places]


def compare_frozen(names: Sequence[str]) -> None:
    """Compare between ranks the names of parameters that were frozen.

    Raises:
        RankMismatchError: on every rank, where they differ.

    Communication: one handshake.
    """
    handshake.all_gather_between_steps("parameters frozen since the model was wrapped", {"names": ", ".join(names)})


def refuse_frozen(names: Sequence[str], comm_state: object) -> None:
    """Refuse parameters that were frozen where the model cannot be wrapped anew without them.

    Args:
        names: Of the parameters.
        comm_state: Of DDP's communication hook; None where there is none.

    Raises:
        ConfigurationError: naming them.
    """
    if comm_state is not None:  # it keeps something of each bucket, and buckets would be others
        raise ConfigurationError(
            f"parameters frozen during the fit: {', '.join(names[:_MAX_SHOWN])}",
            expected="no ddp_comm_state, which is of the buckets that DDP had at the start",
            got=type(comm_state).__name__,
            fix="Set their learning rate to 0 instead, or take a hook without a state.",
        )
    raise ConfigurationError(
        f"parameters frozen inside training_step: {', '.join(names[:_MAX_SHOWN])}",
        expected="a gradient of each of them in this backward, as when the step began",
        got="requires_grad=False",
        fix="Freeze them before the step (on_train_batch_start, BaseFinetuning); where optimizers take turns (toggle_optimizer), set "
        "find_unused_parameters=True (strategy='ddp_losses_find_unused_parameters_true').",
    )


def refuse_sharded_parameters(module: nn.Module) -> None:
    """Refuse parameters of which each rank holds a part (``fully_shard``, tensor parallelism): DDP wants them whole.

    Raises:
        ConfigurationError: with their names.
    """
    parts = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if parts:
        more = f" and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
        raise ConfigurationError(
            f"parameters {', '.join(parts[:_MAX_SHOWN])}{more}",
            expected="whole parameters on every rank, which DDP averages",
            got="DTensors, of which each rank holds a part (fully_shard or tensor parallelism)",
            fix='Take strategy="fsdp2_ddp_losses" (ModelParallelLossStrategy): FSDP2 beside exact losses. Or leave out fully_shard: an '
            "encoder that fits only in pieces of the batch runs in microbatched(encoder, rows).",
        )


def refuse_static_graph_by_hand(module: LightningModule, ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse a static graph in manual optimisation: the gradients of the first backward would stay those of each rank.

    DDP reduces them all together in that backward, which it knows of by what ``forward`` returns; ``manual_backward`` runs before that.
    (torch 2.13, Lightning 2.6.6)

    Raises:
        ConfigurationError: naming the option.
    """
    if ddp_kwargs.get("static_graph", False) and not module.automatic_optimization:
        raise ConfigurationError(
            "static_graph=True",
            expected="automatic optimisation",
            got="automatic_optimization=False, under which torch's DDP does not reduce the first backward",
            fix="Leave static_graph out; find_unused_parameters=True where a backward leaves out parameters.",
        )


def _describe_tensor(name: str, tensor: Tensor) -> str:
    shard = shard_of(tensor)
    if is_lazy(tensor):  # DDP is told to leave it alone, or refuses it
        return f"{name} uninitialized"
    shape = f"{tuple(tensor.shape)}"
    if shard is not None:  # ranks hold different rows of the same whole
        shape = f"{shard.whole_shape(tensor)} divided over ranks"
    elif isinstance(tensor, DTensor):
        shape += f" {tensor.placements} over {tuple(tensor.device_mesh.shape)}"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name} {shape} {tensor.dtype}{' frozen' * frozen}"


# ---------------------------------------------------------------------- data loaders


def describe_reshuffle(dataloader: object, *, injecting: bool) -> str | None:
    """Return what Lightning did to the order of a structured sampler, as an error text; None where it left the order alone.

    Args:
        dataloader: When Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``; without it, a shuffle around a batch sampler is the user's own.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    sampler, batch_sampler = dataloader.sampler, dataloader.batch_sampler
    if isinstance(sampler, DistributedSamplerWrapper) and sampler.shuffle:
        inner = compat.wrapped_sampler(sampler.dataset)
        name = type(sampler if inner is None else inner).__name__
        return _reshuffle_text(f"{name}(...), global_batch_size", name, "shuffled over all its batches")
    if injecting and batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        held = getattr(batch_sampler, "__dict__", {}).values()
        if any(isinstance(value, DistributedSampler) and value.shuffle for value in held):
            name = type(batch_sampler).__name__
            return _reshuffle_text(f"{name}(...)", name, "built anew around a shuffling DistributedSampler")
    return None


def _reshuffle_text(arguments: str, name: str, got: str) -> str:
    return format_error(
        f"{name} under DDP",
        expected="its own order",
        got=f"{got} by Lightning, which destroys batches that belong together (M per class, hierarchical, weighted)",
        fix=f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({arguments})), or set "
        "Trainer(use_distributed_sampler=False) where the sampler itself gives each rank its own rows.",
    )


def warn_of_reshuffle(dataloader: object, *, injecting: bool = True) -> None:
    """Warn on rank zero when Lightning replaced the order of a structured sampler.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it, when Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``.
    """
    text = describe_reshuffle(dataloader, injecting=injecting)
    if text is not None:
        rank_zero_warn(text)


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


# ---------------------------------------------------------------------- batch norm

_exact_layer_sync: list[type[LayerSync]] = []


def use_layer_sync(kind: type[LayerSync]) -> None:
    """Say what synchronises batch norm on any device (``SyncBatchNorm``).

    Example:
        >>> from lightning_ddp_losses import SyncBatchNorm
        >>> use_layer_sync(SyncBatchNorm)  # as importing the package does
    """
    _exact_layer_sync[:] = [kind]


def exact_layer_sync() -> LayerSync:
    """Return a plugin that synchronises batch norm on any device and leaves the modules in their place."""
    return _exact_layer_sync[0]()


def choose_layer_sync(device: torch.device, chosen: LayerSync | None) -> LayerSync | None:
    """Return the plugin that Lightning chose, or the exact one where torch's would fail in the first training step."""
    if type(chosen) is TorchSyncBatchNorm and device.type in _WITHOUT_TORCHS_BATCH_NORM:
        return exact_layer_sync()
    return chosen


def refuse_accumulation(accumulation: object, *, is_plain_ddp: bool, ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse a way to accumulate that is none, or cannot be.

    Raises:
        ConfigurationError: naming the options.
    """
    if accumulation not in ("mean", "window"):
        raise ConfigurationError("accumulation", expected="'mean' or 'window'", got=repr(accumulation))
    if accumulation == "mean":
        return
    if is_plain_ddp:
        raise ConfigurationError(
            "accumulation='window'", expected="losses that are looked after", got="losses=[], which is plain ddp"
        )
    if ddp_kwargs.get("static_graph", False):
        raise ConfigurationError(
            "accumulation='window'",
            expected="static_graph=False",
            got="static_graph=True, with which torch's DDP cannot accumulate",
            fix="Leave static_graph out.",
        )


def refuse_global_sampler(use_global_sampler: object, *, is_plain_ddp: bool) -> None:
    """Refuse a value that is none, and the option where nothing of ours applies.

    Raises:
        ConfigurationError: naming the options.
    """
    if not isinstance(use_global_sampler, bool):
        raise ConfigurationError("use_global_sampler", expected="True or False", got=repr(use_global_sampler))
    if use_global_sampler and is_plain_ddp:
        raise ConfigurationError(
            "use_global_sampler=True",
            expected="losses that are looked after",
            got="losses=[], which is plain ddp",
            fix="Write DataLoader(..., batch_sampler=GlobalBatchSampler.shuffled(...)).",
        )
