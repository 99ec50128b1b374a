"""The recipes for those who come from a peer run: ours gives the gradient of one process, theirs what its page says of it.

Where the peer is not installed its formula stands here, in a few lines. The oracle is one process on all rows, in float64.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import batch_norm, cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_losses
from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.cli.manual import find_page
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.answers import assert_all_close
from tests.oracle import assert_close

BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
OURS, THEIRS = "With this package", "Before"
ROWS, FEATURES, DIM = 12, 5, 32
EVEN, UNEVEN = (0, 6, 12), (0, 4, 12)
Names = dict[str, Any]
Grads = dict[str, Tensor]


def code_of(page: str, section: str, language: str = "python") -> list[str]:
    _, _, rest = manual.recipes()[page].partition(f"\n## {section}\n")
    return [code for found, code in BLOCK.findall(rest.split("\n## ")[0]) if found == language]


def encoder(width: int = DIM, *, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(FEATURES, 8, bias=not norm), nn.Tanh(), nn.Linear(8, width))
    if norm:
        model.insert(1, nn.BatchNorm1d(8))
    return model


def global_rows() -> Names:
    generator = torch.Generator().manual_seed(1)
    return {
        "images": torch.randn(ROWS, FEATURES, generator=generator),
        "other": torch.randn(ROWS, FEATURES, generator=generator),
        "labels": torch.randint(10, (ROWS,), generator=generator),
        "targets": torch.randn(ROWS, 4, generator=generator),
        "numbers": 100 + torch.arange(ROWS),
        "negatives": torch.randn(ROWS, FEATURES, generator=generator),
    }


def own_rows(part: slice) -> Names:
    return {name: tensor[part] for name, tensor in global_rows().items()}


def simple(rows: Names, model: nn.Module) -> Names:
    return {**rows, "model": model, "device": "cpu"}


def loaders(rows: Names, model: nn.Module) -> Names:
    loader = torch.utils.data.DataLoader([(rows["images"], rows["labels"])], batch_size=None)
    return {**simple(rows, model), "loader": loader}


def views(rows: Names, model: nn.Module) -> Names:
    first, second = rows["images"], rows["other"]
    given = {"view1": first, "view2": second, "queries": first, "answers": second, "model": model}
    return {**given, "negatives": rows["negatives"], "numbers": rows["numbers"]}


def taught(rows: Names, model: nn.Module) -> Names:
    """Two views, each image's number, and a teacher that is not the student."""
    given = views(rows, model)
    torch.manual_seed(9)
    teacher = nn.Linear(FEATURES, DIM)
    both = {"views": ("view1", "view2"), "swapped": ("view2", "view1")}
    given |= {name: torch.cat([given[part] for part in parts]) for name, parts in both.items()}
    # statistics do not know of a bias: the tanh lets it have a gradient
    return {**given, "model": lambda x: model(x).tanh(), "teacher": teacher}


def towers(rows: Names, model: nn.Module) -> Names:
    image, text = normalize(model(torch.cat([rows["images"], rows["other"]]))).chunk(2)
    scale = nn.Parameter(torch.tensor(1.0))
    return {"image_features": image, "text_features": text, "log_scale": scale}


def metric_rows(rows: Names, model: nn.Module) -> Names:
    # a correlation does not know of a bias: the tanh lets it have a gradient
    return {"images": rows["images"], "targets": rows["targets"][:, 0], "model": lambda x: model(x)[:, 0].tanh()}


def boxes(rows: Names, model: nn.Module, *, few: bool = False) -> Names:
    found = model(rows["images"])[:, :4]
    if few:  # the first row alone has a box
        has_box = [bool(row.equal(global_rows()["images"][0])) for row in rows["images"]]
        return {"boxes": found[has_box], "targets": rows["targets"][has_box]}
    return {"boxes": found, "targets": rows["targets"]}


TOKENS = {0: (1, 2), 1: (1, 5)}  # valid ones of each rank's micro-batches


