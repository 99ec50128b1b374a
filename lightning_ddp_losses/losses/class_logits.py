"""Logits and best classes over a class weight that lies on different ranks, without gradient.

Legend: ``B`` rows on this rank, ``G`` rows over all ranks, ``C`` classes, ``c`` classes on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.errors import InputError, format_error

if TYPE_CHECKING:
    from lightning_ddp_losses.distributed.process_groups import Group
    from lightning_ddp_losses.distributed.shard import ClassShard
    from lightning_ddp_losses.losses.class_heads import Head
    from lightning_ddp_losses.losses.sharded_softmax import Held


class ClassLogits:
    """What a class-sharded loss knows besides its loss."""

    if TYPE_CHECKING:
        _head: Head
        _group: Group
        _classes: int
        _title: str
        shard: ClassShard

        def _prepare(self, embeddings: Tensor) -> None: ...
        def _all_classes(self, rows: int, element_bytes: int, device: torch.device) -> Held: ...
        def _weight_rows(self) -> Tensor: ...

    @torch.no_grad()
    def get_logits(self, embeddings: Tensor) -> Tensor:
        """Logits of all classes, as the loss's own ``get_logits``: for few classes or few rows.

        Args:
            embeddings: (B, D).

        Returns:
            (B, C), for this rank's rows.

        Communication: frame, gather of the embeddings, one exchange of G x c logits. Every rank must call it.
        """
        everyone, counts = self._gather_rows(embeddings)
        parts = [logits for _, logits in self._blocks(everyone)]
        own = torch.cat(parts, 1) if parts else everyone.new_zeros(len(everyone), 0)
        if process_groups.world_size(self._group) == 1:
            return own
        rows = counts[process_groups.rank(self._group)]
        sizes = self._classes_per_rank()
        flat = raw_collectives.all_to_all(
            [block.reshape(-1) for block in torch.split(own, counts)], [rows * n for n in sizes], self._group
        )
        return torch.cat([part.view(rows, n) for part, n in zip(flat, sizes, strict=True)], 1)

    @torch.no_grad()
    def predict(self, embeddings: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """The k most likely classes of each row, best first.

        Args:
            embeddings: (B, D).
            k: At most C; the same on every rank.

        Returns:
            Their logits (B, k) and their labels (B, k), for this rank's rows.

        Communication: frame, gather of the embeddings, two exchanges of G x k numbers. Every rank must call it.
        """
        if not isinstance(k, int) or not 1 <= k <= self._classes:
            error = format_error(f"{self._title}: k", expected=f"1 to {self._classes}", got=repr(k))
            handshake.raise_on_all_ranks(InputError(error), self._title, group=self._group)
        everyone, counts = self._gather_rows(embeddings, k)
        best = everyone.new_full((len(everyone), k), -torch.inf)
        labels = torch.full(best.shape, -1, dtype=torch.int64, device=best.device)
        factor = self._head.shown
        for start, shown in self._blocks(everyone):
            logits = shown / factor
            names = torch.arange(start, start + logits.shape[1], device=best.device).expand_as(logits)
            best, place = torch.cat([best, logits], 1).topk(k, 1)
            labels = torch.cat([labels, names], 1).gather(1, place)
        if process_groups.world_size(self._group) > 1:
            world, rows = process_groups.world_size(self._group), counts[process_groups.rank(self._group)]
            found = []
            for tensor in (best, labels):
                parts = [block.reshape(-1) for block in torch.split(tensor, counts)]
                found.append(
                    torch.cat(
                        [p.view(rows, k) for p in raw_collectives.all_to_all(parts, [rows * k] * world, self._group)], 1
                    )
                )
            best, place = found[0].topk(k, 1)
            labels = found[1].gather(1, place)
        return best * factor, labels

    def _gather_rows(self, embeddings: Tensor, k: int = 0) -> tuple[Tensor, list[int]]:
        self._prepare(embeddings)
        dtype = precision.compute_dtype([embeddings, self._weight_rows()])
        bundle = gather_batch(
            f"{self._title}: logits", {"embeddings": embeddings.to(dtype)}, {"k": k}, group=self._group
        )
        return bundle.tensors[0], bundle.counts[0]

    def _blocks(self, everyone: Tensor) -> Iterator[tuple[int, Tensor]]:
        """First class and logits, as the loss shows them, of each chunk of the classes held."""
        rows, scale = self._head.prepare(everyone)
        held = self._all_classes(len(everyone), everyone.element_size(), everyone.device)
        for start, _, block in held.chunks(self._weight_rows()):
            with precision.full_precision(everyone.dtype, [everyone.device.type]):
                logits = self._head.logits(rows, scale, block.to(everyone.dtype)) * self._head.shown
            yield self.shard.start + start, logits

    def _classes_per_rank(self) -> list[int]:
        world = process_groups.world_size(self._group)
        return [type(self.shard).of_rank(self._classes, world, rank).classes for rank in range(world)]
