"""Ranks that are forks of one process with the pretended device, which is dear to make.

Their collectives carry the device's tensors by themselves, as NCCL carries CUDA's, where nothing travels through the host, or gloo stages
them, as two ranks on one device need it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

# as torch names them in several releases
_CARRIED = (
    *("all_reduce", "broadcast", "all_gather", "all_to_all_single"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    "P2POp",  # what a ring sends and receives
)
_carries = _stuck = False


def _say(*, carries: bool) -> None:
    """Says whether torch names a backend that carries the device's tensors, or gloo; to be said before our groups are made."""
    global _carries
    _carries = carries


def get_stuck(*, stuck: bool) -> None:
    """Says whether this rank's device waits for a peer that does not come, behind which its collectives never run; the host goes on."""
    global _stuck
    _stuck = stuck


class _NeverRun:
    """A collective that waits on the device behind another one."""

    def wait(self) -> None:
        """Lets the device wait, as NCCL's does."""


def install() -> None:
    """Lets torch's collectives take the device's tensors, for good; before our package is imported, which keeps some of them."""
    for name in _CARRIED:
        if hasattr(dist, name):
            setattr(dist, name, _carrying(getattr(dist, name)))
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "pretend" if _carries else backend(group)


def _carrying(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def carried(*args: Any, **kwargs: Any) -> Any:
        if _stuck and any(hasattr(value, "_host") for value in args):
            return _NeverRun()
        host_args, host_kwargs = _pytree.tree_map(lambda value: getattr(value, "_host", value), (args, kwargs))
        return collective(*host_args, **host_kwargs)

    return carried


def on_forked_ranks(job: Callable[[int], Any], world_size: int, folder: Path, *, carries: bool) -> list[Any]:
    """Runs a job on ranks that are forks of this process; returns what each returned, which JSON can carry.

    ``folder`` is an empty one; ``carries``: collectives carry the device's tensors.
    """
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                torch.set_num_threads(1)
                _say(carries=carries)
                store = dist.FileStore(str(folder / "store"), world_size)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
                )
                (folder / f"{rank}.json").write_text(json.dumps(job(rank)))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def write_found(path: Path, job: Callable[[int], Any], worlds: Mapping[str, tuple[int, bool]]) -> None:
    """Runs a job in worlds of forks; writes by the name of a world what each of its ranks found.

    ``worlds``: number of ranks, and whether collectives carry the device's tensors.
    """
    found = {}
    for name, (world_size, carries) in worlds.items():
        folder = path.parent / name.replace(" ", "_")
        folder.mkdir()
        found[name] = on_forked_ranks(job, world_size, folder, carries=carries)
    path.write_text(json.dumps(found))
