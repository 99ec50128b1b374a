"""What a window divides by before it knows its counts: the first count that is not zero, for all of its micro-batches."""

from __future__ import annotations

import pytest

from tests.doors import Term, WindowPart


@pytest.mark.parametrize(
    ("counts", "estimate"),
    [([4.0, 9.0], 12.0), ([0.0, 5.0, 2.0], 15.0), ([0.0, 0.0], None)],
    ids=["the first", "a first micro-batch without rows", "none"],
)
def test_the_first_nonzero_count_makes_the_estimate(counts: list[float], estimate: float | None) -> None:
    term = Term("key", "a loss")
    for count in counts:
        term.take_(WindowPart("mean", count, count), micro_batches=3)
    assert term.estimate == estimate
    assert term.divisor == estimate


def test_a_given_count_comes_before_the_estimate() -> None:
    term = Term("key", "a loss", expected=7.0)
    term.take_(WindowPart("mean", 2.0, 2.0), micro_batches=3)
    assert term.divisor == 7.0
