"""`ClipLoss` and `SigLipLoss` against their textbook expressions: options, extra texts, a queue, small tiles, rings, whose numbers.

The scale and the bias are the loss's own or the caller's (`logit_scale=`, `logit_bias=`): plain numbers, tensors, parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, SigLipLoss
from tests.fuzz.calls import WAYS, call_and_differentiate
from tests.fuzz.data import DTYPES, RowsCase, cut, lay_out, rows_strategy
from tests.fuzz.engine import Domain, Found, Place, leaf, zero_or
from tests.oracle import clip_of, normal, siglip_of

# whose number it is, and what the caller hands over of a parameter of its own
GIVEN = ["plain number", "constant", "parameter", "result", "one element"]
NUMBERS = ["own", "own", "own", *GIVEN]
TRAINED = ("own", "parameter", "result", "one element")


@dataclass(frozen=True)
class Case(RowsCase):
    """A call of a loss.

    Attributes:
        scale: Where it comes from: one of `NUMBERS`.
        bias: Likewise.
        keeps_own: Whether the loss also has numbers of its own where the caller gives some.
        products: How rows are multiplied: `bf16x6` as by tensor cores, which is as exact as float32.
        frozen: Ranks whose images (texts) get no gradient.
    """

    loss: str
    temperature: float
    start_bias: float
    scale: str
    bias: str
    keeps_own: bool
    max_scale: float | None
    smoothing: float
    normalize: bool
    tile_bytes: int
    gather: str
    extra: tuple[int, ...]
    queue: int
    products: str
    frozen: tuple[tuple[int, ...], tuple[int, ...]]
    way: str
    dtype: str


@st.composite
def cases(draw: Any) -> Case:
    rows = draw(rows_strategy())
    world = len(rows.ranks)
    extra = draw(st.one_of(st.just(()), st.lists(st.integers(0, 3), min_size=world, max_size=world)))
    scale, bias = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(NUMBERS))
    # a rank all of whose inputs are frozen has nothing to back-propagate, in plain DDP either
    frozen = st.sampled_from([(), (), (), tuple(range(world)), (0,), (world - 1,)])
    is_trained = scale in TRAINED
    return Case(
        rows=rows,
        loss=draw(st.sampled_from(["clip", "siglip"])),
        temperature=draw(st.sampled_from([0.07, 0.5, 1.0])),
        start_bias=draw(st.sampled_from([-10.0, -1.0, 2.0])),
        scale=scale,
        bias=bias,
        keeps_own=draw(st.booleans()),
        max_scale=draw(st.sampled_from([None, 100.0, 3.0])),
        smoothing=draw(st.sampled_from([0.0, 0.1])),
        normalize=draw(st.booleans()),
        tile_bytes=draw(st.sampled_from([1 << 21, 600, 100])),
        gather=draw(st.sampled_from(["all", "ring"])),
        extra=tuple(extra),
        queue=draw(st.sampled_from([0, 0, 3])),
        products=draw(st.sampled_from(["auto", "float32", "bf16x6"])),
        frozen=(draw(frozen), draw(frozen)) if is_trained else ((), ()),
        way=draw(st.sampled_from(WAYS)),
        dtype=draw(st.sampled_from(["float64", "float64", "float32"])),
    )


def further(case: Case) -> tuple[Tensor, Tensor]:
    """Extra texts of all ranks, and a queue that all ranks hold."""
    generator = torch.Generator().manual_seed(case.rows.seed + 1)
    dtype = DTYPES[case.dtype]
    extra = normal(sum(case.extra), case.rows.dim, seed=generator).to(dtype)
    return extra, normal(case.queue, case.rows.dim, seed=generator).to(dtype)


def roots(case: Case) -> tuple[Tensor, Tensor]:
    """What is trained: the logarithm of the scale, or the scale where the caller's parameter is that; and the bias."""
    start = 1 / case.temperature if case.scale == "parameter" else -math.log(case.temperature)
    dtype = DTYPES[case.dtype]
    return (
        torch.tensor(start, dtype=dtype, requires_grad=True),
        torch.tensor(case.start_bias, dtype=dtype, requires_grad=True),
    )


def textbook(case: Case, a: Tensor, b: Tensor, extra: Tensor, queue: Tensor, root: Tensor, bias: Tensor) -> Tensor:
    """One process, one matrix of products."""
    images, columns = a, [b, extra, queue]
    if case.normalize:
        images, columns = functional.normalize(images), [functional.normalize(t) for t in columns]
    scale = root if case.scale == "parameter" else root.exp()
    if case.scale == "own" and case.max_scale is not None:
        scale = scale.clamp(max=case.max_scale)
    logits = scale * images @ torch.cat(columns).t()
    if case.loss == "clip":
        return clip_of(logits, label_smoothing=case.smoothing)
    return siglip_of(logits + bias)


