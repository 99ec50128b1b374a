"""Class shards in checkpoints: the whole weight, assembled by all ranks together, or each rank's part in a file of its own.

An ordinary checkpoint holds what one process would have saved, so it moves between any number of ranks and the plain loss. A sharded one
is a folder: ``rest.ckpt``, and the shards as ``shard_folder`` writes them, which nobody ever holds whole. Both hold records of the shards
(``shard_records``), which loading compares with what it finds.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.strategies.checkpoint_files import first_line, remove_folder, sync_folder
from lightning_ddp_losses.strategies.shard_records import (
    SavedBlock,
    ShardRecord,
    fingerprint_of_part,
    problems_of_parts,
    sharded_entries,
)
from lightning_ddp_losses.strategies.sharded_parameters import Owners, ShardedParameters

if (
    TYPE_CHECKING
):  # imported where a folder is written or read: training without such folders does without that part of torch
    from lightning_ddp_losses.strategies.shard_folder import ShardFolder

REST = "rest.ckpt"
BLOCKS = "ddp_losses_blocks"
"""Key of the rest that names the folder of the blocks."""
_BLOCKS_PREFIX = "blocks-"
_MARK = "class shard"
_INDEX = ".metadata"  # says which block lies where; torch's name


def is_sharded(path: Any) -> bool:
    """Say whether a checkpoint is a folder that a sharded save has written."""
    return (Path(path) / REST).is_file()


def folder_of_blocks(path: Any, rest: Mapping[str, Any]) -> Path:
    """Return where the blocks of a sharded checkpoint are: in the folder that the rest names, or, of an earlier release, beside it."""
    name = str(rest.get(BLOCKS, ""))
    # a name that leads elsewhere is no name of ours
    return Path(path) / Path(name).name


def _remove_former_blocks(folder: Path, kept: str) -> None:
    """Remove the blocks that the rest does not name any more: of a former checkpoint, of an earlier release, of a run that was killed."""
    for found in folder.iterdir():
        if found.name.startswith(_BLOCKS_PREFIX) and found.name != kept:
            remove_folder(found)
        elif found.name == _INDEX or found.suffix == ".distcp":
            found.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Saved:
    """A tensor that this rank has given to a checkpoint.

    Attributes:
        name: Of the parameter that it belongs to.
        shard: Which classes of it this rank has.
        shape: Of the whole.
        dtype: As text.
        part: What this rank has, until a sharded checkpoint is written.
        fingerprint: Of the part that went into a whole.
        whole: What rank 0 assembled; the checkpoint keeps it alive.
        version: Of the whole when it was assembled.
    """

    name: str
    shard: ClassShard
    shape: tuple[int, ...]
    dtype: str
    part: Tensor | None = None
    fingerprint: int = 0
    whole: weakref.ref[Tensor] | None = None
    version: int = 0

    def taken_fingerprint(self) -> int:
        """Return the fingerprint of this rank's part, as it is or was when it went into the whole."""
        return self.fingerprint if self.part is None else fingerprint_of_part(self.part)

    def is_unchanged(self, value: Tensor) -> bool:
        """Say whether this is the whole that the ranks' parts made, and nobody has written to it."""
        is_whole = self.whole is not None and self.whole() is value
        return is_whole and compat.tensor_version(value) == self.version


