"""What ranks predict is joined as one process would have it: in the order of the data set, each row once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_ddp_losses import ConfigurationError, GlobalBatchSampler, InputError, gather_predictions
from lightning_ddp_losses.testing import RankPool
from tests.doors import EvaluationBatches, EvaluationSampler, process_groups
from tests.fits import make_trainer
from tests.oracle import normal

ROWS = 11
# what Lightning has to say of orders and of rows that count twice, which is what this file is about
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `.*_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore:You are using a custom batch sampler"),
    pytest.mark.filterwarnings("ignore:Total length of"),
]


def data(rows: int = ROWS) -> TensorDataset:
    features = normal(ROWS, 3, seed=5)
    return TensorDataset(features[:rows], torch.arange(rows) % 3)


class Pair(NamedTuple):
    first: Tensor
    rest: tuple[Tensor, ...]


def nest_of(features: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"squares": features.square(), "more": [Pair(labels, (features[:, 0] > 0, features.float()))]}


class Model(LightningModule):
    """Predicts a nest of tensors, or something wrong; evaluates the whole set where it validates."""

    def __init__(self, step: Callable[[Tensor, Tensor], Any] = nest_of) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(1, 1), step
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.seen: list[Any] = []
        self.scores: list[dict[str, float]] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def predict_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> Any:
        return self.step(*batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(tuple(batch))

    def on_validation_epoch_end(self) -> None:
        rows, labels = gather_predictions(self.trainer, self.seen)
        self.scores.append(accuracy(rows, labels))
        self.seen.clear()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end


def accuracy(rows: Tensor, labels: Tensor) -> dict[str, float]:
    names = ("precision_at_1", "mean_average_precision_at_r")
    search = CustomKNN(LpDistance(normalize_embeddings=False))
    calculator = AccuracyCalculator(include=names, k="max_bin_count", knn_func=search, kmeans_func=len)
    return calculator.get_accuracy(rows, labels)


class Backwards(BatchSampler):  # batches of two, of the user's own, from the end
    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: DataLoader(data(), batch_size=2),
    "shuffled": lambda: DataLoader(data(), batch_size=2, shuffle=True),
    "backwards": lambda: DataLoader(data(), batch_sampler=Backwards(SequentialSampler(range(ROWS)), 2, False)),
    "few rows": lambda: DataLoader(data(5), batch_size=2),
    "a rank without rows": lambda: DataLoader(data(2), batch_size=2, sampler=[1, 0] * (dist.get_rank() == 1)),
    "ours as sampler": lambda: DataLoader(data(), batch_size=2, sampler=GlobalBatchSampler(range(ROWS), 2)),
    "ours": lambda: DataLoader(data(), batch_sampler=GlobalBatchSampler.batches(RandomSampler(range(ROWS)), 6, seed=3)),
    "workers": lambda: DataLoader(data(), batch_size=2, num_workers=1),
}


def predict(name: str, inject: bool = True, strategy: str = "ddp", **options: Any) -> Any:
    trainer = make_trainer(strategy, use_distributed_sampler=inject)
    torch.manual_seed(dist.get_rank())  # each rank shuffles in its own way
    found = trainer.predict(Model(), LOADERS[name]())
    return gather_predictions(trainer, found, **options)


def assert_same(found: Any, rows: int) -> None:
    expected = nest_of(*data(rows).tensors)
    assert torch.equal(found["squares"], expected["squares"])
    (ours,), (truth,) = found["more"], expected["more"]
    assert type(ours) is Pair
    assert torch.equal(ours.first, truth.first)
    assert all(map(torch.equal, ours.rest, truth.rest))
    assert [part.dtype for part in ours.rest] == [torch.bool, torch.float32]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["in order", "backwards", "ours", "few rows"])
def test_predictions_are_those_of_one_process(pool: RankPool, name: str, world_size: int) -> None:
    for found in pool.run(world_size, predict, name):
        assert_same(found, 5 if name == "few rows" else ROWS)


@pytest.mark.parametrize("name", ["shuffled", "workers"])
def test_what_every_rank_predicts_counts_once(pool: RankPool, name: str) -> None:
    for found in pool.run(2, predict, name, False):
        assert_same(found, ROWS)


def test_a_rank_without_rows_gets_them_all_the_same(pool: RankPool) -> None:
    for found in pool.run(2, predict, "a rank without rows", False):
        assert_same(found, 2)


@pytest.mark.parametrize("dst", [0, 2])
def test_one_rank_alone_may_keep_them(pool: RankPool, dst: int) -> None:
    found = pool.run(3, predict, "in order", dst=dst)
    assert_same(found.pop(dst), ROWS)
    assert found == [None, None]


def predict_two() -> Any:
    trainer = make_trainer("ddp", use_distributed_sampler=True, limit_predict_batches=2)
    loaders = [LOADERS["in order"](), LOADERS["few rows"]()]
    return gather_predictions(trainer, trainer.predict(Model(), loaders))


def test_a_list_for_several_loaders_and_what_was_left_out(pool: RankPool) -> None:
    for first, second in pool.run(2, predict_two):
        assert_same(first, 8)  # two batches of two rows on two ranks
        assert_same(second, 5)


def boxes(x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """What a detector predicts for each image: other numbers of boxes, none for some."""
    found = []
    for label in y.tolist():
        number = label % 3
        found.append(
            {
                "boxes": torch.full((number, 4), float(label)),
                "labels": torch.arange(number),
                "image": torch.tensor(label),
            }
        )
    return found


def tokens(x: Tensor, y: Tensor) -> dict[str, Any]:
    """Sequences of other lengths, beside a number for each row."""
    return {"tokens": [torch.arange(int(label)) for label in y], "row": y}


def equally_long(x: Tensor, y: Tensor) -> list[Tensor]:
    """Rows that are as long as the batches of two have rows; the last batch of one row tells that they are rows."""
    return [torch.stack([label, -label]) for label in y]


RAGGED: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[int]]] = {
    # what each rank's predict_step returns, numbers of ranks
    "boxes": (boxes, [1, 2, 3]),
    "tokens": (tokens, [1, 2, 3]),
    "as long as a batch": (equally_long, [1, 2]),
}


def predict_ragged(name: str, dst: int | None = None) -> Any:
    trainer = make_trainer("ddp", use_distributed_sampler=True)
    found = trainer.predict(Model(RAGGED[name][0]), LOADERS["few rows"]())
    return gather_predictions(trainer, found, dst=dst)


@pytest.mark.parametrize("name", RAGGED)
def test_a_list_of_rows_is_a_list_of_rows(pool: RankPool, name: str) -> None:
    step, worlds = RAGGED[name]
    truth = step(*data(5).tensors)
    for world_size in worlds:
        for found in pool.run(world_size, predict_ragged, name):
            torch.testing.assert_close(found, truth, rtol=0, atol=0)


def evaluate(name: str, strategy: str) -> list[dict[str, float]]:
    model = Model()
    trainer = make_trainer(strategy, use_distributed_sampler=True, num_sanity_val_steps=-1)
    trainer.fit(model, DataLoader(data(), batch_size=2), LOADERS[name]())
    trainer.validate(model, LOADERS["in order"](), verbose=False)
    trainer.test(model, {"one": LOADERS["in order"]()}, verbose=False)
    return model.scores


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("name", ["in order", "ours", "ours as sampler"])
def test_validation_over_all_rows(pool: RankPool, name: str, strategy: str) -> None:
    truth = accuracy(*data().tensors)
    for scores in pool.run(2, evaluate, name, strategy):
        assert scores == [truth] * 4  # before training, after it, on its own, and in a test


def other_predictions() -> dict[str, str]:
    """What is said of predictions that are not those of the loaders, by what they are."""
    trainer, said = make_trainer("ddp", use_distributed_sampler=True), {}
    found = trainer.predict(Model(), LOADERS["in order"]())
    first, *rest = found
    given: dict[str, Any] = {
        "no list": first["squares"],
        "too many": [*found, *found, *found],
        "a batch of another dtype": [first, *(dict(each, squares=each["squares"].float()) for each in rest)],
        "two devices": [dict(first, squares=first["squares"].to("meta")), *rest],
    }
    for name, predictions in given.items():
        with pytest.raises(InputError) as error:
            gather_predictions(trainer, predictions)
        said[name] = str(error.value)
    trainer.predict(Model(), [LOADERS["in order"]()] * 2)
    with pytest.raises(InputError) as error:
        gather_predictions(trainer, {})
    said["no lists"] = str(error.value)
    never = make_trainer("ddp", use_distributed_sampler=True)
    with pytest.raises(InputError) as error:
        gather_predictions(never, found)
    said["nothing predicted"] = str(error.value)
    return said


def test_predictions_of_something_else_are_refused(pool: RankPool) -> None:
    first, second = pool.run(2, other_predictions)
    assert first.keys() == second.keys()
    assert "expected a list with an entry per batch, got Tensor" in first["no list"]
    assert "batches, as were drawn" in first["too many"]
    assert "batch 1: expected as of batch 0" in first["a batch of another dtype"]
    assert "expected tensors on one device" in first["two devices"]
    assert "2 lists, one for each loader" in first["no lists"]
    assert "after trainer.predict" in first["nothing predicted"]


def test_under_the_strategy_ranks_draw_one_order(pool: RankPool) -> None:
    for found in pool.run(3, predict, "shuffled", strategy="ddp_losses"):
        assert_same(found, ROWS)


# Evaluation samplers deal each row once, as many batches to every rank, in the order of one process.


@pytest.fixture
def deal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The batches of each of some ranks."""

    def on_ranks(W: int, source: Any, *args: Any, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
        dealt, totals = [], set()
        monkeypatch.setattr(process_groups, "world_size", lambda group=None: W)
        for rank in range(W):
            monkeypatch.setattr(process_groups, "rank", lambda group=None, rank=rank: rank)
            torch.manual_seed(rank)
            sampler = EvaluationSampler(source, *args, **options)
            sampler.set_epoch(epoch)
            loader = EvaluationBatches(sampler)
            dealt.append(list(loader))
            assert len(loader) == len(dealt[-1]) == sampler.counts[rank]
            assert list(sampler) == list(itertools.chain.from_iterable(dealt[-1]))
            assert len(sampler) == sampler.num_samples == len(list(sampler))
            totals.add(sampler.total_size)
        assert totals == {sum(len(batch) for batches in dealt for batch in batches)}
        return dealt

    return on_ranks


@pytest.mark.parametrize("B", [1, 2, 3, 5])
def test_every_row_once_and_as_many_batches(deal: Any, B: int) -> None:
    for W, N in itertools.product((1, 2, 3, 4, 7), range(1, 47)):
        dealt = deal(W, SequentialSampler(range(N)), B)
        counts = [len(batches) for batches in dealt]
        assert sorted(itertools.chain(*itertools.chain(*dealt))) == list(range(N))
        # one batch of the ranks together after another is the order of one process
        steps = itertools.zip_longest(*dealt, fillvalue=[])
        assert list(itertools.chain(*itertools.chain(*steps))) == list(range(N))
        if N >= W and B > 1:
            assert len(set(counts)) == 1, (W, N)
        assert max(counts) - min(counts) <= 1
        # rows as even as they come: one less in a batch, and any number in the last
        for batches in zip(*dealt, strict=False):
            sizes = list(map(len, batches))
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= B
        for batches in dealt:
            assert all(len(batch) == B for batch in batches[:-2])
            assert all(len(batch) >= B - 1 for batch in batches[:-1])


def test_drop_last_keeps_full_global_batches(deal: Any) -> None:
    for W, N in itertools.product((1, 2, 3), range(1, 30)):
        dealt = deal(W, SequentialSampler(range(N)), 4, drop_last=True)
        rows = sorted(itertools.chain(*itertools.chain(*dealt)))
        assert rows == list(range(N // (4 * W) * 4 * W))
        assert all(len(batch) == 4 for batches in dealt for batch in batches)


@pytest.mark.parametrize("make", [RandomSampler, SubsetRandomSampler])
def test_random_orders_are_those_of_all_ranks(deal: Any, make: Any) -> None:
    orders = []
    for epoch in (0, 0, 1):
        dealt = deal(3, make(range(20)), 2, epoch=epoch)
        rows = list(itertools.chain(*itertools.chain(*itertools.zip_longest(*dealt, fillvalue=[]))))
        assert sorted(rows) == list(range(20))
        orders.append(rows)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(20))


def test_a_random_order_takes_no_random_numbers_of_others(deal: Any) -> None:
    before = torch.get_rng_state()
    list(EvaluationSampler(RandomSampler(range(20)), 2))
    assert torch.equal(before, torch.get_rng_state())


class Lies:  # draws a row less than it says
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(range(4))


def test_a_length_that_lies_or_is_missing(deal: Any) -> None:
    with pytest.raises(InputError, match=r"Lies drew for an evaluation: expected 5, .*, got 4"):
        deal(2, Lies(), 2)
    with pytest.raises(ConfigurationError, match="generator in an evaluation"):
        deal(2, (row for row in range(3)), 2)
