"""Which rank is gone: as its process, its own word or its silence say it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, Store

from lightning_ddp_losses import PeerError
from tests.doors import ProcessInfo, Watch, World, liveness, torch_compat

LOST = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """Why this process would have been ended by its watch, and when; it listens often."""
    monkeypatch.setattr(liveness, "_LISTEN_SECONDS", 0.01)
    said, over = list[str](), threading.Event()

    def end(watch: Watch, reason: str) -> None:
        said.append(reason)
        watch.stop()
        over.set()

    monkeypatch.setattr(Watch, "_end_process", end)
    return said, over


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    """Three ranks in this process, and as rank 0 this process itself; listening threads are off."""
    monkeypatch.setattr(Watch, "_listen", lambda *args: None)
    monkeypatch.setattr(liveness, "SILENCE_SECONDS", 0.3)
    store = HashStore()
    made = [World(store, rank, [ProcessInfo.own()] * 3) for rank in range(3)]
    monkeypatch.setattr(liveness, "_world", made[0])
    yield made
    for world in made:
        world.watch.stop()


def test_a_process_that_is_no_more(worlds: list[World]) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = ProcessInfo.own()
    other = own._replace(pid=process.pid, started=liveness._state_of_process(process.pid)[1])
    assert not other.has_ended()
    assert own._replace(started="another one's").has_ended()  # the number is somebody else's now
    process.kill()
    process.communicate()
    assert other.has_ended()
    worlds[0]._processes[2] = other
    assert worlds[0].explain().startswith(f"rank 2 (process {process.pid} on {own.host}) has ended")
    # who is on another machine hears of it
    worlds[1]._processes = [info._replace(machine=str(rank)) for rank, info in enumerate(worlds[1]._processes)]
    assert worlds[1].explain().startswith("rank 2 ")


def test_a_rank_that_was_left_over_and_has_ended_since_is_not_named(worlds: list[World]) -> None:
    gone = ProcessInfo.own()._replace(started="another one's")
    worlds[0]._processes[1:] = [gone, gone]
    worlds[2].watch.report("PeerError: rank 2 lost rank 1", is_own=False)
    assert worlds[0].explain().startswith("rank 1 ")
    assert "rank 2" not in worlds[0].explain()


def test_a_rank_that_could_say_why(worlds: list[World]) -> None:
    worlds[1].watch.report("ValueError: of rank 1", is_own=True)
    worlds[2].watch.report("PeerError: rank 2 lost rank 1", is_own=False)
    assert worlds[0].explain().endswith("has failed:\nValueError: of rank 1")


def test_a_rank_that_says_nothing(worlds: list[World]) -> None:
    worlds[1].watch.report("PeerError: waited", is_own=False)
    assert worlds[0].explain() == (
        f"rank 2 (process {os.getpid()} on {ProcessInfo.own().host}) has said nothing for 0.3 s: standing still, or out of reach"
    )


def test_the_next_run_has_failures_of_its_own(worlds: list[World]) -> None:
    worlds[1].watch.report("ValueError: of the first run", is_own=True)
    for world in worlds:
        world.watch.stop()
        world.new_run()
    worlds[1].watch.report("ValueError: of the second run", is_own=True)
    assert "of the second run" in worlds[0].explain()


def test_torchs_flight_recorder_is_named_where_it_has_written(
    worlds: list[World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    assert "Flight Recorder" not in str(liveness.lost_peer_error(LOST, "backward"))
    (tmp_path / "trace_0").touch()
    text = str(liveness.lost_peer_error(LOST, "backward"))
    assert f"Flight Recorder says what was under way: {tmp_path / 'trace_0'}" in text
    os.utime(tmp_path / "trace_0", (0, 0))  # of a former run
    assert "Flight Recorder" not in str(liveness.lost_peer_error(LOST, "backward"))


def test_a_lost_connection_becomes_an_error_with_a_name_and_others_stay(worlds: list[World]) -> None:
    worlds[1].watch.report("ValueError: of rank 1", is_own=True)
    with pytest.raises(PeerError, match="rank 0 waited for its peers in backward") as raised:
        liveness.raise_lost_peer(LOST, "backward")
    assert raised.value.__cause__ is LOST
    liveness.raise_lost_peer(RuntimeError("sizes differ"), "backward")  # which is raised as it is


def test_a_rank_that_stands_still_is_ended(
    monkeypatch: pytest.MonkeyPatch, ended: tuple[list[str], threading.Event]
) -> None:
    monkeypatch.setattr(liveness, "GRACE_SECONDS", 0.05)
    (said, over), store, processes = ended, HashStore(), [ProcessInfo.own()] * 2
    World(store, 0, processes)  # stands still
    fails = World(store, 1, processes)
    fails.watch.report("ValueError: of rank 1", is_own=True)
    fails.watch.stop()
    assert over.wait(20)
    assert said == ["rank 1 failed, last seen at start:\nValueError: of rank 1"]


def test_what_a_rank_writes_down_is_plain(worlds: list[World]) -> None:
    assert ProcessInfo(*json.loads(json.dumps(ProcessInfo.own()))) == ProcessInfo.own()


def test_an_error_that_all_ranks_have_comes_first_and_no_peer_is_blamed(worlds: list[World]) -> None:
    for world in worlds[1:]:
        world.watch.report("PeerError: waited", is_own=False)
    text = str(liveness.lost_peer_error(LOST, "backward"))
    assert text.startswith(f"{str(LOST).splitlines()[0]} (rank 0, in backward")
    assert "waited for its peers" not in text


@pytest.mark.parametrize(("text", "page"), [("gloo: Timed out waiting 20000ms", "F37"), (str(LOST), "F42")])
def test_a_time_out_with_all_ranks_present_leads_to_branches_on_some_ranks(
    worlds: list[World], text: str, page: str
) -> None:
    for world in worlds[1:]:
        world.watch.report("PeerError: waited", is_own=False)
    error = liveness.lost_peer_error(RuntimeError(text), "backward")
    assert error is not None
    assert error.page == page
    assert "a dict of losses that lacks an entry on a rank without boxes" in str(error)


def test_a_collective_of_the_user_that_times_out_is_named_with_its_line(worlds: list[World]) -> None:
    for world in worlds[1:]:
        world.watch.report("PeerError: waited", is_own=False)
    with pytest.raises(ValueError, match="process group") as raised:
        torch.distributed.all_reduce(torch.ones(1))  # the line of a user
    timed_out = RuntimeError("gloo: Timed out waiting 20000ms").with_traceback(raised.value.__traceback__)
    error = liveness.lost_peer_error(timed_out, "training_step")
    assert error is not None
    assert error.page == "F45"
    assert "rank 0 waited in torch.distributed.all_reduce, at test_liveness.py:" in str(error)
    assert "# the line of a user" in str(error)


@pytest.mark.parametrize("cleans_up", [True, False])
def test_the_listener_is_armed_until_teardown_is_over(
    monkeypatch: pytest.MonkeyPatch, cleans_up: bool, ended: tuple[list[str], threading.Event]
) -> None:
    monkeypatch.setattr(liveness, "TEARDOWN_SECONDS", 60.0 if cleans_up else 0.05)
    (said, over), world = ended, World(HashStore(), 0, [ProcessInfo.own()])
    monkeypatch.setattr(liveness, "_world", world)
    liveness.report(ValueError("its own"))
    assert world.watch.is_over
    if cleans_up:
        liveness.end_run()
        assert not said
    else:
        assert over.wait(20)
        assert said == ["the run is over, and this rank has not cleaned up for 0.05 s"]


def test_a_run_after_an_error_has_a_listener_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "_listen", lambda *args: None)
    world = World(HashStore(), 0, [ProcessInfo.own()])
    failed = world.watch
    failed.clean_up()
    world.new_run()
    assert failed._ended.is_set(), "nobody ends the process of the next run"
    assert world.watch is not failed
    assert not world.watch.is_over


def test_checks_leave_the_listener_of_a_world_to_its_strategy(worlds: list[World]) -> None:
    shared = liveness.watch_run(0, 3, stall_seconds=10.0)
    assert shared is worlds[0].watch
    liveness.report(ValueError("its own"))
    liveness.release(shared)
    assert not shared._ended.is_set()
    liveness.end_run()
    assert shared._ended.is_set()
    own = Watch(HashStore(), 0, 2)
    liveness.release(own)
    assert own._ended.is_set()


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: PrefixStore("default", store)])
def test_a_watch_leaves_the_file_of_a_living_world(
    wrap: Callable[[Store], Store], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch counts in the file who uses it. What a forked process drops is counted once more, and the last one removes the file."""
    file = tmp_path / "world"
    store = wrap(FileStore(str(file), 1))
    monkeypatch.setattr(torch_compat, "default_store", lambda: store)
    dropped = [liveness._own_store(0)]
    assert dropped[0] is not None
    dropped.append(dropped)  # garbage that waits for a collection
    del dropped
    # as a worker of a DataLoader does
    worker = multiprocessing.get_context("fork").Process(target=gc.collect)
    worker.start()
    worker.join()
    gc.collect()
    assert file.exists()
    store.set("later", "key")
    assert store.get("later") == b"key"
