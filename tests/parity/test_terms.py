"""Programs with a fault in one term of the loss, or with two faults at once: the diagnoses name each, and the line of the term."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import global_mean, parity
from lightning_ddp_losses.collectives import all_gather_with_grad
from tests.doors import starts_at_own_rows, terms_of

ROWS, FEATURES, CLASSES = 12, 6, 3
IGNORED = -100


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---------------------------------------------------------------------- terms


def cut_gather(z: Tensor) -> Tensor:
    if world() == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(world())]
    dist.all_gather(parts, z.contiguous())
    return torch.cat(parts)


def gather(z: Tensor) -> Tensor:
    return all_gather_with_grad(z) if world() > 1 else z


def local_mean(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, ignore_index=IGNORED)


def right_mean(z: Tensor, y: Tensor) -> Tensor:
    return global_mean(F.cross_entropy(z, y, ignore_index=IGNORED, reduction="sum"), (y != IGNORED).sum())


def dice(z: Tensor, y: Tensor) -> Tensor:
    valid = (y != IGNORED).to(z)[:, None]
    p = z.softmax(1) * valid
    t = F.one_hot(y.clamp(min=0), CLASSES).to(z) * valid
    return 1 - (2 * (p * t).sum(0) / (p + t).sum(0)).mean()


def contrast(model: Any, batch: Any, gathered: Callable[[Tensor], Tensor], offset: int) -> Tensor:
    queries, keys = model(batch["x"]), model(batch["x"] + batch["noise"])
    return F.cross_entropy(queries @ gathered(keys).T, torch.arange(len(queries)) + offset * len(queries))


# ---------------------------------------------------------------------- programs


def of_rows(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A step with a loss of the model's output and labels."""
    return lambda model, batch: loss(model(batch["x"]), batch["y"])


def cut_step(model: Any, batch: Any) -> Tensor:
    return contrast(model, batch, cut_gather, rank())


def cut_loop(model: Any, optimizer: Any, batches: Any) -> None:  # returns no loss
    optimizer.zero_grad()
    for batch in batches:
        (cut_step(model, batch) / len(batches)).backward()
    optimizer.step()


def cut_beside(model: Any, batch: Any) -> Tensor:
    return cut_step(model, batch) + right_mean(model(batch["x"]), batch["y"])


def unshifted(model: Any, batch: Any) -> Tensor:
    return contrast(model, batch, gather, 0)


class Centred(nn.Linear):
    """A layer with a centre, which ``update`` moves."""

    def __init__(self, update: Callable[[Tensor], Tensor]) -> None:
        super().__init__(FEATURES, CLASSES)
        self.update = update
        self.register_buffer("centre", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        centred = z - self.centre
        self.centre.mul_(0.9).add_(self.update(z.detach()), alpha=0.1)
        return centred


class Keeps(nn.Linear):
    """A layer that keeps the rows it has seen: its own, or in a cache."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("kept", torch.zeros(0, FEATURES), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, x.detach()])
        return super().forward(x)


def own_centre(z: Tensor) -> Tensor:
    return z.mean(0)


def wrong_centre(z: Tensor) -> Tensor:
    total = z.sum(0)
    if world() > 1:
        dist.all_reduce(total)
    return total / world()


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


class Adapter(nn.Module):
    """A checkpoint whose inputs need no gradient, before a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.adapter, x, use_reentrant=True))


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return build