def token_rows(rows: Names, model: nn.Module) -> Names:
    """Micro-batches of rank 0 or 1; in one process the model is asked by the oracle itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"model": model, "micro_batches": token_batches(rank)}


def token_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for valid in TOKENS[rank]:
        tokens = torch.randint(DIM, (6,), generator=generator)
        tokens[valid:] = -100
        found.append((torch.randn(6, FEATURES, generator=generator), tokens))
    return found


def arcface(given: Names) -> tuple[Tensor, nn.Module]:
    torch.manual_seed(3)
    loss = ArcFaceLoss(num_classes=10, embedding_size=DIM)
    return loss(given["model"](given["images"]), given["labels"]), loss


def nt_xent(given: Names) -> tuple[Tensor, None]:
    z = normalize(given["model"](torch.cat([given["view1"], given["view2"]])))
    logits = (z @ z.T / 0.5).fill_diagonal_(-math.inf)
    return cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2)), None


def clip(given: Names) -> tuple[Tensor, None]:
    logits = given["log_scale"].exp() * given["image_features"] @ given["text_features"].T
    own = torch.arange(len(logits))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2, None


def ranking(given: Names) -> tuple[Tensor, None]:
    model = given["model"]
    logits = 20 * normalize(model(given["queries"])) @ normalize(model(given["answers"])).T
    return cross_entropy(logits, torch.arange(len(logits))), None


def byol(given: Names) -> tuple[Tensor, None]:
    student, teacher = normalize(given["model"](given["views"])), normalize(given["teacher"](given["swapped"]).detach())
    return -(student * teacher).sum(1).mean(), None


def barlow(given: Names) -> tuple[Tensor, None]:
    first, second = (batch_norm(given["model"](given[name]), None, None, training=True) for name in ("view1", "view2"))
    target = torch.eye(DIM)
    weights = target + 5e-3 * (1 - target)
    return (weights * (first.T @ second / ROWS - target).square()).sum(), None


def paired(given: Names) -> tuple[Tensor, None]:
    rows = given["model"](torch.cat([given["view1"], given["view2"]]))
    first, second = rows.chunk(2)
    return (first - second).square().mean() - rows.std(0).mean(), None


def vic(given: Names) -> tuple[Tensor, None]:
    both = [given["model"](given[name]) for name in ("view1", "view2")]
    value = 25 * (both[0] - both[1]).square().mean()
    for view in both:
        covariance = torch.cov(view.T)
        value = value + 12.5 * (1 - (covariance.diagonal() + 1e-4).sqrt()).relu().mean()
        value = value + (covariance * (1 - torch.eye(DIM))).square().sum() / DIM
    return value, None


def cross_entropy_of(given: Names, targets: Tensor) -> tuple[Tensor, None]:
    return cross_entropy(given["model"](given["views"]) / 0.1, targets.detach()), None


def dino(given: Names) -> tuple[Tensor, None]:
    return cross_entropy_of(given, (given["teacher"](given["swapped"]) / 0.04).softmax(1))


def swav(given: Names) -> tuple[Tensor, None]:
    weights = (given["model"](given["swapped"]) / 0.05).exp()
    for _ in range(3):
        weights = weights / weights.sum(0)
        weights = weights / weights.sum(1, keepdim=True)
    return cross_entropy_of(given, weights)


def moco(given: Names) -> tuple[Tensor, None]:
    queries, keys = normalize(given["model"](given["view1"])), normalize(given["teacher"](given["view2"]).detach())
    return cross_entropy(queries @ keys.T / 0.1, torch.arange(ROWS)), None


def hard_ranking(given: Names) -> tuple[Tensor, None]:
    model = given["model"]
    references = normalize(model(torch.cat([given["answers"], given["negatives"]])))
    return cross_entropy(20 * normalize(model(given["queries"])) @ references.T, torch.arange(ROWS)), None


def pearson(given: Names) -> tuple[Tensor, None]:
    pairs = torch.stack([given["model"](given["images"]), given["targets"]])
    return 1 - torch.corrcoef(pairs)[0, 1], None


def box_mean(given: Names) -> tuple[Tensor, None]:
    return (given["boxes"] - given["targets"]).abs().sum() / len(given["targets"]), None


def squares(given: Names) -> tuple[Tensor, None]:
    return (given["model"](given["images"]) - given["targets"]).square().mean(), None


def token_mean(given: Names, *, of_means: bool = False) -> tuple[Tensor, None]:
    """Over all valid tokens; or, as the page says of the other way, each with 1/4 of its micro-batch's share."""
    total, weights = torch.zeros(()), 0.0
    for rank in TOKENS:
        for inputs, tokens in token_batches(rank):
            valid = tokens != -100
            weight = 1 / (4 * int(valid.sum())) if of_means else 1 / 9
            total = total + weight * cross_entropy(given["model"](inputs)[valid], tokens[valid], reduction="sum")
            weights += weight * int(valid.sum())
    assert weights == pytest.approx(1)
    return total, None


