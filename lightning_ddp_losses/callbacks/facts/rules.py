"""Rules of the checks: pure functions from the columns of all ranks to findings.

A rule does not access the trainer, the module or process groups. Its result depends only on the columns, so every rank has the same
findings. Columns have the names that the reader of the fact uses, and one value for each rank. Some findings are completed afterwards with
texts from all ranks (``RankCheck.describe`` and ``explain``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_ddp_losses.callbacks.facts.fact import Columns
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, differing, odd_ranks
from lightning_ddp_losses.core.fault_rules import fault_of_same_rows, faults_of_optimizers
from lightning_ddp_losses.distributed.shard import ClassShard, first_holders

# ---------------------------------------------------------------------- parameters and gradients

PARTS = "parts of parameters"
"""Name of a finding about parameters that ``fully_shard`` divides, before their names are added."""
SHARD = "classes of "
"""Prefix of the name of a class shard in the name of its column."""


def compare_structures(columns: Columns) -> list[Finding]:
    """F12: names, shapes, dtypes or their order differ."""
    return differing(columns["structure"], "F12", "unnamed", name="parameters")


def compare_starts(columns: Columns) -> list[Finding]:
    """F12, F16, F04: parameters and class shards at the start of training."""
    found = compare_structures(columns)
    if found:  # values cannot be matched
        return found
    for name, ranges in columns.items():
        if not name.startswith(SHARD):
            continue
        shards = [ClassShard(*numbers) for numbers in ranges]
        if first_holders(shards) is None:
            values = tuple(f"classes {shard.start} to {shard.stop} of {shard.num_classes}" for shard in shards)
            found.append(Finding.of("F16", name=name.removeprefix(SHARD), values=values))
    return found + _compare_values(columns, "F04")


def compare_parameters(columns: Columns) -> list[Finding]:
    """F12, SYNC: parameters after a step or at the end."""
    return compare_structures(columns) or _compare_values(columns, "SYNC")


def _compare_values(columns: Columns, fault: str) -> list[Finding]:
    found = []
    values = columns["values"]
    if len(set(values)) > 1:
        found.append(Finding(fault, "parameters", "equal values on all ranks", odd_ranks(values), name="values"))
    # ranks that hold the same part have different values
    odd = odd_replicas(columns["place"], columns["parts"])
    if odd:
        found.append(Finding(fault, PARTS, "equal values on the ranks that hold the same part", odd, name=PARTS))
    return found


def odd_replicas(places: Sequence[object], values: Sequence[object]) -> tuple[int, ...]:
    """Return the ranks whose values differ from the majority of the ranks with the same part."""
    odd: list[int] = []
    for place in set(places):
        ranks = [rank for rank, other in enumerate(places) if other == place]
        their_values = [values[rank] for rank in ranks]
        odd += [ranks[number] for number in odd_ranks(their_values)]
    return tuple(sorted(odd))


def compare_graphs(columns: Columns) -> list[Finding]:
    """F37, before its cause is added: losses do not reach the same parameters."""
    return differing(columns["missing"], "F37", "", name="graph")


def compare_gradients(columns: Columns) -> list[Finding]:
    """F37, F38, SYNC, F79, DETACHED, before their parameters are added: the gradients that a step used."""
    if len(set(columns["stepped"])) > 1:
        return []  # another rule reports which ranks skipped a step
    found = []
    # absent gradients, or gradients that differ
    absent, values = columns["absent"], columns["values"]
    if len(set(absent)) > 1:
        found += differing(absent, "F37", "", name="absent")
    elif columns["expected"][0]:
        found.append(Finding("F38", "missing gradients", name="absent"))
    elif len(set(values)) > 1:
        found.append(Finding("SYNC", "gradients", "equal on all ranks", odd_ranks(values), name="gradients"))
    # faults of a single gradient
    not_finite = ranks_with(columns["not_finite"])
    if not_finite:
        found.append(Finding("F79", "gradients that are not finite", ranks=not_finite, name="finite"))
    if all(columns["detached"]):
        found.append(Finding("DETACHED", "modules without gradient", name="zero"))
    return found


def compare_optimizers(columns: Columns) -> list[Finding]:
    """STEP, F14, F15, F17, F37: steps of the optimizers, their settings and their states."""
    found: list[Finding] = []
    if all(columns["stood_still"]):
        found.append(Finding.of("STEP", name="step"))
    stepped = columns["stepped"]
    faults = faults_of_optimizers({"steps": stepped, "scale": columns["scale"], "settings": columns["settings"]})
    if "steps" in faults:
        texts = [f"{number} optimizer step{'s' * (number != 1)}" for number in stepped]
        return found + differing(stepped, faults["steps"], "desync", name="step", values=texts)
    if "scale" in faults:
        found += differing(columns["scale"], faults["scale"], "desync", name="scale", values=columns["scale"])
    if "settings" in faults:
        found += differing(columns["settings"], faults["settings"], "desync", name="settings")
    return found + differing(columns["state"], "F17", "state", name="state")


def ranks_with(column: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks with a value other than zero."""
    return tuple(rank for rank, value in enumerate(column) if value)


