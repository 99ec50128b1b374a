"""Checkpoints as folders of ``torch.distributed.checkpoint``: each rank writes its parts, any number of ranks reads.

Both strategies write them, with the keys of Lightning's ``ModelParallelStrategy``:

| in the folder | content |
|---|---|
| ``meta.pt`` | all entries except tensors of the module and optimizers, the name of the blocks and their checksums |
| ``blocks-*`` | files of one save, one for each rank, and their index |
| ``.metadata`` | the same index where torch and Lightning look for it |

| key in the blocks | content |
|---|---|
| ``state_dict.<name>`` | a parameter or buffer |
| ``optimizer_<i>.state.<name>.<key>`` | the state that an optimizer keeps for a parameter |
| ``optimizer_<i>.param_groups`` | its options, with the names of parameters |

torch overwrites a folder in place. Here each save has separate blocks, and ``meta.pt``, which names them, is replaced last and in one
step: a save that fails or is killed leaves the previous checkpoint. Reading does not communicate.

Imported when a folder is written or read: that part of torch is 70 modules, and most training does without them.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.strategies import checkpoint_files
from lightning_ddp_losses.strategies.checkpoint_files import BLOCKS, METADATA, SAVING
from lightning_ddp_losses.strategies.shards import is_part, names_of, parameters_in_order

_BLOCKS_PREFIX = "blocks-"
_INDEX = ".metadata"  # torch's name


class _Block(Tensor):
    """One rank's classes of a weight, which gives ``torch.distributed.checkpoint`` their range in the whole.

    (A ``DTensor`` would divide weight rows evenly. Ranks hold whole classes, so its ranges are wrong for a class with several rows.)
    """

    __torch_function__ = torch_compat.DISABLED_TORCH_FUNCTION
    part: Tensor
    shard: ClassShard

    @classmethod
    def of(cls, part: Tensor, shard: ClassShard) -> _Block:
        """Return a tensor as a block, in the same memory."""
        block = part.detach().as_subclass(cls)
        block.part, block.shard = part.detach(), shard
        return block

    def size(self, dim: int | None = None) -> Any:
        """Return the size of the whole, which torch compares with the saved one."""
        whole = torch.Size(self.shard.whole_shape(self.part))
        return whole if dim is None else whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offsets, sizes = self.shard.offsets(self.part), self.part.shape
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)] if self.part.numel() else []

    def __create_write_items__(self, fqn: str, block: Any) -> list[WriteItem]:
        items, properties = [], TensorProperties.create_from_tensor(self.part)
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.part


# ---------------------------------------------------------------------- out


class _Writer(FileSystemWriter):
    """Writes this rank's file, and reports the file system's error."""

    def write_data(self, *args: Any) -> Any:
        with checkpoint_files.file_errors():
            return super().write_data(*args)


def write_folder(path: Path, checkpoint: Mapping[str, Any], shards: Mapping[str, nn.Parameter]) -> None:
    """Write a checkpoint as a folder. Collective.

    Args:
        path: Path of the folder. That of rank 0 counts.
        checkpoint: Checkpoint with ``state_dict`` and ``optimizer_states`` by name.
        shards: Parameters that hold each rank's own classes.

    Communication: two handshakes, and the collectives of ``torch.distributed.checkpoint.save`` on the host's group.
    """
    rank = process_groups.rank()
    # 1. rank 0 chooses the place
    folder, name = handshake.all_gather_json(SAVING, {}, [str(path), _BLOCKS_PREFIX + secrets.token_hex(4)])[0]
    path, blocks = Path(folder), Path(folder, name)
    rest, state = _parted(checkpoint, shards)
    group = process_groups.internal_groups().get("host") if process_groups.is_distributed() else None
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        # 2. each rank's file. Of tensors that several ranks hold, the first one's
        try:
            save(state, storage_writer=_Writer(blocks), planner=planner, process_group=group, no_dist=group is None)
        except CheckpointException as error:  # on every rank, with the errors of all
            raise checkpoint_files.unwritten(
                path, {r: failure[0] for r, failure in error.failures.items()}, collective=True
            ) from error
        own = {found.name: _checksum(found) for found in blocks.glob(f"__{rank}_*")}
        by_rank = handshake.all_gather_json(SAVING, {}, own)
        if rank > 0:
            return
        # 3. the file that names them, from which on this is the checkpoint
        checksums = {_INDEX: _checksum(blocks / _INDEX)}
        for found in by_rank:
            checksums.update(found)
        checkpoint_files.sync_folder(blocks)
        rest[BLOCKS] = {"folder": name, "checksums": checksums}
        checkpoint_files.write_whole(path / METADATA, partial(torch.save, rest))
    except Exception:
        if rank == 0:
            shutil.rmtree(blocks, ignore_errors=True)
        raise
    _write_index(path, name)
    for found in path.iterdir():
        if found.name.startswith(_BLOCKS_PREFIX) and found.name != name:
            shutil.rmtree(found, ignore_errors=True)


def _parted(
    checkpoint: Mapping[str, Any], shards: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return a checkpoint without the tensors of its module and optimizers, and these tensors, class shards as blocks."""

    def placed(name: str, value: Any) -> Any:
        parameter = shards.get(name)
        shard = None if parameter is None or not is_part(value, parameter) else shard_of(parameter)
        return value if shard is None else _Block.of(value, shard)

    rest, module_state = dict(checkpoint), checkpoint["state_dict"]
    rest["state_dict"] = {name: value for name, value in module_state.items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in module_state.items() if isinstance(value, Tensor)}
    state: dict[str, dict[str, Any]] = {"state_dict": {name: placed(name, value) for name, value in tensors.items()}}
    for number, of_optimizer in enumerate(rest.pop("optimizer_states", [])):
        entries = {}
        for name, entry in of_optimizer["state"].items():
            entries[name] = {key: placed(name, value) for key, value in entry.items()}
        state[f"optimizer_{number}"] = {**of_optimizer, "state": entries}
    return rest, state