def routed(given: Names) -> tuple[Tensor, None]:
    """Load balance and z-loss of a router."""
    logits = given["model"](given["images"])
    taken = torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
    balance = logits.shape[1] * (taken.mean(0) * logits.softmax(1).mean(0)).sum()
    return balance + 0.001 * logits.logsumexp(1).square().mean(), None


def micro_batches(rows: Names, model: nn.Module) -> Names:
    return {**simple(rows, model), "micro_batches": [rows["images"][:1], rows["images"][1:]]}


def with_teacher(rows: Names, model: nn.Module) -> Names:
    torch.manual_seed(9)
    teacher = nn.Linear(FEATURES, DIM).requires_grad_(False)
    # of the first rows most have no label
    few = torch.where(rows["numbers"] < 104, 0, 1 + rows["labels"])
    return {**simple(rows, model), "labels": few, "teacher": teacher}


def distilled(given: Names) -> tuple[Tensor, None]:
    student, taught = given["model"](given["images"]) / 2.0, given["teacher"](given["images"]) / 2.0
    ratio = taught.log_softmax(1) - student.log_softmax(1)
    divergence = (taught.softmax(1) * ratio).sum(1).mean()
    valid = given["labels"] != 0
    wanted = (2.0 * student).log_softmax(1)[valid, given["labels"][valid]]
    return 4.0 * divergence - 0.5 * wanted.mean(), None


