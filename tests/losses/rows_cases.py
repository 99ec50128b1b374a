"""Formulas of one process, by name: torch's losses, and those of public code written anew. Each is called with rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracle import own

D = 4
ROWS = [(5, 2, 4), (4, 0, 3), (3, 9), (1, 6), (0, 7), (1, 1)]
Formula = Callable[..., Tensor]


def rows_of_all(sizes: Sequence[int]) -> Tensor:
    """The rows (G, D) of all ranks, for calls that are about something else than their formula."""
    torch.manual_seed(1)
    return torch.randn(sum(sizes), D).double()


def rows_of(sizes: Sequence[int] = (5, 2)) -> Tensor:
    """The rows of this rank."""
    return rows_of_all(sizes)[own(sizes)].requires_grad_()


class Square(torch.autograd.Function):
    """A custom function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class Thrice(torch.autograd.Function):
    """A custom function that returns its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 3 * grads[0]


def views(rows: int) -> list[Tensor]:
    """Two views, (G, D) each."""
    return [torch.randn(rows, D).double(), torch.randn(rows, D).double()]


def classes(rows: int) -> list[Tensor]:
    """Logits (G, D) and labels (G,)."""
    return [torch.randn(rows, D).double(), torch.arange(rows) % D]


def numbers(rows: int) -> list[Tensor]:
    """Two numbers a row, (G,) each."""
    return [torch.randn(rows).double(), torch.randn(rows).double()]


def images(rows: int) -> list[Tensor]:
    """Logits (G, 3, 2, 2) and classes (G, 2, 2)."""
    return [torch.randn(rows, 3, 2, 2).double(), torch.randint(3, (rows, 2, 2))]


def words(rows: int) -> list[Tensor]:
    """Logits (G, T, C) and tokens (G, T), some of them ignored."""
    tokens = torch.randint(D, (rows, 3))
    tokens[::2, 1] = -100
    return [torch.randn(rows, 3, D).double(), tokens]


def chances(rows: int) -> list[Tensor]:
    """Numbers between 0 and 1, (G, D) each."""
    return [torch.rand(rows, D).double(), torch.rand(rows, D).double()]


def triplets(rows: int) -> list[Tensor]:
    """Anchors, positives and negatives, (G, D) each."""
    return [torch.randn(rows, D).double() for _ in range(3)]


def signs(rows: int) -> list[Tensor]:
    """Two views, and 1 or -1 for each row."""
    return [*views(rows), torch.arange(rows) % 2 * 2 - 1]


# ---------------------------------------------------------------------- segmentation


def _parts(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(1), F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).to(logits.dtype)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    p, t = _parts(logits, target)
    overlap, size = (p * t).sum((0, 2, 3)), (p + t).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / (size + 1)).mean()


def dice_of_numpy_style(logits: Tensor, target: Tensor) -> Tensor:
    p, t = _parts(logits, target)
    p, t = p.reshape(len(p), 3, -1), t.reshape(len(t), 3, -1)
    return 1 - (2 * (p * t).sum(axis=(0, 2)) / (p.square() + t).sum(axis=(0, 2)).clamp_min(1e-6)).mean()


def jaccard(logits: Tensor, target: Tensor) -> Tensor:
    p, t = _parts(logits, target)
    overlap = torch.sum(p * t, dim=(0, 2, 3))
    return (1 - (overlap + 1) / (torch.sum(p + t, dim=(0, 2, 3)) - overlap + 1)).mean()


def tversky(logits: Tensor, target: Tensor) -> Tensor:
    p, t = _parts(logits, target)
    hit = (p * t).sum()
    return (1 - (hit + 1) / (hit + 0.3 * (p * (1 - t)).sum() + 0.7 * ((1 - p) * t).sum() + 1)) ** 0.75


def focal(logits: Tensor, target: Tensor) -> Tensor:
    log_p = F.log_softmax(logits, dim=1)
    chosen = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    return (-((1 - chosen.exp()) ** 2) * chosen).mean()


def correlation(logits: Tensor, target: Tensor) -> Tensor:
    """Matthews."""
    p, t = logits[:, 0].sigmoid().reshape(-1), (target == 0).reshape(-1).double()
    tp, fp, fn, tn = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum(), ((1 - p) * (1 - t)).sum()
    return 1 - (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn) + 1).sqrt()


def lovasz(logits: Tensor, target: Tensor) -> Tensor:
    """Over all pixels of the batch: they are sorted."""
    errors = (1 - logits[:, 0] * ((target == 0).double() * 2 - 1)).reshape(-1)
    order = torch.sort(errors, descending=True)
    t = (target == 0).double().reshape(-1)[order.indices]
    overlap, union = t.sum() - t.cumsum(0), t.sum() + (1 - t).cumsum(0)
    grown = 1 - overlap / union
    grown = torch.cat([grown[:1], grown[1:] - grown[:-1]])
    return (F.relu(order.values) * grown).sum()


def masked_dice(logits: Tensor, target: Tensor) -> Tensor:
    wanted = target != 2
    p, t = logits[:, 0].sigmoid()[wanted], (target == 0)[wanted].double()
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def log_cosh_dice(logits: Tensor, target: Tensor) -> Tensor:
    return torch.log(torch.cosh(dice(logits, target)))


# ---------------------------------------------------------------------- self-supervised


def batch_norm(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def barlow(a: Tensor, b: Tensor) -> Tensor:
    c = batch_norm(a).T @ batch_norm(b) / a.shape[0]
    return (c.diagonal() - 1).pow(2).sum() + 0.005 * (c.pow(2).sum() - c.diagonal().pow(2).sum())


def vicreg(a: Tensor, b: Tensor) -> Tensor:
    value = F.mse_loss(a, b)
    for z in (a, b):
        z = z - z.mean(0)
        value = value + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        c = z.T @ z / (z.shape[0] - 1)
        value = value + (c.pow(2).sum() - c.diagonal().pow(2).sum()) / D
    return value


def sigreg(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """An Epps-Pulley test along directions."""
    t = torch.linspace(0.2, 3, 5).double()
    angles = (a @ F.normalize(w, dim=0)).unsqueeze(-1) * t
    bell = (-0.5 * t**2).exp()
    error = (angles.cos().mean(0) - bell).square() + angles.sin().mean(0).square()
    return (error * bell).sum(-1).mean() * len(a)


def flops(a: Tensor, b: Tensor) -> Tensor:
    return (a.relu().log1p().abs().mean(0) ** 2).sum()


def iic(a: Tensor, b: Tensor) -> Tensor:
    joint = (a.softmax(1).unsqueeze(2) * b.softmax(1).unsqueeze(1)).sum(dim=0)
    joint = (joint + joint.t()) / 2
    joint = joint / joint.sum()
    rows, columns = joint.sum(1, keepdim=True), joint.sum(0, keepdim=True)
    return -(joint * (joint.log() - rows.log() - columns.log())).sum()


def log_det(a: Tensor, b: Tensor) -> Tensor:
    return -torch.logdet(torch.eye(D).double() + D / len(a) * a.T @ a)


def coding_rate(a: Tensor, b: Tensor) -> Tensor:
    return -torch.logdet(torch.eye(D).double() + torch.einsum("nd,ne->de", a, b).square())


def concordance(x: Tensor, y: Tensor) -> Tensor:
    mx, my = x.mean(), y.mean()
    return 1 - 2 * ((x - mx) * (y - my)).mean() / (x.var() + y.var() + (mx - my) ** 2 + 1e-3)


def pearson(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(), y - y.mean()
    return 1 - (x * y).sum() / (x.norm() * y.norm() + 1e-3)


def cox(risk: Tensor, time: Tensor) -> Tensor:
    at_risk = time.unsqueeze(0) >= time.unsqueeze(1)
    return -(risk - (risk.unsqueeze(0).expand(len(risk), -1).masked_fill(~at_risk, -1e9)).logsumexp(1)).mean()


def cosent(score: Tensor, wanted: Tensor) -> Tensor:
    score = score * 2
    difference = score[:, None] - score[None, :]
    is_pair = wanted[:, None] < wanted[None, :]
    difference = (difference - (1 - is_pair.to(difference.dtype)) * 1e3).view(-1)
    return torch.logsumexp(torch.cat([torch.zeros(1).to(difference), difference]), dim=0)


def moe_balance(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(-1)
    chosen = F.one_hot(p.argmax(-1), D).to(p.dtype).mean(0)
    return D * (chosen * p.mean(0)).sum()


def moe_top_2(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(-1)
    _, chosen = torch.topk(p, 2, dim=-1)
    share = torch.zeros_like(p).scatter(1, chosen, 1.0).mean(dim=0)
    return D * (share * p.mean(dim=0)).sum() + 1e-2 * torch.logsumexp(logits, dim=-1).square().mean()


def importance(logits: Tensor, target: Tensor) -> Tensor:
    load = logits.softmax(1).sum(0)
    return load.var() / (load.mean() ** 2 + 1e-10)


def mean_entropy(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(1)
    mean = p.mean(0)
    return (mean * mean.log()).sum() - (p * p.log()).sum(1).mean()


def dino(student: Tensor, teacher: Tensor) -> Tensor:
    centre = teacher.detach().mean(0, keepdim=True)
    wanted = F.softmax((teacher.detach() - centre) / 0.1, dim=-1)
    return torch.sum(-wanted * F.log_softmax(student / 0.2, dim=-1), dim=-1).mean()


def sinkhorn(student: Tensor, teacher: Tensor) -> Tensor:
    with torch.no_grad():
        q = (teacher / 0.5).exp().t()
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(dim=1, keepdim=True) / D
            q = q / q.sum(dim=0, keepdim=True) / q.shape[1]
        q = (q * q.shape[1]).t()
    return -(q * F.log_softmax(student, 1)).sum(1).mean()


def hard_negatives(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    similar = a @ b.T / 0.5
    is_pair = torch.eye(len(a)).bool()
    negatives = similar.masked_fill(is_pair, -20)
    weights = (negatives.detach() * 0.5).softmax(dim=1)
    positive = (a * b).sum(1) / 0.5
    return -(positive - (positive.exp() + (weights * negatives.exp()).sum(1) * len(a)).log()).mean()


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    logits = F.normalize(a) @ F.normalize(b).t() / 0.1
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def of_columns(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    columns = (a @ w @ b.t()).t()
    target = torch.arange(len(b))
    ignored = target.masked_fill(target % 2 == 0, -100)
    every = F.cross_entropy(columns, target, reduction="none").square().sum()
    return every + F.cross_entropy(columns, ignored) + F.cross_entropy(columns, target, reduction="sum")


def nt_xent(a: Tensor, b: Tensor) -> Tensor:
    z = F.normalize(torch.cat([a, b]), dim=1)
    similar = z @ z.T / 0.5
    similar = similar.masked_fill(torch.eye(len(z)).bool(), -1e9)
    n = len(a)
    return F.cross_entropy(similar, torch.cat([torch.arange(n) + n, torch.arange(n)]))


def uniformity(a: Tensor, b: Tensor) -> Tensor:
    a = F.normalize(a)
    return (a - F.normalize(b)).norm(dim=1).pow(2).mean() + torch.cdist(a, a).pow(2).mul(-2).exp().mean().log()


def decorrelation(a: Tensor, b: Tensor) -> Tensor:
    a = batch_norm(a)
    c = torch.mm(a.t(), a).div(len(a))
    off = c.flatten()[:-1].view(D - 1, D + 1)[:, 1:]
    return off.pow(2).sum() + (c.diagonal() - 1).pow(2).sum()


def koleo(a: Tensor, b: Tensor) -> Tensor:
    a = F.normalize(a, eps=1e-8, p=2, dim=-1)
    products = torch.mm(a, a.t())
    nearest = products.masked_fill(torch.eye(len(a)).bool(), -1).argmax(dim=1)
    return -torch.log(F.pairwise_distance(a, a[nearest] + 0.1) + 1e-8).mean()


def mmd(a: Tensor, b: Tensor) -> Tensor:
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (-((x[:, None] - y[None]) ** 2).sum(-1)).exp().mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def coral(a: Tensor, b: Tensor) -> Tensor:
    def covariance(x: Tensor) -> Tensor:
        x = x - x.mean(dim=0, keepdim=True)
        return x.transpose(0, 1) @ x / max(len(x) - 1, 1)

    return (covariance(a) - covariance(b)).norm() ** 2 / (4 * D * D)


def centres(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x - w[y]).square().sum(1).mean() + F.embedding(y, w).mean(0).square().sum()


def batch_centres(x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros(D, D).double().index_add(0, y, x)
    means = total / torch.bincount(y, minlength=D).clamp(min=1).unsqueeze(1)
    return (x - means[y]).square().sum(1).mean() - means.var(0).sum()


def picked(x: Tensor, y: Tensor) -> Tensor:
    return -x.log_softmax(1)[torch.arange(len(x)), y].mean()


def weighted_mse(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x @ w, y, weight=y.abs() + 0.1)


def weighted_bce(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        x @ w, y.detach().sigmoid(), weight=y.detach().abs(), pos_weight=w.diagonal().detach().exp()
    )


def one_against_all(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.kl_div(w[:1].log_softmax(1), x.softmax(1), reduction="batchmean")


def padded_table(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (F.embedding(y, w, padding_idx=0) * x).sum() + (F.embedding(y, w) * x).mean()


def shortened_table(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (F.embedding(y, (w * 10).detach(), max_norm=2.0) * x).sum() + (x @ w).sum()


def weighted_counts(x: Tensor, y: Tensor) -> Tensor:
    share = torch.bincount(y, weights=x.detach().square().sum(1), minlength=D)
    return (x.softmax(1).mean(0) * share).sum()


def gradient_penalty(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    value = x.tanh().mean(0).square().sum() + F.cross_entropy(x @ w, y)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.norm(dim=1).sub(1).square().mean()


def r1_penalty(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    score = (x @ w).tanh().sum(1)
    slopes = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
    return F.softplus(-score).mean() + slopes.pow(2).reshape(len(x), -1).sum(1).mean()


def checkpointed(x: Tensor, y: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(
        lambda z: (z.tanh() - z.tanh().mean(0)).pow(3).mean(0).square().sum(), x, use_reentrant=False
    )


def in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    z[:, 0] = 0
    z += 1
    z.t()[1].mul_(2)
    z[y == 2] = 3.0
    z[:, 2:].clamp_(min=0)
    return z.square().mean().sqrt()


def filled(x: Tensor, y: Tensor) -> Tensor:
    chosen = torch.zeros(len(x), D).double()
    chosen[torch.arange(len(x)), y] = 1
    return ((x * chosen).sum(0) ** 2).sum()


def on_the_host(x: Tensor, y: Tensor) -> Tensor:
    if x.mean().item() > 0:
        x = x * 2
    return x.mean() * sum(y.tolist()) + x.sum(0).square().sum() * y[0].item() + float(len(x)) * x.std()


def halves(x: Tensor, y: Tensor) -> Tensor:
    middle = len(x) // 2
    first, second = x[:middle], x[middle : 2 * middle]
    return F.mse_loss(first, second) + x[::2].sum(0).square().sum() + x[-1].sum() * x.max() * x[1:].min()


def batch_norm_module(x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(nn.BatchNorm1d(D).double()(x), torch.ones(len(x), D).double())


class Normal(nn.Module):
    """Batch normalization with weights that are another function of the plain weight, in training or not."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.4).double().train(training)
        self.norm.running_mean.fill_(0.25)

    def forward(self, w: Tensor, logits: Tensor, target: Tensor) -> Tensor:
        out = F.batch_norm(
            logits, self.norm.running_mean, self.norm.running_var, w[0, :3], w[1, :3], self.norm.training, momentum=0.4
        )
        first = self.norm(logits).tanh().mean((0, 2, 3)).prod()
        return F.cross_entropy(out, target) + first + self.norm.running_var.sum() + self.norm.running_mean.prod()


