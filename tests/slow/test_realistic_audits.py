"""What people train: checks are silent and audits equal for healthy modules, and of a sick twin the first diagnosis is right.

Every healthy module trains with all checks under both strategies, in the rank pool. An audit forks processes of its own for each
run (most of its seconds), so each module is audited under one of the strategies, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_ddp_losses import DDPChecks, SyncBatchNorm, audit
from lightning_ddp_losses.testing import RankPool
from tests.audit.realistic import contrastive, pictures, sequences, tables, training
from tests.audit.realistic.base import Realistic
from tests.fits import make_trainer

pytestmark = [
    # what Lightning 2.6 calls in self.all_gather
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]
STRATEGIES = ("ddp", "ddp_losses")


@dataclass(frozen=True)
class Setup:
    """How a module trains.

    Attributes:
        unused: Some parameters have no gradient in some backward, so the strategy has to look for them.
        options: Of the trainer; a callable value makes its own for each fit.
    """

    unused: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def strategy(self, name: str) -> str:
        return f"{name}_find_unused_parameters_true" if self.unused else name

    def trainer(self) -> dict[str, Any]:
        made = {name: value() if callable(value) else value for name, value in self.options.items()}
        return {"precision": "64-true", **made}


def swa() -> list[Any]:
    return [StochasticWeightAveraging(0.01, swa_epoch_start=1)]


def averages() -> list[Any]:
    return [WeightAveraging(use_buffers=False)]


def norms() -> list[Any]:
    return [SyncBatchNorm()]


UNUSED = Setup(unused=True)
CLIPPED = Setup(options={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2})
SETUPS: dict[type[Realistic], Setup] = {  # those that are not the default
    Realistic: Setup(options={"callbacks": averages}),
    pictures.Residual: Setup(options={"plugins": norms}),
    pictures.Adversaries: UNUSED,
    pictures.Wasserstein: UNUSED,
    sequences.Experts: UNUSED,
    training.LowRank: Setup(options={"callbacks": swa, "max_epochs": 2}),
    training.Regularised: CLIPPED,
    training.Scheduled: CLIPPED,
    training.Plateau: Setup(options={"max_epochs": 2}),
}
NAMES = {
    contrastive: """
        MoCo BYOL VICReg BarlowTwins Dino InfoNCE MaskedAutoencoder Towers SigmoidTowers SupervisedContrast MinedTriplets
        Remembered ClassCentres Proxies Prototypes MeanTeacher
    """,
    pictures: """
        Segmentation GlobalDice Residual Focal DetectionSet Adversaries Wasserstein Variational Diffusion Codebook Flow
    """,
    sequences: "LanguageModel PaddedLanguageModel Sequences Speech Experts",
    tables: "Recommender SampledItems KnowledgeGraph Graphs Survival PolicyGradient RootError",
    training: """
        LowRank Distillation HiddenTeacher LinearProbe Regularised ManyTasks GradientNorms Mixed Scheduled
        Plateau SharpnessAware ManualAccumulation InnerLoop
    """,
}
MODULES = [Realistic, *(getattr(file, name) for file, names in NAMES.items() for name in names.split())]
HEALTHY: dict[type[Realistic], Setup] = {module: SETUPS.get(module, Setup()) for module in MODULES}


@pytest.mark.parametrize("place", range(len(HEALTHY)), ids=[module.__name__ for module in HEALTHY])
def test_healthy_modules_are_equal(place: int) -> None:
    module, setup = list(HEALTHY.items())[place]
    strategy = setup.strategy(STRATEGIES[place % len(STRATEGIES)])
    report = audit(module(), strategy=strategy, steps=2, tolerance=1e-9, trainer_kwargs=setup.trainer())
    assert report.equal, str(report)
    assert report.rows


# module: strategy, fault and beginning of the title of the first diagnosis
NO_MEAN = "a loss that is no mean over its rows"
SICK: dict[type[Realistic], tuple[str, str, str]] = {
    contrastive.MoCo: ("ddp", "F64", "a memory queue that differs per rank"),
    contrastive.VICReg: ("ddp", "F29", "a loss over pairs"),
    contrastive.Dino: ("ddp_losses", "F64", "a buffer that each rank updates"),
    contrastive.Towers: ("ddp_losses", "F29", NO_MEAN),
    contrastive.MaskedAutoencoder: ("ddp_losses", "F30", "a mean of means"),
    pictures.Segmentation: ("ddp", "F29", NO_MEAN),
    pictures.Residual: ("ddp", "F59", "batch-norm statistics that differ per rank"),
    pictures.Wasserstein: ("ddp_find_unused_parameters_true", "F29", NO_MEAN),
    pictures.Variational: ("ddp_losses", "F72", "random numbers differ"),
    sequences.PaddedLanguageModel: ("ddp_losses", "F30", "a mean of means"),
    sequences.Sequences: ("ddp", "F30", "a mean of means"),
    sequences.Experts: ("ddp_find_unused_parameters_true", "F29", NO_MEAN),
    tables.KnowledgeGraph: ("ddp_losses", "F72", "random numbers differ"),
    tables.Graphs: ("ddp_losses", "F30", "a mean of means"),
    tables.PolicyGradient: ("ddp", "F29", NO_MEAN),
    training.Distillation: ("ddp", "F18", "a loss with reduction"),
    training.GradientNorms: ("ddp", "F29", NO_MEAN),
    training.Mixed: ("ddp", "F72", "random numbers differ"),
    training.Dropped: ("ddp_losses", "F72", "random numbers differ"),
}


@pytest.mark.parametrize("module", SICK, ids=lambda module: module.__name__)
def test_the_first_diagnosis_of_a_sick_twin_is_right(module: type[Realistic]) -> None:
    strategy, fault, title = SICK[module]
    options = {"precision": "64-true"}
    report = audit(module(sick=True), strategy=strategy, steps=2, tolerance=1e-9, trainer_kwargs=options)
    assert not report.equal
    assert report.diagnoses[0].fault == fault, str(report)
    assert report.diagnoses[0].title.startswith(title), str(report)


# No check speaks of a module as people write them, of any field, that trains as one process would.


def fit_all(modules: Sequence[type[Realistic]], strategy: str) -> dict[str, list[tuple[str, str, str]]]:
    """Train each module on this rank for two batches; by module, what its checks found: severity, fault, text."""
    said = {}
    for module in modules:
        setup = HEALTHY[module]
        options = setup.trainer()
        checks = DDPChecks(action="log", summary=False, file=False)
        options["callbacks"] = [*options.get("callbacks", []), checks]
        trainer = make_trainer(setup.strategy(strategy), use_distributed_sampler=True, limit_train_batches=2, **options)
        trainer.fit(module())
        said[module.__name__] = [(found.severity, found.fault, str(found)) for found in checks.findings]
    return said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_check_speaks_of_healthy_modules(pool: RankPool, strategy: str) -> None:
    for by_module in pool.run(2, fit_all, list(HEALTHY), strategy, seconds=600.0):
        assert {name: found for name, found in by_module.items() if found} == {}
        assert len(by_module) == len(HEALTHY)
