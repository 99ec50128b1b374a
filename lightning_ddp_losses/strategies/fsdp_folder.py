"""A divided module's checkpoint as a folder of ``torch.distributed.checkpoint``: each rank writes its parts, any number of ranks reads.

Imported where a folder is written or read: that part of torch is 70 modules, a fifth of what this package adds to Lightning's import.

| key in the folder | what |
|---|---|
| ``state_dict.<name>`` | parameters and buffers |
| ``optimizer_<i>.state.<name>.<key>`` | what an optimizer keeps for a parameter |
| ``optimizer_<i>.param_groups`` | its options, parameters by name |
| the file ``meta.pt`` | all else |
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.strategies.checkpoint_files import write_whole
from lightning_ddp_losses.strategies.fsdp_checkpoints import (
    METADATA,
    named_optimizer_state,
    names_of,
    parameters_in_order,
)

# ---------------------------------------------------------------------- what is in it


class _Part(NamedTuple):
    """This rank's classes of one tensor of a folder."""

    shard: ClassShard
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it lies in the whole."""
        return ChunkStorageMetadata(offsets=self.shard.offsets(self.tensor), sizes=self.tensor.shape)


def _divided_parts(module: nn.Module, state: Mapping[str, Any]) -> dict[str, _Part]:
    """Return what of a folder's state is classes of a divided weight, by its key."""
    found = {}
    for name, parameter in module.named_parameters():
        shard = shard_of(parameter)
        if shard is None:
            continue
        found[f"state_dict.{name}"] = _Part(shard, state.get("state_dict", {}).get(name))
        for title, of_optimizer in state.items():
            if title.startswith("optimizer_"):
                for key, value in of_optimizer["state"].get(name, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        found[f"{title}.state.{name}.{key}"] = _Part(shard, value)
    return {key: part for key, part in found.items() if part.tensor is not None}


# ---------------------------------------------------------------------- out


def write_folder(path: Path, module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint as a folder; every rank comes here.

    Args:
        path: Of the folder.
        module: Whose classes of losses are divided.
        checkpoint: ``state_dict`` and ``optimizer_states`` by name; all else goes into one file.

    Communication: what ``torch.distributed.checkpoint.save`` does, on the host's group.
    """
    rest = dict(checkpoint)
    state = {"state_dict": rest.pop("state_dict")}
    for number, of_optimizer in enumerate(rest.pop("optimizer_states", [])):
        state[f"optimizer_{number}"] = of_optimizer
    path.mkdir(parents=True, exist_ok=True)
    is_first = process_groups.rank() == 0
    if is_first:  # a job that ends in the middle leaves a folder that nobody takes for a checkpoint
        (path / METADATA).unlink(missing_ok=True)
    planner = _SavePlanner(_divided_parts(module, state))
    writer = FileSystemWriter(path, single_file_per_rank=True, overwrite=True)
    save(state, storage_writer=writer, planner=planner, process_group=_host_group(), no_dist=_host_group() is None)
    if is_first:
        write_whole(path / METADATA, lambda file: torch.save(rest, file))


class _SavePlanner(DefaultSavePlanner):
    """Places class shards where they say; all else as torch does."""

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank writes."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self._parts]
        for key, part in self._parts.items():
            if part.tensor.numel() == 0:
                continue
            properties = TensorProperties.create_from_tensor(part.tensor)
            size = torch.Size(part.shard.whole_shape(part.tensor))
            data = TensorWriteData(chunk=part.chunk, properties=properties, size=size)
            items.append(WriteItem(MetadataIndex(key, part.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written under an index."""
        part = self._parts.get(index.fqn)
        return super().lookup_object(index) if part is None else part.tensor.detach()


def _host_group() -> Any:
    return process_groups.internal_groups().host if process_groups.is_distributed() else None


# ---------------------------------------------------------------------- in


def read_rest(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Return what a folder holds beside tensors, with a place for each optimizer that ``read_optimizer`` will find."""
    rest: dict[str, Any] = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    numbers = {key.partition(".")[0] for key in keys if key.startswith("optimizer_")}
    return {**rest, "state_dict": {}, **({"optimizer_states": [{}] * len(numbers)} if numbers else {})}


def read_module_(path: Path, module: nn.Module, *, strict: bool) -> None:
    """Fill a module's tensors from a folder. Communication: what ``torch.distributed.checkpoint.load`` does, on the host's group."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    if not strict:
        state = {name: value for name, value in state.items() if f"state_dict.{name}" in saved}
    _read_(path, module, {"state_dict": state})
    module.load_state_dict(state, strict=False)


def read_optimizer_(path: Path, module: nn.Module, optimizer: Optimizer, number: int) -> None:
    """Load an optimizer's state from a folder.

    Raises:
        InputError: for a parameter group that was saved with other parameters.

    Communication: as ``read_module_``.
    """
    title = f"optimizer_{number}"
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    names = names_of(module, optimizer)
    # 1. a place for each tensor: this rank's part where it has the shape of its parameter
    entries: dict[str, dict[str, Any]] = {}
    parameters = dict(zip(names, parameters_in_order(optimizer), strict=True))
    for key, (name, entry_key) in state_keys(saved, f"{title}.state.", parameters).items():
        found, place = saved[key], None
        if isinstance(found, TensorStorageMetadata):
            place = _place_for(found, parameters[name])
        entries.setdefault(name, {})[entry_key] = place
    present = named_optimizer_state(module, optimizer)
    state = {title: {"state": entries, "param_groups": present["param_groups"]}}
    _read_(path, module, state)
    # 2. names back into numbers
    groups = state[title]["param_groups"]
    own_groups = optimizer.state_dict()["param_groups"]
    for group, own in zip(groups, own_groups, strict=True):
        assert isinstance(group, dict)
        expected = [names[i] for i in own["params"]]
        if list(group["params"]) != expected:
            raise InputError(
                f"checkpoint: parameters of optimizer {number}",
                expected=", ".join(expected),
                got=", ".join(group["params"]),
            )
    numbers = {name: i for i, name in enumerate(names)}
    numbered = {numbers[name]: entry for name, entry in entries.items()}
    merged = [{**group, "params": own["params"]} for group, own in zip(groups, own_groups, strict=True)]
    optimizer.load_state_dict({"state": numbered, "param_groups": merged})


def state_keys(keys: Iterable[str], prefix: str, names: Container[str]) -> dict[str, tuple[str, str]]:
    """Return for each key of an optimizer's state the parameter's name and what is kept of it; in one pass, as models have many.

    Args:
        keys: Of a folder.
        prefix: With which those of this optimizer begin.
        names: Of its parameters; keys of others are left out.
    """
    found = {}
    for key in keys:
        if not key.startswith(prefix):
            continue
        # both may have dots in them
        parts = key.removeprefix(prefix).split(".")
        for end in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:end])
            if name in names:
                found[key] = name, ".".join(parts[end:])
                break
    return found


def _place_for(saved: TensorStorageMetadata, parameter: nn.Parameter) -> Tensor:
    """Return an empty tensor for what was saved of a parameter's optimizer state."""
    dtype, shard = saved.properties.dtype, shard_of(parameter)
    whole = tuple(parameter.shape) if shard is None else shard.whole_shape(parameter)
    if tuple(saved.size) == whole:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    return torch.zeros(saved.size, dtype=dtype)


def _read_(path: Path, module: nn.Module, state: dict[str, Any]) -> None:
    planner = _LoadPlanner(_divided_parts(module, state))
    group = _host_group()
    load(
        state,
        storage_reader=FileSystemReader(path),
        planner=planner,
        process_group=group,
        no_dist=group is None,
    )


class _LoadPlanner(DefaultLoadPlanner):
    """Reads class shards from whatever blocks hold their classes; all else as torch does."""

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads."""
        assert self.metadata is not None
        others = {key: value for key, value in self.state_dict.items() if key not in self._parts}
        plan = create_default_local_load_plan(others, self.metadata, strict=True)
        items = list(plan.items)
        for key, part in self._parts.items():
            saved = self.metadata.state_dict_metadata.get(key)
            whole = part.shard.whole_shape(part.tensor)
            if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != whole:
                got = "nothing"
                if saved is not None:
                    got = f"{tuple(getattr(saved, 'size', ()))}"
                raise InputError(f"checkpoint: {key}", expected=f"shape {whole}", got=got)
            if part.tensor.numel():
                items += create_read_items_for_chunk_list(key, saved, [part.chunk])
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return where to read."""
        part = self._parts.get(index.fqn)
        return super().lookup_tensor(index) if part is None else part.tensor.detach()