def _write_index(path: Path, name: str) -> None:
    """Let torch and Lightning find the blocks in a folder."""
    index = FileSystemReader(path / name).read_metadata()
    for place in index.storage_data.values():
        place.relative_path = f"{name}/{place.relative_path}"
    checkpoint_files.write_whole(path / _INDEX, partial(pickle.dump, index))


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while read := file.read(1 << 20):
            found = zlib.crc32(read, found)
    return found


# ---------------------------------------------------------------------- in


def read_rest(path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint in a folder without its tensors: in their place are tensors of their shapes without memory.

    The ranks share the comparison of the files with their checksums.

    Raises:
        ValueError: for a file that was changed after it was written.
    """
    rest: dict[str, Any] = torch.load(Path(path) / METADATA, map_location="cpu", weights_only=weights_only)
    # Lightning has the blocks in the folder itself, and no checksums
    rest.setdefault(BLOCKS, {"folder": "", "checksums": {}})
    blocks = _blocks_of(path, rest)
    checksums = sorted(rest[BLOCKS]["checksums"].items())
    for name, checksum in checksums[process_groups.rank() :: process_groups.world_size()]:
        if _checksum(blocks / name) != checksum:
            raise ValueError(f"{blocks.name}/{name} is not what was written (checksum)")
    tree = _saved_tree(blocks)
    rest["state_dict"] = {**tree.pop("state_dict", {}), **rest.get("state_dict", {})}
    if "optimizer_0" in tree:
        rest["optimizer_states"] = [tree[f"optimizer_{number}"] for number in range(len(tree))]
    return rest


def read_state(path: str | Path, checkpoint: Mapping[str, Any], likes: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the module's state in a folder.

    Args:
        path: Path of the folder.
        checkpoint: Checkpoint of ``read_rest``.
        likes: Tensors of the module by name, which are read in place. Of a divided one this rank's part is read. Others stay without
            memory. Without likes everything is read.
    """
    places: dict[str, Any] = {}
    for name, saved in checkpoint["state_dict"].items():
        # a hook may have put another value there
        if isinstance(saved, Tensor) and saved.is_meta and (not likes or name in likes):
            places[name] = _place_for(saved, likes.get(name), in_place=True)
    return {**checkpoint["state_dict"], **_read_tree(_blocks_of(path, checkpoint), "state_dict", places)}


def read_optimizer_state(
    path: str | Path,
    checkpoint: Mapping[str, Any],
    number: int,
    optimizer: Optimizer | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> dict[str, Any]:
    """Return the state of an optimizer in a folder as the optimizer loads it, with numbers of parameters.

    Args:
        path: Path of the folder.
        checkpoint: Checkpoint of ``read_rest``.
        number: Index of the optimizer.
        optimizer: Optimizer that will load it. For a divided parameter this rank's part is read. If None, everything is read.
        parameters: Parameters by name.

    Raises:
        InputError: for parameter groups that were saved with other parameters.
    """
    names, likes = list[str](), dict[str, Tensor]()
    if optimizer is not None:
        names = names_of(parameters or {}, optimizer)
        likes = dict(zip(names, parameters_in_order(optimizer), strict=True))
    # 1. read it, by name
    saved = checkpoint["optimizer_states"][number]
    saved_state = saved.get("state", {})  # an optimizer that has not stepped has none
    entries = {}
    for name, entry in saved_state.items():
        entries[name] = inputs.map_tensors(partial(_place_for, like=likes.get(name)), entry)
    places = {"state": entries, "param_groups": saved["param_groups"]}
    state = _read_tree(_blocks_of(path, checkpoint), f"optimizer_{number}", places)
    groups = [{**group, "params": _elements_of(group["params"])} for group in _elements_of(state["param_groups"])]
    # 2. the groups of this optimizer have the same parameters
    own_groups = [] if optimizer is None else optimizer.state_dict()["param_groups"]
    for group, own in zip(groups, own_groups, strict=optimizer is not None):
        expected, got = ", ".join(names[index] for index in own["params"]), ", ".join(group["params"])
        title = f"checkpoint: parameters of optimizer {number}"
        expect(
            got == expected,
            title,
            expected=expected,
            got=got,
            error=InputError,
            fix="Build the optimizer over the same parameters in the same order as in the run that saved it.",
        )
    # 3. numbers in place of names, in the order of the groups
    order = [name for group in groups for name in group["params"]]
    numbers = {name: index for index, name in enumerate(order)}
    for group in groups:
        group["params"] = [numbers[name] for name in group["params"]]
    return {"state": {numbers[name]: entry for name, entry in state["state"].items()}, "param_groups": groups}


def read_whole(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint in a folder with whole tensors, on the CPU, as one process would have saved it."""
    checkpoint = read_rest(path, weights_only)
    whole = {**checkpoint, "state_dict": read_state(path, checkpoint, {})}
    if "optimizer_states" in checkpoint:
        numbers = range(len(checkpoint["optimizer_states"]))
        whole["optimizer_states"] = [read_optimizer_state(path, checkpoint, i) for i in numbers]
    del whole[BLOCKS]
    return whole


def _blocks_of(path: str | Path, checkpoint: Mapping[str, Any]) -> Path:
    # a name that leads elsewhere is not one of our names
    return Path(path, Path(checkpoint[BLOCKS]["folder"]).name)


def _saved_tree(blocks: Path) -> dict[str, Any]:
    """Return the tree that was saved: with a tensor without memory for each tensor, and None for each other value."""
    metadata = FileSystemReader(blocks).read_metadata()
    tree: dict[str, Any] = {}
    for key, saved in metadata.state_dict_metadata.items():
        # elements of lists are entries too, with their index as text
        *path, last = map(str, metadata.planner_data[key])
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[last] = None
        if isinstance(saved, TensorStorageMetadata):
            branch[last] = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
    return tree


def _elements_of(value: Any) -> list[Any]:
    """Return a list that was saved element by element, or in one piece."""
    return [value[index] for index in sorted(value, key=int)] if isinstance(value, Mapping) else list(value)


def _place_for(saved: Tensor, like: Tensor | None, *, in_place: bool = False) -> Tensor:
    """Return memory for a saved tensor: if it has the whole shape of another, for the part of it that this rank has."""
    if like is None:
        return torch.empty(saved.shape, dtype=saved.dtype)
    shard = shard_of(like)
    whole = tuple(like.shape) if shard is None else shard.whole_shape(like)
    if tuple(saved.shape) != whole:
        return torch.empty(saved.shape, dtype=saved.dtype)
    place = like.detach() if in_place else torch.zeros_like(like, dtype=saved.dtype, requires_grad=False).detach()
    return place if shard is None else _Block.of(place, shard)


def _read_tree(blocks: Path, title: str, places: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of places with what blocks hold under a title, by whichever ranks it was written."""
    tree = {title: places}
    reader, planner = FileSystemReader(blocks), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(tree, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    return dict(inputs.map_tensors(lambda t: t.part if isinstance(t, _Block) else t, tree[title]))