def batches(*, uneven: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(ROWS) % CLASSES
    if uneven:  # rank 1 has half as many valid targets as rank 0
        y[6:9] = IGNORED
    x = torch.randn(ROWS, FEATURES, generator=generator)
    return [{"x": x, "noise": 0.1 * torch.randn(ROWS, FEATURES, generator=generator), "y": y}]


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


UNEVEN, EVEN = {"uneven": True}, {"uneven": False}
# what it shows: (model, step or loop, targets, the faults in order, words of the evidence)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, bool], list[str], str]] = {
    "both terms are right": (linear, of_rows(lambda z, y: right_mean(z, y) + right_mean(2 * z, y)), UNEVEN, [], ""),
    "two local terms": (
        linear,
        of_rows(lambda z, y: local_mean(z, y) + dice(z, y)),
        UNEVEN,
        ["F29", "F30"],
        "in dice: ",
    ),
    "one of them mended": (linear, of_rows(lambda z, y: right_mean(z, y) + dice(z, y)), UNEVEN, ["F29"], "in dice: "),
    "weighted, stacked and averaged": (
        linear,
        of_rows(lambda z, y: torch.stack([right_mean(z, y), 0.5 * dice(z, y) / 3]).mean()),
        UNEVEN,
        ["F29"],
        "only term 2",
    ),
    "the same fault twice": (
        linear,
        of_rows(lambda z, y: dice(z, y) + right_mean(z, y) - dice(3 * z, y)),
        EVEN,
        ["F29"],
        "only term 1 (",
    ),
    "local, times W": (linear, of_rows(lambda z, y: dice(z, y) * world()), EVEN, ["F21", "F29"], "2 times the mean"),
    "a right mean times W": (
        linear,
        of_rows(lambda z, y: local_mean(z, y) * world()),
        EVEN,
        ["F21"],
        "2 times the mean",
    ),
    "a mean of means times W": (
        linear,
        of_rows(lambda z, y: local_mean(z, y) * world()),
        UNEVEN,
        ["F21", "F30"],
        "2 times the mean",
    ),
    "one term of two times W": (
        linear,
        of_rows(lambda z, y: right_mean(z, y) + dice(z, y) * world()),
        EVEN,
        ["F21", "F29"],
        "only term 2",
    ),
    "a gather that cuts, in a step": (linear, cut_step, EVEN, ["F20"], "in cut_gather: dist.all_gather("),
    "the same in a loop": (linear, {"loop": cut_loop}, EVEN, ["F20"], "in cut_gather: dist.all_gather("),
    "beside a right term": (linear, cut_beside, EVEN, ["F20"], "in cut_gather: dist.all_gather("),
    "targets without the rank's offset": (linear, unshifted, EVEN, ["F25"], "begin at column 6"),
    "a buffer of own rows": (lambda: Centred(own_centre), of_rows(local_mean), EVEN, ["F64"], "differs between ranks"),
    "a buffer of own rows, a mean of means": (
        lambda: Centred(own_centre),
        of_rows(local_mean),
        UNEVEN,
        ["F64", "F30"],
        "differs between ranks",
    ),
    "a buffer reduced in a wrong way": (
        lambda: Centred(wrong_centre),
        of_rows(local_mean),
        EVEN,
        ["F64"],
        "is the same on all ranks after step 1",
    ),
    "the same, a mean of means": (
        lambda: Centred(wrong_centre),
        of_rows(local_mean),
        UNEVEN,
        ["F64", "F30"],
        "is the same on all ranks after step 1",
    ),
    "a buffer of another shape": (
        lambda: Keeps(persistent=True),
        of_rows(local_mean),
        EVEN,
        ["F64"],
        "`kept` has other shapes after step 1: rank 0 (6, 6), rank 1 (6, 6); one process (12, 6)",
    ),
    "a cache of another shape": (lambda: Keeps(persistent=False), of_rows(local_mean), EVEN, [], ""),
    "batch norm behind a local term": (
        Normed,
        of_rows(lambda z, y: local_mean(z, y) + dice(z, y)),
        EVEN,
        ["F29", "F59"],
        "only term 2",
    ),
    "not finite on both sides": (
        linear,
        of_rows(lambda z, y: local_mean(z, y) * torch.nan),
        EVEN,
        ["F79"],
        "at step 1",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_fault_is_named(name: str) -> None:
    make, step, targets, faults, words = PROGRAMS[name]
    training = step if isinstance(step, dict) else {"step": step}
    report = parity(seeded(make), batches=batches(**targets), **training)
    assert [each.fault for each in report.diagnoses] == faults, str(report)
    assert report.equal == (not faults)
    assert words in "".join(each.evidence for each in report.diagnoses[:1]), str(report)


def test_what_is_not_finite_on_both_sides_is_no_verdict() -> None:
    report = parity(seeded(linear), of_rows(lambda z, y: local_mean(z, y) * torch.nan), batches(uneven=False))
    assert report.verdict == "cannot tell"
    assert report.summary().startswith("Cannot tell: 2 ranks under ddp")


def test_a_parameter_without_gradient_on_both_sides_is_a_line() -> None:
    report = parity(seeded(Adapter), of_rows(local_mean), batches(uneven=False), wrap=None)
    (note,) = [each for each in report.notes if each.fault == "F38"]
    assert "`adapter.weight`, `adapter.bias` (2)" in note.evidence
    equal = dataclasses.replace(report, equal=True)
    assert equal.summary().endswith("of one process, which are none for 2 trainable parameters that forward uses.")
    verdicts = {row.parameter: row.verdict for row in report.rows}
    assert verdicts["adapter.weight"] == verdicts["adapter.bias"] == "no gradient"
    assert verdicts["head.weight"] != "no gradient"


# ---------------------------------------------------------------------- the terms of a sum

X = torch.ones(3, requires_grad=True)
W = torch.ones((), requires_grad=True)


def partial_sum() -> Tensor:
    whole = X.sum() + X.prod()
    return whole + whole.exp()


SUMS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "two terms": (lambda: X.sum() + X.prod(), 2),
    "constants and signs": (lambda: 1 - 0.5 * (X.sum() - X.prod() / 3) + 2, 2),
    "a list": (lambda: sum([X.sum(), X.prod(), X.exp().sum()]), 3),  # type: ignore[list-item, return-value]
    "stacked": (lambda: torch.stack([X.sum(), X.prod()]).mean(), 2),
    "a learned weight makes one term": (lambda: W * (X.sum() + X.prod()) + X.exp().sum(), 2),
    "one term": (lambda: X.sum(), 0),
    "a quotient": (lambda: 1 / (X.sum() + X.prod()), 0),
    "a term of a partial sum": (partial_sum, 0),
}


@pytest.mark.parametrize("name", SUMS)
def test_terms_of_a_sum(name: str) -> None:
    make, count = SUMS[name]
    loss = make()
    terms = terms_of(loss)
    assert len(terms) == count
    # the gradients of the terms add up to that of the loss
    (whole,) = torch.autograd.grad(loss, X, retain_graph=True)
    parts = []
    for kept in terms:
        hooks = [each.parent.register_hook(zero_at(each.place)) for each in terms if each is not kept]
        parts.append(torch.autograd.grad(loss, X, retain_graph=True)[0])
        for hook in hooks:
            hook.remove()
    assert not terms or torch.allclose(sum(parts), whole)  # type: ignore[arg-type]


def zero_at(place: int) -> Callable[..., Any]:
    def hook(gradients: Any, _: Any) -> Any:
        return tuple(torch.zeros_like(each) if index == place else each for index, each in enumerate(gradients))

    return hook


STARTS = [
    # rows, columns, first targets of each rank: does every rank count from 0?
    ([4, 4], [8, 8], [0, 0], True),
    ([4, 4], [8, 8], [0, 4], False),
    ([4, 4], [4, 4], [0, 0], False),
    ([3, 5], [8, 8], [0, 0], True),
    ([0, 8], [8, 8], [0, 0], False),
    ([8], [8], [0], False),
]


@pytest.mark.parametrize(("rows", "columns", "first", "expected"), STARTS)
def test_targets_that_count_own_rows(rows: list[int], columns: list[int], first: list[int], expected: bool) -> None:
    assert starts_at_own_rows(rows, columns, first) == expected
