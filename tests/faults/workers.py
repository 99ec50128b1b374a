"""What the ranks of the fault tests do."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ddp_losses.collectives import all_gather_with_grad
from tests.doors import process_groups, rendezvous

TIMEOUT = timedelta(seconds=60)


def attempts_of_this_node() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def start_world() -> None:
    rendezvous.start_world(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        backend="gloo",
        timeout=TIMEOUT,
    )


def groups(folder: str, kills: int) -> None:
    """Use the world and our groups; note it; in each of the first worlds one rank is killed."""
    start_world()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen = all_gather_with_grad(torch.tensor([float(rank)])).tolist()
    dist.barrier()
    # how many worlds there were is what the folder says: agents count differently
    number = len(list(Path(folder).glob("world-*-rank-0")))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, number)
    (Path(folder) / f"world-{max(everyone)}-rank-{rank}").write_text(f"{attempts_of_this_node()} {seen}")
    dist.barrier()
    if max(everyone) < kills and rank == max(everyone) % world_size:
        os.kill(os.getpid(), signal.SIGKILL)
    if max(everyone) < kills:
        threading.Event().wait(TIMEOUT.total_seconds())  # the agent ends this one
    process_groups.close(world=True)
