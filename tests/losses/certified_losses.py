"""Losses whose verdict is known by hand: the loss, its rows, the verdict, and a part of the line that decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses.rows_cases import (
    barlow,
    concordance,
    cosent,
    dice,
    focal,
    iic,
    log_det,
    mean_entropy,
    moe_balance,
    nt_xent,
    pearson,
    picked,
    tversky,
    vicreg,
)
from tests.losses.rows_cases import numbers as two_numbers

C = 4
RIGHT, COUNTS, WRONG, UNKNOWN = "right", "right for equal counts only", "wrong", "cannot tell"
PATH = "right on this path only"


class Case(NamedTuple):
    """A loss of the table."""

    name: str
    loss: Callable[..., Any]
    rows: Callable[[int], tuple[Any, ...]]
    verdict: str
    line: str = ""


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def one(n: int) -> tuple[Tensor]:
    return (normal(n, C),)


def two(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, C), normal(n, C)


def three(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, C), normal(n, C), normal(n, C)


def classes(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, C), torch.randint(C, (n,))


def positive(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, C), normal(n, C).sigmoid()


def signs(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, C), normal(n, C), normal(n).sign()


def numbers(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n), normal(n), normal(n).sign()


def images(n: int) -> tuple[Tensor, Tensor]:
    return normal(n, C, 2, 3), torch.randint(C, (n, 2, 3))


def outputs(n: int) -> tuple[dict[str, Any], Tensor]:
    return {"logits": normal(n, C), "boxes": [normal(n, 2), normal(n, 2)]}, torch.randint(C, (n,))


# ---------------------------------------------------------------------- right


def mean_of_squares(x: Tensor) -> Tensor:
    return x.square().sum(1).mean()


def sum_by_shape(x: Tensor) -> Tensor:
    return x.square().sum() / x.shape[0]


def sum_by_len(x: Tensor) -> Tensor:
    return x.square().sum() / len(x)


def sum_by_numel(x: Tensor) -> Tensor:
    return x.abs().sum() / x.numel()


def scaled_rows(x: Tensor) -> Tensor:
    return (x.exp() / x.size(0)).sum()


def moment(x: Tensor) -> Tensor:
    target = torch.eye(C, dtype=x.dtype)
    return (x.T @ x / x.shape[0] * target).sum()


def gathered(x: Tensor, y: Tensor) -> Tensor:
    return -x.log_softmax(1).gather(1, y[:, None]).mean()


def one_hot_mse(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.softmax(1), F.one_hot(y, C).to(x.dtype))


def flattened_tokens(x: Tensor, y: Tensor) -> Tensor:
    logits = x.permute(0, 2, 3, 1).reshape(-1, C)
    return F.cross_entropy(logits, y.reshape(-1))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return 2 - 2 * (F.normalize(a) * F.normalize(b)).sum(1).mean()


def distilled(a: Tensor, b: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(a / 2, 1), F.softmax(b.detach() / 2, 1), reduction="batchmean") * 4


def views_joined(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b]).square().mean()


def per_image_dice(x: Tensor, y: Tensor) -> Tensor:
    p = x.softmax(1)
    truth = F.one_hot(y, C).permute(0, 3, 1, 2)
    dice = 2 * (p * truth).sum((2, 3)) / (p + truth).sum((2, 3))
    return 1 - dice.mean()


def weighted_terms(a: Tensor, b: Tensor) -> Tensor:
    terms = torch.stack([F.l1_loss(a, b), F.mse_loss(a, b)])
    return 0.3 * terms.sum() + 0.1


def two_heads(given: dict[str, Any], y: Tensor) -> Tensor:
    first, second = given["boxes"]
    return F.cross_entropy(given["logits"], y) + F.smooth_l1_loss(first, second)


class Prototypes(nn.Module):
    """Distances to the learnt prototype of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.arange(16.0).view(C, C) / 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        decay = self.prototypes.square().sum()
        return (x - self.prototypes[y]).square().sum(1).mean() + 0.1 * decay


