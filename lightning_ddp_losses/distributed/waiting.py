"""How a rank waits for the others on the CPU: first awake, for the time that a small collective takes, where it has a processor for that.

To sleep and be woken costs more than a small collective, on virtual machines several times. But where more ranks than processors share a
machine, a rank that waits awake takes the processor from those that it waits for.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from lightning_ddp_losses.distributed import process_groups

_AWAKE_SECONDS = 0.002
_give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


def wait(work: dist.Work) -> None:
    """Wait for a collective on the CPU."""
    seconds = awake_seconds()
    if seconds:
        end = time.perf_counter() + seconds
        while not work.is_completed() and time.perf_counter() < end:
            _give_way()
    work.wait()


def awake_seconds() -> float:
    """Return how long this rank waits awake: not at all where ranks outnumber the processors that it may use."""
    return _AWAKE_SECONDS if _local_ranks() <= _num_processors() else 0.0


def _local_ranks() -> int:
    """Return how many ranks run on this machine, as torchrun says; else all of the world may."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else process_groups.world_size()


def _num_processors() -> int:
    # what a container or a job was given may be fewer than the machine has
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
