"""Distances of a tile's entries, and what these give back: PML's by its own code, and the common ones as one matrix product.

Legend: ``T`` rows of a tile, ``C`` columns, ``D`` embedding size. A matrix comes multiplied by ``scale``, which a loss would otherwise
have to do in one more pass over memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.losses.pml_registry import DISTANCES
from lightning_ddp_losses.losses.products import (
    Operand,
    ProductForm,
    UnitRows,
    as_operand,
    divide_by_length,
    product,
    product_grad_,
)

# torch.cdist subtracts row by row up to so many rows on either side, and multiplies matrices beyond (torch 2.13, measured 2026)
_DIRECT_ROWS = 25


class Prepared(NamedTuple):
    """Embeddings as a distance compares them, without their graph: ``TileDistance.prepare_vjp`` is their backward.

    Attributes:
        rows: (n, D), or as the distance keeps them.
        lengths: (n, 1), what the embeddings were divided by; None: they were not, or another way.
    """

    rows: Tensor
    lengths: Tensor | None

    def part(self, start: int, stop: int, *, copy: bool) -> Prepared:
        """Takes some of the rows, as views or copies."""
        parts = (self.rows[start:stop], None if self.lengths is None else self.lengths[start:stop])
        if not copy:
            return Prepared(*parts)
        return Prepared(parts[0].clone(), None if parts[1] is None else parts[1].clone())


class Side(NamedTuple):
    """Rows, or columns, of a tile on their way to a gradient.

    Attributes:
        kept: (n, ...), from ``kept_rows`` or ``kept_columns``.
        sums: Sums that ``vjp_`` adds to, like these, zeros at first; None: not wanted.
    """

    kept: Tensor
    sums: Tensor | None

    def addmm_(self, matrix_grad: Tensor, partners: Side, alpha: float) -> None:
        """Add the product of a matrix's gradient, (n, m), with the m partners."""
        if self.sums is not None:
            self.sums.addmm_(matrix_grad, partners.kept, alpha=alpha)


