"""Rules about losses and logged values: pure functions from the columns of all ranks to findings.

Lightning divides the loss of each micro-batch by their number, so micro-batches count equally even if they have different divisors. In that
case, an optimizer step differs from the step on a single batch with all their rows.

Legend: ``M`` micro-batches of a window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_ddp_losses.callbacks.facts.fact import Columns
from lightning_ddp_losses.callbacks.facts.rules import ranks_with
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing, odd_ranks

BIASED_STEPS = 3
"""Number of steps with unequally weighted elements after which a finding is made."""
MEAN, SUM, ROWS = "mean of ", "sum of ", "rows of "
"""Prefixes of the name of a logged value in the names of its columns."""
MONITORED = "monitored "
"""Prefix of the name of a monitored value."""

_SHOWN = 8  # largest number of micro-batches in a message
_EQUAL = 1e-6  # relative tolerance
_ROUNDING = 1e-5  # tolerance relative to the mean of absolute values, because ranks add float32 sums


# ---------------------------------------------------------------------- losses of a step


def compare_losses(columns: Columns) -> list[Finding]:
    """F35, F46, F79, F31, F30: the losses of a step, usually the previous one, which is named in the findings."""
    losses, step = columns["loss"], max(columns["step"])
    # available immediately: a rank without a loss, different names
    without = ranks_with(columns["is_missing"])
    if without:
        texts = ["None" if rank in without else f"{loss:g}" for rank, loss in enumerate(losses)]
        found = [Finding.of("F35", ranks=without, name="loss", values=tuple(texts))]
    else:
        found = differing(columns["keys"], "F46", name="log keys")
    # available one step later: values
    if step >= 0:
        of_step = [] if without else _compare_values(columns)
        if any(columns["is_uneven"]):
            of_step += uneven_micro_batches(columns)
        found += [replace(each, step=step, moment=CheckStage.BEFORE_BACKWARD.value) for each in of_step]
    return found


def _compare_values(columns: Columns) -> list[Finding]:
    """Find losses that are not finite, are zero from the start, or have unequally weighted elements."""
    found: list[Finding] = []
    if any(columns["is_odd"]):
        found = _find_odd_losses(columns)
    if has_biased_weights(columns) and columns["biased_steps"][0] >= BIASED_STEPS:
        pairs = zip(columns["elements"], columns["weight"], strict=True)
        values = tuple(f"mean over {elements:g}, each weighs {weight:.4g}" for elements, weight in pairs)
        found.append(Finding.of("F30", name="loss", values=values))
    return found


def _find_odd_losses(columns: Columns) -> list[Finding]:
    """Find losses that are not finite, or are zero from the start."""
    found: list[Finding] = []
    shown = [f"{loss:g}" for loss in columns["loss"]]
    # -1 denotes that all losses were finite
    odd_batches = columns["bad_batch"]
    not_finite = tuple(rank for rank, batch in enumerate(odd_batches) if batch >= 0)
    if not_finite:
        batches = [f" in batch {batch}" if batch >= 0 else "" for batch in odd_batches]
        values = tuple(loss + batch for loss, batch in zip(shown, batches, strict=True))
        found.append(Finding.of("F79", ranks=not_finite, name="loss", values=values))
    most = columns["most_zero_steps"][0]
    zero = tuple(rank for rank, steps in enumerate(columns["zero_steps"]) if steps == most)
    if zero:
        found.append(Finding.of("F31", ranks=zero, name="loss", values=tuple(shown), steps=most))
    return found


def has_biased_weights(columns: Columns) -> bool:
    """Return whether an element's weights on two ranks differ by more than the allowed ratio in this step."""
    first = _largest_ratio([abs(weight) for weight in columns["weight"]])
    second = _largest_ratio([abs(weight) for weight in columns["second_weight"]])
    return bool(max(first, second) > columns["bias"][0])


def _largest_ratio(weights: Sequence[float]) -> float:
    """Return the largest ratio of an element's weights on two ranks, or 1 if a weight is not known."""
    if min(weights) <= 0:
        return 1.0
    return max(weights) / min(weights)


# ---------------------------------------------------------------------- micro-batches of a window


def spread(divisors: Sequence[float]) -> float:
    """Return the ratio of the largest to the smallest divisor, or 1 if a divisor is not known."""
    if any(map(math.isnan, divisors)) or not max(divisors):
        return 1.0
    return max(divisors) / min(divisors) if min(divisors) else math.inf


