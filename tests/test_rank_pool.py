"""The rank pool itself: results in rank order, failures told rank by rank, and life after each kind of failure."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator

import coverage
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_losses.testing import RankFailure, RankPool


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """A pool to break: killing workers of the shared one would lose the coverage they have gathered."""
    ranks = RankPool(grace_seconds=0.5)
    yield ranks
    ranks.close()


def total(value: float, *, factor: float = 1.0) -> tuple[int, int, float]:
    tensor = torch.tensor(value + dist.get_rank()) * factor
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor.item()


def fail_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        raise LookupError(f"broken on {dist.get_rank()}")


def fail_while_others_wait() -> None:
    fail_on([0])
    dist.barrier()


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def fit_once() -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(BoringModel())


def die_on(rank: int, number: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    dist.barrier()


def never_join_again() -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no way in")

    dist.init_process_group = fail


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    with open("left_behind", "w") as file:
        file.write("x")


def find_traces() -> tuple[bool, torch.dtype, bool, str, int]:
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), torch.is_grad_enabled(), os.getcwd(), os.getpid()


def start_method() -> str:
    return multiprocessing.get_context().get_start_method()


def coverage_runs() -> bool:
    return coverage.Coverage.current() is not None


def gradient_tensor() -> torch.Tensor:
    return torch.full((2,), float(dist.get_rank()), dtype=torch.bfloat16)


def test_run_returns_results_in_rank_order_at_any_world_size(pool: RankPool) -> None:
    for world_size in (1, 2, 3, 1, 3, 2):
        expected = 2.0 * sum(10 + rank for rank in range(world_size))
        results = pool.run(world_size, total, 10, factor=2.0)
        assert results == [(rank, world_size, expected) for rank in range(world_size)]


def test_ranks_start_processes_as_the_platform_does(pool: RankPool) -> None:
    assert pool.run(2, start_method) == [start_method()] * 2


def test_workers_persist_and_change_of_world_size_keeps_them(pool: RankPool) -> None:
    pool.run(3, total, 0)
    before = pool.pids(3)
    pool.run(4, total, 0)
    pool.run(3, total, 0, fresh=True)
    assert pool.pids(3)[:3] == before[:3]


def test_groups_of_one_two_and_three_ranks_live_side_by_side(own_pool: RankPool) -> None:
    """A test that goes from one rank to two and three makes no group anew; without a group the one rank leaves its own."""

    def made() -> int:
        """Count the groups that it took to run on one rank, two and three."""
        before = own_pool._generation
        for world_size in (1, 2, 3):
            own_pool.run(world_size, total, 0)
        return own_pool._generation - before

    made()
    assert made() == 0
    own_pool.errors(2, fail_on, [0, 1])
    assert made() == 1
    own_pool.run(1, dist.is_initialized, distributed=False)
    assert made() == 1


def test_one_rank_can_run_without_a_process_group(pool: RankPool) -> None:
    assert pool.run(1, dist.is_initialized, distributed=False) == [False]
    assert pool.run(1, dist.is_initialized) == [True]


def test_workers_use_one_thread(pool: RankPool) -> None:
    assert pool.run(2, torch.get_num_threads) == [1, 1]


def test_workers_are_measured_when_the_test_run_is(pool: RankPool) -> None:
    assert pool.run(2, coverage_runs) == [coverage_runs()] * 2


def test_tensors_come_back_by_value(pool: RankPool) -> None:
    results = pool.run(2, gradient_tensor)
    assert [tensor.tolist() for tensor in results] == [[0, 0], [1, 1]]
    assert all(tensor.dtype == torch.bfloat16 and not tensor.is_shared() for tensor in results)


def test_a_task_leaves_no_trace_for_the_next(pool: RankPool) -> None:
    pool.run(1, leave_traces)
    env, dtype, grad, folder, pid = pool.run(1, find_traces)[0]
    assert (env, dtype, grad) == (False, torch.float32, True)
    assert folder != os.getcwd()
    assert pid != os.getpid()


def test_errors_tell_type_bases_message_and_time_of_each_rank(pool: RankPool) -> None:
    errors = pool.errors(2, fail_on, [0, 1])
    assert [error.rank for error in errors] == [0, 1]
    assert {error.type for error in errors} == {"LookupError"}
    assert errors[0].is_a("LookupError")
    assert errors[0].is_a("Exception")
    assert not errors[0].is_a("KeyError")
    assert errors[1].message == "broken on 1"
    assert not any(error.timed_out for error in errors)
    assert pool.run(2, total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_failing_rank_fails_the_run_with_its_traceback(pool: RankPool) -> None:
    before = pool.run(3, total, 0) and pool.pids(3)
    with pytest.raises(RankFailure, match=r"rank\(s\) \[1\] of 3(.|\n)*rank 0: returned(.|\n)*broken on 1"):
        pool.run(3, fail_on, [1])
    assert pool.run(3, total, 0) == [(rank, 3, 3.0) for rank in range(3)]
    assert pool.pids(3) == before


def test_ranks_that_cannot_join_a_group_are_told_and_replaced(own_pool: RankPool) -> None:
    own_pool.run(2, never_join_again)
    with pytest.raises(RankFailure, match=r"rank\(s\) \[0, 1\] of 2(.|\n)*ConnectionError: no way in"):
        own_pool.run(2, total, 0, fresh=True)
    assert own_pool.run(2, total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_errors_demands_an_error_of_every_rank(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"did not raise on rank\(s\) \[0\] of 2"):
        pool.errors(2, fail_on, [1])


def test_what_cannot_be_pickled_is_an_error_not_a_hang(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"[Pp]ickle"):
        pool.run(1, sys._getframe)
    assert pool.run(2, total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_warnings_are_errors_in_the_workers(pool: RankPool) -> None:
    assert pool.errors(2, warn)[1].type == "UserWarning"


@pytest.mark.filterwarnings("ignore:careful")
def test_workers_take_the_filters_of_the_test(pool: RankPool) -> None:
    pool.run(2, warn)


def test_a_hanging_rank_is_told_with_its_stack_and_replaced(own_pool: RankPool) -> None:
    own_pool.run(2, fit_once)  # Lightning takes away every signal handler that Python does not know of
    before = own_pool.pids(2)
    with pytest.raises(RankFailure, match=r"rank 1: no answer within 1 s(.|\n)*in sleep_on") as failure:
        own_pool.run(2, sleep_on, 1, 100.0, seconds=1.0)
    assert sys.platform != "linux" or re.search(r"The main thread is in system call \d+", str(failure.value))
    assert own_pool.run(2, total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert own_pool.pids(2)[0] == before[0]
    assert own_pool.pids(2)[1] != before[1]


def test_ranks_that_wait_for_a_failed_one_do_not_hold_up_the_run(own_pool: RankPool) -> None:
    with pytest.raises(
        RankFailure, match=r"broken on 0(.|\n)*rank 1: no answer within .* or the grace after a failure"
    ):
        own_pool.run(2, fail_while_others_wait)
    assert own_pool.run(3, total, 0) == [(rank, 3, 3.0) for rank in range(3)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_dying_rank_is_told_with_its_last_words_and_replaced(own_pool: RankPool, number: signal.Signals) -> None:
    with pytest.raises(RankFailure, match=rf"rank 1: died with signal {number.name}(.|\n)*last words"):
        own_pool.run(2, die_on, 1, number)
    assert own_pool.run(2, total, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_close_ends_the_processes_and_removes_their_files() -> None:
    ranks = RankPool()
    ranks.run(2, total, 0)
    pids, folder = ranks.pids(2), ranks._folder
    ranks.close()
    assert not folder.exists()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
