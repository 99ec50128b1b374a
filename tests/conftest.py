"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator

import pytest

# what a launcher, a job or a terminal has told the caller of the tests is nothing to them
_OF_THE_CALLER = re.compile(
    r"MASTER_(ADDR|PORT)|((LOCAL|GROUP|NODE)_)?RANK|(LOCAL_)?WORLD_SIZE|SLURM_\w+|TORCHELASTIC_\w+|(http|https|all|no)_proxy"
    "|FORCE_COLOR|NO_COLOR|COLUMNS|PYTHONIOENCODING",
    re.IGNORECASE,
)
for _name in list(os.environ):
    if _OF_THE_CALLER.fullmatch(_name):
        del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the forkserver starts: it loads torch for all ranks

# gloo's threads spin on a lock while its holder waits for a processor. With this policy a thread that wakes up does not interrupt the
# running one, which may be the holder
if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

import torch  # noqa: E402 - after the environment

pytest_plugins = ["lightning_ddp_losses.testing"]

torch.set_num_threads(1)
sys.dont_write_bytecode = False  # each of pytest's workers collects all files

gc.disable()  # until all tests are collected: nearly all that is made until then stays

# the pretended device stands on private names of one release of torch
collect_ignore = []
if not torch.__version__.startswith("2.13."):
    collect_ignore = ["pretended", "slow/test_benchmark_gpu.py"]


def pytest_collection_finish() -> None:
    """The collector need not look again at what is there: modules and tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _as_in_the_ranks() -> None:
    """What makes fits shorter; the process that only hands tests to its workers does without Lightning."""
    from lightning_ddp_losses import testing

    testing.look_for_plugins_once()
    testing.seed_no_absent_devices()


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    """Fail the test that leaves a process group in pytest's own process: later tests of this worker would not be alone."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("This test has left a process group in pytest's own process. Run it on ranks: pool.run(1, ...).")
