"""Blocks of classes in a folder, as ``torch.distributed.checkpoint`` writes them: each rank its own, no rank the whole.

Which part of the whole a block is, the class shard says, here as everywhere. (A ``DTensor`` would work it out again, by rows instead of
classes: other ranges where a class has several rows and the ranks do not divide the classes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.shard import ClassShard


class PlacedBlock(NamedTuple):
    """Some classes of one tensor of a checkpoint."""

    key: str
    shard: ClassShard
    tensor: Tensor


def write_blocks(folder: Path, blocks: Sequence[PlacedBlock]) -> None:
    """Write the blocks of all ranks; every rank comes here with its own, or with none.

    Communication: what ``torch.distributed.checkpoint.save`` does on the host's group.
    """
    host_blocks = [block._replace(tensor=block.tensor.detach().cpu()) for block in blocks]
    state = {block.key: block.tensor for block in host_blocks}
    group = process_groups.internal_groups().host if process_groups.is_distributed() else None
    planner = _BlockSavePlanner(host_blocks)
    save(state, checkpoint_id=folder, planner=planner, process_group=group, no_dist=group is None)


class _BlockSavePlanner(DefaultSavePlanner):
    """Places each tensor where its class shard says."""

    def __init__(self, blocks: Sequence[PlacedBlock]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {block.key: block for block in blocks}

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, block in self._blocks.items():
            offsets = block.shard.offsets(block.tensor)
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=block.tensor.shape),
                properties=TensorProperties.create_from_tensor(block.tensor),
                size=torch.Size(block.shard.whole_shape(block.tensor)),
            )
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._blocks[index.fqn].tensor


class ShardFolder:
    """Reads blocks of a folder; each rank for itself, no rank waits for another.

    Args:
        path: Of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = metadata.state_dict_metadata

    def class_dim(self, key: str) -> int:
        """Return the dimension along which a tensor was sharded; 0 where one rank held all of it."""
        saved = self._saved(key)
        for dim, size in enumerate(saved.size):
            # no rank had all of it along this one
            if any(chunk.sizes[dim] != size for chunk in saved.chunks):
                return dim
        return 0

    def blocks(self, key: str, dim: int, per_class: int) -> list[ClassShard]:
        """Return which classes each block of a tensor holds, in their order.

        Args:
            key: Of the tensor.
            dim: Dimension that counts classes.
            per_class: Entries along it for each class.
        """
        saved = self._saved(key)
        num_classes = saved.size[dim] // per_class
        chunks = self._chunks(key, dim)
        starts = [chunk.offsets[dim] for chunk in chunks]
        if all(start % per_class == 0 for start in starts):
            edges = [start // per_class for start in starts] + [num_classes]
        else:
            # release 0.1 gave a rank ceil(C / W) classes and wrote ceil(C K / W) rows beside them; the classes are what is there
            size = -(-chunks[0].sizes[dim] // per_class)
            edges = [min(number * size, num_classes) for number in range(len(chunks) + 1)]
        return [ClassShard(start, stop, num_classes, dim, per_class) for start, stop in pairwise(edges)]

    def read(self, key: str, dim: int, targets: dict[int, Tensor]) -> None:
        """Read blocks of a tensor.

        Args:
            key: Of the tensor.
            dim: Dimension that counts classes.
            targets: Where to, by the number of a block in ``blocks``; of its shape.
        """
        chunks = self._chunks(key, dim)
        planner = _BlockLoadPlanner()
        items = []
        for number, target in targets.items():
            index = MetadataIndex(key, chunks[number].offsets)
            planner.targets[index] = target
            zeros = torch.Size([0] * target.ndim)
            items.append(ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, target.shape))
        plan = self._reader.prepare_local_plan(LoadPlan(items))
        self._reader.read_data(plan, planner).wait()

    def _saved(self, key: str) -> TensorStorageMetadata:
        saved = self._tensors[key]
        assert isinstance(saved, TensorStorageMetadata)
        return saved

    def _chunks(self, key: str, dim: int) -> list[ChunkStorageMetadata]:
        # ranks without classes wrote nothing, or nothing of any size
        chunks = [chunk for chunk in self._saved(key).chunks if chunk.sizes[dim]]
        return sorted(chunks, key=lambda chunk: chunk.offsets[dim])


class _BlockLoadPlanner(DefaultLoadPlanner):
    """Puts each tensor read where it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[MetadataIndex, Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.targets[read_item.dest_index]
