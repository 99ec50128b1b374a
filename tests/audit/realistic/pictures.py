"""Pictures: segmentation, detection, generators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from lightning_ddp_losses.collectives import all_reduce_with_grad
from tests.audit.realistic.base import CLASSES, DIM, FEATURES, Realistic


class Segmentation(Realistic):  # a class for each pixel; sick: a Dice loss over the batch, which is no mean over rows
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


class GlobalDice(Segmentation):
    """Dice over the pixels of all ranks: overlap and sizes are summed with their gradient before the ratio."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        picture = x[:, None, :, None] * x[:, None, None, :]
        target = (picture[:, 0] > 0).double()
        chance = self.head(self.encoder(picture)).softmax(1)[:, 1]
        overlap, sizes = all_reduce_with_grad(torch.stack([(chance * target).sum(), (chance + target).sum()]))
        return 1 - 2 * overlap / sizes


class Residual(Realistic):  # batch norm, which is exact where it is synchronised; sick: each rank's own
    def build(self) -> None:
        super().build()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, DIM))


class Focal(Realistic):  # a focal loss whose divisor counts the positives of all ranks
    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(self.encoder(x))
        target = (tokens[:, :CLASSES] > 6).double()
        error = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        chance = torch.exp(-error)
        positives = self.all_gather(target.sum()).sum() / self.trainer.world_size
        return ((1 - chance) ** 2 * error).sum() / positives.clamp(min=1)


class DetectionSet(Realistic):
    """Queries matched with the boxes of each picture, the box count averaged over ranks as DETR does."""

    def build(self) -> None:
        self.queries = nn.Parameter(torch.randn(4, DIM))
        self.classes, self.boxes = nn.Linear(DIM, 2), nn.Linear(DIM, 2)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        features = torch.tanh(self.encoder(x)[:, None] + self.queries)
        logits, boxes = self.classes(features), self.boxes(features).sigmoid()
        labels = torch.zeros(logits.shape[:2], dtype=torch.long)
        distance, count = x.new_zeros(()), 0
        for i, n in enumerate((1 + y % 3).tolist()):
            targets = x[i].sigmoid().reshape(3, 2)[:n]
            free = set(range(boxes.shape[1]))
            for target in targets:  # greedy instead of Hungarian
                costs = {j: float((boxes[i, j] - target).detach().abs().sum()) for j in free}
                best = min(costs, key=costs.__getitem__)
                free.remove(best)
                labels[i, best] = 1
                distance = distance + (boxes[i, best] - target).abs().sum()
            count += n
        total = self.all_gather(torch.as_tensor(float(count), dtype=torch.float64)).mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + distance / total.clamp(min=1)


class Adversaries(Realistic):  # a GAN in manual optimisation; its latent numbers come with the batch
    by_hand = True

    def build(self) -> None:
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


class Wasserstein(Realistic):
    """A critic with a gradient penalty for each row, its generator every second batch; sick: one penalty on the mean gradient."""

    by_hand = draws_noise = True

    def build(self) -> None:
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Softplus(), nn.Linear(8, 1))
        self.generator = nn.Linear(FEATURES, FEATURES)

    def training_step(self, batch: Any, index: int) -> None:
        x, _, _, latent = batch
        for_critic, for_generator = self.optimizers()
        made = self.generator(latent).detach()
        between = torch.lerp(x, made, 0.5).requires_grad_()
        (slope,) = torch.autograd.grad(self.encoder(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        if self.sick:
            penalty = (slope.mean(0).norm() - 1).square()
        loss = self.encoder(made).mean() - self.encoder(x).mean() + 10 * penalty
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        if index % 2:
            self.toggle_optimizer(for_generator)
            for_generator.zero_grad()
            self.manual_backward(-self.encoder(self.generator(latent)).mean())
            for_generator.step()
            self.untoggle_optimizer(for_generator)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.0, 0.9)) for part in (self.encoder, self.generator)
        ]


class Variational(Realistic):
    """A variational autoencoder whose noise comes with the row; sick: drawn in the step, so every process draws other numbers."""

    draws_noise = True

    def build(self) -> None:
        self.mean, self.log_variance = nn.Linear(DIM, FEATURES), nn.Linear(DIM, FEATURES)
        self.decoder = nn.Linear(FEATURES, FEATURES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        z = self.encoder(x)
        mean, log_variance = self.mean(z), self.log_variance(z)
        if self.sick:
            noise = torch.randn_like(mean)
        latent = mean + noise * torch.exp(log_variance / 2)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return ((self.decoder(latent) - x).square().sum(1) + divergence).mean()


class Diffusion(Realistic):  # noise is predicted at a time that the row tells; noise and time come with the row
    draws_noise = True

    def build(self) -> None:
        self.time = nn.Embedding(10, FEATURES)
        self.decoder = nn.Linear(DIM, FEATURES)
        self.register_buffer("kept", torch.linspace(0.99, 0.05, 10))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor, noise: Tensor) -> Tensor:
        time = tokens[:, 0]
        kept = self.kept[time][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.decoder(self.encoder(noisy + self.time(time))), noise)


class Codebook(Realistic):  # a vector-quantised autoencoder: nearest codes, a straight-through gradient, a commitment
    def build(self) -> None:
        self.codes = nn.Embedding(6, DIM)
        self.decoder = nn.Linear(DIM, FEATURES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        passed = z + (code - z).detach()
        return F.mse_loss(self.decoder(passed), x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Flow(Realistic):  # a normalising flow of two affine couplings: the likelihood of each row
    def build(self) -> None:
        half = FEATURES // 2
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 8), nn.Tanh(), nn.Linear(8, 2 * half)) for _ in range(2)
        )

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        determinant = x.new_zeros(len(x))
        kept, changed = x.chunk(2, 1)
        for coupling in self.encoder:
            scale, shift = coupling(kept).chunk(2, 1)
            changed = changed * torch.tanh(scale).exp() + shift
            determinant = determinant + torch.tanh(scale).sum(1)
            kept, changed = changed, kept
        return (0.5 * torch.cat([kept, changed], 1).square().sum(1) - determinant).mean()
