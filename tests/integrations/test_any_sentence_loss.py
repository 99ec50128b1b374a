"""``over_all_ranks`` of any loss of sentence-transformers: value and gradients of theirs in one process on all rows."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close, assert_errors
from tests.counting import CountCollectives
from tests.doors import handshake
from tests.fits import weights_of
from tests.integrations.encoders import DIM, columns, fit_in_their_trainer, sentence_model, sentences
from tests.integrations.test_hf_trainer import ranks_of_accelerate
from tests.integrations.test_sentence_transformers import put_in
from tests.oracle import Found, Place, assert_close, own, parity

ROWS = [(8, 8), (10, 6), (0, 7), (3, 0, 5)]


def scores(rows: int, *shape: int) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def classes(rows: int) -> Tensor:
    return torch.arange(rows) % 3


def binary(rows: int) -> Tensor:
    return (scores(rows) > 0.5).long()


def nothing(rows: int) -> None:
    return None


@dataclass(frozen=True)
class Case:
    """A loss of theirs: how it is made around a model, its columns, and its labels for so many rows."""

    make: Callable[[Any], nn.Module]
    columns: int = 2
    labels: Callable[[int], Tensor | None] = nothing
    model: Callable[[Any], Any] = field(default=lambda model: model)


def dense(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    import sentence_transformers.sentence_transformer.losses as theirs

    return lambda model: getattr(theirs, name)(model, **options)


def around(outer: str, inner: Callable[[Any], nn.Module], *args: Any, **options: Any) -> Callable[[Any], nn.Module]:
    import sentence_transformers.sentence_transformer.losses as theirs
    import sentence_transformers.sparse_encoder.losses as sparse

    cls = getattr(theirs, outer, None) or getattr(sparse, outer)
    return lambda model: cls(model, inner(model), *args, **options)


def guided(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    def make(model: Any) -> nn.Module:
        guide = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.mul_(0.7)
        return dense(name, guide=guide, **options)(model)

    return make


class SparseOutputs(nn.Module):
    """An encoder with the outputs of a sparse autoencoder behind it."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        torch.manual_seed(5)
        self.code, self.back = (nn.Linear(DIM, DIM, dtype=torch.float64) for _ in range(2))

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        found = self.encoder(features, **kwargs)
        embedding = found["sentence_embedding"]
        hidden = self.code(embedding).relu()
        top = hidden * (hidden > 0.1)
        decoded = {"decoded_embedding_k": self.back(top), "decoded_embedding_4k": self.back(hidden)}
        decoded["decoded_embedding_aux"] = self.back(hidden - top)
        decoded["decoded_embedding_k_pre_bias"] = self.back(top) - self.back.bias
        return {**found, **decoded, "sentence_embedding_backbone": embedding, "sentence_embedding": hidden}

    def get_embedding_dimension(self) -> int:
        return DIM


