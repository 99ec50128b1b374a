"""`whole_checkpoint`: a folder into which each rank wrote its part, read as the checkpoint that one process would have written.

``DDPLossStrategy`` reads such a folder by it, and a script without any strategy makes one file of it::

    from lightning_ddp_losses.strategies import whole_checkpoint

    torch.save(whole_checkpoint("logs/epoch=3.ckpt"), "epoch=3-whole.ckpt")
    module = MyModule.load_from_checkpoint("epoch=3-whole.ckpt")

(Lightning's ``consolidate_checkpoint`` makes a file too, in which an optimizer's state has names, so that no optimizer takes it.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.strategies.fsdp_checkpoints import METADATA, is_folder


def whole_checkpoint(folder: str | Path, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint in a folder that ``ModelParallelLossStrategy`` wrote, with whole tensors, on the CPU.

    Equivalent to: ``torch.load`` of what ``save_distributed_checkpoint=False`` would have written: ``state_dict`` with every parameter
    whole, divided classes too, and ``optimizer_states`` in which parameters have numbers.

    Args:
        folder: Of the checkpoint; only one that you trust, as torch's own format is read with pickle.
        weights_only: As of ``torch.load``, for what is no tensor.

    Returns:
        The checkpoint. It takes the memory of all parameters and optimizer states.

    Raises:
        InputError: for a path that is no such folder.

    Communication: none; each process that calls reads the folder by itself.
    """
    # 70 modules that training without such folders does without
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = Path(folder)
    if not is_folder(path):
        found = "nothing there"
        if path.exists():
            found = "a file" if path.is_file() else "no file of that name in it"
        raise InputError(
            f"checkpoint {path}",
            expected=f"a folder with {METADATA}, as save_distributed_checkpoint=True writes it",
            got=found,
            fix="A file is read by torch.load, and a folder of DDPLossStrategy(sharded_checkpoints=True) by that strategy.",
        )
    # 1. a place for each tensor; what is none of them has no shape to be known
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for key, saved in metadata.state_dict_metadata.items():
        flat[key] = None
        if isinstance(saved, TensorStorageMetadata):
            flat[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    # 2. read: whoever wrote which part
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(flat, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    # 3. the nest that was saved
    nest: dict[Any, Any] = {}
    for key, value in flat.items():
        _put_(nest, metadata.planner_data[key], value)
    rest: dict[str, Any] = torch.load(path / METADATA, map_location="cpu", weights_only=weights_only)
    checkpoint = {**rest, "state_dict": nest.get("state_dict", {})}
    titles = [f"optimizer_{number}" for number in range(len(nest)) if f"optimizer_{number}" in nest]
    if titles:
        checkpoint["optimizer_states"] = [_with_numbers(nest[title]) for title in titles]
    return checkpoint


def _put_(nest: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    """Put a value where its path leads; lists are dicts by number until ``_elements_of`` closes them."""
    for step in path[:-1]:
        nest = nest.setdefault(step, {})
    nest[path[-1]] = value


def _elements_of(value: Any) -> list[Any]:
    """Return a list that was saved element by element, or in one piece."""
    return [value[number] for number in sorted(value)] if isinstance(value, Mapping) else list(value)


def _with_numbers(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers in place of the names of parameters, in the order of its groups."""
    numbers: dict[str, int] = {}
    groups = []
    for group in _elements_of(saved["param_groups"]):
        names = _elements_of(group["params"])
        numbers.update({name: len(numbers) + place for place, name in enumerate(names)})
        groups.append({**group, "params": [numbers[name] for name in names]})
    state = saved.get("state", {})  # an optimizer that has not stepped has none
    return {"state": {numbers[name]: entry for name, entry in state.items()}, "param_groups": groups}
