"""Ranks that are forks of one process with the pretended device, which is dear to make."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import pretend_collectives


def on_forked_ranks(job: Callable[[int], Any], world_size: int, folder: Path, *, carries: bool) -> list[Any]:
    """Runs a job on ranks that are forks of this process, which has the device; returns what each returned.

    Args:
        job: Of a rank -> something that JSON can carry.
        world_size: Number of ranks.
        folder: An empty one.
        carries: Whether collectives carry the device's tensors.
    """
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                torch.set_num_threads(1)
                pretend_collectives.carry(carries=carries)
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
