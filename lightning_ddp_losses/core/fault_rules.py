"""Rules that checks and the audit share: which fault explains the measurements of all ranks.

They operate on numbers and names, and do not access a trainer, module or process group. A check applies them to facts of a running fit, the
audit to its records. The texts of a fault are in the table of faults (``faults.py``).

Legend: ``W`` ranks. A ratio is the norm of a gradient over the norm in a single process, or over the derivative of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lightning_ddp_losses.core.autograd_graph import FAULTS_AFTER_WRAP

Scale: TypeAlias = Literal["right", "cut", "large", ""]
"""A known ratio: 1, 1/W (a gather cut the graph), or W (a factor where none is due). Empty for any other ratio."""

FAULT_OF_CUT = {"gather": "F20", "reduce": "F23"}
"""The fault of a collective that cuts the graph, by its kind."""


def scale_of(ratio: float | None, world: int, tolerance: float) -> Scale:
    """Return the known ratio that equals a ratio up to a relative tolerance, or an empty text."""
    known: dict[Scale, float] = {"right": 1.0, "cut": 1 / world, "large": float(world)}
    for scale, value in known.items():
        if ratio is not None and math.isclose(ratio, value, rel_tol=tolerance):
            return scale
    return ""


def fault_of_scale(
    scale: Scale, *, is_multiplied: bool = False, has_metrics: bool = False, kind: str = "gather"
) -> str:
    """Return the fault of a part of the model whose gradient has a known ratio, or an empty text.

    Args:
        scale: Its ratio.
        is_multiplied: True if the loss is multiplied by W, to compensate for a cut graph elsewhere.
        has_metrics: True if the loss is a metric of torchmetrics.
        kind: Kind of the collective that cuts the graph.
    """
    if scale == "large":
        return "F21"
    if is_multiplied:  # a part that is not cut is W times too large
        return "F24" if scale == "right" else ""
    if scale != "cut":
        return ""
    return "F27" if has_metrics else FAULT_OF_CUT[kind]


def fault_of_unreduced(
    *,
    is_registered: bool = True,
    event: str = "",
    has_backward: bool = True,
    has_forward: bool = True,
    is_automatic: bool = True,
) -> str:
    """Return the fault that prevents DDP from reducing the gradient of a parameter, or an empty text.

    Args:
        is_registered: False if the parameter is in an optimizer but not in the module.
        event: What happened to it after the wrap.
        has_backward: False if a step used a backward that bypassed DDP.
        has_forward: False if a forward bypassed DDP.
        is_automatic: False if the module uses manual optimisation.
    """
    if not is_registered:
        return "F02"
    fault = FAULTS_AFTER_WRAP.get(event.partition(" ")[0])
    if fault:
        return fault
    if not has_backward:
        return "F09" if is_automatic else "F10"
    return "" if has_forward else "F09"


def faults_of_optimizers(columns: Mapping[str, Sequence[object]]) -> dict[str, str]:
    """Return the faults of optimizers that differ between ranks, by the column that shows each fault.

    Args:
        columns: ``steps`` (numbers of steps, or a value that a skipped step changes), ``scale`` (of the gradients) and ``settings``, as far
            as they are known, each with one value per rank. Without a gradient scaler the scales are equal.
    """
    faults = {"steps": "F14", "scale": "F15", "settings": "F17"}
    found = {}
    for name, fault in faults.items():
        column = columns.get(name, ())
        if any(value != column[0] for value in column):
            found[name] = fault
    # different numbers of steps also cause different scales and settings. A scaler that skips a step changes its scale: if scales are
    # equal, the program made more steps, or fewer, on some ranks
    if "steps" in found:
        is_of_scaler = "scale" in found or "scale" not in columns
        return {"steps": "F14" if is_of_scaler else "F37"}
    return found


def fault_of_same_rows(*, is_iterable: bool) -> str:
    """Return the fault of ranks that draw the same rows: from an iterable dataset that is not divided, or without a sampler."""
    return "F71" if is_iterable else "F67"


def fault_of_memory(unordered: Sequence[object]) -> str:
    """Return the fault of a memory of rows that differs between ranks: the same rows in a different order, or different rows.

    Args:
        unordered: Contents of the memory without their order, by rank.
    """
    is_same = all(rows == unordered[0] for rows in unordered)
    return "F26" if is_same else "F64"


def agree_at(by_rank: Sequence[Mapping[str, Mapping[str, Any]]], place: str, name: str) -> bool | None:
    """Return whether all ranks had the same bits of a gradient at one place on its way to the step, or None if a rank has no record.

    Args:
        by_rank: Fingerprints of each rank by place, then by name.
        place: Place on the way.
        name: Name of the parameter.
    """
    values = [places.get(place, {}).get(name) for places in by_rank]
    if None in values:
        return None
    return all(value == values[0] for value in values)


def first_difference(columns: Sequence[Sequence[object]]) -> int | None:
    """Return the index of the first column whose values differ between ranks (a step, or a position), or None."""
    for place, column in enumerate(columns):
        if any(value != column[0] for value in column):
            return place
    return None


def starts_at_own_rows(rows: Sequence[int], columns: Sequence[int], first: Sequence[int]) -> bool:
    """Return whether targets count the rows of one rank, although the logits' columns are the rows of all ranks.

    Args:
        rows: Rows of the logits, by rank.
        columns: Columns of the logits, by rank.
        first: Target of the first row, by rank. Subsequent targets count up from it.
    """
    if len(rows) < 2 or any(number != sum(rows) for number in columns):
        return False
    return rows[0] > 0 and not any(first)
