"""Certificates of losses: never right where a mean over ranks differs from one process, and the line that decides."""

from __future__ import annotations

import copy
import inspect
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ddp_losses import Certificate, certify
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.losses import GlobalBatchLoss
from tests.doors import tensors_in
from tests.losses.certified_losses import CASES, COUNTS, PATH, RIGHT, UNKNOWN, WRONG, C, Case, normal
from tests.losses.random_losses import WIDTH, RandomLoss

# the losses run on rows that they warn about
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RANKS_AND_ROWS = ((2, 3), (3, 2), (4, 5), (2, 8), (5, 1))


def cut(nest: Any, rows: slice) -> Any:
    """New leaves with some rows of a nest."""
    if isinstance(nest, dict):
        return {name: cut(value, rows) for name, value in nest.items()}
    if isinstance(nest, (tuple, list)):
        return type(nest)(cut(value, rows) for value in nest)
    return nest[rows].clone().requires_grad_(nest.is_floating_point() and nest.requires_grad)


def gradients(loss: Any, args: Any, rows: slice) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Value, gradient of the parameters, and gradients of the rows."""
    given = cut(args, rows)
    value = loss(*given)
    leaves = [tensor for tensor in tensors_in(given) if tensor.requires_grad]
    parameters = list(loss.parameters()) if isinstance(loss, nn.Module) else []
    found = torch.autograd.grad(value, [*parameters, *leaves], allow_unused=True, materialize_grads=True)
    of_parameters = torch.cat([torch.zeros(1), *(each.flatten() for each in found[: len(parameters)])])
    return value.detach(), of_parameters, list(found[len(parameters) :])


def difference(loss: Any, args: Any, ranks: int, rows: int) -> float:
    """How far the mean over ranks with equally many rows is from one process, relative to the largest number of both."""
    whole = gradients(copy.deepcopy(loss), args, slice(0, ranks * rows))
    parts = [gradients(copy.deepcopy(loss), args, slice(rank * rows, (rank + 1) * rows)) for rank in range(ranks)]
    expected = [whole[0].view(1), whole[1], *whole[2]]
    found = [
        torch.stack([part[0] for part in parts]).mean().view(1),
        torch.stack([part[1] for part in parts]).mean(0),
        *(torch.cat(of_ranks) / ranks for of_ranks in zip(*(part[2] for part in parts), strict=True)),
    ]
    scale = max(1e-6, *(float(each.norm()) for each in (*expected, *found)))
    return max(float((a - b).norm()) / scale for a, b in zip(expected, found, strict=True))


def largest_difference(loss: Any, args_of: Any) -> float:
    """The largest difference over numbers of ranks and rows. A loss may not run on some numbers of rows."""
    found = []
    for ranks, rows in RANKS_AND_ROWS:
        torch.manual_seed(ranks)
        args = args_of(ranks * rows)
        for tensor in tensors_in(args):
            tensor.requires_grad_(tensor.is_floating_point())
        try:
            found.append(difference(loss, args, ranks, rows))
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
            continue  # of an odd number of rows, or of one
    assert len(found) > 1
    return max(each for each in found if each == each)


def certified(case: Case) -> Certificate:
    torch.manual_seed(0)
    return certify(case.loss, *case.rows(8))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict_and_line(case: Case) -> None:
    certificate = certified(case)
    assert certificate.verdict == case.verdict, str(certificate)
    lines = [reason.text for reason in certificate.reasons]
    assert bool(lines) == (case.verdict != RIGHT)
    assert case.line in " | ".join(lines[:2])
    if case.line and "F." not in certificate.reasons[0].text and isinstance(case.loss, type(certified)):
        assert Path(certificate.reasons[0].file).name == Path(inspect.getfile(case.loss)).name


@pytest.mark.parametrize("case", [case for case in CASES if case.verdict in (RIGHT, WRONG)], ids=lambda case: case.name)
def test_simulated_ranks_agree_with_the_verdict(case: Case) -> None:
    loss = case.loss
    if isinstance(loss, nn.Module):
        loss = copy.deepcopy(loss).double()
    found = largest_difference(loss, case.rows)
    assert (found < 1e-9) == (case.verdict == RIGHT)


def test_the_table_is_large_enough() -> None:
    verdicts = Counter(case.verdict for case in CASES)
    assert len(CASES) >= 75
    assert verdicts[RIGHT] >= 30
    assert verdicts[WRONG] >= 30
    assert set(verdicts) == {RIGHT, COUNTS, WRONG, UNKNOWN, PATH}


def inputs_of_random_losses(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(n, WIDTH), normal(n, WIDTH), torch.randint(WIDTH, (n,))


def check_random_losses(seeds: range) -> Counter[tuple[str, bool]]:
    """Certify random losses, and simulate ranks of those that are called right."""
    found: Counter[tuple[str, bool]] = Counter()
    for seed in seeds:
        loss = RandomLoss(seed).double()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(2, 8, WIDTH, generator=generator)
        certificate = certify(loss, *rows, torch.randint(WIDTH, (8,), generator=generator))
        is_right = certificate.verdict == RIGHT
        if is_right:
            # a norm of nearly equal numbers loses digits
            assert largest_difference(loss, inputs_of_random_losses) < 1e-7, seed
        found[certificate.verdict, is_right] += 1
    return found


def test_no_random_loss_is_called_right_and_is_not() -> None:
    found = check_random_losses(range(120))
    # about half of them are right, so that the test can fail on both sides
    assert found[RIGHT, True] > 40
    assert found[WRONG, False] > 40


@pytest.mark.slow
@pytest.mark.parametrize("start", range(120, 1320, 300))
def test_no_random_loss_of_many_is_called_right_and_is_not(start: int) -> None:
    found = check_random_losses(range(start, start + 300))
    assert found[RIGHT, True] > 100


# ---------------------------------------------------------------------- what the certificate says


def test_the_text_names_the_line_and_what_is_sent() -> None:
    case = next(case for case in CASES if case.name == "flops")
    text = str(certified(case))
    assert text.startswith("Wrong under plain DDP")
    assert "return (mean**2).sum()\n      pow: not a linear function" in text
    assert "certified_losses.py:" in text
    # 8 ranks with 8 rows of 4 numbers of 8 bytes
    assert f"each rank gathers at most {8 * 8 * C * 8:,} bytes of rows" in text


def test_what_is_sent_is_the_plan_of_the_global_loss() -> None:
    x, y = normal(8, C), torch.randint(C, (8,))
    sent = certify(nn.CrossEntropyLoss(), x, y).sent
    assert sent.evaluation == "elements"
    assert sent.gathered_bytes == 0
    assert str(GlobalBatchLoss(nn.CrossEntropyLoss()).plan).startswith(sent.text)
    refused = certify(nn.MSELoss(), normal(8, C), normal(8, C)).sent
    assert (refused.ranks, refused.rows) == (8, 8)


def test_json_holds_everything() -> None:
    certificate = certify(nn.CrossEntropyLoss(weight=torch.ones(C)), normal(8, C), torch.randint(C, (8,)))
    read = json.loads(certificate.to_json())
    assert read["verdict"] == COUNTS
    assert read["reasons"][0]["why"] == certificate.reasons[0].why
    assert read["sent"]["ranks"] == 8


def test_targets_that_are_not_ignored_are_an_assumption() -> None:
    x, y = normal(8, C), torch.randint(C, (8,))
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=-100)):
        certificate = certify(loss, x, y)
        (assumed,) = certificate.limits
        assert assumed.why.startswith("no target of the example is ignore_index (-100). If some are")
        # the first line limits itself, and the lines after it say to what
        headline, path, *_ = str(certificate).splitlines()
        assert headline.startswith(
            "Right under plain DDP for ranks with equally many rows, on the path that the example takes:"
        )
        assert path == "The verdict is about this path only, and other rows may take another one:"
    assert "path" not in str(certify(nn.MSELoss(), x, x))
    y[0] = -100
    assert certify(nn.CrossEntropyLoss(), x, y).verdict == COUNTS


def test_which_tensors_get_a_gradient() -> None:
    def weighted(x: Tensor, weight: Tensor) -> Tensor:
        return (x[:, 0] * weight).sum() / weight.sum()

    x, weight = normal(8, C), torch.rand(8, dtype=torch.float64)
    assert certify(weighted, x, weight).verdict == WRONG
    assert certify(weighted, x.requires_grad_(), weight).verdict == COUNTS


def test_nothing_of_the_caller_changes() -> None:
    case = next(case for case in CASES if case.name == "centre")
    before, python_len = copy.deepcopy(case.loss.state_dict()), len
    x = normal(8, C)
    state = torch.get_rng_state()
    certify(case.loss, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert not x.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in case.loss.state_dict().items())

    def failing(x: Tensor) -> Tensor:
        if x.shape[0] != 8:
            raise ValueError("8 rows")
        return x.mean()

    certificate = certify(failing, x)
    assert certificate.verdict == UNKNOWN
    assert "ValueError: 8 rows" in certificate.reasons[0].why
    assert len is python_len


def test_a_hundred_operators_take_less_than_a_second() -> None:
    def long(x: Tensor) -> Tensor:
        for _ in range(50):
            x = F.relu(x * 1.01 + 0.1)
        return x.mean()

    x = normal(8, C)
    certify(long, x)
    # the fastest of several: other tests run beside it
    times = []
    for _ in range(3):
        start = time.perf_counter()
        assert certify(long, x).verdict == RIGHT
        times.append(time.perf_counter() - start)
    assert min(times) < 1


# ---------------------------------------------------------------------- bad input


REFUSED = [
    ("no rows", InputError, lambda: certify(nn.MSELoss()), "dimension 0 counts rows, got none"),
    ("a scalar", InputError, lambda: certify(torch.square, torch.tensor(1.0)), "dimension 0 counts rows, got none"),
    (
        "one row",
        InputError,
        lambda: certify(nn.MSELoss(), normal(1, 2), normal(1, 2)),
        "expected 2 rows or more, got 1",
    ),
    (
        "other rows",
        InputError,
        lambda: certify(nn.MSELoss(), normal(3, 2), {"a": normal(4, 2)}),
        "got example[0]: 3, example[1]['a']: 4",
    ),
    ("integers", InputError, lambda: certify(torch.sum, torch.arange(4)), "a floating tensor"),
    ("no reduction", ConfigurationError, lambda: certify(nn.MSELoss(reduction="none"), *normal(2, 4, 3)), "mean"),
    ("a dict", ConfigurationError, lambda: certify(lambda x: {"loss": x.mean()}, normal(4, 3)), "got dict"),
    ("no gradient", ConfigurationError, lambda: certify(lambda x: x.detach().mean(), normal(4, 3)), "with a gradient"),
    ("a class", ConfigurationError, lambda: certify(nn.MSELoss, *normal(2, 4, 3)), "a module or function"),
    (
        "a global loss",
        ConfigurationError,
        lambda: certify(GlobalBatchLoss(nn.MSELoss()), *normal(2, 4, 3)),
        "inside it",
    ),
]


@pytest.mark.parametrize(("error", "call", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_input(error: type[Exception], call: Any, text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert text in str(raised.value)


def test_an_error_of_the_loss_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        certify(lambda x: x.mean() * (1 / 0), normal(4, 3))
