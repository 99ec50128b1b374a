"""``use_global_sampler=True``: training loaders without a sampler of their own get the batches of one process, and resume."""

from __future__ import annotations

import contextlib
import os
import textwrap
import warnings
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_ddp_losses import DDPLossStrategy, samplers
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close, assert_errors
from tests.doors import draw_of, lightning_compat
from tests.fits import make_trainer, said_on_rank_zero
from tests.oracle import assert_close
from tests.refusals import refusals, rows_of
from tests.samplers.test_global_batch import together
from tests.strategies.test_resuming import AFTER, BATCHES, EPOCHS, ROWS, G, Kill, Killed, Line, by_hand, rows, train


class Plain(Line):  # trains on what its user's loader yields
    options: dict[str, Any]

    def train_dataloader(self) -> Any:
        size = self.options.get("size", G) // self.ranks
        keywords = {name: value for name, value in self.options.items() if name != "size"}
        return DataLoader(rows(), batch_size=size, **keywords)


@contextlib.contextmanager
def global_seed(seed: int | None) -> Any:
    """What ``seed_everything`` leaves in the environment."""
    with mock.patch.dict(os.environ):
        os.environ.pop("PL_GLOBAL_SEED", None)
        if seed is not None:
            os.environ["PL_GLOBAL_SEED"] = str(seed)
        yield


