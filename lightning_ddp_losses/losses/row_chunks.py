"""Any loss that is a sum over anchors, a few anchors at a time: PML's own formula on chunks, each computed anew in backward.

Where all of this rank's anchors make one chunk of ordinary size, that chunk is computed once and keeps its graph.

Legend: ``B`` rows on this rank, ``G`` references over all ranks, ``P`` positives of an anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import own_graph
from lightning_ddp_losses.losses.call_arguments import enough_pairs
from lightning_ddp_losses.losses.element_losses import anchor_losses, partial_sums_of
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import ElementCounts, PartialSum, value_with_grad
from lightning_ddp_losses.losses.pml_registry import facts_of

CHUNK_BYTES = 64 << 20
"""What a chunk may take where nobody says. Computing twice is only worth it where the batch in one go would be large."""


def chunks_of(loss: nn.Module, call: PMLCall, chunk_bytes: int | None) -> list[slice]:
    """Return this rank's rows in chunks, each of which is ordinary input: with too few pairs PML returns a zero for all of it.

    Args:
        loss: What will run on the chunks.
        call: Its arguments.
        chunk_bytes: The most that a chunk may take, roughly; None: a default.
    """
    positives, negatives = call.local_pair_counts()
    mined = "indices_tuple" in call.arguments
    size = _rows_of_a_chunk(loss, call, positives, negatives, float(chunk_bytes or CHUNK_BYTES))
    rows, start = len(positives), 0
    chunks = []
    while start < rows:
        # as many rows as fit, and more until they are ordinary input
        stop = min(start + size, rows)
        while stop < rows and not enough_pairs(positives[start:stop], negatives[start:stop], mined=mined):
            stop = min(stop + size, rows)
        chunks.append(slice(start, stop))
        start = stop
    # what is left over at the end goes with the chunk before it
    if len(chunks) > 1 and not enough_pairs(positives[chunks[-1]], negatives[chunks[-1]], mined=mined):
        last = chunks.pop()
        chunks[-1] = slice(chunks[-1].start, last.stop)
    return chunks


def _rows_of_a_chunk(loss: nn.Module, call: PMLCall, positives: Tensor, negatives: Tensor, allowed: float) -> int:
    """Return how many rows take ``allowed`` bytes in PML's formula, on average."""
    anchors = max(len(positives), 1)
    mean_positives, mean_negatives = int(positives.sum()) / anchors, int(negatives.sum()) / anchors
    item, columns = call.references.element_size(), len(call.references)
    memory = facts_of(loss).memory
    if memory == "triplets":  # three indices and some numbers for each triplet
        size = allowed / max(mean_positives * mean_negatives * (24 + 6 * item), 1)
    elif memory == "pairs x pairs":
        size = (allowed / max(mean_positives * mean_negatives * 4 * item, 1)) ** 0.5
    elif memory == "positives x columns":
        size = allowed / max((1 + mean_positives) * columns * 6 * item, 1)
    else:
        size = allowed / max(columns * 6 * item, 1)
    return max(1, int(size))


