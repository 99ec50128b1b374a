"""Losses of sentence-transformers on texts of several vectors, over all ranks: value and gradients of theirs in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.doors import max_sim
from tests.fits import grads_of
from tests.integrations.encoders import columns, sentence_model
from tests.integrations.test_any_sentence_loss import nothing, scores, without_rounding
from tests.oracle import Found, Place, assert_close, parity

ROWS = [(8, 8), (10, 6), (0, 7), (3, 0, 5)]


class Vectors(nn.Module):
    """An encoder that gives a vector for each token. The last ones of a text do not count, nor do some inside."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.encoder = sentence_model(path)[0]

    def forward(self, features: dict[str, Tensor], task: str | None = None) -> dict[str, Tensor]:
        found = self.encoder(features)
        counts = found["attention_mask"].bool() & (features["input_ids"] % 5 != 0)
        counts[:, 0] = True
        return {"token_embeddings": found["token_embeddings"], "attention_mask": counts}


def theirs(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    import sentence_transformers.multi_vector_encoder.losses as losses

    return lambda model: getattr(losses, name)(model, **options)


def in_pairs(queries: Tensor, documents: Tensor, *, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    """MaxSim of each query with its own documents in the dtype of the vectors, (B, n). Theirs is float32."""
    found = [
        max_sim.max_sim(query, own, queries_mask=query_mask, documents_mask=own_mask)
        for query, own, query_mask, own_mask in zip(
            queries.split(1), documents.split(1), queries_mask.split(1), documents_mask.split(1), strict=True
        )
    ]
    return torch.cat(found)


def of_a_pair(queries: Tensor, documents: Tensor, *, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    masks = {"queries_mask": queries_mask, "documents_mask": documents_mask.unsqueeze(1)}
    return in_pairs(queries, documents.unsqueeze(1), **masks).squeeze(1)


def xtr(*args: Any, **kwargs: Any) -> Tensor:
    from sentence_transformers.multi_vector_encoder.scoring import XTRScores

    return XTRScores(top_k=6)(*args, **kwargs)


def cases() -> dict[str, tuple[Callable[[Any], nn.Module], int, Callable[[int], Tensor | None], float]]:
    """By name: the loss, its columns, its labels, and the tolerance: their own scores are float32."""
    ranking, cached = "MultiVectorMultipleNegativesRankingLoss", "CachedMultiVectorMultipleNegativesRankingLoss"
    wide = {"similarity_fct": max_sim.max_sim, "scale": 0.3}
    return {
        "ranking": (theirs(ranking, **wide), 2, nothing, 1e-9),
        "ranking, negatives": (theirs(ranking, **wide, score_mini_batch_size=3), 4, nothing, 1e-9),
        "ranking, their score": (theirs(ranking, scale=0.3), 3, nothing, 1e-5),
        "ranking, XTR": (theirs(ranking, similarity_fct=xtr), 3, nothing, 1e-5),
        "cached": (theirs(cached, **wide, mini_batch_size=3), 3, nothing, 1e-9),
        "distilled": (
            theirs("MultiVectorDistillKLDivLoss", similarity_fct=in_pairs),
            4,
            lambda rows: scores(rows, 3) * 9,
            1e-9,
        ),
        "margins": (
            theirs("MultiVectorMarginMSELoss", similarity_fct=of_a_pair),
            4,
            lambda rows: scores(rows, 3),
            1e-9,
        ),
    }


def step(model: Any, loss: nn.Module, features: list[dict[str, Tensor]], labels: Tensor | None) -> dict[str, Tensor]:
    value = loss(features, labels)
    (value * 0.5).backward()
    return {"value": value.detach().double(), **grads_of(model)}


def play(place: Place, path: str, name: str) -> Found:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    make, number, labels, _ = cases()[name]
    model, rows = Vectors(path), sum(place.sizes)
    loss = make(model)
    if not place.alone:
        loss = over_all_ranks(loss)
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    all_labels = labels(rows)
    own_labels = None if all_labels is None else place.own(all_labels)
    return step(model, loss, columns(rows, number, place.part), own_labels)


def compare(found: Found, truth: Found, rtol: float) -> None:
    found, truth = map(functools.partial(without_rounding, least=rtol / 100), (found, truth))
    assert_close(found, truth, rtol=rtol)


@pytest.mark.filterwarnings("ignore:MultiVectorDistillKLDivLoss")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
@pytest.mark.parametrize("name", cases())
def test_one_process(pool: RankPool, encoder_path: str, name: str) -> None:
    for rows in ROWS:
        parity(pool, play, rows, encoder_path, name, rtol=cases()[name][3], every_rank=True, compare=compare)


def with_other_columns(path: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    model = Vectors(path)
    loss = over_all_ranks(cases()["ranking"][0](model))
    loss(columns(4, 2 + dist.get_rank()), None)


def test_a_rank_with_more_negatives(pool: RankPool, encoder_path: str) -> None:
    assert_errors(pool.errors(2, with_other_columns, encoder_path), "documents 1", of="RankMismatchError")