# ---------------------------------------------------------------------- buffers

NOISE = 0.5  # distance by chance in standard deviations, multiplied by the square root of the rows
_MIN_VARIANCE = 1e-12


def compare_forwards(columns: Columns) -> list[Finding]:
    """F41: a second forward of DDP overwrote buffers that the first one used."""
    hashes = columns["buffers"]
    if min(columns["forwards"]) < 2 or len(set(hashes)) == 1:
        return []
    found = Finding.of("F41", ranks=odd_ranks(hashes), name="DistributedDataParallel")
    return [replace(found, step=columns["step"][0], moment=CheckStage.BEFORE_BACKWARD.value)]


BUFFERS, OWN_BUFFERS = "buffers", "own buffers"
"""Names of findings about buffers, before the name of the buffer is added."""


def compare_buffers(columns: Columns) -> list[Finding]:
    """F64, before the name and the kind of the buffer are added."""
    return differing([*zip(columns["number"], columns["values"], strict=True)], "F64", "unnamed", name=BUFFERS)


def compare_own_buffers(columns: Columns) -> list[Finding]:
    """F64, before the name is added: buffers that do not belong to losses, metrics or normalisation layers."""
    column = [*zip(columns["number"], columns["values"], strict=True)]
    return [of_own_buffer(OWN_BUFFERS, column)] if len(set(column)) > 1 else []


def of_own_buffer(name: str, column: Sequence[Any], shapes: tuple[str, ...] = ()) -> Finding:
    """Return the finding about a buffer, given its value on each rank. It is a warning, because the loss may not depend on the buffer."""
    return Finding.of("F64", "own", ranks=odd_ranks(column), name=name, values=shapes, graded="warning")


def compare_metric_states(columns: Columns) -> list[Finding]:
    """F52: metrics with states that cannot be gathered. There is a column for each state, where 0 matches any other value."""
    states = {name: column for name, column in columns.items() if name != "names"}
    if len(set(columns["names"])) > 1:  # ranks have different metrics, which cannot be matched
        return []
    # return one finding for each metric, with the names of its states that differ
    differing_states: dict[str, list[str]] = {}
    for name, column in states.items():
        if len(set(column) - {0}) > 1:
            metric = name.rpartition(".")[0]
            differing_states.setdefault(metric, []).append(name)
    by_metric = differing_states.values()
    return [Finding.of("F52", ranks=odd_ranks(states[names[0]]), name=", ".join(names)) for names in by_metric]


def compare_norms(columns: Columns) -> list[Finding]:
    """F59: the distance of batch-norm statistics exceeds the tolerance and the distance by chance."""
    distances = norm_distances(columns["means"], columns["variances"])
    local_rows, labels, rate = columns["rows"], columns["labels"], columns["rate"][0]
    largest, global_rows = max(local_rows), sum(local_rows)
    allowed = max(columns["tolerance"][0], NOISE / max(min(local_rows), 1.0) ** 0.5)
    if max(distances) <= allowed:
        return []
    # numbers for the advice about normalising over all ranks
    advice = {"allowed": allowed, "largest": largest, "global_rows": global_rows, "rate": rate}
    advice["scaled"] = rate * global_rows / max(largest, 1.0)
    unlike = "unknown"
    if any(map(sum, labels)):
        unlike = f"{label_imbalance(labels):.0%} unlike those of all"
    values = tuple(f"{distance:.3g} standard deviations from the mean of all ranks" for distance in distances)
    return [Finding.of("F59", name="batch norm", values=values, unlike=unlike, **advice)]


def norm_distances(
    means_by_rank: Sequence[Sequence[float]], variances_by_rank: Sequence[Sequence[float]]
) -> list[float]:
    """Return the distance of each rank's statistics from their mean over all ranks.

    Means are compared in standard deviations, variances in natural logarithms. The result is the larger of the two, each as the root mean
    square over channels.
    """
    if not means_by_rank[0]:
        return [0.0] * len(means_by_rank)
    means = torch.tensor(means_by_rank, dtype=torch.float64)
    variances = torch.tensor(variances_by_rank, dtype=torch.float64)
    # compare with the mean over ranks
    usual = variances.mean(0).clamp(min=_MIN_VARIANCE)
    of_means = (means - means.mean(0)).square() / usual
    of_variances = (variances.clamp(min=_MIN_VARIANCE) / usual).log().square()
    return [*torch.maximum(of_means.mean(1), of_variances.mean(1)).sqrt().tolist()]


