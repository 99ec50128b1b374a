"""Products of rows with rows, in float32 or on tensor cores; rows of unit length, and sums of exponentials of products.

A product of two bf16 numbers is exact in float32, so bf16 rows multiplied into float32 differ from the float32 product of the same values
by the order of summation only. Anything that would lose digits stays out of the product: rows are multiplied as they came, not at unit
length, and their lengths and the scale are row and column factors of the tile. A gradient of products is no bf16 number. It is the sum of
two, ``high + low``, which keep 16 of its 24 bits, and each is multiplied with the rows.

| form | a product | rounding of an operand |
|---|---|---|
| ``"float32"`` | one in float32 | none |
| ``"bf16"`` | one of bf16; a gradient's two | none if rows came in bf16, else 2^-9; of a gradient 2^-17 |

Against float64, 60 rows x 24, the worst of CLIP, SigLIP, SupCon, NTXent, MultiSimilarity and ArcFace (relative: loss, gradient; CPU, torch
2.13): ``"float32"`` 2e-7, 1e-6; ``"bf16"`` 2e-7, 3.4e-6 of bf16 rows and 3e-4, 6e-3 of float32 rows.

``torch.mm(..., out_dtype=torch.float32)`` exists on some devices (NVIDIA's: torch 2.8 and later). Elsewhere, as on the CPU, the same bf16
values are multiplied in float32.

Legend: ``n``, ``m`` rows of two operands, ``D`` their width, ``T`` rows and ``C`` columns of a piece, ``k`` parts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.errors import expect, expect_option

ProductChoice: TypeAlias = Literal["float32", "bf16", "auto"]
"""The user's option."""

ProductForm: TypeAlias = Literal["float32", "bf16"]
"""The form that a call uses."""

SMALLEST_LENGTH = 1e-12  # as in torch.nn.functional.normalize

DEVICE_BYTES = 256 << 20
_MOST_PARTS = 16  # of a running log-sum-exp: a merge is nine operators


def tile_budget(device: torch.device, host_bytes: int) -> int:
    """Return how many bytes of intermediate results a loss keeps at a time: ``host_bytes`` on the CPU, ``DEVICE_BYTES`` elsewhere.

    On a CPU small pieces stay in the cache. On an accelerator a piece must be large to be worth its launches: with 256 MiB, 65,536 rows
    against as many columns are 64 tiles of float32.
    """
    return host_bytes if device.type == "cpu" else DEVICE_BYTES


# ---------------------------------------------------------------------- the form of a call


def refuse_products(title: str, products: object) -> None:
    """Refuse an unknown option.

    Raises:
        ConfigurationError: with the choices.
    """
    expect_option(f"{title}: products", products, get_args(ProductChoice))


def choose_form(title: str, choice: ProductChoice, operands: Sequence[Tensor]) -> ProductForm:
    """Choose the form for operands as the caller gave them: float64 stays float64, ``"auto"`` loses nothing.

    Args:
        title: Name of the loss in messages.
        choice: The user's option.
        operands: Rows, before they are widened.

    Raises:
        ConfigurationError: for bf16 products on a device that has none.
    """
    dtypes = {operand.dtype for operand in operands}
    if choice == "float32" or torch.float64 in dtypes:
        return "float32"
    device = operands[0].device
    if choice == "auto":
        return "bf16" if dtypes == {torch.bfloat16} and has_bf16(device) else "float32"
    expect(
        has_bf16(device),
        f"{title}: products",
        expected=f"a device with bfloat16 for {choice!r}",
        got=f"{device}, which has none",
        fix="Use products='float32', or 'auto', which takes bf16 products only if rows and device have them.",
    )
    return choice


def rounding_of(choice: ProductChoice) -> float:
    """Return by how much products of float32 rows may round an operand, relative; 0 for float32 itself."""
    # rows that came in bf16 are not rounded, but the gradient of a product is
    return {"float32": 0.0, "auto": 2.0**-17, "bf16": 2.0**-9}[choice]


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bf16 itself. The CPU need not: it multiplies the values in float32."""
    if device.type == "cpu":
        return True
    # emulated products are slower than float32
    asked = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
    if asked is None:
        return True
    try:
        return bool(asked(including_emulation=False))
    except TypeError:  # a device that emulates nothing
        return bool(asked())


@functools.cache
def _multiplies_into_float32(device: torch.device) -> bool:
    """Return whether a device has a product of bf16 into float32; tried once, with one number."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


