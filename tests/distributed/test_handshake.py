"""Handshakes: payloads of any length arrive; ranks that disagree, or fail alone, all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_ddp_losses.errors import DDPLossError, InputError, RankMismatchError
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import handshake, messages, process_groups
from tests.each_rank import each_rank
from tests.refusals import refusals

SIZES = {
    "nothing": [0, 0, 0],
    "small": [3, 3, 3],
    "one rank has nothing": [0, 5, 0],
    "around one handshake": [handshake.HANDSHAKE_BYTES - 60, handshake.HANDSHAKE_BYTES, handshake.HANDSHAKE_BYTES + 1],
    "one rank's does not fit": [7, 100_000, 0],
    "none fits": [5_000, 3_000, 4_000],
}


def swap(sizes: list[int]) -> int:
    handshake.all_gather("warm up", {})
    own = bytes([65 + dist.get_rank()]) * sizes[dist.get_rank()]
    with CountCollectives() as counter:
        payloads = handshake.all_gather("swap", {"epoch": 3, "name": "größe"}, own)
    world = dist.get_world_size()
    assert payloads == [bytes([65 + rank]) * sizes[rank] for rank in range(world)]
    return len(counter.take())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_payloads_of_any_length_arrive_in_rank_order(pool: RankPool, world_size: int, sizes: str) -> None:
    used = SIZES[sizes][:world_size]
    counts = pool.run(world_size, swap, used)
    assert len(set(counts)) == 1
    if world_size == 1:
        assert counts == [0]
    elif max(used) < 500:
        assert counts[0] == 1
    else:
        assert counts[0] <= 2


@each_rank(2)
def test_the_edge_of_a_frame() -> None:
    for size in range(handshake.HANDSHAKE_BYTES - 80, handshake.HANDSHAKE_BYTES + 8):
        own = bytes([dist.get_rank() + 1]) * (size + dist.get_rank())
        payloads = handshake.all_gather("edge", {}, own)
        assert [len(p) for p in payloads] == [size + rank for rank in range(dist.get_world_size())]
        assert payloads[dist.get_rank()] == own


# by rank: the operation, what must match, the payload
DISAGREEING: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "operation": lambda rank: (f"loss {rank}", {}),
    "value": lambda rank: ("loss", {"margin": 0.5 + 0.1 * (rank == 1), "scale": 64}),
    "end of a long text": lambda rank: ("loss", {"names": "x" * 5000 + str(rank)}),
    "behind a long text": lambda rank: ("loss", {"configuration": "x" * 600, "width": 7 + rank}),
    "a missing value": lambda rank: ("loss", {"margin": 1} if rank else {}),
    "many bytes per character": lambda rank: ("loss", {"names": "é" * 223 + str(rank)}),
    "an awkward value": lambda rank: ("loss", {"text": f"a=b\nc=d{rank}"}),
    "a large payload on one side": lambda rank: ("loss", {"margin": rank}, bytes(9000 * rank)),
}


def disagree(case: str) -> tuple[str, str, bool]:
    with pytest.raises(DDPLossError) as caught:
        handshake.all_gather(*DISAGREEING[case](dist.get_rank()))
    assert handshake.all_gather("after", {}, b"ok") == [b"ok"] * dist.get_world_size()
    return caught.type.__name__, str(caught.value), caught.value.collective


@pytest.mark.parametrize("case", DISAGREEING)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_raise_the_same_error(pool: RankPool, world_size: int, case: str) -> None:
    results = pool.run(world_size, disagree, case)
    assert len(set(results)) == 1, results
    kind, text, collective = results[0]
    assert kind == "RankMismatchError"
    assert collective
    assert all(f"rank {rank}" in text for rank in range(world_size))
    if case == "value":
        assert "margin" in text
        assert "0.6" in text
        assert "scale" not in text
    if case == "behind a long text":
        assert text.splitlines()[:3] == [
            "loss: width: expected the same on every rank",
            "  rank 0: width=7",
            "  rank 1: width=8",
        ]
    if case == "end of a long text":
        assert f"  rank 0: names=...{'x' * 80}0" in text.splitlines()


def fail_on(failing: list[int], error: BaseException, recover: bool) -> tuple[str, str]:
    def meet() -> None:
        if dist.get_rank() in failing:
            handshake.raise_on_all_ranks(error, "training_step")
        handshake.all_gather("loss", {"rows": 3}, b"x" * 2000)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is returned
        meet()
    if recover:
        assert handshake.all_gather("after", {}, b"ok") == [b"ok"] * dist.get_world_size()
    return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize("text", ["labels: expected 0..4, got 9", "long " * 2000 + "end"], ids=["short", "long"])
@pytest.mark.parametrize("failing", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
def test_an_error_of_ours_on_some_ranks_is_the_same_on_all(pool: RankPool, failing: list[int], text: str) -> None:
    results = pool.run(3, fail_on, failing, InputError(text), True)
    assert len(set(results)) == 1, results
    kind, found = results[0]
    assert kind == "InputError"
    assert text in found
    assert "training_step" in found


def test_a_foreign_error_stays_itself_and_is_told_to_the_peers(pool: RankPool) -> None:
    results = pool.run(3, fail_on, [1], ZeroDivisionError("division by zero"), True)
    assert results[1] == ("ZeroDivisionError", "division by zero")
    assert results[0] == results[2]
    kind, text = results[0]
    assert kind == "PeerError"
    assert "ZeroDivisionError" in text
    assert "rank 1" in text


def different_errors(rank: int) -> None:
    own = [InputError("labels"), RankMismatchError("widths"), InputError("labels")][rank]
    handshake.raise_on_all_ranks(own, "training_step")


def parts_of_a_peers_error() -> tuple[object, ...]:
    error = InputError("labels", expected=(8,), got=[3], ranks={2: "seven"}, fix="Pass one label per row.")
    try:
        if dist.get_rank() == 1:
            handshake.raise_on_all_ranks(error, "training_step")
        handshake.all_gather("loss", {})
    except InputError as found:
        return str(found), found.what, found.expected, found.got, found.ranks, found.fix
    raise AssertionError("no error")


def test_a_peers_copy_of_an_error_has_its_parts(pool: RankPool) -> None:
    first, *others = pool.run(3, parts_of_a_peers_error)
    assert others == [first, first]
    text, *parts = first
    assert parts == ["labels", "(8,)", "[3]", {2: "seven"}, "Pass one label per row."]
    assert text == (
        "labels: expected (8,), got [3]\n  rank 2: seven\nPass one label per row.\n(rank 1 of 3, in training_step)"
    )


def test_alone_an_error_is_raised_as_it_is(pool: RankPool) -> None:
    assert pool.errors(1, fail_on, [0], KeyboardInterrupt("stop"), False)[0].type == "KeyboardInterrupt"
    assert pool.run(1, fail_on, [0], InputError("x"), True) == [("InputError", "x")]


def failed_alone() -> None:
    process_groups.set_timeout(timedelta(seconds=1))
    try:
        if dist.get_rank() == 0:
            with pytest.raises(InputError, match="rank 0 met this") as met:
                handshake.raise_on_all_ranks(InputError("rank 0 met this"), "before any handshake")
            assert not handshake.has_reached_all(met.value)
    finally:
        process_groups.set_timeout(None)
        dist.barrier()
    raise InputError("ranks have made different groups: no other test may use them")


def test_an_error_that_no_peer_comes_for_stays_itself(pool: RankPool) -> None:
    """Our groups are not made yet either: all ranks must come for that."""
    for error in pool.errors(2, failed_alone, fresh=True):
        assert "no other test may use them" in error.message


def skipped_call(rank: int) -> None:
    if rank != 1:
        handshake.all_gather("loss 'arcface'", {"rows": "?"})
    handshake.all_gather("backward", {"step": 0})


def follow_the_payloads(sizes: list[int]) -> list[tuple[int, int]]:
    """(collectives, bytes sent) of each handshake."""
    found = []
    for size in sizes:
        plain_gather = mock.patch.object(handshake, "start_gather", wraps=handshake.start_gather)
        with CountCollectives() as counter, plain_gather as gathers:
            sent = handshake.all_gather("follow", {}, bytes(size * (dist.get_rank() + 1)))
            assert [len(p) for p in sent] == [size * (r + 1) for r in range(dist.get_world_size())]
        found.append((len(counter.take()), sum(gather.args[0].nbytes for gather in gathers.call_args_list)))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_handshakes_have_room_for_what_came_before(pool: RankPool, world_size: int) -> None:
    pool.run(world_size, follow_the_payloads, [0] * 130)  # whatever other tests sent is forgotten
    results = pool.run(world_size, follow_the_payloads, [10, 5_000, 5_000, 10, *[10] * 130, 5_000])
    assert len({tuple(count for count, _ in rank) for rank in results}) == 1
    for first, grows, fits, still, *small, again in results:
        assert first == (1, handshake.HANDSHAKE_BYTES)
        assert grows[0] == 2
        assert fits[0] == 1
        assert 5_000 * world_size < fits[1] < 1.5 * 5_000 * world_size
        assert still == fits
        assert small[-1] == (1, handshake.HANDSHAKE_BYTES)
        assert again[0] == 2


def test_a_payload_beyond_bounds_leaves_handshakes_small(pool: RankPool) -> None:
    pool.run(2, follow_the_payloads, [0] * 130)
    for found in pool.run(2, follow_the_payloads, [300_000, 300_000, 10]):
        assert [count for count, _ in found] == [2, 2, 1]
        assert found[-1][1] <= 256 << 10


def overtake(fails: bool) -> list[bytes] | str:
    rank = dist.get_rank()
    first = handshake.start("first", {}, bytes(20_000))
    try:
        if fails and rank == 1:
            handshake.raise_on_all_ranks(InputError("rank 1 met this"), "between two handshakes")
        if not fails:
            second = handshake.all_gather("second", {}, b"second")
            assert second == [b"second"] * dist.get_world_size()
        got = first.finish()
        handshake.all_gather("third", {}, b"third")
    except DDPLossError as error:
        return str(error)
    return got


def test_a_handshake_that_is_overtaken_arrives(pool: RankPool) -> None:
    pool.run(2, follow_the_payloads, [0] * 130)
    assert pool.run(2, overtake, False) == [[bytes(20_000)] * 2] * 2


def test_a_rank_that_fails_while_a_long_handshake_is_on_its_way(pool: RankPool) -> None:
    pool.run(2, follow_the_payloads, [0] * 130)
    one, other = pool.run(2, overtake, True)
    assert one == other
    assert "rank 1 met this" in one


def in_another_order(rank: int) -> None:
    """Rank 0 leaves one on its way when it opens the next; the other opens them the other way round."""
    if rank == 0:
        handshake.start("first", {})
        handshake.all_gather("second", {})
    else:
        handshake.all_gather("second", {})
        handshake.all_gather("first", {})


def announce_much(rank: int) -> None:
    pack = messages.Header.pack

    def more(kind: Any, text: Any, digest: Any, payload_bytes: int, *rest: Any) -> Any:
        return pack(kind, text, digest, (64 << 20) + 1 if rank == 1 else payload_bytes, *rest)

    # nothing is made ready for what it announces
    gathered = mock.patch.object(handshake.PendingHandshake, "_gather_rest", side_effect=AssertionError("gathered"))
    with mock.patch.object(messages.Header, "pack", more), gathered:
        handshake.all_gather("this", {})


def speak_another_version(rank: int) -> None:
    with mock.patch.object(messages, "VERSION", 1 + (rank == 1)):
        handshake.all_gather("this", {}, bytes(20_000))


BEYOND = ("at most 67,108,864 bytes", "  rank 1: 67,108,865 bytes\n")
REFUSED: dict[str, tuple[Any, ...]] = {
    "different errors make one that holds all": (different_errors, ("labels", "widths"), "DDPLossError", 3),
    "a skipped call meets the next handshake": (skipped_call, ("arcface", "backward"), "RankMismatchError", 3),
    "a pending one met another": (in_another_order, (), "RankMismatchError"),
    "a pending one met another on three ranks": (in_another_order, (), "RankMismatchError", 3),
    "a header that announces more than 64 MiB": (announce_much, BEYOND, "PeerError", 3),
    "another version, of which nothing is read": (
        speak_another_version,
        "  rank 1: handshake version 2\n",
        "RankMismatchError",
    ),
}
test_ranks_that_part_get_one_error = refusals(__name__, "REFUSED")


def send_much(of_user: bool) -> list[int]:
    with mock.patch.object(messages, "LARGEST_PAYLOAD", 4 << 10):
        payload = bytes((dist.get_rank() + 1) * 10_000)
        return list(map(len, handshake.all_gather("this", {}, payload, of_user=of_user)))


def test_what_the_users_program_made_may_be_longer(pool: RankPool) -> None:
    assert pool.run(2, send_much, True, fresh=True) == [[10_000, 20_000]] * 2
    assert {error.type for error in pool.errors(2, send_much, False)} == {"PeerError"}