# ---------------------------------------------------------------------- batches

ENDS = "number of batches"
"""Name of a finding about epochs that end on some ranks."""


def compare_batches(columns: Columns) -> list[Finding]:
    """F36, F67, F71, F69, F83, F72: the batches of a step, the order that ranks divide, and random numbers."""
    found: list[Finding] = []
    ranks = range(len(columns["batch"]))
    # an epoch that ends on some ranks only, unless the fit ends here anyway
    if columns["compares_ends"][0]:
        is_last = columns["is_last"]
        texts = [f"batch {columns['batch'][rank]}{', its last' * is_last[rank]}" for rank in ranks]
        found += differing(is_last, "F36", name=ENDS, values=texts)
    # compare batches and orders. The class of a foreign loader is added later
    same = ranks_with(columns["is_same"])
    if same:
        fault = fault_of_same_rows(is_iterable=any(columns["is_iterable"]))
        whose = "all ranks" if len(same) == len(ranks) else "some ranks"
        finding = Finding.of(fault, ranks=same, name="batches", whose=whose, loader="")
        step = max(columns["read_step"])
        found.append(replace(finding, step=step, moment=CheckStage.BEFORE_BACKWARD.value))
    if 0 not in columns["order"]:
        found += differing(columns["order"], "F69", name="order")
    if columns["began_again"][0]:
        place = f"batch {columns['resumed_batch'][0]} of epoch {columns['resumed_epoch'][0]}"
        found.append(Finding.of("F83", name="resumed epoch", place=place))
    # ranks that draw the same numbers, and a draw with rows among them
    if draw_same(columns):
        found.append(Finding.of("F72", name="random numbers"))
    noise = columns["noise"]
    if len(ranks) > 1 and noise[0] and len(set(noise)) == 1:
        found.append(Finding.of("F72", "noise", name="noise", draw="", graded="warning"))
    return found


def draw_same(columns: Columns) -> bool:
    """Return whether all ranks draw, and had the same random states in two steps."""
    now = columns["random_state"]
    before = columns.get("random_state_before", [0])
    is_known = len(now) > 1 and now[0] and before[0]
    return bool(is_known and len(set(now)) == len(set(before)) == 1 and now[0] != before[0])


def label_imbalance(counts_by_rank: Sequence[Sequence[float]]) -> float:
    """Return the largest total variation between a rank's labels and the labels of all ranks, from 0 (equal) to 1 (disjoint)."""
    counts = torch.tensor(counts_by_rank, dtype=torch.float64)
    known = counts[counts.sum(1) > 0]
    if not len(known):
        return 0.0
    distances = known / known.sum(1, keepdim=True) - counts.sum(0) / counts.sum()
    return float(distances.abs().sum(1).max()) / 2


def compare_sizes(columns: Columns) -> list[Finding]:
    """F36, F28, F62: numbers of batches, their sizes if a loss requires equal numbers of rows, and a batch of one row."""
    found = []
    numbers, full, last = columns["batches"], columns["full_size"], columns["last_size"]
    if 0 <= min(numbers) < columns["until_max_steps"][0]:
        found += differing(numbers, "F36", name=ENDS, values=[f"{number} batches" for number in numbers])
    sizes = [*zip(full, last, strict=True)]
    gathers = columns["gathers"]
    if len(set(sizes)) > 1 and len(set(gathers)) == 1 and gathers[0]:
        values = tuple(f"batches of {of_full}, the last of {of_last}" for of_full, of_last in sizes)
        found.append(Finding.of("F28", name="", values=values))
    # only a note, because batch norm over rows and positions accepts a single row
    ranks = tuple(rank for rank, (of_full, of_last) in enumerate(sizes) if of_last == 1 < of_full)
    if ranks and columns["has_batch_norm"][0]:
        ranks = ranks if len(ranks) < len(sizes) else ()
        found.append(Finding.of("F62", ranks=ranks, name="last batch", graded="note"))
    return found


# ---------------------------------------------------------------------- devices


def find_shared_devices(columns: Columns) -> list[Finding]:
    """F73: several ranks use one device. An identity of 0 denotes a device that ranks may share."""
    identities = columns["identity"]
    shared = tuple(rank for rank, own in enumerate(identities) if own and identities.count(own) > 1)
    return [Finding.of("F73", ranks=shared, name="devices")] if shared else []
