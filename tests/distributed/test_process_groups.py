"""Our process groups: made once, in the same order everywhere, apart from the model's, and gone when they should be."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.sharding import ClassShard
from lightning_ddp_losses.testing import RankPool
from tests.doors import Ring, assemble, handshake, process_groups, rendezvous, start_mean, torch_compat
from tests.each_rank import each_rank
from tests.fits import make_trainer
from tests.processes import run_python
from tests.refusals import assert_same_error
from tests.strategies.jobs import Job, loader


def ranks_and_sizes() -> tuple[bool, int, int]:
    return process_groups.is_distributed(), process_groups.rank(), process_groups.world_size()


def test_without_torch_distributed_the_world_is_rank_0_of_1(pool: RankPool) -> None:
    assert ranks_and_sizes() == (False, 0, 1)
    assert pool.run(1, ranks_and_sizes, distributed=False) == [(False, 0, 1)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rank_and_world_size_of_the_world(pool: RankPool, world_size: int) -> None:
    assert pool.run(world_size, ranks_and_sizes) == [(True, rank, world_size) for rank in range(world_size)]


def ranks_in_a_part() -> tuple[int, int] | None:
    part = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        return None
    return process_groups.rank(part), process_groups.world_size(part)


def test_rank_and_world_size_in_a_part_of_the_world(pool: RankPool) -> None:
    results = pool.run(3, ranks_in_a_part, fresh=True)
    assert results[0] is None
    assert sorted(results[1:]) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank(fresh=True)
def test_a_family_is_made_once_per_group() -> None:
    first = process_groups.internal_groups()
    assert process_groups.internal_groups() is first
    assert process_groups.internal_groups(dist.group.WORLD) is first
    ours = (first.handshakes, first.for_tensor(torch.ones(1)), first.get("checks"))
    assert len({id(group) for group in (*ours, dist.group.WORLD)}) == 4, (
        "each has its own group, apart from the model's"
    )
    assert all(dist.get_world_size(group) == dist.get_world_size() for group in ours)
    assert dist.get_backend(first.handshakes) == dist.get_backend(first.get("checks")) == "gloo"
    assert first.ranks == tuple(range(dist.get_world_size()))


def close_and_go_on() -> None:
    for _ in range(3):
        assert all_gather_with_grad(torch.ones(1)).numel() == dist.get_world_size()
        process_groups.close()
        process_groups.close()
        dist.barrier()  # the user's group is the user's
    process_groups.internal_groups()
    dist.barrier()  # gloo connects the others as long as one of them has not connected
    process_groups.close(world=True)
    assert not dist.is_initialized()
    process_groups.close(world=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_close_can_be_repeated_and_groups_come_back(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, close_and_go_on, fresh=True)
    assert pool.run(world_size, ranks_and_sizes, fresh=True) == [(True, r, world_size) for r in range(world_size)]


def closed_after_an_error() -> None:
    """A part of the world with a backend for accelerators, whose ranks have passed an error on."""
    part = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        with mock.patch.object(dist, "get_backend", return_value="pretended"):
            ours = process_groups.internal_groups(part)
            handshake.notify_subgroups(InputError("x"), "a fit")
        with mock.patch.object(dist, "destroy_process_group", wraps=dist.destroy_process_group) as destroy:
            process_groups.close()
        assert {call.args[0] for call in destroy.call_args_list} >= ours.made()
    raise InputError("ranks have made different groups: no other test may use them")


def test_groups_that_have_passed_an_error_on_are_closed_too(pool: RankPool) -> None:
    for error in pool.errors(3, closed_after_an_error, fresh=True):
        assert "no other test may use them" in error.message


def gather_once() -> list[float]:
    return all_gather_with_grad(torch.tensor([float(dist.get_rank())])).tolist()


def test_a_new_process_group_brings_new_families(pool: RankPool) -> None:
    for world_size in (2, 3, 1, 2):
        expected = [float(rank) for rank in range(world_size)]
        assert pool.run(world_size, gather_once, fresh=True) == [expected] * world_size


@each_rank(3, fresh=True)
def test_overlapping_parts_of_the_world() -> None:
    pairs = [[0, 1], [1, 2], [0, 2]]
    groups, rank = [dist.new_group(pair) for pair in pairs], dist.get_rank()
    for members, pair in zip(pairs, groups, strict=True):
        if rank in members:
            assert all_gather_with_grad(torch.tensor([float(rank)]), group=pair).tolist() == members
    assert gather_once() == [0, 1, 2]


def wait_alone(seconds: float) -> float:
    process_groups.set_timeout(timedelta(seconds=seconds))
    process_groups.internal_groups()
    if dist.get_rank() == 0:
        all_gather_with_grad(torch.ones(1))
    raise InterruptedError("rank 1 never came")


def test_a_peer_that_never_comes_is_an_error_within_the_time_out(pool: RankPool) -> None:
    errors = pool.errors(2, wait_alone, 2.0, fresh=True)
    assert not errors[0].timed_out  # by the group's own time-out, which is longer than the one set
    assert errors[1].type == "InterruptedError"
    pool.run(2, reset_timeout)


def start_alone(seconds: float) -> None:
    process_groups.set_timeout(timedelta(seconds=seconds))
    if dist.get_rank() == 0:
        all_gather_with_grad(torch.ones(1))
    time.sleep(2 * seconds)
    raise InterruptedError("rank 1 never made a group")


def test_a_peer_that_never_comes_to_the_first_exchange(pool: RankPool) -> None:
    waited, absent = pool.errors(2, start_alone, 2.0, fresh=True)
    assert waited.is_a("PeerError")
    assert "expected every rank to come to the first loss" in waited.message
    assert "ddp-losses explain F37" in waited.traceback
    assert absent.type == "InterruptedError"
    pool.run(2, reset_timeout)


def reset_timeout() -> None:
    process_groups.set_timeout(None)


def sockets() -> set[str]:
    """Return the sockets that this process has open, by inode."""
    targets = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            targets.add(os.readlink(link))
    return {target for target in targets if target.startswith("socket:")}


def opened(before: set[str]) -> int:
    """Return how many sockets were opened since, once the number stands. Those of a former world may close meanwhile and do not count."""
    counts: list[int] = []
    while len(counts) < 10 or len(set(counts[-10:])) > 1:
        counts.append(len(sockets() - before))
        time.sleep(0.01)
    return counts[-1]


@pytest.mark.parametrize("world_size", [2, 3])
@each_rank(fresh=True)
def test_a_group_is_made_where_it_is_used_first(world_size: int) -> None:
    """The groups of ours and how many sockets they have opened in this process, after each use of a group that was not used before."""
    process_groups.close()  # those of a former world
    dist.barrier()  # the world has its own
    gc.collect()  # a group of a former world may hang on an old traceback
    before, steps = sockets(), []
    uses = (
        process_groups.internal_groups,
        lambda: handshake.all_gather("a handshake", {}, b"few bytes"),
        lambda: all_gather_with_grad(torch.ones(1)),
        lambda: start_mean(torch.ones(1))(),
        lambda: handshake.all_gather("a check", {}, channel="checks"),
    )
    names = ("handshakes", "host", "gradients", "checks")
    for use in uses:
        use()
        dist.barrier()
        steps.append(([name for name in names if process_groups.internal_groups().has(name)], opened(before)))
    assert [tuple(made) for made, _ in steps] == [names[:1], names[:1], names[:2], names[:3], names]
    # a connection to each peer, and a socket at which the group listens
    assert all(count <= len(made) * world_size for made, count in steps), steps
    assert steps[0][1] == steps[1][1] < steps[2][1] < steps[3][1] < steps[4][1], steps


@pytest.mark.parametrize("world_size", [2, 3, 4])
@each_rank(fresh=True)
def test_a_fit_opens_as_many_files_as_its_groups_have_members(world_size: int) -> None:
    """How many sockets a fit under each strategy leaves open in this process, beyond those of the world."""
    process_groups.close()  # those of a former world
    dist.barrier()
    before, counts = sockets(), []
    for strategy in ("ddp", "ddp_losses"):
        make_trainer(strategy, max_steps=2).fit(Job(), loader(dist.get_world_size(), dist.get_rank()))
        dist.barrier()
        counts.append(opened(before))
    process_groups.set_timeout(None)  # the strategy's
    plain, ours = counts
    assert world_size <= ours - plain <= 3 * world_size, (plain, ours)


def whole_of_two_blocks() -> list[float] | None:
    """Two ranks of three send each other a message in a group that nobody has used: the third comes to make it."""
    shards, rank = [ClassShard.of_rank(2, 2, rank) for rank in range(3)], dist.get_rank()
    whole = assemble(torch.full((shards[rank].classes,), float(rank)), [*enumerate(shards[:2])])
    return whole.tolist() if rank == 0 else None


def test_two_ranks_send_messages_in_a_group_that_all_have_made(pool: RankPool) -> None:
    assert pool.run(3, whole_of_two_blocks, fresh=True) == [[0.0, 1.0], None, None]


def one_rank_checks() -> None:
    if dist.get_rank() == 0:
        handshake.all_gather("a check", {}, channel="checks")
    else:
        all_gather_with_grad(torch.ones(1))


def test_a_rank_that_does_not_come_to_make_a_group_is_an_error_on_all(pool: RankPool) -> None:
    errors = pool.errors(2, one_rank_checks, fresh=True)
    assert_same_error(errors, "the group of checks", kind="RankMismatchError")


# ---------------------------------------------------------------------- a world of NCCL, as far as arguments can say


class OnlyNccl:
    """A process group without a backend for the CPU."""

    _device_types = (torch.device("cuda"),)

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            raise RuntimeError("No backend type associated with device type cpu")
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=77)))


def test_the_time_out_of_a_group_of_nccl_alone_is_known() -> None:
    assert torch_compat.group_timeout(OnlyNccl()) == timedelta(seconds=77)


def make_groups_of_nccl(devices: list[str]) -> list[tuple[str, float]]:
    """Make our groups as if the world's backend were NCCL, of ranks on these devices; return backend and time-out of each."""
    made: list[tuple[str, float]] = []
    new_group = dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append((kwargs["backend"], kwargs["timeout"].total_seconds()))
        return new_group(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", recorded)
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        patch.setattr(rendezvous, "nccl_device", lambda backend, device: devices[device.index])
        patch.setattr(torch_compat, "group_timeout", lambda group: timedelta(seconds=33))
        ours = process_groups.internal_groups()
        # the current device is the same on all ranks: a script may name devices and set none
        on_device: Any = SimpleNamespace(device=torch.device("cuda", dist.get_rank()))
        try:
            assert ours.for_tensor(on_device) is ours.device
        except ConfigurationError as error:
            with pytest.raises(ConfigurationError, match=re.escape(str(error))):
                ours.for_tensor(on_device)  # asked again, not let through
            raise
    assert ours.for_tensor(on_device) is ours.device, "asked once"
    assert ours.device is dist.group.WORLD, "what lies on a device shares the communicator of the model"
    process_groups.close()
    dist.barrier()  # the user's group is the user's
    return made


def test_under_nccl_our_groups_are_gloos_with_its_time_out_and_devices_share_the_models(pool: RankPool) -> None:
    assert pool.run(2, make_groups_of_nccl, ["GPU 0", "GPU 1"], fresh=True) == [[("gloo", 33.0)]] * 2


def test_two_ranks_of_nccl_on_one_device_are_an_error_on_every_rank(pool: RankPool) -> None:
    errors = pool.errors(3, make_groups_of_nccl, ["GPU 0", "GPU 1", "GPU 0"], fresh=True)
    assert_same_error(errors, "rank 0: GPU 0\n  rank 2: GPU 0", kind="ConfigurationError")
    assert "rank 1" not in errors[0].message


@each_rank(3, fresh=True)
def test_all_ranks_meet_once_before_the_first_messages_of_an_accelerator() -> None:
    """The device and size of each all-reduce before messages of rings of rows on an accelerator, of which rank 0 has none."""
    calls: list[tuple[str, int]] = []
    rows = torch.empty(dist.get_rank(), 4, device="meta")

    def recorded(tensor: torch.Tensor, group: Any) -> None:
        assert group is process_groups.internal_groups().device
        calls.append((tensor.device.type, tensor.numel()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", recorded)
        for _ in range(2):
            Ring(rows, None)
            Ring(torch.empty(0, 4), None)
    assert calls == [("meta", 1)]


# one process imports, the others are forked from it before anything of torch runs: each ends as a process of its own does
SCRIPT = """
import os, sys, warnings
import torch, torch.distributed as dist
from lightning_ddp_losses.distributed.collectives import all_reduce_with_grad
from lightning_ddp_losses.distributed import process_groups

def is_forked(number):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        return False
    for stream in (1, 2):
        os.dup2(os.open(f"{number}-{stream}", os.O_WRONLY | os.O_CREAT), stream)
    return True

warnings.filterwarnings("ignore", "This process .* is multi-threaded")
for number, end in enumerate(sys.argv[1:]):
    if is_forked(number):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        process_groups.internal_groups()
        print(all_reduce_with_grad(torch.ones(2)).tolist())
        exec(end)
        break
"""
ENDS = ["", "dist.destroy_process_group()", "process_groups.close(world=True)", "raise SystemExit(0)"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """By how it leaves its groups, a process's exit status, output and errors."""
    folder = tmp_path_factory.mktemp("ends")
    done = run_python("-W", "error", "-c", SCRIPT, *ENDS, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = {}
    for number, (end, code) in enumerate(zip(ENDS, done.stdout.split(), strict=True)):
        found[end] = (code, (folder / f"{number}-1").read_text(), (folder / f"{number}-2").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_quietly_however_it_leaves_its_groups(ended: dict[str, tuple[str, str, str]], end: str) -> None:
    code, output, errors = ended[end]
    assert code == "0", errors
    assert output.strip() == "[1.0, 1.0]"
    assert "Traceback" not in errors
    assert "terminate" not in errors


class StuckBackend:
    """NCCL's part of a group (which it is in place of) whose kernels wait for a peer until it is aborted."""

    def __init__(self, name: str) -> None:
        self.calls: list[str] = []
        self.aborted = threading.Event()
        self.name = lambda: name
        self._get_backend = lambda device: self
        self._group_start, self._group_end = (lambda call=call: self.calls.append(call) for call in ("start", "end"))

    def abort(self) -> None:
        self.calls.append("abort")
        self.aborted.set()


@pytest.mark.parametrize("is_stuck", [True, False])
def test_a_device_that_waits_for_a_peer_is_freed(monkeypatch: pytest.MonkeyPatch, is_stuck: bool) -> None:
    """The device's work completes once the communicators are aborted; gloo's groups stay as they are."""
    backends = [StuckBackend("nccl"), StuckBackend("gloo"), StuckBackend("nccl")]
    groups = {backend: str(i) for i, backend in enumerate(backends)}
    world = SimpleNamespace(pg_names=groups)
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(process_groups, "is_distributed", lambda: True)
    monkeypatch.setattr(process_groups, "STUCK_SECONDS", 0.05)
    finished = threading.Event()

    def synchronize(device: torch.device) -> None:
        if is_stuck:
            backends[0].aborted.wait(60)
        finished.set()

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    assert process_groups.abort_stuck(torch.device("cuda", 0)) == is_stuck
    assert finished.wait(20)
    assert backends[1].calls == []
    assert backends[2].calls == (["start", "abort", "end"] if is_stuck else [])
    assert backends[0].aborted.is_set() == is_stuck


def test_the_cpu_is_never_stuck() -> None:
    assert not process_groups.abort_stuck(torch.device("cpu"))
