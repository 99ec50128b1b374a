"""CLIP's and SigLIP's losses over ranks equal their textbook expressions in one process, temperature and bias included."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, SigLipLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.fits import grads_of
from tests.losses.harness import DIM, SPLITS, TASK, own_rows
from tests.losses.harness import global_rows as harness_rows
from tests.oracle import Encoder, Found, Place, assert_close, assert_near, clip_of, normal, own, parity, siglip_of
from tests.refusals import refusals
from tests.slow_parameters import slow_parameters

EXTRA = {1: [5], 2: [5, 0], 3: [1, 0, 4]}  # further texts per rank


@dataclass(frozen=True)
class Case:
    """A loss with its options, and what else it gets."""

    loss: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    extra: bool = False
    queue: bool = False
    scale: float | None = None
    given: tuple[str, ...] = ()  # parameters that the model owns, not the loss


CASES = {
    "CLIP": Case(ClipLoss),
    "CLIP, small tiles": Case(ClipLoss, {"tile_bytes": 64}),
    "CLIP, smoothing": Case(ClipLoss, {"label_smoothing": 0.1}),
    "CLIP, extra texts": Case(ClipLoss, extra=True),
    "CLIP, queue": Case(ClipLoss, queue=True),
    "CLIP, all options": Case(
        ClipLoss, {"label_smoothing": 0.2, "init_temperature": 0.5, "tile_bytes": 100}, extra=True, queue=True
    ),
    "CLIP, not normalised": Case(ClipLoss, {"normalize": False, "init_temperature": 1.0}),
    "CLIP, clamped": Case(ClipLoss, {"max_scale": 10.0}),
    "CLIP, sharp": Case(ClipLoss, {"max_scale": None}, scale=6.0),
    "CLIP, the model's scale": Case(ClipLoss, {"init_temperature": None, "max_scale": 0.5}, given=("logit_scale",)),
    "SigLIP": Case(SigLipLoss),
    "SigLIP, small tiles": Case(SigLipLoss, {"tile_bytes": 64, "init_bias": -2.0}),
    "SigLIP, all options": Case(SigLipLoss, {"init_bias": 1.0, "tile_bytes": 100}, extra=True, queue=True),
    "SigLIP, clamped": Case(SigLipLoss, {"max_scale": 5.0}),
    "SigLIP, the model's scale": Case(SigLipLoss, {"init_temperature": None}, given=("logit_scale",)),
    "SigLIP, the model's scale and bias": Case(
        SigLipLoss, {"init_temperature": None, "init_bias": None}, given=("logit_scale", "logit_bias")
    ),
}


class Towers(nn.Module):
    """Two encoders and a loss."""

    def __init__(self, case: Case, gather: str = "all") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.image, self.text = Encoder(TASK), Encoder(TASK)
        self.loss = case.loss(**case.options, gather=gather)
        if case.scale is not None:
            nn.init.constant_(self.loss.logit_scale, case.scale)
        self.owned = nn.ParameterDict({name: nn.Parameter(torch.tensor(0.7)) for name in case.given})
        self.double()

    def numbers(self) -> dict[str, Tensor]:
        """What the model gives to the loss, the exponential of the scale taken, as open_clip's models do."""
        given = dict(self.owned.items())
        if "logit_scale" in given:
            given["logit_scale"] = given["logit_scale"].exp()
        return given


def further(case: Case) -> tuple[Tensor | None, Tensor | None]:
    """Features of further texts of all ranks; a queue of embeddings."""
    generator = torch.Generator().manual_seed(4)
    extra = normal(5, TASK.features, seed=generator)
    queue = normal(3, DIM, seed=generator)
    return extra if case.extra else None, queue if case.queue else None


def textbook(case: Case, towers: Towers, images: Tensor, texts: Tensor, extra: Any, queue: Any) -> Tensor:
    """One process, one matrix of products."""
    loss = towers.loss
    parts = [t for t in (texts, extra, queue) if t is not None]
    if case.options.get("normalize", True):
        images, parts = functional.normalize(images), [functional.normalize(t) for t in parts]
    ceiling = case.options.get("max_scale", 100.0 if case.loss is ClipLoss else None)
    given = towers.numbers()
    if "logit_scale" in given:
        scale = given["logit_scale"]
    else:
        scale = loss.logit_scale.exp() if ceiling is None else loss.logit_scale.exp().clamp(max=ceiling)
    logits = scale * images @ torch.cat(parts).t()
    if case.loss is ClipLoss:
        return clip_of(logits, label_smoothing=case.options.get("label_smoothing", 0.0))
    return siglip_of(logits + given.get("logit_bias", loss.logit_bias))


