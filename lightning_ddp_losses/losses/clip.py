"""`ClipLoss`: the symmetric cross entropy between two towers over the rows of all ranks, never holding the product matrix.

Each direction's loss is ``log(1 + sum_{j != i} exp(z_ij - z_ii))``: differences with the row's own pair, whose 1 is never added up,
so that float32 keeps its digits where pairs agree well. Rows of this rank are complete here; columns are joined from all ranks'
(maximum, sum), which in a ring travel behind the texts.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``M`` columns (G texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather, group_for
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.column_blocks import Block, Columns, Products, Ring
from lightning_ddp_losses.losses.partial_sums import (
    PartialSum,
    for_mean_over_ranks,
    pack_partials,
    scale_factors,
    unpack_partials,
)
from lightning_ddp_losses.losses.two_towers import TILE_BYTES, TwoTowerLoss


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
        gather: ``"all"``: every rank holds the texts of all ranks. ``"ring"``: ranks pass their texts on, so that beside its own rows a
            rank holds two ranks' texts at a time, and in backward the gradients of three.
        group: Process group; None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank; logging it needs no ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, encoders and ``logit_scale`` hold the one-process gradient.

    Communication:
        Frame, gather of the texts, gather of 2 G + 1 numbers; one exchange of G x D in backward. A ring: 2 frames, and W - 1 times a
        message of a rank's texts and one of two numbers for each; in backward W - 1 times its texts and their gradient.

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
        gather: Literal["all", "ring"] = "all",
        group: Group = None,
    ) -> None:
        super().__init__(normalize=normalize, tile_bytes=tile_bytes, gather=gather, group=group)
        if init_temperature <= 0 or (max_scale is not None and max_scale <= 0) or not 0 <= label_smoothing < 1:
            raise ConfigurationError(
                "ClipLoss",
                expected="init_temperature > 0, max_scale > 0 or None, 0 <= label_smoothing < 1",
                got=f"{init_temperature}, {max_scale}, {label_smoothing}",
            )
        self.label_smoothing = label_smoothing
        self._start_scale(init_temperature, max_scale)

    def extra_repr(self) -> str:
        """The options."""
        return f"max_scale={self.max_scale}, label_smoothing={self.label_smoothing}, normalize={self.normalize}"

    def _evaluate(self, columns: Columns, images: Tensor, texts: Tensor, products: Tensor) -> Tensor:
        plan = _Plan(columns, self.label_smoothing, self.tile_bytes)
        value: Tensor = _Clip.apply(plan, images, texts, self._scale(), products)  # type: ignore[no-untyped-call]
        return value


@dataclass(frozen=True)
class _Plan:
    columns: Columns
    smoothing: float
    tile_bytes: int

    def here(self, images: Tensor) -> slice:
        """Where this rank's texts are among those whose products are known."""
        return slice(self.columns.first, self.columns.first + len(images))


