"""Retrieval metrics straight from their definitions: float64, one query at a time, no code of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """One row of the data set, in the order in which one process has them."""

    embedding: Tensor
    label: int
    index: int
    role: str


def distances(kind: str, query: Tensor, rows: Tensor) -> list[float]:
    """How far each of some rows is from a query."""
    if kind in ("CosineSimilarity", "CubeOfCosine"):
        found = -(rows @ query) / (query.norm() * rows.norm(dim=1))
    elif kind == "DotProductSimilarity":
        found = -(rows @ query)
    elif kind == "SNRDistance":
        found = (query - rows).var(1) / query.var()
    else:
        found = (query - rows).norm(dim=1)
    return found.tolist()


def once(rows: Sequence[Row]) -> list[Row]:
    """The first row of each index."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row.index, row)
    return list(first.values())


def value(name: str, hits: list[bool], labels: list[int], own_label: int) -> float:
    """One metric of one query. ``hits`` and ``labels`` are those of the whole gallery, nearest first."""
    relevant = sum(hits)
    kind, _, number = name.replace("precision_at_1", "precision@1").partition("@")
    k = int(number or len(hits))
    if kind == "precision":
        return sum(hits[:k]) / k
    if kind == "hit_rate":
        return float(any(hits[:k]))
    if kind == "recall":
        return sum(hits[:k]) / relevant
    if kind == "mrr":
        return 1 / (1 + hits.index(True)) if any(hits[:k]) else 0.0
    if kind == "ndcg":
        found = sum(hit / math.log2(2 + place) for place, hit in enumerate(hits[:k]))
        return found / sum(1 / math.log2(2 + place) for place in range(min(k, relevant)))
    if kind == "knn_accuracy":
        votes = {label: labels[:k].count(label) for label in labels[:k]}  # nearest first
        return float(max(votes, key=lambda label: votes[label]) == own_label)
    if kind == "r_precision":
        return sum(hits[:relevant]) / relevant
    assert kind == "map_at_r"
    return sum(hits[place] * sum(hits[: place + 1]) / (place + 1) for place in range(relevant)) / relevant


def retrieval(rows: Sequence[Row], names: Sequence[str], kind: str, *, shared_index: bool = True) -> dict[str, float]:
    """The mean of each metric over the queries that have a relevant row, and how many have none."""
    queries = once([row for row in rows if row.role != "gallery"])
    gallery = once([row for row in rows if row.role != "query"])
    found: dict[str, list[float]] = {name: [] for name in names}
    left_out = 0
    for query in queries:
        leaves_out = shared_index or query.role == "both"
        others = [row for row in gallery if not (leaves_out and row.index == query.index)]
        away = distances(kind, query.embedding, torch.stack([row.embedding for row in others]))
        order = sorted(range(len(others)), key=lambda place: (away[place], others[place].index))
        labels = [others[place].label for place in order]
        hits = [label == query.label for label in labels]
        if not any(hits):
            left_out += 1
            continue
        for name in names:
            found[name].append(value(name, hits, labels, query.label))
    means = {name: sum(values) / len(values) if values else math.nan for name, values in found.items()}
    return {**means, "left_out": left_out}
