"""W ranks under `ddp_losses` train as one process does, for every learnable loss that is a sum over samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.oracle import CLASS_LOSSES, Encoder, assert_close, batches, cuts, differences, train
from tests.strategies.jobs import OPTIMIZERS, TASK, Job, assert_as_alone, fit, make_loss

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # optimizer, trainer options, what the oracle does for them
    "sgd": ("sgd", {}, {}),
    "adam": ("adam", {}, {}),
    "clip": ("sgd", {"gradient_clip_val": 0.5}, {"clip_norm": 0.5}),
    "accumulate": ("sgd", {"accumulate_grad_batches": 2}, {"accumulate": 2}),
    "accumulate and clip": (
        "adam",
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3},
        {"accumulate": 3, "clip_norm": 0.3},
    ),
}


def trained_alone(name: str, optimizer: str, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    encoder = Encoder(TASK).double()
    loss = make_loss(name)
    train(encoder, loss, batches(TASK), OPTIMIZERS[optimizer], **options)
    state = {f"encoder.{key}": value for key, value in encoder.state_dict().items()}
    return state | {f"loss.{key}": value for key, value in loss.state_dict().items()}


# each loss in each variant, and both on two ranks and on three; a fifth of them on one
CROSSED = [
    (name, variant, 2 + (i + j) % 2) for i, name in enumerate(CLASS_LOSSES) for j, variant in enumerate(VARIANTS)
]
CROSSED += [
    (name, variant, 1)
    for i, name in enumerate(CLASS_LOSSES)
    for j, variant in enumerate(VARIANTS)
    if (i + j) % len(VARIANTS) == 0
]


@pytest.mark.parametrize(("name", "variant", "world_size"), CROSSED)
def test_a_fit_equals_one_process(pool: RankPool, name: str, variant: str, world_size: int) -> None:
    optimizer, options, rule = VARIANTS[variant]
    expected = trained_alone(name, optimizer, **rule)
    assert max(differences(dict(Job(name).state_dict()), expected).values()) > 1e-3, "nothing was learnt"
    assert_all_close(pool.run(world_size, fit, partial(Job, name, optimizer), **options), expected)


@pytest.mark.filterwarnings("ignore:rows of .* differ between ranks")  # its own test is in test_calls.py
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_uneven_slices_follow_the_rule_per_rank(pool: RankPool, name: str) -> None:
    expected = trained_alone(name, "sgd", ranks=cuts(TASK.rows, 3, even=False))
    assert_all_close(pool.run(3, fit, partial(Job, name), even=False), expected)


@pytest.mark.parametrize("reduce_dtype", [torch.float64, "float64", "torch.float32", torch.bfloat16])
def test_gradients_travel_in_the_dtype_asked_for(pool: RankPool, reduce_dtype: Any) -> None:
    expected = trained_alone("ArcFaceLoss", "sgd")
    states = pool.run(2, fit, Job, {"loss_reduce_dtype": reduce_dtype})
    wide = str(reduce_dtype).endswith("float64")
    off = differences(states[0], expected)
    assert off["loss.W"] < (1e-9 if wide else 1e-1)
    assert wide or off["loss.W"] > 1e-9, "the option did nothing"
    assert_close(states[1], states[0], rtol=0)


class ValuesDiffer(Job):  # every rank has its own initial values: rank 0's are everybody's after the first broadcast
    def build(self, loss: str) -> None:
        super().build(loss)
        if dist.is_initialized() and dist.get_rank():
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(dist.get_rank())


def test_initial_values_come_from_rank_0(pool: RankPool) -> None:
    assert_as_alone(pool, ValuesDiffer, worlds=(3,), alone=Job)