def barlow_of_torch(a: Tensor, b: Tensor) -> Tensor:
    a, b = (F.batch_norm(each, None, None, training=True) for each in (a, b))
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).pow(2).sum() + 0.005 * (c.pow(2).sum() - c.diagonal().pow(2).sum())


def penalty_of_batch_norm(x: Tensor, y: Tensor) -> Tensor:
    normal = F.batch_norm(x, None, None, training=True)
    (slope,) = torch.autograd.grad(normal.pow(3).tanh().mean(), x, create_graph=True)
    return normal.pow(4).mean() + slope.norm(dim=1).sub(1).square().mean()


def huge(x: Tensor, y: Tensor) -> Tensor:
    return torch.logsumexp(x * 300, dim=(0, 1)) + (x * 300).softmax(0).square().sum() + x.amax(0).square().sum()


def quantiles(x: Tensor, y: Tensor) -> Tensor:
    return x.quantile(0.3, dim=0).sum() + x.median() + x.sort(0).values[0].prod() + x.prod()


def several(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    stacked = torch.stack([a, b], dim=1)
    joined = torch.cat([a, b], dim=1)
    return (
        stacked.mean(0).square().sum()
        + joined.var()
        + stacked.flatten(0, 1).std(0).sum()
        + w.sum() * stacked.sum().sin()
    )


CASES: dict[str, tuple[Formula, Callable[[int], list[Tensor]]]] = {
    "mse": (F.mse_loss, views),
    "mse sum": (partial(F.mse_loss, reduction="sum"), views),
    "l1": (F.l1_loss, views),
    "smooth l1": (partial(F.smooth_l1_loss, beta=0.5), views),
    "huber": (partial(F.huber_loss, delta=0.7), views),
    "cross entropy": (F.cross_entropy, classes),
    "cross entropy, smoothed and weighted": (
        lambda x, y: F.cross_entropy(x, y, weight=torch.arange(1.0, D + 1).double(), label_smoothing=0.1),
        classes,
    ),
    "cross entropy of images": (partial(F.cross_entropy, ignore_index=2), images),
    "cross entropy of chances": (lambda a, b: F.cross_entropy(a, b.softmax(1)), views),
    "cross entropy of words": (lambda x, t: F.cross_entropy(x.view(-1, D), t.view(-1)), words),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(1), y), classes),
    "bce": (F.binary_cross_entropy, chances),
    "bce with logits": (partial(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0)), chances),
    "kl": (lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"), views),
    "poisson": (F.poisson_nll_loss, chances),
    "gaussian": (lambda a, b, c: F.gaussian_nll_loss(a, b, c.square() + 0.1), triplets),
    "soft margin": (lambda a, b, s: F.soft_margin_loss(a[:, 0], s.double()), signs),
    "hinge embedding": (lambda a, b, s: F.hinge_embedding_loss(a[:, 0], s), signs),
    "margin ranking": (lambda a, b, s: F.margin_ranking_loss(a[:, 0], b[:, 0], s, margin=0.2), signs),
    "cosine embedding": (F.cosine_embedding_loss, signs),
    "triplet margin": (F.triplet_margin_loss, triplets),
    "multi margin": (F.multi_margin_loss, classes),
    "multilabel soft margin": (F.multilabel_soft_margin_loss, chances),
    "dice": (dice, images),
    "dice, other axes": (dice_of_numpy_style, images),
    "jaccard": (jaccard, images),
    "tversky": (tversky, images),
    "focal": (focal, images),
    "matthews": (correlation, images),
    "lovasz": (lovasz, images),
    "dice of a mask": (masked_dice, images),
    "log cosh dice": (log_cosh_dice, images),
    "barlow": (barlow, views),
    "vicreg": (vicreg, views),
    "flops": (flops, views),
    "iic": (iic, views),
    "log det": (log_det, views),
    "coding rate": (coding_rate, views),
    "concordance": (concordance, numbers),
    "pearson": (pearson, numbers),
    "cox": (cox, numbers),
    "cosent": (cosent, numbers),
    "moe balance": (moe_balance, classes),
    "moe of two": (moe_top_2, classes),
    "importance": (importance, classes),
    "mean entropy": (mean_entropy, classes),
    "dino": (dino, views),
    "sinkhorn": (sinkhorn, views),
    "hard negatives": (hard_negatives, views),
    "info nce": (info_nce, views),
    "nt xent": (nt_xent, views),
    "uniformity": (uniformity, views),
    "decorrelation": (decorrelation, views),
    "koleo": (koleo, views),
    "mmd": (mmd, views),
    "coral": (coral, views),
    "centres of a batch": (batch_centres, classes),
    "picked": (picked, classes),
    "weighted counts": (weighted_counts, classes),
    "checkpointed": (checkpointed, classes),
    "in place": (in_place, classes),
    "filled": (filled, classes),
    "on the host": (on_the_host, classes),
    "halves": (halves, classes),
    "a module with statistics": (batch_norm_module, classes),
    "barlow of torch": (barlow_of_torch, views),
    "penalty of batch norm": (penalty_of_batch_norm, classes),
    "huge": (huge, classes),
    "quantiles": (quantiles, classes),
}
# formulas whose first argument is a weight (D, D)
WEIGHTED: dict[str, tuple[Formula, Callable[[int], list[Tensor]]]] = {
    "cross entropy of a layer": (lambda w, x, y: F.cross_entropy(F.linear(x, w), y, reduction="sum") / len(y), classes),
    "sigreg": (sigreg, views),
    "cross entropy of columns": (of_columns, views),
    "centres": (centres, classes),
    "weighted mse": (weighted_mse, views),
    "weighted bce": (weighted_bce, views),
    "one against all": (one_against_all, views),
    "a padded table": (padded_table, classes),
    "a shortened table": (shortened_table, classes),
    "gradient penalty": (gradient_penalty, classes),
    "r1 penalty": (r1_penalty, classes),
    "batch normalization": (lambda w, x, y: Normal(True)(w, x, y), images),
    "batch normalization by running values": (lambda w, x, y: Normal(False)(w, x, y), images),
    "several": (several, views),
}


def case_of(name: str, weight: Tensor) -> tuple[Formula, Callable[[int], list[Tensor]]]:
    """A formula of rows, and what makes so many of them."""
    if name in CASES:
        return CASES[name]
    formula, make = WEIGHTED[name]
    return partial(formula, weight), make
