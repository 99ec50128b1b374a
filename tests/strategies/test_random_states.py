"""A fit with dropout that is killed and resumed on as many ranks has the parameters, bit for bit, of one that was not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerStatus
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_ddp_losses import ClassShardedLoss, DDPLossStrategy, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.doors import RANDOM_STATES, derived_seed, read_random_states, seed_generators_
from tests.fits import make_trainer, said_on_rank_zero
from tests.strategies.test_resuming import AFTER, BATCHES, ROWS, SEED, G, Kill, Killed, Line, X, rows, train

CPU = torch.device("cpu")


class Augmented(Dataset[Any]):  # draws in the process that fetches, from all three generators
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(3, dtype=torch.float64) + random.gauss(0.0, 1.0) + np.random.rand()
        return torch.tensor(index), X[index] + noise


class Stream(IterableDataset[Any]):  # of unknown length: Lightning fetches a batch ahead
    def __iter__(self) -> Any:
        W, rank = dist.get_world_size(), dist.get_rank()
        return ((torch.tensor(row), X[row]) for row in range(rank, ROWS - ROWS % W, W))


class Noisy(Line):  # draws in the forward pass and in a hook; the seeds of the ranks differ
    kind = "global"

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.dropout = nn.Dropout(0.3)
        self.last_states: dict[str, Tensor] = {}

    def train_dataloader(self) -> DataLoader:
        if self.kind == "stream":
            return DataLoader(Stream(), batch_size=G // self.ranks)
        if self.kind == "quiet":
            sampler = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), G, seed=SEED)
            return DataLoader(rows(), batch_sampler=sampler)
        if self.kind == "plain":
            # one rank: torch's sampler draws its seed when it is first asked
            return DataLoader(Augmented(), batch_size=G, shuffle=True)
        sampler = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), G, seed=SEED)
        return DataLoader(Augmented(), batch_sampler=sampler)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        factor = 1 + random.random() * np.random.rand()
        return super().training_step([batch[0], self.dropout(batch[1])], index) * factor


def fit(kill: Any, save: str, load: str | None, *, kind: str = "global", losses: Any = "auto", **options: Any) -> Noisy:
    # a resumed run finds its generators anywhere
    seed_generators_(100 + dist.get_rank() + 7 * (load is not None), CPU)
    module = Noisy(dist.get_world_size())
    module.kind = kind
    train(module, kill, save if kill else "", load, strategy={"losses": losses}, **options)
    module.last_states = read_random_states(CPU)
    return module


PLACES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"after {number}": (AFTER, number, {}) for number in range(1, 12)},
    "at the start of the first epoch": ("on_train_epoch_start", 0, {}),
    "at the end of an epoch": ("on_train_epoch_end", BATCHES, {}),
    "at the start of the second": ("on_train_epoch_start", BATCHES, {}),
    "at the end of an epoch with loaders of its own": (
        "on_train_epoch_end",
        BATCHES,
        {"reload_dataloaders_every_n_epochs": 1},
    ),
    "after the last batch with loaders of its own": (AFTER, BATCHES, {"reload_dataloaders_every_n_epochs": 1}),
    "before loaders are made anew": (AFTER, BATCHES + 2, {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 3}),
    "in validation": ("on_validation_end", 2, {"limit_val_batches": 1, "val_check_interval": 2}),
}

# the batch is there already: what it drew is drawn again
FETCHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "before a step": ("on_train_batch_start", BATCHES + 1, {}),
    "before the first step of an epoch": ("on_train_batch_start", BATCHES, {}),
}


def differing(kind: str, names: list[str], folder: str) -> list[str]:
    """The places where a run that is killed there and resumed ends otherwise than one that is not."""
    wrong = []
    for name in names:
        hook, batches, options = (PLACES | FETCHED)[name]
        whole = fit(None, "", None, kind=kind, **options)
        save = f"{folder}/{name}.ckpt".replace(" ", "_")
        fit((hook, batches), save, None, kind=kind, **options)
        resumed = fit(None, "", save, kind=kind, **options)
        states = resumed.last_states
        same = torch.equal(resumed.layer.weight, whole.layer.weight)
        same &= all(torch.equal(states[generator], state) for generator, state in whole.last_states.items())
        if not same:
            wrong.append(name)
    return wrong


@pytest.mark.slow
def test_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, differing, "global", list(PLACES), str(tmp_path), seconds=120.0) == [[], []]
    assert pool.run(2, differing, "quiet", list(FETCHED), str(tmp_path)) == [[], []]


def test_bit_for_bit_between_epochs_with_a_sampler_of_torchs(pool: RankPool, tmp_path: Path) -> None:
    """Lightning begins an epoch again whose sampler has no place; its end is a place for every sampler."""
    names = [name for name in PLACES if "epoch" in name] + [f"after {BATCHES}"]
    assert pool.run(1, differing, "plain", names, str(tmp_path)) == [[]]


def test_an_iterable_data_set_is_not_asked_twice(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, differing, "stream", ["at the end of an epoch"], str(tmp_path)) == [[], []]


def said_by(run: Any) -> list[str]:
    with said_on_rank_zero() as said:
        run()
    return [text for text in said if "andom numbers" in text]


def derived(save: str, step: int) -> tuple[list[str], bool, Tensor]:
    """What a resumed run says, and whether its generators stood where seed, step and rank put them."""
    run_seed = torch.load(save, weights_only=True)[RANDOM_STATES]["seed"]
    seed_generators_(derived_seed(run_seed, step, dist.get_rank()), CPU)
    expected = read_random_states(CPU)
    found: dict[str, Tensor] = {}

    class Look(Kill):
        def kill(self, trainer: Any, module: Any, *args: Any) -> None:
            found.update(read_random_states(CPU))
            raise Killed

    said = said_by(lambda: fit(None, "", save, callbacks=[Look("on_train_epoch_start", 0, "")], max_epochs=9))
    # the iterator of the next epoch has drawn from torch's since
    is_derived = all(torch.equal(found[name], expected[name]) for name in ("python", "numpy"))
    return said, is_derived, found["torch"]


END = ("on_train_epoch_end", BATCHES)


@pytest.fixture(scope="module")
def end(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks from the end of the first epoch."""
    path = str(tmp_path_factory.mktemp("end") / "end.ckpt")
    pool.run(2, fit_and_forget, END, path)
    return path


