"""One gradient of one rank overflows under 16-mixed: every rank skips the step, with all its parameters, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer, scale_of, scaled
from tests.oracle import batches
from tests.slow.test_matrix import PLAIN
from tests.strategies.jobs import TASK
from tests.strategies.matrix_jobs import Modes, loader_of, whole

PARTS = ("encoder.0.weight", "head.weight", "loss.W", "at_times.W")


class Overflowing(Modes):
    """The last rank's gradient of one parameter is infinite in the batch of one number, of each epoch."""

    def __init__(self, cell: Any, part: str, at: int) -> None:
        super().__init__({**cell, "losses": "several"}, ours=True)
        if cell["losses"] == "shards":
            self.loss = Modes(cell, ours=True).loss
        self.at, self.index = at, -1
        self.skipped: list[bool] = []
        self.get_parameter(part).register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        is_last_rank = dist.get_rank() == dist.get_world_size() - 1
        return torch.full_like(gradient, torch.inf) if is_last_rank and self.index == self.at else gradient

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.index = index
        self.before = {name: tensor.detach().clone() for name, tensor in self.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.skipped.append(all(torch.equal(tensor, self.before[name]) for name, tensor in self.named_parameters()))


def fit_overflowing(cell: Any, part: str, at: int) -> tuple[dict[str, Tensor], list[bool], float]:
    module = Overflowing(cell, part, at)
    options: dict[str, Any] = {"plugins": [scaled()]}
    if module.automatic_optimization:
        options["accumulate_grad_batches"] = int(cell["every"])
    trainer = make_trainer(DDPLossStrategy(), **options)
    trainer.fit(module, loader_of(cell, dist.get_world_size(), dist.get_rank()))
    return dict(module.state_dict()), module.skipped, scale_of(trainer)


# every two of part, optimisation and losses meet; the others are slow
CROSSED = [
    pytest.param(part, *way, losses, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
    for i, part in enumerate(PARTS)
    for j, way in enumerate([("automatic", 1), ("automatic", 3), ("two-optimizers", 1)])
    for k, losses in enumerate(["several", "shards"])
]


@pytest.mark.parametrize(("part", "optimisation", "every", "losses"), CROSSED)
def test_all_ranks_skip_together(pool: RankPool, part: str, optimisation: str, every: int, losses: str) -> None:
    cell = {**PLAIN, "optimisation": optimisation, "every": str(every), "losses": losses}
    at = 1  # in a window of three, not the batch that synchronises
    results = pool.run(2, fit_overflowing, cell, part, at)
    state = whole(cell, [state for state, _, _ in results])  # equal but for the shards
    assert all(tensor.isfinite().all() for tensor in state.values())
    # which batches end a window of accumulation, and which of these was skipped
    ends = [index for index in range(len(batches(TASK))) if (index + 1) % every == 0 or index + 1 == len(batches(TASK))]
    hit = next(end for end in ends if end >= at)
    for _, skipped, scale in results:
        assert scale == 2.0**3
        if optimisation == "automatic":
            assert [index for index in ends if skipped[index]] == [hit]
        else:  # the other optimizer, whose gradients are finite, steps
            assert not any(skipped)
