"""Rows as operands of products, and the products themselves with their gradient, in the forms of ``forms``. Rows of unit length.

Legend: ``n``, ``m`` rows of two operands, ``D`` their width, ``k`` parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.losses.products import forms
from lightning_ddp_losses.losses.products.forms import ROUNDED_ROWS, SEQUENCES, ProductForm
from lightning_ddp_losses.losses.tile_results import TileResults

GradTerms: TypeAlias = tuple[Tensor, ...]
"""A gradient (n, m) in the form for a product with rows: itself, or one to three bf16 numbers, the second of which is subtracted."""

SMALLEST_LENGTH = 1e-12  # as in torch.nn.functional.normalize

_MOST_OF_DOT = 2**31 - 1  # entries that torch.dot accepts
_PIECE_BYTES = 16 << 20  # of rows whose gradient is computed at a time


class Operand(NamedTuple):
    """Rows in the form of a product's operand, without graph.

    Attributes:
        rows: (n, D). Float32 or wider rows are divided by their lengths already. Rows of bf16 are unchanged.
        lengths: (n,), divisors of the caller's rows. None if they are not divided.
        parts: (n, kD), bf16 numbers whose sum is a row, in the order of ``SEQUENCES``. None if the rows themselves are multiplied.
    """

    rows: Tensor
    lengths: Tensor | None = None
    parts: Tensor | None = None

    @classmethod
    def prepare(cls, rows: Tensor, form: ProductForm, *, normalize: bool) -> Operand:
        """Prepare (n, D) rows of the caller. ``normalize`` divides them by their lengths."""
        rows = rows.detach()
        lengths = lengths_of(rows) if normalize else None
        if form in ROUNDED_ROWS:
            return cls(rows.to(torch.bfloat16), lengths)
        if lengths is not None:
            rows = rows / lengths.unsqueeze(1)
        unit = cls(rows, lengths)
        return unit.in_form(form) if form in SEQUENCES else unit

    def in_form(self, form: ProductForm) -> Operand:
        """Return float32 rows with their parts, if they are multiplied in parts."""
        if form not in SEQUENCES:
            return self
        return self._replace(parts=_parts_of(self.rows, SEQUENCES[form]))

    @property
    def factors(self) -> Tensor | None:
        """(n,), factors of the rows' products: one over the lengths of bf16 rows. None means 1."""
        if self.lengths is None or self.rows.dtype != torch.bfloat16:
            return None
        return self.lengths.reciprocal()

    @property
    def left(self) -> Tensor:
        """(n, D) or (n, (k - 1) D), the left operand of a product of rows with rows."""
        return self.rows if self.parts is None else self.parts[:, : -self.rows.shape[1]]

    @property
    def right(self) -> Tensor:
        """(n, D) or (n, (k - 1) D), the right operand. Each part is multiplied with its neighbour."""
        return self.rows if self.parts is None else self.parts[:, self.rows.shape[1] :]

    def summands(self) -> list[Tensor]:
        """Return (n, D) tensors whose sum is the rows, the largest first."""
        if self.parts is None:
            return [self.rows]
        blocks = torch.split(self.parts, self.rows.shape[1], 1)
        # the first place of each part in both sequences
        return [*blocks[:1], *blocks[2:3], *blocks[5:6]]

    def part(self, rows: slice) -> Operand:
        """Return some of the rows, without a copy."""
        return self._of_each(lambda each: part_of(each, rows))

    def multiplied(self, order: Tensor | None) -> Operand:
        """Return the rows that are multiplied, without lengths by which they are already divided, in an order (None: unchanged)."""
        multiplied = self if self.rows.dtype == torch.bfloat16 else self._replace(lengths=None)
        return multiplied if order is None else multiplied._of_each(lambda each: each[order])

    def copied(self) -> Operand:
        """Return a copy."""
        return self._of_each(Tensor.clone)

    def _of_each(self, function: Callable[[Tensor], Tensor]) -> Operand:
        lengths, parts = self.lengths, self.parts
        if lengths is not None:
            lengths = function(lengths)
        if parts is not None:
            parts = function(parts)
        return Operand(function(self.rows), lengths, parts)

    def spread(self, vector: Tensor) -> Tensor:
        """Return the sums (n, D), or (1, D) if all are equal, of rows that were all multiplied with one vector (D,)."""
        factors = self.factors
        return vector.unsqueeze(0) if factors is None else factors.unsqueeze(1) * vector

    def total(self) -> Tensor:
        """Return the sum (D,) of the rows after division by their lengths, in float32 at least."""
        factors = self.factors
        if factors is None:
            return self.rows.sum(0, dtype=torch.promote_types(self.rows.dtype, torch.float32))
        return factors @ self.rows.to(factors.dtype)

    def vjp(self, sums: Tensor, out: Tensor, factor: Tensor | None = None) -> Tensor:
        """Write the gradient of the caller's rows to ``out``. Return the products (n,) of rows and sums.

        Args:
            sums: (n, D), sums over the partners of each row of the product's gradient times the partner (``add_to_left_``).
            out: (n, D), of any floating dtype. May be ``sums``.
            factor: Factor of the gradient, 0-dim. None means 1.
        """
        pieces = pieces_of(sums)
        if len(pieces) == 1:
            return self._vjp_of_piece(sums, out, factor)
        dots = TileResults(len(sums), sums)
        for piece in pieces:
            dots.store_(self.part(piece)._vjp_of_piece(sums[piece], out[piece], factor), piece.start)
        return dots.joined()

    def _vjp_of_piece(self, sums: Tensor, out: Tensor, factor: Tensor | None) -> Tensor:
        dots = dot_rows(self.rows, sums)
        found, lengths = sums, self.lengths
        if lengths is not None:
            # a gradient along the row changes its length only. A row that is too short for a length is only multiplied
            along = dots * (lengths > SMALLEST_LENGTH)
            target = out if out.dtype == sums.dtype else None
            is_divided = self.rows.dtype == torch.bfloat16
            if is_divided:
                along.div_(lengths).div_(lengths)
            found = torch.addcmul(sums, self.rows, along.unsqueeze(1), value=-1, out=target)
            if not is_divided:
                if factor is None:
                    found.div_(lengths.unsqueeze(1))
                else:
                    factor = (factor / lengths).unsqueeze(1)
        if factor is not None:
            torch.mul(found, factor, out=out)
        elif found.data_ptr() != out.data_ptr():
            out.copy_(found)
        return dots


