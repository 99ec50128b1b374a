"""Faults planted under `fsdp2_ddp_losses`: the same error on every rank, named; and healthy fits, in which checks are silent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_ddp_losses import DDPChecks, DDPLossError, ModelParallelLossStrategy, microbatched
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import local_part
from tests.fits import make_trainer, scale_of, scaled, weights_of
from tests.oracle import assert_close
from tests.refusals import assert_same_error
from tests.strategies.fsdp_jobs import KINDS, Towers, fit_kind_alone, fit_sharded_model, make_job
from tests.strategies.jobs import TASK, fit_alone, loader, make_loss


def fit_checked(kind: str, prepare: Callable[[Towers], None] | None = None) -> None:
    fit_sharded_model(kind, prepare=prepare, callbacks=[DDPChecks()], max_epochs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_checks_are_silent_in_a_healthy_fit(pool: RankPool, kind: str) -> None:
    pool.run(2, fit_checked, kind)


def is_odd() -> bool:
    return dist.get_rank() == 1


def before_objective(module: Towers, what: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> None:
    plain = module.objective
    module.objective = lambda x, y, index: plain(*what(x, y, index), index)  # type: ignore[method-assign]


def a_loss_weight_drifts(module: Towers) -> None:
    def drift(*_: Any) -> None:
        if is_odd():
            module.loss.W.data.add_(1e-6)

    module.on_train_batch_end = drift  # type: ignore[method-assign]


def a_gradient_of_a_loss_changes(module: Towers) -> None:
    def change(*_: Any) -> None:
        if is_odd():
            module.loss.W.grad.mul_(1.5)

    module.on_before_optimizer_step = change  # type: ignore[method-assign]


def a_loss_is_skipped(module: Towers) -> None:
    plain = module.other
    module.objective = lambda x, y, index: (  # type: ignore[method-assign]
        (value := module.encoder(x)).square().mean() + (0 if is_odd() else plain(value, y))
    )


def labels_are_out_of_range(module: Towers) -> None:
    before_objective(module, lambda x, y, index: (x, y + TASK.classes if is_odd() and index == 2 else y))


def a_loss_weighs_otherwise(module: Towers) -> None:
    pairs = module.pairs
    module.objective = lambda x, y, index: pairs(module.encoder(x), y) * (2.0 if is_odd() else 1.0)  # type: ignore[method-assign]


def a_loss_hides(module: Towers) -> None:
    hidden = [make_loss("CosFaceLoss")]
    module.hidden = hidden  # type: ignore[assignment]
    module.optimised = lambda: [*module.parameters(), *hidden[0].parameters()]  # type: ignore[method-assign]


def a_learning_rate_differs(module: Towers) -> None:
    plain = module.configure_optimizers

    def configure() -> Any:
        optimizer = plain()
        if is_odd():
            optimizer.param_groups[0]["lr"] *= 2
        return optimizer

    module.configure_optimizers = configure  # type: ignore[method-assign]


def the_weight_has_another_shape(module: Towers) -> None:
    if is_odd():
        module.loss.W = nn.Parameter(torch.zeros(TASK.dim, TASK.classes + 1, dtype=torch.float64))


def a_parameter_appears_unequal(module: Towers) -> None:
    def appear(batch: Any, index: int) -> None:
        if index == 1:
            module.late = nn.Parameter(torch.full((TASK.dim,), float(dist.get_rank()), dtype=torch.float64))
            before_objective(module, lambda x, y, _: (x + module.late.sum(), y))

    module.on_train_batch_start = appear  # type: ignore[method-assign]


def the_step_fails(module: Towers) -> None:
    plain = module.objective

    def fail(x: Tensor, y: Tensor, index: int) -> Tensor:
        value = plain(x, y, index)
        if is_odd() and index == 2:
            raise DDPLossError("spilled coffee")
        return value

    module.objective = fail  # type: ignore[method-assign]


def divides_otherwise(module: Towers, part: nn.Module) -> None:
    if is_odd():
        module.configure_model = lambda: fully_shard(part, mesh=module.device_mesh["data_parallel"])  # type: ignore[method-assign]


def a_layer_stays_whole(module: Towers) -> None:
    divides_otherwise(module, module.encoder[2])


def a_layer_is_not_gathered_by_itself(module: Towers) -> None:
    divides_otherwise(module, module.encoder)


def a_part_becomes_nan(module: Towers) -> None:
    def spoil(*_: Any) -> None:
        if is_odd() and module.trainer.global_step == 2:
            local_part(dict(module.encoder.named_parameters())["0.weight"].grad)[0, 0] = torch.nan

    module.on_before_optimizer_step = spoil  # type: ignore[method-assign]


def a_step_is_skipped(module: Towers) -> None:
    """Nothing but parts is trained, so no value that ranks hold twice differs."""
    for loss in (module.loss, module.pairs, module.other):
        loss.requires_grad_(False)
    module.bias.requires_grad_(False)
    plain = module.optimizer_step

    def step(epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if is_odd() and index == 2:
            closure()
        else:
            plain(epoch, index, optimizer, closure)

    module.optimizer_step = step  # type: ignore[method-assign]


PLANTED: list[tuple[Callable[[Towers], None], list[str]]] = [
    (a_loss_weight_drifts, ["weights", "rank 1"]),
    (a_gradient_of_a_loss_changes, ["loss.W"]),
    (a_loss_is_skipped, ["ranks met at different places", "rank 1"]),
    (labels_are_out_of_range, ["labels", "rank 1"]),
    (a_loss_weighs_otherwise, ["coefficients of global losses"]),
    (a_loss_hides, ["CosFaceLoss at self.hidden[0]"]),
    (a_learning_rate_differs, ["lr"]),
    (the_weight_has_another_shape, ["loss.W"]),
    (a_parameter_appears_unequal, ["late"]),
    (the_step_fails, ["spilled coffee", "rank 1"]),
    (a_layer_stays_whole, ["encoder.0.weight", "rank 1"]),
    (a_layer_is_not_gathered_by_itself, ["encoder.0 divided by fully_shard", "rank 1"]),
    (a_step_is_skipped, ["F37", "rank 1", "0 optimizer steps"]),
]


@pytest.mark.parametrize(("plant", "words"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_the_same_error_on_every_rank(
    pool: RankPool, plant: Callable[[Towers], None], words: list[str]
) -> None:
    assert_same_error(pool.errors(2, fit_checked, "three", plant), *words)


def test_an_error_that_a_fault_of_the_step_before_leads_to_names_it(pool: RankPool) -> None:
    errors = pool.errors(2, fit_checked, "three", a_part_becomes_nan)
    assert_same_error(errors, "embeddings")
    spoilt = ("F79, after the optimizer step of step 2", "gradient of `encoder.0.weight` is not finite", "rank 1")
    assert all(words in error.traceback for error in errors for words in spoilt)


def fit_with_scaler(kind: str) -> tuple[dict[str, Tensor], float]:
    """Rank 1's part of the encoder's gradient overflows in the third batch."""
    module = make_job(kind, "adamw")

    def overflow() -> None:
        if is_odd() and module.trainer.global_step == 2 and module.trainer.fit_loop.batch_idx == 2:
            local_part(dict(module.encoder.named_parameters())["0.weight"].grad)[0, 0] = torch.inf

    module.on_after_backward = overflow  # type: ignore[method-assign]
    trainer = make_trainer(ModelParallelLossStrategy(), plugins=[scaled()], gradient_clip_val=0.3)
    trainer.fit(module, loader())
    return weights_of(module), scale_of(trainer)


class SkipsAStep(Towers):  # one process that leaves out the third step
    is_global = False

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if index == 2:
            closure()
            optimizer.zero_grad()
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: RankPool) -> None:

    expected = fit_alone(partial(SkipsAStep, "ArcFaceLoss", "adamw"), gradient_clip_val=0.3)
    for state, scale in pool.run(2, fit_with_scaler, "arcface"):
        assert_close(state, expected, rtol=1e-8)
        assert scale == 2.0**3


def in_pieces(module: Towers) -> None:
    run = microbatched(module.encoder, 3)
    module.objective = lambda x, y, index: module.loss(run(x) + module.bias, y)  # type: ignore[method-assign]


def fit_in_pieces() -> tuple[dict[str, Tensor], int]:
    with CountCollectives() as seen:
        state = fit_sharded_model("arcface", "adamw", even=False, prepare=in_pieces)
    return state, seen.names.count("_allgather_base_")


def test_an_encoder_runs_in_pieces(pool: RankPool) -> None:
    expected = fit_kind_alone("arcface", "adamw")
    for state, gathers in pool.run(2, fit_in_pieces):
        assert_close(state, expected, rtol=1e-8)
        # rank 1 has 8 rows: three pieces, each of which gathers two layers once forward and at most once backward
        assert TASK.steps * 3 * 2 <= gathers <= 2 * TASK.steps * 3 * 2
