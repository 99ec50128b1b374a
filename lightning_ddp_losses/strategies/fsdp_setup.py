"""What the set-up of FSDP2 needs: which modules and parameters are sharded, what cannot be trained beside them, who starts equal.

``fully_shard`` makes each parameter of a module a ``DTensor``, of which a rank holds a part; it gathers them around forward and backward,
and scatters the mean of their gradients. All other parameters (those of losses, and what the user has not sharded) stay whole on every
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.fingerprint import fingerprints, hash_lines
from lightning_ddp_losses.distributed.shard import local_part, shard_of
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies.fit_part import FitPart
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, named_tensors

_MAX_SHOWN = 6  # names shown in an error


def sharded_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost modules to which ``fully_shard`` was applied."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from sharded_roots(child)


def sharded_modules(module: nn.Module) -> list[FSDPModule]:
    """Return all modules to which ``fully_shard`` was applied."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Let each rank hold its parts alone, also where a forward without a backward has left parameters gathered.

    Args:
        modules: As ``sharded_modules`` returned them; each step comes here, and to find them takes long.
    """
    for module in modules:
        module.reshard()


# ---------------------------------------------------------------------- refusals


def refuse_other_parallelism(module: nn.Module) -> None:
    """Refuse a module whose parameters are divided otherwise than over all ranks, or not at all.

    Raises:
        ConfigurationError: naming parameters.
    """
    found = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not found:
        raise ConfigurationError(
            "ModelParallelLossStrategy",
            expected="a module whose configure_model shards something",
            got="no parameter that fully_shard has divided",
            fix='Write fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"]) in configure_model, or take "ddp_losses".',
        )
    inside = {id(p) for root in sharded_roots(module) for p in root.parameters()}  # type: ignore[attr-defined]
    wrong = {name: _placement(p) for name, p in found.items() if id(p) not in inside or not _is_over_all_ranks(p)}
    if wrong:
        shown = [f"{name} ({placement})" for name, placement in list(wrong.items())[:_MAX_SHOWN]]
        more = f" and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
        raise ConfigurationError(
            "parameters of the model",
            expected=f"each divided by fully_shard over all {process_groups.world_size()} ranks",
            got=f"{', '.join(shown)}{more}",
            fix='Write fully_shard(module, mesh=self.device_mesh["data_parallel"]). Of other meshes, replicas x parts '
            "of all ranks are supported; tensor parallelism is not.",
        )

    # what has replicas: on one mesh, so that a rank has the same replicas of all that it holds
    meshes = {name: p.device_mesh for name, p in found.items() if replicated_dim(p) is not None}
    first = next(iter(meshes), None)
    others = {name: mesh for name, mesh in meshes.items() if mesh != meshes[str(first)]}
    if others:
        shown = [f"{name} over {mesh.mesh.tolist()}" for name, mesh in list(others.items())[:_MAX_SHOWN]]
        raise ConfigurationError(
            "parameters of the model with replicas",
            expected=f"all on one mesh, {meshes[str(first)].mesh.tolist()} of {first}",
            got=", ".join(shown),
            fix="Make the mesh of replicas and parts once, in configure_model, and give it to each fully_shard.",
        )


def refuse_losses(module: nn.Module, losses: Iterable[FoundLoss]) -> None:
    """Refuse losses that ``fully_shard`` has divided, and such as share a parameter with what it has divided.

    Raises:
        ConfigurationError: naming losses and parameters.
    """
    for loss in losses:
        divided = [name for name, p in loss.module.named_parameters() if isinstance(p, DTensor)]
        if divided:
            raise ConfigurationError(
                loss.title,
                expected="beside the modules that fully_shard divides: its own parameters are averaged, or divided by class",
                got=f"{', '.join(divided[:_MAX_SHOWN])} inside one of them",
                fix="Make the loss an attribute of the LightningModule, and shard the encoder alone; a weight that is too large for one "
                "rank goes into ClassShardedLoss.",
            )
    # fully_shard gives a module another parameter than the one that it shared
    torn = [name for name, p in module.named_parameters() if not isinstance(p, DTensor) and compat.was_sharded(p)]
    if torn:
        raise ConfigurationError(
            f"parameters {', '.join(torn[:_MAX_SHOWN])}",
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
            whole = [p for p in group["params"] if not isinstance(p, DTensor)]
            if is_joint and 0 < len(whole) < len(group["params"]):
                shown = [names.get(id(p), "a parameter") for p in whole[:_MAX_SHOWN]]
                raise ConfigurationError(
                    f"parameter group of optimizer {number} with foreach or fused",
                    expected="only parameters that fully_shard divides, or none of them",
                    got=f"{', '.join(shown)} among such",
                    fix='Give them a group of their own: [{"params": encoder}, {"params": the others}].',
                )


def _is_over_all_ranks(parameter: DTensor) -> bool:
    """Say whether gradients are averaged over all ranks: one dimension of the mesh divides, others replicate."""
    shards = sum(placement.is_shard() for placement in parameter.placements)
    replicas = sum(placement.is_replicate() for placement in parameter.placements)
    covers = parameter.device_mesh.size() == process_groups.world_size()
    return covers and shards == 1 and shards + replicas == len(parameter.placements)


def replicated_dim(parameter: Tensor) -> int | None:
    """Return the dimension of the mesh along which ranks hold the same part of a divided parameter; None where each part is on one rank."""
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
    """Give all ranks rank 0's values of what ``fully_shard`` has yet to divide, where they differ.

    Each rank keeps its part of what it holds itself, and no part has a replica: weights that were loaded on rank 0 alone, or drawn with
    other seeds, would make a model that no process ever had. (DDP's first broadcast does the same for what it wraps.)

    Communication: one handshake; one broadcast per 64 MiB of what differs.
    """
    names, whole = [], []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_meta or is_lazy(parameter) or shard_of(parameter) is not None:
            continue
        names.append(f"{name} {tuple(parameter.shape)} {parameter.dtype}")
        whole.append(parameter)
    # 1. the names of what is hashed, then the hashes
    own = array("q", [hash_lines(names), *fingerprints(whole)]).tobytes()
    tables = [array("q", sent) for sent in handshake.all_gather_between_steps("parameters to be divided", {}, own)]
    if len({table[0] for table in tables}) > 1:
        return  # the names of all tensors are compared when all are there
    # 2. rank 0's, where some rank has another
    columns = list(zip(*tables, strict=True))[1:]
    differ = [p for p, column in zip(whole, columns, strict=True) if len(set(column)) > 1]
    raw_collectives.broadcast_(differ)


def broadcast_whole_tensors(module: nn.Module) -> None:
    """Give all ranks rank 0's values of what they hold whole; parts of the model and classes of a loss are each rank's own.

    Where parts have replicas (HSDP), these get the first one's.

    Communication: one broadcast per 64 MiB of what is whole, and one for each part that has replicas.
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
        """Watch each sharded module; backward may reach an inner one first."""
        # before fully_shard's own hook, which registers what gathers
        for inner in self.fit.module.modules():
            if isinstance(inner, FSDPModule):
                self.undo.callback(inner.register_forward_hook(self._watch, prepend=True).remove)

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


class PartsOfScaledGradients(FitPart):
    """Lets a gradient scaler unscale parts of gradients."""

    def on_model_ready(self) -> None:
        """Replace the scaler's function, if there is a scaler."""
        scaler = getattr(self.fit.strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            self.undo.callback(compat.replace_unscaling(scaler, unscale_parts))


def unscale_parts(own: Callable[..., Any], optimizer: Any, args: tuple[Any, ...]) -> dict[Any, Tensor]:
    """Unscale what this rank holds of an optimizer's gradients, and let what overflowed on one rank count on all.

    (torch takes no list in which some gradients are ``DTensor``; and a part that overflowed is on one rank alone.)

    Args:
        own: The scaler's.
        optimizer: Whose gradients are unscaled.
        args: What the scaler gives its own function beside.

    Returns:
        By device, 1 where a gradient of some rank is not finite, else 0.

    Communication: one sum of a number for each device.
    """
    holders: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                holder = local_part(parameter.detach())
                holder.grad = local_part(parameter.grad)
                holders.append(holder)
    overflowed: dict[Any, Tensor] = own(SimpleNamespace(param_groups=[{"params": holders}]), *args)
    shared = {}
    for device, flag in overflowed.items():
        shared[device] = (raw_collectives.sum_over_ranks(flag.reshape(1), None) > 0).to(flag.dtype).reshape(flag.shape)
    return shared


def set_gradient_sync(roots: Sequence[FSDPModule], *, enabled: bool) -> None:
    """Let FSDP2 reduce gradients in backward, or accumulate them whole on each rank."""
    for root in roots:
        root.set_requires_gradient_sync(enabled)
