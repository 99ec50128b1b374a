"""Small training jobs and how tests run them: on ranks under a strategy, and in one process under plain Lightning.

The one process trains on the whole batches with none of our code; slices are even unless a test says otherwise, so the
mean over ranks of the ranks' means is the mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.fits import listed, make_trainer, trainer_alone
from tests.oracle import Encoder, Task, batches, cuts

TASK = Task()
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "plain": partial(torch.optim.SGD, lr=0.1),
    "adam": partial(torch.optim.Adam, lr=0.05),
    "still": partial(torch.optim.SGD, lr=0.0),
}
Strategy = dict[str, Any] | str
Make = Callable[[], "Job"]


def make_loss(name: str = "ArcFaceLoss", seed: int = 0) -> nn.Module:
    """A learnable loss of pytorch-metric-learning; the same seed gives the same weight on every rank."""
    torch.manual_seed(100 + seed)
    loss: nn.Module = getattr(pml, name)(num_classes=TASK.classes, embedding_size=TASK.dim)
    return loss.double()


class Job(LightningModule):
    """An encoder and one learnable loss in float64; jobs differ in `build`, in `loss_of` or `objective`, or step by hand."""

    by_hand = False

    def __init__(self, loss: str = "ArcFaceLoss", optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.automatic_optimization = not self.by_hand
        torch.manual_seed(1)
        self.encoder = Encoder(TASK).double()
        self.build(loss)

    def build(self, loss: str) -> None:
        self.loss = make_loss(loss)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        return self.loss_of(self.encoder(features), labels, index)

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor | None:
        return self.loss(embeddings, labels)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        return self.objective(*batch, index)

    def optimised(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.optimised())


class Saves(Callback):  # saves at the end of the fit, inside it; None: nothing
    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)


def loader(
    world_size: int | None = None, rank: int | None = None, *, even: bool = True, task: Task = TASK
) -> DataLoader:
    """The slice of each global batch that a rank gets, this one by default."""
    world_size = dist.get_world_size() if world_size is None else world_size
    part = cuts(task.rows, world_size, even=even)[dist.get_rank() if rank is None else rank]
    return listed([(features[part], labels[part]) for features, labels in batches(task)])


def strategy_of(strategy: Strategy) -> DDPLossStrategy | str:
    return strategy if isinstance(strategy, str) else DDPLossStrategy(**strategy)


def fit(
    make: Make,
    strategy: Strategy | None = None,
    *,
    even: bool = True,
    task: Task = TASK,
    ckpt_path: str | None = None,
    save: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on all ranks of the pool; returns the module's state."""
    trainer = make_trainer(strategy_of(strategy or {}), **options)
    return _state_after(trainer, make(), loader(even=even, task=task), ckpt_path, save)


def fit_alone(
    make: Make, *, task: Task = TASK, ckpt_path: str | None = None, save: str | None = None, **options: Any
) -> dict[str, Tensor]:
    """Train in this process on the whole batches under plain Lightning; returns the module's state."""
    return _state_after(trainer_alone(**options), make(), loader(1, 0, task=task), ckpt_path, save)


def _state_after(
    trainer: Trainer, module: Job, data: DataLoader, ckpt_path: str | None, save: str | None
) -> dict[str, Tensor]:
    trainer.fit(module, data, ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    return dict(module.state_dict())


def assert_as_alone(
    pool: RankPool,
    make: Make,
    strategy: Strategy | None = None,
    *,
    worlds: Sequence[int] = (2,),
    run: Callable[..., list[Any] | dict[str, Tensor]] = fit,
    alone: Make | None = None,
    even: bool = True,
    **options: Any,
) -> None:
    """On each number of ranks, every rank ends with the state of one process on the whole batches.

    Args:
        pool: The ranks.
        make: The job.
        strategy: See ``fit``.
        worlds: Numbers of ranks.
        run: What trains it there, as ``fit`` does.
        alone: The job of the one process; None: the same.
        even: Whether ranks have as many rows.
        options: Of the trainer, or a task, in both.
    """
    expected = fit_alone(alone or make, **options)
    if not even:
        options["even"] = False
    for world_size in worlds:
        assert_all_close(pool.run(world_size, run, make, strategy or {}, **options), expected)
