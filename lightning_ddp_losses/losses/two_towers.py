"""What contrastive losses between two towers share: this rank's rows of one against all rows of the other, in tiles.

A tile of products serves both directions, is never kept, and is computed again in backward. Own rows of the first tower stay where they
are; only the second tower travels.

Legend: ``B`` rows on this rank, ``G`` their sum over ranks, ``M`` columns, ``D`` embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses import frames, graph, groups
from lightning_ddp_losses.bundles import Bundle, gather_bundle
from lightning_ddp_losses.coefficient import CoefficientWatch
from lightning_ddp_losses.errors import ConfigurationError, InputError, format_error
from lightning_ddp_losses.groups import Group, OfGroup

__all__ = ["TILE_BYTES", "TwoTowerLoss", "pairs_in", "tiles"]

TILE_BYTES = 2 << 20


def tiles(rows: int, columns: int, element_bytes: int, tile_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows and columns whose products fit ``tile_bytes``; nearly square, columns inside rows."""
    side = max(1, int((tile_bytes / element_bytes) ** 0.5))
    for top in range(0, rows, side):
        bottom = min(top + side, rows)
        wide = max(1, tile_bytes // element_bytes // (bottom - top))
        for left in range(0, columns, wide):
            yield slice(top, bottom), slice(left, min(left + wide, columns))


def pairs_in(first: int, down: slice, across: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where in a tile an image meets its own text: rows and columns of the tile.

    Args:
        first: Global row of this rank's first image.
        down: The tile's rows of this rank's images.
        across: The tile's columns.
        device: Of the answer.
    """
    low = max(down.start + first, across.start)
    high = max(low, min(down.stop + first, across.stop))
    index = torch.arange(low, high, device=device)
    return index - first - down.start, index - across.start


class TwoTowerLoss(OfGroup, nn.Module):
    """The call of a two-tower loss: checks, one gather, precision; ``_evaluate`` is the subclass's.

    Args:
        normalize: Divide embeddings by their length.
        tile_bytes: Of products alive at a time.
        group: Process group; None is the world.
    """

    sees_global_batch = True

    def __init__(self, *, normalize: bool, tile_bytes: int, group: Group) -> None:
        super().__init__()
        if not isinstance(tile_bytes, int) or tile_bytes < 64:
            raise ConfigurationError(
                format_error(f"{type(self).__name__}: tile_bytes", expected="at least 64", got=repr(tile_bytes))
            )
        self.normalize, self.tile_bytes = normalize, tile_bytes
        self._group = group
        self._coefficients = CoefficientWatch()

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
            frames.fail_together(error, type(self).__name__, group=self._group)
        value: Tensor = graph.run_wide(self, self._forward, (images, texts, extra_texts, queue), {})
        graph.note_global_value(value)
        watched: Tensor = self._coefficients.watch(value, group=self._group)
        return watched

    def _forward(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> Tensor:
        if self.normalize:
            images, texts = (nn.functional.normalize(t, dim=1) for t in (images, texts))
            extra, queue = (None if t is None else nn.functional.normalize(t, dim=1) for t in (extra, queue))
        diagonal = (images * texts).sum(1)
        batches = {"texts": texts, "products with their own text": diagonal.detach()}
        if extra is not None:
            batches["extra_texts"] = extra
        shared = "none" if queue is None else f"{tuple(queue.shape)} {queue.dtype}"
        agreed = {
            "options": self.extra_repr(),
            "queue": shared,
            "coefficient of the last backward": self._coefficients.take(),
        }
        bundle = gather_bundle(type(self).__name__, batches, agreed, group=self._group)
        if len(bundle.tensors[0]) == 0:
            text = format_error(f"{type(self).__name__}: rows", expected="at least one on some rank", got="none")
            raise InputError(text, collective=True)
        parts = [bundle.tensors[0], *bundle.tensors[2:], *([] if queue is None else [queue.detach()])]
        columns = torch.cat(parts) if len(parts) > 1 else parts[0]
        return self._evaluate(images, columns, bundle)

    def _evaluate(self, images: Tensor, columns: Tensor, bundle: Bundle) -> Tensor:
        raise NotImplementedError

    def _first(self, bundle: Bundle) -> int:
        """Global row of this rank's first row."""
        return bundle.offset(0, groups.rank(self._group))

    def _check(self, images: Tensor, texts: Tensor, *others: Tensor | None) -> None:
        title = type(self).__name__
        for name, tensor in zip(("images", "texts", "extra_texts", "queue"), (images, texts, *others), strict=True):
            if tensor is None and name in ("extra_texts", "queue"):
                continue
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
                got: Any = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise InputError(format_error(f"{title}: {name}", expected="floating (n, D)", got=got))
            if tensor.shape[1] != images.shape[1]:
                raise InputError(
                    format_error(
                        f"{title}: {name}",
                        expected=f"{images.shape[1]} columns, as the images have",
                        got=tensor.shape[1],
                        fix="Project both towers to one embedding size.",
                    )
                )
        if len(images) != len(texts):
            raise InputError(
                format_error(
                    f"{title}: rows",
                    expected="as many texts as images",
                    got=f"{len(images)} images, {len(texts)} texts",
                    fix="Row i of one tower belongs to row i of the other; more negatives go to extra_texts.",
                )
            )
