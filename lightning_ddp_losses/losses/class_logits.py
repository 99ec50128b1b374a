"""Logits of all classes and best classes, where classes lie on different ranks: for evaluation, without gradient.

Every rank computes the logits of the rows of all ranks with its own classes, chunk by chunk. Of all classes, they go to the ranks whose
rows they are; of the best k, only each rank's best k do, of which the row's rank keeps k.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum, ``D`` embedding size, ``C`` classes, ``c`` classes on this rank, ``K``
weight rows per class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.distributed import process_groups, raw_collectives
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.losses.class_heads import Head
from lightning_ddp_losses.losses.class_targets import LocalClasses
from lightning_ddp_losses.losses.sharded_weight import ShardedWeight


@dataclass(frozen=True)
class ClassLogits:
    """Computes what the rows of all ranks have to do with all classes, for one call; without gradient.

    Attributes:
        head: Says what a logit is.
        sharded: Knows which classes are on which rank.
        weight: (c * K, D), this rank's rows.
        embeddings: (G, D), of all ranks.
        counts: Each rank's rows among them.
        chunk: Classes whose logits are alive at a time, where not all are kept.
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
        rows, scale = self.head.prepare(self.embeddings)
        no_labels = torch.full((len(rows),), -1, device=rows.device)
        classes = LocalClasses(no_labels, self.chunk, self.head.per_class)
        for start, _, block in classes.chunks(self.weight):
            with precision.full_precision(rows.dtype, [rows.device.type]):
                logits = self.head.logits(rows, scale, block.to(rows.dtype)) * self.head.output_scale
            yield self.sharded.shard.start + start, logits

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
