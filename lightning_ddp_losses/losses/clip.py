"""`ClipLoss`: the symmetric cross entropy between two towers over the rows of all ranks, never holding the product matrix.

The loss of each direction is ``log(1 + sum_{j != i} exp(z_ij - z_ii))``, computed from differences to the row's own pair. The 1 is not part
of the accumulated sum, so that float32 keeps its precision if pairs agree well. Rows of this rank are complete on this rank. Columns are
joined from all ranks' (maximum, sum), which follow the texts in a ring.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``M`` columns (G texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather_stacked
from lightning_ddp_losses.errors import expect
from lightning_ddp_losses.losses.kernels.choice import CompileTiles
from lightning_ddp_losses.losses.partial_sums import for_mean_over_ranks
from lightning_ddp_losses.losses.products.forms import ProductChoice
from lightning_ddp_losses.losses.products.log_sum_exp import LogSumExp, RunningLogSumExp, max_and_sum_exp
from lightning_ddp_losses.losses.products.operands import GradTerms, inner_product, part_of
from lightning_ddp_losses.losses.tile_results import TileResults
from lightning_ddp_losses.losses.tower_tiles import ColumnBlock, Factors, TowerCall, grad_of_scale
from lightning_ddp_losses.losses.two_towers import TwoTowerLoss


class ClipLoss(TwoTowerLoss):
    """Contrastive loss between images and texts (or any two towers) with a learnable temperature.

    Equivalent to, with ``x`` and ``y`` the normalized rows of all ranks and ``z = logit_scale.exp() * x @ y.T``:
    ``(cross_entropy(z, arange(G)) + cross_entropy(z.T, arange(G))) / 2`` in one process. Further negatives are columns of ``z`` in the
    first term only.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``. If None, the loss does not have a scale, and
            ``logit_scale=`` is required in each call.
        max_scale: Upper limit to which the loss's scale is clamped. If None, it is not clamped.
        label_smoothing: Same as in ``torch.nn.CrossEntropyLoss``.
        normalize: Divide embeddings by their length. Use False if the model normalizes them.
        tile_bytes: Size of the products in memory at a time. If None, 2 MiB, on an accelerator 64 MiB, compiled or with kernels 256 MiB.
        gather: ``"all"``: every rank holds the texts of all ranks. ``"ring"``: ranks pass their texts on. In addition to its own rows, a
            rank then holds two ranks' texts at a time, and the gradients of three in backward.
        products: How rows are multiplied. ``"float32"``, or a form that uses tensor cores, with sums in float32. ``"bf16"``: rows are
            multiplied as bfloat16, which rounds rows of float32 by 2^-9 and rows of bfloat16 not at all. The gradient of a product is one
            bfloat16 number, rounded by 2^-9, except for the gradients of scale and bias, which are not rounded. ``"bf16x2"``: the same, but
            the gradient of a product is two bfloat16 numbers, rounded by 2^-17. ``"bf16x3"`` and ``"bf16x6"`` are for rows of float32: each
            product is the sum of three products of bfloat16 numbers, rounded by 2^-17, or of six, which are as exact as float32. Both are
            float32 on devices without products of bfloat16 into float32, such as the CPU, where no gradient is rounded. ``"auto"``: bf16
            if both towers are bfloat16, otherwise float32. It is never less exact than torch with the same rows, whose gradients are at
            least twice as far from float64 if it computes in bfloat16. float64 stays float64.
        compile_tiles: How to compute the parts of a tile other than its products. False: torch's operators. ``"auto"``: a hand-written
            kernel if every rank has an NVIDIA GPU and triton, which is installed with torch, and there are at least 2^24 products (4,096
            rows against 4,096) in float32, otherwise torch's operators. The first call tries the kernel on all ranks. If it fails on any
            rank, rank 0 warns and all ranks use the operators. Its results are the same except for rounding, and its tiles have 256 MiB. It
            was not measured. True: ``torch.compile``, on all ranks, or on none if it fails on any rank. The first call then takes seconds.
            With True and ``products="auto"`` on an NVIDIA H200 with torch 2.11, a step with 65,536 bfloat16 rows took 103 ms instead of
            313 ms, with 8,192 rows 5.1 ms instead of 7.8 ms, and with 1,024 rows 1.07 times as long.
        name: Name that distinguishes this loss from others of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare the loss's parameters between the ranks, as in ``GlobalBatchLoss``.
        group: Process group. None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank. Logging it does not require ``sync_dist``.

    Gradient:
        After DDP's mean over ranks, encoders and ``logit_scale`` (of the loss or of the caller) have the one-process gradient.

    Communication:
        Handshake, gather of the texts (bfloat16 is sent unchanged), gather of 2 G + 1 numbers. In backward a handshake and one exchange of
        G x D.
        In a ring, 2 handshakes, and W - 1 times a message with a rank's texts and a message with two numbers for each text. In backward
        W - 1 times its texts and their gradient in float32.

    Raises:
        ConfigurationError: for invalid options.
        InputError: on every rank, if the towers do not fit together on any rank.
        RankMismatchError: on every rank, if widths, dtypes or options differ.

    Source: Radford et al. 2021, arXiv:2103.00020, figure 3.

    Example:
        >>> import torch
        >>> loss = ClipLoss()
        >>> value = loss(torch.randn(4, 8), torch.randn(4, 8))

        A model with its own scale passes it as in open_clip's loss, but by name:

        >>> log_scale = torch.nn.Parameter(torch.tensor(2.66))
        >>> loss = ClipLoss(init_temperature=None)
        >>> value = loss(torch.randn(4, 8), torch.randn(4, 8), logit_scale=log_scale.exp())

        To move the scale of an old checkpoint into the loss, rename its key from the model's parameter to the loss's parameter:

        >>> state = {"model.logit_scale": log_scale.detach()}
        >>> state["loss.logit_scale"] = state.pop("model.logit_scale")
    """

    def __init__(
        self,
        init_temperature: float | None = 0.07,
        *,
        max_scale: float | None = 100.0,
        label_smoothing: float = 0.0,
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
        expect(
            0 <= label_smoothing < 1, "ClipLoss: label_smoothing", expected="at least 0, below 1", got=label_smoothing
        )
        self.label_smoothing = label_smoothing

    def extra_repr(self) -> str:
        """Return the options."""
        numbers = f"max_scale={self.max_scale}, label_smoothing={self.label_smoothing}"
        return f"{numbers}, normalize={self.normalize}, products={self.products}"

    def _evaluate(self, call: TowerCall, *tensors: Any) -> Tensor:
        value: Tensor = _Clip.apply(call, self.label_smoothing, *tensors)  # type: ignore[no-untyped-call]
        return value

    def _rehearse_tile(self, run: Callable[..., Any], products: Tensor, factors: Factors, call: TowerCall) -> None:
        for keeps in call.kept_on_ranks():
            run(clip_stats, products, factors, products.shape[1], keeps)
            if call.trained:
                of_rows, of_columns = products.new_zeros(len(products)), products.new_zeros(products.shape[1])
                options = call.term_count, keeps, of_rows if call.sums_logits(True) else None
                run(clip_terms, products, factors, of_rows, of_columns, of_rows, *options)


def clip_stats(products: Tensor, factors: Factors, text_count: int, keep: bool) -> Any:
    """Return the maximum and the sum of exponentials of a tile's rows, (T,) each, and of its leading columns. Own pairs are excluded.

    The third result are the logits if ``keep``, otherwise None. Those of own pairs are replaced.

    Args:
        products: (T, C). Overwritten.
        factors: Factors of the products.
        text_count: The number of leading columns that are texts.
        keep: True if the logits are used again.
    """
    logits = factors.logits(products)
    logits = factors.put_own_(logits, torch.finfo(logits.dtype).min)
    of_columns = None
    if text_count:
        of_texts = logits if text_count == logits.shape[1] else logits[:, :text_count]
        of_columns = max_and_sum_exp(of_texts.t(), keep=True)
    return max_and_sum_exp(logits, keep=keep), of_columns, logits if keep else None


def clip_terms(
    products: Tensor,
    factors: Factors,
    row_lse: Tensor,
    column_lse: Tensor | None,
    own: Tensor,
    term_count: int,
    are_logits: bool,
    own_logits: Tensor | None,
) -> tuple[Tensor | None, GradTerms]:
    """Return the gradient of a tile's logits (``Factors.terms``): the softmax of the rows plus the softmax of the columns.

    The first result is the sum (1,) of the logits times their gradient, or None.

    Args:
        products: (T, C). Overwritten.
        factors: Factors of the products.
        row_lse: (T,), log-sum-exp of the images' rows.
        column_lse: (C,), log-sum-exp of the texts' columns, infinite for other columns. None if there are no texts.
        own: (T,), the gradient at own pairs.
        term_count: Same as for ``Factors.terms``.
        are_logits: True if ``products`` already contains logits, except for own pairs.
        own_logits: (T,), logits of own pairs. None if the sum of logits is not required.
    """
    logits = products
    if not are_logits:
        logits = factors.logits(products)
    elif torch.compiler.is_compiling():
        logits = products.clone()
    grad = (logits - row_lse.unsqueeze(1)).exp_()
    if column_lse is not None:
        differences = logits.sub_(column_lse) if own_logits is None else logits - column_lse
        grad.add_(differences.exp_())
        del differences
    grad, logit_sum = factors.put_own_(grad, own), None
    if own_logits is not None:
        if are_logits:
            logits = factors.put_own_(logits, own_logits)
        logit_sum = inner_product(logits, grad)
    return logit_sum, factors.terms(grad, term_count)


class _Clip(torch.autograd.Function):
    """Value and gradient. ``paired`` (t,) contains the product of each text with its own image, unscaled."""

    @staticmethod
    def forward(
        ctx: Any, call: TowerCall, smoothing: float, images: Tensor, texts: Tensor, paired: Tensor, scale: Tensor
    ) -> Tensor:
        own_texts, paired_logits = call.own_texts, paired * scale
        # 1. statistics of rows, which are complete, and of columns, which in a ring are joined over ranks
        mean_column = scale.new_zeros(images.shape[1]) if smoothing else None
        ctx.kept_logits = None
        row_lse: LogSumExp | RunningLogSumExp
        if call.is_one_tile:
            row_lse, column_stats, ctx.kept_logits = _stats_of_one_tile(call, scale, mean_column)
        else:
            row_lse, column_stats = _stats_of_tiles(call, scale, mean_column)
        # 2. the log-probabilities of this rank's images
        row_log_probs = _own_log_probs(row_lse, paired_logits[own_texts])
        total = row_log_probs.sum()
        if mean_column is not None:  # both are means over all targets of (z_ii - z_ij), in closed form
            pulled = 2 * paired_logits[own_texts].sum() - scale * (call.images.total() @ mean_column)
            total -= smoothing * pulled
        # 3. the log-probabilities of texts, and the sum over ranks
        column_log_probs, value = _columns_and_value(call, column_stats, paired_logits, total)
        ctx.call, ctx.smoothing = call, smoothing
        ctx.save_for_backward(images, texts, scale, paired_logits, row_log_probs, column_log_probs, mean_column)
        return value

    @staticmethod
    @once_differentiable_strict("ClipLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: TowerCall = ctx.call
        smoothing = ctx.smoothing
        images, texts, scale, paired_logits, row_log_probs, column_log_probs, mean_column = ctx.saved_tensors
        own_texts = call.own_texts
        sums: list[Any] = [call.zero_sums(call.images)]
        # a second backward computes it again
        kept, ctx.kept_logits = ctx.kept_logits, None
        # log-sum-exps, own pair included
        row_lse, column_lses = paired_logits[own_texts] - row_log_probs, paired_logits - column_log_probs
        # both softmaxes at the own pair minus the 1 of the target. expm1 avoids cancellation if pairs agree well
        d_own_pairs = torch.expm1(row_log_probs).add_(torch.expm1(column_log_probs[own_texts]))
        if smoothing:
            d_own_pairs += 2 * smoothing
            sums[0] -= call.images.spread(smoothing * mean_column)

        sums_logits = call.sums_logits(ctx.needs_input_grad[5])
        logit_sums, tiles = TileResults(call.tile_count() if sums_logits else 0, scale), 0

        def visit(block: ColumnBlock) -> Tensor | None:
            nonlocal tiles
            column_sums, column_lse = call.column_sums(block), None
            if block.column_stats is not None:
                column_lse, negatives = block.column_stats, len(block.columns.rows) - block.text_count
                if negatives:
                    column_lse = nn.functional.pad(column_lse, (0, negatives), value=torch.inf)
            for tile, products in call.tiles(block, scale, kept):
                texts_lse = None
                if column_lse is not None and tile.text_count:
                    texts_lse = part_of(column_lse, tile.columns)
                of_rows = part_of(row_lse, tile.rows), texts_lse, part_of(d_own_pairs, tile.rows)
                own_logits = part_of(paired_logits[own_texts], tile.rows) if sums_logits else None
                options = call.term_count, kept is not None, own_logits
                of_logits, terms = call.run(clip_terms, products, tile.factors, *of_rows, *options)
                if sums_logits:
                    logit_sums.store_(of_logits, tiles)
                    tiles += 1
                # back to both towers
                tile.add_grads_(terms, sums[0], column_sums)
                del terms  # otherwise it would still be in memory together with the next tile
            if smoothing and column_sums is not None:
                pull = smoothing * call.images.total()
                texts = slice(0, block.text_count)
                column_sums -= block.columns.spread(pull / call.width)
                column_sums[texts] -= block.columns.part(texts).spread(pull / call.total)
            return column_sums

        if call.ring is not None:
            call.exchange.open()
        counts = call.column_counts if call.columns_trained else None
        sums.append(call.collect(visit, column_lses, counts=counts))
        factor = for_mean_over_ranks(grad / (2 * call.total), call.group)
        d_images, d_texts, d_scale = call.gradients(sums, factor * scale, images, texts)
        if sums_logits:
            logit_sum = logit_sums.joined().sum()
            if smoothing:
                logit_sum -= smoothing * scale * (call.images.total() @ mean_column)
            d_scale = grad_of_scale(d_scale, logit_sum, scale)
        return None, None, d_images, d_texts, None, d_scale * factor


def _stats_of_one_tile(
    call: TowerCall, scale: Tensor, mean_column: Tensor | None
) -> tuple[LogSumExp, Tensor, Tensor | None]:
    """Return the result of ``_stats_of_tiles`` for a single tile, and its logits if backward needs them, so that it is computed once."""
    block = call.gathered_block()
    tile, products = next(call.tiles(block, scale))
    of_rows, of_columns, logits = call.run(clip_stats, products, tile.factors, tile.text_count, call.trained)
    if mean_column is not None:
        _add_mean_column_(call, block, mean_column)
    return LogSumExp(*of_rows), torch.stack(of_columns, 1), logits


def _stats_of_tiles(
    call: TowerCall, scale: Tensor, mean_column: Tensor | None
) -> tuple[LogSumExp | RunningLogSumExp, Tensor]:
    """Return statistics of the logits without own pairs.

    Args:
        call: The call.
        scale: Factor of the products, 0-dim.
        mean_column: (D,), zeros, to which the means of the columns are added for label smoothing. None if labels are not smoothed.

    Returns:
        Log-sum-exp of this rank's rows, and (t, 2) packed statistics of the columns with statistics on this rank.
    """
    row_lse = RunningLogSumExp(call.images.rows.shape[0], scale)

    def visit(block: ColumnBlock) -> Tensor:
        column_lse = RunningLogSumExp(block.text_count, scale)
        for tile, products in call.tiles(block, scale):
            of_rows, of_columns, _ = call.run(clip_stats, products, tile.factors, tile.text_count, False)
            row_lse.add_piece(of_rows, tile.rows.start)
            if of_columns is not None:
                column_lse.add_piece(of_columns, tile.columns.start)
        if mean_column is not None:
            _add_mean_column_(call, block, mean_column)
        return torch.stack([column_lse.maximum, column_lse.sum_exp], 1)

    column_stats = call.collect(visit, join=_join_stats, counts=call.text_counts)
    assert column_stats is not None
    return row_lse, column_stats


def _add_mean_column_(call: TowerCall, block: ColumnBlock, mean_column: Tensor) -> None:
    """Add a block's contribution to the mean of all columns, and to the mean of all texts."""
    mean_column.add_(block.columns.total() / call.width)
    mean_column.add_(block.columns.part(slice(0, block.text_count)).total() / call.total)


