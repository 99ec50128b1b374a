"""`SigLipLoss`: the sigmoid loss between two towers over the rows of all ranks, never holding the product matrix.

Every pair of an image and a text is one sample, so each rank's images against all texts form a share of the sum.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``M`` columns (G texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.losses.kernels.choice import CompileTiles
from lightning_ddp_losses.losses.partial_sums import for_mean_over_ranks
from lightning_ddp_losses.losses.plans.towers import TowerRows
from lightning_ddp_losses.losses.products.forms import ProductChoice
from lightning_ddp_losses.losses.products.operands import GradTerms, inner_product
from lightning_ddp_losses.losses.tile_results import TileResults
from lightning_ddp_losses.losses.tower_tiles import ColumnBlock, Factors, TowerCall, grad_of_scale
from lightning_ddp_losses.losses.two_towers import TwoTowerLoss


class SigLipLoss(TwoTowerLoss):
    """Pairwise sigmoid loss between images and texts (or any two towers) with learnable scale and bias.

    Equivalent to, with ``x`` and ``y`` the normalized rows of all ranks, ``z = logit_scale.exp() * x @ y.T + logit_bias`` and ``t`` 1
    on the diagonal, -1 elsewhere: ``-logsigmoid(t * z).sum() / G`` in one process. Further negatives are further columns.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``. If None, the loss does not have a scale, and
            ``logit_scale=`` is required in each call.
        init_bias: Initial ``logit_bias``, negative because most pairs are negative. If None, ``logit_bias=`` is required in each call.
        max_scale: Upper limit to which the loss's scale is clamped. If None, it is not clamped.
        normalize: Divide embeddings by their length. Use False if the model normalizes them.
        tile_bytes: Size of the products in memory at a time. If None, 2 MiB, on an accelerator 64 MiB, compiled or with kernels 256 MiB.
        gather: ``"all"``: every rank holds the texts of all ranks. ``"ring"``, as in the paper: ranks pass their texts on. In addition to
            its own rows, a rank then holds two ranks' texts at a time, and the gradients of three in backward.
        products: How rows are multiplied, as in ``ClipLoss``: ``"float32"``, ``"bf16"``, ``"bf16x2"``, ``"bf16x3"``, ``"bf16x6"`` or
            ``"auto"``.
        compile_tiles: How to compute the parts of a tile other than its products: ``"auto"``, True or False, as in ``ClipLoss``. With True
            and ``products="auto"`` on an NVIDIA H200 with torch 2.11, a step with 65,536 bfloat16 rows took 70 ms instead of 173 ms, with
            8,192 rows 3.1 ms instead of 3.8 ms, and with 1,024 rows 1.09 times as long. ``"auto"`` was not measured.
        name: Name that distinguishes this loss from others of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare the loss's parameters between the ranks, as in ``GlobalBatchLoss``.
        group: Process group. None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank. Logging it does not require ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, encoders, ``logit_scale`` and ``logit_bias`` have the one-process gradient.

    Communication:
        Handshake, gather of the texts (bfloat16 is sent unchanged). On the CPU a handshake with the sum and one exchange of G x D, none in
        backward. On an accelerator a gather of the sum, for which the host does not wait, and in backward a handshake and one exchange of
        G x D. In a ring, two handshakes, and W - 1 times a message with a rank's texts. In backward W - 1 times its texts and their
        gradient in float32.

    Raises:
        ConfigurationError: for invalid options.
        InputError: on every rank, if the towers do not fit together on any rank.
        RankMismatchError: on every rank, if widths, dtypes or options differ.

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
        products: ProductChoice = "auto",
        compile_tiles: CompileTiles = "auto",
        name: str | None = None,
        check_weights: bool = True,
        group: Group = None,
    ) -> None:
        towers = init_temperature, max_scale, normalize, tile_bytes, gather
        super().__init__(*towers, products, compile_tiles, name, check_weights, group)
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
        """Compute the global loss from the arguments of ``TwoTowerLoss.forward``. ``logit_bias`` replaces the loss's bias."""
        rows = TowerRows(images, texts, extra_texts, queue)
        return self._checked_call(rows, {"logit_scale": logit_scale, "logit_bias": logit_bias})

    def _evaluate(self, call: TowerCall, *tensors: Any) -> Tensor:
        value: Tensor = _SigLip.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return value

    def _rehearse_tile(self, run: Callable[..., Any], products: Tensor, factors: Factors, call: TowerCall) -> None:
        sums_logits = call.sums_logits(call.trained)
        run(siglip_tile, products, factors, products.new_ones(()), call.trained, call.term_count, sums_logits)


