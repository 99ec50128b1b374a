"""One training job for all cells of the matrix of modes: the same steps in one process with plain losses, and on ranks with ours.

A cell is a choice of one level for each mode (`slow/test_matrix.py`). In one process nothing of this package takes part: float64, the plain
losses, the whole batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch.callbacks as callbacks
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import ClassShardedLoss, DDPLossStrategy, GlobalBatchLoss
from tests.fits import listed, make_trainer, scaled, trainer_alone, weights_of
from tests.oracle import Encoder, batches, cuts
from tests.strategies.jobs import TASK, make_loss

Cell = Mapping[str, str]
EPOCHS = 3
CLIP = {"norm": 5.0, "value": 0.5}
SHARDED = "loss.W"


class HooksOnAnyDevice(DDPLossStrategy):
    """Lightning registers communication hooks on CUDA only, and leaves them out without a word elsewhere."""

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:
            self.model.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


class Modes(LightningModule):
    """An encoder, losses on its embeddings, and a head with a mean of its own; trained as a cell says."""

    def __init__(self, cell: Cell, *, ours: bool) -> None:
        super().__init__()
        self.cell, self.every = cell, int(cell["every"])
        self.automatic_optimization = cell["optimisation"] == "automatic"
        torch.manual_seed(1)
        self.encoder, self.head = Encoder(TASK), nn.Linear(TASK.dim, 1)
        self.register_buffer("steps_seen", torch.zeros(1))
        # 1. the losses: plain ones in one process
        self.loss: nn.Module = make_loss("ArcFaceLoss", 1)
        if ours and cell["losses"] == "shards":
            self.loss = ClassShardedLoss(self.loss)
        if cell["losses"] == "several":
            self.at_times = make_loss("CosFaceLoss", 2)
            pairs: nn.Module = pml.SupConLoss()
            self.pairs = GlobalBatchLoss(pairs) if ours else pairs
        # 2. what they compute in, and how
        self.to(torch.float64 if not ours or cell["precision"] == "float64" else torch.float32)
        compiled = {"model": self.encoder, "loss": self.loss}.get(cell["compiled"])
        if compiled is not None and ours:
            compiled.compile(backend="aot_eager" if compiled is self.encoder else "eager")

    # ------------------------------------------------------------------ what is trained

    def encode(self, features: Tensor) -> Tensor:
        features = features.to(self.encoder[0].weight.dtype)
        if self.cell["recomputed"] == "encoder":
            return checkpoint(self.encoder, features, use_reentrant=False)
        return self.encoder(features)

    def of_losses(self, batch: Any, index: int) -> Tensor:
        features, labels = batch["first"] if self.cell["loaders"] == "two" else batch
        embeddings = self.encode(features)
        value = self.loss(embeddings, labels)
        if self.cell["losses"] == "several":
            value = value + 0.5 * self.pairs(embeddings, labels)
            if index % 2:
                value = value + self.at_times(embeddings, labels)
        return value

    def of_head(self, batch: Any, *, detached: bool = False) -> Tensor:
        features, labels = batch["second"] if self.cell["loaders"] == "two" else batch
        embeddings = self.encode(features)
        logits = self.head(embeddings.detach() if detached else embeddings).squeeze(1)
        # as large as the others, or clipping leaves nothing of it
        return 10 * nn.functional.binary_cross_entropy_with_logits(logits, (labels % 2).to(logits.dtype))

    # ------------------------------------------------------------------ how

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        self.steps_seen += 1
        if self.automatic_optimization:
            return self.of_losses(batch, index) + self.of_head(batch)
        first, second = self.optimizers()
        if self.cell["optimisation"] == "two-optimizers":
            self.manual_backward((self.of_losses(batch, index) + self.of_head(batch)) / self.every)
            self.step(index, first, second)
            return None
        # GAN order: the encoder against the head, then the head against the encoder
        self.toggle_optimizer(first)
        self.manual_backward((self.of_losses(batch, index) - 0.01 * self.of_head(batch)) / self.every)
        self.step(index, first)
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.of_head(batch, detached=True) / self.every)
        self.step(index, second)
        self.untoggle_optimizer(second)
        return None

    def step(self, index: int, *optimizers: Any) -> None:
        """Clip and step where a window of accumulation ends, by hand."""
        if (index + 1) % self.every and not self.trainer.is_last_batch:
            return
        # Lightning unscales in the optimizer's step: what is clipped by hand is scaled
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        for optimizer in optimizers:
            if self.cell["clip"] != "no":
                self.clip_gradients(optimizer, scale * CLIP[self.cell["clip"]], self.cell["clip"])
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_start(self) -> None:
        """The first layer trains from the second epoch on, the last one no more in the third."""
        if self.cell["frozen"] == "in-turn":
            self.encoder[0].requires_grad_(self.current_epoch > 0)
            self.encoder[-1].requires_grad_(self.current_epoch < 2)

    def configure_optimizers(self) -> Any:
        head = list(self.head.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("head.")]
        groups = [[*others, *head]] if self.automatic_optimization else [others, head]
        optimizers = [torch.optim.SGD(group, lr=0.02, momentum=0.5) for group in groups]
        return optimizers if len(optimizers) > 1 else optimizers[0]


class Validating(Modes):  # where there are batches of validation
    def validation_step(self, batch: Any, index: int) -> None:
        assert self.of_losses(batch, index).isfinite()


def module_of(cell: Cell, *, ours: bool) -> Modes:
    return (Validating if cell["fits"] == "validating" else Modes)(cell, ours=ours)


def loader_of(cell: Cell, world_size: int, rank: int) -> Any:
    """This rank's slice of each global batch; of two loaders the second one is shorter and begins anew."""
    part = cuts(TASK.rows, world_size)[rank]
    rows = [(features[part], labels[part]) for features, labels in batches(TASK)]
    if cell["loaders"] == "one":
        return listed(rows)
    loaders = {"first": listed(rows), "second": listed(rows[:2])}
    return CombinedLoader(loaders, "max_size_cycle")