class RowChunks:
    """One evaluation of this rank's anchors, in chunks.

    Args:
        loss: A loss that is a sum over anchors.
        call: Its arguments over all ranks.
        chunks: From ``chunks_of``.
    """

    def __init__(self, loss: Any, call: PMLCall, chunks: list[slice]) -> None:
        self._loss, self._call, self._chunks = loss, call, chunks
        self._owner_of_full: list[int | None] = []

    @property
    def recomputes(self) -> bool:
        """Whether backward computes the chunks once more; else the one chunk has kept its graph."""
        return len(self._chunks) > 1

    def partial_sums(self) -> list[PartialSum]:
        """Return this rank's partial sums; without a graph where backward recomputes them."""
        embeddings, references = self._call.given["embeddings"], self._call.references
        if not self.recomputes:
            return self._partials(None, embeddings, references)
        with torch.no_grad():
            embeddings, references = embeddings.detach(), references.detach()
            by_chunk = [self._partials(chunk, embeddings[chunk], references) for chunk in self._chunks]
        by_sub_loss = list(zip(*by_chunk, strict=True))
        # what every chunk computes in full counts once, in the first chunk that has it
        self._owner_of_full = [_first_full(partials) for partials in by_sub_loss]
        return [_added(partials, owner) for partials, owner in zip(by_sub_loss, self._owner_of_full, strict=True)]

    def value(self, factors: list[Tensor], value: Tensor) -> Tensor:
        """Return the loss, whose gradient is computed chunk by chunk in backward.

        Args:
            factors: What each sub-loss is multiplied with.
            value: Its number.
        """
        parameters = [p for p in self._loss.parameters() if p.requires_grad]
        inputs = (self._call.given["embeddings"], self._call.references, *parameters)
        return value_with_grad(value, *inputs, vjp=lambda wanted: self._gradients(factors, references=wanted[1]))

    def _gradients(self, factors: list[Tensor], *, references: bool) -> list[Tensor]:
        """Return the gradients of embeddings, references (zeros where not wanted) and parameters."""
        embeddings, all_references = self._call.given["embeddings"].detach(), self._call.references.detach()
        dtype, devices = embeddings.dtype, {embeddings.device.type}
        with precision.full_precision(dtype, devices), precision.cast_module(self._loss, dtype):
            parameters = [p for p in self._loss.parameters() if p.requires_grad]
            gradients = [torch.zeros_like(t) for t in (embeddings, all_references, *parameters)]
            of_anchors, *of_others = gradients
            if not references:
                del of_others[0]  # stays zeros
            for number, chunk in enumerate(self._chunks):
                # the chunk once more, now with a graph
                anchors = embeddings[chunk].requires_grad_()
                columns = all_references.detach().requires_grad_(references)
                with own_graph():
                    total = self._weighted_total(number, anchors, columns, factors)
                leaves = [anchors, *parameters]
                if references:
                    leaves.insert(1, columns)
                found = torch.autograd.grad(total, leaves, allow_unused=True)
                # rows of the chunk have their gradient from it alone, all else adds up
                if found[0] is not None:
                    of_anchors[chunk] += found[0]
                for gradient, added in zip(of_others, found[1:], strict=True):
                    if added is not None:
                        gradient.add_(added)
        return gradients

    def _weighted_total(self, number: int, anchors: Tensor, references: Tensor, factors: list[Tensor]) -> Tensor:
        """Return what one chunk adds to the global loss, with its graph."""
        partials = self._partials(self._chunks[number], anchors, references)
        total = anchors.new_zeros(())
        for partial, factor, owner in zip(partials, factors, self._owner_of_full, strict=True):
            if owner is None or owner == number:
                total = total + partial.total * factor.to(total.dtype)
        return total

    def _partials(self, chunk: slice | None, anchors: Tensor, references: Tensor) -> list[PartialSum]:
        """Return the partial sums of one chunk's anchors; None: of all."""
        call, labels = self._call, self._call.local_labels
        if labels is not None and chunk is not None:
            labels = labels[chunk]
        losses = anchor_losses(self._loss, anchors, labels, call.local_tuples(chunk), references, call.ref_labels)
        return partial_sums_of(self._loss.reducer, losses, anchors, labels)


def _first_full(partials: Sequence[PartialSum]) -> int | None:
    """Return the first chunk that computes a sub-loss in full; None: no chunk does."""
    for number, partial in enumerate(partials):
        if partial.full:
            return number
    return None


def _added(partials: Sequence[PartialSum], owner: int | None) -> PartialSum:
    """Return one sub-loss of all chunks."""
    if owner is not None:
        return partials[owner]
    total = torch.stack([partial.total for partial in partials]).sum()
    divisors = [partial.divisor for partial in partials if partial.divisor is not None]
    divisor = torch.stack(divisors).sum() if divisors else None
    columns = zip(*(partial.counts for partial in partials), strict=True)
    return PartialSum(total, divisor, name=partials[0].name, counts=ElementCounts(*map(sum, columns)))
