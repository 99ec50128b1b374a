"""Draws an audit: the ratio of each gradient in layer order, the losses, and the rows of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning_ddp_losses.audit.compare import ComparedRow, StepLoss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKS = {
    "exact": ("o", "tab:blue"),
    "wrong scale": ("^", "tab:orange"),
    "wrong direction": ("X", "tab:red"),
    "missing": ("s", "tab:purple"),
    "not finite": ("P", "black"),
}
_NAMED = 40  # parameters whose names fit under the axis
_LOW, _HIGH = 1 / 16, 16.0  # edges of the axis of ratios
_LEGEND_RANKS = 8  # more ranks have no legend of their own


def draw_audit(
    rows: Sequence[ComparedRow],
    losses: Sequence[StepLoss],
    *,
    title: str,
    equal: bool,
    step: int,
    world_size: int,
    name_of: Callable[[str], str],
) -> Figure:
    """Draw an audit.

    Args:
        rows: Gradients of the step that is shown, in layer order.
        losses: One entry for each batch.
        title: One sentence.
        equal: Whether the audit found no difference.
        step: The step that is shown.
        world_size: Number of ranks.
        name_of: The name of a parameter as the user knows it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: drawing needs no display and no global state

    # ratios above, losses and rows below; wider with more names under the axis
    width = min(16.0, max(9.0, 3.0 + 0.32 * min(len(rows), _NAMED)))
    figure = Figure(figsize=(width, 8.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.55, 1])  # type: ignore[misc]
    ratio_axes = above.subplots()
    loss_axes, row_axes = below.subplots(1, 2, width_ratios=[1.4, 1])
    _draw_ratios(ratio_axes, rows, world_size)
    heading = f"Gradients at step {step}, in layer order"
    if _label_parameters(ratio_axes, rows, name_of):
        heading += " (brown: not the encoder's)"
    ratio_axes.set_title(heading, fontsize=10)
    _draw_losses(loss_axes, losses)
    _draw_row_counts(row_axes, losses)
    color = "tab:green" if equal else "tab:red"
    figure.suptitle(title, fontsize=11, wrap=True, color=color)
    return figure


def _draw_ratios(axes: Axes, rows: Sequence[ComparedRow], world_size: int) -> None:
    # a mark for each verdict
    heights = [1.0 if row.noise else _height(row.ratio) for row in rows]
    for verdict, (marker, color) in _MARKS.items():
        at = [i for i, row in enumerate(rows) if row.verdict == verdict and not row.noise]
        if at:
            label = f"{verdict} ({len(at)})"
            axes.scatter(at, [heights[i] for i in at], marker=marker, color=color, s=62, label=label, zorder=3)
    noise = [i for i, row in enumerate(rows) if row.noise]
    if noise:
        label = f"zero up to rounding ({len(noise)})"
        ones = [1.0] * len(noise)
        axes.scatter(noise, ones, s=62, facecolors="white", edgecolors="tab:blue", label=label, zorder=3)
    # a ring where the ranks differ
    disagree = [i for i, row in enumerate(rows) if not row.ranks_agree]
    if disagree:
        label = f"ranks disagree ({len(disagree)})"
        at_ratio = [_height(rows[i].ratio) for i in disagree]
        axes.scatter(disagree, at_ratio, s=190, facecolors="none", edgecolors="black", label=label, zorder=2)
    # ratios that are usual: equal, W times, 1/W
    W = float(world_size)
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle="-", zorder=1)
    axes.axhline(W, color="0.6", linewidth=1.0, linestyle=":", zorder=1)
    axes.axhline(1 / W, color="0.6", linewidth=1.0, linestyle=":", zorder=1)
    for value, name in ((1.0, "1 (one process)"), (W, f"{W:g} (W)"), (1 / W, f"1/{W:g} (1/W)")):
        axes.annotate(name, (1.005, value), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    # axes
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(1.0, *heights, 1 / W) / 1.6, max(1.0, *heights, W) * 1.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylabel("norm on the ranks / norm in one process")
    axes.grid(axis="y", alpha=0.25)
    if rows:
        axes.legend(loc="upper left", fontsize=8, ncols=3, framealpha=0.9)


def _label_parameters(axes: Axes, rows: Sequence[ComparedRow], name_of: Callable[[str], str]) -> bool:
    """Name the parameters under the axis, and write the cosine at those that point elsewhere; say whether any is brown."""
    if len(rows) > _NAMED:
        axes.set_xlabel(f"{len(rows)} parameters")
        return False
    names = [_shortened(name_of(row.parameter)) for row in rows]
    axes.set_xticks(range(len(rows)), names, rotation=40, ha="right", fontsize=8)
    any_brown = False
    for label, row in zip(axes.get_xticklabels(), rows, strict=False):
        if row.owner != "encoder":
            label.set_color("tab:brown")
            any_brown = True
    for i, row in enumerate(rows):
        if row.verdict == "wrong direction" and math.isfinite(row.cosine):
            text, place = f"cos {row.cosine:.2f}", (i, _height(row.ratio))
            axes.annotate(text, place, xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
    return any_brown


def _draw_losses(axes: Axes, losses: Sequence[StepLoss]) -> None:
    from matplotlib.ticker import MaxNLocator

    batches = range(1, len(losses) + 1)
    W = max((len(loss.ranks) for loss in losses), default=0)
    # ranks in one colour, with one entry in the legend
    label: str | None = "each rank"
    for rank in range(W):
        of_rank = [_or_nan(loss.ranks[rank]) for loss in losses]
        axes.plot(batches, of_rank, color="0.65", linewidth=1, marker=".", label=label)
        label = None
    # what they make together, and one process
    means = [_or_nan(loss.mean) for loss in losses]
    axes.plot(batches, means, color="tab:orange", marker="o", label="mean of ranks")
    of_one = [_or_nan(loss.one) for loss in losses]
    axes.plot(batches, of_one, color="tab:blue", marker="x", linestyle="--", label="one process")
    axes.set(xlabel="batch", ylabel="loss")
    axes.set_title("Loss that training_step returned", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _draw_row_counts(axes: Axes, losses: Sequence[StepLoss]) -> None:
    from matplotlib.ticker import MaxNLocator

    batches = list(range(1, len(losses) + 1))
    W = max((len(loss.rows) for loss in losses), default=0)
    # ranks stand on each other, the darkest below
    bottom = [0] * len(batches)
    for rank in range(W):
        counts = [loss.rows[rank] for loss in losses]
        shade = str(0.35 + 0.5 * rank / max(1, W - 1))
        label = f"rank {rank}" if W <= _LEGEND_RANKS else None
        axes.bar(batches, counts, bottom=bottom, color=shade, edgecolor="white", label=label)
        bottom = [below + count for below, count in zip(bottom, counts, strict=True)]
    axes.set(xlabel="batch", ylabel="samples")
    axes.set_title("Samples of each rank", fontsize=10)
    axes.set_ylim(0, max(bottom, default=1) * 1.25)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if 1 <= W <= _LEGEND_RANKS:
        axes.legend(fontsize=8, loc="upper center", ncols=W)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _height(ratio: float) -> float:
    """Place a ratio on the axis; what has none (zero, infinite, NaN) sits at its edge."""
    if math.isnan(ratio):
        return _HIGH
    return min(_HIGH, max(_LOW, ratio))


def _shortened(name: str) -> str:
    return name if len(name) <= 34 else f"...{name[-31:]}"
