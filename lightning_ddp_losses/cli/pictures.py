"""Draws what a run learned: the loss over the epochs, and the held-out embeddings in two dimensions."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST_POINTS = 4000
_MOST_CLASSES_IN_LEGEND = 20


def read_metrics(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Read a metrics.csv of Lightning's logger as {name: [(epoch, value), ...]}."""
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and row.get("epoch") and name not in {"epoch", "step"}:  # callbacks may log without an epoch
                    columns[name].append((float(row["epoch"]), float(value)))
    return dict(columns)


def draw_loss_curve(metrics: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw train_loss and val_loss over the epochs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.ticker import MaxNLocator

    axes = _axes(path)
    for name, label, color in (("train_loss", "training", "tab:blue"), ("val_loss", "held out", "tab:orange")):
        if name in metrics:
            epochs, values = zip(*metrics[name], strict=True)
            axes.plot([epoch + 1 for epoch in epochs], values, marker="o", markersize=4, label=label, color=color)
    axes.set(xlabel="epochs trained", ylabel="loss (mean over rows)", title="Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    _save(axes, path)


def draw_embedding(embeddings: Tensor, labels: Tensor, path: Path, *, title: str) -> None:
    """Draw rows (G, D) as a t-SNE map by cosine distance, coloured by label; a fixed sample of them where there are many.

    Raises:
        ImportError: matplotlib or scikit-learn is not installed.
    """
    from sklearn.manifold import TSNE

    axes = _axes(path, width=7.4)
    chosen = np.sort(np.random.default_rng(0).permutation(len(labels))[:_MOST_POINTS])
    rows = torch.nn.functional.normalize(torch.flatten(embeddings, 1)[chosen].double()).numpy()
    names = labels[chosen].numpy()
    # on the unit sphere squared Euclidean distance is twice the cosine distance
    perplexity = min(30.0, (len(rows) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="random", random_state=0).fit_transform(rows)
    classes = np.unique(names)
    if len(classes) <= _MOST_CLASSES_IN_LEGEND:
        for position, name in enumerate(classes):
            x, y = points[names == name].T
            palette = "tab10" if len(classes) <= 10 else "tab20"
            axes.scatter(x, y, s=14, color=_color(palette, position), label=str(name), linewidths=0)
        axes.legend(title="class", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    else:
        cloud = axes.scatter(points[:, 0], points[:, 1], c=names, cmap="turbo", s=10, linewidths=0)
        axes.figure.colorbar(cloud, label="class")
    axes.set(xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)", title=title, aspect="equal")
    _save(axes, path)


def _axes(path: Path, width: float = 6.4) -> Axes:
    from matplotlib.figure import Figure  # no pyplot: drawing needs no display and no global state

    path.parent.mkdir(parents=True, exist_ok=True)
    return Figure(figsize=(width, 4.8), layout="constrained").subplots()


def _color(palette: str, position: int) -> tuple[float, ...]:
    from matplotlib import colormaps

    color: tuple[float, ...] = colormaps[palette](position)
    return color


def _save(axes: Axes, path: Path) -> None:
    figure = axes.get_figure(root=True)
    assert figure is not None  # _axes made it
    figure.savefig(path, dpi=130)
