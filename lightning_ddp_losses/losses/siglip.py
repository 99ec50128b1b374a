"""`SigLipLoss`: the sigmoid loss between two towers over the rows of all ranks, never holding the product matrix.

Every pair of an image and a text is a sample of its own, so each rank's images against all texts are a share of the sum.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``M`` columns (G texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.losses.products import ProductChoice
from lightning_ddp_losses.losses.two_towers import ColumnBlock, ColumnBlocks, ProductTile, TwoTowerLoss


class SigLipLoss(TwoTowerLoss):
    """Pairwise sigmoid loss between images and texts (or any two towers) with learnable scale and bias.

    Equivalent to, with ``x`` and ``y`` the normalised rows of all ranks, ``z = logit_scale.exp() * x @ y.T + logit_bias`` and ``t`` 1
    on the diagonal, -1 elsewhere: ``-logsigmoid(t * z).sum() / G`` in one process. Further negatives are further columns.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``. None: the loss has no scale of its own, each call
            gives ``logit_scale=``.
        init_bias: ``logit_bias`` starts here: most pairs are negative. None: each call gives ``logit_bias=``.
        max_scale: The own scale is clamped to this; None: not at all.
        normalize: Divide embeddings by their length; False where the model has done so.
        tile_bytes: Of products alive at a time; None: 2 MiB, on an accelerator 256 MiB.
        gather: ``"all"``: every rank holds the texts of all ranks. ``"ring"``, as in the paper: ranks pass their texts on, so that beside
            its own rows a rank holds two ranks' texts at a time, and in backward the gradients of three.
        products: How rows are multiplied, as in ``ClipLoss``: ``"float32"``, ``"bf16"`` or ``"auto"``.
        name: Tells it from others of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare its numbers between the ranks, as in ``GlobalBatchLoss``.
        group: Process group; None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank; logging it needs no ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, encoders, ``logit_scale`` and ``logit_bias`` hold the one-process gradient.

    Communication:
        Handshake, gather of the texts (of bfloat16 as they are), handshake with the sum; in backward a handshake and one exchange of G x D.
        A ring: 2 handshakes, and W - 1 times a
        message of a rank's texts; in backward W - 1 times its texts and their gradient, of float32.

    Raises:
        ConfigurationError: options that cannot work.
        InputError: on every rank, for towers that do not fit together on any rank.
        RankMismatchError: on every rank, when widths, dtypes or options differ.

    Source: Zhai et al. 2023, arXiv:2303.15343, algorithm 1.

    Example:
        >>> import torch
        >>> loss = SigLipLoss()
        >>> value = loss(torch.randn(4, 8), torch.randn(4, 8))
    """

    def __init__(
        self,
        init_temperature: float | None = 0.1,
        init_bias: float | None = -10.0,
        *,
        max_scale: float | None = None,
        normalize: bool = True,
        tile_bytes: int | None = None,
        gather: Literal["all", "ring"] = "all",
        products: ProductChoice = "float32",
        name: str | None = None,
        check_weights: bool = True,
        group: Group = None,
    ) -> None:
        super().__init__(
            init_temperature, max_scale, normalize, tile_bytes, gather, products, name, check_weights, group
        )
        self.logit_bias: nn.Parameter | None = None
        if init_bias is not None:
            self.logit_bias = nn.Parameter(torch.tensor(float(init_bias)))

    compares_with_own_pair = False

    def extra_repr(self) -> str:
        """Return the options."""
        return f"max_scale={self.max_scale}, normalize={self.normalize}, products={self.products}"

    @eager_recursive
    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        extra_texts: Tensor | None = None,
        queue: Tensor | None = None,
        *,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the global loss from the arguments of ``TwoTowerLoss.forward``; one number may replace the own bias as well."""
        return self._checked_call(
            (images, texts, extra_texts, queue), {"logit_scale": logit_scale, "logit_bias": logit_bias}
        )

    def _evaluate(self, columns: ColumnBlocks, *tensors: Any) -> Tensor:
        # this rank's share of the sum over pairs, then that of all ranks
        total: Tensor = _PairSum.apply(columns, *tensors)  # type: ignore[no-untyped-call]
        return columns.mean_over_images("SigLipLoss", total)


class _PairSum(torch.autograd.Function):
    """Sums ``-logsigmoid(t * z)`` of this rank's images against all columns."""

    @staticmethod
    def forward(ctx: Any, columns: ColumnBlocks, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        sums = list[Tensor]()

        def visit(block: ColumnBlock) -> None:
            products = columns.products(block, images, scale)
            for tile in block.tiles(images, columns.tile_bytes):
                # -logsigmoid(t z) = softplus(-t z)
                opposed_logits = _opposed_logits_(products.compute(tile), tile, bias)
                columns.keep(opposed_logits, len(images))
                sums.append(nn.functional.softplus(opposed_logits).sum())
                del opposed_logits  # else it is there next to the next tile

        columns.collect(visit, texts)
        ctx.columns = columns
        ctx.save_for_backward(images, texts, scale, bias)
        return _sum_of(sums, images)

    @staticmethod
    @once_differentiable_strict("SigLipLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        columns, (images, texts, scale, bias) = ctx.columns, ctx.saved_tensors
        d_images, d_biases, texts_wanted = torch.zeros_like(images), list[Tensor](), ctx.needs_input_grad[2]

        def visit(block: ColumnBlock) -> Tensor:
            d_block = torch.zeros_like(block.columns)
            d_columns = d_block[:, : images.shape[1]] if texts_wanted and block.trained else None
            products = columns.products(block, images, scale)
            for tile in block.tiles(images, columns.tile_bytes):
                # derivative by the logits: -t sigmoid(-t z), where t is -1 but at own pairs
                opposed_logits = columns.take_kept()
                if opposed_logits is None:
                    opposed_logits = _opposed_logits_(products.compute(tile), tile, bias)
                d_logits = opposed_logits.sigmoid_()
                if tile.has_own_pairs:
                    tile.own_pairs(d_logits).neg_()
                # back to the bias and both towers
                d_biases.append(d_logits.sum())
                products.add_grads_(d_logits, tile, d_images, d_columns)
                del opposed_logits, d_logits  # else they are there next to the next tile
            return d_block

        d_texts = columns.collect_grad(visit, texts, wanted=texts_wanted)
        # z is linear in the scale and in this rank's images
        d_scale, d_bias, factor = (d_images * images).sum(), _sum_of(d_biases, bias), grad * scale
        if d_texts is not None:
            d_texts.mul_(factor)
        return None, d_images.mul_(factor), d_texts, d_scale * grad, d_bias * grad


def _opposed_logits_(products: Tensor, tile: ProductTile, bias: Tensor) -> Tensor:
    """Overwrite the scaled products of a tile with its logits times -t; return them."""
    logits = products.add_(bias)
    if tile.has_own_pairs:
        tile.own_pairs(logits).neg_()
    return logits


def _sum_of(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    """Add 0-dim tensors; 0 without any."""
    if len(numbers) < 2:
        return numbers[0] if numbers else like.new_zeros(())
    return torch.stack(list(numbers)).sum()
