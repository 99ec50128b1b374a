"""What cannot be compared is named, with the rank, and in time."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_losses import AuditError, ConfigurationError, DDPLossError, InputError, parity
from tests.parity.loops import batches, encoder, plain_loop, regression, sgd


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else -1


def built_by_rank() -> Any:
    torch.manual_seed(rank())
    return encoder()


def built_longer_by_rank() -> Any:
    model, optimizer = encoder()
    if rank() == 1:
        model.append(nn.Linear(2, 2))
    return model, optimizer


def with_optimizer() -> Any:
    model, make = encoder()
    return model, make(model)


def with_optimizer_of_another() -> Any:
    model, make = encoder()
    other, _ = encoder()
    return model, lambda wrapped: make(other)


def pairs(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["y"]).square()


def raises(model: Any, batch: Any) -> Any:
    if rank() == 1:
        raise ValueError("the user's own mistake")
    return regression(model, batch)


def hangs(model: Any, batch: Any) -> Any:
    if rank() == 1:
        time.sleep(600)
    return regression(model, batch)


def in_float32(model: Any, batch: Any) -> Any:
    return regression(model, {name: rows.float() for name, rows in batch.items()})


def never_steps(model: Any, optimizer: Any, micro_batches: Any) -> None:
    regression(model, micro_batches[0]).backward()


def steps_twice(model: Any, optimizer: Any, micro_batches: Any) -> None:
    plain_loop(model, optimizer, micro_batches)
    plain_loop(model, optimizer, micro_batches)


odd_batch = [batches()[0] | {"how": lambda: None}]
uneven_leaves = [{"x": torch.randn(12, 3), "y": torch.randn(8, 2)}]
REFUSED: list[tuple[str, dict[str, Any], type[DDPLossError], tuple[str, ...]]] = [
    ("built by rank", {"build": built_by_rank}, InputError, ("0.weight", "first value", "rank 1")),
    ("built longer", {"build": built_longer_by_rank}, InputError, ("`3.weight`", "nothing")),
    ("no model", {"build": dict}, ConfigurationError, ("a model", "dict")),
    ("optimizer too early", {"build": with_optimizer}, ConfigurationError, ("after the wrap", "SGD", "lambda model")),
    ("optimizer of another", {"build": with_optimizer_of_another}, ConfigurationError, ("rank 0", "of other parameters")),
    ("no scalar", {"step": pairs}, InputError, ("step, on rank", "a scalar tensor", "(6, 2)")),
    ("no tensor", {"step": lambda model, batch: 1.0}, InputError, ("a scalar tensor", "something else")),
    ("raises on a rank", {"step": raises}, AuditError, ("rank 1 of 2", "the user's own mistake", "in raises")),
    ("float32 inside", {"step": in_float32}, AuditError, ("dtype=None",)),
    ("no step", {"step": None, "loop": never_steps}, ConfigurationError, ("one optimizer.step()", "got 0")),
    ("two steps", {"step": None, "loop": steps_twice}, ConfigurationError, ("one optimizer.step()", "got 2")),
    ("step and loop", {"loop": plain_loop}, ConfigurationError, ("one of step and loop", "2 of them")),
    ("one rank", {"ranks": 1}, ConfigurationError, ("ranks", "2 or more")),
    ("unknown wrap", {"wrap": "dp"}, ConfigurationError, ("wrap", "fully_shard", "'dp'")),
    ("unknown split", {"splits": "half"}, ConfigurationError, ("splits", "uneven", "'half'")),
    ("wrong split", {"splits": [5, 5]}, InputError, ("add up to 12", "[5, 5]")),
    ("fewer rows than ranks", {"ranks": 13}, InputError, ("a row for each of 13 ranks", "12")),
    ("rows that do not divide", {"ranks": 5}, InputError, ("a multiple of 5", "uneven")),
    ("no common dimension", {"batches": uneven_leaves}, InputError, ("batches[0]['x']", "12", "8", "join=")),
    ("no such dimension", {"join": {"x": 2}}, InputError, ("join", "shape (12, 3)", "got 2")),
    ("no dimension", {"join": {"x": "rows"}}, InputError, ("join", "a dimension", "'rows'")),
    ("too few batches", {"steps": 3}, InputError, ("3 global batches", "got 1")),
    ("too few of a rank", {"batches": lambda rank, ranks: []}, InputError, ("batches, on rank", "got fewer")),
    ("no list", {"batches": batches()[0]}, ConfigurationError, ("a list of global batches", "dict")),
    ("a batch with a function", {"batches": odd_batch}, InputError, ("['how']", "can be pickled", "function")),
    ("no dtype", {"dtype": "float64"}, ConfigurationError, ("dtype", "torch.float64")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_it_is_named(name: str, options: dict[str, Any], error: type[DDPLossError], words: tuple[str, ...]) -> None:
    given = {"build": encoder, "step": regression, "batches": batches()} | options
    with pytest.raises(error) as caught:
        parity(**given)
    for word in words:
        assert word in str(caught.value)


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    with pytest.raises(AuditError, match="took more than 8 s") as caught:
        parity(encoder, hangs, batches(), timeout_seconds=8)
    first, waiting, hanging = re.split(r"rank \d was here:", str(caught.value))
    assert "run `ranks`" in first
    assert "Do all ranks run the same collectives" in first.replace("do all", "Do all")
    assert "in hangs" not in waiting
    assert "in hangs" in hanging


def test_nan_on_both_sides_is_said() -> None:
    report = parity(encoder, lambda model, batch: regression(model, batch) * torch.nan, batches())
    assert [each.fault for each in report.diagnoses] == ["F79"]
    assert not report.equal


def test_dropout_alike_is_an_explanation_and_not_a_number() -> None:
    report = parity(lambda: (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), sgd), regression, batches())
    assert [(each.fault, each.severity) for each in report.diagnoses] == [("F72", "explanation")]


def test_nothing_of_the_caller_changes() -> None:
    given = batches()
    state, dtype, environment = torch.get_rng_state(), torch.get_default_dtype(), dict(os.environ)
    parity(encoder, regression, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == dtype
    assert dict(os.environ) == environment
    assert not dist.is_initialized()
