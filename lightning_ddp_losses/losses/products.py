"""Products of rows with rows, in float32 or on tensor cores. Rows of unit length, and sums of exponentials of products.

A product of two bf16 numbers is exact in float32, so bf16 rows multiplied into float32 differ from the float32 product of the same values
only by the order of summation. Operations that would lose digits are kept out of the product: rows are multiplied unchanged, not at unit
length, and their lengths and the scale are row and column factors of the tile. A gradient of products is not a bf16 number. It is rounded
to one, or is a sum of several, each of which is multiplied with the rows. Rows of float32 are sums of two or three bf16 numbers in
``"bf16x3"`` and ``"bf16x6"``.

| form | products for a logit, for a gradient | rounding of a row | of a gradient |
|---|---|---|---|
| ``"float32"`` | one in float32 | none | none |
| ``"bf16"`` | 1, 1 | none for bf16 rows, otherwise 2^-9 | 2^-9, but for the gradient of a scale or bias |
| ``"bf16x2"`` | 1, 2 | the same | 2^-17 |
| ``"bf16x3"`` | 3, 3 | 2^-17 | 2^-17 |
| ``"bf16x6"`` | 6, 6 | 2^-25 | 2^-25 |

The products for a logit are one of longer rows, in which the parts of a row follow each other (``_SEQUENCES``). ``"auto"`` is never less
exact than torch with the same rows: torch rounds logits of bf16 rows, their gradient and all sums to bf16.

``torch.mm(..., out_dtype=torch.float32)`` exists on some devices (NVIDIA's: torch 2.8 and later). Elsewhere, as on the CPU, the same bf16
values are multiplied in float32, gradients are not rounded, and ``"bf16x3"`` and ``"bf16x6"`` are ``"float32"``.

Legend: ``n``, ``m`` rows of two operands, ``D`` their width, ``T`` rows and ``C`` columns of a piece, ``k`` parts.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.errors import expect, expect_option
from lightning_ddp_losses.losses.tile_results import TileResults

ProductChoice: TypeAlias = Literal["float32", "bf16", "bf16x2", "bf16x3", "bf16x6", "auto"]
"""The user's option."""

ProductForm: TypeAlias = Literal["float32", "bf16", "bf16x2", "bf16x3", "bf16x6"]
"""The form that a call uses."""

GradTerms: TypeAlias = tuple[Tensor, ...]
"""A gradient (n, m) in the form for a product with rows: itself, or one to three bf16 numbers, the second of which is subtracted."""

_GRAD_TERMS: dict[ProductForm, int] = {"float32": 0, "bf16": 1, "bf16x2": 2, "bf16x3": 2, "bf16x6": 3}
_ROUNDED_ROWS: tuple[ProductForm, ...] = ("bf16", "bf16x2")
# each pair of neighbours is a product of two parts: of the largest (0), of the largest with the second (1), and so on
_SEQUENCES: dict[ProductForm, tuple[int, ...]] = {"bf16x3": (0, 0, 1, 0), "bf16x6": (0, 0, 1, 1, 0, 2, 0)}

SMALLEST_LENGTH = 1e-12  # as in torch.nn.functional.normalize

DEVICE_BYTES = 256 << 20
TOWER_BYTES = 64 << 20
_MOST_OF_DOT = 2**31 - 1  # entries that torch.dot accepts
_MOST_PIECES = 16  # of a running log-sum-exp: a merge is seven operators
_PIECE_BYTES = 16 << 20  # of rows whose gradient is computed at a time


def tile_budget(device: torch.device, host_bytes: int, device_bytes: int = DEVICE_BYTES) -> int:
    """Return how many bytes of intermediate results a loss keeps at a time: ``host_bytes`` on the CPU, ``device_bytes`` elsewhere.

    On a CPU small pieces stay in the cache. On an accelerator a piece must be large to be worth its launches: with 256 MiB, 65,536 rows
    against as many columns are 64 tiles of float32. The square tiles of two towers are worth theirs at 64 MiB: 4,096 rows and columns. The
    device computes a compiled tile of that size faster than the host launches it: these are four times as large.
    """
    return host_bytes if device.type == "cpu" else device_bytes


def aligned_columns(columns: int) -> int:
    """Round a number of columns down so that each row of a tile begins at a multiple of 16 bytes, or products take many times as long."""
    return columns // 64 * 64 or columns


# ---------------------------------------------------------------------- the form of a call


