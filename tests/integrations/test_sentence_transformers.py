"""Losses of sentence-transformers on ranks: value and gradient of theirs in one process on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.answers import assert_errors
from tests.fits import grads_of, weights_of
from tests.integrations.encoders import DIM, columns, fit_in_their_trainer, sentence_model, sentences
from tests.integrations.test_hf_trainer import ranks_of_accelerate
from tests.oracle import Found, assert_close, own

ROWS = [(6, 6), (6, 10), (0, 7), (3, 0, 5)]
FOUR_WAYS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ranking": ("MultipleNegativesRankingLoss", {}),
    "ranking, all directions": ("MultipleNegativesRankingLoss", {"directions": FOUR_WAYS, "scale": 7.0}),
    "ranking, hard": (
        "MultipleNegativesRankingLoss",
        {"hardness_mode": "all_negatives", "hardness_strength": 3.0, "gather_across_devices": True},
    ),
    "symmetric": ("MultipleNegativesSymmetricRankingLoss", {}),
    "cached, 1": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 16}),
    "cached, 3": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3}),
    "cached, all directions": ("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3, "directions": FOUR_WAYS}),
    "guided": ("GISTEmbedLoss", {"temperature": 0.1, "margin": 0.05}),
}


def classes(*, ours: bool) -> Any:
    if ours:
        import lightning_ddp_losses.integrations.sentence_transformers as found
    else:
        import sentence_transformers.sentence_transformer.losses as found
    return found


def build(path: str, case: str, *, ours: bool, matryoshka: bool) -> tuple[Any, Any]:
    name, options = CASES[case]
    model = sentence_model(path)
    if name == "GISTEmbedLoss":
        options = {**options, "guide": sentence_model(path, seed=1).requires_grad_(False)}
    if not ours:
        options = {key: value for key, value in options.items() if key != "gather_across_devices"}
    loss = getattr(classes(ours=ours), name)(model, **options)
    if matryoshka:
        loss = classes(ours=False).MatryoshkaLoss(model, loss, [DIM, DIM // 2], [1.0, 0.3])
    return model, loss


def put_in(loss: nn.Module, model: nn.Module, wrapped: DistributedDataParallel) -> None:
    """As their trainer does."""
    wrapped.get_embedding_dimension = model.get_embedding_dimension
    for module in [*loss.modules()]:
        if getattr(module, "model", None) is model and module is not wrapped:
            module.model = wrapped


def step(model: nn.Module, loss: nn.Module, features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    value = loss(features, None)
    (value * 0.5).backward()
    return {"value": value.detach(), **grads_of(model)}


@pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated")
def in_one_process(
    path: str, case: str, rows: int, number: int, *, matryoshka: bool = False, ours: bool = False
) -> Found:
    model, loss = build(path, case, ours=ours, matryoshka=matryoshka)
    return step(model, loss, columns(rows, number))


def on_ranks(
    path: str, case: str, rows: tuple[int, ...], number: int, matryoshka: bool
) -> tuple[dict[str, Tensor], int]:
    model, loss = build(path, case, ours=True, matryoshka=matryoshka)
    wrapped = DistributedDataParallel(model)
    put_in(loss, model, wrapped)
    buckets = []

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types, not with their names
        buckets.append(bucket.is_last())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    count.reduces = "mean"  # type: ignore[attr-defined]
    wrapped.register_comm_hook(None, count)
    return step(model, loss, columns(sum(rows), number, own(rows))), sum(buckets)


IGNORED = pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated")


@IGNORED
@pytest.mark.parametrize("matryoshka", [False, True], ids=["alone", "matryoshka"])
@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_one_process(pool: RankPool, encoder_path: str, case: str, negatives: int, matryoshka: bool) -> None:
    number = 2 + (min(negatives, 1) if case == "guided" else negatives)  # theirs takes one at most
    for rows in ROWS:
        truth = in_one_process(encoder_path, case, sum(rows), number, matryoshka=matryoshka)
        for found, reductions in pool.run(len(rows), on_ranks, encoder_path, case, rows, number, matryoshka):
            assert_close(found, truth)
            assert reductions == 1, "one reduction of gradients a step"


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    logits = 20 * normalize(queries) @ normalize(documents).T
    return cross_entropy(logits, torch.arange(len(queries)))


def test_the_formula_is_the_known_one(pool: RankPool, encoder_path: str) -> None:
    model = sentence_model(encoder_path)
    queries, *documents = (model(column)["sentence_embedding"] for column in columns(16, 4))
    value = naive(queries, torch.cat(documents))
    (value * 0.5).backward()
    truth = {"value": value.detach(), **grads_of(model)}
    for found, _ in pool.run(2, on_ranks, encoder_path, "ranking", (6, 10), 4, False):
        assert_close(found, truth)


@IGNORED
@pytest.mark.parametrize("case", CASES)
def test_without_ranks_it_is_theirs(encoder_path: str, case: str) -> None:
    assert_close(in_one_process(encoder_path, case, 6, 3, ours=True), in_one_process(encoder_path, case, 6, 3))
    found, theirs = (build(encoder_path, case, ours=ours, matryoshka=False)[1] for ours in (True, False))
    assert found.citation == theirs.citation
    guide = {"guide": None}  # a module
    settings, expected = ({**loss.get_config_dict(), **guide} for loss in (found, theirs))
    assert settings == expected | ({"gather_across_devices": False} if "gather_across_devices" in expected else {})


def evaluated(path: str, rows: tuple[int, ...]) -> Tensor:
    _, loss = build(path, "cached, 3", ours=True, matryoshka=False)
    with torch.no_grad():
        return loss(columns(sum(rows), 2, own(rows)), None)


def test_evaluation(pool: RankPool, encoder_path: str) -> None:
    truth = in_one_process(encoder_path, "cached, 3", 13, 2)["value"]
    for found in pool.run(2, evaluated, encoder_path, (4, 9)):
        assert_close({"value": found}, {"value": truth})


def with_other_options(path: str, case: str) -> None:
    _, loss = build(path, case, ours=True, matryoshka=False)
    if case == "guided":
        loss.margin = 0.1 * dist.get_rank()
    else:
        loss.scale = 20.0 + dist.get_rank()
    loss(columns(4, 2), None)


@pytest.mark.parametrize("case", ["ranking", "ranking, all directions", "cached, 3", "guided"])
def test_options_that_differ(pool: RankPool, encoder_path: str, case: str) -> None:
    assert_errors(
        pool.errors(2, with_other_options, encoder_path, case),
        "margin" if case == "guided" else "scale': 21.0",
        of="RankMismatchError",
    )


def with_one_column_on_a_rank(path: str, case: str) -> None:
    _, loss = build(path, case, ours=True, matryoshka=False)
    loss(columns(4, 2)[: 1 + dist.get_rank()], None)


@pytest.mark.parametrize("case", ["ranking", "guided"])
def test_a_rank_without_positives(pool: RankPool, encoder_path: str, case: str) -> None:
    errors = pool.errors(2, with_one_column_on_a_rank, encoder_path, case)
    words = "column 0 of guide" if case == "guided" else "column 1"
    # the same error by name on both: neither waits for the other until the time is over
    assert all(error.type == "RankMismatchError" and words in error.message for error in errors)


def weighed_differently(path: str) -> None:
    _, loss = build(path, "ranking, all directions", ours=True, matryoshka=False)
    for _ in range(2):
        (loss(columns(4, 2), None) * (1.0 + dist.get_rank())).backward()


def test_coefficients_that_differ(pool: RankPool, encoder_path: str) -> None:
    assert_errors(
        pool.errors(2, weighed_differently, encoder_path), "coefficient of the last backward", of="RankMismatchError"
    )


@pytest.mark.parametrize("disabled", [False, True])
def test_patch(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    ours, theirs = classes(ours=True), classes(ours=False)
    names = list(dict.fromkeys(name for name, _ in CASES.values()))
    for name in names:  # what the patch changes comes back after the test
        monkeypatch.setattr(theirs, name, getattr(theirs, name))
    monkeypatch.setenv("LIGHTNING_DDP_LOSSES_DISABLE", "1" if disabled else "0")
    assert ours.patch_sentence_transformers() == ([] if disabled else names)
    assert all((getattr(theirs, name) is getattr(ours, name)) != disabled for name in names)


def theirs_on_ranks(path: str, rows: tuple[int, ...], gather: bool) -> Tensor:
    model = sentence_model(path)
    loss = classes(ours=False).MultipleNegativesRankingLoss(model, gather_across_devices=gather)
    wrapped = DistributedDataParallel(model)
    put_in(loss, model, wrapped)
    loss(columns(sum(rows), 2, own(rows)), None).backward()
    return torch.cat([grad.flatten() for grad in grads_of(model).values()])


def cosine_of_theirs(pool: RankPool, path: str, rows: tuple[int, ...], *, gather: bool) -> float:
    truth = in_one_process(path, "ranking", sum(rows), 2)
    truth.pop("value")
    expected = torch.cat([grad.flatten() for grad in truth.values()])
    found = pool.run(2, theirs_on_ranks, path, rows, gather)[0]
    return torch.nn.functional.cosine_similarity(found, expected, dim=0).item()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_theirs_is_what_the_page_says(pool: RankPool, encoder_path: str) -> None:
    assert cosine_of_theirs(pool, encoder_path, (6, 6), gather=False) < 0.99, "negatives of one rank"
    assert cosine_of_theirs(pool, encoder_path, (6, 6), gather=True) == pytest.approx(1, abs=1e-9)
    with pytest.raises(RankFailure, match="SIGABRT"):
        pool.run(2, theirs_on_ranks, encoder_path, (6, 10), True)


def with_their_trainer(
    path: str, folder: str, case: str, rows: int, ours: bool
) -> tuple[dict[str, Tensor], list[float]]:
    from datasets import Dataset

    words = sentences(24)
    data = Dataset.from_dict({"anchor": words[:12], "positive": words[12:]})
    with ranks_of_accelerate():
        model, loss = build(path, case, ours=ours, matryoshka=False)
        trainer = fit_in_their_trainer(model, loss, data, folder, rows)
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return weights_of(model), logged


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # what transformers gives DDP
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")  # torch says it once
@pytest.mark.parametrize("case", ["ranking", "cached, 3"])
def test_their_trainer(pool: RankPool, encoder_path: str, tmp_path: Path, case: str) -> None:
    truth, values = pool.run(1, with_their_trainer, encoder_path, str(tmp_path), case, 6, False)[0]
    for found, logged in pool.run(2, with_their_trainer, encoder_path, str(tmp_path), case, 3, True):
        assert_close(found, truth)
        assert logged == pytest.approx(values, rel=1e-5)
