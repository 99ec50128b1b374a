"""`ClipLoss` and `SigLipLoss` against their textbook expressions: options, extra texts, a queue, small tiles, rings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, SigLipLoss
from tests.fuzz.data import DTYPES, RowsCase, cut, global_rows, own, rows_strategy
from tests.fuzz.engine import Domain, Found, leaf

__all__ = ["DOMAIN"]


@dataclass(frozen=True)
class Case(RowsCase):
    loss: str
    temperature: float
    bias: float
    max_scale: float | None
    smoothing: float
    normalize: bool
    tile_bytes: int
    gather: str
    extra: tuple[int, ...]
    queue: int
    dtype: str


@st.composite
def cases(draw: Any) -> Case:
    rows = draw(rows_strategy())
    extra = draw(
        st.one_of(st.just(()), st.lists(st.integers(0, 3), min_size=len(rows.ranks), max_size=len(rows.ranks)))
    )
    return Case(
        rows=rows,
        loss=draw(st.sampled_from(["clip", "siglip"])),
        temperature=draw(st.sampled_from([0.07, 0.5, 1.0])),
        bias=draw(st.sampled_from([-10.0, -1.0, 2.0])),
        max_scale=draw(st.sampled_from([None, 100.0, 3.0])),
        smoothing=draw(st.sampled_from([0.0, 0.1])),
        normalize=draw(st.booleans()),
        tile_bytes=draw(st.sampled_from([1 << 21, 600, 100])),
        gather=draw(st.sampled_from(["all", "ring"])),
        extra=tuple(extra),
        queue=draw(st.sampled_from([0, 0, 3])),
        dtype=draw(st.sampled_from(["float64", "float64", "float32"])),
    )


def further(case: Case) -> tuple[Tensor, Tensor]:
    """Extra texts of all ranks, and a queue that all ranks hold."""
    generator = torch.Generator().manual_seed(case.rows.seed + 1)
    dtype = DTYPES[case.dtype]
    extra = torch.randn(sum(case.extra), case.rows.dim, generator=generator, dtype=torch.float64).to(dtype)
    return extra, torch.randn(case.queue, case.rows.dim, generator=generator, dtype=torch.float64).to(dtype)


def alone(case: Case) -> dict[str, Any]:
    dtype = DTYPES[case.dtype]
    data = global_rows(case.rows, dtype, views=2)
    a, b = leaf(data["view 0"]), leaf(data["view 1"])
    extra, queue = further(case)
    extra = leaf(extra)
    log_scale = torch.tensor(1 / case.temperature, dtype=torch.float64).log().to(dtype).requires_grad_()
    bias = torch.tensor(case.bias, dtype=dtype, requires_grad=True)
    images, texts, columns = a, b, [b, extra, queue]
    if case.normalize:
        images, columns = functional.normalize(images), [functional.normalize(t) for t in columns]
    texts = columns[0]
    scale = log_scale.exp() if case.max_scale is None else log_scale.exp().clamp(max=case.max_scale)
    target = torch.arange(len(images))
    logits = scale * images @ torch.cat(columns).t()
    found: dict[str, Any] = {}
    if case.loss == "clip":
        back = scale * texts @ images.t()
        value = sum(functional.cross_entropy(z, target, label_smoothing=case.smoothing) for z in (logits, back)) / 2
    else:
        signs = -torch.ones_like(logits)
        signs[target, target] = 1
        value = -functional.logsigmoid(signs * (logits + bias)).sum() / len(images)
    value.backward()
    found = {"value v": value.detach(), "log scale": log_scale.grad, "rank a": cut(case.rows, a.grad)}
    found["rank b"] = cut(case.rows, b.grad)
    if case.extra:
        found["rank extra"] = list(extra.grad.split(list(case.extra)))
    if case.loss == "siglip":
        found["bias"] = bias.grad
    return found


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[case.dtype]
    more: dict[str, Any] = {"max_scale": case.max_scale, "normalize": case.normalize}
    more.update(tile_bytes=case.tile_bytes, gather=case.gather)
    if case.loss == "clip":
        loss: Any = ClipLoss(case.temperature, label_smoothing=case.smoothing, **more)
    else:
        loss = SigLipLoss(case.temperature, case.bias, **more)
    loss.to(dtype)
    with torch.no_grad():  # the textbook's scale, not one that was rounded to float32 first
        loss.logit_scale.copy_(torch.tensor(1 / case.temperature, dtype=torch.float64).log())
    data = global_rows(case.rows, dtype, views=2)
    a, b = (own(case.rows, data[f"view {view}"], rank).requires_grad_() for view in range(2))
    extra, queue = further(case)
    given: dict[str, Any] = {}
    if case.extra:
        given["extra_texts"] = leaf(extra.split(list(case.extra))[rank])
    if case.queue:
        given["queue"] = queue
    value = loss(a, b, **given)
    value.backward()
    found = {"value v": value.detach(), "log scale": loss.logit_scale.grad}
    for name, tensor in (("a", a), ("b", b), ("extra", given.get("extra_texts"))):
        if tensor is not None:
            found[f"rank {name}"] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad / world
    if case.loss == "siglip":
        found["bias"] = loss.logit_bias.grad
    return found


DOMAIN = Domain("two towers", cases(), on_rank, alone)