def _parts_of(rows: Tensor, sequence: Sequence[int]) -> Tensor:
    """Return bf16 parts (n, kD) of float32 rows, in the order of a sequence."""
    parts: list[Tensor] = []
    rest = rows.float()
    for _ in range(max(sequence) + 1):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1]
    return torch.cat([parts[each] for each in sequence], 1)


def part_of(rows: Tensor, place: slice) -> Tensor:
    """Return some of the rows. If they are all, not as a view, which takes as long as many an operation on few rows."""
    return rows if place.start == 0 and place.stop == rows.shape[0] else rows[place]


def pieces_of(rows: Tensor) -> list[slice]:
    """Return slices of rows so that intermediate results of one are small."""
    step = max(1, _PIECE_BYTES // max(1, rows.shape[1] * rows.element_size()))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]


def dots_of(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``dot_rows`` in a dtype, with small intermediate results."""
    pieces = pieces_of(left)
    if len(pieces) == 1:
        return dot_rows(left, right).to(dtype)
    dots = torch.empty(len(left), dtype=dtype, device=left.device)
    for piece in pieces:
        dots[piece] = dot_rows(left[piece], right[piece])
    return dots


def dot_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return the product (n,) of each row with the row in the same place. Rows of bf16 are multiplied in float32."""
    if left.dtype.itemsize < torch.float32.itemsize:
        left = left.float()
    return (left * right).sum(1)


def product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply all rows of two matrices with each other, (n, m), rows of bf16 into float32."""
    if left.dtype != torch.bfloat16:
        return torch.mm(left, right.t(), out=out)
    if not left.numel() or not right.numel() or not forms.multiplies_into_float32(left.device):
        return torch.mm(left.float(), right.float().t(), out=out)
    if out is None:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return torch.mm(left, right.t(), out_dtype=torch.float32, out=out)


def add_factors_(
    products: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, plus: Tensor | None = None
) -> Tensor:
    """Multiply products by factors of their rows (n,) and columns (m,), where None means 1, and add a number, or one per row (n, 1).

    The result is in the memory of the products, unless this is compiled.
    """
    if torch.compiler.is_compiling():
        products = products.clone()
    if of_rows is not None:
        products.mul_(of_rows.unsqueeze(1))
    if of_columns is None:
        return products if plus is None else products.add_(plus)
    return products.mul_(of_columns) if plus is None else torch.addcmul(plus, products, of_columns, out=products)


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum (1,) of the products of entries of two contiguous matrices. Neither is overwritten."""
    if torch.compiler.is_compiling() or left.numel() > _MOST_OF_DOT:
        # by rows, as other sums of the tile, which the compiler then makes in the same pass
        return (left * right).sum(1).sum().view(1)
    return torch.dot(left.reshape(-1), right.reshape(-1)).view(1)


def split(grad: Tensor, of_rows: Tensor | None, of_columns: Tensor | None, term_count: int) -> GradTerms:
    """Return a gradient times factors of its rows and columns (``add_factors_``) in the form for a product with rows.

    Args:
        grad: (n, m). Overwritten.
        of_rows: (n,), or None for 1.
        of_columns: (m,), or None for 1.
        term_count: Number of bf16 numbers whose sum it is, the second one negated (``grad_terms_of``). 0: it stays float32.
    """
    if term_count == 0:
        return (add_factors_(grad, of_rows, of_columns),)
    if torch.compiler.is_compiling():
        rest, terms = add_factors_(grad, of_rows, of_columns), []
        for _ in range(term_count):
            # in bits, since the compiler removes a conversion to bf16 and back, and the smaller numbers would be 0
            rounded = ((rest.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
            # not in one tensor: the compiler would compute its parts apart, and everything as often
            terms.append(rounded.to(torch.bfloat16))
            rest = rounded - rest
        return tuple(terms)
    grad = add_factors_(grad, of_rows, None)
    of_columns = grad.new_ones(1) if of_columns is None else of_columns
    # with the factors of the columns: a pass less than a product of its own
    terms = [torch.empty_like(grad, dtype=torch.bfloat16) for _ in range(term_count)]
    torch.mul(grad, of_columns, out=terms[0])
    if term_count == 2:
        torch.addcmul(terms[0], grad, of_columns, value=-1, out=terms[1])
    elif term_count == 3:
        rest = grad.mul_(of_columns).sub_(terms[0]).neg_()
        terms[1].copy_(rest)
        torch.sub(terms[1], rest, out=terms[2])
    return tuple(terms)


def add_to_left_(
    sums: Tensor, terms: GradTerms, right: Operand, *, scale: float = 1.0, overwrite: bool = False
) -> None:
    """Add the products of a gradient with the right rows (m, D) to the sums (n, D) of the left ones.

    Args:
        sums: Sums of the left rows.
        terms: From ``split``.
        right: Rows, in the form of products.
        scale: Factor.
        overwrite: The sums are overwritten instead.
    """
    beta = 0 if overwrite else 1
    if terms[0].dtype != torch.bfloat16:
        torch.addmm(sums, terms[0], right.rows.to(sums.dtype), beta=beta, alpha=scale, out=sums)
        return
    summands = right.summands()
    for index, term in enumerate(terms):
        alpha = -scale if index == 1 else scale
        # products of two small parts are below the rounding
        for summand in summands[: len(terms) - index]:
            torch.addmm(sums, term, summand, out_dtype=torch.float32, beta=beta, alpha=alpha, out=sums)
            beta = 1


def add_to_right_(
    sums: Tensor, terms: GradTerms, left: Operand, *, scale: float = 1.0, overwrite: bool = False
) -> None:
    """Add the same of the left rows (n, D) to the sums (m, D) of the right ones."""
    add_to_left_(sums, tuple(term.t() for term in terms), left, scale=scale, overwrite=overwrite)


# ---------------------------------------------------------------------- rows of unit length


def lengths_of(rows: Tensor) -> Tensor:
    """Return (n,), the divisors of ``torch.nn.functional.normalize``. Without gradient."""
    wide = torch.float32 if rows.dtype.itemsize < torch.float32.itemsize else None
    lengths: Tensor = torch.linalg.vector_norm(rows.detach(), dim=1, dtype=wide)
    return lengths.clamp_min(SMALLEST_LENGTH)


def unit_rows(rows: Tensor) -> Tensor:
    """Divide (n, D) rows by their lengths, as ``torch.nn.functional.normalize``. The gradient cannot be differentiated again.

    Autograd's own backward of a norm, a clamp and a division is 14 passes over the rows. Written out it is five. A row shorter than 1e-12
    is divided by that number, which is then a constant.
    """
    return _UnitRows.apply(rows)  # type: ignore[no-untyped-call, no-any-return]


class _UnitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        unit = Operand.prepare(rows, "float32", normalize=True)
        ctx.save_for_backward(*unit)
        return unit.rows

    @staticmethod
    @once_differentiable_strict("a loss of unit rows")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        unit = Operand(*ctx.saved_tensors)
        found = torch.empty_like(grad)
        unit.vjp(grad, found)
        return (found,)
