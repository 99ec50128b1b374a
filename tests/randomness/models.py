"""Models that draw, each with its step: plain torch, which one process runs without any of our code."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses.randomness import shared_draws
from tests.fits import weights_of

RATE = 0.01  # of SGD
WIDTH, LENGTH, CLASSES = 8, 3, 4
SHARED, MIXUP = "numbers that all rows share", "mixup"


class Attention(nn.Module):
    """A block of a vision transformer: attention and an MLP with dropout and DropPath, and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        x = F.dropout(x, 0.1, self.training)
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, t, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + drop_path(y)
        x = x + drop_path(self.mlp(x))
        return self.head(x[:, 0])


def drop_path(x: Tensor, rate: float = 0.3) -> Tensor:
    """As timm writes it."""
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - rate)
    return x * mask / (1 - rate)


class OfTime(nn.Module):
    """A layer over time, and a head on a summary of its outputs. Rows are in dimension 0, or in 1."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layer = self.make(batch_first)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.head(self.summary(self.layer(x)))
        return self.head(self.summary(self.layer(x.transpose(0, 1))))


class EncoderLayer(OfTime):
    def make(self, batch_first: bool) -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=batch_first)

    def summary(self, outputs: Tensor) -> Tensor:
        return outputs.mean(int(self.batch_first))


class Weighted(nn.Module):
    """Attention that returns its weights, (B * H, T, T) on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1).contiguous()
        return self.head(self.attention(x, x, x, need_weights=True)[0].sum(0))


class Recurrent(OfTime):
    def make(self, batch_first: bool) -> nn.Module:
        return nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=batch_first)

    def summary(self, outputs: tuple[Tensor, Any]) -> Tensor:
        return outputs[0].select(int(self.batch_first), -1)


class Convolutional(nn.Module):
    """Dropout of whole channels, and of single pixels in another order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4 * LENGTH * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x[:, None])
        y = F.dropout2d(y, 0.3)
        y = F.dropout(y.contiguous(memory_format=torch.channels_last), 0.3)
        y = F.feature_alpha_dropout(F.alpha_dropout(y, 0.2, True), 0.2, True)
        return self.head(y.flatten(1))


class Noisy(nn.Module):
    """Draws by every common call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand_like(x.transpose(1, 2)).transpose(1, 2)
        x = x + 0.1 * torch.empty_like(x).normal_() + 0.1 * x.new_empty(x.shape).uniform_()
        x = x + 0.1 * torch.randn(x.size(0), 1, WIDTH, dtype=x.dtype)
        x = x + 0.01 * torch.randint(0, 5, (x.shape[0], 1, 1)).to(x.dtype)
        x = x + 0.01 * torch.randint_like(x, 7) + 0.01 * torch.empty_like(x).exponential_()
        x = x + 0.1 * torch.bernoulli(torch.sigmoid(x)) + torch.normal(x.detach(), 0.1)
        x = self.inner(x)
        picked = torch.multinomial(torch.softmax(x.detach().sum(1), 1), 2)
        y = F.gumbel_softmax(x.sum(1)) + x.sum(1).gather(1, picked).mean(1, keepdim=True)
        return self.head(F.dropout(y, 0.3, inplace=True))


class TwoViews(nn.Module):
    """Two noisy views after each other, as SimCLR has them, and one of each row next to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        first, second = self.encoder(torch.cat([x, x + 0.1 * torch.randn_like(x)])).chunk(2)
        third = self.encoder(x.repeat_interleave(2, dim=0)).unflatten(0, (-1, 2)).sum(1)
        return F.dropout(first, 0.2) + second + third


class Checkpointed(nn.Module):
    """Layers that draw again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True)
        self.noisy = Noisy()

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.noisy, x, use_reentrant=self.use_reentrant)


class MonteCarlo(nn.Module):
    """The mean prediction of several passes with dropout."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(rate), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.net(x.mean(1)) for _ in range(3)]).mean(0)


class Diffusion(nn.Module):
    """Predicts noise at a random time of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.1), nn.SiLU(), nn.Linear(16, WIDTH))
        self.times = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        time = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        level = (time.to(x.dtype) / 10)[:, None]
        predicted = self.net(x * (1 - level) + noise * level + self.times(time))
        return (predicted - noise).square()


class Adversarial(nn.Module):
    """Latents of a generator, judged by a discriminator with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        latents = torch.randn(x.shape[0], 4, dtype=x.dtype)
        fake = self.generator(latents)
        return F.softplus(-self.discriminator(fake)) + F.softplus(self.discriminator(fake.detach() - x.mean(1)))


class Mixed(MonteCarlo):
    """A coefficient of numpy's, Python's and torch's generator, and noise of a weight, equal for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        with shared_draws():
            coefficient = float(numpy.random.beta(0.4, 0.4)) * random.random() * torch.rand(())
            noise = 0.1 * torch.randn_like(self.net[0].weight)
        x = x.mean(1) + noise[0]
        return coefficient * self.net(x) + (1 - coefficient) * self.net(-x)


class Mixup(nn.Module):
    """Mixes each row with another one of the batch, in the data and in the features, whose gradient goes to both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0])
        with shared_draws():
            coefficient = float(numpy.random.beta(0.4, 0.4))
            x = coefficient * x + (1 - coefficient) * x[order]
        y = self.body(x.transpose(0, 1))
        partner = torch.randint(0, x.size(0), (x.size(0),)).long()
        y = y + 0.3 * y[:, partner] + 0.2 * torch.index_select(y, 1, torch.rand(x.shape[0]).argsort())
        y = F.dropout(y, 0.1).mean(0)
        weights = torch.sigmoid(y.detach().mean(1))
        return self.head(y) + self.head(y)[torch.multinomial(weights, y.shape[0], True), :]


CASES: dict[str, Callable[[], nn.Module]] = {
    "vit block": Attention,
    "encoder layer": EncoderLayer,
    "encoder layer, time first": lambda: EncoderLayer(batch_first=False),
    "attention with weights": Weighted,
    "lstm": Recurrent,
    "lstm, time first": lambda: Recurrent(batch_first=False),
    "channels": Convolutional,
    "noise": Noisy,
    "two views": TwoViews,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "re-entrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "mc dropout": MonteCarlo,
    "diffusion": Diffusion,
    "gan": Adversarial,
    SHARED: lambda: Mixed(0.3),
    MIXUP: Mixup,
}


def make(name: str) -> nn.Module:
    """Return a model in float64, the same in every process."""
    torch.manual_seed(0)
    return CASES[name]().double().train()


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def batches(sizes: list[int]) -> list[Tensor]:
    """Return one global batch for each number of rows."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for size in sizes]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a sum over rows, so that the ranks' losses add up to that of one process."""
    output: Any = model(x)
    return output.square().sum()


def one_process(name: str, global_batches: Sequence[Tensor], *, window: int = 1, seed: int = 7) -> dict[str, Tensor]:
    """Return the weights that plain torch has after training in one process, with a step for each window of batches."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seed_all(seed)
    for number, x in enumerate(global_batches, start=1):
        (loss_of(model, x) / len(x) / window).backward()
        if number % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)