def uneven_micro_batches(columns: Columns) -> list[Finding]:
    """F30: the ratio of divisors of the micro-batches of a window exceeds the option ``bias``.

    Args:
        columns: M values and M divisors of each rank (``loss_reader.MicroBatches``), both empty if they are not compared.
    """
    values, divisors_by_rank = columns["micro_batches"], columns["divisors"]
    numbers = set(map(len, values))
    if len(numbers) != 1 or numbers == {0}:
        return []
    (number,) = numbers
    tables = [*zip(values, divisors_by_rank, strict=True)]
    if all(table == tables[0] for table in tables):  # a global loss is equal on all ranks
        tables = tables[:1]
    # compute the divisor, the sum and the mean of each micro-batch over all ranks
    divisors = [math.fsum(column) for column in zip(*[of_rank for _, of_rank in tables], strict=True)]
    if spread(divisors) <= columns["bias"][0]:
        return []
    totals, means = [], []
    for m, divisor in enumerate(divisors):
        totals.append(math.fsum(of_rank[m] * parts[m] for of_rank, parts in tables if parts[m]))
        plain_mean = math.fsum(of_rank[m] for of_rank, _ in tables) / len(tables)
        means.append(totals[-1] / divisor if divisor else plain_mean)
    # the first mean weights micro-batches equally, and the second weights rows equally
    of_means, of_rows = math.fsum(means) / number, math.fsum(totals) / math.fsum(divisors)
    shown = ", ".join(f"{divisor:g}" for divisor in divisors[:_SHOWN])
    if number > _SHOWN:
        shown += ", ..."
    compared = ""
    if math.isfinite(of_means) and math.isfinite(of_rows):
        compared = f": the mean of their means is {of_means:.6g}, that over all their rows {of_rows:.6g}"
        if of_rows:
            compared += f", {abs(of_means / of_rows - 1):.2%} apart"
    texts: dict[str, Any] = {"number": number, "shown": shown, "compared": compared}
    return [Finding.of("F30", "micro_batches", name="accumulation", graded="note", **texts)]


# ---------------------------------------------------------------------- logged values


def compare_names(columns: Columns) -> list[Finding]:
    """F46, before the names are added: values that are reduced at the end of an epoch."""
    return differing(columns["keys"], "F46", name="names of an epoch")


def compare_epoch(columns: Columns) -> list[Finding]:
    """F46, F56, before the names are added: values that the hooks at the end of an epoch have logged so far.

    A rank may read in the middle of a hook, when fewer names are pending. Names that are pending on all ranks are reduced, and ranks
    compare the remaining names in another round.
    """
    waiting = [tuple(names) for names in columns["waiting"]]
    have_all_ended = all(columns["is_last"])
    found = []
    if have_all_ended or not set.intersection(*map(set, waiting)):
        found = differing(waiting, "F46", name="names of an epoch")
    if have_all_ended and len(set(columns["local_values"])) > 1:
        found.append(Finding("F56", "logged values", name="logged values"))
    return found


def compare_logged(columns: Columns) -> list[Finding]:
    """F82, F55: logged means that differ from the mean over all ranks, and monitored values that differ between ranks."""
    found = []
    for column in columns:
        if column.startswith(MEAN):
            found += _wrong_mean(column.removeprefix(MEAN), columns)
    if len(set(columns["monitors"])) > 1:  # ranks monitor different values, which cannot be matched
        return found
    for column, values in columns.items():
        if column.startswith(MONITORED):
            found += _different_values(column.removeprefix(MONITORED), values)
    return found


def _wrong_mean(name: str, columns: Columns) -> list[Finding]:
    """Compare the logged value of rank 0 with the true mean. Reduced values are equal on every rank."""
    totals, rows = columns[SUM + name], columns[ROWS + name]
    value = columns[MEAN + name][0]
    mean = sum(totals) / sum(rows)
    allowed = _ROUNDING * sum(map(abs, totals)) / sum(rows)
    if not abs(value - mean) > allowed:  # NaN is a different fault
        return []
    values = tuple(f"{number:g} rows" for number in rows)
    return [Finding.of("F82", name=name, values=values, value=value, mean=mean, rows=sum(rows))]


def _different_values(name: str, values: Sequence[Sequence[float]]) -> list[Finding]:
    """Compare a monitored value. The list of a rank that has not logged it is empty."""
    column = [value[0] if value else None for value in values]
    # not logged on any rank yet, or equal on all ranks
    logged = [value for value in column if value is not None]
    if not logged or (len(logged) == len(column) and _are_equal(logged)):
        return []
    shown = tuple("not logged" if value is None else f"{value:.6g}" for value in column)
    return [Finding.of("F55", ranks=odd_ranks(column), name=name, values=shown)]


def _are_equal(values: Sequence[float]) -> bool:
    if math.isnan(values[0]):
        return all(map(math.isnan, values))
    return all(math.isclose(value, values[0], rel_tol=_EQUAL) for value in values)
