"""Pictures of what `tiled_rows` and `large` recorded: time and memory against the global batch and against the classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.records import RESULTS, Row, read
from benchmarks.tiled_rows import LOSSES, MEMORY_TABLE, SIZES, TIME_TABLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SOURCES", "draw"]

SOURCES = ("tiled_rows", "large")
Points = dict[str, list[tuple[float, float]]]
STYLES = {  # curves: colour, marker, line, size of the marker
    "this package": ("tab:blue", "o", "-", 6),
    "this package, classes divided": ("tab:blue", "o", "-", 6),
    "this package, whole weight in chunks": ("tab:cyan", "v", "-", 6),
    "open_clip's computation, as many pairs": ("tab:green", "D", "--", 5),
    "PML efficient (another gradient)": ("tab:orange", "^", "--", 5),
    "PML exact": ("tab:red", "s", "--", 5),
    "PML with DDP": ("tab:red", "s", "--", 5),
}
NAMES = {
    "ours": "this package",
    "open_clip": "open_clip's computation, as many pairs",
    "PML efficient": "PML efficient (another gradient)",
    "PML exact": "PML exact",
}
CLASSES = {"divided": "this package, classes divided", "chunked": "this package, whole weight in chunks"}


def draw() -> None:
    """Write the pictures, of whatever is recorded."""
    pairs, large = read("tiled_rows"), read("large")
    kinds = [*LOSSES, "CLIP"]
    times = {kind: _times(kind, pairs, large) for kind in kinds}
    memory = {kind: _memory(kind, pairs, large) for kind in kinds}
    what = "Forward and backward, 2 ranks, dim 128, float32"
    _figure("batch_time.png", f"{what}: time of a step", times, "global batch, rows", "ms")
    _figure("batch_memory.png", f"{what}: extra peak memory of a rank", memory, "global batch, rows", "MiB")
    classes = {"time of a step": _classes(large, "ms"), "extra peak memory of a rank": _classes(large, "peak_MiB")}
    title = "ArcFace, global batch 256, 2 ranks, dim 128, float32: forward, backward, mean of the gradient"
    _figure("classes.png", title, classes, "classes", ("ms", "MiB, the weight's gradient included"))


def _times(kind: str, pairs: Sequence[Row], large: Sequence[Row]) -> Points:
    if kind == "CLIP":
        return _clip(large, "ms")
    rows = [row for row in pairs if row["table"] == TIME_TABLE and row["loss"] == kind]
    curves: Points = {}
    for who, label in NAMES.items():
        curves[label] = _sorted((row["global_batch"], row.get(f"{who}_ms")) for row in rows)
    return curves


def _memory(kind: str, pairs: Sequence[Row], large: Sequence[Row]) -> Points:
    if kind == "CLIP":
        return _clip(large, "peak_MiB")
    memory = [row for row in pairs if row["table"] == MEMORY_TABLE]
    rows = [row for row in memory if row["loss"] == kind]
    if rows:  # open_clip computes the same beside every loss
        rows += [row for row in memory if row["who"] == "open_clip"][:1]
    curves: Points = {}
    for row in rows:
        curves[NAMES[row["who"]]] = _sorted((size, row.get(f"at_{size}")) for size in SIZES)
    return curves


def _clip(large: Sequence[Row], unit: str) -> Points:
    rows = [row for row in large if row.get("ours") == "tiles"]
    return {
        NAMES["ours"]: _sorted((row["size"], row[f"ours_{unit}"]) for row in rows),
        NAMES["open_clip"]: _sorted((row["size"], row[f"usual_{unit}"]) for row in rows),
    }


def _classes(large: Sequence[Row], unit: str) -> Points:
    rows = [row for row in large if row.get("ours") in CLASSES]
    usual = {row["size"]: row[f"usual_{unit}"] for row in rows}  # measured beside each of ours: one of them
    curves: Points = {}
    for how, label in CLASSES.items():
        ours = [row for row in rows if row["ours"] == how]
        curves[label] = _sorted((row["size"], row[f"ours_{unit}"]) for row in ours)
    curves["PML with DDP"] = _sorted(usual.items())
    return curves


def _sorted(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return sorted((x, y) for x, y in points if y is not None)


def _figure(name: str, title: str, panels: dict[str, Points], across: str, up: str | tuple[str, ...]) -> None:
    from matplotlib.figure import Figure

    # only what was recorded
    panels = {head: curves for head, curves in panels.items() if any(curves.values())}
    if not panels:
        return
    # a grid of at most three panels in a row
    wide = min(len(panels), 3)
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(4.2 * wide, 3.4 * high + 1.0), layout="constrained")
    cells = figure.subplots(high, wide, squeeze=False).ravel().tolist()
    ups = (up,) * len(panels) if isinstance(up, str) else up
    marks: dict[str, Any] = {}
    for cell, (head, curves), unit in zip(cells, panels.items(), ups, strict=False):
        marks.update(_panel(cell, curves))
        cell.set_title(head)
        cell.set_xlabel(across)
        cell.set_ylabel(unit)
    for cell in cells[len(panels) :]:
        cell.remove()
    # one legend for all panels
    figure.suptitle(title, fontsize=11)
    labels = [label for label in STYLES if label in marks]
    handles = [marks[label] for label in labels]
    columns = 4 if wide > 2 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(RESULTS / name, dpi=110)


def _panel(axis: Axes, curves: Points) -> dict[str, Any]:
    marks = {}
    for label, points in curves.items():
        if points:
            color, marker, line, size = STYLES[label]
            x, y = zip(*points, strict=True)
            (marks[label],) = axis.plot(x, y, color=color, marker=marker, linestyle=line, markersize=size)
    xs = {x for points in curves.values() for x, _ in points}
    base = 2 if all(_is_power_of_two(x) for x in xs) else 10
    axis.set_xscale("log", base=base)
    axis.set_yscale("log")
    ticks = sorted(xs)
    axis.set_xticks(ticks, [_short(x) for x in ticks], fontsize=8)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(_plain())
    axis.grid(alpha=0.3)
    return marks


def _is_power_of_two(number: float) -> bool:
    return int(number) & (int(number) - 1) == 0


def _short(number: float) -> str:
    if number >= 1_000_000 and number % 1_000_000 == 0:
        return f"{number / 1e6:.0f} M"
    return f"{number:,.0f}"


def _plain() -> Callable[[float, Any], str]:
    return lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"