def refuse_products(title: str, products: object) -> None:
    """Refuse an unknown option.

    Raises:
        ConfigurationError: with the choices.
    """
    expect_option(f"{title}: products", products, get_args(ProductChoice))


def choose_form(title: str, choice: ProductChoice, operands: Sequence[Tensor]) -> ProductForm:
    """Choose the form for operands as the caller gave them: float64 stays float64, ``"auto"`` is not less exact than torch.

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
    if choice in _SEQUENCES and not multiplies_into_float32(device):
        return "float32"
    return choice


def rounds_rows(form: ProductForm) -> bool:
    """Return whether rows are multiplied as one bf16 number, so that only rows of bf16 are not rounded."""
    return form in _ROUNDED_ROWS


def rounding_of(choice: ProductChoice) -> float:
    """Return by how much products of float32 rows may round an operand, relative. 0 if they are as exact as float32."""
    if choice == "bf16x3":
        return 2.0**-17
    return 2.0**-9 if choice in _ROUNDED_ROWS else 0.0


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
def multiplies_into_float32(device: torch.device) -> bool:
    """Return whether a device has products of bf16 into float32. Tried once, with one number."""
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    try:
        found = torch.mm(one, one, out_dtype=torch.float32)
        torch.addmm(found, one, one, out_dtype=torch.float32, out=found)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def is_tf32(device: torch.device) -> bool:
    """Return whether a device multiplies float32 matrices in TF32, as ``torch.set_float32_matmul_precision`` allows it to."""
    return device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"


@contextlib.contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices in float32 for the length of a block."""
    if not is_tf32(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_warned_of_tf32: set[str] = set()


def warn_of_tf32(title: str, form: ProductForm, rows: Tensor) -> None:
    """Warn once for each loss that its float32 products are rounded to TF32."""
    if form != "float32" or rows.dtype != torch.float32 or title in _warned_of_tf32 or not is_tf32(rows.device):
        return
    _warned_of_tf32.add(title)
    warnings.warn(
        f"{title}: torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r}) lets the device multiply float32 "
        "rows in TF32, which rounds each operand by 2^-11 (relative). Set it to 'highest' for products in float32.",
        stacklevel=3,
    )


def grad_terms_of(form: ProductForm, device: torch.device) -> int:
    """Return how many bf16 numbers a gradient of products is made of. 0 if it is multiplied in float32, as by devices without bf16."""
    return _GRAD_TERMS[form] if multiplies_into_float32(device) else 0


# ---------------------------------------------------------------------- products and their gradient


class Operand(NamedTuple):
    """Rows in the form of a product's operand, without graph.

    Attributes:
        rows: (n, D). Float32 or wider rows are divided by their lengths already. Rows of bf16 are unchanged.
        lengths: (n,), divisors of the caller's rows. None if they are not divided.
        parts: (n, kD), bf16 numbers whose sum is a row, in the order of ``_SEQUENCES``. None if the rows themselves are multiplied.
    """

    rows: Tensor
    lengths: Tensor | None = None
    parts: Tensor | None = None

    @classmethod
    def prepare(cls, rows: Tensor, form: ProductForm, *, normalize: bool) -> Operand:
        """Prepare (n, D) rows of the caller. ``normalize`` divides them by their lengths."""
        rows = rows.detach()
        lengths = lengths_of(rows) if normalize else None
        if form in _ROUNDED_ROWS:
            return cls(rows.to(torch.bfloat16), lengths)
        if lengths is not None:
            rows = rows / lengths.unsqueeze(1)
        unit = cls(rows, lengths)
        return unit.in_form(form) if form in _SEQUENCES else unit

    def in_form(self, form: ProductForm) -> Operand:
        """Return float32 rows with their parts, if they are multiplied in parts."""
        if form not in _SEQUENCES:
            return self
        return self._replace(parts=_parts_of(self.rows, _SEQUENCES[form]))

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
    if not left.numel() or not right.numel() or not multiplies_into_float32(left.device):
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


# ---------------------------------------------------------------------- sums of exponentials


class LogSumExp(NamedTuple):
    """The log-sum-exp of n rows: the largest entry ``m``, and ``s = sum exp(entry - m)``.

    Attributes:
        maximum: (n,), m.
        sum_exp: (n,), s.
    """

    maximum: Tensor
    sum_exp: Tensor

    @classmethod
    def merged(cls, maxima: Tensor, sums: Tensor) -> LogSumExp:
        """Merge k parts of the same rows, (k, n) each, added in their order."""
        maximum = maxima.amax(0)
        return cls(maximum, (sums * torch.exp(maxima - maximum)).sum(0))

    def above_maximum(self) -> Tensor:
        """Return (n,), the log-sum-exp less the maximum: exactly 0 if one entry outweighs all others."""
        return self.sum_exp.log()

    def relative_to(self, entries: Tensor) -> Tensor:
        """Return (n,), the log-sum-exp less an entry of each row. Digits are kept if that is close to the largest."""
        return (self.maximum - entries) + self.sum_exp.log()


class RunningLogSumExp:
    """Log-sum-exp of rows that arrive in pieces: from tiles, chunks of classes or other ranks.

    Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. Pieces are kept side by side, and some are merged
    at a time: the largest ``m`` rescales each ``s`` once. Two ranks' numbers merge the same way. No exponential overflows, and no piece is
    needed again. A row without entries has the smallest finite number as its maximum and a sum of 0: with ``-inf`` in its place ``m - m``
    would be nan, which costs two more passes to prevent.

    Args:
        rows: n, without entries at first.
        like: A tensor of their dtype and on their device.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self._rows, self._like = rows, like
        # piece k of a part of the rows begins k * n behind the first of these rows
        self._maxima = TileResults(_MOST_PIECES * rows, like)
        self._sums = TileResults(_MOST_PIECES * rows, like)
        # how many pieces each part has, by its first row
        self._piece_counts: dict[int, int] = {}
        self._whole: LogSumExp | None = None

    @property
    def maximum(self) -> Tensor:
        """(n,), the largest entry so far."""
        return self._merged().maximum

    @property
    def sum_exp(self) -> Tensor:
        """(n,), the sum of ``exp(entry - maximum)``."""
        return self._merged().sum_exp

    def add_piece(self, numbers: tuple[Tensor, Tensor], start: int = 0) -> None:
        """Add the numbers of a piece (``max_and_sum_exp``), (T,) each. ``start``: the first of its rows. Different ones do not overlap."""
        count = self._piece_counts.get(start, 0)
        self._store_(numbers, count * self._rows + start)
        count += 1
        if count == _MOST_PIECES:
            self._store_(_merge(self._pieces(start, start + len(numbers[0]), count)), start)
            count = 1
        self._piece_counts[start] = count
        self._whole = None

    def above_maximum(self) -> Tensor:
        """Return (n,), the log-sum-exp less the maximum: exactly 0 if one entry outweighs all others."""
        return self._merged().above_maximum()

    def relative_to(self, entries: Tensor) -> Tensor:
        """Return (n,), the log-sum-exp less an entry of each row. Digits are kept if that is close to the largest."""
        return self._merged().relative_to(entries)

    def _merged(self) -> LogSumExp:
        """Return all pieces merged."""
        if self._whole is None:
            if self._piece_counts:
                # every part has as many pieces
                count = next(iter(self._piece_counts.values()))
                self._whole = _merge(self._pieces(0, self._rows, count))
            else:
                lowest = torch.finfo(self._like.dtype).min
                maximum = self._like.new_full((self._rows,), lowest)
                self._whole = LogSumExp(maximum, self._like.new_zeros(self._rows))
        return self._whole

    def _store_(self, numbers: tuple[Tensor, Tensor], place: int) -> None:
        for results, each in zip((self._maxima, self._sums), numbers, strict=True):
            results.store_(each, place)

    def _pieces(self, start: int, stop: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first pieces of some rows."""
        pieces = []
        for index in range(count):
            place = index * self._rows + start, index * self._rows + stop
            pieces.append((self._maxima.part(*place), self._sums.part(*place)))
        return pieces


def max_and_sum_exp(values: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Return the maximum of rows (T, C) and the sum of exponentials relative to it, (T,) each. ``values`` are overwritten unless kept."""
    maximum = values.amax(1)
    column = maximum.unsqueeze(1)
    differences = values - column if keep else values.sub_(column)
    return maximum, differences.exp_().sum(1)


def _merge(pieces: Sequence[tuple[Tensor, Tensor]]) -> LogSumExp:
    """Merge pieces of the same rows."""
    if len(pieces) == 1:
        return LogSumExp(*pieces[0])
    maxima, sums = (torch.stack(numbers) for numbers in zip(*pieces, strict=True))
    return LogSumExp.merged(maxima, sums)