# ---------------------------------------------------------------------- products and their gradient


@dataclass(frozen=True)
class Operand:
    """Rows in the form in which they are multiplied.

    Attributes:
        rows: (n, D), of float32 or bf16.
        lengths: (n,), the factors by which bf16 rows are longer than the caller's; None: they are equal.
        factor: Factor of products of ``scaled`` rows: (n,), (1,) or one number.
    """

    rows: Tensor
    lengths: Tensor | None = None
    factor: Tensor | float = 1.0

    @property
    def is_bf16(self) -> bool:
        """Whether products run on tensor cores."""
        return self.rows.dtype == torch.bfloat16

    def part(self, rows: slice) -> Operand:
        """Return some of the rows, without a copy."""
        return Operand(self.rows[rows], None if self.lengths is None else self.lengths[rows])


def as_operand(rows: Tensor, form: ProductForm, lengths: Tensor | None = None) -> Operand:
    """Prepare float32 rows for products.

    Args:
        rows: (n, D).
        form: The form of the products.
        lengths: (n,), lengths by which the rows were divided: times these, rows that were bf16 are so again, bit for bit (the division's
            rounding is far below half a step of bf16). None: they were not divided.
    """
    if form == "float32":
        return Operand(rows)
    raw = rows if lengths is None else rows * lengths.unsqueeze(1)
    return Operand(raw.to(torch.bfloat16), lengths)


def scaled(operand: Operand, scale: Tensor | float) -> Operand:
    """Return an operand of ``scale`` times the rows; bf16 rows stay as they are, and with a Python number all do."""
    if isinstance(scale, Tensor) and not operand.is_bf16:
        return Operand(operand.rows * scale)
    factor = scale.reshape(1) if isinstance(scale, Tensor) else scale
    if operand.lengths is not None:
        factor = factor / operand.lengths
    return Operand(operand.rows, operand.lengths, factor)


def product(left: Operand, right: Operand, scale: Tensor | float | None = None) -> Tensor:
    """Compute ``scale`` times the products of all rows of two operands, (n, m); the caller may overwrite them.

    Args:
        left: n rows.
        right: m rows.
        scale: One number; None: the left rows are ``scaled``.
    """
    if scale is not None:
        left = scaled(left, scale)
    if not left.is_bf16:
        assert not isinstance(left.factor, Tensor)
        if left.factor == 1:
            return left.rows @ right.rows.t()
        found = left.rows.new_empty(len(left.rows), len(right.rows))
        return torch.addmm(found, left.rows, right.rows.t(), beta=0, alpha=left.factor, out=found)
    found = _multiply(left.rows, right.rows.t())
    factor = left.factor
    found.mul_(factor.unsqueeze(1) if isinstance(factor, Tensor) else factor)
    return found if right.lengths is None else found.div_(right.lengths)


@dataclass(frozen=True)
class ProductGrad:
    """The gradient of a tile of products, in the form in which it is multiplied with either operand.

    Attributes:
        terms: (n, m) each, one in float32 or two in bf16, the smaller first; the gradient is their sum.
        left: The operand of its rows.
        right: The operand of its columns.
        scale: Factor of products with float32 terms.
    """

    terms: tuple[Tensor, ...]
    left: Operand
    right: Operand
    scale: float = 1.0

    def add_to_left_(self, grad: Tensor, *, overwrite: bool = False) -> None:
        """Add the gradient of the left rows, (n, D), or overwrite with it."""
        self._add_(grad, self.terms, self.right.rows, self.left.lengths, overwrite=overwrite)

    def add_to_right_(self, grad: Tensor, *, overwrite: bool = False) -> None:
        """Add the gradient of the right rows, (m, D), or overwrite with it."""
        terms = [term.t() for term in self.terms]
        self._add_(grad, terms, self.left.rows, self.right.lengths, overwrite=overwrite)

    def _add_(
        self, grad: Tensor, terms: Sequence[Tensor], rows: Tensor, lengths: Tensor | None, *, overwrite: bool
    ) -> None:
        if rows.dtype != torch.bfloat16:
            torch.addmm(grad, terms[0], rows, beta=0 if overwrite else 1, alpha=self.scale, out=grad)
            return
        low, high = terms
        # the smaller one first, so that its digits are not lost one by one
        found = _multiply(low, rows).add_(_multiply(high, rows))
        if lengths is not None:
            found.mul_(lengths.unsqueeze(1))
        if overwrite:
            grad.copy_(found)
        else:
            grad.add_(found)


