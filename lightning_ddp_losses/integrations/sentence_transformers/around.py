"""Losses of sentence-transformers around another loss: dimensions, layers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import all_reduce_with_grad
from lightning_ddp_losses.integrations.sentence_transformers.evaluations import (
    Features,
    OverAllRanks,
    rows_in,
    stands_in,
)

_are_draws_common: ContextVar[bool] = ContextVar("are_draws_common", default=False)
"""True while all ranks draw the same numbers, in a loss around another that also draws (Matryoshka2d)."""


class Drawing(OverAllRanks):
    """Evaluates a loss around another that draws some dimensions or layers per step, using rank 0's draws on all ranks."""

    _draws = ("n_dims_per_step", "n_layers_per_step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the global loss of this rank's columns."""
        parts = [self, getattr(self, "loss", None)]
        if not any(getattr(part, name, 0) > 0 for part in parts for name in self._draws):
            return super().__call__(*args, **kwargs)
        with _draws_of_rank_0(type(self).__name__):
            return super().__call__(*args, **kwargs)


class Layers(Drawing):
    """Evaluates a loss on several layers, each compared with the last one row by row."""

    kl_div_weight: float
    kl_temperature: float

    def forward(self, sentence_features: Sequence[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns.

        Communication: of the inner loss for each layer; with the comparison one handshake, and one exchange forward and backward.
        """
        weight = self.kl_div_weight
        world_size = process_groups.world_size()
        theirs_on: Any = super().forward  # type: ignore[misc]
        if world_size == 1 or self.kl_temperature <= 0:
            return theirs_on(sentence_features, labels)  # type: ignore[no-any-return]
        # the mean over the rows of this rank is weighted by their number
        rows = 0 if stands_in.get() else rows_in(sentence_features[0])
        counts = handshake.all_gather_json(type(self).__name__, {"which of several": self._instance}, rows)
        try:
            self.kl_div_weight = weight * rows * world_size / max(sum(counts), 1)
            value = theirs_on(sentence_features, labels)
        finally:
            self.kl_div_weight = weight
        return self._shared(all_reduce_with_grad(value / world_size))


@contextlib.contextmanager
def _draws_of_rank_0(title: str) -> Iterator[None]:
    """Make Python's generator draw the same numbers on all ranks as on rank 0. Other ranks' own state is restored afterwards."""
    if process_groups.world_size() == 1 or _are_draws_common.get():
        yield
        return
    own = random.getstate()
    is_first = process_groups.rank(None) == 0
    version, numbers, gauss = handshake.all_gather_json(f"{title}: random state", {}, own if is_first else None)[0]
    random.setstate((version, tuple(numbers), gauss))
    token = _are_draws_common.set(True)
    try:
        yield
    finally:
        _are_draws_common.reset(token)
        if not is_first:
            random.setstate(own)
