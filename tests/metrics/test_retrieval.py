"""`EmbeddingRetrieval`: the metrics of one process, from rows that stay on their ranks."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection

from lightning_ddp_losses import ConfigurationError, EmbeddingRetrieval, InputError, synced
from lightning_ddp_losses.metrics import nearest, retrieval_value
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import GalleryPart, best_columns
from tests.each_rank import each_rank
from tests.fits import make_trainer
from tests.metrics.retrieval_oracle import Row, retrieval
from tests.oracle import normal
from tests.refusals import Mistake, refusals, refusals_of_one_process

ALL = (
    "precision_at_1",
    "precision@4",
    "hit_rate@3",
    "recall@3",
    "r_precision",
    "map_at_r",
    "ndcg@5",
    "mrr",
    "mrr@2",
    "knn_accuracy@5",
    "recall@500",  # beyond the gallery
)
DISTANCES: dict[str, Any] = {
    "CosineSimilarity": "CosineSimilarity",
    "DotProductSimilarity": DotProductSimilarity(normalize_embeddings=False),
    "LpDistance": LpDistance(normalize_embeddings=False),
    "SNRDistance": SNRDistance(normalize_embeddings=False),
    "CubeOfCosine": CosineSimilarity(power=3),  # an odd power keeps the order
}
SPLITS = {"one": [1.0], "two": [0.5, 0.5], "uneven": [0.7, 0.3], "three": [0.2, 0.5, 0.3], "no rows": [0.6, 0.0, 0.4]}


def data_set(roles: str, *, ties: bool, repeats: int = 0, seed: int = 0) -> list[Row]:
    """Rows of many classes, some with one member. Small integers make exact ties."""
    generator = torch.Generator().manual_seed(seed)
    count = 97
    labels = torch.randint(0, 12, (count,), generator=generator)
    labels[:3] = torch.tensor([2**40, 2**40 + 1, 2**40 + 1])  # that float32 cannot tell apart
    embeddings = normal(count, 6, seed=generator) + labels.remainder(7)[:, None] / 4
    if ties:
        embeddings = torch.randint(-1, 2, (count, 6), generator=generator).double()
        embeddings[:, 0] += 3  # no row is zero
    indices = torch.randperm(count, generator=generator) * 3 - 50
    found = []
    for place in [*range(count), *range(repeats)]:
        role = roles
        if roles == "apart":
            role = "query" if place % 3 == 0 else "gallery"
        elif roles == "mixed":
            role = ("both", "query", "gallery")[place % 3]
        found.append(Row(embeddings[place], int(labels[place]), int(indices[place]), role))
    return found


def own_rows(rows: Sequence[Row], shares: Sequence[float]) -> list[Row]:
    """This rank's rows."""
    ends = [0]
    for share in shares:
        ends.append(ends[-1] + round(share * len(rows)))
    ends[-1] = len(rows)
    rank = dist.get_rank() if len(shares) > 1 else 0
    return list(rows[ends[rank] : ends[rank + 1]])


def update(metric: Any, rows: Sequence[Row], *, batch: int = 20, indexed: bool = True) -> Any:
    """Give rows in batches of one role."""
    for role in ("both", "query", "gallery"):
        chosen = [row for row in rows if row.role == role]
        for start in range(0, len(chosen), batch):
            part = chosen[start : start + batch]
            embeddings = torch.stack([row.embedding for row in part])
            labels, index = (torch.tensor([getattr(row, name) for row in part]) for name in ("label", "index"))
            metric.update(embeddings, labels, index if indexed else None, role=role)
    return metric


