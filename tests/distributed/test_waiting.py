"""Ranks wait awake where each has a processor, and asleep where waiting awake would take it from the ranks that they wait for."""

from __future__ import annotations

import os

import pytest

from lightning_ddp_losses.distributed.raw_collectives import wait
from tests.rank_pool import RankPool


class Late:
    """A collective that is complete when it was asked a few times, or waited for."""

    def __init__(self) -> None:
        self.asked = self.waited = 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def wait(self) -> None:
        self.waited += 1


def wait_with(processors: int, local_world_size: str | None) -> tuple[bool, int]:
    """Return whether this rank stayed awake, and how often it waited for the collective itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if local_world_size is not None:
            patch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        work = Late()
        wait(work)  # type: ignore[arg-type]
    return work.asked > 0, work.waited


@pytest.mark.parametrize(
    ("processors", "local_world_size", "is_awake"),
    [(2, None, True), (1, None, False), (1, "1", True), (3, "4", False), (8, "8", True)],
    ids=["one each", "one for two", "two machines", "more on this machine", "enough on this machine"],
)
def test_a_rank_waits_awake_only_on_a_processor_of_its_own(
    pool: RankPool, processors: int, local_world_size: str | None, is_awake: bool
) -> None:
    assert pool.run(2, wait_with, processors, local_world_size) == [(is_awake, 1)] * 2
