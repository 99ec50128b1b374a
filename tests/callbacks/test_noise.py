"""Noise that all ranks draw alike is a warning, with the line that draws it. Masks, other seeds and numbers on purpose are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_ddp_losses import CommunicationMonitor, DDPLossStrategy, global_randomness
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import ROWS, WIDTH, Subject, fit
from tests.doors import DEFAULT_CHECKS

Draw = Callable[[Tensor], Tensor]


class Drawing(Subject):
    """A classifier whose inputs are changed by numbers that a step draws."""

    draw: Draw
    seeds_ranks = False

    def on_train_start(self) -> None:
        torch.manual_seed(dist.get_rank() * self.seeds_ranks)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features + self.draw(features), labels, index)


class Gan(Drawing):
    """Manual optimisation: a generator's step, then a discriminator's."""

    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.objective(*batch, index))
            optimizer.step()


def found_by(
    kind: type[Drawing], draw: Draw, seeds_ranks: bool, strategy: Any = "ddp", **options: Any
) -> list[tuple[str, str]]:
    # another check with a dispatch mode, in every step: each mode leaves in its order
    checks = [check() for check in DEFAULT_CHECKS if check is not CommunicationMonitor]
    checks.append(CommunicationMonitor(every_n_steps=1))
    module = kind(False)
    module.draw, module.seeds_ranks = draw, seeds_ranks
    if strategy == "global":
        strategy = DDPLossStrategy(randomness="global")
    callback = fit(checks, module, strategy, action="log", file=False, **options)
    assert not _get_current_dispatch_mode_stack()
    return [(finding.severity, finding.text()) for finding in callback.findings if finding.fault == "F72"]


def latents(features: Tensor) -> Tensor:
    return torch.randn(features.shape[0], WIDTH, dtype=features.dtype)


def like(features: Tensor) -> Tensor:
    return torch.rand_like(features)


def steps_of_diffusion(features: Tensor) -> Tensor:
    return torch.randint(1000, (len(features),))[:, None].to(features)


def of_a_distribution(features: Tensor) -> Tensor:
    return torch.distributions.Normal(features, torch.ones_like(features)).rsample()


def dropped(features: Tensor) -> Tensor:
    return nn.functional.dropout(features)


def dropped_rows(features: Tensor) -> Tensor:
    return torch.rand(len(features), 1).floor().to(features)


def one_number(features: Tensor) -> Tensor:
    return torch.rand((), dtype=features.dtype)


def projections(features: Tensor) -> Tensor:
    return torch.randn(ROWS + 3, WIDTH, dtype=features.dtype)[0]


def shared_on_purpose(features: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(features.shape, generator=generator, dtype=features.dtype) + one_number(features)


def new_values_of_a_parameter(features: Tensor) -> Tensor:
    table = nn.Parameter(torch.empty(len(features), WIDTH, dtype=features.dtype))
    return nn.init.normal_(table).detach()


def as_one_process(features: Tensor) -> Tensor:
    with global_randomness(rows=features):
        return latents(features)


def nothing(features: Tensor) -> Tensor:
    return torch.zeros_like(features)


NOISE = {
    "latents": (latents, "`randn` of (rows, 4) in test_noise.py:"),
    "like the batch": (like, "`rand_like` of (rows, 4) in test_noise.py:"),
    "steps of diffusion": (steps_of_diffusion, "`randint` of (rows) in test_noise.py:"),
    "a distribution": (of_a_distribution, "`normal_` of (rows, 4) in test_noise.py:"),
}
ADVICE = 'Take DDPLossStrategy(randomness="global")'


@pytest.mark.parametrize("name", NOISE)
def test_noise_that_all_ranks_draw_alike_is_a_warning(pool: RankPool, name: str) -> None:
    draw, expected = NOISE[name]
    for found in pool.run(2, found_by, Drawing, draw, False):
        ((severity, text),) = [each for each in found if each[0] != "note"]
        assert severity == "warning"
        assert expected in text
        assert ADVICE in text
        assert len(found) == 2, "the note that all numbers are equal comes first"


LOOPS: list[tuple[type[Drawing], int, str, dict[str, Any]]] = [
    (Drawing, 3, "ddp", {}),
    (Drawing, 2, "ddp_losses", {}),
    (Gan, 2, "ddp", {}),
    (Drawing, 2, "ddp", {"accumulate_grad_batches": 2, "max_epochs": 3}),
]


@pytest.mark.parametrize(("kind", "world_size", "strategy", "options"), LOOPS)
def test_in_other_loops(
    pool: RankPool, kind: type[Drawing], world_size: int, strategy: str, options: dict[str, Any]
) -> None:
    for found in pool.run(world_size, found_by, kind, latents, False, strategy, **options):
        assert [severity for severity, _ in found] == ["note", "warning"]


# what is drawn, whether the seeds have the rank, the strategy, and what is said then
SILENT = {
    "the rank in the seed": (latents, True, "ddp", []),
    "drawn as one process": (latents, False, "global", []),
    "a block": (as_one_process, False, "ddp", ["note"]),
    "nothing": (nothing, False, "ddp", []),
    "dropout": (dropped, False, "ddp", ["note"]),
    "dropped rows": (dropped_rows, False, "ddp", ["note"]),
    "a number for all rows": (one_number, False, "ddp", ["note"]),
    "projections": (projections, False, "ddp", ["note"]),
    "a parameter": (new_values_of_a_parameter, False, "ddp", ["note"]),
    "a generator of its own": (shared_on_purpose, False, "ddp", ["note"]),
}


@pytest.mark.parametrize("name", SILENT)
def test_other_draws_are_no_warning(pool: RankPool, name: str) -> None:
    draw, seeds_ranks, strategy, expected = SILENT[name]
    for found in pool.run(2, found_by, Drawing, draw, seeds_ranks, strategy):
        assert [severity for severity, _ in found] == expected, found
    assert all(found == [] for found in pool.run(1, found_by, Drawing, draw, seeds_ranks, strategy))
