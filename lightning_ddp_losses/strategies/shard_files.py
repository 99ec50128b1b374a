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
from lightning_ddp_losses.strategies.sharded_parameters import Owners, ShardedParameters

REST = "rest.ckpt"
_MARK = "class shard"


def is_sharded(path: Any) -> bool:
    """Say whether a checkpoint is a folder that a sharded save has written."""
    return (Path(path) / REST).is_file()


class ShardFiles:
    """Puts shards into checkpoints and takes them out.

    Args:
        shards: Of the module.
        sharded: Write each rank's part by itself.
    """

    def __init__(self, shards: ShardedParameters, *, sharded: bool) -> None:
        self._shards, self._sharded = shards, sharded
        self._pieces: dict[str, tuple[Tensor, nn.Parameter]] = {}

    # ------------------------------------------------------------------ out

    def module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state with the whole of each shard (on rank 0; elsewhere only its shape)."""
        if self._sharded:
            self._pieces.clear()
        return {name: self._out(f"state_dict/{name}", name, value) for name, value in state.items()}

    def completed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's module state; what a callback put there instead (averages) as the whole too. Every rank comes here.

        Communication: one handshake where there are shards.
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
        """Return an optimizer's state dict with the whole of what belongs to each shard."""
        if not self._shards:
            return state
        entries = dict(state["state"])
        for index, parameter in _indexed(optimizer):
            name = self._shards.of(parameter)
            if name is None or index not in entries:
                continue
            # moments have the parameter's shape; step counts and the like do not
            entry = dict(entries[index])
            for key, value in entry.items():
                if _is_like(value, parameter):
                    entry[key] = self._out(f"optimizer_states/{number}/{index}/{key}", name, value)
            entries[index] = entry
        return {**state, "state": entries}

    def _out(self, key: str, name: str, value: Any) -> Any:
        """Return what a checkpoint holds of a value: the whole; in a sharded one a mark, and the part is kept for ``write``."""
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
        """Return a checkpoint's ``state_dict`` or ``optimizer_states`` entries with this rank's part for each mark."""
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
        """Return a saved optimizer state with this rank's part of what belongs to a shard."""
        entries = dict(state["state"])
        for index, parameter in _indexed(optimizer):
            if index not in entries:
                continue
            name, shard = self._shards.of(parameter), shard_of(parameter)
            # marks: read this rank's part of the parameter they belong to
            entry = dict(entries[index])
            for key, value in entry.items():
                if isinstance(value, Mapping) and _MARK in value:
                    entry[key] = {**value, "of": name}
            entry = self.read(path, entry)
            # wholes: cut this rank's part out
            if shard is not None:
                whole_shape = shard.whole_shape(parameter)
                for key, value in entry.items():
                    if isinstance(value, Tensor) and tuple(value.shape) == whole_shape != tuple(parameter.shape):
                        part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                        entry[key] = part.copy_(shard.own_part(value))
            entries[index] = entry
        return {**state, "state": entries}

    # ------------------------------------------------------------------ torch.distributed.checkpoint

    def _whole_view(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part as a piece of the whole, for torch.distributed.checkpoint."""
        shard = shard_of(parameter)
        assert shard is not None
        if not process_groups.is_distributed():
            return part
        # a DTensor knows one way to divide: that over all ranks
        world_size, rank = process_groups.world_size(), process_groups.rank()
        over_all_ranks = ClassShard.of_rank(
            shard.num_classes, world_size, rank, dim=shard.dim, per_class=shard.per_class
        )
        if shard != over_all_ranks:
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
    """Return the whole, on rank 0; a tensor of its shape without memory on the others.

    Communication: each rank sends its part to rank 0.
    """
    shape, rank = shard.whole_shape(part), process_groups.rank()
    device = part.device if rank == 0 else torch.device("meta")
    whole = torch.empty(shape, dtype=part.dtype, device=device)
    for owner, block in owners:
        # 1. rank 0 has its own
        if rank == 0 == owner:
            block.own_part(whole).copy_(part)
        # 2. and gets the others'
        elif rank == 0:
            wanted = list(shape)
            wanted[block.dim] = block.classes * block.per_class
            block.own_part(whole).copy_(raw_collectives.receive(wanted, part, owner))
        elif rank == owner:
            raw_collectives.send(part, 0)
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
        saved_shape = value["shape"] if isinstance(value, Mapping) else value.shape
        got = tuple(saved_shape)
        if got != shard.whole_shape(parameter):
            raise InputError(
                f"checkpoint: {name}",
                expected=f"{shard.whole_shape(parameter)}, the whole of {shard.num_classes} classes",
                got=got,
                fix="Load a checkpoint of a loss with the same classes and embedding size; nothing was loaded.",
            )


def _indexed(optimizer: Any) -> list[tuple[int, nn.Parameter]]:
    """Return parameters with the numbers that ``state_dict`` gives them."""
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return list(enumerate(parameters))


def _is_part(value: Any, parameter: Tensor) -> bool:
    """Say whether this is what one rank holds, and not the whole."""
    shard = shard_of(parameter)
    assert shard is not None
    return _is_like(value, parameter) and tuple(value.shape) != shard.whole_shape(parameter)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape
