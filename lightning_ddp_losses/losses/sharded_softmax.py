"""The softmax over classes that lie on different ranks, in chunks of classes, none of which outlives its turn.

Forward: each rank's maximum and sum of exponentials per row over its own classes, chunk by chunk, and the target's logit from
whoever holds its class; one gather of these three makes every row's loss known on every rank. Backward: the chunks again,
now with the softmax, for the gradient of the held weight rows (complete) and of all embeddings (this rank's part).

Legend: ``W`` ranks, ``G`` rows over all ranks, ``D`` embedding size, ``c`` classes held, ``K`` weight rows per class, ``n`` rows
whose class is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather, group_for, reduce_mean_
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.partial_sums import for_mean_over_ranks

Penalty = Callable[[Tensor], tuple[Tensor, float]]


@dataclass(frozen=True)
class Held:
    """The classes of this rank that a step looks at.

    Attributes:
        head: The logits.
        labels: (G,) positions among the classes looked at, -1 for a row whose class is on another rank.
        chunk: Classes at a time.
        chosen: (c',) classes looked at, as positions among those held; None: all.
        log_weight: (c',) added to each class's logit in the sum, 0 for a target (sampling); None: nothing.
        penalty: Of a block of weight rows, its summed terms and their number; None: none.
        group: Process group.
        note: Told in backward which classes got a gradient.
        replicas: Ranks that hold the same classes in other parts of the world; None: there are none.
    """

    head: Head
    labels: Tensor
    chunk: int
    chosen: Tensor | None = None
    log_weight: Tensor | None = None
    penalty: Penalty | None = None
    group: Group = None
    replicas: Group = None
    note: Callable[[Tensor], None] | None = None

    def chunks(self, weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """First and one past the last class of each chunk, and their weight rows (classes * K, D)."""
        per = self.head.per_class
        total = len(weight) // per if self.chosen is None else len(self.chosen)
        for start in range(0, total, self.chunk):
            stop = min(start + self.chunk, total)
            yield start, stop, weight[self.rows_of(start, stop)]

    def rows_of(self, start: int, stop: int) -> Any:
        """Weight rows of some of the classes looked at: a slice, or an index."""
        per = self.head.per_class
        if self.chosen is None:
            return slice(start * per, stop * per)
        return self._rows(self.chosen[start:stop])

    def target_rows(self) -> Tensor:
        """(n * K,) weight rows of the target classes held."""
        held = self.labels[self.labels >= 0]
        return self._rows(held if self.chosen is None else self.chosen[held])

    def _rows(self, classes: Tensor) -> Tensor:
        per = self.head.per_class
        return (classes.unsqueeze(1) * per + torch.arange(per, device=classes.device)).view(-1)


def row_losses(held: Held, rows: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``logsumexp_j z_ij - z_iy`` of every row, over the classes of all ranks.

    Args:
        held: What this rank holds.
        rows: (G, D) as ``Head.prepare`` gives them, equal on every rank.
        scale: (G, 1) or (1, 1), likewise.
        weight: (c * K, D), this rank's.

    Returns:
        The losses (G,); the penalty's terms, summed (0-dim); and (4,) the same sum, the number of terms, the number of rows, and the sum
        of the targets' angles where the loss collects statistics. Over all ranks, equal on every rank.

    Gradient: of ``weight`` the complete one; of ``rows`` and ``scale`` this rank's part, such that the mean over ranks of the sums over
        ranks is complete. All ranks must back-propagate the same.

    Communication: one gather of (3 G + 4) numbers; none in backward but, with replicas, one mean of the weight's gradient over them.
    """
    losses, terms, counts = _ClassSoftmax.apply(held, rows, scale, weight)  # type: ignore[no-untyped-call]
    return losses, terms, counts


class _ClassSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Held, rows: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = held.labels >= 0
        top = rows.new_full((len(rows),), -torch.inf)
        total, target = torch.zeros_like(top), torch.zeros_like(top)
        extra = rows.new_zeros(4)  # penalty, its number of terms, rows whose class is held, their angles
        margin = held.head.has_margin
        if margin:
            target[own] = _target_logits(held, rows, scale, weight, own)
            extra[3] = held.head.angles(own)
        for start, stop, block in held.chunks(weight):
            logits = held.head.logits(rows, scale, block)
            where = _targets_in(held.labels, start, stop)
            if margin:
                logits[where] = target[where[0]]
            else:
                logits[where] += held.head.target_offset
                target[where[0]] = logits[where]
            if held.log_weight is not None:
                logits += held.log_weight[start:stop]
            higher = torch.maximum(top, logits.amax(1))
            total.mul_(torch.exp(top - higher)).add_(logits.sub_(higher.unsqueeze(1)).exp_().sum(1))
            top = higher
            if held.penalty is not None:
                value, number = held.penalty(block)
                extra[0] += value
                extra[1] += number
        extra[2] = own.sum()
        top, total, target, extra = _combine(top, total, target, extra, held.group)
        lse = top + total.log()
        ctx.held, ctx.own = held, own
        ctx.save_for_backward(rows, scale, weight, lse, target)
        ctx.mark_non_differentiable(extra)
        # a row whose class nobody holds has no loss; to raise here would wait for the device
        losses = torch.where(extra[2] == len(rows), lse - target, torch.nan)
        return losses, extra[0].clone(), extra

    @staticmethod
    @once_differentiable_strict("ClassShardedLoss")
    def backward(ctx: Any, grad: Tensor, grad_penalty: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        held: Held = ctx.held
        rows, scale, weight, lse, target = ctx.saved_tensors
        wants = ctx.needs_input_grad
        if held.note is not None and held.chosen is not None:
            held.note(held.chosen)
        d_rows, d_scale = torch.zeros_like(rows), torch.zeros_like(scale)
        d_weight = torch.zeros_like(weight) if held.chosen is not None else torch.empty_like(weight)
        backward = _cosine_backward if held.head.is_cosine else _chunk_backward
        backward(held, (rows, scale, weight), lse, (grad, grad_penalty), (d_rows, d_scale, d_weight))
        if held.head.has_margin and bool(ctx.own.any()):
            _add_targets(held, ctx.own, grad, lse, target, (rows, scale, weight), (d_rows, d_scale, d_weight))
        if held.replicas is not None and wants[3]:
            reduce_mean_(d_weight, group=held.replicas)
        for_mean = [
            for_mean_over_ranks(grad, held.group) if wanted else None
            for grad, wanted in zip((d_rows, d_scale), wants[1:3], strict=True)
        ]
        return None, *for_mean, d_weight if wants[3] else None


def _softmax(held: Held, logits: Tensor, lse: Tensor, start: int, stop: int) -> Tensor:
    """Of a chunk, in the memory of its logits; less 1 at the targets. A target with a margin counts 0: its gradient takes its own way."""
    where = _targets_in(held.labels, start, stop)
    if held.head.has_margin:
        logits[where] = -torch.inf
    else:
        logits[where] += held.head.target_offset
    if held.log_weight is not None:
        logits += held.log_weight[start:stop]
    logits.sub_(lse.unsqueeze(1)).exp_()
    if not held.head.has_margin:
        logits[where] -= 1
    return logits


def _chunk_backward(
    held: Held,
    given: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    grads: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Any head, by autograd on each chunk."""
    rows, scale, weight = given
    d_rows, d_scale, d_weight = into
    several = len(scale) > 1
    for start, stop, block in held.chunks(weight):
        leaves = [t.detach().requires_grad_() for t in (rows, block, *([scale] if several else []))]
        with torch.enable_grad():
            logits = held.head.logits(leaves[0], leaves[2] if several else scale, leaves[1])
        # the logits' memory is nobody else's: no step of a head keeps its result for backward
        share = _softmax(held, logits.detach(), lse, start, stop).mul_(grads[0].unsqueeze(1))
        found = torch.autograd.grad(logits, leaves, share)
        d_rows += found[0]
        if several:
            d_scale += found[2]
        d_weight[held.rows_of(start, stop)] = _with_penalty(held, block, found[1], grads[1])


def _cosine_backward(
    held: Held,
    given: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    grads: tuple[Tensor, Tensor],
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The same for cosines, by hand: half the passes over memory."""
    rows, scale, weight = given
    d_rows, d_scale, d_weight = into
    scaled = rows * scale
    weighted = scaled * grads[0].unsqueeze(1)
    for start, stop, block in held.chunks(weight):
        norms = torch.linalg.vector_norm(block, dim=1, keepdim=True)
        unit = block / norms.clamp(min=1e-12)
        share = _softmax(held, scaled @ unit.t(), lse, start, stop)
        d_rows.addmm_(share, unit)
        found = share.t() @ weighted
        along = torch.where(norms > 1e-12, torch.linalg.vecdot(found, unit).unsqueeze(1), 0.0)
        found.addcmul_(unit, along, value=-1).div_(norms.clamp(min=1e-12))
        d_weight[held.rows_of(start, stop)] = _with_penalty(held, block, found, grads[1])
    d_rows *= grads[0].unsqueeze(1)
    if len(scale) > 1:
        d_scale += (d_rows * rows).sum(1, keepdim=True)
    d_rows *= scale


def _with_penalty(held: Held, block: Tensor, found: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a block of weight rows, that of the regulariser added."""
    if held.penalty is None:
        return found
    leaf = block.detach().requires_grad_()
    with torch.enable_grad():
        value, _ = held.penalty(leaf)
    return found + torch.autograd.grad(value, leaf, grad)[0]


def _target_logits(held: Held, rows: Tensor, scale: Tensor, weight: Tensor, own: Tensor) -> Tensor:
    if not bool(own.any()):
        return rows.new_zeros(0)
    picked = weight[held.target_rows()].view(-1, held.head.per_class, rows.shape[1])
    return held.head.targets(rows[own], scale[own] if len(scale) > 1 else scale, picked)


def _add_targets(
    held: Held,
    own: Tensor,
    grad: Tensor,
    lse: Tensor,
    target: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The gradient that goes through the targets' logits, margin included."""
    rows, scale, weight = given
    index = held.target_rows()
    several = len(scale) > 1
    picked = weight[index].view(-1, held.head.per_class, rows.shape[1])
    leaves = [t.detach().requires_grad_() for t in (rows[own], picked, *([scale[own]] if several else []))]
    with torch.enable_grad():
        logits = held.head.targets(leaves[0], leaves[2] if several else scale, leaves[1])
    share = grad[own] * ((target - lse)[own].exp() - 1)
    found = torch.autograd.grad(logits, leaves, share)
    d_rows, d_scale, d_weight = into
    d_rows[own] += found[0]
    if several:
        d_scale[own] += found[2]
    d_weight.index_add_(0, index, found[1].reshape(-1, rows.shape[1]))


def _targets_in(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Rows whose class lies in a chunk, and where in it."""
    found = ((labels >= start) & (labels < stop)).nonzero().squeeze(1)
    return found, labels[found] - start


def _combine(
    top: Tensor, total: Tensor, target: Tensor, extra: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Statistics over the classes of all ranks, added in rank order: the same on every rank."""
    world, rows = process_groups.world_size(group), len(top)
    if world == 1:
        return top, total, target, extra
    own = torch.cat([top, total, target, extra])
    everyone = own.new_empty((world, len(own)))
    gather(everyone.view(-1), own, group=group_for(own, group))
    tops, totals, targets = (everyone[:, i * rows : (i + 1) * rows] for i in range(3))
    highest = tops.amax(0)
    return highest, (totals * torch.exp(tops - highest)).sum(0), targets.sum(0), everyone[:, 3 * rows :].sum(0)
