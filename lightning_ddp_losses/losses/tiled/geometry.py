"""Distances on tiles: the matrix of a few rows against many columns, and what its slope gives back to the embeddings.

Legend: ``T`` rows of a tile, ``C`` columns, ``D`` embedding size. Rows and columns are normalised already where the distance asks for
it (``prepare``). A matrix comes multiplied by ``scale``, which a formula would otherwise have to do in one more pass.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import distances
from torch import Tensor

_DIRECT = 25  # torch.cdist subtracts row by row up to so many rows on either side, and multiplies matrices beyond


class Geometry:
    """Any distance of pytorch-metric-learning, by its own ``compute_mat`` and autograd.

    Args:
        distance: The loss's distance.
        symmetric: Whether d(x, y) = d(y, x).
    """

    def __init__(self, distance: Any, *, symmetric: bool) -> None:
        self._distance = distance
        self.symmetric = symmetric

    def prepare(self, embeddings: Tensor) -> Tensor:
        """(n, D) as the distance compares them, with their graph."""
        return self._distance.maybe_normalize(embeddings)  # type: ignore[no-any-return]

    def columns(self, prepared: Tensor) -> Tensor:
        """What is kept of the columns."""
        return prepared

    def row_bytes(self, columns: Tensor) -> int:
        """Bytes that one row of a tile takes."""
        deep = columns.shape[1] if type(self._distance) is distances.SNRDistance else 1
        return columns.shape[0] * columns.element_size() * deep

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        """(T, C): ``scale`` times the distances, written to ``out``."""
        return torch.mul(self._compute(rows, columns), scale, out=out)

    def pull(
        self, rows: Tensor, columns: Tensor, scale: float, matrix: Tensor, slope: Tensor, to_columns: Tensor | None
    ) -> Tensor:
        """Gradient of the rows from the slope of a matrix.

        Args:
            rows: (T, D).
            columns: From ``columns``.
            scale: As in ``matrix``.
            matrix: (T, C), as ``matrix`` gave it, or as an earlier call left it; may be overwritten.
            slope: (T, C), the derivative by the matrix; may be overwritten.
            to_columns: (C, D), to which the columns' gradient is added; None: not wanted.

        Returns:
            (T, D).
        """
        with torch.enable_grad():
            near = rows.detach().requires_grad_()
            far = columns.detach().requires_grad_(to_columns is not None)
            wanted = (near,) if to_columns is None else (near, far)
            grads = torch.autograd.grad(self._compute(near, far), wanted, slope * scale)
        if to_columns is not None:
            to_columns += grads[1]
        return grads[0]

    def _compute(self, rows: Tensor, columns: Tensor) -> Tensor:
        matrix: Tensor = self._distance.compute_mat(rows, columns)
        return matrix if self._distance.power == 1 else matrix**self._distance.power


class Dot(Geometry):
    """Similarity as a product: two matrix products, nothing else."""

    def __init__(self, distance: Any) -> None:
        super().__init__(distance, symmetric=True)

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        return torch.mm(rows * scale, columns.T, out=out)

    def pull(
        self, rows: Tensor, columns: Tensor, scale: float, matrix: Tensor, slope: Tensor, to_columns: Tensor | None
    ) -> Tensor:
        if to_columns is not None:
            to_columns.addmm_(slope.T, rows * scale)
        return torch.mm(slope, columns).mul_(scale)


class Euclid(Geometry):
    """Euclidean distance as torch computes it for many rows: the root of |x|^2 - 2xy + |y|^2, in one matrix product.

    The columns carry (y, 1, |y|^2).
    """

    def __init__(self, distance: Any) -> None:
        super().__init__(distance, symmetric=True)

    def columns(self, prepared: Tensor) -> Tensor:
        squares = prepared.square().sum(1, keepdim=True)
        return torch.cat([prepared, torch.ones_like(squares), squares], 1)

    def matrix(self, rows: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
        squares = rows.square().sum(1, keepdim=True)
        extended = torch.cat([rows * -2, squares, torch.ones_like(squares)], 1)
        torch.mm(extended, columns.T, out=out).clamp_min_(0).sqrt_()
        return out if scale == 1 else out.mul_(scale)

    def pull(
        self, rows: Tensor, columns: Tensor, scale: float, matrix: Tensor, slope: Tensor, to_columns: Tensor | None
    ) -> Tensor:
        # slope / |scale x distance|, 0 where points coincide; what is left of scale x scale has its sign
        ratio = slope.div_(torch.threshold_(matrix if scale > 0 else matrix.abs_(), 0, torch.inf))
        points, factor = columns[:, :-2], scale * abs(scale)
        if to_columns is not None:
            to_columns.addcmul_(points, ratio.sum(0).unsqueeze(1), value=factor).addmm_(ratio.T, rows, alpha=-factor)
        return (rows * ratio.sum(1, keepdim=True)).sub_(torch.mm(ratio, points)).mul_(factor)


def geometry_of(distance: Any, columns: int) -> Geometry:
    """How tiles of a distance are computed.

    Args:
        distance: One of pytorch-metric-learning's own.
        columns: C; torch computes Euclidean distances of few rows another way.
    """
    cls = type(distance)
    if distance.power == 1:
        if cls in (distances.CosineSimilarity, distances.DotProductSimilarity):
            return Dot(distance)
        if cls is distances.LpDistance and distance.p == 2 and columns > _DIRECT:
            return Euclid(distance)
    return Geometry(distance, symmetric=cls is not distances.SNRDistance)
