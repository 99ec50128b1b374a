"""Random numbers in an audit: ranks draw what one process draws, so a model that draws is equal, and dropout hides no other fault."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import (
    DDPLossStrategy,
    audit,
    global_randomness,
    microbatched,
    parity,
)
from lightning_ddp_losses.testing import RankPool
from tests.audit import modules as m
from tests.audit.modules import Module, even, uneven
from tests.fits import make_trainer
from tests.randomness.models import CASES, batches, loss_of, make
from tests.slow_parameters import slow_parameters

ROWS = 8
AS_GIVEN = {"trainer_kwargs": {"use_distributed_sampler": False}}
STEP_STRATEGY = DDPLossStrategy(randomness="global")


def step(model: nn.Module, x: Tensor) -> Tensor:
    """A sum over rows, so that uneven ranks add up."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return 0.01 * loss_of(model, x) * world


def loop(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[Tensor]) -> None:
    optimizer.zero_grad()
    for index, x in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            (step(model, x) / len(micro_batches)).backward()
    optimizer.step()


# ---------------------------------------------------------------------- models that draw are equal

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"step": step},
    "three uneven ranks": {"step": step, "ranks": 3, "splits": [3, 2, 3]},
    "a rank without rows": {"step": step, "splits": [0, 8]},
    "micro-batches": {"step": step, "accumulate": 2, "splits": [5, 3]},
    "a loop over micro-batches": {"loop": loop, "accumulate": 2},
    "fully_shard": {"step": step, "wrap": "fully_shard"},
}
FAST = {
    "diffusion": "ddp",
    "re-entrant checkpoint": "three uneven ranks",
    "checkpoint": "a loop over micro-batches",
    "gan": "micro-batches",
    "vit block": "fully_shard",
}
# a rank without rows cannot draw these; and the micro-batches of a step that is linear in its loss are found to be not divided (F18)
NOT_EQUAL = {
    ("numbers that all rows share", "a rank without rows"),
    ("mixup", "a rank without rows"),
    ("attention with weights", "micro-batches"),
    ("attention with weights", "a loop over micro-batches"),
}
PARITIES = [(name, way) for name in CASES for way in WAYS if (name, way) not in NOT_EQUAL]


@pytest.mark.parametrize(("name", "way"), [
    pytest.param(name, way, marks=[] if FAST.get(name) == way else pytest.mark.slow) for name, way in PARITIES
])  # fmt: skip
def test_parity_of_models_that_draw(name: str, way: str) -> None:
    report = parity(lambda: make(name), batches=batches([ROWS, ROWS]), randomness="global", **WAYS[way])
    assert report.equal, str(report)
    assert report.rows


@pytest.mark.parametrize(("name", "way"), [("vit block", "three uneven ranks"), ("diffusion", "micro-batches")])
def test_parity_draws_by_row(name: str, way: str) -> None:
    report = parity(lambda: make(name), batches=batches([ROWS, ROWS]), randomness="by_row", **WAYS[way])
    assert report.equal, str(report)
    assert report.rows


def step_in_pieces(model: nn.Module, x: Tensor) -> Tensor:
    world = dist.get_world_size() if dist.is_initialized() else 1
    return 0.01 * loss_of(microbatched(model, 2), x) * world  # type: ignore[arg-type]


@pytest.mark.parametrize("randomness", ["global", "by_row"])
@pytest.mark.parametrize("way", ["three uneven ranks", "micro-batches"])
def test_parity_of_an_encoder_in_pieces(way: str, randomness: Any) -> None:
    options = WAYS[way] | {"step": step_in_pieces}
    report = parity(lambda: make("encoder layer"), batches=batches([ROWS, ROWS]), randomness=randomness, **options)
    assert report.equal, str(report)