def plain(values: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def assert_is_of_one_process(metric: Any, rows: Sequence[Row], kind: str, **options: Any) -> None:
    expected = retrieval(rows, ALL, kind, **options)
    left_out = expected.pop("left_out")
    assert plain(metric.compute()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert metric.counts.left_out == left_out > 0


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("roles", ["both", "apart", "mixed"])
@pytest.mark.parametrize("split", SPLITS)
def test_values_are_those_of_one_process(pool: RankPool, split: str, roles: str) -> None:
    pool.run(len(SPLITS[split]), values_on_rank, split, roles)


def values_on_rank(split: str, roles: str) -> None:
    for kind, ties, repeats in (("DotProductSimilarity", True, 9), ("CosineSimilarity", False, 4)):
        rows = data_set(roles, ties=ties, repeats=repeats)
        metric = EmbeddingRetrieval(ALL, distance=DISTANCES[kind])
        update(metric, own_rows(rows, SPLITS[split]))
        assert_is_of_one_process(metric, rows, kind)
        assert metric.counts.repeated > 0


@pytest.mark.parametrize("kind", ["LpDistance", "SNRDistance", "CubeOfCosine"])
@each_rank(2)
def test_other_distances(kind: str) -> None:
    """Those of pytorch-metric-learning, in pieces too."""
    rows = data_set("both", ties=kind == "LpDistance")
    for pair_bytes in (1, 32 << 20):
        with mock.patch.object(nearest, "_PAIR_BYTES", pair_bytes):
            metric = EmbeddingRetrieval(ALL, distance=DISTANCES[kind])
            assert_is_of_one_process(update(metric, own_rows(rows, SPLITS["uneven"])), rows, kind)


@pytest.mark.parametrize("ties", [True, False])
@each_rank(3)
def test_many_rounds_and_tiles_give_the_same(ties: bool) -> None:
    """Blocks of 64 queries and of fewer, tiles of 64 columns, and the exact pass over equal scores in pieces of one row."""
    generator = torch.Generator().manual_seed(3)
    count = 310
    labels = torch.randint(0, 20, (count,), generator=generator)
    embeddings = normal(count, 5, seed=generator)
    if ties:
        embeddings = torch.randint(0, 2, (count, 5), generator=generator).double()
    rows = [Row(embeddings[i], int(labels[i]), i, "both") for i in range(count)]
    rows.append(Row(embeddings[0], 999, count, "both"))  # alone
    with (
        mock.patch.object(retrieval_value, "_QUERIES", 64),
        mock.patch.object(retrieval_value, "_NEIGHBOURS", 300),
        mock.patch.object(nearest, "_HOST_BYTES", 1),
        mock.patch.object(nearest, "_EXACT_BYTES", 1),
    ):
        metric = EmbeddingRetrieval(ALL, distance=DISTANCES["DotProductSimilarity"])
        update(metric, own_rows(rows, SPLITS["three"]))
        assert_is_of_one_process(metric, rows, "DotProductSimilarity")


@each_rank(2)
def test_without_indices_ties_are_in_rank_order() -> None:
    """And indices that number queries and gallery apart leave out rows that are both only."""
    rows = data_set("both", ties=True)
    in_order = [row._replace(index=place) for place, row in enumerate(rows)]
    metric = EmbeddingRetrieval(ALL, distance=DISTANCES["DotProductSimilarity"])
    update(metric, own_rows(in_order, SPLITS["two"]), indexed=False)
    assert_is_of_one_process(metric, in_order, "DotProductSimilarity")
    rows = data_set("mixed", ties=True)
    numbered = []
    for place, row in enumerate(rows):
        index = row.index + 10**6 if row.role == "both" else place // 3
        numbered.append(row._replace(index=index))
    metric = EmbeddingRetrieval(ALL, distance=DISTANCES["DotProductSimilarity"], shared_index=False)
    update(metric, own_rows(numbered, SPLITS["two"]))
    assert_is_of_one_process(metric, numbered, "DotProductSimilarity", shared_index=False)


@each_rank(3)
def test_equals_the_calculator_of_pml() -> None:
    """3,001 rows without ties or duplicates, searched in the embeddings' own precision."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 150, (3001,), generator=generator)
    embeddings = normal(3001, 16, seed=generator) + torch.randn(150, 16)[labels] * 0.7
    search = CustomKNN(CosineSimilarity(), batch_size=512)

    def find(_query: Tensor, k: int, _reference: Tensor, same: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = search(embeddings, k, embeddings, same)
        return found

    theirs = {
        "precision_at_1": "precision_at_1",
        "r_precision": "r_precision",
        "map_at_r": "mean_average_precision_at_r",
        "mrr": "mean_reciprocal_rank",
    }
    calculator = AccuracyCalculator(tuple(theirs.values()), k=None, device=torch.device("cpu"), knn_func=find)
    expected = calculator.get_accuracy(embeddings, labels)
    metric = EmbeddingRetrieval(tuple(theirs))
    own = slice(dist.get_rank(), None, 3)
    metric.update(embeddings[own], labels[own], torch.arange(3001)[own])
    found = plain(metric.compute())
    for name, of_pml in theirs.items():
        # they divide 1 by the place in float32
        assert found[name] == pytest.approx(expected[of_pml], rel=1e-6 if name == "mrr" else 1e-9)


@pytest.mark.parametrize("width", [1, 31, 64, 640, 4096])
@pytest.mark.parametrize("values", [2, 5, 10**6])
def test_best_columns_are_those_of_a_stable_sort(width: int, values: int) -> None:
    scores = torch.randint(0, values, (50, width), generator=torch.Generator().manual_seed(width)).float()
    scores[:5, width // 2 :] = -torch.inf
    for k in (1, 7, width // 3 + 1, width):
        k = min(k, width)
        sorted_scores, columns = scores.sort(dim=1, descending=True, stable=True)
        best, found = best_columns(scores, k)
        torch.testing.assert_close(best, sorted_scores[:, :k], rtol=0, atol=0)
        exists = best > -torch.inf  # of columns without a score any may come
        assert torch.equal(found[exists], columns[:, :k][exists])


@each_rank(3)
def test_equal_rows_of_float32_are_in_the_order_of_their_index() -> None:
    """A model that has collapsed: products of equal rows are equal, wherever the rows are."""
    count = 1100
    row = torch.nn.functional.normalize(torch.randn(1, 48, generator=torch.Generator().manual_seed(1)))
    labels = torch.arange(count) % 7
    rank, world_size = dist.get_rank(), dist.get_world_size()
    metric = EmbeddingRetrieval(("precision@6", "mrr"))
    own = torch.arange(count)[rank::world_size]
    metric.update(row.expand(len(own), -1), labels[own], own)
    # each query has the first rows of the set as its neighbours
    precision, reciprocal = 0.0, 0.0
    for query in range(count):
        order = [place for place in range(count) if place != query]
        hits = [int(labels[place]) == int(labels[query]) for place in order[:20]]
        precision += sum(hits[:6]) / 6 / count
        reciprocal += 1 / (1 + hits.index(True)) / count
    assert plain(metric.compute()) == pytest.approx({"mrr": reciprocal, "precision@6": precision}, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_rank(2)
def test_half_precision_and_other_labels(dtype: torch.dtype) -> None:
    """Values of rows as they were given. Labels of any integer dtype, booleans too. Autocast changes nothing."""
    rows = data_set("both", ties=False)
    given = torch.stack([row.embedding for row in rows]).to(dtype)
    labels = torch.tensor([row.label % 2 for row in rows])
    index = torch.arange(len(rows))
    own = slice(dist.get_rank(), None, 2)
    expected = EmbeddingRetrieval(ALL, sync_on_compute=False)
    expected.update(given.double(), labels, index)
    for label_dtype in (torch.bool, torch.uint8, torch.int32):
        metric = EmbeddingRetrieval(ALL)
        with torch.autocast("cpu", torch.bfloat16):
            metric.update(given[own], labels[own].to(label_dtype), index[own].int())
            assert plain(metric.compute()) == pytest.approx(plain(expected.compute()), rel=1e-6)


@each_rank(2)
def test_no_query_that_counts_is_nan() -> None:
    """Also if no rank has rows at all."""
    metric = EmbeddingRetrieval(ALL)
    assert all(math.isnan(value) for value in plain(metric.compute()).values())
    metric.update(torch.randn(5, 3), torch.arange(5) + 5 * dist.get_rank())
    assert all(math.isnan(value) for value in plain(metric.compute()).values())
    assert metric.counts == (0, 10, 10, 0)
    metric.reset()
    if dist.get_rank():  # one rank has the gallery, and another, without an update, the queries
        metric.update(torch.eye(3), torch.arange(3), role="gallery")
    else:
        metric.update(torch.eye(3), torch.tensor([0, 1, 7]), role="query")
    assert plain(metric.compute()) == pytest.approx({**dict.fromkeys(ALL, 1.0), "precision@4": 0.25})
    assert metric.counts == (2, 1, 3, 0)


# ---------------------------------------------------------------------- as a metric of torchmetrics


@each_rank(2)
def test_what_torchmetrics_does_with_states_never_gathers_rows() -> None:
    """`sync`, `forward`, pickling and copies make no collective; one compute makes one search for all members."""
    rows = data_set("both", ties=False)
    own = own_rows(rows, SPLITS["uneven"])
    metric = EmbeddingRetrieval(("precision_at_1", "hit_rate@3"))
    alone = update(EmbeddingRetrieval(("precision_at_1", "hit_rate@3"), sync_on_compute=False), own)
    with CountCollectives() as collectives:
        embeddings, labels = torch.stack([row.embedding for row in own]), torch.tensor([row.label for row in own])
        index = torch.tensor([row.index for row in own])
        batch = metric(embeddings, labels, index)
        assert plain(batch) == plain(alone.compute())
        for member in metric.values():
            member.sync()
            assert member.metric_state == {}
            member.unsync()
        restored = pickle.loads(pickle.dumps(metric))
        copied = copy.deepcopy(metric)
        assert metric.state_dict() == {}
        assert collectives.take() == []
        value = metric.compute()
        once = collectives.take()
        again = metric.compute()  # nothing has changed on any rank
        assert len(collectives.take()) == 1
        metric["hit_rate@3"].compute()
        assert len(collectives.take()) == 1
    # a handshake, blocks that go round, and one gather of what the queries of each rank have found
    trips = [name for name in once if name in ("send", "recv_")]
    assert trips
    assert once == ["alltoall_base_", "_allgather_base_", *trips, "_allgather_base_"]
    assert plain(value) == plain(again) == plain(restored.compute()) == plain(copied.compute())
    expected = retrieval(rows, ("precision_at_1", "hit_rate@3"), "CosineSimilarity")
    del expected["left_out"]
    assert plain(value) == pytest.approx(expected, rel=1e-9)
    # rows of the copy are its own
    copied.reset()
    assert plain(metric.compute()) == plain(value)
    with metric["hit_rate@3"].sync_context():
        assert float(metric["hit_rate@3"].compute()) == float(value["hit_rate@3"])


@each_rank(2)
def test_rows_that_come_on_one_rank_change_the_value_on_all() -> None:
    """The ranks decide together whether the last value holds."""
    rows = data_set("both", ties=False)
    metric = EmbeddingRetrieval(ALL)
    update(metric, own_rows(rows[:60], SPLITS["two"]))
    before = plain(metric.compute())
    if dist.get_rank():
        update(metric, rows[60:])
    assert plain(metric.compute()) != before
    assert_is_of_one_process(metric, rows, "CosineSimilarity")


@each_rank(2)
def test_forward_over_all_ranks() -> None:
    """`dist_sync_on_step=True`: the value of the batch of all ranks, and a rank without rows."""
    rows = data_set("both", ties=False)
    metric = EmbeddingRetrieval(ALL, dist_sync_on_step=True, prefix="val/")
    for first in (0, 48):
        batch = rows[first : first + 48]
        own = own_rows(batch, [0.9, 0.1] if first else [1.0, 0.0])
        embeddings = torch.stack([row.embedding for row in own]) if own else torch.empty(0, 6)
        labels, index = (torch.tensor([getattr(row, name) for row in own]).long() for name in ("label", "index"))
        expected = retrieval(batch, ALL, "CosineSimilarity")
        value = plain(metric(embeddings, labels, index))
        assert value == pytest.approx({f"val/{name}": expected[name] for name in ALL}, rel=1e-9, abs=1e-12)
        assert float(metric["mrr"]._forward_cache) == value["val/mrr"]
    assert plain(metric.compute()) == pytest.approx(
        {f"val/{name}": retrieval(rows[:96], ALL, "CosineSimilarity")[name] for name in ALL}, rel=1e-9
    )


@each_rank(3)
def test_a_group_that_is_a_part_of_the_world() -> None:
    """Only the rows of its ranks count. It is neither copied nor pickled."""
    group = dist.new_group([0, 2])
    rows = data_set("both", ties=False)
    if dist.get_rank() == 1:
        return
    own = rows[:40] if dist.get_rank() == 0 else rows[40:]
    metric = copy.deepcopy(EmbeddingRetrieval(ALL, process_group=group))
    assert_is_of_one_process(synced(update(metric, own)), rows, "CosineSimilarity")


class Embedder(LightningModule):
    """Logs the metrics of the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.retrieval = EmbeddingRetrieval(("map_at_r", "mrr", "recall@3"), prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.retrieval.update(*batch)
        self.log_dict(self.retrieval)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:.*sync_dist=True.*when logging on epoch level")
@pytest.mark.parametrize(("strategy", "repeated"), [("ddp", 2), ("ddp_losses", 0)])
@each_rank(2)
def test_log_dict_of_a_fit(strategy: str, repeated: int) -> None:
    """Two epochs. Lightning's sampler repeats a row, as query and as a row of the gallery."""
    rows = data_set("both", ties=False)
    columns = torch.stack([row.embedding for row in rows]), torch.tensor([row.label for row in rows]), torch.arange(97)
    loader = DataLoader(TensorDataset(*columns), batch_size=10)
    module = Embedder()
    trainer = make_trainer(
        strategy, max_epochs=2, use_distributed_sampler=True, limit_train_batches=1, num_sanity_val_steps=1
    )
    trainer.fit(module, DataLoader(range(4)), loader)  # type: ignore[arg-type]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    of_rows = [row._replace(index=place) for place, row in enumerate(rows)]
    expected = retrieval(of_rows, ("map_at_r", "mrr", "recall@3"), "CosineSimilarity")
    assert logged == pytest.approx({f"val_{name}": value for name, value in expected.items() if name != "left_out"})
    assert module.retrieval.counts is not None
    assert module.retrieval.counts.repeated == repeated


def test_rows_move_with_the_metric() -> None:
    metric = EmbeddingRetrieval(ALL)
    metric.update(torch.randn(4, 2), torch.arange(4))
    metric.to("meta")
    assert {rows.device.type for rows in metric._evaluation.rows.embeddings} == {"meta"}


# ---------------------------------------------------------------------- refusals

ROWS = torch.randn(4, 3)
LABELS = torch.arange(4) % 2


def computed(*batch: Any, rank: int, other: Any = None, **options: Any) -> None:
    metric = EmbeddingRetrieval(**options)
    metric.update(*(batch if rank or other is None else other))
    metric.compute()


def with_nan(rank: int) -> Tensor:
    rows = ROWS.clone()
    rows[1, rank] = torch.nan if rank else 1.0
    return rows


REFUSED: dict[str, tuple[Any, ...]] = {
    "NaN on one rank": (
        lambda rank: computed(with_nan(rank), LABELS, rank=rank),
        ("finite numbers, got 1 rows of 8", "rank 0: 0 of 4", "rank 1: 1 of 4"),
        "InputError",
    ),
    "numbers with infinite squares": (
        lambda rank: computed(ROWS * 1e25, LABELS, rank=rank),
        "finite numbers, got 8 rows of 8",
        "InputError",
    ),
    "constant rows of SNR": (
        lambda rank: computed(torch.ones(4, 3), LABELS, rank=rank, distance="SNRDistance"),
        "finite numbers",
        "InputError",
    ),
    "widths": (
        lambda rank: computed(torch.randn(4, 3 + rank), LABELS, rank=rank),
        ("width of the rows", "rank 0: 3", "rank 1: 4"),
        "RankMismatchError",
    ),
    "an index on one rank": (
        lambda rank: computed(ROWS, LABELS, torch.arange(4), rank=rank, other=(ROWS, LABELS)),
        ("is_indexed of the rows", "rank 0: False", "rank 1: True"),
        "RankMismatchError",
    ),
    "an index with two labels": (
        lambda rank: computed(ROWS, LABELS + rank, torch.arange(4), rank=rank),
        ("label of index 0: expected one label, got 0 and 1", "shared_index=False"),
        "InputError",
    ),
    "other metrics": (
        lambda rank: computed(ROWS, LABELS, rank=rank, metrics=("mrr",) if rank else ("map_at_r",)),
        ("metrics=", "mrr", "map_at_r"),
        "RankMismatchError",
    ),
    "float labels on one rank": (
        lambda rank: computed(ROWS, LABELS / (1 if rank else 2) if not rank else LABELS, rank=rank),
        ("labels: expected integers (4,)", "float32"),
        "InputError",
    ),
    "a role on one rank": (
        lambda rank: computed(ROWS, LABELS, None, "both" if rank else "bot", rank=0),
        "role: expected one of 'both', 'query', 'gallery', got 'bot'",
        "ConfigurationError",
    ),
}
test_ranks_that_cannot_have_a_value_raise_on_all = refusals(__name__, "REFUSED")


def updated_twice(first: Any, second: Any) -> None:
    metric = EmbeddingRetrieval()
    metric.update(*first)
    metric.update(*second)


make = EmbeddingRetrieval
ALONE: dict[str, Mistake] = {
    "unknown metric": (partial(make, ("map_at_r", "recall")), ("expected names out of", "recall@k", "got 'recall'")),
    "k of 0": (partial(make, ("recall@0",)), "got 'recall@0'"),
    "no metric": (partial(make, ()), "expected one name or more, each once"),
    "one twice": (partial(make, ("mrr", "mrr")), "each once"),
    "unknown distance": (partial(make, distance="Euclid"), ("CosineSimilarity", "got 'Euclid'")),
    "a gather": (partial(make, dist_sync_fn=max), "dist_sync_fn"),
    "states on the CPU": (partial(make, compute_on_cpu=True), "compute_on_cpu"),
    "images": (
        lambda: make().update(torch.randn(2, 3, 4), LABELS[:2]),
        "expected a floating tensor (B, D), got (2, 3, 4)",
    ),
    "integers": (lambda: make().update(LABELS[:, None], LABELS), "got (4, 1) int64"),
    "too few labels": (lambda: make().update(ROWS, LABELS[:3]), "expected integers (4,)"),
    "a float index": (lambda: make().update(ROWS, LABELS, LABELS.float()), "index: expected integers (4,)"),
    "width": (
        lambda: updated_twice((ROWS, LABELS), (ROWS[:, :2], LABELS)),
        "expected 3, as in the batches before, got 2",
    ),
    "mixed": (lambda: updated_twice((ROWS, LABELS), (ROWS, LABELS, LABELS)), "none in the updates before"),
    "a member": (lambda: make()["map_at_r"].update(ROWS, LABELS), "Call update of the EmbeddingRetrieval itself"),
    "a member's forward": (lambda: make()["map_at_r"](ROWS, LABELS), "Call update of the EmbeddingRetrieval itself"),
    "in a collection": (lambda: MetricCollection({"r": make()}).update(ROWS, LABELS), "or of another collection"),
    "merge": (lambda: make()["map_at_r"].merge_state({}), "merge_state"),
}
test_mistakes_are_refused = refusals_of_one_process(ALONE, ConfigurationError, InputError)


def test_scores_that_are_not_numbers_are_an_error() -> None:
    """A distance of the user's own that is not defined for some pairs."""

    class Broken(LpDistance):
        def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
            return super().compute_mat(query_emb, ref_emb) * torch.nan

    metric = EmbeddingRetrieval(distance=Broken())
    metric.update(ROWS, LABELS)
    with pytest.raises(InputError, match="NaN in the nearest rows of queries"):
        metric.compute()
    assert GalleryPart.__doc__
