"""Rows of a drawn case: one global batch from a seed, cut by rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.oracle import normal

DTYPES = {"float64": torch.float64, "float32": torch.float32}
LAYOUTS = ["plain", "plain", "plain", "transposed", "strided", "offset", "columns", "expanded"]
MAX_RANKS = 4


@dataclass(frozen=True)
class Rows:
    """How a global batch is made.

    Attributes:
        ranks: Rows of each rank.
        dim: Width of a row.
        classes: Labels are below it.
        seed: Of the numbers.
        duplicates: Rows that repeat another one.
        labels: `any`, `one` class for all, or `own`: a class per rank.
        layout: How a rank's tensor lies in memory: one of `LAYOUTS`; `expanded`: all of a rank's rows are one.
        scale: Of the numbers.
    """

    ranks: tuple[int, ...]
    dim: int
    classes: int
    seed: int
    duplicates: int = 0
    labels: str = "any"
    layout: str = "plain"
    scale: float = 1.0


@dataclass(frozen=True)
class RowsCase:
    """A case of which each rank gets rows; what else it is comes after them."""

    rows: Rows

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rows.ranks


def rank_rows(most: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Rows of each rank, at least one in all."""
    sizes = st.lists(st.integers(0, most), min_size=1, max_size=MAX_RANKS).map(tuple)
    return sizes.filter(lambda rows: sum(rows) > 0)


def rows_strategy(most: int = 6) -> st.SearchStrategy[Rows]:
    return st.builds(
        Rows,
        ranks=rank_rows(most),
        dim=st.integers(2, 6),
        classes=st.integers(2, 6),
        seed=st.integers(0, 10_000),
        duplicates=st.sampled_from([0, 0, 0, 1, 3]),
        labels=st.sampled_from(["any", "any", "any", "one", "own"]),
        layout=st.sampled_from(LAYOUTS),
        scale=st.sampled_from([1.0, 1.0, 0.1, 5.0]),
    )


def global_rows(rows: Rows, dtype: torch.dtype, views: int = 1) -> dict[str, Tensor]:
    """Features of each view (G, D), labels (G,)."""
    total = sum(rows.ranks)
    generator = torch.Generator().manual_seed(rows.seed)
    found: dict[str, Tensor] = {}
    for view in range(views):
        features = normal(total, rows.dim, seed=generator) * rows.scale
        for copy in range(min(rows.duplicates, total - 1)):
            features[copy + 1] = features[0]
        if rows.layout == "expanded":
            features = torch.cat([part[:1].expand_as(part) for part in cut(rows, features)])
        found[f"view {view}"] = features.to(dtype)
    labels = torch.randint(rows.classes, (total,), generator=generator)
    if rows.labels == "one":
        labels = torch.zeros_like(labels)
    elif rows.labels == "own":
        owner = torch.repeat_interleave(torch.arange(len(rows.ranks)), torch.tensor(rows.ranks))
        labels = owner % rows.classes
    found["labels"] = labels
    return found


def cut(rows: Rows, tensor: Tensor) -> list[Tensor]:
    """The tensor's rows by rank."""
    ends = [0, *accumulate(rows.ranks)]
    return [tensor[start:stop] for start, stop in pairwise(ends)]


def own(rows: Rows, tensor: Tensor, rank: int) -> Tensor:
    """One rank's rows, laid out as the case says."""
    part = cut(rows, tensor)[rank].clone()
    if rows.layout == "expanded" and part.is_floating_point():
        return part[:1].expand_as(part)
    return lay_out(part, rows.layout)


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers, lying in memory as `layout` says; differentiable."""
    is_matrix = tensor.ndim == 2
    if layout == "transposed" and is_matrix:
        return tensor.t().contiguous().t()
    if layout == "strided":
        return torch.stack([tensor, tensor], dim=tensor.ndim)[..., 0]
    if layout == "offset":
        return torch.cat([torch.zeros_like(tensor[:1]), tensor])[len(tensor[:1]) :]
    if layout == "columns" and is_matrix:
        return torch.cat([tensor, tensor], 1)[:, tensor.shape[1] :]
    return tensor


def options(draw: Any, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """One of each list; None means that the option is left out."""
    drawn = {name: draw(st.sampled_from(values)) for name, values in choices.items()}
    return {name: value for name, value in drawn.items() if value is not None}