class OfMine(nn.Module):
    """A loss of one's own with the method that theirs have."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Any, labels: Tensor | None) -> Tensor:
        embeddings = [self.model(features)["sentence_embedding"] for features in sentence_features]
        return self.compute_loss_from_embeddings(embeddings, labels=labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], *, labels: Tensor | None) -> Tensor:
        return (embeddings[0].std(0) - embeddings[1].std(0)).square().sum()


def splade(model: Any) -> nn.Module:
    return around("SpladeLoss", dense("MultipleNegativesRankingLoss"), 0.3, 0.2, document_regularizer_threshold=3)(
        model
    )


def cases() -> dict[str, Case]:
    ranking, cached = (
        dense("MultipleNegativesRankingLoss"),
        dense("CachedMultipleNegativesRankingLoss", mini_batch_size=3),
    )
    one_way = {"labels": classes, "columns": 1}
    return {
        "CoSENT": Case(dense("CoSENTLoss"), labels=scores),
        "AnglE": Case(dense("AnglELoss"), labels=scores),
        "AnglE, negatives": Case(dense("AnglELoss"), columns=4),
        "batch all": Case(dense("BatchAllTripletLoss"), **one_way),
        "batch hard": Case(dense("BatchHardTripletLoss"), **one_way),
        "batch hard, soft margin": Case(dense("BatchHardSoftMarginTripletLoss"), **one_way),
        "batch semi-hard": Case(dense("BatchSemiHardTripletLoss"), **one_way),
        "contrastive": Case(dense("ContrastiveLoss"), labels=binary),
        "contrastive, sum": Case(dense("ContrastiveLoss", size_average=False), labels=binary),
        "online contrastive": Case(dense("OnlineContrastiveLoss"), labels=binary),
        "cosine": Case(dense("CosineSimilarityLoss"), labels=scores),
        "cosine, learned": Case(learned_cosine, labels=scores),
        "triplet": Case(dense("TripletLoss"), columns=3),
        "orthogonal": Case(dense("GlobalOrthogonalRegularizationLoss")),
        "margin MSE": Case(dense("MarginMSELoss"), 4, lambda rows: scores(rows, 3)),
        "distilled scores": Case(dense("DistillKLDivLoss"), 4, lambda rows: scores(rows, 3) * 9),
        "distilled embeddings": Case(dense("EmbedDistillLoss"), 2, lambda rows: scores(rows, DIM)),
        "MSE, a teacher a column": Case(dense("MSELoss"), 2, lambda rows: scores(rows, 2, DIM)),
        "projection": Case(lambda model: projected(dense("EmbedDistillLoss")(model)), 1, lambda rows: scores(rows, 4)),
        "ranking": Case(ranking, 3),
        "cached ranking": Case(cached, 3),
        "cached symmetric": Case(dense("CachedMultipleNegativesSymmetricRankingLoss", mini_batch_size=3)),
        "guided": Case(guided("GISTEmbedLoss", temperature=0.1), 3),
        "mega batch": Case(dense("MegaBatchMarginLoss", mini_batch_size=3)),
        "mega batch, whole": Case(dense("MegaBatchMarginLoss", use_mini_batched_version=False)),
        "matryoshka": Case(around("MatryoshkaLoss", dense("CoSENTLoss"), [DIM, DIM // 2], [1.0, 0.3]), labels=scores),
        "matryoshka, drawn": Case(around("MatryoshkaLoss", ranking, [DIM, 8, 4], n_dims_per_step=1)),
        "matryoshka, cached": Case(around("MatryoshkaLoss", cached, [DIM, DIM // 2], [1.0, 0.3])),
        "layers": Case(around("AdaptiveLayerLoss", dense("CoSENTLoss")), labels=scores),
        "layers, not compared": Case(around("AdaptiveLayerLoss", ranking, kl_temperature=0.0)),
        "layers and dimensions": Case(around("Matryoshka2dLoss", ranking, [DIM, 8, 4])),
        "splade": Case(splade),
        "splade, of documents": Case(around("SpladeLoss", ranking, 0.3, use_document_regularizer_only=True)),
        "splade, cached": Case(around("CachedSpladeLoss", ranking, 0.3, 0.2, mini_batch_size=3)),
        "CSR": Case(around("CSRLoss", ranking), model=SparseOutputs),
        "of mine": Case(OfMine),
    }


def learned_cosine(model: Any) -> nn.Module:
    """A loss with a parameter of its own, which DDP does not reduce."""
    loss: Any = dense("CosineSimilarityLoss")(model)
    loss.projection = loss.cos_score_transformation = nn.PReLU(init=-0.5, dtype=torch.float64)
    return loss  # type: ignore[no-any-return]


def projected(loss: Any) -> nn.Module:
    torch.manual_seed(2)
    loss.projection = nn.Linear(DIM, 4, dtype=torch.float64)
    return loss  # type: ignore[no-any-return]


def step(
    model: nn.Module, loss: nn.Module, features: list[dict[str, Tensor]], labels: Tensor | None
) -> dict[str, Tensor]:
    random.seed(4 + (dist.get_rank() if dist.is_initialized() else 0))
    value = loss(features, labels)
    if isinstance(value, dict):
        value = torch.stack([*value.values()]).sum()
    (value * 0.5).backward()
    parameters = {
        **dict(model.named_parameters()),
        "projection": getattr(getattr(loss, "projection", None), "weight", None),
    }
    found = {name: p.grad for name, p in parameters.items() if p is not None and p.grad is not None}
    return {"value": value.detach(), **found}


def build(path: str, name: str) -> tuple[Case, Any, nn.Module]:
    case = cases()[name]
    model = case.model(sentence_model(path))
    return case, model, case.make(model)


def play(place: Place, path: str, name: str) -> Found:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    case, model, loss = build(path, name)
    if not place.alone:
        loss = over_all_ranks(loss)
        put_in(loss, model, DistributedDataParallel(model, find_unused_parameters=True))
    rows = sum(place.sizes)
    labels = case.labels(rows)
    own_labels = None if labels is None else place.own(labels)
    return step(model, loss, columns(rows, case.columns, place.part), own_labels)


def without_rounding(found: dict[str, Tensor], least: float = 1e-12) -> dict[str, Tensor]:
    """Leave out gradients that are 0 but for rounding, as of a bias by a loss of differences."""
    largest = max(tensor.norm() for tensor in found.values())
    return {name: tensor for name, tensor in found.items() if tensor.norm() > least * largest}


def compare(found: Found, truth: Found, rtol: float) -> None:
    assert_close(without_rounding(found), without_rounding(truth), rtol)


@pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")
@pytest.mark.filterwarnings("ignore:DistillKLDivLoss")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
@pytest.mark.parametrize("name", cases())
def test_one_process(pool: RankPool, encoder_path: str, name: str) -> None:
    for rows in ROWS:
        parity(pool, play, rows, encoder_path, name, every_rank=True, compare=compare)


def times_of_random_state(path: str) -> int:
    """How often the ranks exchange the state of Python's generator in one step of layers and dimensions."""
    with mock.patch.object(handshake, "all_gather_json", wraps=handshake.all_gather_json) as exchange:
        play(Place((4, 4), dist.get_rank()), path, "layers and dimensions")
    titles = [call.args[0] for call in exchange.call_args_list]
    return sum(title.endswith("random state") for title in titles)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_losses_that_draw_inside_each_other_exchange_one_state(pool: RankPool, encoder_path: str) -> None:
    assert pool.run(2, times_of_random_state, encoder_path) == [1, 1]