class _Clip(torch.autograd.Function):
    """Value and gradient; ``paired`` (t,) holds each text's product with its own image, unscaled."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, images: Tensor, texts: Tensor, scale: Tensor, paired: Tensor) -> Tensor:
        own = paired[plan.here(images)] * scale
        rows, drawn = _Running(len(images), images), images.new_zeros(images.shape[1])
        products = Products(plan.columns.width)

        def visit(block: Block) -> Tensor:
            levels, cols = block.beside * scale, _Running(block.texts, images)
            for tile in block.tiles(images, plan.tile_bytes):
                logits = products.once(images, scale, block, tile)
                logits[tile.own] = -torch.inf
                number = tile.texts.stop - tile.texts.start
                if number:
                    cols.add(tile.texts, logits[:, :number].t() - levels[tile.texts].unsqueeze(1))
                rows.add(tile.rows, logits.sub_(own[tile.rows].unsqueeze(1)))
            if plan.smoothing:
                drawn.add_(block.columns.sum(0) / plan.columns.width)
                drawn.add_(block.columns[: block.texts].sum(0) / plan.columns.total)
            return cols.statistics

        statistics = plan.columns.find(visit, texts, paired, lambda a, b: _merged(torch.stack([a, b])))
        row_losses = rows.losses()
        share = row_losses.sum()
        if plan.smoothing:  # both are means over all targets of (z_ii - z_ij), in closed form
            share += plan.smoothing * (2 * own.sum() - scale * (images.sum(0) @ drawn))
        col_losses, value = _meet(plan.columns, statistics, share, len(images))
        ctx.plan, ctx.products = plan, products
        ctx.save_for_backward(images, texts, scale, paired, row_losses, col_losses, drawn)
        return value

    @staticmethod
    @once_differentiable_strict("ClipLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        images, texts, scale, paired, row_losses, col_losses, drawn = ctx.saved_tensors
        d_images, here = -plan.smoothing * drawn.expand_as(images), plan.here(images)
        row_level, col_levels = paired[here] * scale + row_losses, paired * scale + col_losses
        # both softmaxes at the own pair, less the 1 of the target: a difference of equals where pairs agree well
        to_own = torch.expm1(-row_losses) + torch.expm1(-col_losses[here]) + 2 * plan.smoothing
        wanted = ctx.needs_input_grad[2]

        def visit(block: Block) -> Tensor:
            d_columns = torch.zeros_like(block.columns)
            for tile in block.tiles(images, plan.tile_bytes):
                logits = ctx.products.again(images, scale, block, tile)
                number = tile.texts.stop - tile.texts.start
                share = (logits - row_level[tile.rows].unsqueeze(1)).exp_()
                if number:
                    share[:, :number] += logits[:, :number].sub_(block.beside[tile.texts]).exp_()
                    share[tile.own] = to_own[tile.rows][tile.own[0]]
                d_images[tile.rows].addmm_(share, block.columns[tile.columns])
                if wanted and block.trained:
                    d_columns[tile.columns].addmm_(share.t(), images[tile.rows])
            if plan.smoothing:
                d_columns -= plan.smoothing * images.sum(0) / plan.columns.width
                d_columns[: block.texts] -= plan.smoothing * images.sum(0) / plan.columns.total
            return d_columns

        d_texts = plan.columns.pull(visit, texts, col_levels, wanted=wanted)
        d_scale = (d_images * images).sum()  # z is linear in the scale and in this rank's images
        factor = for_mean_over_ranks(grad / (2 * plan.columns.total), plan.columns.group)
        given = None if d_texts is None else d_texts.mul_(factor * scale)
        return None, d_images.mul_(factor * scale), given, d_scale * factor, None


class _Running:
    """Log-sum-exp of rows that arrive in pieces, in which the own pair counts as nothing."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self.statistics = like.new_zeros((rows, 2))
        self._top, self._total = self.statistics.unbind(1)
        self._top.fill_(torch.finfo(like.dtype).min)

    def add(self, where: slice, values: Tensor) -> None:
        """Take in (rows of ``where``, n); the values are overwritten."""
        top = self._top[where]
        higher = torch.maximum(top, values.amax(1))
        added = values.sub_(higher.unsqueeze(1)).exp_().sum(1)
        self._total[where] = self._total[where] * torch.exp(top - higher) + added
        self._top[where] = higher

    def losses(self) -> Tensor:
        """Of each row."""
        return _losses(self.statistics)


def _losses(statistics: Tensor) -> Tensor:
    """(n, 2) -> the loss of each row, its own pair put back."""
    top, total = statistics.unbind(1)
    return nn.functional.softplus(top + total.log(), threshold=50)


def _merged(statistics: Tensor) -> Tensor:
    """(k, n, 2) of k parts of each row -> (n, 2) of the whole."""
    tops, totals = statistics.unbind(2)
    top = tops.amax(0)
    return torch.stack([top, (totals * torch.exp(tops - top)).sum(0)], 1)


def _meet(columns: Columns, statistics: Tensor, share: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Losses of the texts whose statistics are known, and the global loss, from this rank's share of it apart from the texts'."""
    group, world = columns.group, process_groups.world_size(columns.group)
    if isinstance(columns, Ring):  # each rank knows its own texts' losses
        losses = _losses(statistics)
        shares = [PartialSum((share + losses.sum()) / 2, images)]
        value, _ = scale_factors(
            unpack_partials(handshake.all_gather("ClipLoss: sum", {}, pack_partials(shares), group=group)), world
        )
        return losses, share.new_tensor(value)
    if world > 1:
        own = torch.cat([statistics.reshape(-1), share.reshape(1)])
        everyone = own.new_empty((world, len(own)))
        gather(everyone.view(-1), own, group=group_for(own, group))
        statistics = _merged(everyone[:, :-1].view(world, -1, 2))
        share = everyone[:, -1].sum()
    losses = _losses(statistics)
    return losses, (share + losses.sum()) / (2 * columns.total)
