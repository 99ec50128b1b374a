"""Handshakes: payloads of any length arrive; ranks that disagree, or fail alone, all raise the same error."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import handshake, messages, process_groups
from tests.each_rank import each_rank

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


def overtake(fails: bool) -> list[bytes]:
    """Leave a long handshake on its way, while another is made or rank 1 fails."""
    follow_the_payloads([0] * 130)
    first = handshake.start("first", {}, bytes(20_000))
    if fails and dist.get_rank() == 1:
        handshake.raise_on_all_ranks(InputError("rank 1 met this"), "between two handshakes")
    if not fails:
        second = handshake.all_gather("second", {}, b"second")
        assert second == [b"second"] * dist.get_world_size()
    got = first.finish()
    handshake.all_gather("third", {}, b"third")
    return got


def test_a_handshake_that_is_overtaken_arrives(pool: RankPool) -> None:
    assert pool.run(2, overtake, False) == [[bytes(20_000)] * 2] * 2


def send_much(of_user: bool) -> list[int]:
    with mock.patch.object(messages, "LARGEST_PAYLOAD", 4 << 10):
        payload = bytes((dist.get_rank() + 1) * 10_000)
        return list(map(len, handshake.all_gather("this", {}, payload, of_user=of_user)))


def test_what_the_users_program_made_may_be_longer(pool: RankPool) -> None:
    assert pool.run(2, send_much, True, fresh=True) == [[10_000, 20_000]] * 2
