"""Distances of the rows and columns of a tile, and the gradients of both from the gradient of the distances.

Distances are computed by PML's code, or by one matrix product for the common ones. A matrix is already multiplied by ``scale``, which would
otherwise take the loss one more pass over memory.

Legend: ``T`` rows of a tile, ``C`` columns, ``D`` embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.losses.pml_registry import DISTANCES
from lightning_ddp_losses.losses.products import forms, operands

# torch.cdist subtracts row by row if neither side has more rows than this, and otherwise multiplies matrices (torch 2.13, measured 2026)
_DIRECT_ROWS = 25
_ROUNDED = 8  # upper bound of the relative error of a squared number and its root, in units of the dtype's precision


class Side(NamedTuple):
    """Rows or columns of a tile, with the sums from which their gradient is computed.

    Attributes:
        kept: n rows, from ``kept_rows`` or ``kept_columns``.
        sums: (n, D), sums that ``vjp_`` adds to, initially zeros. None if they are not required.
        as_columns: Rows of the tile in the form of ``kept_columns``, if its columns are added to the sums of rows. Otherwise None.
        first: Index of the first column that has sums. These are then (n - first, D).
    """

    kept: operands.Operand
    sums: Tensor | None
    as_columns: operands.Operand | None = None
    first: int = 0

    def addmm_(self, matrix_grad: Tensor, partners: Side, alpha: float) -> None:
        """Add the product of a matrix's gradient, (n, m), with the m partners."""
        if self.sums is not None:
            kept = partners.as_columns or partners.kept
            wanted = matrix_grad[self.first :] if self.first else matrix_grad
            self.sums.addmm_(wanted, kept.rows, alpha=alpha)

    def add_few_(self, weights: Tensor, columns: Tensor, partners: Side, alpha: float) -> None:
        """Add to each row the sum of a few partners, given their weights and columns, (n, p) each."""
        assert self.sums is not None
        added = torch.nn.functional.embedding_bag(columns, partners.kept.rows, per_sample_weights=weights, mode="sum")
        self.sums.add_(added, alpha=alpha)