def penalty(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


# ---------------------------------------------------------------------- right for equal counts


def masked(x: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).to(x.dtype)
    return (x.square().sum(1) * kept).sum() / kept.sum()


def selected(x: Tensor, y: Tensor) -> Tensor:
    return x[y > 0].square().mean()


def counted(x: Tensor, y: Tensor) -> Tensor:
    total = F.cross_entropy(x, y, ignore_index=0, reduction="sum")
    return total / (y != 0).sum().clamp(min=1)


def by_item(x: Tensor, y: Tensor) -> Tensor:
    count = (y > 1).sum().item()
    return (x.sum(1) * (y > 1)).sum() / count


# ---------------------------------------------------------------------- wrong


def plain_sum(x: Tensor) -> Tensor:
    return x.square().sum()


def norm(x: Tensor) -> Tensor:
    return x.norm()


def log_sum_exp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, 0).mean()


def variance(x: Tensor) -> Tensor:
    return x.var(0).mean()


def contraction(x: Tensor) -> Tensor:
    return (x.T @ x).sum()


def maximum(x: Tensor) -> Tensor:
    return x.amax(0).sum()


def square_of_count(x: Tensor) -> Tensor:
    return (x**2).sum() / x.shape[0] ** 2


def flops(x: Tensor) -> Tensor:
    mean = x.relu().log1p().mean(0)
    return (mean**2).sum()


def sigreg(x: Tensor) -> Tensor:
    points = torch.linspace(-2, 2, 5, dtype=x.dtype)
    phase = x[:, :1] * points
    return ((phase.cos().mean(0) - (-points.square() / 2).exp()) ** 2).mean()


def cox(x: Tensor) -> Tensor:
    risk = x[x[:, 0].argsort(), 1]
    return -(risk - risk.logcumsumexp(0)).mean()


def koleo(x: Tensor) -> Tensor:
    distances = torch.cdist(x, x) + 10 * torch.eye(x.shape[0], dtype=x.dtype)
    return -distances.amin(1).log().mean()


def batch_norm(a: Tensor, b: Tensor) -> Tensor:
    normal = F.batch_norm(a, None, None, training=True)
    return F.mse_loss(normal, b)


def centred_by_detached(x: Tensor) -> Tensor:
    centre = x.detach().mean(0)
    return (x - centre).square().mean()


def other_divisor(x: Tensor) -> Tensor:
    return x.square().sum() / (x.shape[0] - 1)


def almost_count(x: Tensor, y: Tensor) -> Tensor:
    kept = (y > 0).to(x.dtype)
    return (x.sum(1) * kept).sum() / (kept.sum() + 0.5)


def weights_with_gradient(x: Tensor) -> Tensor:
    weight = x[:, 0].sigmoid()
    return (x[:, 1] * weight).sum() / weight.sum()


def rows_twice(x: Tensor) -> Tensor:
    pairs = x.unsqueeze(1).expand(x.shape[0], x.shape[0], C)
    return pairs.sum() / x.shape[0]


def first_row(x: Tensor) -> Tensor:
    return (x - x[0]).square().mean()


