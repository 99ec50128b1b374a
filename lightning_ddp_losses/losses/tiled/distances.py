"""Distances of a tile's entries, and what these give back: PML's by its own code, and the common ones as one matrix product.

Legend: ``T`` rows of a tile, ``C`` columns, ``D`` embedding size. A matrix comes multiplied by ``scale``, which a loss would otherwise
have to do in one more pass over memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.losses import products
from lightning_ddp_losses.losses.pml_registry import DISTANCES

# torch.cdist subtracts row by row up to so many rows on either side, and multiplies matrices beyond (torch 2.13, measured 2026)
_DIRECT_ROWS = 25


class Side(NamedTuple):
    """Rows, or columns, of a tile on their way to a gradient.

    Attributes:
        kept: n rows, from ``kept_rows`` or ``kept_columns``.
        sums: (n, D), sums that ``vjp_`` adds to, zeros at first. None: not wanted.
    """

    kept: products.Operand
    sums: Tensor | None

    def addmm_(self, matrix_grad: Tensor, partners: Side, alpha: float) -> None:
        """Add the product of a matrix's gradient, (n, m), with the m partners."""
        if self.sums is not None:
            self.sums.addmm_(matrix_grad, partners.kept.rows, alpha=alpha)


class TileDistance:
    """Any distance of pytorch-metric-learning on tiles, by its own ``compute_mat`` and autograd.

    Args:
        distance: The loss's distance.

    Attributes:
        needs_matrix_in_vjp: ``vjp_`` reads the matrix itself beside its gradient.
    """

    needs_matrix_in_vjp: bool = False
    _form: products.ProductForm = "float32"

    def __init__(self, distance: Any) -> None:
        self._distance = distance

    @torch.no_grad()
    def prepare(self, embeddings: Tensor) -> products.Operand:
        """Return (n, D) embeddings as they are compared, without graph. Divided by their lengths if the distance does so."""
        distance = self._distance
        if distance.normalize_embeddings and distance.p != 2:
            return products.Operand(distance.normalize(embeddings))
        return products.Operand.prepare(embeddings, self._form, normalize=distance.normalize_embeddings)

    def prepare_vjp(self, embeddings: Tensor, prepared: products.Operand, grad: Tensor) -> Tensor:
        """Return the gradient of (n, D) embeddings, from the sums of their prepared rows."""
        if self._distance.normalize_embeddings and prepared.lengths is None:
            with own_graph():
                leaf = embeddings.detach().requires_grad_()
                (found,) = torch.autograd.grad(self._distance.normalize(leaf), leaf, grad)
            return found
        if prepared.lengths is not None:
            prepared.vjp(grad, grad)
        return grad

    def kept_rows(self, prepared: products.Operand) -> products.Operand:
        """Return the kept form of this rank's rows."""
        return prepared

    def kept_columns(self, prepared: products.Operand) -> products.Operand:
        """Return the kept form of the columns."""
        return prepared

    def row_bytes(self, columns: int, like: Tensor) -> int:
        """Return how many bytes one row of a tile takes, of rows ``like`` these."""
        entries = columns
        if DISTANCES[type(self._distance)].form == "differences":  # PML subtracts row by row: (T, C, D)
            entries *= like.shape[1]
        return entries * like.element_size()

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        """Compute (T, C), ``scale`` times the distances of kept rows and columns, into ``out``."""
        return torch.mul(self._compute(rows.rows, columns.rows), scale, out=out)

    def rows_grad_(self, rows: products.Operand, sums: Tensor) -> Tensor:
        """Return the sums (n, D) of the prepared rows, from those that ``vjp_`` has added up for the kept ones. Overwrite these."""
        return sums

    def columns_grad_(self, columns: products.Operand, sums: Tensor) -> Tensor:
        """Return the same for columns."""
        return sums

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        """Add a matrix's gradients to rows and columns. ``rows_grad_`` and ``columns_grad_`` make gradients of the sums.

        Args:
            rows: Rows of the tile. Their sums are always wanted.
            columns: Its columns.
            scale: Same as in ``matrix``.
            matrix: (T, C), as ``matrix`` gave it, or as an earlier call left it. May be overwritten.
            matrix_grad: (T, C), may be overwritten.
        """
        with own_graph():
            leaves = [side.kept.rows.detach().requires_grad_(side.sums is not None) for side in (rows, columns)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(self._compute(*leaves), wanted, matrix_grad * scale)
        for side, grad in zip((rows, columns), grads, strict=False):
            if side.sums is not None:
                side.sums.add_(grad)

    def _compute(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix: Tensor = self._distance.compute_mat(rows, columns)
        return matrix if self._distance.power == 1 else matrix**self._distance.power


class DotProduct(TileDistance):
    """Similarity as a product: two matrix products."""

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        return torch.addmm(out, rows.rows, columns.rows.T, beta=0, alpha=scale, out=out)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        rows.addmm_(matrix_grad, columns, scale)
        columns.addmm_(matrix_grad.T, rows, scale)


class TensorCoreProduct(TileDistance):
    """The same of bf16 rows, on tensor cores."""

    _form = "bf16"

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        factors = rows.factors
        factors = out.new_full((1,), scale) if factors is None else factors * scale
        return products.add_factors_(products.product(rows.rows, columns.rows, out=out), factors, columns.factors)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        factors = rows.kept.factors, columns.kept.factors
        terms = products.split(matrix_grad, *factors, products.splits("bf16", matrix_grad.device))
        if rows.sums is not None:
            products.add_to_left_(rows.sums, terms, columns.kept.rows, scale=scale)
        if columns.sums is not None:
            products.add_to_right_(columns.sums, terms, rows.kept.rows, scale=scale)


class EuclideanDistance(TileDistance):
    """Euclidean distance as torch computes it for many rows: the root of |x|^2 - 2xy + |y|^2, in one matrix product.

    Kept rows are (-2x, 1, |x|^2), kept columns (y, |y|^2, 1): products of the matrix's gradient with these sum up at once what multiplies
    a row's partners and what multiplies the row itself.
    """

    needs_matrix_in_vjp = True  # the root's derivative divides by the distance

    def kept_rows(self, prepared: products.Operand) -> products.Operand:
        rows = prepared.rows
        kept = rows.new_empty(len(rows), rows.shape[1] + 2)
        torch.mul(rows, -2, out=kept[:, :-2])
        kept[:, -2] = 1
        torch.sum(rows.square(), 1, out=kept[:, -1])
        return products.Operand(kept)

    def kept_columns(self, prepared: products.Operand) -> products.Operand:
        squares = prepared.rows.square().sum(1, keepdim=True)
        return products.Operand(torch.cat([prepared.rows, squares, torch.ones_like(squares)], 1))

    def matrix(self, rows: products.Operand, columns: products.Operand, scale: float, out: Tensor) -> Tensor:
        with products.without_tf32(out.device):  # squares of close points cancel
            torch.mm(rows.rows, columns.rows.T, out=out)
        out.clamp_min_(0).sqrt_()
        if scale != 1:
            out.mul_(scale)
        return out

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        # gradient over |scale x distance|, 0 if points coincide. The rest of scale x scale has its sign
        scaled_distance = matrix if scale > 0 else matrix.abs_()
        ratio = matrix_grad.div_(torch.threshold_(scaled_distance, 0, torch.inf))
        factor = scale * abs(scale)
        with products.without_tf32(ratio.device):
            rows.addmm_(ratio, columns, -factor)
            columns.addmm_(ratio.T, rows, -factor)

    def rows_grad_(self, rows: products.Operand, sums: Tensor) -> Tensor:
        # of r_ij (x_i - y_j): the sum of r_ij y_j is there, and that of r_ij next to it
        return sums[:, :-2].addcmul_(rows.rows[:, :-2], sums[:, -1:], value=0.5)

    def columns_grad_(self, columns: products.Operand, sums: Tensor) -> Tensor:
        return sums[:, :-2].mul_(-0.5).addcmul_(columns.rows[:, :-2], sums[:, -2:-1], value=-1)


def is_one_product(distance: Any) -> bool:
    """Return whether tiles of a distance are products of rows with rows, which may run on tensor cores."""
    facts = DISTANCES.get(type(distance))
    return facts is not None and facts.form == "product" and bool(distance.power == 1)


def tile_distance(distance: Any, columns: int, form: products.ProductForm = "float32") -> TileDistance:
    """Choose how tiles of a distance are computed.

    Args:
        distance: One of pytorch-metric-learning's own.
        columns: C. Torch computes Euclidean distances of few rows another way.
        form: Form of plain products of rows.
    """
    if is_one_product(distance):
        return DotProduct(distance) if form == "float32" else TensorCoreProduct(distance)
    is_norm = DISTANCES[type(distance)].form == "norm" and distance.power == 1
    if is_norm and distance.p == 2 and columns > _DIRECT_ROWS:
        return EuclideanDistance(distance)
    return TileDistance(distance)
