"""Tables of refusals find a row that is not so."""

from __future__ import annotations

import pytest

from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.refusals import Refused, assert_refused, refusals


def refuse(*words: str) -> None:
    raise InputError(" ".join(words))


def fail_on(odd: int, rank: int) -> None:
    if rank == odd:
        raise KeyError("absent")
    raise ConfigurationError(f"rank {odd} failed")


RIGHT: dict[str, Refused] = {
    "one word": Refused(lambda rank: refuse("labels", "17"), "17"),
    "words": Refused(lambda rank: refuse("labels", "17"), ("labels", "17"), "InputError", 3, unsaid="rows"),
    "texts that differ": Refused(lambda rank: refuse("rank", str(rank)), "rank", same=False),
    "an error of its own": Refused(lambda rank: fail_on(1, rank), "rank 1", "ConfigurationError", own={1: "absent"}),
    "errors of their own": Refused(lambda rank: fail_on(rank, rank), (), own={0: "KeyError", 1: "KeyError"}),
    "without ranks": Refused(lambda rank: refuse("labels"), "labels", ranks=0),
}
test_a_table = refusals(__name__, "RIGHT")

WRONG: dict[str, Refused] = {
    "another word": Refused(lambda rank: refuse("labels"), ("labels", "17")),
    "another class": Refused(lambda rank: refuse("labels"), "labels", "ConfigurationError"),
    "another word without ranks": Refused(lambda rank: refuse("labels"), "17", ranks=0),
    "texts that differ": Refused(lambda rank: refuse("rank", str(rank)), "rank"),
    "what is not to be said": Refused(lambda rank: refuse("labels", "rows"), "labels", unsaid="rows"),
    "no error of its own": Refused(lambda rank: refuse("labels"), "labels", own={1: "labels"}),
    "other words of its own": Refused(lambda rank: fail_on(1, rank), "rank 1", own={1: "ValueError"}),
    "an error that is not ours": Refused(lambda rank: fail_on(rank, rank), "absent", "KeyError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_not_so_is_found(pool: RankPool, name: str) -> None:
    with pytest.raises(AssertionError):
        assert_refused(pool, __name__, "WRONG", name)


SILENT = {"one rank": Refused(lambda rank: refuse("labels") if rank else None, "labels")}


def test_a_rank_that_raises_nothing_is_found(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"did not raise on rank\(s\) \[0\]"):
        assert_refused(pool, __name__, "SILENT", "one rank")
