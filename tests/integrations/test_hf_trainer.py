"""`hf_loss` in Hugging Face's Trainer on ranks: parameters and logged values of one process, step by step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_losses import ConfigurationError, GlobalBatchLoss, integrations
from lightning_ddp_losses.integrations.hf_trainer import hf_loss
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close, assert_errors
from tests.integrations.encoders import QUIET
from tests.oracle import assert_close

FEATURES, CLASSES, LENGTH, STEPS, RATE, CLIP = 4, 6, 3, 3, 0.3, 0.4


class Tagger(nn.Module):  # a class for each token; in float64
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.net(inputs)}


def batch(number: int) -> dict[str, Tensor]:
    """One micro-batch of one rank; rows and valid tokens differ between them."""
    generator = torch.Generator().manual_seed(number)
    rows = 1 + (3 * number) % 4
    labels = torch.randint(CLASSES, (rows, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = -100
    labels[0, 0] = number % CLASSES
    return {"inputs": torch.randn(rows, LENGTH, FEATURES, generator=generator, dtype=torch.float64), "labels": labels}


def token_sum(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs["logits"].flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def token_mean(model: nn.Module, window: list[dict[str, Tensor]]) -> Tensor:
    total = sum(token_sum(model(each["inputs"]), each["labels"]) for each in window)
    return total / sum(int((each["labels"] != -100).sum()) for each in window)


def valid(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return (labels != -100).sum()


@contextlib.contextmanager
def ranks_of_accelerate() -> Iterator[None]:
    """Let accelerate find the process group that is there."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    states = (AcceleratorState, GradientState, PartialState)
    with mock.patch.dict(os.environ, {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}):
        for state in states:
            state._shared_state.clear()
        try:
            yield
        finally:
            for state in states:
                state._shared_state.clear()


def number_of_batches(world_size: int, accumulate: int) -> int:
    """Of all ranks. The last window of an epoch is shorter by one."""
    return world_size * (STEPS * accumulate - (accumulate > 1))


def trainer_of(folder: str, loss: Any, accumulate: int, *, callbacks: list[Any] | None = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=CLIP,
        remove_unused_columns=False,
        lr_scheduler_type="constant",
        **QUIET | options,
    )
    batches = [batch(index) for index in range(number_of_batches(dist.get_world_size(), accumulate))]

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(batches)

        # FSDP2 wants the optimizer made here
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD((model or self.model).parameters(), RATE)
            return self.optimizer

    return InOrder(
        Tagger(),
        arguments,
        data_collator=lambda items: items[0],
        train_dataset=batches,
        eval_dataset=[batch(index) for index in range(4)],
        compute_loss_func=loss,
        callbacks=[loss] if callbacks is None else callbacks,
    )


def on_ranks(
    folder: str, accumulate: int, average: bool, with_count: bool
) -> tuple[dict[str, Tensor], list[float], float]:
    with ranks_of_accelerate():
        loss = hf_loss(token_sum, valid) if with_count else hf_loss(token_sum)
        trainer = trainer_of(folder, loss, accumulate, average_tokens_across_devices=average)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return trainer.model.state_dict(), logged, trainer.evaluate()["eval_loss"]


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer, value: Tensor) -> None:
    optimizer.zero_grad()
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def in_one_process(world_size: int, accumulate: int) -> tuple[dict[str, Tensor], list[float], float]:
    """All micro-batches of all ranks in one."""
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    number = number_of_batches(world_size, accumulate)
    values = []
    for start in range(0, number, accumulate * world_size):
        window = [batch(index) for index in range(start, min(start + accumulate * world_size, number))]
        value = token_mean(model, window)
        step_alone(model, optimizer, value)
        values.append(value.item())
    # evaluation: the mean over batches of ranks together, in the order of the Trainer
    evaluated = []
    for start in range(0, 4, world_size):
        together = [batch(index) for index in range(start, start + world_size)]
        evaluated.append(token_mean(model, together).item())
    return model.state_dict(), values, sum(evaluated) / len(evaluated)


