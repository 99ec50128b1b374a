"""A LightningModule for metric learning: an encoder, a loss, perhaps a miner, and retrieval metrics of the whole held-out set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DistributedSampler

from lightning_ddp_losses.cli.evaluation import HeldOut, HeldOutRows, exact_scalars, retrieval_metrics
from lightning_ddp_losses.core.compat import is_made_by_command_line
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import format_error
from lightning_ddp_losses.microbatch import microbatched


class EmbeddingModule(LightningModule):
    """Trains `encoder` so that `loss(encoder(x), labels[, indices_tuple])` gets small.

    Batches are ``(x, labels)`` or ``(x, labels, indices)``; the indices say where a held-out row stands in its set, so that
    the metrics do not depend on how the rows were dealt out. Logged: ``train_loss`` (mean over the epoch), and on
    validation ``val_loss``, ``precision_at_1``, ``r_precision``, ``map_at_r`` of the global held-out set, equal on every
    rank; on test the same with ``test_``. A cross-batch memory takes no held-out rows: they see a copy of it.

    Args:
        encoder: x -> embeddings (B, D).
        loss: (embeddings, labels[, indices_tuple]) -> scalar, the pytorch-metric-learning convention. Its parameters are
            trained with the encoder's.
        miner: (embeddings, labels) -> indices_tuple.
        lr: Learning rate of the encoder.
        loss_lr: Learning rate of the loss's own parameters; `lr` if not given.
        chunk_size: Rows of a training batch that the encoder takes at a time (`microbatched`); all of them if not given.
        optimizer: Makes the optimizer from parameter groups.

    Example:
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> from lightning_ddp_losses.cli import MLPEncoder
        >>> module = EmbeddingModule(MLPEncoder(6, 4), ArcFaceLoss(num_classes=3, embedding_size=4), loss_lr=0.01)
    """

    report_title = "Retrieval on the held-out set"
    report_heading = "embeddings"
    report_rows = (
        ("loss", "val_loss"),
        ("precision@1", "precision_at_1"),
        ("R-precision", "r_precision"),
        ("MAP@R", "map_at_r"),
    )

    def __init__(
        self,
        encoder: nn.Module,
        loss: nn.Module,
        miner: Optional[nn.Module] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        *,
        lr: float = 1e-3,
        loss_lr: Optional[float] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        chunk_size: Optional[int] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        super().__init__()
        # made by the command line, the module is described by its plain config; else its parts are not hyperparameters
        parts = () if is_made_by_command_line() else ("encoder", "loss", "miner", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.encoder, self.loss, self.miner = encoder, loss, miner
        self.lr = self.loss_lr = lr
        if loss_lr is not None:
            self.loss_lr = loss_lr
        self.make_optimizer = optimizer
        # the encoder, in chunks; no submodule, which would name every parameter twice
        self._chunked: Callable[[Tensor], Tensor] | None = None
        if chunk_size is not None:
            self._chunked = microbatched(encoder, chunk_size)
        self.rows = HeldOutRows()
        self._evaluated: tuple[nn.Module, ...] = (loss,)  # no submodule of its own
        self.held_out: HeldOut | None = None
        """The held-out set as last evaluated, on rank 0."""

    def configure_model(self) -> None:
        """Divide the encoder over the ranks where the strategy is FSDP2's: each of its layers by itself, then what is left."""
        mesh = self.device_mesh
        if mesh is None or isinstance(self.encoder, FSDPModule):
            return
        for layer in self.encoder.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.encoder, mesh=mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        """Embed a batch."""
        if self.training and self._chunked is not None:
            return self._chunked(x)
        embeddings: Tensor = self.encoder(x)
        return embeddings

    def compute_loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, with the miner's tuples where there is one."""
        return self._loss_of(self.loss, embeddings, labels)

    def _loss_of(self, loss: nn.Module, embeddings: Tensor, labels: Tensor) -> Tensor:
        arguments = [embeddings, labels]
        if self.miner is not None:
            arguments.append(self.miner(embeddings, labels))
        value: Tensor = loss(*arguments)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer of two groups: the encoder and what belongs to the loss."""
        encoder = list(self.encoder.parameters())
        shared = {id(parameter) for parameter in encoder}
        loss = [parameter for parameter in self.loss.parameters() if id(parameter) not in shared]
        parts = [
            {"params": encoder, "lr": self.lr, "name": "encoder"},
            {"params": loss, "lr": self.loss_lr, "name": "loss"},
        ]
        return self.make_optimizer([part for part in parts if part["params"]])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        x, labels = batch[:2]
        loss = self.compute_loss(self(x), labels)
        # reduced once an epoch; for a global loss too, which ranks with different numbers of rows weigh differently
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(labels)
        )
        return loss

    def on_validation_epoch_start(self) -> None:
        """Forget the last evaluation, and keep held-out rows out of a loss that remembers rows."""
        self.rows = HeldOutRows()
        remembers = any(isinstance(module, CrossBatchMemory) for module in self.loss.modules())
        self._evaluated = (self.loss,)
        if remembers:
            self._evaluated = (copy.deepcopy(self.loss),)

    on_test_epoch_start = on_validation_epoch_start

    def on_predict_epoch_start(self) -> None:
        """Forget the last evaluation."""
        self.rows = HeldOutRows()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Embed one batch and keep it until the epoch's end."""
        x, labels, indices = (*batch, None)[:3]
        embeddings = self(x)
        # of a global loss, every rank has the value and adds its share of the rows
        self.rows.add(embeddings, labels, indices, self._loss_of(self._evaluated[0], embeddings, labels))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the embeddings (B, D) of one batch."""
        x, labels, indices = (*batch, None)[:3]
        embeddings: Tensor = self(x)
        self.rows.add(embeddings, labels, indices)
        return embeddings

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the global held-out set."""
        self._evaluate("val_loss", "")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the global test set."""
        self._evaluate("test_loss", "test_")

    def on_predict_epoch_end(self) -> None:
        """Join the ranks' embeddings; rank 0 keeps them."""
        self._keep(self._gather())

    def _evaluate(self, loss_name: str, prefix: str) -> None:
        held_out = self._gather()
        metrics = {loss_name: held_out.loss}
        for name, value in retrieval_metrics(held_out.embeddings, held_out.labels).items():
            metrics[prefix + name] = value
        self._evaluated = (self.loss,)
        # float64, or the logger would round them
        values = exact_scalars(list(metrics.values()), held_out.embeddings.device)
        # every rank holds the same numbers; with both options Lightning keeps them on all ranks, and reduces nothing
        self.log_dict(dict(zip(metrics, values, strict=True)), prog_bar=True, sync_dist=True, rank_zero_only=True)
        self._keep(held_out)

    def _gather(self) -> HeldOut:
        self._warn_of_repeated_rows()
        held_out = self.rows.gather()
        self.rows = HeldOutRows()
        return held_out

    def _keep(self, held_out: HeldOut) -> None:
        if process_groups.rank() == 0 and not self.trainer.sanity_checking:
            self.held_out = HeldOut(held_out.embeddings.cpu(), held_out.labels.cpu(), held_out.loss)

    def _warn_of_repeated_rows(self) -> None:
        """Say so where a sampler that pads makes rows count twice and nothing tells which."""
        loader = self.trainer.val_dataloaders
        if self.trainer.testing:
            loader = self.trainer.test_dataloaders
        elif self.trainer.predicting:
            loader = self.trainer.predict_dataloaders
        sampler = getattr(loader, "sampler", None)
        if self.rows.indices or not isinstance(sampler, DistributedSampler):
            return
        repeated = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if repeated > 0:
            fix = "Return (x, labels, index) from the dataset, index being the row's position: repeated rows are then dropped."
            what = "held-out rows that the distributed sampler repeats"
            rank_zero_warn(format_error(what, expected=0, got=repeated, fix=fix))
