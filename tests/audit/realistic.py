"""Small forms of what people train: each healthy module computes on W ranks what one process does; its sick twin has one usual fault."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad

ROWS, FEATURES, DIM, CLASSES, TOKENS = 32, 6, 5, 4, 7


def table() -> DataLoader[Any]:
    """Features, labels and tokens, four rows to a batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 9, (ROWS, TOKENS), generator=generator)
    return DataLoader(TensorDataset(x, torch.arange(ROWS) % CLASSES, tokens), batch_size=4)


def two_tables() -> CombinedLoader:
    """Labelled and unlabelled rows, side by side."""
    return CombinedLoader({"labelled": table(), "unlabelled": table()}, "max_size")


class Realistic(LightningModule):
    """Builds from one seed; subclasses write ``build`` and ``objective``."""

    def __init__(self, *, sick: bool = False) -> None:
        super().__init__()
        self.sick = sick
        torch.manual_seed(5)
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, DIM))
        self.build()
        self.double()

    def build(self) -> None:
        self.head = nn.Linear(DIM, CLASSES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)), y)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.objective(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


# ---------------------------------------------------------------------- self-supervised


class MoCo(Realistic):
    """Keys of a momentum encoder, in a queue of the rows of all ranks; sick: of this rank's rows."""

    def build(self) -> None:
        self.momentum = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(24, DIM), dim=1))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = F.normalize(self.momentum(x.flip(1)), dim=1)
        queries = F.normalize(self.encoder(x), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], 1) / 0.2
        if not self.sick:
            keys = all_gather_with_grad(keys)
        self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class BYOL(Realistic):
    """A predictor that follows a slow target."""

    def build(self) -> None:
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.predictor = nn.Linear(DIM, DIM)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        prediction, target = self.predictor(self.encoder(x)), self.target(x.flip(1)).detach()
        return 2 - 2 * F.cosine_similarity(prediction, target).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class VICReg(Realistic):
    """Variance and covariance over the rows of all ranks; sick: of one rank."""

    def build(self) -> None:
        loss = pml.VICRegLoss()
        self.loss = loss if self.sick else GlobalBatchLoss(loss)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), ref_emb=self.encoder(x.flip(1)))


class Towers(Realistic):
    """Images and texts; sick: each rank's own negatives, by hand."""

    def build(self) -> None:
        self.text = nn.EmbeddingBag(9, DIM)
        self.loss = ClipLoss()

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        images, texts = F.normalize(self.encoder(x), dim=1), F.normalize(self.text(tokens), dim=1)
        if not self.sick:
            return self.loss(images, texts)
        logits = images @ texts.T * self.loss.logit_scale.exp()
        places = torch.arange(len(x))
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


class InfoNCE(Realistic):
    """A loss of one's own on gathered rows."""

    def build(self) -> None:
        pass

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = all_gather_with_grad(F.normalize(self.encoder(x), dim=1))
        other = all_gather_with_grad(F.normalize(self.encoder(x.flip(1)), dim=1))
        return F.cross_entropy(z @ other.T / 0.3, torch.arange(len(z)))


class MeanTeacher(Realistic):
    """Labelled and unlabelled rows of two loaders; a slow teacher for the latter."""

    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(nn.Sequential(self.encoder, self.head)).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Any:
        (x, y, _), (more, _, _) = batch["labelled"], batch["unlabelled"]
        student = self.head(self.encoder(more + 0.1)).log_softmax(1)
        agreement = F.kl_div(student, self.teacher(more).softmax(1), reduction="batchmean")
        return self.objective(x, y, more) + agreement


# ---------------------------------------------------------------------- pictures


class Segmentation(Realistic):
    """A class for each pixel; sick: a Dice loss over the batch, which is no mean over rows."""

    def build(self) -> None:
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
        self.head = nn.Conv2d(4, 2, 1)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        picture = x[:, None, :, None] * x[:, None, None, :]
        logits, target = self.head(self.encoder(picture)), (picture[:, 0] > 0).long()
        if not self.sick:
            return F.cross_entropy(logits, target)
        chance = logits.softmax(1)[:, 1]
        return 1 - 2 * (chance * target).sum() / (chance.sum() + target.sum())


class Residual(Realistic):
    """Batch norm, which is exact where it is synchronised; sick: each rank's own."""

    def build(self) -> None:
        super().build()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM))