def test_on_another_number_of_ranks_they_are_derived(pool: RankPool, end: str) -> None:
    assert torch.load(end, weights_only=True)[RANDOM_STATES]["world_size"] == 2
    for world_size in (3, 1):
        replies = pool.run(world_size, derived, end, BATCHES)
        said = replies[0][0]
        assert len(said) == 1
        assert f"holds those of 2 ranks, and there are {world_size}" in said[0]
        assert f"step {BATCHES} and the rank" in said[0]
        assert all(is_derived for _, is_derived, _ in replies)
        assert len({tuple(state.tolist()) for _, _, state in replies}) == world_size
        assert all(not said for said, _, _ in replies[1:])
    # the same number of ranks says nothing
    assert pool.run(2, derived, end, BATCHES)[0][0] == []


def saved_after_a_fit(save: str, load: str) -> int:
    """The run's seed in a checkpoint that is saved when a resumed fit is over."""
    trainer = make_trainer(DDPLossStrategy(), max_epochs=2)
    trainer.fit(Noisy(dist.get_world_size()), ckpt_path=load)
    trainer.save_checkpoint(save)
    return int(torch.load(save, weights_only=True)[RANDOM_STATES]["seed"])


def test_a_checkpoint_after_the_fit_holds_the_seed_of_the_run(pool: RankPool, tmp_path: Path, end: str) -> None:
    run_seed = torch.load(end, weights_only=True)[RANDOM_STATES]["seed"]
    assert pool.run(1, saved_after_a_fit, str(tmp_path / "again.ckpt"), end) == [run_seed]