class TileDistance:
    """Any distance of pytorch-metric-learning on tiles, by its own ``compute_mat`` and autograd.

    Args:
        distance: The loss's distance.

    Attributes:
        needs_matrix_in_vjp: ``vjp_`` reads the matrix itself beside its gradient.
    """

    needs_matrix_in_vjp: bool = False

    def __init__(self, distance: Any) -> None:
        self._distance = distance

    @torch.no_grad()
    def prepare(self, embeddings: Tensor) -> Prepared:
        """Normalises (n, D) rows where the distance asks for it."""
        distance = self._distance
        if not distance.normalize_embeddings:
            return Prepared(embeddings.detach(), None)
        if distance.p != 2:
            return Prepared(distance.normalize(embeddings), None)
        return Prepared(*divide_by_length(embeddings))

    def prepare_vjp(self, embeddings: Tensor, prepared: Prepared, grad: Tensor) -> Tensor:
        """Computes the gradient of (n, D) embeddings from that of their ``Prepared`` rows."""
        distance, unit, lengths = self._distance, prepared.rows, prepared.lengths
        if not distance.normalize_embeddings:
            return grad
        if lengths is None:
            with own_graph():
                leaf = embeddings.detach().requires_grad_()
                (found,) = torch.autograd.grad(distance.normalize(leaf), leaf, grad)
            return found
        return UnitRows(unit, lengths).vjp(grad)

    def kept_rows(self, prepared: Tensor) -> Tensor:
        """Makes what is kept of this rank's rows, from what ``prepare`` returned."""
        return prepared

    def kept_columns(self, prepared: Tensor) -> Tensor:
        """Makes what is kept of the columns, likewise."""
        return prepared

    def row_bytes(self, columns: int, like: Tensor) -> int:
        """Computes how many bytes one row of a tile takes, of rows ``like`` these."""
        entries = columns
        if DISTANCES[type(self._distance)].form == "differences":  # PML subtracts row by row: (T, C, D)
            entries *= like.shape[1]
        return entries * like.element_size()

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        """Computes (T, C), ``scale`` times the distances of kept rows and columns, into ``out``."""
        return torch.mul(self._compute(rows, columns), scale, out=out)

    def rows_grad_(self, rows: Tensor, sums: Tensor) -> Tensor:
        """Computes the gradient of the prepared rows, (n, D), from what ``vjp_`` has summed of the kept ones; overwrites it."""
        return sums

    def columns_grad_(self, columns: Tensor, sums: Tensor) -> Tensor:
        """Does the same for columns."""
        return sums

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        """Adds what a matrix gives back to rows and columns; ``rows_grad_`` and ``columns_grad_`` make gradients of the sums.

        Args:
            rows: Rows of the tile; their sums are always wanted.
            columns: Its columns.
            scale: As in ``matrix``.
            matrix: (T, C), as ``matrix`` gave it, or as an earlier call left it; may be overwritten.
            matrix_grad: (T, C), may be overwritten.
        """
        with own_graph():
            leaves = [side.kept.detach().requires_grad_(side.sums is not None) for side in (rows, columns)]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(self._compute(*leaves), wanted, matrix_grad * scale)
        for side, grad in zip((rows, columns), grads, strict=False):
            if side.sums is not None:
                side.sums.add_(grad)

    def _compute(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix: Tensor = self._distance.compute_mat(rows, columns)
        return matrix if self._distance.power == 1 else matrix**self._distance.power


class DotProduct(TileDistance):
    """Similarity as a product: two matrix products, nothing else."""

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.addmm(out, rows, columns.T, beta=0, alpha=scale, out=out)

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        rows.addmm_(matrix_grad, columns, scale)
        columns.addmm_(matrix_grad.T, rows, scale)


class TensorCoreProduct(TileDistance):
    """The same on tensor cores (``products``); rows of bf16 carry their length as one number more, which gets no gradient.

    Args:
        distance: The loss's distance.
    """

    def __init__(self, distance: Any) -> None:
        super().__init__(distance)
        self._has_lengths = bool(distance.normalize_embeddings)

    def prepare(self, embeddings: Tensor) -> Prepared:
        prepared = super().prepare(embeddings)
        if not self._has_lengths:
            return prepared
        assert prepared.lengths is not None
        return Prepared(torch.cat([prepared.rows, prepared.lengths], 1), prepared.lengths)

    def prepare_vjp(self, embeddings: Tensor, prepared: Prepared, grad: Tensor) -> Tensor:
        unit = Prepared(self._without_lengths(prepared.rows), prepared.lengths)
        return super().prepare_vjp(embeddings, unit, self._without_lengths(grad))

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        return out.copy_(product(self._operand(rows), self._operand(columns), scale))

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        grad = product_grad_(matrix_grad, self._operand(rows.kept), self._operand(columns.kept), scale)
        for side, add_to_ in ((rows, grad.add_to_left_), (columns, grad.add_to_right_)):
            if side.sums is not None:
                add_to_(self._without_lengths(side.sums))

    def _operand(self, rows: Tensor) -> Operand:
        return as_operand(self._without_lengths(rows), "bf16", rows[:, -1] if self._has_lengths else None)

    def _without_lengths(self, rows: Tensor) -> Tensor:
        return rows[:, :-1] if self._has_lengths else rows


class EuclideanDistance(TileDistance):
    """Euclidean distance as torch computes it for many rows: the root of |x|^2 - 2xy + |y|^2, in one matrix product.

    Kept rows are (-2x, 1, |x|^2), kept columns (y, |y|^2, 1): products of the matrix's gradient with these sum up at once what multiplies
    a row's partners and what multiplies the row itself.
    """

    needs_matrix_in_vjp = True  # the root's derivative divides by the distance

    def kept_rows(self, prepared: Tensor) -> Tensor:
        kept = prepared.new_empty(len(prepared), prepared.shape[1] + 2)
        torch.mul(prepared, -2, out=kept[:, :-2])
        kept[:, -2] = 1
        torch.sum(prepared.square(), 1, out=kept[:, -1])
        return kept

    def kept_columns(self, prepared: Tensor) -> Tensor:
        squares = prepared.square().sum(1, keepdim=True)
        return torch.cat([prepared, squares, torch.ones_like(squares)], 1)

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        torch.mm(rows, columns.T, out=out).clamp_min_(0).sqrt_()
        if scale != 1:
            out.mul_(scale)
        return out

    def vjp_(self, rows: Side, columns: Side, scale: float, matrix: Tensor, matrix_grad: Tensor) -> None:
        # gradient over |scale x distance|, 0 where points coincide; what is left of scale x scale has its sign
        scaled_distance = matrix if scale > 0 else matrix.abs_()
        ratio = matrix_grad.div_(torch.threshold_(scaled_distance, 0, torch.inf))
        factor = scale * abs(scale)
        rows.addmm_(ratio, columns, -factor)
        columns.addmm_(ratio.T, rows, -factor)

    def rows_grad_(self, rows: Tensor, sums: Tensor) -> Tensor:
        # of r_ij (x_i - y_j): the sum of r_ij y_j is there, and that of r_ij beside it
        return sums[:, :-2].addcmul_(rows[:, :-2], sums[:, -1:], value=0.5)

    def columns_grad_(self, columns: Tensor, sums: Tensor) -> Tensor:
        return sums[:, :-2].mul_(-0.5).addcmul_(columns[:, :-2], sums[:, -2:-1], value=-1)


def is_one_product(distance: Any) -> bool:
    """Tells whether tiles of a distance are products of rows with rows, which may run on tensor cores."""
    facts = DISTANCES.get(type(distance))
    return facts is not None and facts.form == "product" and bool(distance.power == 1)


def tile_distance(distance: Any, columns: int, products: ProductForm = "float32") -> TileDistance:
    """Chooses how tiles of a distance are computed.

    Args:
        distance: One of pytorch-metric-learning's own.
        columns: C; torch computes Euclidean distances of few rows another way.
        products: How rows are multiplied where that is all there is to it.
    """
    if is_one_product(distance):
        return DotProduct(distance) if products == "float32" else TensorCoreProduct(distance)
    is_norm = DISTANCES[type(distance)].form == "norm" and distance.power == 1
    if is_norm and distance.p == 2 and columns > _DIRECT_ROWS:
        return EuclideanDistance(distance)
    return TileDistance(distance)