def halves(x: Tensor) -> Tensor:
    anchors, others = x[: x.shape[0] // 2], x[x.shape[0] // 2 :]
    return F.mse_loss(anchors, others)


def cut_count(x: Tensor) -> Tensor:
    return x.square().sum() / max(x.shape[0], 50)


def sum_and_mean(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a, b) + F.l1_loss(a, b, reduction="sum")


def class_means(x: Tensor, y: Tensor) -> Tensor:
    truth = F.one_hot(y, C).to(x.dtype)
    means = truth.T @ x / (truth.sum(0)[:, None] + 1)
    return F.cross_entropy(x @ means.T, y)


def written_rows(x: Tensor) -> Tensor:
    copied = x * 1
    copied[:, 0] = x.mean(0).square()[0]
    return copied.mean()


def hidden_number(x: Tensor) -> Tensor:
    count = sum(1 for _ in range(x.shape[0]))
    return x.square().mean() * count


class Backwards(torch.autograd.Function):
    """A gradient that is centred over the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]  # as torch documents it
        return gradient - gradient.mean(0)


def own_backward(x: Tensor) -> Tensor:
    return Backwards.apply(x).square().mean()


def hooked(x: Tensor) -> Tensor:
    copied = x * 1
    copied.register_hook(lambda gradient: gradient * gradient.shape[0])
    return copied.square().mean()


# ---------------------------------------------------------------------- neither


def dropped(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(F.dropout(a), b)


def first_rows(x: Tensor) -> Tensor:
    return x[:40].square().mean()


def first_part(x: Tensor) -> Tensor:
    return x.split(40)[0].square().mean()


def hidden_targets(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.where(y > 10, -100, y))


class Centre(nn.Module):
    """A centre that follows the rows, as in DINO."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        value = (x - self.centre).square().mean()
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return value


def sorted_mean(x: Tensor) -> Tensor:
    return x.sort(0).values.mean()


def plain_float(x: Tensor) -> Tensor:
    count = float(x.shape[0])
    return x.square().sum() / count


def guarded(x: Tensor) -> Tensor:
    if x.square().mean() > 100:
        return x.sum() * 0
    return x.square().mean()


def _module(loss: Any, rows: Callable[[int], tuple[Any, ...]], verdict: str, line: str = "") -> Case:
    return Case(repr(loss), loss, rows, verdict, line)


def _function(loss: Any, rows: Callable[[int], tuple[Any, ...]], verdict: str, line: str = "") -> Case:
    return Case(loss.__name__, loss, rows, verdict, line)


WEIGHTS = torch.arange(1.0, C + 1)
CASES = [
    # torch's means
    _module(nn.MSELoss(), two, RIGHT),
    _module(nn.L1Loss(), two, RIGHT),
    _module(nn.SmoothL1Loss(), two, RIGHT),
    _module(nn.HuberLoss(), two, RIGHT),
    _module(nn.BCEWithLogitsLoss(), positive, RIGHT),
    _module(nn.KLDivLoss(), positive, RIGHT),
    _module(nn.KLDivLoss(reduction="batchmean"), positive, RIGHT),
    _module(nn.CrossEntropyLoss(), classes, RIGHT),
    _module(nn.CrossEntropyLoss(label_smoothing=0.1), classes, RIGHT),
    Case("cross entropy of probabilities", nn.CrossEntropyLoss(), positive, RIGHT),
    Case("cross entropy of images", nn.CrossEntropyLoss(), images, RIGHT),
    _module(nn.NLLLoss(), classes, RIGHT),
    _module(nn.MultiMarginLoss(), classes, RIGHT),
    _module(nn.PoissonNLLLoss(), positive, RIGHT),
    _module(nn.MultiLabelSoftMarginLoss(), positive, RIGHT),
    _module(nn.TripletMarginLoss(), three, RIGHT),
    _module(nn.CosineEmbeddingLoss(), signs, RIGHT),
    _module(nn.MarginRankingLoss(), numbers, RIGHT),
    # torch's divisors and sums
    _module(nn.CrossEntropyLoss(weight=WEIGHTS), classes, COUNTS, "cross_entropy"),
    _module(nn.CrossEntropyLoss(ignore_index=0), classes, COUNTS, "cross_entropy"),
    _module(nn.NLLLoss(weight=WEIGHTS), classes, COUNTS, "nll_loss"),
    _module(nn.CrossEntropyLoss(reduction="sum"), classes, WRONG, "cross_entropy"),
    _module(nn.MSELoss(reduction="sum"), two, WRONG, "mse_loss"),
    # formulas that are means
    *(_function(loss, one, RIGHT) for loss in (mean_of_squares, sum_by_shape, sum_by_len, sum_by_numel, scaled_rows)),
    *(_function(loss, one, RIGHT) for loss in (moment, penalty)),
    *(_function(loss, classes, RIGHT) for loss in (picked, gathered, focal, one_hot_mse)),
    *(_function(loss, images, RIGHT) for loss in (flattened_tokens, per_image_dice)),
    *(_function(loss, two, RIGHT) for loss in (cosine, distilled, views_joined, weighted_terms)),
    _function(two_heads, outputs, RIGHT),
    Case("prototypes", Prototypes(), classes, RIGHT),
    # formulas with counts
    _function(masked, classes, COUNTS, "/ kept.sum()"),
    _function(selected, classes, COUNTS, "x[y > 0]"),
    _function(counted, classes, COUNTS, "/ (y != 0).sum()"),
    _function(by_item, classes, COUNTS, "/ count"),
    # wrong, the seven that a naive certificate calls right first
    _function(plain_sum, one, WRONG, "x.square().sum()"),
    _function(norm, one, WRONG, "x.norm()"),
    _function(log_sum_exp, one, WRONG, "torch.logsumexp(x, 0)"),
    _function(variance, one, WRONG, "x.var(0)"),
    _function(contraction, one, WRONG, "(x.T @ x).sum()"),
    _function(maximum, one, WRONG, "x.amax(0)"),
    _function(square_of_count, one, WRONG, "x.shape[0] ** 2"),
    _function(flops, one, WRONG, "(mean**2)"),
    Case("batch_dice", dice, images, WRONG, "(2 * overlap + 1)"),
    _function(tversky, images, WRONG, "hit"),
    Case("vicreg_std", vicreg, two, WRONG, "z - z.mean(0)"),
    _function(barlow, two, WRONG, "(x - x.mean(0))"),
    _function(concordance, two_numbers, WRONG, "x.var()"),
    _function(mean_entropy, classes, WRONG, "mean.log()"),
    Case("balance", moe_balance, classes, WRONG, "chosen * p.mean(0)"),
    _function(iic, two, WRONG, "joint / joint.sum()"),
    _function(log_det, two, WRONG, "logdet"),
    _function(sigreg, one, WRONG, "** 2"),
    _function(nt_xent, two, WRONG, "z @ z.T"),
    _function(cosent, two_numbers, WRONG, "score[:, None] - score[None, :]"),
    _function(cox, one, WRONG, "argsort"),
    _function(koleo, one, WRONG, "cdist"),
    _function(pearson, two_numbers, WRONG, "x - x.mean()"),
    _function(batch_norm, two, WRONG, "F.batch_norm"),
    _function(centred_by_detached, one, WRONG, "x - centre"),
    _function(other_divisor, one, WRONG, "x.shape[0] - 1"),
    _function(almost_count, classes, WRONG, "kept.sum() + 0.5"),
    _function(weights_with_gradient, one, WRONG, "/ weight.sum()"),
    _function(rows_twice, one, WRONG, "expand(x.shape[0], x.shape[0], C)"),
    _function(first_row, one, WRONG, "x[0]"),
    _function(halves, one, WRONG, "F.mse_loss(anchors, others)"),
    _function(cut_count, one, WRONG, "max(x.shape[0], 50)"),
    _function(sum_and_mean, two, WRONG, 'reduction="sum"'),
    _function(class_means, classes, WRONG, "truth.sum(0)[:, None] + 1"),
    _function(written_rows, one, WRONG, "x.mean(0).square()"),
    _function(hidden_number, one, WRONG, "* count"),
    _function(own_backward, one, WRONG),
    _function(hooked, one, WRONG, "register_hook"),
    # neither
    _function(dropped, two, UNKNOWN, "F.dropout"),
    Case("centre", Centre(), one, UNKNOWN, "self.centre.mul_(0.9)"),
    _function(sorted_mean, one, UNKNOWN, "x.sort(0)"),
    _function(first_rows, one, UNKNOWN, "x[:40]"),
    _function(first_part, one, UNKNOWN, "x.split(40)"),
    _function(hidden_targets, classes, COUNTS, "torch.where"),
    Case("targets in another shape", lambda x, y: F.cross_entropy(x, y[:, None].view(-1)), classes, RIGHT),
    _function(plain_float, one, UNKNOWN, "float(x.shape[0])"),
    _function(guarded, one, PATH, "if x.square().mean() > 100"),
]
