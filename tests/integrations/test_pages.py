"""The recipes of hosts run: ours has the gradient of one process, theirs what the page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.cli.test_recipes import EVEN, OURS, THEIRS, UNEVEN, code_of, encoder, global_rows, in_float64
from tests.integrations.test_hf_trainer import Tagger, batch, ranks_of_accelerate, token_mean, token_sum, trainer_of
from tests.oracle import assert_close


def in_one_process(*micro_batches: str) -> tuple[nn.Module, ArcFaceLoss]:
    """A model and a loss with the gradients of micro-batches of all ranks, each with the mean over its rows."""
    with in_float64():
        model, rows = encoder(), global_rows()
        torch.manual_seed(3)
        loss = ArcFaceLoss(num_classes=10, embedding_size=32)
        values = [loss(model(rows[name]), rows["labels"]) for name in micro_batches]
        torch.stack(values).mean().backward()
        return model, loss


def step_of(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    found = {f"model.{name}": p for name, p in model.named_parameters()}
    found |= {f"loss.{name.split('.')[-1]}": p for name, p in loss.named_parameters()}
    return {name: p.detach() - 0.1 * p.grad if p.grad is not None else p.detach() for name, p in found.items()}


def with_accelerate(section: str, cuts: tuple[int, ...]) -> dict[str, Tensor]:
    (code,) = code_of("accelerate", section)
    part = slice(*cuts[dist.get_rank() : dist.get_rank() + 2])
    with ranks_of_accelerate(), in_float64():
        rows, model = {name: tensor[part] for name, tensor in global_rows().items()}, encoder()
        micro_batches = [(rows["images"], rows["labels"]), (rows["other"], rows["labels"])]
        given: dict[str, Any] = {"model": model, "micro_batches": micro_batches, **rows}
        torch.manual_seed(3)
        exec(code, given)
        if section == OURS:  # the optimizer has stepped, and left no gradients
            return step_of(model, given["loss"].module)
        found = {"model": torch.cat([p.grad.flatten() for p in model.parameters()])}
        return found | {"loss": given["loss"].W.grad.flatten()}


def test_accelerate(pool: RankPool) -> None:
    assert_all_close(pool.run(2, with_accelerate, OURS, UNEVEN), step_of(*in_one_process("images", "other")))


def test_accelerate_before(pool: RankPool) -> None:
    model, loss = in_one_process("images")
    found = pool.run(2, with_accelerate, THEIRS, EVEN)[0]
    assert_close({"model": found["model"]}, {"model": torch.cat([p.grad.flatten() for p in model.parameters()])})
    assert cosine_similarity(found["loss"], loss.W.grad.flatten(), dim=0) < 0.999


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def with_trainer(folder: str, section: str, accumulate: int) -> tuple[Tensor, float]:
    (code,) = code_of("hf_trainer", section)
    given: dict[str, Any] = {}
    exec(code.partition("trainer = ")[0], given)
    loss = given["loss"]
    with ranks_of_accelerate():
        callbacks = [loss] if section == OURS else []
        trainer = trainer_of(folder, loss, accumulate, callbacks=callbacks, max_steps=1)
        trainer.args.max_grad_norm = 0.0
        before = flat(Tagger())
        trainer.train()
        return before - flat(trainer.model), trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_hf_trainer(pool: RankPool, tmp_path: Path, accumulate: int) -> None:
    model = Tagger()
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    window = [batch(index) for index in range(2 * accumulate)]
    value = token_mean(model, window)
    value.backward()
    optimizer.step()
    truth = before - flat(model)
    for found, logged in pool.run(2, with_trainer, str(tmp_path), OURS, accumulate):
        assert_close({"step": found}, {"step": truth})
        assert logged == pytest.approx(value.item(), rel=1e-5)
    # theirs is the mean of means times ranks and micro-batches
    optimizer.zero_grad()
    model = Tagger()
    means = [token_sum(model(each["inputs"]), each["labels"]) / (each["labels"] != -100).sum() for each in window]
    torch.stack(means).mean().backward()
    of_means = 0.3 * torch.cat([p.grad.flatten() for p in model.parameters()])
    theirs, _ = pool.run(2, with_trainer, str(tmp_path), THEIRS, accumulate)[0]
    ratio = 2.0 * accumulate
    assert_close({"step": theirs}, {"step": ratio * of_means})
    assert f"{ratio:.1f} times" in manual.recipes()["hf_trainer"]
