"""Each rule on a small table, without a process group: healthy columns of three ranks have no finding, one changed column has the fault."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ddp_losses.callbacks import Finding
from tests.doors import DEFAULT_CHECKS, Fact, loss_rules, rules

Columns = dict[str, Any]
Rule = Callable[[Columns], list[Finding]]
SHARD, MEAN, SUM, ROWS = rules.SHARD + "loss.W", *(f"{each}val" for each in ("mean of ", "sum of ", "rows of "))

# by rule: columns of a healthy step of three ranks
HEALTHY: dict[Rule, Columns] = {
    rules.compare_structures: {"structure": (4, 4, 4)},
    rules.compare_starts: {
        **{"structure": (4, 4, 4), "values": (7, 7, 7), "place": (1, 2, 1), "parts": (5, 6, 5)},
        SHARD: ((0, 2, 6), (2, 4, 6), (4, 6, 6)),
    },
    rules.compare_parameters: {"structure": (4, 4, 4), "values": (7, 7, 7), "place": (0, 0, 0), "parts": (0, 0, 0)},
    rules.compare_graphs: {"missing": (0, 0, 0)},
    rules.compare_gradients: {
        **{"stepped": (1, 1, 1), "absent": (0, 0, 0), "expected": (0, 0, 0), "values": (9, 9, 9)},
        **{"not_finite": (0, 0, 0), "detached": (1, 0, 0)},
    },
    rules.compare_optimizers: {
        **{"settings": (3, 3, 3), "scale": (8.0, 8.0, 8.0), "state": (0, 0, 0), "stepped": (1, 1, 1)},
        "stood_still": (1, 0, 1),
    },
    rules.compare_forwards: {"forwards": (1, 1, 1), "buffers": (0, 0, 0), "step": (2, 2, 2)},
    rules.compare_buffers: {"number": (1, 1, 1), "values": (6, 6, 6)},
    rules.compare_own_buffers: {"number": (1, 1, 1), "values": (6, 6, 6)},
    rules.compare_metric_states: {"names": (1, 1, 1), "auroc.preds": (5, 0, 5), "auroc.target": (6, 0, 6)},
    rules.compare_norms: {
        **{"rows": (4.0, 4.0, 4.0), "labels": ((1, 1), (1, 1), (1, 1)), "tolerance": (0.1,) * 3, "rate": (0.1,) * 3},
        **{"means": ((0.0, 1.0),) * 3, "variances": ((1.0, 1.0),) * 3},
    },
    rules.compare_batches: {
        **{"batch": (3, 3, 3), "is_last": (0, 0, 0), "compares_ends": (1, 1, 1), "is_same": (0, 0, 0)},
        **{"is_iterable": (0, 0, 0), "read_step": (3, 3, 3), "order": (8, 8, 8), "began_again": (0, 0, 0)},
        **{"resumed_batch": (0, 0, 0), "resumed_epoch": (0, 0, 0)},
        **{"random_state": (1, 2, 3), "random_state_before": (4, 4, 4), "noise": (0, 0, 0)},
    },
    rules.compare_sizes: {
        **{"batches": (5, 5, 5), "full_size": (8, 8, 8), "last_size": (1, 1, 1), "gathers": (0, 0, 0)},
        **{"until_max_steps": (math.inf,) * 3, "has_batch_norm": (0, 0, 0)},
    },
    rules.find_shared_devices: {"identity": (0, 0, 5)},
    loss_rules.compare_losses: {
        **{"is_missing": (0, 0, 0), "is_odd": (0, 0, 0), "is_uneven": (0, 0, 0)},
        **{"keys": (1, 1, 1), "loss": (0.5, 0.0, 0.7), "bad_batch": (-1, -1, -1)},
        **{"weight": (0.1, 0.1, 0.1), "elements": (10.0,) * 3, "second_weight": (0.0,) * 3, "bias": (1.1,) * 3},
        **{"zero_steps": (-1, 4, -1), "most_zero_steps": (5, 5, 5), "biased_steps": (3, 3, 3), "step": (6, 6, 6)},
        **{"micro_batches": ((1.0, 2.0),) * 3, "divisors": ((4.0, 4.0),) * 3},
    },
    loss_rules.compare_names: {"keys": (1, 1, 1), "names": (3, 3, 3)},
    loss_rules.compare_epoch: {"waiting": ((5, 7), (5, 7), (5, 7)), "is_last": (1, 1, 1), "local_values": (2, 2, 2)},
    loss_rules.compare_logged: {
        **{MEAN: (2.0, 2.0, 2.0), "monitors": (1, 1, 1), SUM: (8.0, 8.0, 4.0), ROWS: (4.0, 4.0, 2.0)},
        **{"monitored acc": ((0.5,),) * 3, "monitored later": ((), (), ())},
    },
}

# by rule: what differs from healthy columns, and the faults with their ranks (empty for all of them)
SICK: list[tuple[Rule, Columns, list[tuple[str, tuple[int, ...]]]]] = [
    (rules.compare_structures, {"structure": (4, 4, 1)}, [("F12", (2,))]),
    # values of other structures cannot be lined up
    (rules.compare_starts, {"structure": (4, 1, 4), "values": (1, 2, 3)}, [("F12", (1,))]),
    (rules.compare_starts, {"values": (7, 8, 7)}, [("F04", (1,))]),
    (rules.compare_starts, {"parts": (5, 6, 9)}, [("F04", (2,))]),
    (rules.compare_starts, {SHARD: ((0, 2, 6), (2, 4, 6), (3, 6, 6))}, [("F16", ())]),
    (rules.compare_parameters, {"values": (8, 7, 7)}, [("SYNC", (0,))]),
    (rules.compare_graphs, {"missing": (0, 0, 5)}, [("F37", (2,))]),
    (rules.compare_gradients, {"stepped": (1, 0, 1), "values": (1, 2, 3)}, []),
    (rules.compare_gradients, {"absent": (0, 3, 0), "expected": (0, 1, 0)}, [("F37", (1,))]),
    (rules.compare_gradients, {"absent": (3, 3, 3), "expected": (1, 1, 1)}, [("F38", ())]),
    (rules.compare_gradients, {"values": (9, 9, 1)}, [("SYNC", (2,))]),
    (rules.compare_gradients, {"not_finite": (0, 2, 1), "values": (1, 2, 3)}, [("SYNC", (1, 2)), ("F79", (1, 2))]),
    (rules.compare_gradients, {"detached": (1, 2, 1)}, [("DETACHED", ())]),
    (rules.compare_optimizers, {"stood_still": (1, 1, 1)}, [("STEP", ())]),
    (rules.compare_optimizers, {"stepped": (1, 1, 0), "settings": (1, 2, 3)}, [("F37", (2,))]),
    (rules.compare_optimizers, {"scale": (8.0, 4.0, 8.0)}, [("F15", (1,))]),
    (rules.compare_optimizers, {"settings": (3, 3, 4), "state": (1, 0, 0)}, [("F17", (2,)), ("F17", (0,))]),
    (rules.compare_forwards, {"forwards": (2, 2, 2), "buffers": (1, 2, 1)}, [("F41", (1,))]),
    (rules.compare_forwards, {"forwards": (2, 1, 2), "buffers": (1, 2, 1)}, []),
    (rules.compare_buffers, {"values": (6, 6, 5)}, [("F64", (2,))]),
    (rules.compare_own_buffers, {"values": (6, 6, 5)}, [("F64", (2,))]),
    (rules.compare_metric_states, {"auroc.preds": (5, 0, 4)}, [("F52", (1, 2))]),
    (
        rules.compare_metric_states,
        {"auroc.preds": (5, 0, 4), "auroc.target": (6, 0, 5)},
        [("F52", (1, 2))],
    ),  # one metric
    (rules.compare_metric_states, {"names": (1, 1, 2), "auroc.preds": (5, 3, 4)}, []),
    (rules.compare_norms, {"means": ((0.0, 1.0), (0.0, 1.0), (3.0, 4.0))}, [("F59", ())]),
    (rules.compare_norms, {"means": ((0.0, 1.0), (0.0, 1.0), (0.3, 1.0))}, []),  # by chance, of four rows
    (rules.compare_batches, {"is_last": (0, 1, 0)}, [("F36", (1,))]),
    (rules.compare_batches, {"is_last": (0, 1, 0), "compares_ends": (0, 0, 0)}, []),
    (rules.compare_batches, {"is_same": (1, 0, 1)}, [("F67", (0, 2))]),
    (rules.compare_batches, {"is_same": (1, 1, 1), "is_iterable": (0, 1, 0)}, [("F71", (0, 1, 2))]),
    (rules.compare_batches, {"order": (8, 7, 8)}, [("F69", (1,))]),
    (rules.compare_batches, {"order": (8, 7, 0)}, []),
    (rules.compare_batches, {"began_again": (1, 1, 1)}, [("F83", ())]),
    (rules.compare_batches, {"random_state": (5, 5, 5)}, [("F72", ())]),
    (rules.compare_batches, {"noise": (5, 5, 5)}, [("F72", ())]),
    (rules.compare_batches, {"noise": (5, 5, 6)}, []),
    (rules.compare_batches, {"noise": (5, 5, 0)}, []),  # a rank without rows
    (rules.compare_batches, {"random_state": (4, 4, 4)}, []),  # nothing is drawn
    (rules.compare_batches, {"random_state": (5, 5, 5), "random_state_before": (0, 0, 0)}, []),
    (rules.compare_sizes, {"batches": (5, 5, 4)}, [("F36", (2,))]),
    (rules.compare_sizes, {"batches": (5, 5, 4), "until_max_steps": (3.0,) * 3}, []),
    (rules.compare_sizes, {"gathers": (6, 6, 6), "last_size": (8, 3, 8)}, [("F28", ())]),
    (rules.compare_sizes, {"has_batch_norm": (1, 1, 1), "last_size": (8, 1, 8)}, [("F62", (1,))]),
    (rules.compare_sizes, {"has_batch_norm": (1, 1, 1), "full_size": (1, 1, 1)}, []),  # batches of one row by choice
    (rules.find_shared_devices, {"identity": (5, 0, 5)}, [("F73", (0, 2))]),
    (loss_rules.compare_losses, {"is_missing": (0, 1, 0)}, [("F35", (1,))]),
    (loss_rules.compare_losses, {"keys": (1, 1, 2)}, [("F46", (2,))]),
    (
        loss_rules.compare_losses,
        {"loss": (0.5, math.nan, 1.0), "bad_batch": (-1, 0, -1), "is_odd": (0, 1, 0)},
        [("F79", (1,))],
    ),
    (loss_rules.compare_losses, {"zero_steps": (-1, 5, -1), "is_odd": (0, 1, 0)}, [("F31", (1,))]),
    (loss_rules.compare_losses, {"weight": (0.1, 0.1, 0.2)}, [("F30", ())]),
    (loss_rules.compare_losses, {"weight": (0.1, 0.1, 0.2), "biased_steps": (2, 2, 2)}, []),
    (loss_rules.compare_losses, {"weight": (0.1, 0.0, 0.2)}, []),  # one is not known
    (
        loss_rules.compare_losses,
        {"zero_steps": (-1, 5, -1), "is_odd": (0, 1, 0), "step": (-1, -1, -1)},
        [],
    ),  # no loss yet
    (
        loss_rules.compare_losses,
        {"divisors": ((4.0, 2.0), (4.0, 4.0), (4.0, 2.0)), "is_uneven": (1, 1, 1)},
        [("F30", ())],
    ),
    (loss_rules.compare_names, {"keys": (1, 1, 2)}, [("F46", (2,))]),
    (loss_rules.compare_epoch, {"waiting": ((5, 7), (5, 7), (5,))}, [("F46", (2,))]),
    (loss_rules.compare_epoch, {"waiting": ((5,), (5,), ()), "is_last": (0, 0, 1)}, [("F46", (2,))]),
    # a rank reads in the middle of its hook, and will log more
    (
        loss_rules.compare_epoch,
        {"waiting": ((5, 7), (5,), (5, 7)), "is_last": (1, 0, 1), "local_values": (1, 2, 1)},
        [],
    ),
    (loss_rules.compare_epoch, {"local_values": (1, 2, 2)}, [("F56", ())]),
    (loss_rules.compare_logged, {MEAN: (2.2, 2.2, 2.2)}, [("F82", ())]),
    (loss_rules.compare_logged, {MEAN: (math.nan,) * 3}, []),
    (loss_rules.compare_logged, {"monitored acc": ((0.5,), (0.4,), (0.5,))}, [("F55", (1,))]),
    (loss_rules.compare_logged, {"monitored acc": ((0.5,), (), (0.5,))}, [("F55", (1,))]),
    (loss_rules.compare_logged, {"monitored acc": ((math.nan,),) * 3}, []),
    (loss_rules.compare_logged, {"monitors": (1, 2, 1), "monitored acc": ((0.5,), (0.4,), (0.5,))}, []),
]


@pytest.mark.parametrize("rule", HEALTHY, ids=lambda rule: rule.__name__)
def test_healthy_columns_have_no_finding(rule: Rule) -> None:
    assert rule(dict(HEALTHY[rule])) == []


@pytest.mark.parametrize(("rule", "change", "expected"), SICK, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_changed_column_is_a_finding(
    rule: Rule, change: Columns, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    assert change.keys() <= HEALTHY[rule].keys()
    found = rule({**HEALTHY[rule], **change})
    assert [(finding.fault, finding.ranks) for finding in found] == expected


def test_every_rule_of_a_check_has_a_row() -> None:
    of_checks = {fact.rule for check in DEFAULT_CHECKS for fact in check.facts} - {None}
    assert of_checks == set(HEALTHY) == {rule for rule, _, _ in SICK}


# facts with columns that alone show that their rule finds nothing, and is not called
DECLARED = [fact for check in DEFAULT_CHECKS for fact in check.facts if fact.equal or fact.zero]


@pytest.mark.parametrize("fact", DECLARED, ids=lambda fact: fact.name)
def test_columns_that_are_healthy_alone_have_no_finding(fact: Fact) -> None:
    """Every combination of small numbers, in the columns that decide and in the healthy and the sick rows around them."""
    assert fact.rule is not None
    rows = [HEALTHY[fact.rule], *({**HEALTHY[rule], **change} for rule, change, _ in SICK if rule == fact.rule)]
    assert {*fact.equal, *fact.zero} <= rows[0].keys()
    decided = 0
    for row in rows:
        for numbers in itertools.product((0, 1), repeat=len(fact.equal) + len(fact.zero)):
            for sick in (None, *fact.equal, *fact.zero):
                columns = dict(row)
                for name, number in zip((*fact.equal, *fact.zero), numbers, strict=True):
                    columns[name] = (number, number, 1 - number) if name == sick else (number,) * 3
                decided += fact.is_healthy(columns)
                if fact.is_healthy(columns):
                    assert fact.rule(columns) == [], columns
    assert decided


def test_a_rank_without_a_column_is_not_healthy() -> None:
    for fact in DECLARED:
        assert fact.rule is not None
        columns = {**HEALTHY[fact.rule], **dict.fromkeys(fact.zero, (0, 0, 0))}
        assert fact.is_healthy(columns)
        for name in (*fact.equal, *fact.zero):
            assert not fact.is_healthy({other: column for other, column in columns.items() if other != name})
