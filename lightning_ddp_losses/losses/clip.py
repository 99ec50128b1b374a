"""`ClipLoss`: the symmetric cross entropy between two towers over the rows of all ranks, never holding the product matrix.

Each direction's loss is ``log(1 + sum_{j != i} exp(z_ij - z_ii))``: differences with the row's own pair, whose 1 is never added up,
so that float32 keeps its digits where pairs agree well. Rows of this rank are complete here; columns are joined from all ranks'
(maximum, sum).

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``M`` columns (G texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses import groups
from lightning_ddp_losses.bundles import Bundle
from lightning_ddp_losses.errors import ConfigurationError, format_error
from lightning_ddp_losses.first_order import first_order_only
from lightning_ddp_losses.groups import Group
from lightning_ddp_losses.losses.reduction import for_mean_over_ranks
from lightning_ddp_losses.losses.two_towers import TILE_BYTES, TwoTowerLoss, pairs_in, tiles
from lightning_ddp_losses.transport import carrier, gather

__all__ = ["ClipLoss"]


class ClipLoss(TwoTowerLoss):
    """Contrastive loss between images and texts (or any two towers) with a learnable temperature.

    Equivalent to, with ``x`` and ``y`` the normalised rows of all ranks and ``z = logit_scale.exp() * x @ y.T``:
    ``(cross_entropy(z, arange(G)) + cross_entropy(z.T, arange(G))) / 2`` in one process. Further negatives are columns of ``z`` in the
    first term alone.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``.
        max_scale: The scale is clamped to this; None: not at all.
        label_smoothing: As in ``torch.nn.CrossEntropyLoss``.
        normalize: Divide embeddings by their length; False where the model has done so.
        tile_bytes: Of products alive at a time.
        group: Process group; None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank; logging it needs no ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, encoders and ``logit_scale`` hold the one-process gradient.

    Communication:
        Frame, gather of the texts, gather of 2 G + 2 numbers; one exchange of G x D in backward.

    Raises:
        ConfigurationError: options that cannot work.
        InputError: on every rank, for towers that do not fit together on any rank.
        RankMismatchError: on every rank, when widths, dtypes or options differ.

    Source: Radford et al. 2021, arXiv:2103.00020, figure 3.

    Example:
        >>> import torch
        >>> loss = ClipLoss()
        >>> value = loss(torch.randn(4, 8), torch.randn(4, 8))
    """

    def __init__(
        self,
        init_temperature: float = 0.07,
        *,
        max_scale: float | None = 100.0,
        label_smoothing: float = 0.0,
        normalize: bool = True,
        tile_bytes: int = TILE_BYTES,
        group: Group = None,
    ) -> None:
        super().__init__(normalize=normalize, tile_bytes=tile_bytes, group=group)
        if init_temperature <= 0 or (max_scale is not None and max_scale <= 0) or not 0 <= label_smoothing < 1:
            raise ConfigurationError(
                format_error(
                    "ClipLoss",
                    expected="init_temperature > 0, max_scale > 0 or None, 0 <= label_smoothing < 1",
                    got=f"{init_temperature}, {max_scale}, {label_smoothing}",
                )
            )
        self.label_smoothing = label_smoothing
        self._start_scale(init_temperature, max_scale)

    def extra_repr(self) -> str:
        """The options."""
        return f"max_scale={self.max_scale}, label_smoothing={self.label_smoothing}, normalize={self.normalize}"

    def _evaluate(self, images: Tensor, columns: Tensor, bundle: Bundle) -> Tensor:
        plan = _Plan(self._first(bundle), len(bundle.tensors[0]), self.label_smoothing, self.tile_bytes, self._group)
        value: Tensor = _Clip.apply(plan, images, columns, self._scale(), bundle.tensors[1])  # type: ignore[no-untyped-call]
        return value


@dataclass(frozen=True)
class _Plan:
    first: int
    total: int
    smoothing: float
    tile_bytes: int
    group: Group


class _Clip(torch.autograd.Function):
    """Value and gradient; ``diagonal`` (G,) holds each row's product with its own text, unscaled."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, images: Tensor, columns: Tensor, scale: Tensor, diagonal: Tensor) -> Tensor:
        own = diagonal[plan.first : plan.first + len(images)] * scale
        rows, cols = _Running(len(images), images), _Running(plan.total, images)
        for down, across in tiles(len(images), len(columns), images.element_size(), plan.tile_bytes):
            logits = (images[down] * scale) @ columns[across].t()
            logits[pairs_in(plan.first, down, across, images.device)] = -torch.inf
            paired = min(across.stop, plan.total) - across.start
            if paired > 0:
                there = slice(across.start, across.start + paired)
                cols.add(there, logits[:, :paired].t() - (diagonal[there] * scale).unsqueeze(1))
            rows.add(down, logits.sub_(own[down].unsqueeze(1)))
        row_losses = rows.result()
        cols_joined, sums = _join(cols, row_losses.sum(), images.sum(0), plan.group)
        col_losses = cols_joined.result()
        value = (sums[0] + col_losses.sum()) / (2 * plan.total)
        if plan.smoothing:  # both are means over all targets of (z_ii - z_ij), in closed form
            total = diagonal.sum() * scale
            texts = columns[: plan.total].sum(0)
            all_images = sums[1:]
            row_gap = total - scale * (all_images @ columns.sum(0)) / len(columns)
            col_gap = total - scale * (all_images @ texts) / plan.total
            value = value + plan.smoothing * (row_gap + col_gap) / (2 * plan.total)
        ctx.plan = plan
        ctx.save_for_backward(images, columns, scale, diagonal, row_losses, col_losses)
        return value

    @staticmethod
    @first_order_only("ClipLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        images, columns, scale, diagonal, row_losses, col_losses = ctx.saved_tensors
        d_images, d_columns = torch.zeros_like(images), torch.zeros_like(columns)
        own = diagonal[plan.first : plan.first + len(images)] * scale
        row_level, col_level = own + row_losses, diagonal * scale + col_losses
        # both softmaxes at the own pair, less the 1 of the target: a difference of equals where pairs agree well
        here = slice(plan.first, plan.first + len(images))
        to_own = torch.expm1(-row_losses) + torch.expm1(-col_losses[here]) + 2 * plan.smoothing
        for down, across in tiles(len(images), len(columns), images.element_size(), plan.tile_bytes):
            logits = (images[down] * scale) @ columns[across].t()
            paired = min(across.stop, plan.total) - across.start
            share = (logits - row_level[down].unsqueeze(1)).exp_()
            if paired > 0:
                there = slice(across.start, across.start + paired)
                share[:, :paired] += logits[:, :paired].sub_(col_level[there]).exp_()
                own_pair = pairs_in(plan.first, down, across, images.device)
                share[own_pair] = to_own[down][own_pair[0]]
            d_images[down].addmm_(share, columns[across])
            d_columns[across].addmm_(share.t(), images[down])
        if plan.smoothing:
            everywhere, paired_sum = columns.sum(0) / len(columns), columns[: plan.total].sum(0) / plan.total
            d_images -= plan.smoothing * (everywhere + paired_sum)
            d_columns -= plan.smoothing * images.sum(0) / len(columns)
            d_columns[: plan.total] -= plan.smoothing * images.sum(0) / plan.total
        d_scale = (d_images * images).sum()  # z is linear in the scale and in this rank's images
        factor = for_mean_over_ranks(grad / (2 * plan.total), plan.group)
        return None, d_images.mul_(factor * scale), d_columns.mul_(factor * scale), d_scale * factor, None


class _Running:
    """Log-sum-exp of rows that arrive in pieces, in which the own pair counts as nothing."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self.top = like.new_full((rows,), torch.finfo(like.dtype).min)
        self.total = like.new_zeros(rows)

    def add(self, where: slice, values: Tensor) -> None:
        """Take in (rows of ``where``, n); the values are overwritten."""
        top = self.top[where]
        higher = torch.maximum(top, values.amax(1))
        self.total[where] = self.total[where] * torch.exp(top - higher) + values.sub_(higher.unsqueeze(1)).exp_().sum(1)
        self.top[where] = higher

    def result(self) -> Tensor:
        """The loss of each row, its own pair put back."""
        return nn.functional.softplus(self.top + self.total.log(), threshold=50)


def _join(cols: _Running, row_sum: Tensor, image_sum: Tensor, group: Group) -> tuple[_Running, Tensor]:
    """The columns' statistics over the rows of all ranks, and [sum of the row losses, sum of the images]."""
    world, size = groups.world_size(group), len(cols.top)
    sums = torch.cat([row_sum.reshape(1), image_sum])
    if world == 1:
        return cols, sums
    own = torch.cat([cols.top, cols.total, sums])
    everyone = own.new_empty((world, len(own)))
    gather(everyone.view(-1), own, group=carrier(own, group))
    tops, totals = everyone[:, :size], everyone[:, size : 2 * size]
    joined = _Running(0, own)
    joined.top = tops.amax(0)
    joined.total = (totals * torch.exp(tops - joined.top)).sum(0)
    return joined, everyone[:, 2 * size :].sum(0)
