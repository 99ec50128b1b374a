"""Formulas as people write them, with loops, branches, buffers, sorting and writes, over the rows of all ranks: those of one process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.oracle import Found, Place, assert_near, parity

ROWS = [(5, 2), (0, 7), (4, 0, 3)]
CALLS = 3  # the second one follows the list of the first one


def branches(x: Tensor, y: Tensor) -> Tensor:
    scale = x.std(0)
    if scale.max() > 0.5:
        x = x / scale
    kept = torch.where(x > 0, x, torch.tensor(0.1).double() * x)
    return kept.pow(2).mean() * (1 if (y > 1).any() else 2)


def written(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[z < 0] = 0
    z[:, 0] *= 2
    z.clamp_(max=1.5)
    z[y == 1] = z[y == 1] * 3
    z[y == 2, 1] = 0.25
    z[y == 1, 2:] += 1
    z[torch.arange(len(z)) % 2 == 0] *= 2
    z[y == 0] = torch.linspace(0, 1, 4 * int((y == 0).sum())).double().view(-1, 4)
    z -= z.mean(0)
    return (z * x).sum() / z.abs().sum() + z[y > 0, 3].square().sum()


def centres(x: Tensor, y: Tensor) -> Tensor:
    sums = torch.zeros(3, x.shape[1]).double().index_add(0, y, x)
    means = sums / torch.bincount(y, minlength=3).clamp(min=1)[:, None]
    return (x - means[y]).square().sum(1).mean() - torch.pdist(means).mean()


def both_views(x: Tensor, y: Tensor) -> Tensor:
    z = torch.cat([x, x.flip(1) * 0.5], 0)
    logits = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.cat([torch.arange(len(x)) + len(x), torch.arange(len(x))]))


def in_order(x: Tensor, y: Tensor) -> Tensor:
    z = x.index_select(0, torch.argsort(x[:, 0]))
    gains = (y[x.sum(1).sort(descending=True).indices] == 1).double().cumsum(0)
    return (z.cumsum(0) / torch.arange(1, len(z) + 1)[:, None]).square().mean() + (gains * z[:, 1]).sum()


def order_statistics(x: Tensor, y: Tensor) -> Tensor:
    return x[:, 1].topk(3).values.mean() + x.median() + x[:, 2].quantile(0.3) + x.kthvalue(2, 0).values.sum()


def classes_in_turn(x: Tensor, y: Tensor) -> Tensor:
    found = []
    for label in y.unique():
        z = x[y == label]
        if len(z) > 1:
            found.append(z.var(0).sum())
    return torch.stack(found).mean()


def rows_in_turn(x: Tensor, y: Tensor) -> Tensor:
    value: Any = 0.0
    for row, label in zip(x, y, strict=True):
        value = value + row.square().sum() * (int(label) + 1)
    return value / len(x)


def halves(x: Tensor, y: Tensor) -> Tensor:
    half = x.shape[0] // 2
    first, second = x[:half], x[half : 2 * half]
    others = x.chunk(2, dim=0)
    return F.mse_loss(first, second) + (first * second).sum() + others[0].mean() * others[1].mean()


def pairs(x: Tensor, y: Tensor) -> Tensor:
    first, second = torch.triu_indices(len(x), len(x), 1)
    distances = (x[first] - x[second]).norm(dim=1)
    similar = F.cosine_similarity(x[:, None], x[None], dim=-1)
    return F.relu(1 - distances).mean() + distances.std() + similar[y[:, None] == y].sum()


def without_diagonal(x: Tensor, y: Tensor) -> Tensor:
    mask = torch.zeros(len(x), len(x), dtype=torch.bool)
    mask.fill_diagonal_(True)
    return (x @ x.T)[~mask].view(len(x), len(x) - 1).exp().sum(1).log().mean()


def hardest(x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(x, y, reduction="none")
    threshold = losses.detach().mean() + losses.detach().std()
    hard = losses.topk(max(1, int(0.5 * len(losses)))).values
    z = F.normalize(x, dim=1)
    distances = torch.cdist(z, z)
    is_same = y[:, None] == y[None]
    positive = (distances * is_same).max(1).values
    negative = (distances + is_same * 10).min(1).values
    return hard.mean() + losses[losses < threshold].mean() + F.relu(positive - negative + 0.2).mean()


def sinkhorn(x: Tensor, y: Tensor) -> Tensor:
    q = F.softmax(x / 0.1, 1).detach().T
    q = q / q.sum()
    for _ in range(3):
        q /= q.sum(1, keepdim=True)
        q /= q.shape[0]
        q /= q.sum(0, keepdim=True)
        q /= q.shape[1]
    q *= q.shape[1]
    return -(q.T * F.log_softmax(x, 1)).sum(1).mean()


def weights_of_classes(x: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(3).double().scatter_add(0, y, torch.ones(len(y)).double())
    weights = torch.ones(len(x)).double()
    weights[y == 0] = 2
    weights /= weights.sum()
    return F.cross_entropy(x[:, :3], y, weight=1 / (counts + 1)) + (weights * x.square().sum(1)).sum()


def tables(x: Tensor, y: Tensor) -> Tensor:
    sums = torch.zeros(4).double()
    for label in range(3):
        sums[label] = x[y == label].sum()
    wanted = torch.zeros(len(y), 4).double().scatter_(1, y[:, None], 1)
    return sums.square().sum() + (wanted * x).sum()


def neighbours(x: Tensor, y: Tensor) -> Tensor:
    x = x.roll(1, 0)
    padded = F.pad(x, (0, 0, 1, 1))
    return (x[1:] - x[:-1]).square().mean() + x.diff(dim=0).abs().sum() + padded.unfold(0, 3, 1).mean(2).norm()


def on_the_host(x: Tensor, y: Tensor) -> Tensor:
    chosen = [place for place, label in enumerate(y.tolist()) if label == 1]
    largest = float(x.detach().numpy().max())
    return x[chosen].sum() * 2 + x[torch.tensor(chosen)].mean() * largest + x[torch.where(y == 2)[0]].sum()


def matrices(x: Tensor, y: Tensor) -> Tensor:
    centred = x - x.mean(0, keepdim=True)
    singular = torch.linalg.svdvals(centred)
    spread = torch.cov(x.T) + torch.eye(4)
    return (
        singular.sum() + torch.logdet(spread) + torch.corrcoef(x.T).trace() + torch.bmm(x[:, None], x[:, :, None]).sum()
    )


def spectrum(x: Tensor, y: Tensor) -> Tensor:
    return torch.fft.fft(x, dim=0).abs().mean() + torch.fft.rfft(x, dim=1).abs().square().mean()


def complex_rows(x: Tensor, y: Tensor) -> Tensor:
    z = torch.complex(x, x.flip(1)) * (1 + 2j)
    return (z.mean(0).abs().sum() + (z @ z.mH).real.square().mean() + z.imag.std()).real


def penalty(x: Tensor, y: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((x**3).mean(), x, create_graph=True)
    return (slope.norm(2, dim=1) - 1).pow(2).mean() + x.mean() ** 2


def recomputed(x: Tensor, y: Tensor) -> Tensor:
    def region(z: Tensor) -> Tensor:
        return (F.normalize(z) @ F.normalize(z).T).logsumexp(1).mean() * z.std()

    return checkpoint(region, x, use_reentrant=False)


def compiled(x: Tensor, y: Tensor) -> Tensor:
    square = torch.compile(lambda z: (z * z).sum(), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, about our code, which it leaves to Python
        return square(x) + x.std()


def distributions(x: Tensor, y: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=x, validate_args=False)
    mean = torch.distributions.Categorical(probs=x.softmax(1).mean(0), validate_args=False)
    return chosen.entropy().mean() - mean.entropy() + chosen.log_prob(y).mean()


def sparse_maximum(x: Tensor, y: Tensor) -> Tensor:
    ordered = x.sort(dim=1, descending=True).values
    sums = ordered.cumsum(1) - 1
    place = torch.arange(1, 5).double()
    size = (ordered * place > sums).sum(1, keepdim=True)
    return (F.relu(x - sums.gather(1, size - 1) / size)).square().sum() / len(x)


def with_gaps(x: Tensor, y: Tensor) -> Tensor:
    gaps = x.masked_fill(x > 1, float("nan"))
    return gaps.nanmean() + torch.nan_to_num(gaps, nan=0.5).square().mean() + gaps[~gaps.isnan()].sum()


def unique_labels(x: Tensor, y: Tensor) -> Tensor:
    labels, places, counts = torch.unique(y, return_inverse=True, return_counts=True)
    return (x.sum(1) / counts[places]).sum() / len(labels)


LAYERS: dict[str, nn.Module] = {
    "attention": nn.MultiheadAttention(4, 2, batch_first=True),
    "encoder": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "recurrent": nn.LSTM(4, 4, batch_first=True),
}


def layers(x: Tensor, y: Tensor) -> Tensor:
    """Layers over the rows, and in each row."""
    value = x.sum() * 0
    for layer in LAYERS.values():
        layer.double()
        for parameter in layer.parameters():
            nn.init.constant_(parameter, 0.3)
        for rows in (x[None], x[:, None]):
            found = layer(rows, rows, rows)[0] if isinstance(layer, nn.MultiheadAttention) else layer(rows)
            value = value + (found[0] if isinstance(found, tuple) else found).square().mean()
    return value


class Momentum(nn.Module):
    """Keeps a mean, a number and a queue of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())
        self.register_buffer("number", torch.tensor(0))
        self.register_buffer("queue", torch.ones(4, 16).double())
        self.place = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.number += len(x)
        value = ((x - self.mean).square().sum(1) * (1 + 0.1 * self.number)).mean() + (x @ self.queue.clone()).logsumexp(
            1
        ).mean()
        stop = min(self.place + len(x), 16)
        self.queue[:, self.place : stop] = x.detach().T[:, : stop - self.place]
        self.place = stop % 16
        return value