def fit(
    kill: int | None = None,
    save: str = "",
    load: str | None = None,
    *,
    seed: int | None = None,
    kind: type[Line] = Plain,
    loader: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train on this number of ranks, to the end or until it is killed; the loaders are kept for a look at them."""
    module = kind(dist.get_world_size())
    module.options = {"shuffle": True} | (loader or {})  # type: ignore[attr-defined]
    options = {"strategy": {"use_global_sampler": True}, "use_distributed_sampler": True} | trainer_options
    with global_seed(seed):
        trainer = train(module, None if kill is None else (AFTER, kill), save if kill else "", load, **options)
    # the trainer is left as it came
    assert "_prepare_dataloader" not in vars(trainer._data_connector)
    return {"seen": module.seen, "state": dict(module.state_dict())}


def seen_by_all(replies: list[dict[str, Any]]) -> list[list[int]]:
    batches: list[list[int]] = together([[reply["seen"]] for reply in replies])[0]
    return batches


def test_each_row_once_in_batches_that_any_number_of_ranks_shares(pool: RankPool) -> None:
    by_size = [pool.run(world_size, fit, seed=5) for world_size in (1, 2, 3)]
    whole = seen_by_all(by_size[0])
    truth = by_hand(whole)
    for replies in by_size:
        assert seen_by_all(replies) == whole
        assert_all_close([reply["state"] for reply in replies], truth)
    epochs = [list(chain(*whole[start : start + BATCHES])) for start in range(0, len(whole), BATCHES)]
    assert len(epochs) == EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS
    for epoch in epochs:
        assert sorted(epoch) == list(range(ROWS)) != epoch
    # another seed is another order; without seed_everything it is 0
    assert seen_by_all(pool.run(2, fit, seed=6, max_epochs=1)) != whole[:BATCHES]
    assert seen_by_all(pool.run(2, fit, max_epochs=1)) == seen_by_all(pool.run(2, fit, seed=0, max_epochs=1))


def test_what_the_loader_says_is_kept(pool: RankPool) -> None:
    in_order = [list(range(start, min(start + G, ROWS))) for start in range(0, ROWS, G)]
    for world_size in (2, 3):
        assert seen_by_all(pool.run(world_size, fit, loader={"shuffle": False}, max_epochs=1)) == in_order
        kept = seen_by_all(pool.run(world_size, fit, loader={"drop_last": True}, max_epochs=1))
        assert [len(batch) for batch in kept] == [G] * (ROWS // G)


@pytest.mark.parametrize("window", [1, 2])
def test_killed_and_resumed_on_another_number_of_ranks(pool: RankPool, tmp_path: Path, window: int) -> None:
    whole = pool.run(1, fit, seed=5, accumulate_grad_batches=window)
    load, seen = None, []
    replies: list[dict[str, Any]] = []
    # the last run does not call seed_everything: the seed is taken over
    for number, (world_size, kill, seed) in enumerate([(2, 6 + window, 5), (3, 2, 5), (1, None, None)]):
        save = str(tmp_path / f"{number}.ckpt")
        replies = pool.run(world_size, fit, kill, save, load, seed=seed, accumulate_grad_batches=window)
        seen += seen_by_all(replies)
        load = save
    if window == 1:
        assert seen == seen_by_all(whole)
    assert_close(replies[0]["state"], whole[0]["state"])


OTHERS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "global batch": (
        3,
        {"loader": {"size": 18}},
        ["expected 12, as saved, got 18 (3 ranks * batch_size 6)", "batch_size=4"],
    ),
    "seed": (2, {"seed": 6}, ["seed: expected 5, got 6", "seed_everything(5)"]),
    "shuffle": (2, {"loader": {"shuffle": False}}, ["sampler: expected Permutation, as saved, got NaturalOrder"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_changed_since_the_checkpoint_is_named_on_all_ranks(pool: RankPool, tmp_path: Path, name: str) -> None:
    world_size, changes, texts = OTHERS[name]
    save = str(tmp_path / "half.ckpt")
    pool.run(2, fit, 2, save, seed=5)
    errors = pool.errors(world_size, fit, None, "", save, **({"seed": 5} | changes))
    assert {error.type for error in errors} == {"InputError"}
    assert_errors(errors, *texts)


class Longer(Plain):  # a data set that grew, or that rank 1 has more of
    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.arange(60), torch.zeros(60, 3, dtype=torch.float64))
        return DataLoader(data, batch_size=G // self.ranks, shuffle=True)


class LongerOnOne(Longer):
    def train_dataloader(self) -> Any:
        return super().train_dataloader() if dist.get_rank() == 1 else Plain.train_dataloader(self)


def test_a_data_set_of_another_length(pool: RankPool, tmp_path: Path) -> None:
    save = str(tmp_path / "half.ckpt")
    pool.run(2, fit, 2, save)
    assert_errors(
        pool.errors(3, fit, None, "", save, kind=Longer), "length: expected 52, as saved, got 60", of="InputError"
    )
    assert_errors(pool.errors(2, fit, kind=LongerOnOne), "len", of="RankMismatchError")


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Refused(Plain):
    def train_dataloader(self) -> Any:
        return self.options["make"]()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "iterable": (lambda: DataLoader(Numbers(), batch_size=2), {}, "Numbers, which is an IterableDataset"),
    "one of two": (
        lambda: CombinedLoader([DataLoader(rows(), batch_size=6), DataLoader(Numbers())]),
        {},
        "Numbers, which is an IterableDataset",
    ),
    "no loader": (lambda: range(4), {}, "expected torch's DataLoader, got range"),
    "no batches": (lambda: DataLoader(rows(), batch_size=None), {}, "got batch_size=None"),
    "no injection": (
        lambda: DataLoader(rows(), batch_size=6),
        {"use_distributed_sampler": False},
        "Trainer(use_distributed_sampler=False)",
    ),
}


def fit_refused(name: str) -> None:
    make, options, _ = REFUSED[name]
    fit(kind=Refused, loader={"make": make}, **options)


WORDS = {name: words for name, (_, _, words) in REFUSED.items()}
ON_RANKS = rows_of(fit_refused, WORDS, kind="ConfigurationError", same=False)
test_what_cannot_be_sampled_is_refused_by_name = refusals(__name__, "ON_RANKS")


def recipe(devices: int, load: str | None, folder: str) -> list[list[int]]:
    """The documentation's function, on the ranks that there are; the first run is killed after 3 batches."""
    code = textwrap.dedent((samplers.__doc__ or "").split("::\n\n")[1].split("    train(devices=8)")[0])
    module = Line(devices)
    kill = [] if load else [Kill(AFTER, 3, f"{folder}/last.ckpt")]
    given: dict[str, Any] = {
        "Trainer": lambda devices, strategy, max_epochs: make_trainer(
            strategy, max_epochs=1, use_distributed_sampler=True, limit_val_batches=0, callbacks=kill
        ),
        "DDPLossStrategy": DDPLossStrategy,
        "DataLoader": DataLoader,
        "model": module,
        "dataset": TensorDataset(torch.arange(1200), torch.ones(1200, 3, dtype=torch.float64)),
    }
    exec(code.replace("num_workers=4", "num_workers=0"), given)
    with contextlib.suppress(Killed):
        given["train"](devices, load)
    return module.seen


def test_the_recipe_of_the_documentation(pool: RankPool, tmp_path: Path) -> None:
    first = pool.run(2, recipe, 2, None, str(tmp_path))
    second = pool.run(1, recipe, 1, str(tmp_path / "last.ckpt"), str(tmp_path))
    batches = [*together([[seen] for seen in first])[0], *second[0]]
    assert [len(batch) for batch in batches] == [256] * 4 + [1200 - 4 * 256]
    assert sorted(chain(*batches)) == list(range(1200))


class Counted(DataLoader[Any]):  # a loader of the user's class
    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note


def collate(items: list[Any]) -> list[Tensor]:
    return [torch.stack(part) for part in zip(*items, strict=True)]


def start_worker(number: int) -> None:
    pass


GENERATOR = torch.Generator()
KEPT = {
    "num_workers": 1,
    "collate_fn": collate,
    "generator": GENERATOR,
    "worker_init_fn": start_worker,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "timeout": 700.0,
    "multiprocessing_context": "fork",
    "note": "mine",
}


def test_all_else_of_a_loader_is_kept() -> None:
    batches = GlobalBatchSampler.shuffled(ROWS, G, seed=1)
    loader = Counted(rows(), batch_size=G, shuffle=True, **KEPT)
    twin = lightning_compat.with_batch_sampler(loader, batches)
    assert type(twin) is Counted
    for name, value in KEPT.items():
        found = getattr(twin, name)
        if name == "multiprocessing_context":
            found = found.get_start_method()
        assert found is value or found == value, name
    # as torch has them beside batch_sampler=; the user's loader stays what it was
    assert (twin.batch_sampler, twin.batch_size, twin.drop_last) == (batches, None, False)
    assert loader.batch_size == G
    assert len(twin) == BATCHES


class Kinds(Plain):  # looks at the loaders that training got
    def train_dataloader(self) -> Any:
        size = G // self.ranks
        return CombinedLoader(
            {
                "mine": Counted(rows(), batch_size=size, shuffle=True, collate_fn=collate, note="mine"),
                "weighted": DataLoader(rows(), batch_size=size, sampler=WeightedRandomSampler(torch.ones(ROWS), ROWS)),
                "again": DataLoader(rows(), batch_size=size, sampler=RandomSampler(rows(), replacement=True)),
                "own": DataLoader(rows(), batch_size=size, sampler=DistributedSampler(rows(), 2, dist.get_rank())),
                "global": DataLoader(rows(), batch_sampler=GlobalBatchSampler.shuffled(ROWS, G, seed=1)),
            },
            "min_size",
        )

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.layer(batch["mine"][1]).sum()

    def on_train_start(self) -> None:
        loaders = self.trainer.train_dataloader
        ours = {name: draw_of(loader) for name, loader in loaders.items()}
        assert [name for name, draw in ours.items() if draw is not None] == ["mine", "global"]
        mine = loaders["mine"]
        assert isinstance(mine, Counted)
        assert (mine.note, mine.collate_fn) == ("mine", collate)
        assert len(mine) == BATCHES


def look_at_kinds() -> tuple[list[str], list[str]]:
    with said_on_rank_zero() as said, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(kind=Kinds, max_epochs=1)
    warned = [str(warning.message) for warning in caught]
    return [text for text in said if "use_global" in text], [text for text in warned if "use_global" in text]


def test_own_samplers_are_left_alone(pool: RankPool) -> None:
    said = pool.run(2, look_at_kinds)
    (told,), warned = said[0]
    assert "the next 12 rows" in told
    assert "another order than that of strategy='ddp'" in told
    assert [text.split()[7] for text in warned] == ["WeightedRandomSampler", "RandomSampler", "DistributedSampler"]
    assert said[1] == ([], [])
