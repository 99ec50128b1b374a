"""What contrastive losses between two towers share: one rank's rows of one tower against all rows of the other, in tiles.

A tile of products serves both directions and, unless it is the only one, is computed again in backward. Own rows of the first tower stay
where they are; only the second tower travels (``column_blocks``).

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` their sum over ranks, ``M`` columns, ``D`` embedding size.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.backward_exchange import BackwardExchange
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.losses.column_blocks import ColumnBlocks, GatheredColumns, RingColumns
from lightning_ddp_losses.losses.global_batch import refuse_gather

TILE_BYTES = 2 << 20


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """Makes the call of a two-tower loss: checks, what must match on all ranks, precision; ``_evaluate`` is the subclass's.

    Args:
        normalize: Divide embeddings by their length.
        tile_bytes: Of products alive at a time.
        gather: Whether every rank holds all columns, or they go round a ring.
        group: Process group; None is the world.
    """

    sees_global_batch = True

    def __init__(self, *, normalize: bool, tile_bytes: int, gather: Literal["all", "ring"], group: Group) -> None:
        super().__init__()
        if not isinstance(tile_bytes, int) or tile_bytes < 64:
            raise ConfigurationError(f"{type(self).__name__}: tile_bytes", expected="at least 64", got=repr(tile_bytes))
        refuse_gather(type(self).__name__, gather)
        self.normalize, self.tile_bytes, self.gather = normalize, tile_bytes, gather
        self._group = group
        self._upstream_grads = UpstreamGradWatch()

    def _start_scale(self, init_temperature: float, max_scale: float | None) -> None:
        self.max_scale = max_scale
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

    def _scale(self) -> Tensor:
        """Computes 1 / temperature, clamped, with the gradient of its logarithm."""
        log_scale: Tensor = self.logit_scale
        if self.max_scale is not None:
            log_scale = log_scale.clamp(max=math.log(self.max_scale))
        return log_scale.exp()

    @eager_recursive
    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        extra_texts: Tensor | None = None,
        queue: Tensor | None = None,
    ) -> Tensor:
        """Computes the global loss; row i of one tower belongs to row i of the other.

        Args:
            images: (B, D), one tower; B may differ per rank.
            texts: (B, D), the other.
            extra_texts: (m, D), further negatives for the images, those of all ranks together; m may differ per rank.
            queue: (q, D), further negatives that every rank holds already, the same on all of them; no gradient.
        """
        try:
            self._check(images, texts, extra_texts, queue)
        except InputError as error:
            handshake.raise_on_all_ranks(error, type(self).__name__, group=self._group)
        value: Tensor = autograd_graph.run_full_precision(self, self._forward, (images, texts, extra_texts, queue), {})
        autograd_graph.remember_global_value(value)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _forward(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> Tensor:
        # unit length
        if self.normalize:
            images, texts = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
            extra = None if extra is None else functional.normalize(extra, dim=1)
            queue = None if queue is None else functional.normalize(queue, dim=1)
        if queue is not None:
            queue = queue.detach()
        second_tower = {"texts": texts}
        if extra is not None:
            second_tower["extra_texts"] = extra
        # each image's product with its own text, which rows and columns are compared with
        products = (images * texts).sum(1).detach()
        # what all ranks need to know: all texts, or in a ring how many there are
        batch = self._exchange(images, second_tower, products, queue)
        text_counts, extra_counts = batch.counts[0], [0] * len(batch.counts[0])
        if extra is not None:
            extra_counts = batch.counts[1]
        if sum(text_counts) == 0:
            title = f"{type(self).__name__}: rows"
            raise InputError(title, expected="at least one on some rank", got="none", collective=True)
        gathered = batch.tensors[: len(second_tower)]
        if self.gather == "all":
            columns: ColumnBlocks = GatheredColumns(text_counts, extra_counts, queue, self._group)
            return self._evaluate(columns, images, _concatenated(gathered), batch.tensors[-1])
        # in a ring every rank takes part in backward where any rank needs it
        exchange = BackwardExchange(type(self).__name__, self._group)
        columns = RingColumns(text_counts, extra_counts, queue, self._group, exchange)
        images = autograd_graph.match_requires_grad(images, any(flag[0] for flag in batch.extras))
        own_columns = _concatenated(list(second_tower.values()))
        own_columns = autograd_graph.match_requires_grad(own_columns, any(t.requires_grad for t in gathered))
        return self._evaluate(columns, images, own_columns, products)

    def _exchange(
        self, images: Tensor, second_tower: dict[str, Tensor], products: Tensor, queue: Tensor | None
    ) -> GatheredBatch:
        """Makes sure that all ranks do the same, and gathers what they need of each other."""
        title = type(self).__name__
        must_match = {
            "gather": self.gather,
            "options": self.extra_repr(),
            "queue": "none" if queue is None else f"{tuple(queue.shape)} {queue.dtype}",
            "coefficient of the last backward": self._upstream_grads.take(),
        }
        if self.gather == "all":
            given = {**second_tower, "products with their own text": products}
            return gather_batch(title, given, must_match, group=self._group)
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (images, *self.parameters()))
        return gather_batch(
            title, second_tower, must_match, extra=bytes([trained]), counted=second_tower, group=self._group
        )

    def _evaluate(self, columns: ColumnBlocks, images: Tensor, texts: Tensor, products: Tensor) -> Tensor:
        """Computes the global loss.

        Args:
            columns: The ways to go through the second tower.
            images: (B, D), this rank's.
            texts: (m, D), rows of the second tower as ``columns`` wants them.
            products: (t,), of each text among them with its own image, without graph.
        """
        raise NotImplementedError

    def _check(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> None:
        title, given = type(self).__name__, {"images": images, "texts": texts}
        # what may be left out
        if extra is not None:
            given["extra_texts"] = extra
        if queue is not None:
            given["queue"] = queue
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
                got: Any = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(f"{title}: {name}", expected="floating (n, D)", got=got)
            if tensor.shape[1] != images.shape[1]:
                raise InputError(
                    f"{title}: {name}",
                    expected=f"{images.shape[1]} columns, as the images have",
                    got=tensor.shape[1],
                    fix="Project both towers to one embedding size.",
                )
        if len(images) != len(texts):
            raise InputError(
                f"{title}: rows",
                expected="as many texts as images",
                got=f"{len(images)} images, {len(texts)} texts",
                fix="Row i of one tower belongs to row i of the other; more negatives go to extra_texts.",
            )


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
