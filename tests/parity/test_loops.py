"""Loops that are wrong in a known way are found at their first step, with the factor named; mended ones are silent."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses import parity
from tests.parity.loops import CASES, Case
from tests.slow_parameters import slow_parameters


@pytest.mark.parametrize("ranks", slow_parameters([2, 3], {3}))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_loops_are_named_and_mended_ones_silent(case: Case, ranks: int) -> None:
    report = parity(ranks=ranks, **case.wrong)
    assert not report.equal
    named = [each for each in report.diagnoses if each.fault == case.fault]
    assert named, str(report)
    if report.first_step is None:  # faults of the data. Two terms of a loss may each have the same fault
        assert len(named) == 1, str(report)
    found = named[0]
    assert case.words.format(W=ranks) in f"{found.title} {found.evidence} {found.fix}"
    assert report.first_step in (1, None)
    with pytest.raises(AssertionError, match=case.fault):
        report.raise_if_different()
    mended = parity(ranks=ranks, **case.mended)
    assert mended.equal, str(mended)
    assert "F18" not in [note.fault for note in mended.notes]


def test_gradients_of_one_direction_have_no_cosine_in_their_diagnosis() -> None:
    report = parity(lambda: nn.Linear(1, 1, bias=False), squared_mean, [torch.arange(8.0)[:, None]])
    (found,) = report.diagnoses
    assert found.fault == "F29"
    assert "Gradients differ. " in found.evidence
    assert "cosine" not in found.evidence


def squared_mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean().square()
