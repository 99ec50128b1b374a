"""Environment variables by which a launcher informs a process that it is one of several ranks. Another job may have left them behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

ADVICE = "If another job left that behind, unset it."
_OF_SRUN_BY_HAND = ("bash", "interactive")  # job names for which Lightning ignores the tasks of srun


def left_over(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that changes how a Trainer starts and is not explained by a launcher of this process.

    Args:
        environment: Variables of the process.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "SLURM_PROCID" in environment:
        return []
    found = []
    address = environment.get("MASTER_ADDR")
    if address is not None and not is_of_this_machine(address):
        found.append(f"MASTER_ADDR={address} is no address of this machine: the ranks of one node do not meet there.")
    if "LOCAL_RANK" in environment:
        found.append(
            f"LOCAL_RANK={environment['LOCAL_RANK']}: a Trainer starts no ranks and waits for those of a launcher."
        )
    of_torch = [f"{name}={environment[name]}" for name in ("RANK", "WORLD_SIZE") if name in environment]
    if of_torch:
        found.append(
            f"{', '.join(of_torch)}: torch's init_process_group takes this process for one rank of a launcher's."
        )
    tasks = environment.get("SLURM_NTASKS")
    if tasks is not None and environment.get("SLURM_JOB_NAME") not in _OF_SRUN_BY_HAND:
        found.append(f"SLURM_NTASKS={tasks}: Lightning expects that srun starts each rank.")
    return found


def is_of_this_machine(address: str) -> bool:
    """Return whether a process on this machine can listen at an address, which may be a host name or a number."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
