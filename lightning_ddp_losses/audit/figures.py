"""Draws an audit: the ratio of each gradient in layer order, the losses, and the rows of each rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_ddp_losses.audit.report import AuditReport


_MARKS = {
    "exact": ("o", "tab:blue"),
    "wrong scale": ("^", "tab:orange"),
    "wrong direction": ("X", "tab:red"),
    "missing": ("s", "tab:purple"),
    "not finite": ("P", "black"),
}
_NAMED = 40  # parameters whose names fit under the axis
_LOW, _HIGH = 1 / 16, 16.0


def save(report: AuditReport, path: Path) -> None:
    """Write the picture; the suffix says in which format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    draw(report).savefig(path, dpi=130)


def draw(report: AuditReport) -> Figure:
    """The figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: drawing needs no display and no global state

    step = report.first_step or max((row.step for row in report.rows), default=1)
    count = sum(row.step == step for row in report.rows)
    width = min(16.0, max(9.0, 3.0 + 0.32 * min(count, _NAMED)))
    figure = Figure(figsize=(width, 8.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.55, 1])  # type: ignore[misc]
    _ratios(above.subplots(), report, step)
    losses, rows = below.subplots(1, 2, width_ratios=[1.4, 1])
    _losses(losses, report)
    _rows(rows, report)
    figure.suptitle(report.summary(), fontsize=11, wrap=True, color="tab:green" if report.equal else "tab:red")
    return figure


def _ratios(axes: Axes, report: AuditReport, step: int) -> None:
    rows = [row for row in report.rows if row.step == step]
    torn = [i for i, row in enumerate(rows) if not row.ranks_agree]
    for verdict, (marker, color) in _MARKS.items():
        at = [i for i, row in enumerate(rows) if row.verdict == verdict and not row.noise]
        if at:
            heights = [_clip(rows[i].ratio) for i in at]
            axes.scatter(at, heights, marker=marker, color=color, s=62, label=f"{verdict} ({len(at)})", zorder=3)
    noise = [i for i, row in enumerate(rows) if row.noise]
    if noise:
        axes.scatter(
            noise,
            [1.0] * len(noise),
            s=62,
            facecolors="white",
            edgecolors="tab:blue",
            label=f"zero up to rounding ({len(noise)})",
            zorder=3,
        )
    if torn:
        heights = [_clip(rows[i].ratio) for i in torn]
        axes.scatter(
            torn, heights, s=190, facecolors="none", edgecolors="black", label=f"ranks disagree ({len(torn)})", zorder=2
        )
    W = float(report.settings.get("devices", 2))
    for value, name in ((1.0, "1 (one process)"), (W, f"{W:g} (W)"), (1 / W, f"1/{W:g} (1/W)")):
        axes.axhline(
            value, color="black" if value == 1 else "0.6", linewidth=1.0, linestyle="-" if value == 1 else ":", zorder=1
        )
        axes.annotate(name, (1.005, value), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    found = [1.0 if row.noise else _clip(row.ratio) for row in rows] or [1.0]
    low, high = min(*found, 1 / W) / 1.6, max(*found, W) * 1.6
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(-0.7, len(rows) - 0.3)
    axes.set_ylabel("norm on the ranks / norm in one process")
    axes.set_title(f"Gradients at step {step}, in layer order (brown: not the encoder's)", fontsize=10)
    if len(rows) <= _NAMED:
        axes.set_xticks(
            range(len(rows)), [_short(report.name(row.parameter)) for row in rows], rotation=40, ha="right", fontsize=8
        )
    else:
        axes.set_xlabel(f"{len(rows)} parameters")
    for label, row in zip(axes.get_xticklabels(), rows, strict=False):
        label.set_color("tab:brown" if row.owner != "encoder" else "black")
    for i, row in enumerate(rows):
        if row.verdict == "wrong direction" and len(rows) <= _NAMED and math.isfinite(row.cosine):
            axes.annotate(
                f"cos {row.cosine:.2f}",
                (i, _clip(row.ratio)),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    axes.grid(axis="y", alpha=0.25)
    if rows:
        axes.legend(loc="upper left", fontsize=8, ncols=3, framealpha=0.9)


def _losses(axes: Axes, report: AuditReport) -> None:
    from matplotlib.ticker import MaxNLocator

    batches = range(1, len(report.losses) + 1)
    W = max((len(loss.ranks) for loss in report.losses), default=0)
    for rank in range(W):
        values = [_known(loss.ranks[rank]) for loss in report.losses]
        axes.plot(batches, values, color="0.65", linewidth=1, marker=".", label="each rank" if rank == 0 else None)
    axes.plot(
        batches, [_known(loss.mean) for loss in report.losses], color="tab:orange", marker="o", label="mean of ranks"
    )
    axes.plot(
        batches,
        [_known(loss.one) for loss in report.losses],
        color="tab:blue",
        marker="x",
        linestyle="--",
        label="one process",
    )
    axes.set(xlabel="batch", ylabel="loss")
    axes.set_title("Loss that training_step returned", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _rows(axes: Axes, report: AuditReport) -> None:
    from matplotlib.ticker import MaxNLocator

    batches = list(range(1, len(report.losses) + 1))
    bottom = [0] * len(batches)
    W = max((len(loss.rows) for loss in report.losses), default=0)
    for rank in range(W):
        heights = [loss.rows[rank] for loss in report.losses]
        shade = 0.35 + 0.5 * rank / max(1, W - 1)
        axes.bar(
            batches,
            heights,
            bottom=bottom,
            color=str(shade),
            edgecolor="white",
            label=f"rank {rank}" if W <= 8 else None,
        )
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set(xlabel="batch", ylabel="samples")
    axes.set_title("Samples of each rank", fontsize=10)
    axes.set_ylim(0, max(bottom, default=1) * 1.25)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if 1 <= W <= 8:
        axes.legend(fontsize=8, loc="upper center", ncols=W)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _clip(ratio: float) -> float:
    """A height on the axis; what has none (zero, infinite) sits at its edge."""
    if math.isnan(ratio):
        return _HIGH
    return min(_HIGH, max(_LOW, ratio))


def _short(name: str) -> str:
    return name if len(name) <= 34 else f"...{name[-31:]}"