class GatherSum(torch.autograd.Function):
    """Rows of all ranks; in backward own rows of the sum over ranks, times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return ctx.factor * grad.chunk(dist.get_world_size())[dist.get_rank()], None


class OpenClip(nn.Module):
    """The two flags: whose rows the logits are of, and whether the gather has a gradient; without one the own slot has."""

    def __init__(self, *, local_loss: bool, gather_with_grad: bool, rank: int, world_size: int) -> None:
        super().__init__()
        self.local_loss, self.gather_with_grad = local_loss, gather_with_grad

    def forward(self, image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        images, texts = self.gather(image), self.gather(text)
        first = dist.get_rank() * len(image)
        if self.local_loss:
            own = torch.arange(first, first + len(image))
            return (cross_entropy(scale * image @ texts.T, own) + cross_entropy(scale * text @ images.T, own)) / 2
        logits = scale * images @ texts.T
        own = torch.arange(len(logits))
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

    def gather(self, x: Tensor) -> Tensor:
        if self.gather_with_grad:
            return GatherSum.apply(x, 1.0)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.detach())
        if not self.local_loss:
            parts[dist.get_rank()] = x
        return torch.cat(parts)


class Lightly(nn.Module):
    """Own rows of both views against those of this rank, or of all with a gradient; the mean over own rows."""

    def __init__(self, temperature: float, gather_distributed: bool) -> None:
        super().__init__()
        self.temperature, self.gather = temperature, gather_distributed

    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        own = normalize(torch.stack([z0, z1]), dim=2)
        everyone, first = own, 0
        if self.gather:
            everyone = GatherSum.apply(own.transpose(0, 1), 1.0).transpose(0, 1)
            first = dist.get_rank() * len(z0)
        rows, count = torch.arange(first, first + len(z0)), everyone.shape[1]
        logits = own.flatten(0, 1) @ everyone.flatten(0, 1).T / self.temperature
        itself, partner = torch.cat([rows, count + rows]), torch.cat([count + rows, rows])
        logits[torch.arange(len(logits)), itself] = -math.inf
        return cross_entropy(logits, partner)


class Ranking(nn.Module):  # in-batch negatives of this rank
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, columns: list[Tensor], labels: None) -> Tensor:
        return ranking({"model": self.model, "queries": columns[0], "answers": columns[1]})[0]


class PartialFC(nn.Module):  # logits of own classes for the rows of all ranks; the others' logits come without a graph
    def __init__(self, margin: Callable[[Tensor, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.margin, self.weight = margin, nn.Parameter(class_weight().chunk(2)[dist.get_rank()].clone())

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        rows = GatherSum.apply(normalize(embeddings), float(dist.get_world_size()))  # makes up for DDP's mean
        parts = [torch.empty_like(labels) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, labels)
        everyone, first = torch.cat(parts), dist.get_rank() * len(self.weight)
        own = self.margin(rows @ normalize(self.weight).T, everyone - first)
        logits = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(logits, own.detach())
        logits[dist.get_rank()] = own
        return cross_entropy(torch.cat(logits, dim=1), everyone)


def class_weight() -> Tensor:
    return torch.randn(10, DIM, generator=torch.Generator().manual_seed(8))


def arc_margin(cosines: Tensor, labels: Tensor) -> Tensor:
    rows = torch.nonzero((labels >= 0) & (labels < cosines.shape[1]))[:, 0]
    target = cosines[rows, labels[rows]]
    changed = torch.index_put(cosines, (rows, labels[rows]), (target.acos() + 0.5).cos())
    return 64 * changed


PEERS: Mapping[str, Mapping[str, Any]] = {
    "open_clip": {"ClipLoss": OpenClip},
    "lightly": {},
    "lightly.loss": {"NTXentLoss": Lightly},
    "sentence_transformers": {},
    "sentence_transformers.losses": {"MultipleNegativesRankingLoss": Ranking},
    "partial_fc_v2": {"PartialFC_V2": PartialFC},
}


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute in double precision, with the peers that are not installed."""
    torch.set_default_dtype(torch.float64)
    missing = {name: ModuleType(name) for name in PEERS if name not in sys.modules}
    for name, module in missing.items():
        vars(module).update(PEERS[name])
    try:
        with mock.patch.dict(sys.modules, missing):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def run_code(code: str, prepare: Callable[[Names, nn.Module], Names], cuts: tuple[int, ...], options: Names) -> Grads:
    """Run a recipe on this rank's rows; the gradients after the mean over ranks."""
    with in_float64():
        rank = dist.get_rank()
        raw = encoder(**options.get("encoder", {}))
        model = raw if options.get("bare") else DistributedDataParallel(raw)
        given = prepare(own_rows(slice(cuts[rank], cuts[rank + 1])), model)
        given |= {"rank": rank, "world_size": dist.get_world_size(), "environment": RankEnvironment()}
        given["margin_loss"] = arc_margin
        torch.manual_seed(3)
        exec(code, given)
        if ".backward()" not in code and "fabric.backward" not in code and "trainer" not in given:
            given["value"].backward()
        return grads_of(given, raw)


def grads_of(given: Names, raw: nn.Module) -> Grads:
    """Of the model, whose DDP has made the mean; of the loss and of the scale, whose mean is made here."""
    found = {f"model.{name}": whole(p.grad) for name, p in raw.named_parameters()}
    loss = given.get("loss", getattr(given.get("module"), "loss", None))
    further = {f"loss.{name.split('.')[-1]}": p for name, p in parameters_of(loss)}
    if "log_scale" in given:
        further["log_scale"] = given["log_scale"]
    for name, parameter in further.items():
        assert parameter.grad is not None, name
        is_reduced = isinstance(given.get("loss"), DistributedDataParallel) or {"fabric", "trainer"} & set(given)
        if dist.is_initialized() and not is_reduced:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        found[name] = parameter.grad
    return {name: grad for name, grad in found.items() if grad is not None}


