"""Lightning leaves both forms as they are; what it does to other samplers is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.doors import describe_reshuffle, refuse_other_batches
from tests.fits import make_trainer
from tests.samplers.cases import CASES, ROWS, SEED, one_process
from tests.samplers.test_global_batch import Epochs, together

DATA = TensorDataset(torch.arange(ROWS))


class Recorder(LightningModule):
    """Writes down the rows of each batch, by epoch; makes its own loader where Lightning captures arguments."""

    def __init__(self, name: str, form: str, inside: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.name, self.form = name, form
        self.seen: dict[str, Epochs] = {"fit": [], "validate": []}
        if inside:  # Lightning looks for overridden hooks
            self.train_dataloader = self.val_dataloader = self.predict_dataloader = self.make_loader  # type: ignore[method-assign]

    def make_loader(self) -> DataLoader:
        case = CASES[self.name]
        if self.form == "batches":
            drop_last = {"drop_last": True} if case.drop_last else {}
            return DataLoader(
                DATA, batch_sampler=GlobalBatchSampler.batches(case.make(), case.size, seed=SEED, **drop_last)
            )
        size = (case.size or 0) // dist.get_world_size()
        sampler = GlobalBatchSampler(case.make(), local_batch_size=size, drop_last=case.drop_last, seed=SEED)
        return DataLoader(DATA, batch_size=size, sampler=sampler)

    def on_train_epoch_start(self) -> None:
        self.seen["fit"].append([])

    def on_validation_epoch_start(self) -> None:
        self.seen["validate"].append([])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen["fit"][-1].append(batch[0].tolist())
        return self.layer(batch[0][:, None].float()).mean()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen["validate"][-1].append(batch[0].tolist())

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return batch[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Writer(BasePredictionWriter):  # keeps the indices that Lightning believes each prediction to be of
    indices: Any = None

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.indices = [list(batch) for batch in batch_indices[0]]


def run(name: str, form: str, strategy: str, injecting: bool, inside: bool) -> dict[str, Any]:
    """Two epochs of fit with validation, then predict; the batches of this rank."""
    module = Recorder(name, form, inside)
    writer = Writer("epoch")
    options = {"use_distributed_sampler": injecting, "max_epochs": 2, "callbacks": [writer]}
    loaders = [] if inside else [module.make_loader(), module.make_loader()]
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, *loaders)
    predicted = trainer.predict(module, *([] if inside else [module.make_loader()]))
    assert writer.indices == [rows.tolist() for rows in predicted], (
        "Lightning's indices are not those of the predictions"
    )
    return {"fit": module.seen["fit"], "validate": module.seen["validate"], "predict": [writer.indices]}


FORMS = [
    # uneven batches, M per class, batches of the sampler's own; even batches with an uneven last one
    ("batches", "random, rows of the last batch not divided"),
    ("batches", "random, last dropped"),
    ("batches", "batch sampler"),
    ("batches", "hierarchical"),
    ("indices", "random, rows of the last batch not divided"),
    ("indices", "m per class"),
]


# of the three choices each pair
WAYS = {
    "ddp, use_distributed_sampler, made in a hook": ("ddp", True, True),
    "ddp, plain, handed in": ("ddp", False, False),
    "ddp_losses, use_distributed_sampler, handed in": ("ddp_losses", True, False),
    "ddp_losses, plain, made in a hook": ("ddp_losses", False, True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("form", "name"), FORMS)
def test_fit_and_predict(pool: RankPool, form: str, name: str, way: str) -> None:
    strategy, injecting, inside = WAYS[way]
    ranks = pool.run(3, run, name, form, strategy, injecting, inside)
    expected = one_process(CASES[name])
    assert together([rank["fit"] for rank in ranks]) == expected
    assert together([rank["validate"] for rank in ranks]) == expected
    # the trainer has two epochs behind it; Lightning keeps a last batch in prediction
    keeps_last = form == "batches" and CASES[name].drop_last
    once = one_process(CASES[name], [2], drop_last=False if keeps_last else None)
    assert together([rank["predict"] for rank in ranks]) == once


@pytest.mark.parametrize("inside", [True, False], ids=["made in a hook", "handed in"])
@pytest.mark.parametrize("form", ["batches", "indices"])
def test_one_rank(pool: RankPool, form: str, inside: bool) -> None:
    name = "random, rows of the last batch not divided"
    (rank,) = pool.run(1, run, name, form, "ddp_losses", True, inside)
    assert rank["fit"] == rank["validate"] == one_process(CASES[name])
    assert rank["predict"] == one_process(CASES[name], [2])


class MyBatches(BatchSampler):
    """A batch sampler of the user's own, of the kind that Lightning builds anew."""


class Listening(DDPLossStrategy):  # writes down what is told about each loader
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def process_dataloader(self, dataloader: object) -> object:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dataloader = super().process_dataloader(dataloader)
        self.told += [str(warning.message) for warning in caught]
        return dataloader