FORMULAS: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(branches, written, centres, both_views, in_order, order_statistics, classes_in_turn, rows_in_turn, halves, pairs),
    *(without_diagonal, hardest, sinkhorn, weights_of_classes, tables, neighbours, on_the_host, matrices, spectrum),
    *(complex_rows, penalty, recomputed, compiled, distributions, sparse_maximum, with_gaps, unique_labels, layers),
]


def play(place: Place, formula: Any) -> Found:
    """Some calls of a formula, or of a module that is made here, and its buffers."""
    theirs = formula() if isinstance(formula, type) else formula
    ours = functools.partial(global_rows, theirs, name=formula.__name__)
    found, number = {}, sum(place.sizes)
    for call in range(CALLS):
        torch.manual_seed(call)
        of_call = place.evaluated(theirs, ours, torch.randn(number, 4).double(), torch.arange(number) % 3)
        found |= {f"{name} of call {call}": tensor for name, tensor in of_call.items()}
    if isinstance(theirs, nn.Module):
        found |= {f"buffer {name}": tensor.double() for name, tensor in theirs.named_buffers()}
    return found


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_as_in_one_process(pool: RankPool, rows: tuple[int, ...]) -> None:
    parity(pool, play, rows, cases=[*FORMULAS, Momentum], compare=assert_near, seconds=120)
