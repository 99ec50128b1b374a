"""Tests on several ranks, for pytest: rank processes that live for a whole test run, and `parity` as an assertion.

A conftest asks for the plugin, as importing this package in every run of pytest would cost seconds::

    pytest_plugins = ["lightning_ddp_losses.testing"]

Then::

    def test_my_loop(ddp_ranks):
        ddp_ranks(3).assert_parity(build, step, batches)

    def test_my_collective(ddp_ranks):
        assert ddp_ranks(2).run(torch.distributed.get_rank) == [0, 1]

`rank_pool` has the processes, the loop of each, and their results and failures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_ddp_losses.audit import AuditReport, parity
from lightning_ddp_losses.testing.rank_pool import RankError, RankFailure, RankPool

__all__ = ["RankError", "RankFailure", "RankPool", "Ranks"]


class Ranks:
    """A number of ranks, for one test.

    Args:
        pool: The processes.
        count: Number of ranks.
    """

    def __init__(self, pool: RankPool, count: int) -> None:
        self._pool, self.count = pool, count

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on each rank of a gloo group and return the results in rank order.

        Args:
            fn: A function of a module: it is sent to processes.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            RankFailure: a rank raised, died or hangs. Each rank's story is in the text.
        """
        __tracebackhide__ = True
        return self._pool.run(self.count, fn, *args, **kwargs)

    def assert_parity(
        self, build: Callable[[], Any], step: Callable[..., Any] | None = None, batches: Any = None, **options: Any
    ) -> AuditReport:
        """Fail the test if a loop on these ranks is not that of one process. The arguments are those of ``parity``.

        Raises:
            AssertionError: with the report as its text.
        """
        __tracebackhide__ = True
        report = parity(build, step, batches, ranks=self.count, **options)
        report.raise_if_different()
        return report


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Return the rank processes of this test run."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture
def ddp_ranks(pool: RankPool) -> Callable[[int], Ranks]:
    """Return a function from a number of ranks to ``Ranks``."""
    return lambda count: Ranks(pool, count)
