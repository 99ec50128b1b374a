"""Set-up for FSDP2: sharded modules and parameters, refusals, and equal starts.

``fully_shard`` makes each parameter of a module a ``DTensor``. A rank holds a part of it. It gathers them around forward and backward,
and scatters the mean of their gradients. All other parameters (those of losses, and those the user has not sharded) stay whole on every
rank, and ours.

| parameter | its gradient |
|---|---|
| ``DTensor`` over all ranks | FSDP2's reduce-scatter: the mean, of this rank's part |
| ``DTensor`` over some, on several replicas (HSDP) | the same, and FSDP2's all-reduce between the replicas |
| class shard (``ClassShardedLoss``) | that of all rows already, of this rank's classes |
| any other | the mean of ``LossReducer`` |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.fingerprint import fingerprints, hash_lines
from lightning_ddp_losses.distributed.shard import local_part, shard_of
from lightning_ddp_losses.errors import expect, listed
from lightning_ddp_losses.strategies.fit_part import FitPart
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, named_tensors

_NAMES = "_ddp_losses_names"  # attribute of a parameter between the start of ``configure_model`` and the check after it


def sharded_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost modules with ``fully_shard``."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from sharded_roots(child)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all modules with ``fully_shard``."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Let each rank hold its parts alone, even if a forward without a backward has left parameters gathered.

    Args:
        modules: Result of ``sharded_modules``. Each step needs them, and the search takes long.
    """
    for module in modules:
        module.reshard()


# ---------------------------------------------------------------------- refusals


def refuse_other_parallelism(module: nn.Module) -> None:
    """Refuse a module with parameters divided otherwise than over all ranks, or not at all.

    Raises:
        ConfigurationError: naming parameters.
    """
    found = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    expect(
        found,
        "ModelParallelLossStrategy",
        expected="a module whose configure_model shards something",
        got="no parameter that fully_shard has divided",
        fix='Write fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"]) in configure_model, or take "ddp_losses".',
    )
    inside = {id(p) for root in sharded_roots(module) for p in root.parameters()}  # type: ignore[attr-defined]
    wrong = {name: p for name, p in found.items() if id(p) not in inside or not _is_over_all_ranks(p)}
    expect(
        not wrong,
        "parameters of the model",
        expected=f"each divided by fully_shard over all {process_groups.world_size()} ranks",
        got=listed([f"{name} ({_placement(p)})" for name, p in wrong.items()]),
        fix='Write fully_shard(module, mesh=self.device_mesh["data_parallel"]). Of other meshes, replicas x parts '
        "of all ranks are supported; tensor parallelism is not.",
    )

    # what has replicas: on one mesh, so that a rank has the same replicas of all that it holds
    meshes = {name: p.device_mesh for name, p in found.items() if replicated_dim(p) is not None}
    texts = [f"{name} over {mesh.mesh.tolist()}" for name, mesh in meshes.items()]
    expect(
        len(set(meshes.values())) <= 1,
        "parameters of the model with replicas",
        expected="all on one mesh",
        got=listed(texts),
        fix="Make the mesh of replicas and parts once, in configure_model, and give it to each fully_shard.",
    )


def note_names_(module: nn.Module) -> None:
    """Note on each parameter the names that it has before ``configure_model``, for ``refuse_losses``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, found in names.items():
        setattr(parameter, _NAMES, found)


def refuse_losses(module: nn.Module, losses: Iterable[FoundLoss]) -> None:
    """Refuse losses that ``fully_shard`` has divided, and those that share a parameter with a divided module.

    Raises:
        ConfigurationError: naming losses and parameters.
    """
    for loss in losses:
        divided = [name for name, p in loss.module.named_parameters() if isinstance(p, DTensor)]
        expect(
            not divided,
            loss.title,
            expected="beside the modules that fully_shard divides: its own parameters are averaged, or divided by class",
            got=f"{listed(divided)} inside one of them",
            fix="Make the loss an attribute of the LightningModule, and shard the encoder alone; a weight that is too large for one "
            "rank goes into ClassShardedLoss.",
        )
        unknown = [name for name, p in loss.module.named_parameters() if not hasattr(p, _NAMES)]
        expect(
            not unknown or compat.marks_sharded(),
            f"parameters of {loss.title}",
            expected="made before configure_model: this torch does not show which of them fully_shard divides elsewhere",
            got=f"{listed(unknown)} made inside it",
            fix="Make the loss in __init__, or install torch 2.13.",
        )
    # fully_shard gives a module another parameter than the one that it shared
    tensors = dict(module.named_parameters(remove_duplicate=False))
    torn = []
    for name, parameter in tensors.items():
        names_before = vars(parameter).pop(_NAMES, ())
        is_divided = any(isinstance(tensors.get(other), DTensor) for other in names_before)
        if not isinstance(parameter, DTensor) and (is_divided or compat.was_sharded(parameter)):
            torn.append(name)
    expect(
        not torn,
        f"parameters {listed(torn)}",
        expected="of their own: fully_shard divides a parameter where it is, and what shared it keeps the whole",
        got="shared with a module that fully_shard has divided",
        fix="Give the loss a parameter of its own, or leave the shared module out of fully_shard.",
    )


def refuse_mixed_groups(module: nn.Module, optimizers: Iterable[Any]) -> None:
    """Refuse a parameter group that steps divided and whole parameters in one call, which torch cannot.

    Raises:
        ConfigurationError: naming parameters.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            is_joint = group.get("foreach") or group.get("fused")
            whole = [names.get(id(p), "a parameter") for p in group["params"] if not isinstance(p, DTensor)]
            expect(
                not is_joint or len(whole) in (0, len(group["params"])),
                f"parameter group of optimizer {number} with foreach or fused",
                expected="only parameters that fully_shard divides, or none of them",
                got=f"{listed(whole)} among such",
                fix='Give them a group of their own: [{"params": encoder}, {"params": the others}].',
            )