def fit_and_forget(kill: Any, save: str, load: str | None = None, **options: Any) -> list[str]:
    return said_by(lambda: fit(kill, save, load, **options))


def test_a_checkpoint_of_another_strategy_says_nothing(pool: RankPool, tmp_path: Path) -> None:
    save = str(tmp_path / "plain.ckpt")
    pool.run(2, fit_and_forget, END, save, losses=[])
    assert RANDOM_STATES not in torch.load(save, weights_only=True)
    assert pool.run(2, fit_and_forget, None, "", save) == [[], []]


class KillInterrupted(Kill):  # saves as a callback does that Lightning tells of an error
    def kill(self, trainer: Any, module: Any, *args: Any) -> None:
        trainer.state.status = TrainerStatus.INTERRUPTED
        super().kill(trainer, module, *args)


def save_anywhere(folder: str) -> list[str]:
    """Save after an error, and as in a signal; resume from the first."""
    for name, kind in (("failed", KillInterrupted), ("hpc_ckpt_1", Kill)):
        fit(None, "", None, callbacks=[kind(AFTER, 3, f"{folder}/{name}.ckpt")])
    return fit_and_forget(None, "", f"{folder}/failed.ckpt")


def test_what_is_saved_where_ranks_may_be_anywhere(pool: RankPool, tmp_path: Path) -> None:
    said, other = pool.run(2, save_anywhere, str(tmp_path))
    for name in ("failed", "hpc_ckpt_1"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)[RANDOM_STATES]
        assert saved["states"] == {}
        assert saved["world_size"] == 2
    assert len(said) == 1
    assert "saved after an error or in a signal" in said[0]
    assert other == []


def test_weights_alone_hold_no_random_states(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "weights.ckpt")
    pool.run(2, save_weights, path)
    assert RANDOM_STATES not in torch.load(path, weights_only=True)


def save_weights(path: str) -> None:
    trainer = make_trainer(DDPLossStrategy(), max_epochs=1, limit_val_batches=0)
    trainer.fit(Noisy(dist.get_world_size()))
    trainer.save_checkpoint(path, weights_only=True)


# Sampled classes and random miners of a resumed run are those that would have come: draws are counted on, not anew.

CLASSES = 12


class Embeds(Line):
    def embed(self, batch: list[Tensor]) -> Tensor:
        return batch[1] * self.layer.weight + self.layer.bias


class Sampling(Embeds):  # classes of which a step samples a half
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        torch.manual_seed(5)
        self.loss = ClassShardedLoss(pml.ArcFaceLoss(CLASSES, 3).double(), sample_rate=0.5)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        return self.loss(self.embed(batch), batch[0] % CLASSES)


class Mining(Embeds):  # pairs of which a miner takes some at random
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.loss = GlobalBatchLoss(pml.ContrastiveLoss())
        self.miner = GlobalBatchMiner(miners.UniformHistogramMiner(num_bins=4, pos_per_bin=2, neg_per_bin=2))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.seen.append(batch[0].tolist())
        embeddings, labels = self.embed(batch), batch[0] % 3
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


def weights(kind: type[Line], kill: Any, save: str, load: str | None) -> list[Tensor]:
    torch.manual_seed(17)
    module = kind(dist.get_world_size())
    train(module, kill, save, load, max_epochs=2)
    return [parameter.detach().clone() for parameter in module.parameters()]


def is_undisturbed(kind: type[Line], folder: str) -> list[bool]:
    """Whether runs that are killed after some steps and resumed end with the weights of one that is not, bit for bit."""
    whole = weights(kind, None, "", None)
    found = []
    for steps in (1, 5, 7):
        save = f"{folder}/{steps}.ckpt"
        weights(kind, (AFTER, steps), save, None)
        found.append(all(map(torch.equal, weights(kind, None, "", save), whole)))
    return found


@pytest.mark.parametrize("kind", [Sampling, Mining])
def test_draws_go_on(pool: RankPool, tmp_path: Path, kind: type[Line]) -> None:
    assert pool.run(2, is_undisturbed, kind, str(tmp_path)) == [[True] * 3] * 2
