"""What windows refuse: programs whose gradients they cannot correct, ranks that differ, and options.

Tables of one file's programs are in that file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightning_ddp_losses import DDPLossStrategy
from tests.accumulation import test_declared as declared
from tests.accumulation import test_learned_weights as learned
from tests.accumulation.test_errors import Skips, fit_job, fit_uneven
from tests.accumulation.test_loss_counts import fit_same_memory
from tests.accumulation.test_reductions import OTHER_ROWS, mean_of_copies
from tests.accumulation.test_what_counts import weighed_on_one_rank, weighted
from tests.refusals import Refused, refusals

pytestmark = pytest.mark.filterwarnings("ignore:.training_step. returned .None.")


def running(call: Callable[[], object], *words: str, **row: Any) -> Refused:
    """What a program does on each rank."""
    return Refused(lambda _: call(), words, same=False, **row)


def option(*words: str, **given: Any) -> Refused:
    return running(lambda: DDPLossStrategy(**given), *words, kind="ConfigurationError", ranks=0)


def needing_the_option(call: Callable[[DDPLossStrategy], object]) -> Refused:
    return running(lambda: call(DDPLossStrategy()), "accumulation='window'", kind="ConfigurationError", ranks=0)


INSIDE, REACHED = "losses that are computed inside the window", "what is back-propagated"
PROGRAMS: dict[str, Refused] = {
    "in another thread": running(declared.in_another_thread, INSIDE, "another thread"),
    "from before the window": running(declared.from_before_the_window, INSIDE, "before it"),
    "of an earlier window": running(
        declared.of_an_earlier_window, "computed in this window", "one of an earlier window"
    ),
    "again after the window": running(
        declared.again_after_the_window, "backward inside the window", "one outside of the window"
    ),
    "a shared criterion": running(declared.shared_criterion, "`of_a`, `of_b` share", "a loss of its own"),
    "gradients that a hook changes": running(
        partial(declared.fit_step, "a new loss", declared.Changing),
        *("gradients since its last backward", "`net.layer.weight`"),
    ),
    "totals of a learned weight": running(learned.with_totals, REACHED, "`scales`"),
    "a learned weight without counts": running(
        learned.without_counts, REACHED, "A weight that is learned", "counts=...", "loss_counts(batch)"
    ),
    "a loader that reuses its memory": running(fit_same_memory, "expected memory of its own", "make new tensors"),
    # (on several ranks Lightning refuses None itself)
    "a skipped last micro-batch": running(partial(fit_job, Skips), "inside it", ranks=1),
    # ranks that differ
    "other sizes": running(
        declared.other_sizes_on_ranks, "rank 0: micro_batches of the accumulation window=3", "the same on every rank"
    ),
    "windows of different lengths": running(fit_uneven, kind="RankMismatchError"),
    "a weight that changes on one rank": running(weighed_on_one_rank, "with the same weights in every micro-batch"),
    "counts of other class weights": running(partial(weighted, 1.001), "count in expect_counts of"),
    **{
        f"copies of other rows: {name}": running(partial(mean_of_copies, totals), "copies", "the same rows")
        for name, totals in OTHER_ROWS.items()
    },
    # options
    "accumulation='mean of means'": option(
        "one of 'mean', 'window', got 'mean of means'", accumulation="mean of means"
    ),
    "no losses": option("losses=[], which is plain ddp", accumulation="window", losses=[]),
    "a static graph": option("static_graph=False", accumulation="window", static_graph=True),
    "window() without the option": needing_the_option(lambda strategy: strategy.window().__enter__()),
    "expect_counts() without the option": needing_the_option(lambda strategy: strategy.expect_counts({"norm": 3})),
}
test_programs = refusals(__name__, "PROGRAMS")
