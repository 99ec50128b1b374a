"""Each step looks at a part of the parameters; together the parts are all of them, and what changed is found when its part comes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses import DDPChecks, ParameterSyncCheck
from lightning_ddp_losses.callbacks.replicated_parameters import split_by_bytes
from tests.callbacks.harness import Subject
from tests.lightning_ranks import make_trainer
from tests.rank_pool import RankPool

SIZE = (1 << 20) + 5


class Big(Subject):
    """A parameter of four parts; one rank changes its last element before the second step."""

    def build(self) -> None:
        self.big = nn.Parameter(torch.zeros(SIZE))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + 0 * self.big.sum()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.odd and self.trainer.global_step == 1:
            with torch.no_grad():
                self.big[-1] += 0.25


def fit(check: Any) -> None:
    make_trainer("ddp", callbacks=[DDPChecks([check()], summary=False)], max_epochs=3).fit(Big(True))


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"parts": 1}, "optimizer step of step 1"),
        ({"parts": 4}, "optimizer step of step 3"),
        ({"parts": 4, "full_every_n_steps": 2}, "optimizer step of step 2"),
        ({"every_n_steps": 50}, "end of training, after 12 steps"),
    ],
    ids=str,
)
def test_a_change_is_found_when_its_part_comes(pool: RankPool, options: dict[str, int], step: str) -> None:
    errors = pool.errors(2, fit, partial(ParameterSyncCheck, **options))
    for error in errors:
        assert "`big` (rank 1), max difference 0.25" in error.message
        assert step in error.message, error.message


def test_parts_are_the_whole() -> None:
    tensors = {
        "a": torch.zeros(3),
        "b": torch.zeros(SIZE),
        "none": torch.zeros(0),
        "c": torch.zeros(700, 900, dtype=torch.float16),
    }
    parts = split_by_bytes(tensors, 16)
    assert len(parts) == 6, "at least 1 MiB in each"
    for name, tensor in tensors.items():
        slices = [piece for part in parts for piece in part if piece.name == name]
        assert sum(piece.of(tensor).numel() for piece in slices) == tensor.numel()
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    sizes = [sum(piece.of(tensors[piece.name]).nbytes for piece in part) for part in parts]
    assert max(sizes) - min(sizes[:-1]) <= 4
    assert split_by_bytes({}, 16) == [[]]