def whole(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def parameters_of(loss: object) -> list[tuple[str, nn.Parameter]]:
    """Those of the loss itself; a loss that holds the model has none of its own."""
    if not isinstance(loss, nn.Module) or isinstance(loss, Ranking):
        return []
    return list(loss.named_parameters())


def run_alone(prepare: Any, value_of: Any, options: Names) -> Grads:
    with in_float64():
        raw = encoder(**options.get("encoder", {}))
        given = prepare(own_rows(slice(0, ROWS)), raw)
        value, loss = value_of(given)
        value.backward()
        return grads_of({**given, "loss": loss}, raw)


@dataclass(frozen=True)
class Recipe:
    """How a page is run, and what it says of the other way: ratio of each group of gradients, None for another direction."""

    prepare: Callable[[Names, nn.Module], Names]
    alone: Callable[[Names], tuple[Tensor, nn.Module | None]]
    theirs: Mapping[str, float | None] | None = None
    change: tuple[str, str] = ("", "")  # of their code
    options: Names = field(default_factory=dict)
    page: str = ""
    cuts: tuple[int, ...] = UNEVEN
    change_ours: tuple[str, str] = ("", "")
    section: str = OURS


def flags(local: bool, grad: bool) -> tuple[str, str]:
    return "local_loss=False,\n    gather_with_grad=False", f"local_loss={local}, gather_with_grad={grad}"


BARE: Names = {"bare": True}
# what a test's Trainer has beside
QUIETLY = "plugins=[environment], use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False, "
QUIETLY += "enable_model_summary=False, "
OBJECTIVES = {
    "BYOL": byol,
    "Barlow Twins": barlow,
    "VICReg": vic,
    "DINO": dino,
    "SwAV": swav,
    "MoCo": moco,
    "W-MSE and MSN": paired,
}
IN_FABRIC = ("Fabric(a", "Fabric(plugins=[environment], a")
RECIPES = {
    "pml": Recipe(simple, arcface, {"model": 1.0, "loss": 2.0}),
    "open_clip": Recipe(towers, clip, {"model": 0.5, "log_scale": 1.0}),
    "open_clip local": Recipe(towers, clip, {"model": None, "log_scale": 1.0}, flags(True, False), page="open_clip"),
    "open_clip grad": Recipe(towers, clip, {"model": 1.0, "log_scale": 1.0}, flags(False, True), page="open_clip"),
    "open_clip both": Recipe(towers, clip, {"model": 1.0, "log_scale": 1.0}, flags(True, True), page="open_clip"),
    "lightly": Recipe(views, nt_xent, {"model": None}),
    "lightly gathered": Recipe(
        views, nt_xent, {"model": 1.0}, ("gather_distributed=False", "gather_distributed=True"), page="lightly"
    ),
    **{f"lightly, {name}": Recipe(taught, alone, page="lightly", section=name) for name, alone in OBJECTIVES.items()},
    "torchmetrics": Recipe(metric_rows, pearson, {"model": 0.5}),
    "sentence_transformers": Recipe(views, ranking, {"model": None}),
    "sentence_transformers, hard": Recipe(views, hard_ranking, page="sentence_transformers", section="Hard negatives"),
    "data_parallel": Recipe(simple, arcface, options=BARE),
    "sync_batch_norm": Recipe(simple, squares, options={"encoder": {"width": 4, "norm": True}, **BARE}),
    "detr": Recipe(boxes, box_mean, {"model": 1.0}),
    "detr, one box": Recipe(partial(boxes, few=True), box_mean, {"model": 0.5}, page="detr"),
    "token_means": Recipe(token_rows, token_mean),
    "moe": Recipe(simple, routed, {"model": None}),
    "moe, window": Recipe(micro_batches, routed, page="moe", section="In an accumulation window"),
    "distillation": Recipe(with_teacher, distilled, {"model": None}),
    "fabric": Recipe(simple, arcface, {"model": 1.0, "loss": None}, IN_FABRIC, options=BARE, change_ours=IN_FABRIC),
    "fabric_fsdp2": Recipe(simple, arcface, options=BARE, change_ours=("Fabric(a", "Fabric(plugins=[environment], a")),
    "fsdp2": Recipe(loaders, arcface, options=BARE, change_ours=("pl.Trainer(", f"pl.Trainer({QUIETLY}")),
}


@pytest.mark.parametrize("name", RECIPES)
def test_ours_has_the_gradient_of_one_process(pool: RankPool, name: str) -> None:
    recipe = RECIPES[name]
    (code,) = code_of(recipe.page or name, recipe.section)
    expected = pool.run(1, run_alone, recipe.prepare, recipe.alone, recipe.options, distributed=False)[0]
    code = code.replace(*recipe.change_ours) if recipe.change_ours[0] else code
    assert_all_close(pool.run(2, run_code, code, recipe.prepare, recipe.cuts, recipe.options), expected)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.theirs])
