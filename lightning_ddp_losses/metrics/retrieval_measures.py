"""Definitions of retrieval metrics: the value of each query, from the relevant rows among its nearest rows.

A row of the gallery is *relevant* to a query if it has the query's label and is not the query itself. Legend: ``n`` queries, ``k`` rows of
the gallery in order, nearest first, ``R`` relevant rows of a query in the whole gallery.

| name | value of a query |
|---|---|
| ``precision@k`` (``precision_at_1`` is ``precision@1``) | relevant rows among the k nearest, over k, even if the gallery has fewer rows |
| ``hit_rate@k`` | 1 if any of the k nearest is relevant. Called recall@k in metric learning |
| ``recall@k`` | relevant rows among the k nearest, over R |
| ``r_precision`` | relevant rows among the R nearest, over R |
| ``map_at_r`` | mean over the R nearest of the precision up to each relevant row, and of 0 for all other rows |
| ``ndcg@k`` | sum of 1 / log2(1 + position) over the relevant rows among the k nearest, over its largest possible value |
| ``mrr`` | 1 / position of the nearest relevant row in the whole gallery |
| ``mrr@k`` | the same, 0 if none of the k nearest is relevant |
| ``knn_accuracy@k`` | 1 if most of the k nearest have the query's label. Ties are broken in favour of the label of the nearest row |

Sources: Musgrave, Belongie, Lim, "A Metric Learning Reality Check" (2020), section 3.2, for ``r_precision`` and ``map_at_r``. Järvelin,
Kekäläinen, "Cumulated gain-based evaluation of IR techniques" (2002), for ``ndcg``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError

_AT_R = ("map_at_r", "r_precision")
_AT_K = ("hit_rate", "knn_accuracy", "mrr", "ndcg", "precision", "recall")
_DEPTH_OF_MRR = 10  # nearest rows that are searched for the nearest relevant one, before rows are counted


class Neighbours(NamedTuple):
    """The nearest rows of some queries.

    Attributes:
        hits: (n, k) bool, true for relevant rows.
        labels: (n, k) int64. Only meaningful for rows that exist.
        exist: (n, k) bool. A gallery may have fewer than k rows.
        own_labels: (n,) int64, labels of the queries.
        relevant: (n,) int64, R, at least 1.
    """

    hits: Tensor
    labels: Tensor
    exist: Tensor
    own_labels: Tensor
    relevant: Tensor


class Measure(NamedTuple):
    """One retrieval metric.

    Attributes:
        name: Name that the user gave.
        kind: Name without k.
        k: Number of nearest rows. If None, R of each query for metrics at R, the whole gallery for ``mrr``.
    """

    name: str
    kind: str
    k: int | None

    @classmethod
    def parse(cls, name: object) -> Measure:
        """Parse a name.

        Raises:
            ConfigurationError: with the available names.
        """
        text = "precision@1" if name == "precision_at_1" else str(name)
        if text in _AT_R or text == "mrr":
            return cls(text, text, None)
        found = re.fullmatch(r"(\w+)@([1-9][0-9]*)", text)
        if found is None or found[1] not in _AT_K:
            numbered = [f"{kind}@k" for kind in _AT_K]
            raise ConfigurationError(
                "EmbeddingRetrieval: metrics",
                expected=f"names out of {', '.join(['precision_at_1', 'mrr', *_AT_R, *numbered])}, with a number from 1 for k",
                got=repr(name),
                fix="Write the number of neighbours into the name, such as recall@10.",
            )
        return cls(str(name), found[1], int(found[2]))

    @property
    def is_at_r(self) -> bool:
        """Whether the R nearest rows of each query are required."""
        return self.kind in _AT_R

    @property
    def counts_rows(self) -> bool:
        """Whether, for a query without a relevant row among its nearest, the position of the next one must be counted."""
        return self.kind == "mrr" and self.k is None

    @property
    def depth(self) -> int:
        """The number of nearest rows that each query requires, apart from R."""
        if self.counts_rows:
            return _DEPTH_OF_MRR
        return self.k or 1

    def values(self, found: Neighbours) -> Tensor:
        """Return the value (n,) of each query, float64. For ``mrr``, 0 if there is no relevant row among the nearest."""
        if self.is_at_r:
            return _values_at_r(found, self.kind)
        k = found.hits.shape[1] if self.k is None else self.k
        hits = found.hits[:, :k]
        if self.kind == "hit_rate":
            return _wide(hits.any(1))
        if self.kind == "mrr":
            return (_wide(hits) / _ordinals(hits)).amax(1)
        if self.kind == "ndcg":
            return _ndcg(hits, found.relevant.clamp(max=k), k)
        if self.kind == "knn_accuracy":
            return _wide(_majority(found.labels[:, :k], found.exist[:, :k]) == found.own_labels)
        count = _wide(hits).sum(1)
        return count / (k if self.kind == "precision" else _wide(found.relevant))


def _wide(values: Tensor) -> Tensor:
    """Return numbers in the widest floating-point dtype that their device supports."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def _ordinals(hits: Tensor) -> Tensor:
    """Return 1, 2, ... (k,)."""
    return _wide(torch.arange(1, hits.shape[1] + 1, device=hits.device))


def _values_at_r(found: Neighbours, kind: str) -> Tensor:
    places = _ordinals(found.hits)
    hits = _wide(found.hits & (places <= found.relevant.unsqueeze(1)))
    if kind == "map_at_r":
        hits = hits * hits.cumsum(1) / places
    return hits.sum(1) / found.relevant


def _ndcg(hits: Tensor, ideal_hits: Tensor, k: int) -> Tensor:
    gains = 1 / _wide(torch.arange(2, k + 2, device=hits.device)).log2()
    ideal = gains.cumsum(0)[ideal_hits - 1]
    return (_wide(hits) * gains[: hits.shape[1]]).sum(1) / ideal


def _majority(labels: Tensor, exist: Tensor) -> Tensor:
    """Return the label (n,) of most rows, with ties broken in favour of the nearest row."""
    votes = []
    for place in range(labels.shape[1]):
        agrees = labels == labels[:, place : place + 1]
        agrees = agrees & exist & exist[:, place : place + 1]
        votes.append(agrees.sum(1))
    # argmax returns the first of equal numbers
    winner = torch.stack(votes, 1).argmax(1, keepdim=True)
    return labels.gather(1, winner).squeeze(1)
