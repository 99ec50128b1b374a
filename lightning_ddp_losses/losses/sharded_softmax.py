"""Computes the softmax cross entropy over classes that lie on different ranks, in chunks of classes none of which outlives its turn.

Forward: each rank's maximum and sum of exponentials per row over its own classes, chunk by chunk, and the target's logit from
the rank that has its class; one gather of these three makes every row's loss known on every rank. Backward: the chunks again, now with
the softmax, for the gradient of this rank's weight rows (complete) and of all embeddings (this rank's part).

Legend: ``W`` ranks, ``G`` rows over all ranks, ``D`` embedding size, ``c`` classes on this rank, ``K`` weight rows per class, ``n`` rows
whose class is on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather, group_for, reduce_mean_
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.log_sum_exp import RunningLogSumExp
from lightning_ddp_losses.losses.partial_sums import Number, for_mean_over_ranks
from lightning_ddp_losses.losses.products import (
    SMALLEST_LENGTH,
    Operand,
    ProductForm,
    as_operand,
    as_slope_,
    lengths_of,
    product,
)
from lightning_ddp_losses.losses.sharded_weight import rows_of_classes

Penalty = Callable[[Tensor], tuple[Tensor, Number]]


@dataclass(frozen=True)
class LocalClasses:
    """Says which of this rank's classes a call looks at, and finds their rows in the weight.

    Attributes:
        labels: (G,) each row's class as a position among the classes looked at, -1 where another rank has it.
        chunk: How many classes have their logits alive at a time.
        per_class: K.
        sampled: (c',) the classes looked at, as positions among this rank's; None: all of them.
    """

    labels: Tensor
    chunk: int
    per_class: int
    sampled: Tensor | None = None

    def chunks(self, weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first and one past the last class of each chunk, and their weight rows (classes * K, D)."""
        total = len(weight) // self.per_class if self.sampled is None else len(self.sampled)
        for start in range(0, total, self.chunk):
            stop = min(start + self.chunk, total)
            yield start, stop, weight[self.weight_rows(start, stop)]

    def weight_rows(self, start: int, stop: int) -> Any:
        """Return where the weight rows of some of the classes looked at are: a slice, or an index."""
        if self.sampled is None:
            return slice(start * self.per_class, stop * self.per_class)
        return rows_of_classes(self.sampled[start:stop], self.per_class)

    def local_targets(self, weight: Tensor, *, listed: bool = False) -> LocalTargets:
        """Find the rows whose class is on this rank.

        Args:
            weight: (c * K, D), this rank's.
            listed: They must be listed: nothing may be computed of the other rows.
        """
        is_local = self.labels >= 0
        # a rank without classes (7 over 4 ranks) has no row that could stand beside those of others
        if not len(weight):
            return LocalTargets(is_local, torch.empty(0, dtype=torch.int64, device=self.labels.device))
        if waits_to_list(self.labels) and self.sampled is None and not listed:
            return LocalTargets(is_local, None)
        return LocalTargets(is_local, is_local.nonzero().squeeze(1))

    def target_rows(self, targets: LocalTargets) -> Tensor:
        """Return the index (n * K,) of the weight rows of these targets' classes."""
        labels = targets.of(self.labels)
        if targets.listed is None:
            labels = labels.clamp(min=0)
        if self.sampled is not None:
            labels = self.sampled[labels]
        return rows_of_classes(labels, self.per_class)

    def targets_in(self, start: int, stop: int) -> ChunkTargets:
        """Find the targets that lie in a chunk."""
        is_inside = (self.labels >= start) & (self.labels < stop)
        return ChunkTargets(is_inside, (self.labels - start).clamp(0, stop - start - 1).unsqueeze(1))


@dataclass(frozen=True)
class LocalTargets:
    """The rows whose class is on this rank.

    Attributes:
        is_local: (G,), which they are.
        listed: (n,), their places; None: all G rows are computed, and those of others count 0.
    """

    is_local: Tensor
    listed: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether there are none, as far as the host knows."""
        return self.listed is not None and not len(self.listed)

    def of(self, values: Tensor) -> Tensor:
        """Take these rows of (G, ...) values."""
        return values if self.listed is None else values[self.listed]

    def add_to_(self, whole: Tensor, values: Tensor) -> Tensor:
        """Add these rows' values to (G, ...); return it."""
        if self.listed is None:
            return whole.add_(self.silence(values))
        return whole.index_add_(0, self.listed, values)

    def silence(self, values: Tensor) -> Tensor:
        """Return these rows' values, 0 for those that only stand beside them."""
        if self.listed is None:
            return torch.where(_like_rows(self.is_local, values), values, 0)
        return values


def _like_rows(mask: Tensor, values: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (values.ndim - 1))


@dataclass(frozen=True)
class ChunkTargets:
    """The targets in a chunk of logits, of which each row has one entry or none; nothing is listed, which would wait for its length.

    Attributes:
        is_inside: (G,), whether a row's target is in the chunk.
        columns: (G, 1), where; of the others any column.
    """

    is_inside: Tensor
    columns: Tensor

    def entries(self, logits: Tensor) -> Tensor:
        """Return each row's entry, (G,)."""
        return logits.gather(1, self.columns).squeeze(1)

    def put_(self, logits: Tensor, values: Tensor | float) -> None:
        """Write (G,) values to the targets, or one to all of them."""
        new = torch.where(self.is_inside, values, self.entries(logits))
        logits.scatter_(1, self.columns, new.unsqueeze(1))

    def add_(self, logits: Tensor, value: float) -> None:
        """Add a number to the targets."""
        added = self.is_inside.to(logits.dtype).mul_(value)
        logits.scatter_add_(1, self.columns, added.unsqueeze(1))


def waits_to_list(labels: Tensor) -> bool:
    """Say whether the host would wait to learn how many rows there are; samples are drawn on the host and wait anyway."""
    return labels.device.type != "cpu"


class RowLosses(NamedTuple):
    """What a call knows over all ranks, equal on every rank.

    Attributes:
        losses: (G,) ``logsumexp_j z_ij - z_iy``; not a number for a row whose class no rank has.
        penalty: 0-dim, the regulariser's terms, summed; with gradient, as the losses.
        penalty_divisor: 0-dim, the number of these terms.
        angle_sum: 0-dim, the sum of the targets' angles where the loss collects statistics.
    """

    losses: Tensor
    penalty: Tensor
    penalty_divisor: Tensor
    angle_sum: Tensor


class Operands(NamedTuple):
    """What the logits are made of, or the gradients of that.

    Attributes:
        rows: (G, D) as ``Head.prepare`` gives them.
        scale: (G, 1) or (1, 1), likewise.
        weight: (c * K, D), this rank's.
    """

    rows: Tensor
    scale: Tensor
    weight: Tensor


@dataclass(frozen=True)
class ShardedSoftmax:
    """Evaluates one call.

    Attributes:
        head: Computes logits.
        classes: Which of this rank's classes are looked at.
        log_weight: (c',) added to each class's logit in the sum, 0 for a target (sampling); None: nothing.
        penalty: Returns a block of weight rows' summed regulariser terms and their number; None: no regulariser.
        group: Process group over which the classes are sharded.
        replica_group: Ranks that have the same classes in other parts of the world; None: there are none.
        form: How rows and weight rows are multiplied (``products``).
        lengths: (G,), what rows were divided by, where that form needs it; None: they were not.
        on_backward: Called in backward with the sampled classes, which get a gradient, and the gradient (c * K, D) of the weight rows.
    """

    head: Head
    classes: LocalClasses
    log_weight: Tensor | None = None
    penalty: Penalty | None = None
    group: Group = None
    replica_group: Group = None
    form: ProductForm = "float32"
    lengths: Tensor | None = None
    on_backward: Callable[[Tensor, Tensor], None] | None = None

    def row_losses(self, rows: Tensor, scale: Tensor, weight: Tensor) -> RowLosses:
        """Return ``logsumexp_j z_ij - z_iy`` of every row, over the classes of all ranks.

        Args:
            rows: (G, D) as ``Head.prepare`` gives them, equal on every rank.
            scale: (G, 1) or (1, 1), likewise.
            weight: (c * K, D), this rank's.

        Gradient: of ``weight`` the complete one; of ``rows`` and ``scale`` this rank's part, such that the mean over ranks of the sums over
            ranks is complete. All ranks must back-propagate the same.

        Communication: one gather of (3 G + 4) numbers; none in backward but, with replicas, one mean of the weight's gradient over them.
        """
        return RowLosses(*_SoftmaxFunction.apply(self, rows, scale, weight))  # type: ignore[no-untyped-call]

    def target_logits(self, operands: Operands, targets: LocalTargets) -> Tensor:
        """Compute the logits (G,) of the targets on this rank, with their margin; 0 where another rank has the class."""
        rows, scale, weight = operands
        if targets.are_none:
            return rows.new_zeros(len(rows))
        picked_scale = scale
        if self.head.has_row_scale:
            picked_scale = targets.of(scale)
        picked = weight[self.classes.target_rows(targets)].view(-1, self.head.per_class, rows.shape[1])
        logits = self.head.targets(targets.of(rows), picked_scale, picked)
        return targets.add_to_(rows.new_zeros(len(rows)), logits)

    def logits(self, operands: Operands, block: Tensor, rows: Operand | None) -> Tensor:
        """Compute the logits (G, c) of a block of classes, no margin in them.

        Args:
            operands: What they are made of.
            block: (c * K, D), weight rows.
            rows: The rows, prepared for products on tensor cores; None: the head computes.
        """
        if rows is None:
            return self.head.logits(operands.rows, operands.scale, block)
        return product(rows, self.weight_operand(block), operands.scale)

    def row_operand(self, rows: Tensor) -> Operand | None:
        """Prepare the rows for products on tensor cores; None: the head computes."""
        return None if self.form == "float32" else as_operand(rows, self.form, self.lengths)

    def weight_operand(self, block: Tensor) -> Operand:
        """Prepare a block of weight rows, likewise, as unit rows."""
        lengths = lengths_of(block)
        if self.form == "bf16":  # as they are, without the detour over unit rows
            return Operand((block.to(torch.bfloat16),), lengths)
        return as_operand(block / lengths.unsqueeze(1), self.form)


class _SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: ShardedSoftmax, rows: Tensor, scale: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head, classes = call.head, call.classes
        targets = classes.local_targets(weight, listed=head.collects_angles)
        # 1. the target's logit where its class is here, 0 elsewhere: a sum over ranks will know it
        target = rows.new_zeros(len(rows))
        extra = rows.new_zeros(4)  # penalty, its number of terms, rows whose class is here, their angles
        if head.has_margin:
            target = call.target_logits(Operands(rows, scale, weight), targets)
            extra[3] = head.angle_sum(targets.of(targets.is_local))
        extra[2] = targets.is_local.sum()
        # 2. maximum and sum of exponentials over this rank's classes, chunk by chunk
        local_lse = RunningLogSumExp.empty(len(rows), rows)
        operands, row_operand = Operands(rows, scale, weight), call.row_operand(rows)
        for start, stop, block in classes.chunks(weight):
            logits = call.logits(operands, block, row_operand)
            inside = classes.targets_in(start, stop)
            if head.has_margin:
                inside.put_(logits, target)
            else:
                inside.add_(logits, head.target_offset)
                target = torch.where(inside.is_inside, inside.entries(logits), target)
            if call.log_weight is not None:
                logits += call.log_weight[start:stop]
            local_lse.accumulate_(logits)
            if call.penalty is not None:
                terms, number = call.penalty(block)
                extra[0] += terms
                extra[1] += number
        # 3. the same over the classes of all ranks
        global_lse, target, extra = _combine_ranks(local_lse, target, extra, call.group)
        # 4. the loss: relative to the maximum, so that one far below its logits keeps its digits
        losses = (global_lse.maximum - target) + global_lse.above_maximum()
        ctx.call, ctx.targets = call, targets
        ctx.save_for_backward(rows, scale, weight, global_lse.finalize(), losses)
        penalty, divisor, found_rows, angle_sum = extra.unbind()
        penalty, divisor, angle_sum = penalty.clone(), divisor.clone(), angle_sum.clone()
        ctx.mark_non_differentiable(divisor, angle_sum)
        # a row whose class nobody has gets none: to raise here would wait for the device
        losses = torch.where(found_rows == len(rows), losses, torch.nan)
        return losses, penalty, divisor, angle_sum

    @staticmethod
    @once_differentiable_strict("ClassShardedLoss")
    def backward(ctx: Any, grad: Tensor, grad_penalty: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        call: ShardedSoftmax = ctx.call
        classes, head = call.classes, call.head
        rows, scale, weight, lse, losses = ctx.saved_tensors
        operands = Operands(rows, scale, weight)
        _, wants_rows, wants_scale, wants_weight = ctx.needs_input_grad
        # 1. chunks write their rows of the weight's gradient, all of them where nothing is sampled
        empty = torch.empty_like if classes.sampled is None else torch.zeros_like
        grads = Operands(torch.zeros_like(rows), torch.zeros_like(scale), empty(weight))
        # 2. through the logits of all classes
        if call.form != "float32":
            _add_product_grads_(grads, call, operands, lse, grad, grad_penalty)
        elif head.is_cosine:
            _add_cosine_grads_(grads, call, operands, lse, grad, grad_penalty)
        else:
            _add_chunk_grads_(grads, call, operands, lse, grad, grad_penalty)
        # 3. through the targets' logits, margin included
        if head.has_margin and not ctx.targets.are_none:
            grad_target = grad * torch.expm1(-losses)  # the target's probability, less 1
            _add_target_grads_(grads, call, operands, grad_target, ctx.targets)
        # 4. replicas saw other rows
        if call.replica_group is not None and wants_weight:
            reduce_mean_(grads.weight, group=call.replica_group)
        if call.on_backward is not None and classes.sampled is not None:
            call.on_backward(classes.sampled, grads.weight)
        # 5. DDP takes the mean over ranks of what goes on to the encoder
        grad_rows = for_mean_over_ranks(grads.rows, call.group) if wants_rows else None
        grad_scale = for_mean_over_ranks(grads.scale, call.group) if wants_scale else None
        grad_weight = grads.weight if wants_weight else None
        return None, grad_rows, grad_scale, grad_weight


def _softmax_(logits: Tensor, call: ShardedSoftmax, lse: Tensor, start: int, stop: int) -> Tensor:
    """Turn the logits of a chunk into the loss's gradient of them: the softmax, less 1 at the targets.

    A target with a margin counts 0: its gradient takes its own way.
    """
    inside = call.classes.targets_in(start, stop)
    if call.head.has_margin:
        inside.put_(logits, -torch.inf)
    else:
        inside.add_(logits, call.head.target_offset)
    if call.log_weight is not None:
        logits += call.log_weight[start:stop]
    logits.sub_(lse.unsqueeze(1)).exp_()
    if not call.head.has_margin:
        inside.add_(logits, -1.0)
    return logits


def _add_chunk_grads_(
    grads: Operands, call: ShardedSoftmax, operands: Operands, lse: Tensor, grad: Tensor, grad_penalty: Tensor
) -> None:
    """Add the gradients through the logits of all classes: for any head, by autograd on each chunk."""
    rows, scale, weight = operands
    with_scale = call.head.has_row_scale
    for start, stop, block in call.classes.chunks(weight):
        leaves = [rows.detach().requires_grad_(), block.detach().requires_grad_()]
        if with_scale:
            leaves.append(scale.detach().requires_grad_())
        # the chunk's logits, with their graph
        with own_graph():
            logits = call.head.logits(leaves[0], leaves[2] if with_scale else scale, leaves[1])
        # their gradient, in their memory: it is nobody else's, as no step of a head keeps its result for backward
        grad_logits = _softmax_(logits.detach(), call, lse, start, stop).mul_(grad.unsqueeze(1))
        grad_rows, grad_block, *grad_scale = torch.autograd.grad(logits, leaves, grad_logits)
        grads.rows.add_(grad_rows)
        if with_scale:
            grads.scale.add_(grad_scale[0])
        place = call.classes.weight_rows(start, stop)
        grads.weight[place] = _with_penalty_grad(grad_block, call.penalty, block, grad_penalty)


def _add_cosine_grads_(
    grads: Operands, call: ShardedSoftmax, operands: Operands, lse: Tensor, grad: Tensor, grad_penalty: Tensor
) -> None:
    """Add the same for cosines, by hand: half the passes over memory."""
    rows, scale, weight = operands
    scaled = rows * scale
    weighted = scaled * grad.unsqueeze(1)
    for start, stop, block in call.classes.chunks(weight):
        # logits and softmax of the chunk
        norms = torch.linalg.vector_norm(block, dim=1, keepdim=True)
        unit = block / norms.clamp(min=1e-12)
        share = _softmax_(scaled @ unit.t(), call, lse, start, stop)
        # to the rows; what multiplies each row comes after the last chunk
        grads.rows.addmm_(share, unit)
        # to the weight rows: the part along a row is lost in its normalisation
        grad_unit = share.t() @ weighted
        along = torch.where(norms > 1e-12, torch.linalg.vecdot(grad_unit, unit).unsqueeze(1), 0.0)
        grad_block = grad_unit.addcmul_(unit, along, value=-1).div_(norms.clamp(min=1e-12))
        place = call.classes.weight_rows(start, stop)
        grads.weight[place] = _with_penalty_grad(grad_block, call.penalty, block, grad_penalty)
    grads.rows.mul_(grad.unsqueeze(1))
    if call.head.has_row_scale:
        grads.scale.add_((grads.rows * rows).sum(1, keepdim=True))
    grads.rows.mul_(scale)


def _add_product_grads_(
    grads: Operands, call: ShardedSoftmax, operands: Operands, lse: Tensor, grad: Tensor, grad_penalty: Tensor
) -> None:
    """Add the same for cosines whose products run on tensor cores; the scale is one number."""
    rows, scale, weight = operands
    row_operand = call.row_operand(rows)
    assert row_operand is not None
    for start, stop, block in call.classes.chunks(weight):
        # logits, softmax and the loss's gradient of the chunk
        weight_operand = call.weight_operand(block)
        share = _softmax_(product(row_operand, weight_operand, scale), call, lse, start, stop)
        slope = as_slope_(share.mul_(grad.unsqueeze(1)).mul_(scale), row_operand, weight_operand)
        # to the rows, and to the weight's unit rows
        slope.add_to_left_(grads.rows)
        grad_unit = torch.zeros_like(block)
        slope.add_to_right_(grad_unit)
        # to the weight rows: the part along a row is lost in its normalisation
        lengths = lengths_of(block).unsqueeze(1)
        unit = block / lengths
        along = torch.where(lengths > SMALLEST_LENGTH, torch.linalg.vecdot(grad_unit, unit).unsqueeze(1), 0.0)
        grad_block = grad_unit.addcmul_(unit, along, value=-1).div_(lengths)
        place = call.classes.weight_rows(start, stop)
        grads.weight[place] = _with_penalty_grad(grad_block, call.penalty, block, grad_penalty)


def _with_penalty_grad(grad_block: Tensor, penalty: Penalty | None, block: Tensor, grad_penalty: Tensor) -> Tensor:
    """Return the gradient of a block of weight rows, that of the regulariser added."""
    if penalty is None:
        return grad_block
    leaf = block.detach().requires_grad_()
    with own_graph():
        value, _ = penalty(leaf)
    return grad_block + torch.autograd.grad(value, leaf, grad_penalty)[0]


def _add_target_grads_(
    grads: Operands, call: ShardedSoftmax, operands: Operands, grad_target: Tensor, targets: LocalTargets
) -> None:
    """Add the gradients through the targets' logits, margin included, for the rows whose class is on this rank."""
    rows, scale, weight = operands
    with_scale = call.head.has_row_scale
    index = call.classes.target_rows(targets)
    picked = weight[index].view(-1, call.head.per_class, rows.shape[1])
    leaves = [targets.of(rows).detach().requires_grad_(), picked.detach().requires_grad_()]
    if with_scale:
        leaves.append(targets.of(scale).detach().requires_grad_())
    with own_graph():
        logits = call.head.targets(leaves[0], leaves[2] if with_scale else scale, leaves[1])
    grad_logits = targets.silence(targets.of(grad_target))
    grad_rows, grad_picked, *grad_scale = torch.autograd.grad(logits, leaves, grad_logits)
    targets.add_to_(grads.rows, grad_rows)
    if with_scale:
        targets.add_to_(grads.scale, grad_scale[0])
    grads.weight.index_add_(0, index, targets.silence(grad_picked).reshape(-1, rows.shape[1]))


def _combine_ranks(
    lse: RunningLogSumExp, target: Tensor, extra: Tensor, group: Group
) -> tuple[RunningLogSumExp, Tensor, Tensor]:
    """Return the statistics over the classes of all ranks, added in rank order: the same on every rank."""
    world, rows = process_groups.world_size(group), len(target)
    if world == 1:
        return lse, target, extra
    local = torch.cat([lse.maximum, lse.sum_exp, target, extra])
    gathered = local.new_empty((world, len(local)))
    gather(gathered.view(-1), local, group=group_for(local, group))
    maxima, sums, targets, extras = torch.split(gathered, [rows, rows, rows, len(extra)], dim=1)
    return RunningLogSumExp.merged(maxima, sums), targets.sum(0), extras.sum(0)
