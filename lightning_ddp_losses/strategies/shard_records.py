"""What a checkpoint says about its class shards: shape, who held which classes, and the fingerprint of each block.

Whoever held a block took its fingerprint before it left for rank 0 or a file; loading compares what it finds with that. Files and ranges
that do not belong together, or that were damaged, are then an error instead of a weight that looks like any other. A checkpoint without
records (of an earlier release, or of one process) loads unseen.

Records lie in the checkpoint as plain numbers and lists, under ``RECORDS``, so that ``weights_only`` loads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_losses.distributed.fingerprint import fingerprint
from lightning_ddp_losses.distributed.shard import ClassShard

RECORDS = "ddp_losses_shards"
"""The key of a checkpoint that holds the records, by the name that ``sharded_entries`` gives a tensor."""


class SavedBlock(NamedTuple):
    """The classes that one rank held, and what they looked like."""

    start: int
    stop: int
    fingerprint: int


@dataclass(frozen=True)
class ShardRecord:
    """What was saved of one tensor.

    Attributes:
        shape: Of the whole.
        dtype: As text.
        dim: Dimension that counts classes.
        per_class: Entries along it for each class.
        blocks: Of all ranks, in the order of the classes.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int
    per_class: int
    blocks: tuple[SavedBlock, ...]

    @property
    def num_classes(self) -> int:
        """C."""
        return self.blocks[-1].stop

    def shard(self, block: SavedBlock) -> ClassShard:
        """Return which part of the whole a block is."""
        return ClassShard(block.start, block.stop, self.num_classes, self.dim, self.per_class)

    def of_whole(self, whole: Tensor) -> ShardRecord:
        """Return the record of the same blocks with what another whole holds in them."""
        blocks = [
            block._replace(fingerprint=fingerprint_of_part(self.shard(block).own_part(whole))) for block in self.blocks
        ]
        return replace(self, blocks=tuple(blocks))

    def plain(self) -> dict[str, Any]:
        """Return the record as a checkpoint holds it."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "dim": self.dim,
            "per_class": self.per_class,
            "blocks": [list(block) for block in self.blocks],
        }

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> ShardRecord:
        """Return the record that a checkpoint holds.

        Raises:
            ValueError: for blocks that leave classes out or overlap, or that do not make up the shape.
        """
        blocks = tuple(SavedBlock(*block) for block in plain["blocks"])
        record = cls(tuple(plain["shape"]), plain["dtype"], plain["dim"], plain["per_class"], blocks)
        starts, stops = [block.start for block in blocks], [block.stop for block in blocks]
        is_consecutive = starts == [0, *stops[:-1]]
        if not is_consecutive or record.shape[record.dim] != record.num_classes * record.per_class:
            raise ValueError(f"blocks {list(zip(starts, stops, strict=True))} of a tensor {record.shape}")
        return record


def fingerprint_of_part(part: Tensor) -> int:
    """Return the fingerprint of a block; taken on the host, so that any device saves what any other loads."""
    return fingerprint(part.detach().cpu())


def sharded_entries(checkpoint: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a checkpoint of Lightning's holds of parameters and optimizers, by the name that records and folders give it."""
    for name, value in checkpoint.get("state_dict", {}).items():
        yield f"state_dict/{name}", value
    for number, state in enumerate(checkpoint.get("optimizer_states", ())):
        for index, entry in state.get("state", {}).items():
            if isinstance(entry, Mapping):
                for key, value in entry.items():
                    yield f"optimizer_states/{number}/{index}/{key}", value


def problems_of_wholes(checkpoint: Mapping[str, Any], records: Mapping[str, ShardRecord]) -> list[str]:
    """Say what of a checkpoint's whole tensors is not as it was saved."""
    found: list[str] = []
    for key, value in sharded_entries(checkpoint):
        record = records.get(key)
        if record is None or not isinstance(value, Tensor):
            continue
        if tuple(value.shape) != record.shape or str(value.dtype) != record.dtype:
            saved, loaded = f"{record.shape} {record.dtype}", f"{tuple(value.shape)} {value.dtype}"
            found.append(f"{key}: saved as {saved}, found as {loaded}")
            continue
        parts = [(block, record.shard(block).own_part(value)) for block in record.blocks]
        found += problems_of_parts(key, parts)
    return found


def problems_of_parts(key: str, parts: Iterable[tuple[SavedBlock, Tensor]]) -> list[str]:
    """Say which blocks of a tensor are not as they were saved."""
    return [
        f"{key}: classes {block.start} to {block.stop} are not those that were saved (fingerprint)"
        for block, part in parts
        if fingerprint_of_part(part) != block.fingerprint
    ]


def read_records(checkpoint: Mapping[str, Any]) -> tuple[dict[str, ShardRecord], list[str]]:
    """Return a checkpoint's records by name, none for one without them, and which of them make no sense."""
    records: dict[str, ShardRecord] = {}
    problems: list[str] = []
    for key, plain in checkpoint.get(RECORDS, {}).items():
        record = _read_record(plain)
        if record is None:
            problems.append(f"{key}: the record of its shards is damaged")
        else:
            records[key] = record
    return records, problems


def _read_record(plain: Any) -> ShardRecord | None:
    try:
        return ShardRecord.of_plain(plain)
    except (AttributeError, LookupError, TypeError, ValueError):  # what damage does to plain numbers and lists
        return None