def size_of_logits(case: Case, a: Tensor, b: Tensor) -> float:
    """The most that a logit can be, and at least 1."""
    lengths = [1.0, 1.0] if case.normalize else [float(rows.double().norm(dim=1).max()) for rows in (a, b)]
    return max(1.0, lengths[0] * lengths[1] / case.temperature)


def grads_of_numbers(case: Case, root: Tensor, bias: Tensor, size: float) -> Found:
    """Gradients of what is trained. That of the scale is a sum of logits that may cancel, so it is measured by their size."""
    found: Found = {}
    if case.scale in TRAINED:
        found["scale"] = zero_or(root) / size
    if case.loss == "siglip" and case.bias in TRAINED:
        found["bias"] = zero_or(bias)
    return found


def stand_ins(case: Case) -> list[str]:
    """Parameters that a loss has although the caller gives others."""
    names = ["logit_scale"] if case.scale != "own" else []
    if case.loss == "siglip" and case.bias != "own":
        names.append("logit_bias")
    return names if case.keeps_own else []


def given_number(kind: str, root: Tensor, *, is_log: bool) -> Tensor | float:
    """What the caller hands over."""
    if kind == "parameter":
        return root
    number = root.exp() if is_log else root * 1
    if kind == "plain number":
        return float(number.detach())
    if kind == "constant":
        return number.detach()
    return number.reshape(1) if kind == "one element" else number


def make_loss(case: Case) -> Any:
    more: dict[str, Any] = {"max_scale": case.max_scale, "normalize": case.normalize}
    more.update(tile_bytes=case.tile_bytes, gather=case.gather, products=case.products)
    has_scale, has_bias = (case.keeps_own or kind == "own" for kind in (case.scale, case.bias))
    temperature = case.temperature if has_scale else None
    if case.loss == "clip":
        loss: Any = ClipLoss(temperature, label_smoothing=case.smoothing, **more)
    else:
        loss = SigLipLoss(temperature, case.start_bias if has_bias else None, **more)
    loss.to(DTYPES[case.dtype])
    if has_scale:
        with torch.no_grad():  # the textbook's scale, not one that was rounded to float32 first
            loss.logit_scale.copy_(torch.tensor(-math.log(case.temperature), dtype=torch.float64))
    return loss


def play(case: Case, place: Place) -> Found:
    data, (extra, queue), (root, bias) = place.data(views=2), further(case), roots(case)
    if case.extra and not place.alone:
        extra = lay_out(extra.split(list(case.extra))[place.rank], case.rows.layout)
    extra = leaf(extra)
    loss, more = make_loss(case), dict[str, Any]()
    if case.extra:
        more["extra_texts"] = extra
    if case.queue:
        more["queue"] = lay_out(queue, case.rows.layout)

    def call(a: Tensor, b: Tensor) -> Tensor:
        if place.alone:
            return textbook(case, a, b, extra, queue, root, bias)
        numbers: dict[str, Any] = {}
        if case.scale != "own":
            numbers["logit_scale"] = given_number(case.scale, root, is_log=True)
        if case.loss == "siglip" and case.bias != "own":
            numbers["logit_bias"] = given_number(case.bias, bias, is_log=False)
        return loss(a, b, **more, **numbers)

    towers = []
    for view, (name, frozen) in enumerate(zip("ab", case.frozen, strict=True)):
        towers.append(place.leaf(name, data[f"view {view}"], trained=place.rank not in frozen))
    found: Found = {"value v": call_and_differentiate(case.way, call, towers)}
    # what is trained: of one process the roots, of a rank the loss's own numbers or those that the caller gave
    owns_scale, owns_bias = case.scale == "own", case.loss == "siglip" and case.bias == "own"
    found |= grads_of_numbers(
        case,
        loss.logit_scale if owns_scale and not place.alone else root,
        loss.logit_bias if owns_bias and not place.alone else bias,
        size_of_logits(case, data["view 0"], data["view 1"]),
    )
    if place.alone:
        for tower, frozen in zip(towers, case.frozen, strict=True):
            for rank, part in enumerate(cut(case.rows, zero_or(tower))):
                part.mul_(rank not in frozen)
    if case.extra:
        grad = zero_or(extra)
        found["rank extra"] = place.parts(grad, case.extra) if place.alone else grad / len(case.ranks)
    # numbers of the loss's own that the caller's stand in for
    for name in stand_ins(case):
        found[f"own {name}"] = zero_or(getattr(loss, name))
    return found


DOMAIN = Domain.of("two towers", cases(), play)