def play(place: Place, name: str, gather: str) -> Found:
    case = CASES[name]
    towers, rows = Towers(case, gather), {key: place.own(tensor) for key, tensor in harness_rows().items()}
    extra, queue = further(case)
    if extra is not None:
        extra = towers.text(extra if place.alone else extra[own(EXTRA[place.world_size])])
    images, texts = towers.image(rows["features"]), towers.text(rows["views"])
    if place.alone:
        value = textbook(case, towers, images, texts, extra, queue)
    else:
        value = towers.loss(images, texts, extra, queue, **towers.numbers())
    return place.graded(value, towers=towers)


@pytest.mark.parametrize("world_size", slow_parameters([1, 2, 3], {2}))
@pytest.mark.parametrize("gather", ["all", "ring"])
def test_ranks_are_one_process(pool: RankPool, gather: str, world_size: int) -> None:
    for sizes in SPLITS[world_size].values():
        parity(pool, play, sizes, gather, cases=CASES, compare=assert_near)


def both_scales(place: Place, gather: str) -> Found:
    """The loss owns a scale and the call gives another, which counts."""
    scale = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    images = place.own(harness_rows()["targets"])
    texts = images.roll(1, 1)
    if place.alone:
        logits = scale * functional.normalize(images) @ functional.normalize(texts).t()
        return place.graded(clip_of(logits), scale=scale)
    loss = ClipLoss(0.5, gather=gather).double()
    value = loss(images, texts, logit_scale=scale)
    found = place.graded(value, scale=scale)
    assert loss.logit_scale.grad == 0
    assert loss(images, texts, logit_scale=3.0) == value  # a plain number has no gradient
    return found


@pytest.mark.parametrize("gather", ["all", "ring"])
def test_a_scale_that_is_given_counts_and_the_losss_own_gets_zero(pool: RankPool, gather: str) -> None:
    parity(pool, both_scales, [5, 7], gather)


@pytest.mark.parametrize("gather", ["all", "ring"])
@pytest.mark.parametrize("name", ["CLIP", "SigLIP"])
@each_rank(2)
def test_a_second_backward_adds_as_much_again(name: str, gather: str) -> None:
    """What forward keeps of a single tile is there once; the second time it is computed again."""
    towers, rows = Towers(CASES[name], gather), own_rows([5, 7])
    value = towers.loss(towers.image(rows["features"]), towers.text(rows["views"]))
    value.backward(retain_graph=True)
    once = {n: grad.clone() for n, grad in grads_of(towers).items()}
    value.backward()
    assert all(float((grad - 2 * once[n]).abs().max()) < 1e-12 for n, grad in grads_of(towers).items())


def test_float32_near_the_optimum() -> None:
    """Pairs that agree have a loss far below the rounding of the products themselves."""
    torch.manual_seed(0)
    x = functional.normalize(torch.randn(64, 32, dtype=torch.float64))
    exact, single = ClipLoss(0.02, max_scale=None).double(), ClipLoss(0.02, max_scale=None)
    a, b = x.clone().requires_grad_(), x.float().requires_grad_()
    truth, ours = exact(a, x), single(b, x.float())
    truth.backward()
    ours.backward()
    truth, ours = float(truth.detach()), float(ours.detach())
    assert 0 < truth < 1e-7  # below what float32 can tell from 1
    assert abs(ours / truth - 1) < 1e-4
    assert float((b.grad - a.grad).norm() / a.grad.norm()) < 1e-3


# ---------------------------------------------------------------------- round a ring: parts that are frozen, groups, messages


LOSSES = {"CLIP": Case(ClipLoss, {"tile_bytes": 128}), "SigLIP": Case(SigLipLoss, {"init_bias": -1.0})}
TRAINED: dict[str, Callable[[Towers], list[nn.Module]]] = {  # and what is frozen
    "all": lambda towers: [],
    "no texts": lambda towers: [towers.text],
    "no images": lambda towers: [towers.image],
    "scale and bias": lambda towers: [towers.text, towers.image],
}


def freeze(parts: list[nn.Module]) -> None:
    for part in parts:
        part.requires_grad_(False)


Loss = Callable[[Towers, Tensor, Tensor], Tensor]


def two_steps(towers: Towers, rows: dict[str, Tensor], loss: Loss) -> Found:
    """Two calls a step, the towers' places changed, and two steps added up, weighed unlike each other."""
    for weight in (1.0, 0.3):
        x, y = towers.image(rows["features"] * weight), towers.text(rows["views"])
        (weight * loss(towers, x, y) + loss(towers, y, x)).backward()
    return grads_of(towers)