class Drawing(Module):
    """A model of the list, whose loss is a mean over rows."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.encoder = make(name)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(batches([48])[0]), batch_size=4)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return loss_of(self.encoder, batch[0]) / len(batch[0])


AUDITS: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "ddp, re-entrant checkpointing": (partial(Drawing, "re-entrant checkpoint"), {"randomness": "global"}),
    "the strategy's own": (partial(Drawing, "checkpoint"), {"strategy": STEP_STRATEGY}),
    "accumulated": (m.Dropout, {"randomness": "global", "trainer_kwargs": {"accumulate_grad_batches": 2}}),
    "accumulated by the strategy": (m.Noise, {"strategy": STEP_STRATEGY, "trainer_kwargs": {"accumulate_grad_batches": 2}}),
    "half precision": (m.Dropout, {"randomness": "global", "trainer_kwargs": {"precision": "bf16-true"}}),
    "manual optimisation": (lambda: noisy(partial(m.Manual, right=True)), {"randomness": "global"}),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_parameters(AUDITS, {"accumulated by the strategy"}))
def test_audits_of_models_that_draw(name: str) -> None:
    made, options = AUDITS[name]
    module = made()
    data = None if isinstance(module, Drawing) else even(4)
    report = audit(module, data, **({"strategy": "ddp", "steps": 2} | options))
    assert report.equal, str(report)
    assert report.settings["randomness"] == "global"


def _save(path: str) -> None:
    trainer = make_trainer(DDPLossStrategy(randomness="global"), max_steps=2)
    trainer.fit(m.Dropout(), even(4))
    trainer.save_checkpoint(path)


def test_an_audit_continues_with_the_draws_of_a_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    pool.run(2, _save, path)
    report = audit(m.Dropout(), even(4), strategy=STEP_STRATEGY, steps=2, tolerance=1e-5, ckpt_path=path)
    assert report.equal, str(report)


# ---------------------------------------------------------------------- faults beside draws


def noisy(made: Callable[[], Module]) -> Module:
    """A module whose inputs lose units and get noise."""
    module = made()
    module.inputs = lambda x: F.dropout(x, 0.2) + 0.1 * torch.randn_like(x)  # type: ignore[method-assign]
    return module


# faults: how they are made, the data, options
BESIDE_DRAWS: dict[str, tuple[str, Callable[[], Module], Any, dict[str, Any]]] = {
    "pairs never gathered": ("F29", lambda: Module(pml.SupConLoss()), even, {}),
    "mean of means": ("F30", Module, partial(uneven, [2, 8] * 4), AS_GIVEN),
    "gather without autograd": ("F20", m.OwnSlotGather, even, {}),
    "own rows first": ("F26", lambda: Module(m.PMLWrapper(pml.NPairsLoss())), even, {}),
    "a summed loss": ("F18", lambda: Module(nn.CrossEntropyLoss(reduction="sum")), even, {}),
    "weights that start different": ("F04", m.RankSeeded, even, {}),
    "local batch norm": ("F59", m.BatchNorm, even, {}),
    "unknown": ("", m.RowsOfOthers, even, {}),
}


@pytest.mark.parametrize("randomness", slow_parameters(["rank", "global"], {"global"}))
@pytest.mark.parametrize("name", BESIDE_DRAWS)
def test_dropout_and_noise_hide_no_other_fault(name: str, randomness: Any) -> None:
    fault, made, data, options = BESIDE_DRAWS[name]
    options = {"strategy": "ddp", "steps": 1, "tolerance": 1e-5, "randomness": randomness} | options
    report = audit(noisy(made), data(), **options)
    assert report.diagnoses[0].fault == fault, str(report)
    assert randomness == "rank" or "F72" not in [each.fault for each in report.diagnoses], str(report)


def test_a_note_on_accumulated_pairs_is_given_beside_dropout() -> None:
    options = {"strategy": "ddp", "steps": 1, "tolerance": 1e-5, "trainer_kwargs": {"accumulate_grad_batches": 2}}
    report = audit(noisy(lambda: Module(pml.SupConLoss())), even(4), **options)
    assert "F33" in [note.fault for note in report.notes], str(report)
    report = audit(noisy(Module), even(4), **options)
    assert "F33" not in [note.fault for note in report.notes], str(report)


# ---------------------------------------------------------------------- draws that cannot be those of one process


class Seeded(Module):  # seeds inside of the step
    def inputs(self, x: Tensor) -> Tensor:
        torch.manual_seed(3 + self.global_step)
        return F.dropout(x, 0.2)


class DrawsInAHook(Module):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.noise = torch.randn(len(batch[0]), m.FEATURES)

    def inputs(self, x: Tensor) -> Tensor:
        return x + self.noise


REFUSED: dict[str, tuple[Callable[[], Module], list[str]]] = {
    "a permutation": (m.Permuted, ["randperm", "modules.py:", "order of rows"]),
    "a seed": (Seeded, ["torch's generator before", "Seed and set no generator inside the step"]),
    "another hook": (DrawsInAHook, ["outside of the step"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_so_is_the_reason_why_nobody_can_tell(name: str) -> None:
    made, texts = REFUSED[name]
    report = audit(made(), even(), strategy="ddp", steps=1, tolerance=1e-5)
    assert report.verdict == "cannot tell"
    (found,) = report.diagnoses
    assert (found.fault, found.severity) == ("F72", "unclear")
    for text in texts:
        assert text in found.evidence


def test_a_block_of_the_user_is_a_part_of_the_step() -> None:
    def by_hand(model: nn.Module, x: Tensor) -> Tensor:
        with global_randomness(rows=x):
            return step(model, x)

    for randomness in ("rank", "global"):
        report = parity(lambda: make("mc dropout"), by_hand, batches([ROWS]), randomness=randomness)  # type: ignore[arg-type]
        assert report.equal, str(report)
