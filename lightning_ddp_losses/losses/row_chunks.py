"""Any loss that is a sum over anchors, a few anchors at a time: each part is computed anew in backward, so only one is alive.

Legend: ``B`` rows on this rank, ``G`` references over all ranks, ``P`` positives of an anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.losses import anchor_tuples as pml_rows
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import ElementCounts, PartialSum, split

PART_BYTES = 64 << 20
"""What a part may take where nobody says. Computing twice is only worth it where the whole would be large."""

_TRIPLETS = (pml.MarginLoss, pml.TripletMarginLoss)
_PAIRS_BY_PAIRS = (pml.NTXentLoss, pml.TupletMarginLoss)


def parts_of(loss: nn.Module, call: PMLCall, part_bytes: int | None) -> list[slice]:
    """This rank's rows in parts, each of which is ordinary input: with too few pairs PML returns a zero for all of it.

    Args:
        loss: What will run on the parts.
        call: Its arguments.
        part_bytes: The most that a part may take, roughly; None: a default.
    """
    near, far = call.partner_counts()
    rows, item = len(near), call.references.element_size()
    mean = float(near.double().mean()) if rows else 0.0
    negatives = float(far.double().mean()) if rows else 0.0
    allowed = float(part_bytes or PART_BYTES)
    if isinstance(loss, _TRIPLETS):  # three indices and some numbers for each triplet
        size = allowed / max(mean * negatives * (24 + 6 * item), 1)
    elif isinstance(loss, _PAIRS_BY_PAIRS):
        size = (allowed / max(mean * negatives * 4 * item, 1)) ** 0.5
    else:
        size = allowed / max((1 + mean * isinstance(loss, pml.AngularLoss)) * len(call.references) * 6 * item, 1)
    step, parts, start = max(1, int(size)), [], 0
    while start < rows:
        stop = start
        while stop < rows:
            stop = min(stop + step, rows)
            if _is_ordinary(near[start:stop], far[start:stop], mined="indices_tuple" in call.arguments):
                break
        parts.append(slice(start, stop))
        start = stop
    if len(parts) > 1 and not _is_ordinary(near[parts[-1]], far[parts[-1]], mined="indices_tuple" in call.arguments):
        last = parts.pop()
        parts[-1] = slice(parts[-1].start, last.stop)
    return parts


class RowTiles:
    """One evaluation in parts.

    Args:
        loss: A loss that is a sum over anchors.
        call: Its arguments over all ranks.
        parts: From ``parts_of``.
        world: Number of ranks.
    """

    def __init__(self, loss: Any, call: PMLCall, parts: list[slice], world: int) -> None:
        self._loss, self._call, self._parts, self._world = loss, call, parts, world

    @torch.no_grad()
    def forward(self) -> list[PartialSum]:
        """Shares of the sub-losses, without graph."""
        embeddings, references = self._call.given["embeddings"].detach(), self._call.references.detach()
        parts = [self._shares(part, embeddings[part], references) for part in self._parts]
        self._first_whole = [next((i for i, p in enumerate(parts) if p[k].full), None) for k in range(len(parts[0]))]
        return [self._added([p[k] for p in parts], self._first_whole[k]) for k in range(len(parts[0]))]

    def value(self, factors: list[float], value: float) -> Tensor:
        """The loss, with its graph.

        Args:
            factors: What each sub-loss is multiplied with.
            value: Its number.
        """
        parameters = [p for p in self._loss.parameters() if p.requires_grad]
        inputs = (self._call.given["embeddings"], self._call.references, *parameters)

        def pull() -> list[Tensor]:
            return self._gradients(factors, [t.requires_grad for t in inputs])

        return _Value.apply(pull, value, *inputs)  # type: ignore[no-untyped-call, no-any-return]

    def _gradients(self, factors: list[float], wanted: list[bool]) -> list[Tensor]:
        embeddings, references = self._call.given["embeddings"].detach(), self._call.references.detach()
        dtype, devices = embeddings.dtype, {embeddings.device.type}
        with precision.full_precision(dtype, devices), precision.cast_parameters(self._loss, dtype):
            parameters = [p for p in self._loss.parameters() if p.requires_grad]
            out = [torch.zeros_like(t) for t in (embeddings, references, *parameters)]
            for number, part in enumerate(self._parts):
                near = embeddings[part].requires_grad_()
                far = references.detach().requires_grad_(wanted[1])
                with torch.enable_grad():
                    shares = self._shares(part, near, far)
                    total = near.new_zeros(())
                    for share, factor, first in zip(shares, factors, self._first_whole, strict=True):
                        if first is None or first == number:
                            total = total + share.total * factor
                leaves = [near, *([far] if wanted[1] else []), *parameters]
                grads = list(torch.autograd.grad(total, leaves, allow_unused=True))
                out[0][part] += _some(grads.pop(0), near)
                if wanted[1]:
                    out[1] += _some(grads.pop(0), far)
                for whole, grad in zip(out[2:], grads, strict=True):
                    if grad is not None:
                        whole.add_(grad)
        return out

    def _shares(self, part: slice, embeddings: Tensor, references: Tensor) -> list[PartialSum]:
        labels = self._call.own_labels
        labels = None if labels is None else labels[part]
        tuples = self._call.own_tuples(part)
        found = pml_rows.row_elements(self._loss, embeddings, labels, tuples, references, self._call.ref_labels)
        return split(self._loss.reducer, found, embeddings, labels, self._world * len(self._parts))

    def _added(self, shares: list[PartialSum], whole: int | None) -> PartialSum:
        if whole is not None:
            return shares[whole]
        counted = ElementCounts(*(sum(numbers) for numbers in zip(*(s.count for s in shares), strict=True)))
        total = torch.stack([share.total for share in shares]).sum()
        return PartialSum(total, sum(s.divisor for s in shares), name=shares[0].name, count=counted)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pull: Callable[[], list[Tensor]], value: float, *inputs: Tensor) -> Tensor:
        ctx.pull = pull
        ctx.save_for_backward(*inputs)
        return inputs[0].new_full((), value)

    @staticmethod
    @once_differentiable_strict("GlobalBatchLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(own * grad for own in ctx.pull())


def _some(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _is_ordinary(near: Tensor, far: Tensor, *, mined: bool) -> bool:
    enough = int(near.sum()) > 1 and int(far.sum()) > 1
    return enough and (mined or bool(((near > 0) & (far > 0)).any()))
