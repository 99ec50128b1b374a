"""What people train: healthy modules audit as equal with all checks silent, and of a sick twin the first diagnosis is right."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_ddp_losses import DDPChecks, SyncBatchNorm, audit
from tests.audit import realistic as r
from tests.audit.realistic import Realistic, table, two_tables

UNUSED = "_find_unused_parameters_true"
# module: the strategy under which it trains
HEALTHY: dict[type[Realistic], str] = {
    r.Realistic: "ddp",
    r.MoCo: "ddp",
    r.BYOL: "ddp_losses",
    r.VICReg: "ddp",
    r.Towers: "ddp_losses",
    r.InfoNCE: "ddp",
    r.Segmentation: "ddp_losses",
    r.Adversaries: f"ddp{UNUSED}",
    r.LanguageModel: "ddp_losses",
    r.Sequences: "ddp",
    r.Recommender: "ddp",
    r.MeanTeacher: "ddp",
    r.Residual: "ddp_losses",
    r.Scheduled: "ddp_losses",
    r.ClassCentres: "ddp_losses",
    r.LowRank: "ddp_losses",
    r.Distillation: "ddp",
    r.ManyTasks: "ddp_losses",
    r.GivenTriplets: "ddp",
}


# options of the trainer that a module wants
OPTIONS: dict[type[Realistic], dict[str, Any]] = {
    r.Residual: {"plugins": [SyncBatchNorm()]},
    r.Scheduled: {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    r.LowRank: {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)]},
}


@pytest.mark.parametrize("module", HEALTHY, ids=lambda module: module.__name__)
def test_healthy_modules_are_equal_and_no_check_speaks(module: type[Realistic]) -> None:
    checks = DDPChecks(action={"warning": "raise"}, summary=False, file=False)
    options = {"precision": "64-true", **OPTIONS.get(module, {})}
    options["callbacks"] = [*options.get("callbacks", []), checks]
    data = two_tables() if module is r.MeanTeacher else table()
    report = audit(module(), data, strategy=HEALTHY[module], steps=2, tolerance=1e-9, trainer_kwargs=options)
    assert report.equal, str(report)
    assert report.rows


# module: strategy, fault and beginning of the title of the first diagnosis
SICK: dict[type[Realistic], tuple[str, str, str]] = {
    r.MoCo: ("ddp", "F64", "a memory queue of its own"),
    r.VICReg: ("ddp", "F29", "a loss over pairs"),
    r.Towers: ("ddp_losses", "F29", "a loss that is no mean over its rows"),
    r.Segmentation: ("ddp", "F29", "a loss that is no mean over its rows"),
    r.Sequences: ("ddp", "F30", "a mean of means"),
    r.Distillation: ("ddp", "F18", "a loss with reduction"),
    r.Residual: ("ddp", "F59", "batch norm with each rank's own statistics"),
    r.GradientNorms: ("ddp", "F29", "a loss that is no mean over its rows"),
    r.Mixed: ("ddp", "F72", "random numbers differ"),
}


@pytest.mark.parametrize("module", SICK, ids=lambda module: module.__name__)
def test_the_first_diagnosis_of_a_sick_twin_is_right(module: type[Realistic]) -> None:
    strategy, fault, title = SICK[module]
    options = {"precision": "64-true"}
    report = audit(module(sick=True), table(), strategy=strategy, steps=2, tolerance=1e-9, trainer_kwargs=options)
    assert not report.equal
    assert report.diagnoses[0].fault == fault, str(report)
    assert report.diagnoses[0].title.startswith(title), str(report)