def siglip_tile(
    products: Tensor, factors: Factors, bias: Tensor, with_grads: bool, term_count: int, sums_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, GradTerms | None]:
    """Return the sums (T,) of the losses in a tile's rows and, if ``with_grads``, the sums of their gradient and the gradient itself.

    The third result is the sum (1,) of the logits with their bias times the gradient, if ``sums_logits``.

    Args:
        products: (T, C). Overwritten.
        factors: Factors of the products.
        bias: Bias of the logits, 0-dim.
        with_grads: True if the gradient is required. It depends only on the tile.
        term_count: Same as for ``Factors.terms``.
        sums_logits: True if the sum of logits times their gradient is required.
    """
    # -logsigmoid(t z) = softplus(-t z), where t is 1 at own pairs and -1 elsewhere
    opposed_logits = factors.negate_own_(factors.logits(products, bias))
    losses = nn.functional.softplus(opposed_logits).sum(1)
    if not with_grads:
        return losses, None, None, None
    # derivative by the logits: -t sigmoid(-t z)
    logit_sum = None
    if sums_logits:
        grad = opposed_logits.sigmoid()
        logit_sum = inner_product(opposed_logits, grad)  # two signs cancel
    else:
        grad = opposed_logits.sigmoid_()
    grad = factors.negate_own_(grad)
    return losses, grad.sum(1), logit_sum, factors.terms(grad, term_count)


class _SigLip(torch.autograd.Function):
    """Value and gradient: the sum of ``-logsigmoid(t * z)`` over this rank's images against all columns, then over ranks."""

    @staticmethod
    def forward(ctx: Any, call: TowerCall, images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(images, texts, scale, bias)
        # 1. this rank's share
        sums_logits = call.sums_logits(ctx.needs_input_grad[3])
        total, ctx.sums, ctx.d_bias, ctx.logit_sum = _visit_tiles(
            call, scale, bias, with_grads=call.trained, sums_logits=sums_logits
        )
        ctx.are_exchanged = call.exchanges_in_forward
        if not ctx.are_exchanged:
            return call.mean_over_images(total)
        # 2. the sum over ranks. Backward only scales the sums of the second tower, and does not communicate
        column_sums = ctx.sums.pop()
        global_total, own_sums = call.exchange_sums(total, column_sums)
        ctx.sums.append(own_sums)
        return global_total.div_(call.total).to(total.dtype)

    @staticmethod
    @once_differentiable_strict("SigLipLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: TowerCall = ctx.call
        images, texts, scale, bias = ctx.saved_tensors
        if not ctx.sums:  # a second backward
            if call.ring is not None:
                call.exchange.open()
            _, ctx.sums, _, _ = _visit_tiles(call, scale, bias, with_grads=True, sums_logits=False)
            ctx.are_exchanged = False
        factor = for_mean_over_ranks(grad / call.total, call.group)
        d_images, d_texts, d_scale = call.gradients(
            ctx.sums, factor * scale, images, texts, are_exchanged=ctx.are_exchanged
        )
        if ctx.logit_sum is not None:
            without_bias = torch.addcmul(ctx.logit_sum, bias, ctx.d_bias, value=-1)
            d_scale = grad_of_scale(d_scale, without_bias, scale)
        return None, d_images, d_texts, d_scale * factor, ctx.d_bias * factor


def _visit_tiles(
    call: TowerCall, scale: Tensor, bias: Tensor, *, with_grads: bool, sums_logits: bool
) -> tuple[Tensor, list[Tensor | None], Tensor, Tensor | None]:
    """Return the sum over this rank's pairs, the sums of both towers (``TowerCall.gradients``) and the gradient of the bias.

    The last result is the sum of the logits times their gradient, 0-dim, if ``sums_logits``.
    """
    # sums of the rows of each tile
    size, stored = call.tile_rows(), 0
    losses, d_biases = TileResults(size, scale), TileResults(size if with_grads else 0, scale)
    sums_logits = sums_logits and with_grads
    logit_sums, tiles = TileResults(call.tile_count() if sums_logits else 0, scale), 0
    image_sums = call.zero_sums(call.images) if with_grads else None

    def visit(block: ColumnBlock) -> Tensor | None:
        nonlocal stored, tiles
        column_sums = call.column_sums(block) if with_grads else None
        for tile, products in call.tiles(block, scale):
            options = with_grads, call.term_count, sums_logits
            found, d_bias, logits, terms = call.run(siglip_tile, products, tile.factors, bias, *options)
            losses.store_(found, stored)
            if sums_logits:
                logit_sums.store_(logits, tiles)
                tiles += 1
            if image_sums is not None:
                d_biases.store_(d_bias, stored)
                tile.add_grads_(terms, image_sums, column_sums)
            stored += len(found)
            del terms  # otherwise it would still be in memory together with the next tile
        return column_sums

    counts = call.column_counts if with_grads and call.columns_trained else None
    sums = [image_sums, call.collect(visit, counts=counts)]
    logit_sum = logit_sums.joined().sum() if sums_logits else None
    return losses.joined().sum(), sums if with_grads else [], d_biases.joined().sum(), logit_sum
