"""Products of rows with rows on tensor cores: in float32, as sums of bfloat16 products, or of rows that are bfloat16 anyway.

A product of two bf16 numbers is exact in float32, so bf16 rows multiplied into float32 differ from the float32 product of the same values
by the order of summation only. What would lose digits stays out of the product: rows are multiplied as they came, not at unit length, and
their lengths and the scale are row and column factors of the tile. A gradient of products is no bf16 number; it is the sum of two,
``high + low``, which keep 16 of its 24 bits, and each is multiplied with the rows.

| form | a product | rounding of an operand |
|---|---|---|
| ``"float32"`` | one in float32 | none |
| ``"tf32"`` | three of bf16: both operands are ``high + low``, ``low * low`` is left out | 2^-17; TF32 itself rounds by 2^-11 |
| ``"bf16"`` | one of bf16; a gradient's two | none where rows came in bf16, else 2^-9; of a gradient 2^-17 |

Against float64, 60 rows x 24, the worst of CLIP, SigLIP, SupCon, NTXent, MultiSimilarity and ArcFace (relative: loss, gradient; CPU, torch
2.13): ``"float32"`` 2e-7, 1e-6; ``"tf32"`` 2e-6, 1.2e-5; ``"bf16"`` 2e-7, 3.4e-6 of bf16 rows and 3e-4, 6e-3 of float32 rows.

torch has one switch for TF32, of the whole process (``torch.backends.cuda.matmul``), which another thread or the model may rely on: it is
neither read nor set, so ``"tf32"`` is as fast as three bf16 products and 2^6 times as exact as its name.

``torch.mm(..., out_dtype=torch.float32)`` exists on some devices (NVIDIA's: torch 2.8 and later). Elsewhere, as on the CPU, the same bf16
values are multiplied in float32.

Legend: ``n``, ``m`` rows of two operands, ``D`` their width, ``L`` lengths of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError

ProductChoice: TypeAlias = Literal["float32", "tf32", "bf16", "auto"]
"""What a user may ask for."""

ProductForm: TypeAlias = Literal["float32", "tf32", "bf16"]
"""What is done."""

SMALLEST_LENGTH = 1e-12  # as in torch.nn.functional.normalize


def refuse_products(title: str, products: object) -> None:
    """Refuse what is no choice.

    Raises:
        ConfigurationError: naming the choices.
    """
    choices = get_args(ProductChoice)
    if products not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(f"{title}: products", expected=f"one of {expected}", got=repr(products))


def choose_form(title: str, choice: ProductChoice, operands: Sequence[Tensor]) -> ProductForm:
    """Choose what is done with operands as the caller gave them: float64 stays float64, ``"auto"`` loses nothing.

    Args:
        title: How messages name the loss.
        choice: The user's.
        operands: Rows, before anything is made wider.

    Raises:
        ConfigurationError: for bf16 products on a device that has none.
    """
    dtypes = {operand.dtype for operand in operands}
    if choice == "float32" or torch.float64 in dtypes:
        return "float32"
    device = operands[0].device
    if choice == "auto":
        is_free = dtypes == {torch.bfloat16} and has_bf16(device)
        return "bf16" if is_free else "float32"
    if not has_bf16(device):
        raise ConfigurationError(
            f"{title}: products",
            expected=f"a device with bfloat16 for {choice!r}",
            got=f"{device}, which has none",
            fix="Use products='float32', or 'auto', which takes bf16 products only where rows and device have them.",
        )
    return choice


def rounding_of(choice: ProductChoice) -> float:
    """Return by how much products of float32 rows may round an operand, relative; 0 for what float32 does itself."""
    # what came in bf16 is not rounded, but the gradient of a product is
    return {"float32": 0.0, "auto": 2.0**-17, "tf32": 2.0**-17, "bf16": 2.0**-9}[choice]


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """Say whether a device multiplies bf16 itself; the CPU need not, it takes the values for float32."""
    if device.type == "cpu":
        return True
    # where a device emulates them they are slower than float32
    asked = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    if asked is None:
        return True
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # a device that emulates nothing
        return bool(asked())


@functools.cache
def _multiplies_into_float32(device: torch.device) -> bool:
    """Say whether a device has a product of bf16 into float32: asked once, with one number."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


# ---------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Operand:
    """Rows in the form in which they are multiplied.

    Attributes:
        terms: (n, D) each, whose sum is the rows: one in float32, or one or two in bf16.
        lengths: (n,), by which the terms are longer than the rows; None: they are the rows.
        factor: What multiplies products of the terms, (n,) or one number, where they are ``scaled`` and of bf16.
    """

    terms: tuple[Tensor, ...]
    lengths: Tensor | None = None
    factor: Tensor | float = 1.0

    def part(self, rows: slice) -> Operand:
        """Return some of the rows, without a copy."""
        lengths = None if self.lengths is None else self.lengths[rows]
        return Operand(tuple(term[rows] for term in self.terms), lengths)


