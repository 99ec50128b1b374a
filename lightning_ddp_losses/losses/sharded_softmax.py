"""The softmax cross entropy over classes that are divided over ranks, in chunks of classes that are freed after use, and their logits.

Forward: each rank's maximum and sum of exponentials per row over its own classes, chunk by chunk, and the target's logit from
the rank that has its class. One gather of these three makes every row's loss known on every rank. Backward: the chunks again, now with
the softmax, for the gradient of this rank's weight rows (complete) and of all embeddings (this rank's part).

Legend: ``W`` ranks, ``G`` rows over all ranks, ``D`` embedding size, ``c`` classes on this rank, ``K`` weight rows per class, ``n`` rows
whose class is on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.distributed import process_groups, raw_collectives
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.partial_sums import for_mean_over_ranks
from lightning_ddp_losses.losses.products.forms import ProductForm, grad_terms_of
from lightning_ddp_losses.losses.products.log_sum_exp import LogSumExp, RunningLogSumExp, max_and_sum_exp
from lightning_ddp_losses.losses.products.operands import (
    GradTerms,
    Operand,
    add_factors_,
    add_to_left_,
    add_to_right_,
    lengths_of,
    product,
    split,
)
from lightning_ddp_losses.losses.sharded_weight import LocalClasses, LocalTargets, ShardedWeight, Targets
from lightning_ddp_losses.losses.tile_compiler import TileCompiler, rehearsed_tile

Number = float | Tensor
Penalty = Callable[[Tensor], tuple[Tensor, Number]]
Factors = tuple[Tensor | None, Tensor | None]
NO_FACTORS: Factors = (None, None)


class RowLosses(NamedTuple):
    """Facts of a call over all ranks, equal on every rank.

    Attributes:
        losses: (G,) ``logsumexp_j z_ij - z_iy``. Not a number if no rank has the row's class.
        penalty: 0-dim, the sum of the regulariser's terms, with gradient. None without a regulariser.
        penalty_divisor: 0-dim, the number of these terms. None without a regulariser.
        angle_sum: 0-dim, the sum of the targets' angles. None if the loss does not collect statistics.
    """

    losses: Tensor
    penalty: Tensor | None
    penalty_divisor: Tensor | None
    angle_sum: Tensor | None


class ShardedSoftmax(NamedTuple):
    """Evaluates one call.

    Attributes:
        head: Computes logits.
        classes: Which of this rank's classes are in use.
        penalty: Returns a block of weight rows' summed regulariser terms and their number. None without a regulariser.
        group: Process group over which the classes are sharded.
        replica_group: Ranks that have the same classes in other parts of the world. None without such ranks.
        form: How rows and weight rows are multiplied.
        embeddings: G rows that are multiplied as bf16 numbers. If None, the rows from ``Head.prepare`` are multiplied.
        compiler: Compiles the functions of chunks, or has kernels for them. If None, torch's operators compute them.
        on_backward: Called in backward with the sampled classes, which get a gradient, and the gradient (c * K, D) of the weight rows.
    """

    head: Head
    classes: LocalClasses
    penalty: Penalty | None = None
    group: Group = None
    replica_group: Group = None
    form: ProductForm = "float32"
    embeddings: Operand | None = None
    compiler: TileCompiler | None = None
    on_backward: Callable[[Tensor, Tensor], None] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a chunk, compiled or by its kernel if that is wanted."""
        return function(*args) if self.compiler is None else self.compiler(function, *args)

    def chunk(self, targets: LocalTargets, start: int, stop: int, factors: Factors = NO_FACTORS) -> Chunk:
        """Return how the products of some of the classes looked at become logits."""
        log_weight = self.classes.log_weight
        return Chunk(*factors, targets.in_chunk(start, stop), None if log_weight is None else log_weight[start:stop])

    @torch.no_grad()
    def rehearse(self, title: str, like: Tensor) -> None:
        """Let the ranks compile together the functions of forward and backward. ``like``: a tensor of the call's dtype and device."""
        if self.compiler is None:
            return
        classes, device, is_factored = self.classes, like.device, self.form != "float32"
        kind = (str(like.dtype), device.type, self.form, classes.log_weight is None, classes.has_all)

        def rehearsal(run: Callable[..., Any]) -> None:
            # a chunk that takes the same branches
            products = rehearsed_tile(like)
            of_rows, of_columns = products.new_ones(len(products)), products.new_ones(products.shape[1])
            factors = NO_FACTORS
            if is_factored:
                factors = of_rows, of_columns if self.embeddings is not None else None
            has_margin, keeps = self.head.has_margin, classes.number <= classes.chunk
            is_inside = None if classes.has_all and keeps else of_rows > 0
            targets = Targets(is_inside, torch.arange(len(products), device=device).unsqueeze(1))
            chunk = Chunk(*factors, targets, None if classes.log_weight is None else of_columns)
            run(class_stats, products, chunk, of_rows, has_margin, keeps)
            chunk, at_targets = chunk.of_logits() if keeps else chunk, of_rows if has_margin else None
            term_count = grad_terms_of(self.form, device)
            run(class_terms, products, chunk, of_rows.unsqueeze(1), at_targets, factors, term_count)

        self.compiler.rehearse(title, kind, rehearsal, self.group)

    def row_losses(self, rows: Tensor, weight: Tensor) -> RowLosses:
        """Return ``logsumexp_j z_ij - z_iy`` of every row, over the classes of all ranks.

        Args:
            rows: (G, D) as ``Head.prepare`` gives them, equal on every rank.
            weight: (c * K, D), this rank's.

        Gradient: of ``weight`` the complete one. Of ``rows`` this rank's part, such that the mean over ranks of the sums over
            ranks is complete. All ranks must back-propagate the same.

        Communication: one gather of (3 G + 4) numbers. None in backward but, with replicas, one mean of the weight's gradient over them.
        """
        # inside the function gradients are off
        has_backward = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
        return RowLosses(*_SoftmaxFunction.apply(self, has_backward, rows, weight))  # type: ignore[no-untyped-call]

    def target_logits(
        self, rows: Tensor, weight: Tensor, targets: LocalTargets, *, with_slope: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Compute the logits (G,) of the targets on this rank, with their margin. 0 where another rank has the class.

        Args:
            rows: (G, D).
            weight: (c * K, D).
            targets: Which rows.
            with_slope: There will be a backward.

        Returns:
            The logits. The targets' cosines (n,) and, with its graph, PML's margin of them, if that is all that tells a target from other
            logits: its gradient then goes their way.
        """
        if targets.are_none:
            return rows.new_zeros(len(rows)), None
        head, own_rows = self.head, targets.of(rows)
        picked = weight[targets.weight_rows()].view(-1, head.per_class, rows.shape[1])
        if not with_slope or not head.is_one_product or self.embeddings is not None:
            return targets.spread(head.targets(own_rows, picked)), None
        cosines = head.cosines(own_rows, picked).detach().requires_grad_()
        with own_graph():
            margins = head.with_margin(cosines)
        return targets.spread(margins.detach() * head.scale), (cosines, margins)


class _Cosines:
    """Scaled products of the rows with unit weight rows, a chunk at a time.

    Args:
        call: The call.
        rows: (G, D) as ``Head.prepare`` gives them.
        weight: (c * K, D).
        kept: Weight rows in the form of products, and their lengths, from forward. If None, they are computed.

    Attributes:
        weight: (c * K, D), weight rows that chunks are made from.
        lengths: (c * K,), their lengths.
        left: The rows in the form of products.
        scale: Factor of the products.
        row_factors: Factors of the rows. None means 1.
        scaled_row_factors: The same times the scale. None for products in float32, which are already scaled.
        is_factored: True if factors of rows and classes are applied to products and their gradient, and not to the rows.
    """

    def __init__(
        self, call: ShardedSoftmax, rows: Tensor, weight: Tensor, kept: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self._form, self.is_factored = call.form, call.form != "float32"
        self._is_bf16 = call.embeddings is not None
        self.left = Operand(rows).in_form(call.form) if call.embeddings is None else call.embeddings
        if kept is None:
            kept = weight.to(torch.bfloat16) if self._is_bf16 else weight, lengths_of(weight)
        self.weight, self.lengths = kept
        self.scale, self.row_factors = call.head.scale, self.left.factors
        self.scaled_row_factors = None
        if self.row_factors is not None:
            self.scaled_row_factors = self.row_factors * self.scale
        elif self.is_factored:
            self.scaled_row_factors = rows.new_full((len(rows),), self.scale)

    def operand(self, place: Any, block: Tensor) -> Operand:
        """Prepare the weight rows of a chunk, which have this place in the weight."""
        lengths = self.lengths[place]
        if self._is_bf16:
            return Operand(block, lengths)
        return Operand(block / lengths.unsqueeze(1), lengths).in_form(self._form)

    def products(self, block: Operand) -> tuple[Tensor, Factors]:
        """Return the products (G, C) of a prepared chunk, and the factors that make them logits."""
        factors = self.scaled_row_factors, block.factors
        if self.is_factored:
            return product(self.left.left, block.right), factors
        found = block.rows.new_empty(len(self.left.rows), len(block.rows))
        return torch.addmm(found, self.left.rows, block.rows.t(), beta=0, alpha=self.scale, out=found), factors


class Chunk(NamedTuple):
    """How products become logits.

    Attributes:
        of_rows: (G,), factors of the rows. None means 1.
        of_columns: (C,), factors of the classes. None means 1.
        targets: Places of the targets.
        log_weight: (C,), added to the logits, or None.
    """

    of_rows: Tensor | None
    of_columns: Tensor | None
    targets: Targets
    log_weight: Tensor | None

    def of_logits(self) -> Chunk:
        """Return the same for products that are logits already."""
        return Chunk(None, None, self.targets, None)

    def logits(self, products: Tensor, plus: Tensor | None = None) -> Tensor:
        """Return the logits, plus (G, 1) numbers, in the memory of the products unless they are compiled."""
        logits = add_factors_(products, self.of_rows, self.of_columns, plus)
        return logits if self.log_weight is None else logits.add_(self.log_weight)


def class_stats(products: Tensor, chunk: Chunk, target: Tensor, has_margin: bool, keep: bool) -> Any:
    """Return the targets' logits, the maximum and the sum of exponentials of a chunk's rows, (G,) each, and the logits if they are kept.

    Args:
        products: (G, C). Overwritten.
        chunk: What makes them logits.
        target: (G,), the logits of targets so far.
        has_margin: True if these are complete, margin included. If False, this chunk's are computed by this call.
        keep: True if the logits are needed again.
    """
    logits = chunk.logits(products)
    if has_margin:
        chunk.targets.put_(logits, target)
    else:
        target = chunk.targets.entries_or(target, logits)
    return target, max_and_sum_exp(logits, keep=keep), logits if keep else None


def class_terms(
    products: Tensor, chunk: Chunk, minus_lse: Tensor, at_targets: Tensor | None, factors: Factors, term_count: int
) -> GradTerms:
    """Return the gradient of a chunk's logits (``operands.split``): the softmax, less 1 at the targets.

    Args:
        products: (G, C). Overwritten.
        chunk: What makes them logits.
        minus_lse: (G, 1), less the log-sum-exp of the rows over the classes of all ranks.
        at_targets: (G,), the gradient at the targets in place of the softmax less 1.
        factors: Factors of the gradient's rows and columns.
        term_count: Same as for ``split``.
    """
    softmax = chunk.logits(products, minus_lse).exp_()
    if at_targets is None:
        chunk.targets.add_(softmax, -1.0)
    else:
        chunk.targets.put_(softmax, at_targets)
    return split(softmax, *factors, term_count)


class _SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedSoftmax, has_backward: bool, rows: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        head, classes = call.head, call.classes
        targets = classes.local_targets(listed=head.collects_angles)
        # 1. the target's logit if its class is on this rank, otherwise 0: a sum over ranks completes it
        ctx.slope = None
        if head.has_margin:
            target, ctx.slope = call.target_logits(rows, weight, targets, with_slope=has_backward)
        else:
            target = rows.new_zeros(len(rows))
        # 2. maximum and sum of exponentials over this rank's classes, chunk by chunk
        local_lse: LogSumExp | RunningLogSumExp | None = None
        is_one_chunk = 0 < classes.number <= classes.chunk
        if not is_one_chunk:
            local_lse = RunningLogSumExp(len(rows), rows)
        penalty: Number = 0.0
        divisor: Number = 0.0
        cosines = _Cosines(call, rows, weight) if head.is_cosine else None
        ctx.kept_logits = None
        for start, stop, block in classes.chunks(weight if cosines is None else cosines.weight):
            place, factors = classes.weight_rows(start, stop), NO_FACTORS
            if cosines is None:
                products = head.logits(rows, block)
                targets.in_chunk(start, stop).add_(products, head.target_offset)
            else:
                products, factors = cosines.products(cosines.operand(place, block))
            # so few classes are not computed twice
            keeps = cosines is not None and is_one_chunk and has_backward
            chunk = call.chunk(targets, start, stop, factors)
            target, piece, ctx.kept_logits = call.run(class_stats, products, chunk, target, head.has_margin, keeps)
            if isinstance(local_lse, RunningLogSumExp):
                local_lse.add_piece(piece)
            else:
                local_lse = LogSumExp(*piece)
            if call.penalty is not None:
                terms, number = call.penalty(weight[place])
                penalty, divisor = penalty + terms, divisor + number
        # 3. the same over the classes of all ranks
        assert local_lse is not None
        numbers = [penalty, divisor, targets.count(), head.angle_sum(targets.rows)]
        global_lse, target, numbers = _combine_ranks(local_lse, target, numbers, call.group)
        penalty, divisor, target_count, angles = numbers
        # 4. the loss: relative to the maximum, so that one far below its logits keeps its digits
        above_maximum = global_lse.above_maximum()
        losses = (global_lse.maximum - target) + above_maximum
        ctx.call, ctx.targets = call, targets
        ctx.cosines = None if cosines is None else (cosines.weight, cosines.lengths)
        ctx.save_for_backward(rows, weight, global_lse.maximum + above_maximum, losses)
        if isinstance(target_count, Tensor):
            # a row of a missing class gets none: to raise here would wait for the device
            losses = torch.where(target_count == len(rows), losses, torch.nan)
        # further gradients that the call needs
        penalty_sum = penalty_divisor = angle_sum = None
        if call.penalty is not None:
            penalty_sum, penalty_divisor = _as_tensor(penalty, rows), _as_tensor(divisor, rows)
        if head.collects_angles:
            angle_sum = _as_tensor(angles, rows)
        ctx.mark_non_differentiable(*(number for number in (penalty_divisor, angle_sum) if number is not None))
        return losses, penalty_sum, penalty_divisor, angle_sum

    @staticmethod
    @once_differentiable_strict("ClassShardedLoss")
    def backward(ctx: Any, grad: Tensor, grad_penalty: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        call: ShardedSoftmax = ctx.call
        classes, head, targets = call.classes, call.head, ctx.targets
        rows, weight, lse, losses = ctx.saved_tensors
        *_, wants_rows, wants_weight = ctx.needs_input_grad
        # 1. the targets' own part, through their margin: the probability less 1
        at_targets = grad_target = None
        if ctx.slope is not None:
            # a second backward may need them again
            cosines, margins = ctx.slope
            own_share = targets.of(torch.expm1(-losses))
            at_targets = targets.spread(torch.autograd.grad(margins, cosines, own_share, retain_graph=True)[0])
        elif head.has_margin:
            at_targets = torch.zeros_like(lse)
            if not targets.are_none:
                grad_target = grad * torch.expm1(-losses)
        # 2. chunks write their rows of the weight's gradient, all of them without sampling. The first chunk of cosines overwrites the rows'
        grad_rows = (torch.empty_like if head.is_cosine and classes.number else torch.zeros_like)(rows)
        grad_weight = (torch.empty_like if classes.sampled is None else torch.zeros_like)(weight)
        step = _Backward(
            call, rows, weight, targets, -lse.unsqueeze(1), at_targets, grad, grad_penalty, grad_rows, grad_weight
        )
        # 3. through the logits of all classes
        if head.is_cosine:
            kept, ctx.kept_logits = ctx.kept_logits, None
            step.add_products_(_Cosines(call, rows, weight, ctx.cosines), kept)
        else:
            step.add_chunks_()
        # 4. through the targets' logits, if their margin was not part of step 3
        if grad_target is not None:
            step.add_targets_(grad_target)
        # 5. replicas saw other rows
        if call.replica_group is not None and wants_weight:
            raw_collectives.start_mean(grad_weight, group=call.replica_group)()  # in its memory
        if call.on_backward is not None and classes.sampled is not None:
            call.on_backward(classes.sampled, grad_weight)
        # 6. DDP takes the mean over ranks of the encoder's gradient
        rows_grad = for_mean_over_ranks(grad_rows, call.group) if wants_rows else None
        return None, None, rows_grad, grad_weight if wants_weight else None


class _Backward(NamedTuple):
    """The state of one backward, which adds up the gradients of rows and weight from the gradients of the losses.

    Attributes:
        call: What forward evaluated.
        rows: (G, D).
        weight: (c * K, D).
        targets: The rows with a class on this rank.
        minus_lse: (G, 1), less each row's log-sum-exp over the classes of all ranks.
        at_targets: (G,), the targets' share of the gradient of the logits, through their margin. 0 if it is computed separately, None
            without a margin.
        grad: (G,), of the losses.
        grad_penalty: 0-dim, of the regulariser's terms. None without a regulariser.
        grad_rows: (G, D), the result.
        grad_weight: (c * K, D), the result.
    """

    call: ShardedSoftmax
    rows: Tensor
    weight: Tensor
    targets: LocalTargets
    minus_lse: Tensor
    at_targets: Tensor | None
    grad: Tensor
    grad_penalty: Tensor | None
    grad_rows: Tensor
    grad_weight: Tensor

    def add_chunks_(self) -> None:
        """Add the gradients through the logits of all classes: for any head, by autograd on each chunk."""
        classes = self.call.classes
        for start, stop, block in classes.chunks(self.weight):

            def grad_of(logits: Tensor, start: int = start, stop: int = stop) -> Tensor:
                # reuse the logits' memory: the steps of a head do not save their results for backward
                chunk = self.call.chunk(self.targets, start, stop)
                chunk.targets.add_(logits, self.call.head.target_offset)
                return class_terms(logits, chunk, self.minus_lse, self.at_targets, (self.grad, None), 0)[0]

            found_rows, found_block = _vjp(self.call.head.logits, self.rows, block, grad_of)
            self.grad_rows.add_(found_rows)
            self._put_block_(classes.weight_rows(start, stop), found_block)

    def add_products_(self, cosines: _Cosines, kept: Tensor | None) -> None:
        """Add the same for cosines, with explicit formulas: half the passes over memory. The gradient of the rows is overwritten.

        Args:
            cosines: Computes the logits.
            kept: Logits of the only chunk, from forward. Overwritten. If None, they are recomputed.
        """
        call, factors, is_factored, left = self.call, self.grad, cosines.is_factored, cosines.left
        classes = call.classes
        if cosines.row_factors is not None:
            factors = factors * cosines.row_factors
        # the gradient of the losses is a factor of float32 rows. Rows of bf16, and parts, are unchanged: it is a factor of their products
        weighted = left if is_factored else Operand(left.rows * factors.unsqueeze(1))
        for start, stop, block in classes.chunks(cosines.weight):
            # logits and softmax of the chunk
            place = classes.weight_rows(start, stop)
            right = cosines.operand(place, block)
            products, of_products = cosines.products(right) if kept is None else (kept, NO_FACTORS)
            chunk = call.chunk(self.targets, start, stop, of_products)
            if kept is not None:
                chunk = chunk.of_logits()
            of_grad = (factors, right.factors) if is_factored else NO_FACTORS
            term_count = grad_terms_of(call.form, products.device)
            share = call.run(class_terms, products, chunk, self.minus_lse, self.at_targets, of_grad, term_count)
            # to the rows
            add_to_left_(self.grad_rows, share, right, scale=cosines.scale, overwrite=not start)
            # to the weight rows, in the memory that they keep if no term is added to them
            stays = isinstance(place, slice) and self.call.penalty is None
            out = self.grad_weight[place] if stays else torch.empty_like(right.rows, dtype=self.weight.dtype)
            add_to_right_(out, share, weighted, scale=cosines.scale, overwrite=True)
            right.vjp(out, out)
            if not stays:
                self._put_block_(place, out)
        if not is_factored:
            self.grad_rows.mul_(self.grad.unsqueeze(1))
        elif left.lengths is not None:
            self.grad_rows.mul_(left.lengths.unsqueeze(1))

    def add_targets_(self, grad_target: Tensor) -> None:
        """Add the gradients through the targets' logits, margin included, for the rows with a class on this rank."""
        head, targets = self.call.head, self.targets
        index, grad = targets.weight_rows(), targets.silence(targets.of(grad_target))
        picked = self.weight[index].view(-1, head.per_class, self.rows.shape[1])
        found_rows, found_weight = _vjp(head.targets, targets.of(self.rows), picked, lambda _: grad)
        targets.add_to_(self.grad_rows, found_rows)
        self.grad_weight.index_add_(0, index, targets.silence(found_weight).reshape(-1, self.rows.shape[1]))

    def _put_block_(self, place: Any, grad_block: Tensor) -> None:
        """Write the gradient of a block of weight rows, with the regulariser's gradient added."""
        if self.call.penalty is not None:
            leaf = self.weight[place].detach().requires_grad_()
            with own_graph():
                value, _ = self.call.penalty(leaf)
            grad_block = grad_block + torch.autograd.grad(value, leaf, self.grad_penalty)[0]
        self.grad_weight[place] = grad_block


def _vjp(
    logits_of: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weight: Tensor, grad_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of rows and weight rows by autograd.

    Args:
        logits_of: Computes logits from both.
        rows: (n, D).
        weight: Weight rows.
        grad_of: Returns the gradient of the logits, which it may overwrite.
    """
    leaves = rows.detach().requires_grad_(), weight.detach().requires_grad_()
    with own_graph():
        logits = logits_of(*leaves)
    return torch.autograd.grad(logits, leaves, grad_of(logits.detach()))


def _as_tensor(value: Number, like: Tensor) -> Tensor:
    """Return a number as a separate 0-dim tensor."""
    return value.clone() if isinstance(value, Tensor) else like.new_full((), value)


def _combine_ranks(
    lse: LogSumExp | RunningLogSumExp, target: Tensor, numbers: list[Number], group: Group
) -> tuple[LogSumExp | RunningLogSumExp, Tensor, list[Number]]:
    """Return the statistics over the classes of all ranks, and the sums of the numbers, in rank order: the same on every rank."""
    rows = len(target)
    if process_groups.world_size(group) == 1:
        return lse, target, numbers
    extra = target.new_zeros(len(numbers))
    for index, value in enumerate(numbers):
        if isinstance(value, Tensor) or value:
            extra[index] = value
    local = torch.cat([lse.maximum, lse.sum_exp, target, extra])
    sizes = [rows, rows, rows, len(extra)]
    maxima, sum_exps, targets, extras = torch.split(raw_collectives.gather_stacked(local, group), sizes, dim=1)
    return LogSumExp.merged(maxima, sum_exps), targets.sum(0), list(extras.sum(0).unbind())


# ---------------------------------------------------------------------- logits and best classes, for evaluation


@dataclass(frozen=True)
class ClassLogits:
    """Computes the logits of all ranks' rows for all classes, and their best classes, for one call. Without gradient.

    Every rank computes the logits of the rows of all ranks with its own classes, chunk by chunk. All of them go to the ranks that own the
    rows. Of the best k classes only each rank's best k do, and the rank of the row keeps k.

    Attributes:
        head: Computes logits.
        sharded: Classes of each rank.
        weight: (c * K, D), this rank's rows.
        embeddings: (G, D), of all ranks.
        counts: Each rank's rows among them.
        chunk: Number of classes with live logits at a time, if not all are kept.
        group: Process group over which the classes are sharded.
    """

    head: Head
    sharded: ShardedWeight
    weight: Tensor
    embeddings: Tensor
    counts: Sequence[int]
    chunk: int
    group: Group

    def of_all_classes(self) -> Tensor:
        """Return (B, C), the logits of this rank's rows. Communication: one exchange of G x c logits."""
        # logits of all rows with this rank's classes
        blocks = [logits for _, logits in self._blocks()]
        local = torch.cat(blocks, 1) if blocks else self.embeddings.new_zeros(len(self.embeddings), 0)
        if process_groups.world_size(self.group) == 1:
            return local
        # to the rank whose rows they are
        return self._to_own_rows(local, self.sharded.classes_per_rank())

    def best(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest logits of this rank's rows (B, k) and their labels (B, k), the largest first.

        Communication: two exchanges of G x k numbers.
        """
        # the best of this rank's classes, for all rows, chunk by chunk
        best = self.embeddings.new_full((len(self.embeddings), k), -torch.inf)
        labels = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
        for start, shown in self._blocks():
            logits = shown / self.head.output_scale  # of the softmax, where the largest is the best
            block_labels = torch.arange(start, start + logits.shape[1], device=best.device).expand_as(logits)
            best, place = torch.cat([best, logits], 1).topk(k, 1)
            labels = torch.cat([labels, block_labels], 1).gather(1, place)
        # the best of all ranks' best, for this rank's rows
        world_size = process_groups.world_size(self.group)
        if world_size > 1:
            candidates = self._to_own_rows(best, [k] * world_size)
            candidate_labels = self._to_own_rows(labels, [k] * world_size)
            best, place = candidates.topk(k, 1)
            labels = candidate_labels.gather(1, place)
        return best * self.head.output_scale, labels

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the first class and the logits, as the loss shows them, of each chunk of this rank's classes."""
        head, shard, rows = self.head, self.sharded.shard, self.head.prepare(self.embeddings)
        for start in range(0, shard.classes, self.chunk):
            block = self.weight[start * head.per_class : (start + self.chunk) * head.per_class]
            with precision.full_precision(rows.dtype, [rows.device.type]):
                logits = head.logits(rows, block.to(rows.dtype)) * head.output_scale
            yield shard.start + start, logits

    def _to_own_rows(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """Give each rank the rows that are its own, the columns of all ranks side by side.

        Args:
            columns: (G, n), this rank's.
            widths: Each rank's n.

        Returns:
            (B, sum of n).
        """
        rows = self.counts[process_groups.rank(self.group)]
        parts = [part.reshape(-1) for part in torch.split(columns, list(self.counts))]
        received = raw_collectives.all_to_all(parts, [rows * width for width in widths], self.group)
        return torch.cat([part.view(rows, width) for part, width in zip(received, widths, strict=True)], 1)