def trainer_options(cell: Cell, *, ours: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"max_epochs": 1 if cell["fits"] == "twice" else EPOCHS}
    if cell["fits"] == "validating" and cell["every"] == "1":
        options["val_check_interval"] = 2  # inside a window Lightning would drop what has accumulated by hand
    if cell["optimisation"] == "automatic":
        options["accumulate_grad_batches"] = int(cell["every"])
        if cell["clip"] != "no":
            options |= {"gradient_clip_val": CLIP[cell["clip"]], "gradient_clip_algorithm": cell["clip"]}
    if cell["averaged"] == "SWA":
        options["callbacks"] = [callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, device=None)]
    elif cell["averaged"] == "EMA":
        options["callbacks"] = [callbacks.EMAWeightAveraging(decay=0.8)]
    if ours and cell["precision"] == "16-mixed":
        options["plugins"] = [scaled()]
    elif ours and cell["precision"] != "float64":
        options["precision"] = cell["precision"]
    return options


def strategy_of(cell: Cell) -> DDPLossStrategy:
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "static": {"static_graph": True},
        "views": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "fp16": {"ddp_comm_hook": fp16_compress_hook},
    }
    if cell["ddp"] != "PowerSGD":
        return HooksOnAnyDevice(**options[cell["ddp"]])
    # of a rank as high as the weights': compressed, and nothing is lost
    state = PowerSGDState(None, matrix_approximation_rank=6, start_powerSGD_iter=2, min_compression_rate=0.05)
    return HooksOnAnyDevice(ddp_comm_state=state, ddp_comm_hook=powerSGD_hook)


def run(module: Modes, trainer: Any, world_size: int, rank: int) -> dict[str, Tensor]:
    cell = module.cell
    data = loader_of(cell, world_size, rank)
    validation = loader_of(cell, world_size, rank) if cell["fits"] == "validating" else None
    trainer.fit(module, data, validation)
    if cell["fits"] == "twice":
        trainer.fit_loop.max_epochs += EPOCHS - 1
        trainer.fit(module, data, validation)
    return weights_of(module)


def fit_alone(cell: Cell) -> dict[str, Tensor]:
    """Train in this process on the whole batches, in float64, under plain Lightning; returns the module's state."""
    return run(module_of(cell, ours=False), trainer_alone(**trainer_options(cell, ours=False)), 1, 0)


def fit_on_ranks(cell: Cell) -> dict[str, Tensor]:
    module = module_of(cell, ours=True)
    trainer = make_trainer(strategy_of(cell), **trainer_options(cell, ours=True))
    if cell["compiled"] != "no":
        torch.compiler.reset()
    return run(module, trainer, dist.get_world_size(), dist.get_rank())


def whole(cell: Cell, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The ranks' states as one: equal bit for bit, but for classes that are divided."""
    divided = {SHARDED} if cell["losses"] == "shards" else set()
    for state in states[1:]:
        for name in set(state) - divided:
            assert torch.equal(state[name], states[0][name]), f"{name} differs between ranks"
    joined = {name: torch.cat([state[name] for state in states], 1) for name in divided}
    return {**states[0], **joined}