def exchanged(path: str, name: str) -> tuple[int, int]:
    """Collectives and bytes of a step of 64 rows x 384 on each rank."""
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    case, _, loss = build(path, name)
    method: Any = over_all_ranks(loss).compute_loss_from_embeddings
    rows = [torch.randn(64, 384, requires_grad=True) for _ in range(case.columns)]
    # the ranks compare the options, and ContrastiveLoss checks labels in its first call only: the second one leaves the list of the first
    for _ in range(2):
        method(rows, case.labels(64)).backward()
    with CountCollectives() as collectives:
        method(rows, case.labels(64)).backward()
    return len(collectives.names), collectives.num_bytes


@pytest.mark.parametrize("name", ["contrastive", "cosine", "triplet"])
def test_rows_of_means_stay_on_their_rank(pool: RankPool, encoder_path: str, name: str) -> None:
    """Gathered rows would take 400,000 bytes."""
    # a group whose handshakes have not grown by what other losses sent
    for calls, sent in pool.run(2, exchanged, encoder_path, name, fresh=True):
        assert calls == 2
        assert sent <= 8192


# ---------------------------------------------------------------------- the same loss in other ways


def in_another_way(path: str, name: str, rows: tuple[int, ...], way: str) -> dict[str, Tensor]:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    case, model, loss = build(path, name)
    loss = over_all_ranks(loss)
    if way == "pickled":
        model, loss = pickle.loads(pickle.dumps((model, loss)))
    elif way == "copied":
        model, loss = copy.deepcopy((model, loss))
    elif way == "twice":
        loss = over_all_ranks(loss)
    put_in(loss, model, DistributedDataParallel(model))
    part, labels = own(rows), case.labels(sum(rows))
    return step(model, loss, columns(sum(rows), case.columns, part), labels if labels is None else labels[part])


@pytest.mark.parametrize("way", ["pickled", "copied", "twice"])
@pytest.mark.parametrize("name", ["CoSENT", "batch hard", "matryoshka"])
def test_in_another_way(pool: RankPool, encoder_path: str, name: str, way: str) -> None:
    truth = play(Place([13]), encoder_path, name)
    for found in pool.run(2, in_another_way, encoder_path, name, (9, 4), way):
        assert_close(*map(without_rounding, (found, truth)))