def lengths_of(rows: Tensor) -> Tensor:
    """Return (n,), what ``torch.nn.functional.normalize`` divides rows by; without gradient."""
    lengths: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return lengths.clamp_min(SMALLEST_LENGTH)


def as_operand(rows: Tensor, form: ProductForm, lengths: Tensor | None = None) -> Operand:
    """Prepare float32 rows for products.

    Args:
        rows: (n, D).
        form: What is done with them.
        lengths: (n,), of the rows before they were divided by them: times these, rows that were bf16 are so again, bit for bit (the
            division's rounding is far below half a step of bf16). None: they were not divided.
    """
    if form == "float32":
        return Operand((rows,))
    if form == "tf32":
        return Operand(_high_and_low(rows))
    raw = rows if lengths is None else rows * lengths.unsqueeze(1)
    return Operand((raw.to(torch.bfloat16),), lengths)


def _high_and_low(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bf16 tensors whose sum is the values to 16 bits."""
    high = values.to(torch.bfloat16)
    return high, (values - high).to(torch.bfloat16)


# ---------------------------------------------------------------------- products and their gradient


def scaled(operand: Operand, scale: Tensor | float) -> Operand:
    """Return an operand of ``scale`` times the rows; bf16 terms stay as they are."""
    if operand.terms[0].dtype != torch.bfloat16:
        return Operand((operand.terms[0] * scale,))
    factor = scale.reshape(1) if isinstance(scale, Tensor) else scale
    if operand.lengths is not None:
        factor = factor / operand.lengths
    return Operand(operand.terms, operand.lengths, factor)


def product(left: Operand, right: Operand, scale: Tensor | float | None = None) -> Tensor:
    """Compute ``scale`` times the products of all rows of two operands, (n, m); the caller may overwrite them.

    Args:
        left: n rows.
        right: m rows.
        scale: One number; None: the left rows are ``scaled``.
    """
    if scale is not None:
        left = scaled(left, scale)
    if left.terms[0].dtype != torch.bfloat16:
        return left.terms[0] @ right.terms[0].t()
    found = _sum_of_products(left.terms, [term.t() for term in right.terms])
    factor = left.factor
    found.mul_(factor.unsqueeze(1) if isinstance(factor, Tensor) else factor)
    return found if right.lengths is None else found.div_(right.lengths)


@dataclass(frozen=True)
class Slope:
    """The gradient of a tile of products, in the form in which it is multiplied with either operand.

    Attributes:
        terms: (n, m) each.
        left: The operand of its rows.
        right: The operand of its columns.
    """

    terms: tuple[Tensor, ...]
    left: Operand
    right: Operand

    def add_to_left_(self, grad: Tensor) -> None:
        """Add the gradient of the left rows, (n, D)."""
        _add_products_(grad, self.terms, self.right.terms, self.left.lengths)

    def add_to_right_(self, grad: Tensor) -> None:
        """Add the gradient of the right rows, (m, D)."""
        _add_products_(grad, [term.t() for term in self.terms], self.left.terms, self.right.lengths)


def as_slope_(slope: Tensor, left: Operand, right: Operand) -> Slope:
    """Prepare the gradient (n, m) of the rows' products, without their scale; it is overwritten.

    Both lengths divide it before it is split, so that one split serves both operands; each takes its own back from the sum.
    """
    if left.terms[0].dtype != torch.bfloat16:
        return Slope((slope,), left, right)
    for lengths in (None if left.lengths is None else left.lengths.unsqueeze(1), right.lengths):
        if lengths is not None:
            slope.div_(lengths)
    high = slope.to(torch.bfloat16)
    low = slope.sub_(high).to(torch.bfloat16)
    return Slope((high, low), left, right)


def _add_products_(grad: Tensor, slopes: Sequence[Tensor], rows: Sequence[Tensor], factor: Tensor | None) -> None:
    if rows[0].dtype != torch.bfloat16:
        grad.addmm_(slopes[0], rows[0])
        return
    found = _sum_of_products(slopes, rows)
    if factor is not None:
        found.mul_(factor.unsqueeze(1))
    grad.add_(found)


def _sum_of_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Add the products (n, m) of bf16 terms (n, k) and (k, m) in float32, but those of two low ones."""
    pairs = _pairs(left, right)
    found = _multiply(*next(pairs))
    for a, b in pairs:
        found.add_(_multiply(a, b))
    return found


def _pairs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    # the smaller ones first, so that their digits are not lost one by one
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            if i + j < 2:
                yield left[i], right[j]


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply bf16 matrices into float32."""
    if _multiplies_into_float32(left.device) and left.numel() and right.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
