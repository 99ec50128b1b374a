"""Self-supervision and metric learning: rows are compared with each other, with centres, or with a slow copy of the model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad
from tests.audit.realistic.base import CLASSES, DIM, FEATURES, Realistic, two_tables


class MoCo(Realistic):  # keys of a momentum encoder, in a queue of the rows of all ranks; sick: of this rank's rows
    def build(self) -> None:
        self.momentum = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(24, DIM), dim=1))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        self.follow(self.momentum, self.encoder)
        with torch.no_grad():
            keys = F.normalize(self.momentum(x.flip(1)), dim=1)
        queries = F.normalize(self.encoder(x), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], 1) / 0.2
        if not self.sick:
            keys = all_gather_with_grad(keys)
        self.queue.copy_(torch.cat([keys, self.queue])[: len(self.queue)])
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class BYOL(Realistic):  # a predictor that follows a slow target
    def build(self) -> None:
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.predictor = nn.Linear(DIM, DIM)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        prediction, target = self.predictor(self.encoder(x)), self.target(x.flip(1)).detach()
        return 2 - 2 * F.cosine_similarity(prediction, target).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow(self.target, self.encoder)


class VICReg(Realistic):  # variance and covariance over the rows of all ranks; sick: of one rank
    def build(self) -> None:
        loss = pml.VICRegLoss()
        self.loss = loss if self.sick else GlobalBatchLoss(loss)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), ref_emb=self.encoder(x.flip(1)))


class BarlowTwins(Realistic):  # the cross-correlation of standardised features over the rows of all ranks
    def build(self) -> None:
        pass

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        views = (all_gather_with_grad(self.encoder(view)) for view in (x, x.flip(1)))
        first, second = ((view - view.mean(0)) / view.std(0) for view in views)
        correlation = first.T @ second / len(first)
        diagonal = torch.diagonal(correlation)
        return (diagonal - 1).square().sum() + 0.05 * (correlation.square().sum() - diagonal.square().sum())


class Dino(Realistic):
    """A centred and sharpened teacher, its centre the mean over all ranks; sick: over this rank's rows."""

    def build(self) -> None:
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("center", torch.zeros(DIM))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        outputs = self.teacher(x.flip(1))
        target = F.softmax((outputs - self.center) / 0.1, dim=1)
        loss = -(target * F.log_softmax(self.encoder(x) / 0.2, dim=1)).sum(1).mean()
        self.update_center(outputs)
        return loss

    @torch.no_grad()
    def update_center(self, outputs: Tensor) -> None:
        center = outputs.mean(0)
        if dist.is_initialized() and not self.sick:
            dist.all_reduce(center)
            center /= dist.get_world_size()
        self.center.mul_(0.9).add_(center, alpha=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow(self.teacher, self.encoder)


class InfoNCE(Realistic):  # a loss of one's own on gathered rows, its temperature learned
    def build(self) -> None:
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = all_gather_with_grad(F.normalize(self.encoder(x), dim=1))
        other = all_gather_with_grad(F.normalize(self.encoder(x.flip(1)), dim=1))
        return F.cross_entropy(z @ other.T / self.log_temperature.exp(), torch.arange(len(z)))


class MaskedAutoencoder(Realistic):
    """Hidden features, told by the row itself, are rebuilt from the others; sick: a mean over this rank's hidden features."""

    def build(self) -> None:
        self.mask_token = nn.Parameter(torch.zeros(FEATURES))
        self.decoder = nn.Linear(DIM, FEATURES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        hidden = tokens[:, :FEATURES] > 4
        errors = (self.decoder(self.encoder(torch.where(hidden, self.mask_token, x))) - x).square() * hidden
        if self.sick:
            return errors.sum() / hidden.sum()
        return (errors.sum(1) / hidden.sum(1).clamp(min=1)).mean()


class Towers(Realistic):  # images and texts; sick: each rank's own negatives, by hand
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


class SigmoidTowers(Realistic):  # a sigmoid for each pair of an image and a text
    def build(self) -> None:
        self.text = nn.EmbeddingBag(9, DIM)
        self.loss = SigLipLoss()

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(F.normalize(self.encoder(x), dim=1), F.normalize(self.text(tokens), dim=1))


class SupervisedContrast(Realistic):  # rows of one label attract each other, over all ranks
    def build(self) -> None:
        self.projector = nn.Linear(DIM, DIM, bias=False)
        self.loss = GlobalBatchLoss(pml.SupConLoss())

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.projector(self.encoder(x)), y // 2)


class MinedTriplets(Realistic):  # hard triplets among the rows of all ranks
    def build(self) -> None:
        self.miner = GlobalBatchMiner(miners.BatchHardMiner())
        self.loss = GlobalBatchLoss(pml.TripletMarginLoss(margin=0.5))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        return self.loss(z, y // 2, self.miner(z, y // 2))


class Remembered(Realistic):  # a memory of earlier rows of all ranks
    def build(self) -> None:
        memory = pml.CrossBatchMemory(pml.ContrastiveLoss(neg_margin=1.5), embedding_size=DIM, memory_size=16)
        self.loss = GlobalBatchLoss(memory)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), y // 2)


class ClassCentres(Realistic):  # ArcFace on normalised embeddings, its weight learned at a rate of its own
    def build(self) -> None:
        self.loss = pml.ArcFaceLoss(CLASSES, DIM)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), y)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.encoder.parameters()}, {"params": self.loss.parameters(), "lr": 0.01}]
        return torch.optim.SGD(groups, lr=0.05)


class Proxies(Realistic):  # proxy anchors against the rows of all ranks
    def build(self) -> None:
        self.loss = GlobalBatchLoss(pml.ProxyAnchorLoss(CLASSES, DIM))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return self.loss(self.encoder(x), y)


class Prototypes(Realistic):
    """Few-shot: queries against the class means of the support rows of all ranks, summed with their gradient."""

    def build(self) -> None:
        pass

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        members = F.one_hot(y, CLASSES).double()
        sums = all_reduce_with_grad(members.T @ self.encoder(x))
        counts = all_reduce_with_grad(members.sum(0)).clamp(min=1)
        queries = self.encoder(x + 0.1)
        return F.cross_entropy(-torch.cdist(queries, sums / counts[:, None]), y)


class MeanTeacher(Realistic):  # labelled and unlabelled rows of two loaders; a slow teacher for the latter
    def build(self) -> None:
        super().build()
        self.teacher = copy.deepcopy(nn.Sequential(self.encoder, self.head)).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Any:
        (x, y, _), (more, _, _) = batch["labelled"], batch["unlabelled"]
        student = self.head(self.encoder(more + 0.1)).log_softmax(1)
        agreement = F.kl_div(student, self.teacher(more).softmax(1), reduction="batchmean")
        return self.objective(x, y, more) + agreement

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow(self.teacher, self.encoder, self.head)

    def train_dataloader(self) -> Any:
        return two_tables()