def _is_over_all_ranks(parameter: DTensor) -> bool:
    """Return whether gradients are averaged over all ranks: one dimension of the mesh divides, others replicate."""
    shards = sum(placement.is_shard() for placement in parameter.placements)
    replicas = sum(placement.is_replicate() for placement in parameter.placements)
    covers = parameter.device_mesh.size() == process_groups.world_size()
    return covers and shards == 1 and shards + replicas == len(parameter.placements)


def replicated_dim(parameter: Tensor) -> int | None:
    """Return the dimension of the mesh along which ranks hold the same part of a divided parameter. None if each part is on one rank."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    dims = [
        dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate() and mesh.size(dim) > 1
    ]
    return dims[0] if dims else None


def _placement(parameter: DTensor) -> str:
    mesh = parameter.device_mesh
    return f"{', '.join(map(str, parameter.placements))} over {' x '.join(map(str, mesh.shape))} ranks"


# ---------------------------------------------------------------------- what starts equal


def share_whole_parameters(module: nn.Module) -> None:
    """Give all ranks rank 0's values of parameters that ``fully_shard`` has yet to divide, if they differ.

    Each rank keeps its part of its own values, and no part has a replica: weights that were loaded on rank 0 alone, or drawn with
    other seeds, would make a model that no process ever had. (DDP's first broadcast does the same for its module.)

    Communication: one handshake. One broadcast per 64 MiB of what differs.
    """
    names, whole = [], []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta or is_lazy(parameter) or shard_of(parameter) is not None:
            continue
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
        whole.append(parameter)
    # 1. the names of the hashed values, then the hashes
    own = array("q", [hash_lines(names), *fingerprints(whole)]).tobytes()
    tables = [array("q", sent) for sent in handshake.all_gather_between_steps("parameters to be divided", {}, own)]
    if len({table[0] for table in tables}) > 1:
        return  # the names of all tensors are compared when all are there
    # 2. rank 0's, if some rank has another
    columns = list(zip(*tables, strict=True))[1:]
    differ = [p for p, column in zip(whole, columns, strict=True) if len(set(column)) > 1]
    raw_collectives.broadcast_(differ)


def broadcast_whole_tensors(module: nn.Module) -> None:
    """Give all ranks rank 0's values of whole parameters. Parts of the model and classes of a loss are each rank's own.

    Where parts have replicas (HSDP), these get the first one's.

    Communication: one broadcast per 64 MiB of whole parameters, and one for each part that has replicas.
    """
    whole = [t for _, t in named_tensors(module) if not isinstance(t, DTensor) and shard_of(t) is None]
    raw_collectives.broadcast_(whole)
    for parameter in module.parameters():
        dim = replicated_dim(parameter)
        if dim is not None:
            assert isinstance(parameter, DTensor)
            replicas = parameter.device_mesh.get_group(dim)
            raw_collectives.broadcast_between_replicas_(local_part(parameter.detach()), replicas)


# ---------------------------------------------------------------------- backward


class ShardedBackward(FitPart):
    """Exchanges the call check when backward reaches a sharded module, before anything is gathered and any gradient leaves."""

    def on_model_ready(self) -> None:
        """Watch each sharded module. Backward may reach an inner one first."""
        # before fully_shard's own hook, which registers what gathers
        for inner in self.fit.module.modules():
            if isinstance(inner, FSDPModule):
                self.undo.callback(inner.register_forward_hook(self._watch, prepend=True).remove)

    @eager_recursive
    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        tensors = [output]
        if not isinstance(output, Tensor):
            tensors = [leaf for leaf in compat.tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._reach)

    def _reach(self, _: Tensor) -> None:
        self.fit.exchange_calls()


def set_gradient_sync(roots: Sequence[FSDPModule], *, enabled: bool) -> None:
    """Let FSDP2 reduce gradients in backward, or accumulate them whole on each rank."""
    for root in roots:
        root.set_requires_gradient_sync(enabled)
