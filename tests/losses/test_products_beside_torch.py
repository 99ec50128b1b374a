"""``products="auto"`` of bf16 rows is never less exact than torch with the same rows: errors from float64, of towers, scale and bias.

The device is one that multiplies bf16 into float32 itself (``multiplying_bf16``). Torch computes the whole matrix, in bf16, or in float32
from products in bf16 as under autocast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_metric_learning.losses as pml
import torch
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss, SigLipLoss
from tests.oracle import clip_of
from tests.tensor_cores import multiplying_bf16, off

ROWS, DIM = 384, 48
KINDS = ("random", "cone", "trained", "unit")
SCALES = {"CLIP": (14.3, 100.0), "SigLIP": (10.0, 100.0)}
EXACT_NUMBER = 5e-5
"""Relative error of a scale's or bias's gradient, unless products in float32 have as much: if all pairs agree, it is 6e-13."""


def rows_of(kind: str) -> tuple[Tensor, Tensor]:
    """Two towers in bf16: independent pairs, rows with a common direction, pairs that agree, rows of unit length."""
    generator = torch.Generator().manual_seed(0)
    images, noise = torch.randn(2, ROWS, DIM, generator=generator)
    texts = images + (0.5 if kind == "trained" else 2.0) * noise
    if kind == "cone":
        common = torch.randn(DIM, generator=generator)
        images, texts = images + 2 * common, texts + 4 * common
    if kind == "unit":
        images, texts = functional.normalize(images), functional.normalize(texts)
    return images.bfloat16(), texts.bfloat16()


def textbook(loss: str, logits: Tensor) -> Tensor:
    """The loss of logits that torch has computed in any dtype."""
    if loss == "CLIP":
        return clip_of(logits)
    own = logits.diagonal()
    return (functional.softplus(logits).sum(dtype=torch.float32) - own.sum(dtype=torch.float32)) / len(logits)


def leaves_of(kind: str, scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Both towers in a dtype; the logarithm of the scale and the bias in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    images, texts = (rows.to(dtype).requires_grad_() for rows in rows_of(kind))
    log_scale = torch.tensor(scale, dtype=torch.float64).log().to(wide).requires_grad_()
    bias = torch.tensor(-10.0, dtype=wide).requires_grad_()
    return {"images": images, "texts": texts, "scale": log_scale, "bias": bias}


def by_torch(loss: str, kind: str, scale: float, dtype: torch.dtype, *, wide_logits: bool) -> dict[str, Tensor]:
    leaves = leaves_of(kind, scale, dtype)
    images, texts = (functional.normalize(leaves[name], dim=1) for name in ("images", "texts"))
    factor, bias = leaves["scale"].exp(), leaves["bias"]
    if wide_logits:
        logits = (images @ texts.t()).to(factor.dtype) * factor
    else:
        logits, bias = (factor.to(dtype) * images) @ texts.t(), bias.to(dtype)
    value = textbook(loss, logits if loss == "CLIP" else logits + bias)
    value.backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def by_us(loss: str, kind: str, scale: float, products: str = "auto") -> tuple[dict[str, Tensor], list[Any]]:
    """Gradients, and the shapes of the products that were made."""
    leaves = leaves_of(kind, scale, torch.bfloat16)
    made: dict[str, Callable[..., Any]] = {"CLIP": ClipLoss, "SigLIP": SigLipLoss}
    # tiles as of many rows
    module = made[loss](max_scale=None, tile_bytes=ROWS * ROWS, products=products)
    module.logit_scale.data.copy_(leaves["scale"])
    with multiplying_bf16() as calls:
        module(leaves["images"], leaves["texts"]).backward()
    found = {name: leaves[name].grad for name in ("images", "texts")}
    found["scale"] = module.logit_scale.grad
    if loss == "SigLIP":
        found["bias"] = module.logit_bias.grad
    return found, calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", SCALES)
def test_auto_is_never_less_exact_than_torch(loss: str, kind: str) -> None:
    for scale in SCALES[loss]:
        truth = by_torch(loss, kind, scale, torch.float64, wide_logits=False)
        found, calls = by_us(loss, kind, scale)
        # one product for the logits of a tile in each pass, one for the gradient of each tower
        tiles = sum(left[1] == DIM for left in calls) // (2 if loss == "CLIP" else 1)
        assert len(calls) == tiles * (4 if loss == "CLIP" else 3)
        rough = by_torch(loss, kind, scale, torch.bfloat16, wide_logits=False)
        wide = by_torch(loss, kind, scale, torch.bfloat16, wide_logits=True)
        exact, _ = by_us(loss, kind, scale, "float32")
        for name, expected in truth.items():
            ours, theirs, autocast = (off(grads[name], expected) for grads in (found, rough, wide))
            sys.stdout.write(
                f"{loss} {kind} scale {scale:g} {name}: auto {ours:.1e}, torch bf16 {theirs:.1e}, bf16 products {autocast:.1e}\n"
            )
            assert ours <= min(theirs, autocast), f"{name}, scale {scale}"
            if name in ("scale", "bias"):
                assert ours < max(EXACT_NUMBER, 2 * off(exact[name], expected)), f"{name}, scale {scale}"


@pytest.mark.parametrize("kind", KINDS)
def test_auto_of_one_tower(kind: str) -> None:
    """SupCon of two rows of each class."""
    labels = torch.arange(ROWS) // 2
    errors = []
    rows = rows_of(kind)[1]
    truth = rows.double().requires_grad_()
    pml.SupConLoss()(truth, labels).backward()
    leaf = rows.clone().requires_grad_()
    with multiplying_bf16() as calls:
        GlobalBatchLoss(pml.SupConLoss(), mode="rows")(leaf, labels).backward()
    assert calls
    plain = rows.clone().requires_grad_()
    unit = functional.normalize(plain, dim=1)
    logits = (unit @ unit.t() / 0.1).fill_diagonal_(-torch.inf)
    functional.cross_entropy(logits, torch.arange(ROWS) ^ 1).backward()
    assert truth.grad is not None
    for grad in (leaf.grad, plain.grad):
        assert grad is not None
        errors.append(off(grad, truth.grad))
    sys.stdout.write(f"SupCon {kind}: auto {errors[0]:.1e}, torch bf16 {errors[1]:.1e}\n")
    assert errors[0] <= errors[1]
