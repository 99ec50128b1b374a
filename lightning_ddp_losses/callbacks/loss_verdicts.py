"""What the ranks' losses and logged values amount to: missing, one or several, other names, other numbers."""

from __future__ import annotations

import math
from typing import Any

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks

_EQUAL = 1e-6  # relative


def without_loss(values: list[Any]) -> Finding:
    """Ranks whose ``training_step`` gave nothing ("None" among the values)."""
    ranks = tuple(rank for rank, value in enumerate(values) if value == "None")
    fix = "Return a loss on every rank; a batch without one can return a zero that depends on the parameters (0 * embeddings.sum())."
    return Finding("F35", "training_step returned None", "a loss on every rank", ranks, "loss", tuple(values), fix)


def loss_meaning(losses: list[float]) -> Finding:
    """Whether the ranks have one loss or each its own."""
    values = tuple(f"{value:.6g}" for value in losses)
    if max(losses) - min(losses) <= _EQUAL * max(map(abs, losses)):
        return Finding("F56", "the loss is that of all ranks together, one number", name="loss", values=values)
    mean = sum(losses) / len(losses)
    what = f"each rank has the loss of its own rows; training minimises their mean, {mean:.6g}"
    return Finding("F56", what, name="loss", values=values, fix="Log it with sync_dist=True to see the mean.")


def different_keys(digests: list[float]) -> list[Finding]:
    """Ranks that log other names, by a digest of them."""
    if len(set(digests)) == 1:
        return []
    return [
        Finding(
            "F46",
            "names of logged values that are reduced over ranks",
            "the same on every rank, else values of other names are added up, or ranks wait for ever",
            odd_ranks(digests),
            name="log keys",
            fix="Log the same names on every rank; a value of one rank alone needs sync_dist=False and rank_zero_only=True.",
        )
    ]


def different_values(rows: list[list[float]], names: list[str]) -> list[Finding]:
    """Watched values that are not one number; each row: digest, then for each name whether it is there and its value."""
    found = []
    for place, name in enumerate(names):
        there, values = [row[1 + 2 * place] for row in rows], [row[2 + 2 * place] for row in rows]
        same = all(
            math.isclose(v, values[0], rel_tol=_EQUAL) or (math.isnan(v) and math.isnan(values[0])) for v in values
        )
        if len(set(there)) == 1 and (same or not there[0]):
            continue
        column = [v if t else None for v, t in zip(values, there, strict=True)]
        shown = tuple("not logged" if v is None else f"{v:.6g}" for v in column)
        fix = f'Log it with sync_dist=True: self.log("{name}", ..., sync_dist=True).'
        what = f"`{name}`, which a callback or scheduler watches"
        found.append(Finding("F55", what, "one value on all ranks", odd_ranks(column), name, shown, fix))
    return found
