"""Validation, test and prediction on W ranks see each row once, and their metrics are those of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_ddp_losses import DDPLossStrategy, differentiable, gather_predictions, synced
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.doors import handshake
from tests.fits import MeanSquare, Trained, make_trainer, trainer_alone

# torch's and Lightning's own words of what a test does on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `.*_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:The .* loader has batches of one row"),
    pytest.mark.filterwarnings("ignore:.*fault `.*`|The ``compute`` method"),
]

STAGES = ("val", "test")
GENERATOR = torch.Generator().manual_seed(3)
ROWS = torch.rand(64, 3, generator=GENERATOR, dtype=torch.float64)


def rows(number: int) -> TensorDataset:
    return TensorDataset(torch.arange(number), ROWS[:number])


class Evaluated(Trained):  # logs metrics in several ways, and keeps the rows that it saw
    lr = 0.0

    def __init__(self, exchanges: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(()))
        self.error = torchmetrics.MeanSquaredError().double().set_dtype(torch.float64)
        self.ours = differentiable(torchmetrics.MeanSquaredError()).double().set_dtype(torch.float64)
        self.exchanges = exchanges
        self.seen: dict[str, list[list[int]]] = {}
        self.ended = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.weight * batch[1].mean()

    def evaluate(self, stage: str, batch: Any, loader: int) -> None:
        if isinstance(batch, dict):
            batch = batch["first"]
        places, features = batch
        self.seen.setdefault(f"{stage} {loader}", []).append(places.tolist())
        x, y = features[:, 0] * self.weight, features[:, 1]
        if self.exchanges:
            dist.all_reduce(torch.ones(()))
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False}
        if loader == 0:
            self.log(f"{stage}_mean", (x - y).square().mean(), sync_dist=True, batch_size=len(x), **options)
            self.log(f"{stage}_most", (x - y).max(), sync_dist=True, reduce_fx="max", batch_size=len(x), **options)
            self.error.update(x, y)
            self.ours.update(x, y)
            self.log(f"{stage}_error", self.error, **options)
            self.log(f"{stage}_ours", self.ours, **options)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.evaluate("sanity" if self.trainer.sanity_checking else "val", batch, dataloader_idx)

    def test_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.evaluate("test", batch, dataloader_idx)

    def predict_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        self.seen.setdefault(f"predict {dataloader_idx}", []).append(batch[0].tolist())
        return {"place": batch[0], "sum": batch[1].sum(1)}

    def on_validation_epoch_end(self) -> None:
        self.ended += 1


def logged(trainer: Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def run_all(trainer: Trainer, number: int, size: int) -> dict[str, Any]:
    model = Evaluated()
    answers: dict[str, Any] = {}

    def loader(**options: Any) -> DataLoader:
        return DataLoader(rows(number), batch_size=size, **options)

    trainer.fit(model, DataLoader(rows(24), batch_size=4), loader())
    answers["fit"] = logged(trainer)
    trainer.validate(model, loader(), verbose=False)
    answers["val"] = logged(trainer)
    trainer.test(model, [loader(), loader(shuffle=True)], verbose=False)
    answers["test"] = logged(trainer)
    answers["predicted"] = gather_predictions(trainer, trainer.predict(model, loader()))
    return answers | {"seen": model.seen, "ended": model.ended}


def run_on_ranks(number: int, size: int, **options: Any) -> dict[str, Any]:
    trainer = make_trainer(DDPLossStrategy(**options), use_distributed_sampler=True, num_sanity_val_steps=2)
    return run_all(trainer, number, size)


def together(answers: list[dict[str, Any]], stage: str) -> list[int]:
    """The rows that the ranks saw, step after step."""
    batches = [answer["seen"].get(stage, []) for answer in answers]
    longest = max(map(len, batches))
    return [row for step in range(longest) for own in batches for row in (own[step] if step < len(own) else [])]


@pytest.mark.parametrize(
    ("world_size", "number", "size"), [(1, 7, 2), (2, 13, 3), (3, 13, 3), (3, 19, 6), (4, 19, 2), (2, 7, 1)]
)
def test_every_row_once_and_the_metrics_of_one_process(pool: RankPool, world_size: int, number: int, size: int) -> None:
    truth = run_all(trainer_alone(num_sanity_val_steps=2), number, size)
    answers = pool.run(world_size, run_on_ranks, number, size)
    everything = list(range(number))
    # validation of fit and validation alone; test in order and shuffled; prediction
    first = together(answers, "sanity 0")
    assert first == everything[: len(first)]
    assert len(first) > min(number, 2 * world_size * size) - world_size  # what the last batch was lent
    assert sorted(together(answers, "val 0")) == sorted(2 * everything)
    assert together(answers, "test 0") == everything
    assert sorted(together(answers, "test 1")) == everything
    assert together(answers, "predict 0") == everything
    for answer in answers:
        assert answer["ended"] == 3
        assert answer["predicted"]["place"].tolist() == everything
        for stage in ("fit", "val", "test"):
            assert answer[stage].keys() == truth[stage].keys()
            for name, value in truth[stage].items():
                assert answer[stage][name] == pytest.approx(value, rel=1e-9, abs=0), (stage, name)
    if size > 1:
        for stage in ("val 0", "test 0", "test 1", "predict 0"):
            assert len({len(answer["seen"][stage]) for answer in answers}) == 1


def test_padded_is_lightnings_way(pool: RankPool) -> None:
    padded = pool.run(3, padded_rows, {"evaluation": "padded"})
    plain = pool.run(3, padded_rows, {"losses": []})
    lightnings = pool.run(3, padded_rows, None)
    assert padded == plain == lightnings
    assert sorted(row for own in padded for row in own) != list(range(13))


def padded_rows(options: dict[str, Any] | None) -> list[int]:
    strategy = "ddp" if options is None else DDPLossStrategy(**options)
    model = Evaluated()
    trainer = make_trainer(strategy, use_distributed_sampler=True)
    trainer.fit(model, DataLoader(rows(24), batch_size=4), DataLoader(rows(13), batch_size=2))
    return [row for batch in model.seen["val 0"] for row in batch]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return zip(range(5), ROWS[:5], strict=True)


class Batches:
    def __iter__(self) -> Any:
        yield [torch.arange(2), ROWS[:2]]


class Marked(DataLoader):  # a loader with a constructor of its own, which Lightning could not build again
    def __init__(self, number: int, mark: str) -> None:
        super().__init__(rows(number), batch_size=3, num_workers=1, persistent_workers=True, collate_fn=list)
        self.own_mark = mark


def initialise(worker: int) -> None:
    pass


def kept_options() -> dict[str, Any]:
    generator = torch.Generator()
    loader = DataLoader(rows(13), batch_size=3, worker_init_fn=initialise, generator=generator)
    used = validate(loader)[1].val_dataloaders
    ours = {"kept": used.generator is generator and used.worker_init_fn is initialise, "size": used.batch_size}
    return ours | {"untouched": list(loader.sampler) == list(range(13)), "own": used is not loader}


def test_options_of_the_loader_are_kept_and_it_is_untouched(pool: RankPool) -> None:
    for answer in pool.run(2, kept_options):
        assert answer == {"kept": True, "size": 3, "untouched": True, "own": True}


def with_workers() -> list[list[int]]:
    trainer = make_trainer("ddp_losses", use_distributed_sampler=True)
    model, loader = Evaluated(), Marked(13, "mine")
    seen = []

    def step(batch: Any, batch_idx: int) -> None:
        seen.append([int(place) for place, _ in batch])

    model.validation_step = step  # type: ignore[assignment, method-assign]
    for _ in range(2):
        trainer.validate(model, loader, verbose=False)
    assert trainer.val_dataloaders.own_mark == "mine"
    return seen


@pytest.mark.slow
def test_workers_that_persist_and_loaders_of_another_class(pool: RankPool) -> None:
    assert pool.run(2, with_workers) == [[[0, 1, 2], [6, 7, 8], [11]] * 2, [[3, 4, 5], [9, 10], [12]] * 2]


LEFT: dict[str, tuple[Callable[[], Any], list[list[list[int]]]]] = {
    "a DistributedSampler of the user's": (
        lambda: DataLoader(rows(5), batch_size=2, sampler=DistributedSampler(rows(5), shuffle=False)),
        [[[0, 2], [4]], [[1, 3], [0]]],
    ),
    "ours": (
        lambda: DataLoader(
            rows(5), batch_sampler=GlobalBatchSampler.batches(SequentialSampler(range(5)), 4, drop_last=True)
        ),
        [[[0, 1]], [[2, 3]]],
    ),
    "a stream": (lambda: DataLoader(Stream(), batch_size=2), [[[0, 1], [2, 3], [4]]] * 2),
    "no loader": (Batches, [[[0, 1]]] * 2),
}


def validate(loader: Any, model: Evaluated | None = None, **options: Any) -> tuple[list[list[int]], Trainer]:
    """What one rank sees in a validation, and the trainer."""
    model = model or Evaluated()
    trainer = make_trainer("ddp_losses", use_distributed_sampler=True, **options)
    trainer.validate(model, loader, verbose=False)
    return model.seen.get("val 0", []), trainer


def seen_in(name: str) -> list[list[int]]:
    return validate(LEFT[name][0]())[0]


@pytest.mark.filterwarnings("ignore:.*IterableDataset")
@pytest.mark.parametrize("name", LEFT)
def test_what_lightning_leaves_alone_is_left_alone(pool: RankPool, name: str) -> None:
    assert pool.run(2, seen_in, name) == LEFT[name][1]


def several(kind: str) -> dict[str, list[list[int]]]:
    model = Evaluated()
    limit: Any = 0.5 if kind == "half" else 1.0
    trainer = make_trainer("ddp_losses", use_distributed_sampler=True, limit_val_batches=limit)
    loaders: Any = DataLoader(rows(13), batch_size=2, sampler=SubsetRandomSampler(range(0, 13, 2)))
    if kind == "combined":
        loaders = CombinedLoader({"first": DataLoader(rows(13), batch_size=2), "other": loaders}, "min_size")
    if kind == "no batches":
        loaders = DataLoader([[torch.arange(k, k + 2), ROWS[k : k + 2]] for k in range(0, 10, 2)], batch_size=None)
    if kind == "half":
        loaders = DataLoader(rows(24), batch_size=2)
    torch.manual_seed(dist.get_rank())  # each rank would shuffle in its own way
    trainer.fit(model, DataLoader(rows(24), batch_size=4), loaders)
    return {"seen": model.seen}


def test_subsets_combined_loaders_and_limits(pool: RankPool) -> None:
    assert sorted(together(pool.run(2, several, "subset"), "val 0")) == list(range(0, 13, 2))
    assert together(pool.run(2, several, "combined"), "val 0") == list(range(8))
    assert together(pool.run(2, several, "half"), "val 0") == list(range(12))
    assert together(pool.run(2, several, "no batches"), "val 0") == list(range(10))


def validate_rows(number: int, size: int, exchanges: bool = False, more: int = 0, **options: Any) -> list[list[int]]:
    """Validate on so many rows; rank 1 may have more."""
    loader = DataLoader(rows(number + more * dist.get_rank()), batch_size=size)
    return validate(loader, Evaluated(exchanges), **options)[0]


def predict_few() -> None:
    make_trainer("ddp_losses", use_distributed_sampler=True).predict(Evaluated(), DataLoader(rows(2), batch_size=2))


def test_a_step_that_exchanges_where_ranks_have_as_many_batches(pool: RankPool) -> None:
    # no rank waits if the batch that some ranks lack is left out, or if all have as many
    limited = pool.run(2, validate_rows, 5, 1, True, limit_val_batches=2)
    assert together([{"seen": {"": own}} for own in limited], "") == [0, 1, 2, 3]
    pool.run(2, validate_rows, 5, 2, True)


class Retrieved(Evaluated):  # logs a metric with list states that torchmetrics gathers item by item
    def __init__(self, convert: Callable[[Any], Any]) -> None:
        super().__init__()
        self.found = convert(torchmetrics.retrieval.RetrievalMAP())

    def evaluate(self, stage: str, batch: Any, loader: int) -> None:
        places, features = batch
        self.found.update(features[:, 0], features[:, 1] > 0.5, indexes=places % 3)
        self.log("map", self.found, on_step=False, on_epoch=True)


def retrieve(convert: Callable[[Any], Any], number: int, limit: Any = 1.0) -> float:
    trainer = make_trainer("ddp_losses", use_distributed_sampler=True, limit_val_batches=limit)
    loader = DataLoader(rows(number), batch_size=1)
    with warnings.catch_warnings():
        # the candidates of a query are spread over ranks, which synced mentions
        warnings.filterwarnings("ignore", "metric RetrievalMAP.*on other ranks")
        return float(trainer.validate(Retrieved(convert), loader, verbose=False)[0]["map"])


def as_is(metric: Any) -> Any:
    return metric


def test_list_states_of_different_lengths(pool: RankPool) -> None:
    """synced is exact."""
    alone = trainer_alone()
    truth = alone.validate(Retrieved(as_is), DataLoader(rows(5), batch_size=5), verbose=False)[0]["map"]
    assert pool.run(2, retrieve, synced, 5) == pytest.approx([truth] * 2, rel=1e-9)
    # the batch that some ranks lack is left out
    assert pool.run(2, retrieve, as_is, 5, 2) == pool.run(2, retrieve, synced, 5, 2)


def test_a_config_names_the_option() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(DDPLossStrategy, "strategy")

    def parsed(value: str) -> Any:
        text = f"class_path: lightning_ddp_losses.DDPLossStrategy\ninit_args:\n  evaluation: {value}\n"
        return parser.instantiate(parser.parse_object({"strategy": yaml.safe_load(text)})).strategy

    assert parsed("padded").evaluation == "padded"
    assert parsed("exact").evaluation == "exact"
    with pytest.raises(Exception, match="evaluation"):
        parsed("once")


# A rank that fails in an evaluation tells the others after their last batch, without checks: nobody waits in what
# comes next.


class Unreadable(RuntimeError):
    pass


class Rows(Dataset[Tensor]):  # on rank 1 one of them cannot be read
    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        if self.broken and index > 15 and dist.get_rank() == 1:
            raise Unreadable("row 16")
        return torch.full((3,), float(index))


class Fails(MeanSquare):
    """In a step of rank 1, or where it gets its rows; the peers go on to a metric over all ranks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.mean = torchmetrics.MeanMetric()

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        if self.where == "step" and index == 1 and dist.get_rank() == 1:
            raise Unreadable("row 16")
        return batch

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.mean.update(self.predict_step(batch, index))
        self.log("mean", self.mean, on_epoch=True)

    test_step = validation_step


def run(stage: str, where: str) -> int:
    """Return how many handshakes an evaluation without a failure opens."""
    # batches are of one rank each, as Lightning injects no sampler here
    loader = DataLoader(Rows(where == "data"), batch_size=4)
    trainer = make_trainer(DDPLossStrategy(check_calls=False))
    before = handshake.number_opened()
    if stage == "fit":
        trainer.fit(Fails(where), DataLoader(Rows(False), batch_size=4), loader)
    else:
        getattr(trainer, stage)(Fails(where), loader, **({} if stage == "predict" else {"verbose": False}))
    return handshake.number_opened() - before


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_that_is_well_ends_well(pool: RankPool, stage: str) -> None:
    assert len(set(pool.run(2, run, stage, "nowhere"))) == 1