class TileDistance:
    """Any distance of pytorch-metric-learning on tiles, computed by its ``compute_mat`` and autograd.

    Args:
        distance: The loss's distance.
        form: Form of products of rows.

    Attributes:
        needs_matrix_in_vjp: True if ``vjp_`` reads the matrix in addition to its gradient.
    """

    needs_matrix_in_vjp: bool = False

    def __init__(self, distance: Any, form: forms.ProductForm = "float32") -> None:
        self._distance, self._form = distance, form

    @torch.no_grad()
    def prepare(self, embeddings: Tensor) -> operands.Operand:
        """Return (n, D) embeddings as they are compared, without a graph, normalized if the distance normalizes them."""
        distance = self._distance
        if distance.normalize_embeddings and distance.p != 2:
            return operands.Operand(distance.normalize(embeddings))
        return operands.Operand.prepare(embeddings, self._form, normalize=distance.normalize_embeddings)

    def prepare_vjp(self, embeddings: Tensor, prepared: operands.Operand, grad: Tensor) -> Tensor:
        """Return the gradient of (n, D) embeddings, given the gradient of their prepared rows."""
        if self._distance.normalize_embeddings and prepared.lengths is None:
            with own_graph():
                leaf = embeddings.detach().requires_grad_()
                (found,) = torch.autograd.grad(self._distance.normalize(leaf), leaf, grad)
            return found
        if prepared.lengths is not None:
            prepared.vjp(grad, grad)
        return grad

    def kept_rows(self, prepared: operands.Operand) -> operands.Operand:
        """Return this rank's rows in the form in which they are stored."""
        return prepared

    def kept_columns(self, prepared: operands.Operand) -> operands.Operand:
        """Return the columns in the form in which they are stored."""
        return prepared

    def row_bytes(self, columns: int, like: Tensor) -> int:
        """Return the size in bytes of one row of a tile, for embeddings with the width and dtype of ``like``."""
        entries = columns
        if DISTANCES[type(self._distance)].form == "differences":  # PML subtracts row by row: (T, C, D)
            entries *= like.shape[1]
        return entries * like.element_size()

    def matrix(self, rows: operands.Operand, columns: operands.Operand, scale: float, out: Tensor) -> Tensor:
        """Compute (T, C), ``scale`` times the distances between stored rows and columns, into ``out``."""
        return self.finish_(self.start(rows, columns, scale, out), scale)

    def start(self, rows: operands.Operand, columns: operands.Operand, scale: float, out: Tensor) -> Tensor:
        """Compute (T, C) numbers, from which ``finish_`` computes ``matrix``, into ``out``. Larger distances have larger numbers."""
        return torch.mul(self._compute(rows.rows, columns.rows), scale, out=out)

    def finish_(self, started: Tensor, scale: float) -> Tensor:
        """Return scaled distances, given the result of ``start`` or some entries of it, in their memory."""
        return started

    def started(self, distance: float, dtype: torch.dtype) -> float:
        """Return a number whose ``finish_`` with scale 1 is at least a distance, as is that of all larger numbers."""
        return distance

    def few_vjp_(self, rows: Side, columns: Side, scale: float, entries: Tensor, grad: Tensor, places: Tensor) -> None:
        """Add the contribution of the gradient of a few entries of each row to the sums of rows.

        Args:
            rows: Rows of the tile.
            columns: Its columns. Their sums are not changed.
            scale: Same as in ``matrix``.
            entries: (T, p), entries of ``matrix``. May be overwritten.
            grad: (T, p), may be overwritten.
            places: (T, p), the column of each entry. A column may be repeated in a row.
        """
        first, last = map(int, places.aminmax())
        columns = Side(columns.kept.part(slice(first, last + 1)), None)
        matrix_grad = grad.new_zeros(len(grad), last + 1 - first).scatter_add_(1, places - first, grad)
        self.vjp_(rows, columns, scale, matrix_grad, matrix_grad)

    def rows_grad_(self, rows: operands.Operand, sums: Tensor) -> Tensor:
        """Convert the sums that ``vjp_`` added up for the stored rows into gradients (n, D) of the prepared rows. Overwrites ``sums``."""
        return sums

    def columns_grad_(self, columns: operands.Operand, sums: Tensor) -> Tensor:
        """Convert the sums of the stored columns in the same way."""
        return sums

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        """Add the contribution of a matrix's gradient to the sums of rows and columns, which ``rows_grad_`` and ``columns_grad_`` convert.

        Args:
            rows: Rows of the tile. Their sums are always required.
            columns: Its columns.
            scale: Same as in ``matrix``.
            matrix: (T, C), the result of ``matrix``, possibly modified by an earlier call. May be overwritten.
            matrix_grad: (T, C), may be overwritten.
        """
        with own_graph():
            leaves = [side.kept.rows.detach().requires_grad_(side.sums is not None) for side in (rows, columns)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(self._compute(*leaves), wanted, matrix_grad * scale)
        for side, grad in zip((rows, columns), grads, strict=False):
            if side.sums is not None:
                side.sums.add_(grad[side.first :])

    def _compute(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix: Tensor = self._distance.compute_mat(rows, columns)
        return matrix if self._distance.power == 1 else matrix**self._distance.power


class DotProduct(TileDistance):
    """Similarity as a product of rows. Its gradient is two matrix products."""

    def start(self, rows: operands.Operand, columns: operands.Operand, scale: float, out: Tensor) -> Tensor:
        return torch.addmm(out, rows.rows, columns.rows.T, beta=0, alpha=scale, out=out)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        rows.addmm_(matrix_grad, columns, scale)
        columns.addmm_(matrix_grad.T, rows, scale)

    def few_vjp_(self, rows: Side, columns: Side, scale: float, entries: Tensor, grad: Tensor, places: Tensor) -> None:
        rows.add_few_(grad, places, columns, scale)


class TensorCoreProduct(TileDistance):
    """Similarity as a product of bf16 rows, or of parts of rows, on tensor cores."""

    def start(self, rows: operands.Operand, columns: operands.Operand, scale: float, out: Tensor) -> Tensor:
        factors = rows.factors
        factors = out.new_full((1,), scale) if factors is None else factors * scale
        return operands.add_factors_(operands.product(rows.left, columns.right, out=out), factors, columns.factors)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        factors = rows.kept.factors, columns.kept.factors
        terms = operands.split(matrix_grad, *factors, forms.grad_terms_of(self._form, matrix_grad.device))
        if rows.sums is not None:
            operands.add_to_left_(rows.sums, terms, columns.kept, scale=scale)
        if columns.sums is not None:
            wanted = tuple(term[:, columns.first :] for term in terms)
            operands.add_to_right_(columns.sums, wanted, rows.kept, scale=scale)


class EuclideanDistance(TileDistance):
    """Euclidean distance as torch computes it for many rows: the square root of |x|^2 - 2xy + |y|^2, in one matrix product.

    Stored rows are (-2x, 1, |x|^2), and stored columns are (y, |y|^2, 1). A product of the matrix's gradient with these yields both the
    weighted sum of a row's partners and the factor of the row itself.
    """

    needs_matrix_in_vjp = True  # the root's derivative divides by the distance

    def kept_rows(self, prepared: operands.Operand) -> operands.Operand:
        rows = prepared.rows
        kept = rows.new_empty(len(rows), rows.shape[1] + 2)
        torch.mul(rows, -2, out=kept[:, :-2])
        kept[:, -2] = 1
        torch.sum(rows.square(), 1, out=kept[:, -1])
        return operands.Operand(kept)

    def kept_columns(self, prepared: operands.Operand) -> operands.Operand:
        squares = prepared.rows.square().sum(1, keepdim=True)
        return operands.Operand(torch.cat([prepared.rows, squares, torch.ones_like(squares)], 1))

    def start(self, rows: operands.Operand, columns: operands.Operand, scale: float, out: Tensor) -> Tensor:
        with forms.without_tf32(out.device):  # squares of close points cancel
            return torch.mm(rows.rows, columns.rows.T, out=out)

    def finish_(self, started: Tensor, scale: float) -> Tensor:
        started.clamp_min_(0).sqrt_()
        if scale != 1:
            started.mul_(scale)
        return started

    def started(self, distance: float, dtype: torch.dtype) -> float:
        # more than its square by what the square and the root are rounded
        shortest = max(distance, 0.0)
        return shortest * shortest * (1 + _ROUNDED * torch.finfo(dtype).eps)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        ratio, factor = self._over_distance_(scale, matrix, matrix_grad)
        with forms.without_tf32(ratio.device):
            rows.addmm_(ratio, columns, factor)
            columns.addmm_(ratio.T, rows, factor)

    def few_vjp_(self, rows: Side, columns: Side, scale: float, entries: Tensor, grad: Tensor, places: Tensor) -> None:
        ratio, factor = self._over_distance_(scale, entries, grad)
        rows.add_few_(ratio, places, columns, factor)

    def _over_distance_(self, scale: float, entries: Tensor, grad: Tensor) -> tuple[Tensor, float]:
        """Return the gradient divided by |scale x distance|, 0 if points coincide, and its factor, which has the scale and its sign."""
        scaled_distance = entries if scale > 0 else entries.abs_()
        ratio = grad.div_(torch.threshold_(scaled_distance, 0, torch.inf))
        return ratio, -scale * abs(scale)

    def rows_grad_(self, rows: operands.Operand, sums: Tensor) -> Tensor:
        # the gradient is the sum of r_ij (x_i - y_j). ``sums`` contains the sums of r_ij y_j and, in the last column, of r_ij
        return sums[:, :-2].addcmul_(rows.rows[:, :-2], sums[:, -1:], value=0.5)

    def columns_grad_(self, columns: operands.Operand, sums: Tensor) -> Tensor:
        return sums[:, :-2].mul_(-0.5).addcmul_(columns.rows[:, :-2], sums[:, -2:-1], value=-1)


def is_one_product(distance: Any) -> bool:
    """Return whether tiles of a distance are products of rows with rows, which can run on tensor cores."""
    facts = DISTANCES.get(type(distance))
    return facts is not None and facts.form == "product" and bool(distance.power == 1)


def tile_distance(distance: Any, columns: int, form: forms.ProductForm = "float32") -> TileDistance:
    """Choose how tiles of a distance are computed.

    Args:
        distance: A distance of pytorch-metric-learning.
        columns: C. For few rows, torch computes Euclidean distances in a different way.
        form: Form of plain products of rows.
    """
    if is_one_product(distance):
        return DotProduct(distance) if form == "float32" else TensorCoreProduct(distance, form)
    is_norm = DISTANCES[type(distance)].form == "norm" and distance.power == 1
    if is_norm and distance.p == 2 and columns > _DIRECT_ROWS:
        return EuclideanDistance(distance)
    return TileDistance(distance)
