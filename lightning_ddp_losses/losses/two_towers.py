"""What contrastive losses between two towers share: this rank's rows of one against all rows of the other, in tiles.

A tile of products serves both directions and, unless it is the only one, is computed again in backward. Own rows of the first tower stay
where they are; only the second tower travels (``columns``).

Legend: ``B`` rows on this rank, ``G`` their sum over ranks, ``M`` columns, ``D`` embedding size.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError, InputError, format_error
from lightning_ddp_losses.losses.column_blocks import Columns, Gathered, Ring
from lightning_ddp_losses.losses.global_batch import refuse_gather

TILE_BYTES = 2 << 20


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """The call of a two-tower loss: checks, what all ranks agree on, precision; ``_evaluate`` is the subclass's.

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
        self._coefficients = UpstreamGradWatch()

    def _start_scale(self, init_temperature: float, max_scale: float | None) -> None:
        self.max_scale = max_scale
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

    def _scale(self) -> Tensor:
        """1 / temperature, clamped, with the gradient of its logarithm."""
        limited = self.logit_scale if self.max_scale is None else self.logit_scale.clamp(max=math.log(self.max_scale))
        return limited.exp()

    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        extra_texts: Tensor | None = None,
        queue: Tensor | None = None,
    ) -> Tensor:
        """The global loss; row i of one tower belongs to row i of the other.

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
        watched: Tensor = self._coefficients.watch(value, group=self._group)
        return watched

    def _forward(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> Tensor:
        if self.normalize:
            images, texts = (nn.functional.normalize(t, dim=1) for t in (images, texts))
            extra, queue = (None if t is None else nn.functional.normalize(t, dim=1) for t in (extra, queue))
        own = {"texts": texts} if extra is None else {"texts": texts, "extra_texts": extra}
        products = (images * texts).sum(1).detach()
        queue = None if queue is None else queue.detach()
        must_match = {
            "gather": self.gather,
            "options": self.extra_repr(),
            "queue": "none" if queue is None else f"{tuple(queue.shape)} {queue.dtype}",
            "coefficient of the last backward": self._coefficients.take(),
        }
        ring = self.gather == "ring"
        given = own if ring else {**own, "products with their own text": products}
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (images, *self.parameters()))
        bundle = gather_batch(
            type(self).__name__,
            given,
            must_match,
            extra=bytes([trained]) if ring else b"",
            counted=own if ring else (),
            group=self._group,
        )
        counts, came = bundle.counts, bundle.tensors[: len(own)]
        further = counts[1] if extra is not None else [0] * len(counts[0])
        columns = (Ring if ring else Gathered)(counts[0], further, queue, self._group)
        if columns.total == 0:
            text = format_error(f"{type(self).__name__}: rows", expected="at least one on some rank", got="none")
            raise InputError(text, collective=True)
        if not ring:
            return self._evaluate(columns, images, _joined(came), bundle.tensors[-1])
        images = autograd_graph.match_requires_grad(images, any(flag[0] for flag in bundle.extras))
        texts = autograd_graph.match_requires_grad(_joined(list(own.values())), any(t.requires_grad for t in came))
        return self._evaluate(columns, images, texts, products)

    def _evaluate(self, columns: Columns, images: Tensor, texts: Tensor, products: Tensor) -> Tensor:
        """The global loss.

        Args:
            columns: The ways to go through the second tower.
            images: (B, D), this rank's.
            texts: (m, D), rows of the second tower as ``columns`` wants them.
            products: (t,), of each text among them with its own image, without graph.
        """
        raise NotImplementedError

    def _check(self, images: Tensor, texts: Tensor, *others: Tensor | None) -> None:
        title = type(self).__name__
        for name, tensor in zip(("images", "texts", "extra_texts", "queue"), (images, texts, *others), strict=True):
            if tensor is None and name in ("extra_texts", "queue"):
                continue
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


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