@pytest.mark.parametrize("name", cases())
@pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")
@pytest.mark.filterwarnings("ignore:DistillKLDivLoss")
def test_without_ranks_it_is_theirs(encoder_path: str, name: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    case, model, loss = build(encoder_path, name)
    kind = type(loss)
    assert over_all_ranks(loss) is loss
    assert isinstance(loss, kind)
    assert type(loss).__name__ == kind.__name__
    found = step(model, loss, columns(6, case.columns), case.labels(6))
    assert_close(*map(without_rounding, (found, play(Place([6]), encoder_path, name))))


def test_its_options_are_theirs(encoder_path: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    _, model, loss = build(encoder_path, "batch semi-hard")
    settings = loss.get_config_dict()
    assert over_all_ranks({"pairs": loss}) == {"pairs": loss}
    assert loss.get_config_dict() == settings
    assert loss.sentence_embedder is loss.model is model


# ---------------------------------------------------------------------- their Trainer


def with_their_trainer(path: str, folder: str, rows: int, ours: bool) -> dict[str, Tensor]:
    from datasets import Dataset

    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    data = Dataset.from_dict({"sentence": sentences(12), "label": [number % 3 for number in range(12)]})
    with ranks_of_accelerate():
        _, model, loss = build(path, "batch hard")
        loss = over_all_ranks(loss) if ours else loss
        fit_in_their_trainer(model, loss, data, folder, rows)
        return weights_of(model)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # what transformers gives DDP
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")  # torch says it once
def test_their_trainer(pool: RankPool, encoder_path: str, tmp_path: Path) -> None:
    truth = pool.run(1, with_their_trainer, encoder_path, str(tmp_path), 6, False)[0]
    assert_all_close(pool.run(2, with_their_trainer, encoder_path, str(tmp_path), 3, True), truth)
    # theirs: the model inside this loss is not the one that reduces gradients
    first, second = pool.run(2, with_their_trainer, encoder_path, str(tmp_path), 3, False)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def with_two_data_sets(path: str, folder: str, options: dict[str, Any]) -> None:
    from datasets import Dataset

    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    words = sentences(48)
    pairs = Dataset.from_dict({"anchor": words[:24], "positive": words[24:]})
    triplets = Dataset.from_dict({"anchor": words[24:], "positive": words[:24], "negative": words[:24]})
    with ranks_of_accelerate():
        model = sentence_model(path)
        ranking = dense("MultipleNegativesRankingLoss")
        losses = over_all_ranks({"pairs": ranking(model), "triplets": ranking(model)})
        fit_in_their_trainer(model, losses, {"pairs": pairs, "triplets": triplets}, folder, 4, **options)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_ranks_with_other_data_sets(pool: RankPool, encoder_path: str, tmp_path: Path) -> None:
    errors = pool.errors(2, with_two_data_sets, encoder_path, str(tmp_path), {})
    assert_errors(errors, "pairs", "triplets", of="RankMismatchError")
    # each batch is cut for the ranks
    pool.run(2, with_two_data_sets, encoder_path, str(tmp_path), {"accelerator_config": {"split_batches": True}})


# ---------------------------------------------------------------------- bad input


def misused(path: str, name: str, how: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    rank = dist.get_rank()
    _, _, loss = build(path, name)
    over_all_ranks(loss, name=f"pairs{rank}" if how == "data set" else None)
    features, labels = columns(4, 2), cases()[name].labels(4)
    if how == "options":
        option = "scale" if name == "CoSENT" else "margin"
        setattr(loss, option, 0.5 + rank)
    elif how == "columns":
        features = columns(4, 2 + rank)
    elif how == "labels":
        labels = cases()[name].labels(4 + (-1) ** rank)  # as many over all ranks
    elif how == "no labels" and rank:
        labels = None
    elif how == "an error on a rank" and rank:
        del features[0]["input_ids"]
    elif how == "order":
        other = over_all_ranks(copy.deepcopy(build(path, name)[2]))
        for one in (loss, other) if rank else (other, loss):
            one(features, labels)
    elif how == "coefficients":
        (loss(features, labels) * (1.0 + rank)).backward()
    loss(features, labels)


MISUSES = {
    "options": ("RankMismatchError", ("scale", "margin")),
    "columns": ("RankMismatchError", ("embeddings[2]", "arguments")),
    "labels": ("InputError", "as many in each"),
    "no labels": ("RankMismatchError", ("labels", "[1]=None")),
    "an error on a rank": ("", "input_ids"),
    "order": ("RankMismatchError", "which of several"),
    "coefficients": ("RankMismatchError", "coefficient of the last backward"),
    "data set": ("RankMismatchError", "pairs1"),
}


@pytest.mark.parametrize("how", MISUSES)
@pytest.mark.parametrize("name", ["CoSENT", "contrastive"])
def test_misuse(pool: RankPool, encoder_path: str, name: str, how: str) -> None:
    kind, told = MISUSES[how]
    words = [told] if isinstance(told, str) else told
    errors = pool.errors(2, misused, encoder_path, name, how)
    assert len(errors) == 2
    for error in errors:
        assert kind in error.type, error
        assert any(text in error.message for text in words), error


class Bypassing(OfMine):
    """Has the method, and does not use it."""

    def forward(self, sentence_features: Any, labels: Tensor | None) -> Tensor:
        first, second = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return (first - second).square().mean()


def with_a_local_loss(path: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    over_all_ranks(Bypassing(sentence_model(path)))(columns(4, 2), None)


def test_a_forward_that_stays_on_its_rank(pool: RankPool, encoder_path: str) -> None:
    assert_errors(
        pool.errors(2, with_a_local_loss, encoder_path), "a loss of this rank's rows", of="ConfigurationError"
    )


def test_losses_that_hide_their_embeddings(encoder_path: str) -> None:
    from lightning_ddp_losses.integrations.sentence_transformers import over_all_ranks

    model = sentence_model(encoder_path)
    with pytest.raises(ConfigurationError, match="compute_loss_from_embeddings"):
        over_all_ranks(dense("SoftmaxLoss", embedding_dimension=DIM, num_labels=3)(model))
    with pytest.raises(ConfigurationError, match="gather_across_devices"):
        over_all_ranks(dense("MultipleNegativesRankingLoss", gather_across_devices=True)(model))
    with pytest.raises(ConfigurationError, match="SoftmaxLoss"):
        over_all_ranks(
            around("MatryoshkaLoss", dense("SoftmaxLoss", embedding_dimension=DIM, num_labels=3), [DIM])(model)
        )