def _own_log_probs(others: LogSumExp | RunningLogSumExp, own_logits: Tensor) -> Tensor:
    """Compute the log-probability of each row's own pair, including its 1: -log(1 + sum exp of the differences to the other pairs)."""
    return nn.functional.logsigmoid(-others.relative_to(own_logits))


def _join_stats(own: Tensor, others: Tensor) -> Tensor:
    """Join the statistics of two ranks for the same columns, (n, 2) each, i.e. the two numbers of ``LogSumExp``."""
    maxima, sums = torch.stack([own, others]).unbind(2)
    return torch.stack(LogSumExp.merged(maxima, sums), 1)


def _columns_and_value(
    call: TowerCall, column_stats: Tensor, paired_logits: Tensor, rows_total: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of the texts that have statistics, and the global loss.

    Args:
        call: The call.
        column_stats: (t, 2), packed. In a ring they are complete, otherwise this rank's part.
        paired_logits: (t,), logits of each of these texts with its own image.
        rows_total: This rank's share of the sum of log-probabilities, without the texts.

    Communication: one gather of 2 G + 1 numbers. In a ring one handshake, and one gather on the device.
    """
    group, world = call.group, process_groups.world_size(call.group)
    if call.ring is None and world > 1:
        # parts of all ranks in rank order, so that the result is equal on every rank
        packed = torch.cat([column_stats.view(-1), rows_total.view(1)])
        gathered = gather_stacked(packed, group)
        maxima, sums = gathered[:, :-1].view(world, -1, 2).unbind(2)
        column_lse = LogSumExp.merged(maxima, sums)
        rows_total = gathered[:, -1].sum()
    else:  # each rank has complete statistics of its own texts
        column_lse = LogSumExp(*column_stats.unbind(1))
    log_probs = _own_log_probs(column_lse, paired_logits)
    total = rows_total + log_probs.sum()
    if call.ring is not None:
        return log_probs, call.mean_over_images(total / -2)
    return log_probs, total / (-2 * call.total)