LOADERS: dict[str, Any] = {
    "m per class": lambda: DataLoader(DATA, batch_size=4, sampler=CASES["m per class"].make()),
    "weighted": lambda: DataLoader(DATA, batch_size=4, sampler=CASES["weighted"].make()),
    "own batches": lambda: DataLoader(DATA, batch_sampler=MyBatches(RandomSampler(DATA), 4, False)),
    "random": lambda: DataLoader(DATA, batch_size=4, shuffle=True),
    "sequential": lambda: DataLoader(DATA, batch_size=4),
    "ours": lambda: DataLoader(DATA, batch_size=6, sampler=GlobalBatchSampler(CASES["m per class"].make(), 6)),
    "our batches": lambda: DataLoader(DATA, batch_sampler=GlobalBatchSampler.batches(CASES["m per class"].make(), 12)),
}


def told(train: str, validate: str, injecting: bool) -> list[str]:
    module = Recorder("random", "batches", inside=False)
    strategy = Listening()
    trainer = make_trainer(strategy, use_distributed_sampler=injecting, limit_train_batches=1, limit_val_batches=1)
    trainer.fit(module, LOADERS[train](), LOADERS[validate]())
    return strategy.told


@pytest.mark.parametrize(
    ("name", "cls"),
    [("m per class", "MPerClassSampler"), ("weighted", "WeightedRandomSampler"), ("own batches", "MyBatches")],
)
def test_a_reshuffled_sampler_is_named_once_on_rank_zero(pool: RankPool, name: str, cls: str) -> None:
    (text,), second = pool.run(2, told, name, "sequential", True)
    assert not second
    assert f"{cls} under DDP: expected its own order" in text
    assert f"GlobalBatchSampler.batches({cls}(...)" in text


QUIET = [
    *((name, "sequential", False) for name in LOADERS),
    *((name, "sequential", True) for name in ("random", "sequential", "ours", "our batches")),
    ("ours", "m per class", True),  # dealt, not shuffled
]


@pytest.mark.parametrize(("train", "validate", "injecting"), QUIET)
def test_what_keeps_its_order_or_has_none_is_left_in_peace(
    pool: RankPool, train: str, validate: str, injecting: bool
) -> None:
    assert pool.run(2, told, train, validate, injecting) == [[], []]


def test_what_is_no_loader_has_no_order() -> None:
    assert describe_reshuffle([1, 2, 3], injecting=True) is None


def loader_of(size: int | None, drop_last: bool = False, own_drop_last: bool = False) -> DataLoader:
    return DataLoader(
        DATA, batch_size=size, drop_last=drop_last, sampler=GlobalBatchSampler(range(9), 3, drop_last=own_drop_last)
    )


@pytest.mark.parametrize("loader", [loader_of(3), loader_of(3, True, True), loader_of(3, False, True), [1, 2]])
def test_a_loader_that_makes_the_same_batches_is_not(loader: object) -> None:
    refuse_other_batches(loader)


class Shuffled(Recorder):
    def __init__(self, form: str) -> None:
        super().__init__("", form, inside=True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.layer(batch[0][:, None].float()).mean()

    def make_loader(self) -> DataLoader:
        if self.form == "batches":
            return DataLoader(DATA, batch_sampler=GlobalBatchSampler.shuffled(ROWS, 6, seed=SEED))
        return DataLoader(DATA, batch_size=6, sampler=GlobalBatchSampler(RandomSampler(range(ROWS)), 6, seed=SEED))


def resumed(folder: Path, form: str, steps: int, strategy: Any) -> list[str]:
    """Save after some steps under our strategy, resume under another one, and return the warnings about places."""
    first = make_trainer(DDPLossStrategy(), max_steps=steps, max_epochs=-1, limit_val_batches=0)
    first.fit(Shuffled(form))
    first.save_checkpoint(folder / "saved.ckpt")
    second = make_trainer(strategy, max_steps=steps + 2, max_epochs=-1, limit_val_batches=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.fit(Shuffled(form), ckpt_path=str(folder / "saved.ckpt"))
    return [str(each.message) for each in caught if "has not read its place" in str(each.message)]


@pytest.mark.parametrize("form", ["batches", "sampler"])
def test_a_place_that_no_strategy_reads_is_reported(pool: RankPool, tmp_path: Path, form: str) -> None:
    (message,) = pool.run(1, resumed, tmp_path, form, 2, "auto")[0]
    assert "after 2 batches of an epoch, but GlobalBatchSampler" in message
    assert "saved.ckpt" in message
    assert pool.run(1, resumed, tmp_path, form, 2, "ddp_losses") == [[]]
    assert pool.run(1, resumed, tmp_path, form, -(-ROWS // 6), "auto") == [[]]  # the end of an epoch