class Adversaries(Realistic):
    """A GAN in manual optimisation; its latent numbers come with the batch."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.encoder = spectral_norm(nn.Linear(FEATURES, 1))
        self.generator = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, FEATURES))

    def training_step(self, batch: Any, index: int) -> None:
        x = batch[0]
        for_critic, for_generator = self.optimizers()
        for optimizer, is_critic in ((for_critic, True), (for_generator, False)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            made = self.generator(x.flip(1))
            if is_critic:
                loss = F.softplus(-self.encoder(x)).mean() + F.softplus(self.encoder(made.detach())).mean()
            else:
                loss = F.softplus(-self.encoder(made)).mean()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.encoder, self.generator)]


# ---------------------------------------------------------------------- text, sequences, tables


class LanguageModel(Realistic):
    """A causal transformer whose output shares the embedding's weight."""

    def build(self) -> None:
        self.embedding = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 9, bias=False)
        self.out.weight = self.embedding.weight

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS - 1, dtype=torch.float64)
        hidden = self.encoder(self.embedding(tokens[:, :-1]), src_mask=mask)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Sequences(Realistic):
    """An LSTM on sequences with lengths; sick: a mean over the valid steps of one rank."""

    def build(self) -> None:
        self.encoder = nn.LSTM(1, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        lengths = tokens[:, 0].clamp(max=TOKENS)
        if not self.sick:
            packed = pack_padded_sequence(tokens[..., None].double(), lengths, batch_first=True, enforce_sorted=False)
            return F.cross_entropy(self.head(self.encoder(packed)[1][0][0]), y)
        states, _ = self.encoder(tokens[..., None].double())
        valid = torch.arange(TOKENS) < lengths[:, None]
        return F.cross_entropy(self.head(states)[valid], y[:, None].expand(-1, TOKENS)[valid])


class Recommender(Realistic):
    """Sparse embeddings of users and items, a rating for each row."""

    def build(self) -> None:
        self.users = nn.Embedding(9, DIM, sparse=True)
        del self.encoder

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        score = (self.users(tokens[:, 0]) * self.users(tokens[:, 1])).sum(1)
        return F.binary_cross_entropy_with_logits(score, (y % 2).double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


# ---------------------------------------------------------------------- ways of training


class LowRank(Realistic):
    """A frozen model with a trained correction of low rank."""

    def build(self) -> None:
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(DIM, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        return F.cross_entropy(self.head(z) + self.up(self.down(z)), y)


class Distillation(Realistic):
    """A student of a frozen teacher; sick: a sum over the rows."""

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        student, teacher = self.head(self.encoder(x)).log_softmax(1), self.teacher(x).softmax(1)
        return F.kl_div(student, teacher, reduction="sum" if self.sick else "batchmean")


class Scheduled(Realistic):
    """AdamW with decay for some parameters, a schedule by step, a metric that is logged."""

    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.MeanMetric()

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(self.encoder(x))
        self.accuracy(logits.argmax(1) == y)
        self.log("accuracy", self.accuracy)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ClassCentres(Realistic):
    """ArcFace on normalised embeddings, its weight learned at a rate of its own."""

    def build(self) -> None:
        self.loss = pml.ArcFaceLoss(CLASSES, DIM)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), y)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.encoder.parameters()}, {"params": self.loss.parameters(), "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.05)


class GradientNorms(Realistic):
    """Sick always: tasks balanced by the norms of their gradients, which are no means over rows."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        losses = [F.cross_entropy(self.head(z), y), z.square().mean()]
        shared = self.encoder[2].weight
        norms = [torch.autograd.grad(each, shared, retain_graph=True)[0].norm() for each in losses]
        return losses[0] / norms[0] + losses[1] / norms[1]


class Mixed(Realistic):
    """Sick always: mixup with other rows of the batch, in an order that is drawn."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        order = torch.randperm(len(x))
        logits = self.head(self.encoder(0.7 * x + 0.3 * x[order]))
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


class ManyTasks(Realistic):
    """Tasks weighed by uncertainties that are learned, behind a checkpointed and weight-normalised encoder."""

    def build(self) -> None:
        self.encoder[0] = weight_norm(self.encoder[0])
        self.head, self.value = nn.Linear(DIM, CLASSES), nn.Linear(DIM, 1)
        self.uncertainty = nn.Parameter(torch.zeros(2))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = checkpoint(self.encoder, x, use_reentrant=False)
        losses = torch.stack([F.cross_entropy(self.head(z), y), F.mse_loss(self.value(z)[:, 0], x.sum(1))])
        return (losses * torch.exp(-self.uncertainty) + self.uncertainty).sum()


class GivenTriplets(Realistic):
    """Anchor, positive and negative in each row."""

    def build(self) -> None:
        self.loss = nn.TripletMarginLoss(margin=2.0)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), self.encoder(x + 0.1), self.encoder(x.flip(1)))