def with_parts_frozen(place: Place, trained: str, name: str) -> Found:
    towers = Towers(LOSSES[name], "ring")
    freeze(TRAINED[trained](towers))
    rows = {key: place.own(tensor) for key, tensor in harness_rows().items()}
    if place.alone:
        return two_steps(towers, rows, lambda t, x, y: textbook(LOSSES[name], t, x, y, None, None))
    towers = pickle.loads(pickle.dumps(copy.deepcopy(towers)))
    return two_steps(towers, rows, lambda t, x, y: t.loss(x, y))


@pytest.mark.parametrize(("world_size", "split"), [(2, "uneven"), (3, "a rank without rows")])
@pytest.mark.parametrize("name", LOSSES)
def test_several_calls_and_steps_with_parts_frozen(pool: RankPool, name: str, world_size: int, split: str) -> None:
    parity(pool, with_parts_frozen, SPLITS[world_size][split], name, cases=TRAINED)


def partly(name: str, sizes: list[int], frozen: str) -> dict[str, Tensor]:
    """The last rank's rows are constants and only towers are trained: it has nothing to train, the others wait for it all the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    towers, rows = Towers(LOSSES[name], "ring"), own_rows(sizes)
    freeze([towers.loss, *TRAINED[frozen](towers)])
    with torch.set_grad_enabled(rank + 1 < world):
        x, y = towers.image(rows["features"]), towers.text(rows["views"])
    towers.loss(x, y).backward()
    with torch.no_grad():
        x, y = (torch.stack([t, -t], 2).flatten(1)[:, ::2] for t in (x, y))  # not contiguous
        return {**grads_of(towers), "value": towers.loss(x, y)}


@pytest.mark.parametrize("frozen", ["all", "no texts", "no images"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_trains_nothing_still_passes_on(pool: RankPool, name: str, frozen: str) -> None:
    for sizes in SPLITS[3].values():
        *results, last = pool.run(3, partly, name, sizes, frozen)
        towers, rows, constant = Towers(LOSSES[name]), harness_rows(), sum(sizes[:2])
        freeze([towers.loss, *TRAINED[frozen](towers)])
        x, y = towers.image(rows["features"]), towers.text(rows["views"])
        x, y = (torch.cat([t[:constant], t[constant:].detach()]) for t in (x, y))
        value = textbook(LOSSES[name], towers, x, y, None, None)
        value.backward()
        expected = grads_of(towers)
        ours = {n: torch.stack([r[n] for r in results]).sum(0) / 3 for n in expected}
        assert_close({**ours, "value": last["value"]}, {**expected, "value": value.detach()})
        assert set(last) == {"value"}
        assert len({float(r["value"]) for r in [*results, last]}) == 1


def in_a_group() -> dict[str, Tensor] | None:
    members = [2, 0]
    group, rank = dist.new_group(members), dist.get_rank()
    if rank not in members:
        return None
    case = LOSSES["CLIP"]
    towers = Towers(case)
    towers.loss = ClipLoss(**case.options, gather="ring", group=group).double()
    return two_steps(towers, own_rows([5, 7], dist.get_rank(group)), lambda t, x, y: t.loss(x, y))


def test_a_ring_of_some_ranks(pool: RankPool) -> None:
    first, outside, second = pool.run(3, in_a_group, fresh=True)
    assert outside is None
    expected = with_parts_frozen(Place([12]), "all", "CLIP")
    assert_close({n: (first[n] + second[n]) / 2 for n in expected}, expected)


ROWS, WIDTH = 40, 16


class CountMessages(CountCollectives):
    """How many messages this rank sends to the next one, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::send":
            self.messages.append(sum(t.nbytes for t in args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def count_messages(name: str, frozen: bool) -> list[Any]:
    """Collectives and messages, forward and backward, in single precision."""
    rows = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    x, y = rows[0].requires_grad_(), rows[1].clone().requires_grad_(not frozen)
    loss, found = LOSSES[name].loss(gather="ring"), []
    with CountMessages() as counter:
        value = loss(x, y)
        found += [sum("alltoall" in n for n in counter.names), len(counter.take()), counter.messages]
        counter.messages = []
        value.backward()
        found += [len(counter.take()), counter.messages]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_what_travels(pool: RankPool, name: str, frozen: bool, world_size: int) -> None:
    """Texts of a rank at a time, behind them what is found out: nothing grows with the number of ranks but the number of messages."""
    texts, number, hops = 4 * ROWS * WIDTH, 4 * ROWS * (name == "CLIP"), world_size - 1
    there_and_back = sorted(([texts] if frozen else [texts, texts]) * hops)
    forward, backward = there_and_back, list[int]()  # SigLIP's gradients follow its texts in forward
    if name == "CLIP":
        forward = sorted([texts, 2 * number] * hops)
        backward = sorted(([texts + number] if frozen else [texts + number, texts]) * hops)
    for handshakes, operations, there, more, back in pool.run(world_size, count_messages, name, frozen):
        assert (handshakes, sorted(there), sorted(back)) == (2, forward, backward)
        assert operations == 2 + 2 * len(there)  # each message is sent and received
        # the handshake that says whose gradient it is
        assert more == (1 + 2 * len(back) if name == "CLIP" else 0)


# ---------------------------------------------------------------------- refusals


def ones(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.ones(shape) for shape in shapes]


def pair(rank: int, loss: nn.Module, dtype: torch.dtype | None = None, **numbers: Any) -> Tensor:
    return loss(torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype), **numbers)


BAD: dict[str, tuple[Callable[[int], Any], str]] = {
    "width of one tower": (lambda r: ClipLoss()(*ones((2, 4), (2, 4 + r))), "texts"),
    "width of a rank": (lambda r: ClipLoss()(*ones((2, 4 + r), (2, 4 + r))), "texts"),
    "rows of one tower": (lambda r: SigLipLoss()(torch.ones(2, 4), torch.ones(2 + r, 4)), "2 images, 3 texts"),
    "dtype of a rank": (lambda r: pair(r, ClipLoss(), dtype=torch.float64 if r else None), "float64"),
    "an option": (lambda r: pair(r, ClipLoss(label_smoothing=0.1 * r)), "label_smoothing"),
    "a queue on one rank": (lambda r: pair(r, ClipLoss(), queue=torch.ones(3, 4) if r else None), "queue"),
    "a tower that is not there": (lambda r: ClipLoss()(torch.ones(2, 4), None if r else torch.ones(2, 4)), "NoneType"),
    "no rows at all": (lambda r: ClipLoss()(torch.ones(0, 4), torch.ones(0, 4)), "at least one"),
    "a number as open_clip gives it": (
        lambda r: ClipLoss()(*ones((2, 4), (2, 4)), torch.tensor(14.3)),
        "`loss(images, texts, logit_scale=...)`",
    ),
    "a bias as open_clip gives it": (
        lambda r: SigLipLoss()(*ones((2, 4), (2, 4)), None, torch.tensor(-10.0)),
        "`loss(images, texts, logit_bias=...)`",
    ),
    "no scale at all": (lambda r: pair(r, ClipLoss(init_temperature=None)), "`logit_scale=`"),
    "a scale on one rank": (lambda r: pair(r, ClipLoss(), logit_scale=torch.tensor(3.0) if r else None), "its own"),
    "scales that differ": (lambda r: pair(r, ClipLoss(), logit_scale=3.0 + r), "4.0"),
    "a scale per row": (lambda r: pair(r, ClipLoss(), logit_scale=torch.ones(2)), "one number"),
    "ring: ways to gather": (lambda r: pair(r, ClipLoss(gather="ring" if r else "all")), "gather=ring"),
    "ring: ways to gather, SigLIP": (lambda r: pair(r, SigLipLoss(gather="all" if r else "ring")), "gather=ring"),
    "ring: width": (lambda r: SigLipLoss(gather="ring")(torch.ones(2, 4 + r), torch.ones(2, 4 + r)), "('rows', 5)"),
    "ring: dtype": (lambda r: pair(r, ClipLoss(gather="ring"), dtype=torch.float64 if r else None), "float64"),
    "ring: an option": (lambda r: pair(r, ClipLoss(gather="ring", label_smoothing=0.1 * r)), "label_smoothing"),
    "ring: further texts": (
        lambda r: pair(r, ClipLoss(gather="ring"), extra_texts=torch.ones(3, 4) if r else None),
        "extra_texts",
    ),
    "ring: no rows": (lambda r: SigLipLoss(gather="ring")(torch.ones(0, 4), torch.ones(0, 4)), "at least one"),
    "ring: rows of one tower": (lambda r: ClipLoss(gather="ring")(torch.ones(2, 4), torch.ones(2 + r, 4)), "3 texts"),
}
test_disagreement_is_the_same_error_everywhere = refusals(__name__, "BAD")