class ShardFiles:
    """Puts shards into checkpoints and takes them out.

    Args:
        shards: Of the module.
        sharded: Write each rank's part by itself.
    """

    def __init__(self, shards: ShardedParameters, *, sharded: bool) -> None:
        self._shards, self._sharded = shards, sharded
        self._blocks = ""
        self._saved: dict[str, _Saved] = {}

    # ------------------------------------------------------------------ out

    def module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state with the whole of each shard (on rank 0; elsewhere only its shape)."""
        return {name: self._out(f"state_dict/{name}", name, value) for name, value in state.items()}

    def whole_state(self, state: dict[str, Any], receivers: Iterable[int]) -> dict[str, Any]:
        """Return the module's state with the whole of each shard on some ranks, for no checkpoint.

        Args:
            state: The module's.
            receivers: Ranks that get the whole; others get tensors of its shape without memory.
        """
        found = dict(state)
        for receiver in receivers:
            for name, parameter in self._shards.parameters.items():
                shard = shard_of(parameter)
                assert shard is not None
                whole = assemble(state[name], shard, self._shards.owners[name], receiver)
                if found[name] is state[name] or not whole.is_meta:
                    found[name] = whole
        return found

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
        return {**state, **{name: self._out(f"state_dict/{name}", name, state[name]) for name in parts}}

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
        shard = shard_of(self._shards.parameters[name])
        assert shard is not None
        shape, dtype = shard.whole_shape(value), str(value.dtype)
        if self._sharded:
            self._saved[key] = _Saved(name, shard, shape, dtype, part=value.detach())
            return {_MARK: key, "shape": list(shape), "dtype": dtype}
        whole = assemble(value, shard, self._shards.owners[name])
        self._saved[key] = _Saved(
            name,
            shard,
            shape,
            dtype,
            fingerprint=fingerprint_of_part(value),
            whole=weakref.ref(whole),
            version=compat.tensor_version(whole),
        )
        return whole

    def records(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``RECORDS`` of a checkpoint shall hold; every rank comes here.

        Communication: one handshake.
        """
        # 1. what each rank gave, as it looked on that rank
        own = {key: saved.taken_fingerprint() for key, saved in self._saved.items()}
        payloads = handshake.all_gather("saving a checkpoint", {}, json.dumps([self._blocks, own]).encode())
        names_and_marks = [json.loads(payload) for payload in payloads]
        self._blocks = names_and_marks[0][0]
        of_ranks = [marks for _, marks in names_and_marks]
        # 2. of what the checkpoint holds, who had which classes
        found: dict[str, Any] = {}
        for key, value in sharded_entries(checkpoint):
            saved = self._saved.get(key)
            if saved is None:
                continue
            owners = self._shards.owners[saved.name]
            blocks = tuple(SavedBlock(shard.start, shard.stop, of_ranks[rank][key]) for rank, shard in owners)
            record = ShardRecord(saved.shape, saved.dtype, saved.shard.dim, saved.shard.per_class, blocks)
            # 3. a hook may have put another whole there, or written to it: then that is what is saved
            if isinstance(value, Tensor) and not saved.is_unchanged(value):
                if tuple(value.shape) != saved.shape:
                    continue
                record = record.of_whole(value)
            found[key] = record.plain()
        return found

    def make_folder(self, path: Any) -> None:
        """Make the folder of a sharded checkpoint; rank 0 chooses where in it the blocks will be, and ``records`` tells the others."""
        Path(path).mkdir(parents=True, exist_ok=True)
        self._blocks = f"{_BLOCKS_PREFIX}{secrets.token_hex(4)}"

    def write(self, path: Any, checkpoint: dict[str, Any], write_rest: Callable[[dict[str, Any], Any], None]) -> None:
        """Write a sharded checkpoint; every rank comes here.

        Blocks go to a folder of their own, and the rest, which names that, comes last and at once: until then the name holds the
        checkpoint that it held before.

        Args:
            path: Of the folder.
            checkpoint: The rest.
            write_rest: Writes it to a file.
        """
        from lightning_ddp_losses.strategies.shard_folder import PlacedBlock, write_blocks

        rank, folder = process_groups.rank(), Path(path)
        blocks = [
            PlacedBlock(key, saved.shard, saved.part)
            for key, saved in self._saved.items()
            if saved.part is not None and (rank, saved.shard) in self._shards.owners[saved.name]
        ]
        try:
            write_blocks(folder / self._blocks, blocks)
            if rank == 0:
                sync_folder(folder / self._blocks)
                sync_folder(folder)
            write_rest({**checkpoint, BLOCKS: self._blocks}, folder / REST)
        except Exception:
            if rank == 0:
                remove_folder(folder / self._blocks)
            raise
        if rank == 0:
            _remove_former_blocks(folder, self._blocks)

    def forget_saved(self) -> None:
        """Let go of what was given to a checkpoint that is written."""
        self._saved.clear()

    # ------------------------------------------------------------------ in

    def read(
        self, path: Any, tree: Mapping[str, Any], records: Mapping[str, ShardRecord], owner: str | None = None
    ) -> tuple[dict[str, Any], list[str]]:
        """Return a checkpoint's ``state_dict`` or ``optimizer_states`` entries with this rank's part for each mark.

        Args:
            path: Of the folder.
            tree: The entries.
            records: Of the checkpoint's shards.
            owner: The parameter that all of them belong to; None: each has its parameter's name.

        Returns:
            The entries, and what of the shards is not as it was saved.
        """
        marks = {name: value for name, value in tree.items() if isinstance(value, Mapping) and _MARK in value}
        if not marks:
            return dict(tree), []
        from lightning_ddp_losses.strategies.shard_folder import ShardFolder

        try:
            folder = ShardFolder(Path(path))
        except Exception as error:  # whatever damage does to it
            return dict(tree), [f"{path}: its metadata cannot be read ({first_line(error)})"]
        parts: dict[str, Tensor] = {}
        problems: list[str] = []
        for name, mark in marks.items():
            parameter = self._shards.parameters.get(owner or name)
            record = records.get(mark[_MARK])
            try:
                parts[name], wrong = _read_part(folder, mark, parameter, record)
            except Exception as error:  # a missing file, one that is cut off, bytes that make no sense
                wrong = [f"{mark[_MARK]}: cannot be read ({first_line(error)})"]
            problems += wrong
        return {**tree, **parts}, problems

    def own_optimizer_state(
        self, optimizer: Any, state: dict[str, Any], path: Any, records: Mapping[str, ShardRecord]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return a saved optimizer state with this rank's part of what belongs to a shard, and what is not as it was saved."""
        entries, problems = dict(state["state"]), []
        for index, parameter in _indexed(optimizer):
            if index not in entries:
                continue
            name, shard = self._shards.of(parameter), shard_of(parameter)
            # marks: read this rank's part of the parameter they belong to
            entry, wrong = self.read(path, entries[index], records, owner=name)
            problems += wrong
            # wholes: cut this rank's part out
            if shard is not None:
                whole_shape = shard.whole_shape(parameter)
                for key, value in entry.items():
                    if isinstance(value, Tensor) and tuple(value.shape) == whole_shape != tuple(parameter.shape):
                        part = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                        entry[key] = part.copy_(shard.own_part(value))
            entries[index] = entry
        return {**state, "state": entries}, problems


def _read_part(
    folder: ShardFolder, mark: Mapping[str, Any], parameter: nn.Parameter | None, record: ShardRecord | None
) -> tuple[Tensor, list[str]]:
    """Return this rank's part of a sharded tensor, the whole for a plain loss, and what is not as it was saved."""
    key, shape = mark[_MARK], tuple(mark["shape"])
    dtype = getattr(torch, str(mark["dtype"]).removeprefix("torch."))
    # 1. the classes wanted
    shard = None if parameter is None else shard_of(parameter)
    if parameter is not None and shard is not None:
        part = torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
    else:
        part = torch.empty(shape, dtype=dtype)
        dim, per_class = (folder.class_dim(key), 1) if record is None else (record.dim, record.per_class)
        num_classes = shape[dim] // per_class
        shard = ClassShard(0, num_classes, num_classes, dim, per_class)
    # 2. the blocks that were saved, which the record must know
    blocks = folder.blocks(key, shard.dim, shard.per_class)
    if record is not None and [record.shard(block) for block in record.blocks] != blocks:
        saved, found = [(b.start, b.stop) for b in record.blocks], [(b.start, b.stop) for b in blocks]
        return part, [f"{key}: saved as classes {saved}, found as {found}"]
    # 3. read those that hold some of the classes; where not all of a block is wanted, to a place of its own
    targets: dict[int, Tensor] = {}
    for number, block in enumerate(blocks):
        wanted = shard.overlap(block)
        if wanted == block:
            targets[number] = shard.part_of_held(part, block)
        elif wanted is not None:
            block_shape = list(shape)
            block_shape[block.dim] = block.classes * block.per_class
            targets[number] = torch.empty(block_shape, dtype=dtype)
    folder.read(key, shard.dim, targets)
    # 4. compare, before the parts of blocks go to where they belong
    problems: list[str] = []
    if record is not None:
        problems = problems_of_parts(key, [(record.blocks[number], target) for number, target in targets.items()])
    for number, target in targets.items():
        wanted = shard.overlap(blocks[number])
        if wanted is not None and wanted != blocks[number]:
            shard.part_of_held(part, wanted).copy_(blocks[number].part_of_held(target, wanted))
    return part, problems


def assemble(part: Tensor, shard: ClassShard, owners: Owners, receiver: int = 0) -> Tensor:
    """Return the whole, on one rank; a tensor of its shape without memory on the others.

    Communication: each rank sends its part to the receiver.
    """
    shape, rank = shard.whole_shape(part), process_groups.rank()
    if len(owners) > 1:
        process_groups.internal_groups().warm_up(part.device)  # before two of all ranks need their group
    device = part.device if rank == receiver else torch.device("meta")
    with torch.inference_mode(False), torch.no_grad():  # also in validation: who writes to it later can be told
        whole = torch.empty(shape, dtype=part.dtype, device=device)
        for owner, block in owners:
            # 1. the receiver has its own
            if rank == receiver == owner:
                block.own_part(whole).copy_(part)
            # 2. and gets the others'
            elif rank == receiver:
                wanted = list(shape)
                wanted[block.dim] = block.classes * block.per_class
                block.own_part(whole).copy_(raw_collectives.receive(wanted, part, owner))
            elif rank == owner:
                raw_collectives.send(part, receiver)
    return whole


def refuse_other_sizes(module: nn.Module, state: Mapping[str, Any], records: Mapping[str, ShardRecord]) -> None:
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
        expected = shard.whole_shape(parameter)
        fix = "Load a checkpoint of a loss with the same classes and embedding size; nothing was loaded."
        if got != expected:
            raise InputError(
                f"checkpoint: {name}",
                expected=f"{expected}, the whole of {shard.num_classes} classes",
                got=got,
                fix=fix,
            )
        record = records.get(f"state_dict/{name}")
        if record is not None and record.per_class != shard.per_class:
            raise InputError(
                f"checkpoint: {name}",
                expected=f"{shard.num_classes} classes of {shard.per_class} weight rows",
                got=f"{record.num_classes} classes of {record.per_class}",
                fix=fix,
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
