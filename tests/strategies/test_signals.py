"""Signals to a rank. SLURM's: one checkpoint of all ranks after the same step. SIGTERM: all ranks end after the same step."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.fits import QUIET, make_trainer, weights_of
from tests.oracle import assert_close, batches
from tests.strategies.jobs import TASK, Job, loader
from tests.strategies.sharded_jobs import Sharded, whole_state

AT = 1  # the step of the signal; what is saved then is not the end of the epoch


class SlurmRanks(SLURMEnvironment, RankEnvironment):
    """SLURM as far as Lightning asks whether it is there; ranks as the pool has them."""

    creates_processes_externally = True
    main_address, main_port = RankEnvironment.main_address, RankEnvironment.main_port
    world_size, set_world_size = RankEnvironment.world_size, RankEnvironment.set_world_size
    global_rank, set_global_rank = RankEnvironment.global_rank, RankEnvironment.set_global_rank
    local_rank, node_rank = RankEnvironment.local_rank, RankEnvironment.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        return


class Signalled(Job):  # some ranks get the signal, each at another place of a step
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(dropout(embeddings, 0.2), labels)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == AT and self.global_rank in self.ranks and self.global_rank % 2 == 0:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_after_backward(self) -> None:
        if self.trainer.global_step == AT and self.global_rank in self.ranks and self.global_rank % 2:
            os.kill(os.getpid(), signal.SIGUSR1)


class SignalledShards(Signalled, Sharded):
    """Its classes divided over the ranks."""


def rows(world_size: int) -> DataLoader:
    """The batches of one process in their order, which the strategy deals to the ranks."""
    features, labels = (torch.cat(column) for column in zip(*batches(TASK), strict=True))
    return DataLoader(TensorDataset(features, labels), batch_size=TASK.rows // world_size)


def train(module: Job, environment: Any, folder: str, path: str | None = None) -> dict[str, Tensor]:
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPLossStrategy(use_global_sampler=True),
        plugins=[environment],
        default_root_dir=folder,
        **{**QUIET, "use_distributed_sampler": True},
    )
    torch.manual_seed(5 + dist.get_rank())
    trainer.fit(module, rows(dist.get_world_size()), ckpt_path=path)
    assert not [callback for callback in trainer.callbacks if "interruptions" in type(callback).__module__]
    return weights_of(module)


def fit_signalled(make: type[Signalled], ranks: tuple[int, ...], folder: str) -> dict[str, Tensor]:
    """Train to the end, as the signal's step is not the last one of a job; `scontrol` writes down that it was called."""
    scontrol = Path(folder) / "scontrol"
    if dist.get_rank() == 0:
        scontrol.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/queued"\n')
        scontrol.chmod(0o755)
    before = dict(os.environ)
    os.environ.update({"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"})
    try:
        return train(make(ranks), SlurmRanks(), folder)
    finally:
        os.environ.clear()
        os.environ.update(before)


def fit_unsignalled(make: type[Signalled], folder: str, path: str | None = None) -> dict[str, Tensor]:
    return train(make(()), RankEnvironment(), folder, path)


@pytest.mark.parametrize("make", [Signalled, SignalledShards])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_save_after_the_same_step(
    pool: RankPool, tmp_path: Path, ranks: tuple[int, ...], make: type[Signalled]
) -> None:
    whole = partial(whole_state, weight="loss.W" if make is SignalledShards else None)
    ended = whole(pool.run(2, fit_signalled, make, ranks, str(tmp_path)))
    undisturbed = whole(pool.run(2, fit_unsignalled, make, str(tmp_path)))
    # one checkpoint and one job in the queue; a signal after backward is heard of in the next one
    (path,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    saved = torch.load(path, weights_only=False)
    assert saved["global_step"] == AT + 1 + (ranks == (1,))
    assert (tmp_path / "queued").read_text().splitlines() == ["requeue 7"]
    resumed = whole(pool.run(2, fit_unsignalled, make, str(tmp_path), str(path)))
    for state in (resumed, ended):
        assert_close(state, undisturbed, rtol=0)


class Terminated(Job):  # some ranks get the signal in the validation of the first epoch
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def validation_step(self, batch: Any, index: int) -> None:
        if self.global_rank in self.ranks and self.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def fit_terminated(ranks: tuple[int, ...], epochs: int) -> tuple[int, bool, list[str]]:
    """The steps of a fit, whether the signal ended it, and the collectives of torch.distributed that Lightning calls by name in it."""
    trainer = make_trainer(DDPLossStrategy(), max_epochs=epochs, limit_val_batches=1)
    data = loader()
    broadcasts: list[str] = []
    broadcast = dist.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        broadcasts.append(str(tuple(tensor.shape)))
        return broadcast(tensor, *args, **kwargs)

    has_ended = False
    dist.broadcast = counted
    try:
        trainer.fit(Terminated(ranks), data, data)
    except SIGTERMException:
        has_ended = True
    finally:
        dist.broadcast = broadcast
    return trainer.global_step, has_ended, broadcasts


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_a_signal_in_a_validation_ends_all_ranks_after_the_next_step(pool: RankPool, ranks: tuple[int, ...]) -> None:
    for steps, has_ended, _ in pool.run(2, fit_terminated, ranks, 3):
        assert (steps, has_ended) == (TASK.steps + 1, True)


def test_no_batch_has_a_broadcast_for_the_signal(pool: RankPool) -> None:
    short, long = (pool.run(2, fit_terminated, (), epochs) for epochs in (1, 3))
    for (_, _, few), (steps, has_ended, more) in zip(short, long, strict=True):
        assert (steps, has_ended) == (3 * TASK.steps, False)
        assert more.count("(1,)") == few.count("(1,)")