def product_grad_(grad: Tensor, left: Operand, right: Operand, scale: float = 1.0) -> ProductGrad:
    """Prepare the gradient (n, m) of ``scale`` times the rows' products; it is overwritten.

    Both lengths divide it before it is split, so that one split serves both operands. Each takes its own back from the sum.
    """
    if not left.is_bf16:
        return ProductGrad((grad,), left, right, scale)
    if scale != 1:
        grad.mul_(scale)
    for lengths in (None if left.lengths is None else left.lengths.unsqueeze(1), right.lengths):
        if lengths is not None:
            grad.div_(lengths)
    high = grad.to(torch.bfloat16)
    low = grad.sub_(high).to(torch.bfloat16)
    return ProductGrad((low, high), left, right)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply bf16 matrices into float32."""
    if _multiplies_into_float32(left.device) and left.numel() and right.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


# ---------------------------------------------------------------------- rows of unit length


def lengths_of(rows: Tensor) -> Tensor:
    """Return (n,), the divisors of ``torch.nn.functional.normalize``; without gradient."""
    lengths: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1)
    return lengths.clamp_min(SMALLEST_LENGTH)


class UnitRows(NamedTuple):
    """Rows divided by their lengths as ``torch.nn.functional.normalize`` does, without their graph; their gradient by hand.

    Autograd's own backward of a norm, a clamp and a division is 14 passes over the rows. Written out it is six. A row shorter than 1e-12
    is divided by that number, which is then a constant.

    Attributes:
        rows: (n, D).
        lengths: (n, 1), the divisors.
    """

    rows: Tensor
    lengths: Tensor

    def vjp(self, grad: Tensor, out: Tensor | None = None, *, has_length: Tensor | None = None) -> Tensor:
        """Return the gradient of the original rows, from that of the unit rows.

        Args:
            grad: (n, D).
            out: Memory of the result, which may be ``grad``. None: new memory.
            has_length: (n, 1), ``have_length`` of the lengths, if it is known.
        """
        if has_length is None:
            has_length = have_length(self.lengths)
        # a gradient along the row changes its length only; a row that is too short for a length is only multiplied
        along = (self.rows * grad).sum(1, keepdim=True).mul_(has_length)
        return torch.addcmul(grad, self.rows, along, value=-1, out=out).div_(self.lengths)


def have_length(lengths: Tensor) -> Tensor:
    """Return which lengths are not the constant for short rows."""
    return lengths > SMALLEST_LENGTH


def divide_by_length(rows: Tensor) -> UnitRows:
    """Divide (n, D) rows by their lengths, without gradient."""
    lengths = lengths_of(rows).unsqueeze(1)
    return UnitRows(rows.detach() / lengths, lengths)


def unit_rows(rows: Tensor) -> UnitRows:
    """Divide (n, D) rows by their lengths; the unit rows have the gradient, which cannot be differentiated again."""
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return divide_by_length(rows)
    return UnitRows(*_UnitRows.apply(rows))  # type: ignore[no-untyped-call]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
        unit = divide_by_length(rows)
        ctx.save_for_backward(*unit)
        ctx.mark_non_differentiable(unit.lengths)
        ctx.set_materialize_grads(False)
        return unit.rows, unit.lengths

    @staticmethod
    @once_differentiable_strict("a loss of unit rows")
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return (None if grad is None else UnitRows(*ctx.saved_tensors).vjp(grad),)


# ---------------------------------------------------------------------- sums of exponentials


class RunningLogSumExp:
    """Log-sum-exp of rows whose entries arrive in pieces: from tiles, chunks of classes or other ranks.

    Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. Pieces are parts with numbers of their own, and
    some are merged at a time: the largest ``m`` rescales each ``s`` once. Two ranks' numbers merge the same way. No exponential overflows,
    and no piece is needed again. A row without entries has the smallest finite number as its maximum and a sum of 0: with ``-inf`` in its
    place ``m - m`` would be nan, which costs two more passes to prevent.

    Args:
        maximum: (n,), the largest entry so far.
        sum_exp: (n,), the sum of ``exp(entry - maximum)``.
    """

    def __init__(self, maximum: Tensor, sum_exp: Tensor) -> None:
        self._rows, self._like = len(maximum), maximum
        # (k, n) each: numbers of k parts, of which part i has pieces of its first ``_taken[i]`` rows, at most
        self._parts: tuple[Tensor, Tensor] | None = (maximum.unsqueeze(0), sum_exp.unsqueeze(0))
        self._taken = [self._rows]

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> RunningLogSumExp:
        """Return rows without entries, of the dtype and on the device of ``like``."""
        made = cls.__new__(cls)
        made._rows, made._like, made._parts, made._taken = rows, like, None, []
        return made

    @property
    def maximum(self) -> Tensor:
        """(n,), the largest entry so far."""
        return self._merged()[0]

    @property
    def sum_exp(self) -> Tensor:
        """(n,), the sum of ``exp(entry - maximum)``."""
        return self._merged()[1]

    @classmethod
    def merged(cls, maxima: Tensor, sums: Tensor) -> RunningLogSumExp:
        """Merge k parts of the same rows, (k, n) each, added in their order."""
        maximum = maxima.amax(0)
        return cls(maximum, (sums * torch.exp(maxima - maximum)).sum(0))

    def accumulate_(self, values: Tensor, *, rows: slice = slice(None), keep: bool = False) -> None:
        """Add a piece to some of the rows.

        Args:
            values: (T, C), all finite; overwritten unless ``keep``.
            rows: The T rows; all by default.
            keep: Leave the values as they are, at the price of a copy.
        """
        if not values.shape[1]:
            return
        is_first = self._parts is None and len(values) == self._rows
        places = (None, None) if is_first else self._part_for(rows)
        maximum = torch.amax(values, 1, out=places[0])
        column = maximum.unsqueeze(1)
        differences = torch.sub(values, column) if keep else values.sub_(column)
        sum_exp = torch.sum(differences.exp_(), 1, out=places[1])
        if is_first:
            self._parts, self._taken = (maximum.unsqueeze(0), sum_exp.unsqueeze(0)), [self._rows]

    def above_maximum(self) -> Tensor:
        """Return (n,), the log-sum-exp less the maximum: exactly 0 where one entry outweighs all others."""
        return self.sum_exp.log()

    def relative_to(self, entries: Tensor) -> Tensor:
        """Return (n,), the log-sum-exp less an entry of each row. Digits are kept if that is close to the largest."""
        return (self.maximum - entries) + self.above_maximum()

    def _part_for(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return (T,) places for the maximum and the sum of a piece of some rows, in a part that has none of these yet."""
        start, stop, _ = rows.indices(self._rows)
        maxima, sums = self._started()
        if min(self._taken) > start:
            maxima, sums = self._with_more_parts(maxima, sums)
        index = next(index for index, taken in enumerate(self._taken) if taken <= start)
        self._taken[index] = stop
        return maxima[index, start:stop], sums[index, start:stop]

    def _with_more_parts(self, maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for twice as many parts; for as many as before once they are too many and are merged."""
        added = len(maxima)
        if added == _MOST_PARTS:
            maxima, sums = (numbers.unsqueeze(0) for numbers in self._merged())
            added -= 1
        self._taken += [0] * added
        empty = _nothing(added, self._rows, self._like)
        self._parts = torch.cat([maxima, empty[0]]), torch.cat([sums, empty[1]])
        return self._parts

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Merge all parts; return both numbers, (n,) each."""
        maxima, sums = self._started()
        if len(maxima) > 1:
            whole = RunningLogSumExp.merged(maxima, sums)
            self._parts, self._taken = whole._started(), whole._taken
            maxima, sums = self._parts
        return maxima[0], sums[0]

    def _started(self) -> tuple[Tensor, Tensor]:
        """Return both numbers of the parts; one without entries if no piece has come yet."""
        if self._parts is None:
            self._parts, self._taken = _nothing(1, self._rows, self._like), [0]
        return self._parts


def _nothing(parts: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of parts without entries, (k, n) each."""
    return like.new_full((parts, rows), torch.finfo(like.dtype).min), like.new_zeros((parts, rows))