@pytest.mark.parametrize("average", [True, False], ids=["tokens of all ranks", "tokens of a rank"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_process(pool: RankPool, tmp_path: Path, accumulate: int, average: bool) -> None:
    truth, values, evaluated = in_one_process(2, accumulate)
    for state, logged, eval_loss in pool.run(
        2, on_ranks, str(tmp_path), accumulate, average, accumulate == 1 and average
    ):
        assert_close(state, truth)
        assert logged == pytest.approx(values, rel=1e-5)
        assert eval_loss == pytest.approx(evaluated, rel=1e-5)


def contrast(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.flatten(1)
    return cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class Contrast(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return contrast(logits, labels)


def global_on_ranks(folder: str, accumulate: int) -> dict[str, Tensor]:
    over_all_ranks = GlobalBatchLoss(Contrast())
    with ranks_of_accelerate():
        loss = hf_loss(lambda outputs, labels: over_all_ranks(outputs["logits"], labels))
        trainer = trainer_of(folder, loss, accumulate)
        trainer.train()
        return trainer.model.state_dict()


def test_a_loss_over_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        both = [batch(2 * step), batch(2 * step + 1)]
        logits = torch.cat([model(each["inputs"])["logits"] for each in both])
        step_alone(model, optimizer, contrast(logits, both[0]["labels"]))
    assert_all_close(pool.run(2, global_on_ranks, str(tmp_path), 1), model.state_dict())


def test_rows_are_not_compared_under_accumulation(pool: RankPool, tmp_path: Path) -> None:
    words = ("gradient_accumulation_steps=4: expected 1, got a loss that compares the rows", "microbatched")
    assert_errors(pool.errors(2, global_on_ranks, str(tmp_path), 4), *words, of="ConfigurationError")


def wrongly(folder: str, how: str) -> None:
    with ranks_of_accelerate():
        loss = hf_loss(token_sum, valid if how == "count" else None)
        accumulate = 4 if how in ("count", "factor") else 1
        trainer = trainer_of(folder, loss, accumulate, callbacks=[] if how == "callback" else None)
        if how == "factor":
            trainer.loss_is_scaled_for_ga = False
        trainer.train()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("callback", "expected Trainer(compute_loss_func=loss, callbacks=[loss]), got compute_loss_func alone"),
        ("count", "gradient_accumulation_steps=4: expected 1, got count=, which is not known before"),
        ("factor", "factor that the Trainer has applied to the loss: expected 2, got 0.5"),
    ],
)
def test_refusals(pool: RankPool, tmp_path: Path, how: str, expected: str) -> None:
    assert_errors(pool.errors(2, wrongly, str(tmp_path), how), expected, of="ConfigurationError")


def test_a_mean_is_no_sum() -> None:
    with pytest.raises(ConfigurationError, match="expected reduction='sum', got reduction='mean'"):
        hf_loss(nn.CrossEntropyLoss())


def test_parameters_that_nobody_trains(tmp_path: Path) -> None:
    loss = hf_loss(nn.Linear(2, 2))
    words = "expected trainable parameters that the model holds, got weight, bias"
    with pytest.raises(ConfigurationError, match=words):
        loss.on_train_begin(None, None, None, model=Tagger())


def test_another_release_is_a_warning() -> None:
    words = r"transformers 4.40.1 is not among the tested releases \(5.23.\*, 5.24.\*\). Look."
    with mock.patch.object(integrations, "version", return_value="4.40.1"), pytest.warns(UserWarning, match=words):
        integrations.warn_untested("transformers", "Look.")


def test_evaluation_without_a_number_of_items() -> None:
    """As releases before 5 call it, with the options of one rank."""
    loss, each = hf_loss(token_sum), batch(3)
    loss.on_init_end(SimpleNamespace(gradient_accumulation_steps=4, average_tokens_across_devices=True), None, None)
    outputs = Tagger()(each["inputs"])
    with torch.no_grad():
        value = loss(outputs, each["labels"], num_items_in_batch=None)
    assert value == pytest.approx(float(token_sum(outputs, each["labels"]).detach() / (each["labels"] != -100).sum()))
