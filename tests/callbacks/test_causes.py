"""What a finding says of its cause: as a fact only what somebody has seen, and once for all that follows from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses import GradientFlowCheck, ParameterSyncCheck, RankCheck
from lightning_ddp_losses.callbacks import Finding
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import Case, Subject, fit, run
from tests.callbacks.training_cases import CLIP, Clipped, Created, Halved, InAList, OwnBackward, Rates, only
from tests.doors import group_by_cause

REDUCED, UNREDUCED = "It was reduced", "not reduced"
# what breaks, who looks, and what must and must not be said
SAID: dict[str, tuple[Any, type[RankCheck], str, str]] = {
    "clipped on one rank": (Clipped, GradientFlowCheck, "reduced, and equal on all ranks before the step", UNREDUCED),
    "a backward after the reduction": (OwnBackward, GradientFlowCheck, f"{REDUCED}; some ranks changed it", UNREDUCED),
    "nobody saw it before": (Clipped, ParameterSyncCheck, "It was not reduced, or some ranks changed it", REDUCED),
    "a hook that is gone": (Halved, GradientFlowCheck, "took DDP's hook away", REDUCED),
}


@pytest.mark.parametrize("name", SAID)
def test_a_gradient_is_called_unreduced_only_where_it_was_seen(pool: RankPool, name: str) -> None:
    subject, check, said, unsaid = SAID[name]
    texts = [outcome.text for outcome in pool.run(2, run, Case(subject, "", "", checks=only(check)), True)]
    assert said in texts[0], texts[0]
    assert unsaid not in texts[0], texts[0]
    assert texts[0] == texts[1]


class TwoFaults(InAList):  # a head in a list, and another one in no optimizer
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.heads[0].parameters()], lr=0.1)


def warned(subject: Callable[[bool], Any], options: dict[str, Any]) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Train with ``action="warn"``; the warnings of the checks, and of each finding its text, fault and what it follows from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks = fit(None, subject(True), action={"error": "warn"}, file=False, **options)
    texts = [str(each.message) for each in caught if "Check, F" in str(each.message)]
    return texts, [(each.text(), each.fault, each.follows) for each in checks.findings if each.severity == "error"]


# one fault: its module, options of the trainer, how the only warning begins
ONE_FAULT: dict[str, tuple[Callable[[bool], Any], dict[str, Any], str]] = {
    "clipped on one rank": (Clipped, {}, "GradientFlowCheck, F13"),
    "a head in a list": (InAList, {}, "OptimizerCheck, F02"),
    "created late": (Created, {}, "GradientFlowCheck, F05"),
    "created late, clipped": (Created, CLIP, "GradientFlowCheck, F05"),
    "rates that differ": (Rates, {}, "OptimizerCheck, F17"),
}


@pytest.mark.parametrize("name", ONE_FAULT)
def test_one_fault_gives_one_warning_that_begins_with_the_cause(pool: RankPool, name: str) -> None:
    subject, options, beginning = ONE_FAULT[name]
    (texts, findings), *others = pool.run(2, warned, subject, options)
    assert len(texts) == 1, texts
    assert texts[0].startswith(beginning)
    # the others are kept, and say what they follow from
    assert len(findings) > 1
    assert [follows for _, _, follows in findings].count("") == 1
    assert not findings[0][2]
    assert all(each == findings for _, each in others), "every rank groups alike"


def test_two_faults_give_two_warnings(pool: RankPool) -> None:
    texts, findings = pool.run(2, warned, TwoFaults, {})[0]
    assert {text.split(", ")[1] for text in texts} == {"F01", "F02"}, texts
    assert {fault for _, fault, follows in findings if not follows} == {"F01", "F02"}


def test_the_cause_comes_before_what_it_brings() -> None:
    spread = Finding("F13", "gradient of `a`", check="GradientFlowCheck")
    result = Finding("F05", "parameter `b`", check="ParameterSyncCheck")
    cause = Finding("F05", "gradient of `b`", check="GradientFlowCheck")
    other = Finding("F30", "a mean of means", check="LossCheck")
    causes, late = group_by_cause([other, spread, result, cause])
    assert [(each.lead, each.followers) for each in causes] == [(cause, [result, spread]), (other, [])]
    assert not late
    causes, late = group_by_cause([Finding("SYNC", "later"), other], earlier=[cause])
    assert [each.lead for each in causes] == [other]
    assert [lead for _, lead in late] == [cause]


class NoTargets(Subject):  # one rank's first micro-batch has no valid target: a mean over nothing
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        targets = labels.clone()
        if self.odd and index == 0:
            targets[:] = -100
        return super().objective(features, targets, index)


def test_a_loss_that_is_not_finite_is_shown_as_it_was(pool: RankPool) -> None:
    case = Case(NoTargets, "F79", "LossCheck", options={"accumulate_grad_batches": 2})
    for outcome in pool.run(2, run, case, True):
        finding, *_ = [each for each in outcome.findings if (each["check"], each["severity"]) == ("LossCheck", "error")]
        assert finding["values"][1] == "nan in batch 0"
        assert float(finding["values"][0]) > 0
        assert "valid target" in finding["fix"]
