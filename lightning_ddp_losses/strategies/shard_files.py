"""Class shards in checkpoints: the whole weight, assembled by all ranks together, or each rank's part in a file of its own.

An ordinary checkpoint holds what one process would have saved, so it moves between any number of ranks and the plain loss. A sharded one
is a folder: ``rest.ckpt``, and the shards as ``torch.distributed.checkpoint`` writes them, which nobody ever holds whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.strategies.sharded_parameters import Owners, Shards

REST = "rest.ckpt"
_MARK = "class shard"


def is_sharded(path: Any) -> bool:
    """Whether a checkpoint is a folder that a sharded save has written."""
    return (Path(path) / REST).is_file()


class ShardFiles:
    """Puts shards into checkpoints and takes them out.

    Args:
        shards: Of the module.
        sharded: Write each rank's part by itself.
    """

    def __init__(self, shards: Shards, *, sharded: bool) -> None:
        self._shards, self._sharded = shards, sharded
        self._pieces: dict[str, tuple[Tensor, nn.Parameter]] = {}

    # ------------------------------------------------------------------ out

    def module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """The module's state with the whole of each shard (on rank 0; elsewhere only its shape)."""
        if self._sharded:
            self._pieces.clear()
        return {name: self._out(f"state_dict/{name}", name, value) for name, value in state.items()}

    def completed(self, state: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's module state; what a callback has put there instead (averages) as the whole too. Every rank comes here.

        Communication: one frame where there are shards.
        """
        if not self._shards:
            return state
        parts = [name for name, p in self._shards.parameters.items() if _is_part(state.get(name), p)]
        handshake.all_gather("saving a checkpoint", {"class shards that a callback replaced": ", ".join(parts)})
        if parts and self._sharded:
            raise ConfigurationError(
                "sharded_checkpoints",
                expected="the module's own weights in the checkpoint",
                got=f"what a callback put in the place of {', '.join(parts)}",
                fix="Save ordinary checkpoints: DDPLossStrategy(sharded_checkpoints=False).",
                collective=True,
            )
        return {**state, **{name: self._out("", name, state[name]) for name in parts}}

    def optimizer_state(self, optimizer: Any, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's state dict, likewise."""
        if not self._shards:
            return state
        entries = dict(state["state"])
        for index, parameter in _indexed(optimizer):
            name = self._shards.of(parameter)
            if name is None or index not in entries:
                continue
            entries[index] = {
                key: self._out(f"optimizer_states/{number}/{index}/{key}", name, value)
                if _is_like(value, parameter)
                else value
                for key, value in entries[index].items()
            }
        return {**state, "state": entries}

    def _out(self, key: str, name: str, value: Any) -> Any:
        if name not in self._shards.parameters or not isinstance(value, Tensor):
            return value
        parameter = self._shards.parameters[name]
        shard = shard_of(parameter)
        assert shard is not None
        if not self._sharded:
            return assemble(value, shard, self._shards.owners[name])
        self._pieces[key] = value.detach(), parameter
        return {_MARK: key, "shape": list(shard.whole_shape(value)), "dtype": str(value.dtype)}

    def write(self, path: Any, write_rest: Callable[[Any], None]) -> None:
        """Write a sharded checkpoint; every rank comes here."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        pieces = {key: self._whole_view(part, parameter) for key, (part, parameter) in self._pieces.items()}
        group = process_groups.internal_groups().host if process_groups.is_distributed() else None
        save(pieces, checkpoint_id=folder, process_group=group, no_dist=group is None)
        write_rest(folder / REST)
        self._pieces.clear()

    # ------------------------------------------------------------------ in

    def read(self, path: Any, tree: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint's ``state_dict`` or ``optimizer_states`` entries with this rank's part for each mark."""
        marks = {name: value for name, value in tree.items() if isinstance(value, Mapping) and _MARK in value}
        wanted, parts = {}, {}
        for name, mark in marks.items():
            parameter = self._shards.parameters.get(str(mark.get("of", name)))
            dtype = getattr(torch, str(mark["dtype"]).removeprefix("torch."))
            if parameter is None:  # a plain loss takes it whole
                part = torch.empty(mark["shape"], dtype=dtype)
                wanted[mark[_MARK]] = part
            else:
                part = torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
                wanted[mark[_MARK]] = self._whole_view(part, parameter)
            parts[name] = part
        if wanted:
            group = process_groups.internal_groups().host if process_groups.is_distributed() else None
            load(wanted, checkpoint_id=Path(path), process_group=group, no_dist=group is None)
        return {**tree, **parts}

    def own_optimizer_state(self, optimizer: Any, state: dict[str, Any], path: Any) -> dict[str, Any]:
        """A saved optimizer state with this rank's part of what belongs to a shard."""
        entries = dict(state["state"])
        for index, parameter in _indexed(optimizer):
            if index not in entries:
                continue
            name, shard = self._shards.of(parameter), shard_of(parameter)
            entry = {
                key: {**value, "of": name} if isinstance(value, Mapping) and _MARK in value else value
                for key, value in entries[index].items()
            }
            entries[index] = entry = self.read(path, entry)
            if shard is None:
                continue
            whole = shard.whole_shape(parameter)
            entries[index] = {
                key: torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(shard.own_part(value))
                if isinstance(value, Tensor) and tuple(value.shape) == whole and value.shape != parameter.shape
                else value
                for key, value in entry.items()
            }
        return {**state, "state": entries}

    # ------------------------------------------------------------------ torch.distributed.checkpoint

    def _whole_view(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part as a piece of the whole, for torch.distributed.checkpoint."""
        shard = shard_of(parameter)
        assert shard is not None
        world = process_groups.world_size()
        if not process_groups.is_distributed():
            return part
        if shard != ClassShard.of_rank(
            shard.num_classes, world, process_groups.rank(), dim=shard.dim, per_class=shard.per_class
        ):
            raise ConfigurationError(
                "sharded_checkpoints",
                expected="classes divided over all ranks",
                got="classes divided over a part of them (group=...)",
                fix="Save ordinary checkpoints: DDPLossStrategy(sharded_checkpoints=False).",
            )
        mesh = DeviceMesh.from_group(process_groups.internal_groups().host, "cpu")
        shape = torch.Size(shard.whole_shape(part))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part.cpu(), mesh, [Shard(shard.dim)], run_check=False, shape=shape, stride=stride)


def assemble(part: Tensor, shard: ClassShard, owners: Owners) -> Tensor:
    """The whole, on rank 0; a tensor of its shape without memory on the others.

    Communication: each rank sends its part to rank 0.
    """
    shape, rank = shard.whole_shape(part), process_groups.rank()
    whole = torch.empty(shape, dtype=part.dtype, device=part.device if rank == 0 else "meta")
    for owner, block in owners:
        if rank not in (0, owner):
            continue
        wanted = list(shape)
        wanted[block.dim] = block.classes * block.per_class
        if owner == 0:
            block.own_part(whole).copy_(part) if rank == 0 else None
        elif rank == owner:
            raw_collectives.send(part, 0)
        else:
            block.own_part(whole).copy_(raw_collectives.receive(wanted, part, owner))
    return whole


def refuse_other_sizes(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with other classes before anything is loaded.

    Raises:
        InputError: naming the parameter and both shapes.
    """
    for name, parameter in module.named_parameters():
        shard, value = shard_of(parameter), state.get(name)
        if shard is None or value is None:
            continue
        got = tuple(value["shape"]) if isinstance(value, Mapping) else tuple(value.shape)
        if got != shard.whole_shape(parameter):
            raise InputError(
                f"checkpoint: {name}",
                expected=f"{shard.whole_shape(parameter)}, the whole of {shard.num_classes} classes",
                got=got,
                fix="Load a checkpoint of a loss with the same classes and embedding size; nothing was loaded.",
            )


def _indexed(optimizer: Any) -> list[tuple[int, nn.Parameter]]:
    """Parameters with the numbers that ``state_dict`` gives them."""
    return list(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _is_part(value: Any, parameter: Tensor) -> bool:
    """Whether this is what one rank holds, and not the whole."""
    shard = shard_of(parameter)
    assert shard is not None
    return _is_like(value, parameter) and tuple(value.shape) != shard.whole_shape(parameter)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