def test_theirs_has_the_gradient_that_the_page_says(pool: RankPool, name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.theirs is not None
    (code,) = code_of(recipe.page or name, THEIRS)
    if recipe.change[0]:
        assert recipe.change[0] in code
        code = code.replace(*recipe.change)
    alone = pool.run(1, run_alone, recipe.prepare, recipe.alone, recipe.options, distributed=False)[0]
    found = pool.run(2, run_code, code, recipe.prepare, EVEN, recipe.options)[0]
    for group, ratio in recipe.theirs.items():
        ours, truth = (
            torch.cat([g.flatten() for n, g in sorted(grads.items()) if n.startswith(group)])
            for grads in (found, alone)
        )
        cosine = torch.nn.functional.cosine_similarity(ours, truth, dim=0).item()
        if ratio is None:
            assert cosine < 0.999, "the page says: another direction"
            continue
        assert cosine == pytest.approx(1, abs=1e-9)
        assert (ours.norm() / truth.norm()).item() == pytest.approx(ratio, rel=1e-6)
        assert f"{ratio:.1f}" in manual.recipes()[recipe.page or name]


def test_tokens_weigh_what_the_page_says(pool: RankPool) -> None:
    (code,) = code_of("token_means", THEIRS)
    weighted = partial(token_mean, of_means=True)
    expected = pool.run(1, run_alone, token_rows, weighted, {}, distributed=False)[0]
    assert_all_close(pool.run(2, run_code, code, token_rows, EVEN, {}), expected)


def test_data_parallel_has_the_gradient_of_one_process() -> None:
    """Without a GPU it calls the module itself, which is what it computes with several."""
    (code,) = code_of("data_parallel", THEIRS)
    expected = run_alone(simple, arcface, {})
    with in_float64():
        raw = encoder()
        given = simple(own_rows(slice(0, ROWS)), raw)
        torch.manual_seed(3)
        exec(code, given)
        given["value"].backward()
        assert_close(grads_of(given, raw), expected)


def divided(code: str, cuts: tuple[int, ...], weight_name: str) -> tuple[Grads, Tensor]:
    """Gradients with the rows of all ranks' classes in their order; and the whole weight, a row for each class."""
    with in_float64():
        raw, rank = encoder(), dist.get_rank()
        given = simple(own_rows(slice(cuts[rank], cuts[rank + 1])), DistributedDataParallel(raw))
        given["margin_loss"] = arc_margin
        exec(code, given)
        given["value"].backward()
        ((_, own),) = given["loss"].named_parameters()
        found = {f"model.{name}": p.grad for name, p in raw.named_parameters()}
        rows, grads = [torch.empty_like(own) for _ in range(2)], [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(rows, own.detach().contiguous())
        dist.all_gather(grads, own.grad.contiguous())
        dim = 0 if own.shape[1] == DIM else 1
        whole, grad = torch.cat(rows, dim), torch.cat(grads, dim)
        found["weight"] = grad if dim == 0 else grad.T
        return found, whole if dim == 0 else whole.T  # type: ignore[return-value]


def whole_head(weight: Tensor) -> Grads:
    with in_float64():
        raw, rows = encoder(), own_rows(slice(0, ROWS))
        loss = ArcFaceLoss(num_classes=10, embedding_size=DIM, margin=math.degrees(0.5), scale=64)
        loss.W.data.copy_(weight.T)
        loss(raw(rows["images"]), rows["labels"]).backward()
        return {**{f"model.{name}": p.grad for name, p in raw.named_parameters()}, "weight": loss.W.grad.T}


@pytest.mark.parametrize(("section", "cuts"), [(OURS, UNEVEN), (THEIRS, EVEN)], ids=["ours", "theirs"])
def test_a_divided_head_has_the_gradient_of_a_whole_one(pool: RankPool, section: str, cuts: tuple[int, ...]) -> None:
    (code,) = code_of("insightface", section)
    for found, weight in pool.run(2, divided, code, cuts, ""):
        assert_close(found, whole_head(weight))


def test_every_page_has_a_test_or_starts_something() -> None:
    tested = {recipe.page or name for name, recipe in RECIPES.items()} | {"insightface", "augmentation"}
    starting = {"torchrun", "slurm", "kubernetes", "notebook", "hydra", "wandb", "lightning_cli"}
    with_hosts = {"accelerate", "hf_trainer"}  # tests/integrations
    assert tested | starting | with_hosts == set(manual.recipes())


@pytest.mark.parametrize("page", manual.recipes())
def test_a_page_is_whole(page: str) -> None:
    text = manual.recipes()[page]
    assert text.startswith("# ")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    further = {
        "lightly": ["Other objectives", *OBJECTIVES],
        "sentence_transformers": ["Hard negatives", "In their trainer"],
        "torchmetrics": ["For evaluation"],
        "moe": ["In an accumulation window"],
        "distillation": ["In an accumulation window"],
    }
    assert headings in ([OURS], [THEIRS, OURS, "What was wrong", "In numbers", *further.get(page, [])])
    # code can be read, and what it imports from us is there
    for language, code in BLOCK.findall(text):
        assert max(map(len, code.splitlines())) <= 78
        if language != "python":
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "lightning_ddp_losses":
                assert {alias.name for alias in node.names} <= {*lightning_ddp_losses.__all__, "ssl"}
    # what it refers to is there
    assert set(re.findall(r"\bF\d\d\b", text)) <= set(FAULTS)
    assert find_page(["migrate", page.replace("_", "-")]) == text


def test_commands_that_texts_name_have_a_page() -> None:
    texts = [*manual.recipes().values(), *(" ".join(map(str, row)) for row in FAULTS.values()), manual.recipe_list()]
    named = {topic for text in texts for topic in re.findall(r"ddp-losses explain (migrate \w+|\w+)", text)}
    assert "migrate dataparallel" in named
    assert all(find_page(topic.split()) for topic in named), named


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0")  # of loggers that are not installed
def test_the_trainers_of_the_pages_are_made() -> None:
    for page in ("notebook", "wandb"):
        given: Names = {}
        (code,) = code_of(page, OURS)
        exec(code.replace("devices=2", "devices=1").replace('"logs"', '"/tmp"'), given)
        assert given["trainer"].world_size == 1
    (text,) = code_of("hydra", OURS, "yaml")
    paths = re.findall(r"_target_: (\S+)", text)
    assert yaml.safe_load(text)["trainer"]["strategy"]["accumulation"] == "window"
    for path in paths:
        module, _, name = path.rpartition(".")
        assert hasattr(__import__(module, fromlist=[name]), name)
