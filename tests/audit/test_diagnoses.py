"""Every fault has a small module whose first diagnosis names it; healthy modules audit as equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, SyncBatchNorm, audit
from tests.audit import modules as m
from tests.audit.modules import Module, even, learned, rows, uneven
from tests.slow_parameters import slow_parameters

NO_SAMPLER = {"use_distributed_sampler": False}
# a fault is far beyond rounding, which two runs of five would measure, and shows in the first step unless its row says otherwise;
# what is healthy has its rounding measured, and a second step
FAULTY = {"strategy": "ddp", "steps": 1, "tolerance": 1e-5}


def scaler(scale: float | None = None) -> dict[str, Any]:
    return {"plugins": [RankScaled(scale)]}


class RankScaled(MixedPrecision):  # fp16 on the CPU; without a scale, each rank's scaler starts with another one
    def __init__(self, scale: float | None) -> None:
        super().__init__("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        self.given = scale

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        if self.scaler._scale is None:
            self.scaler._init_scale = self.given or 2.0 ** (8 + m.rank())
        return super().pre_backward(tensor, module)


def on(loss: Callable[[], nn.Module], make: Callable[..., Module] = Module) -> m.Make:
    """A module with a loss, both made when the audit is."""
    return lambda: make(loss())


def wrapped(loss: Callable[[], nn.Module], make: Callable[..., Module] = Module) -> m.Make:
    """A module with a loss in the wrapper of pytorch-metric-learning."""
    return on(lambda: m.PMLWrapper(loss()), make)


def memory(rows_kept: int) -> nn.Module:
    return pml.CrossBatchMemory(pml.ContrastiveLoss(), m.CLASSES, rows_kept)


def supcon() -> nn.Module:
    return GlobalBatchLoss(pml.SupConLoss())


def own_pairs() -> nn.Module:
    return pml.ContrastiveLoss(pos_margin=0, neg_margin=0)


def rows_by_rank(make: Callable[[], Any]) -> Any:
    """Batches that the data set has divided by rank."""
    return lambda: DataLoader(make(), batch_size=None)


GLOBAL = {"strategy": "ddp_losses"}
UNUSED = {"strategy": "ddp_find_unused_parameters_true"}
AS_GIVEN = {"trainer_kwargs": NO_SAMPLER}
ACCUMULATED = {"trainer_kwargs": {"accumulate_grad_batches": 2}}
CLIPPED = {"trainer_kwargs": {"gradient_clip_val": 0.1}}
BF16 = {"trainer_kwargs": {"precision": "bf16-mixed"}}
SYNCED = {"trainer_kwargs": {"plugins": [SyncBatchNorm()]}}
THREE = {"devices": 3}
TWO_STEPS = {"steps": 2}
ONE_STEP = {"steps": 1}
few = partial(even, 4)
two_eight = partial(uneven, [2, 8] * 4)
of_three = partial(uneven, [2, 8, 4] * 4)
later = partial(uneven, [4, 4, 2, 8, 4, 4])
by_class = partial(even, sampler=MPerClassSampler(rows().tensors[1], m=2, batch_size=8))
soft_triple, proxy_nca = partial(learned, "SoftTripleLoss"), partial(learned, "ProxyNCALoss")
summed = partial(nn.CrossEntropyLoss, reduction="sum")
unsynchronised = TWO_STEPS | {"strategy": DDPStrategy(broadcast_buffers=False)}
masked, same_rows, no_targets = (rows_by_rank(each) for each in (m.Masked, m.SameOnAllRanks, m.NoTargets))
AS_GIVEN_ACCUMULATED = {"trainer_kwargs": NO_SAMPLER | {"accumulate_grad_batches": 2}}

# what it shows: (fault, module, data, options of audit)
FAULTS: dict[str, tuple[str, m.Make, Any, dict[str, Any]]] = {
    "gather without autograd": ("F20", m.OwnSlotGather, even, {}),
    "gather without autograd, ArcFace": ("F20", on(learned, m.OwnSlotGather), even, THREE),
    "gather without any graph": ("F20", m.CutGather, even, GLOBAL),
    "gather without any graph, ArcFace": ("F20", on(learned, m.CutGather), even, GLOBAL),
    "own slot beside a right term": ("F20", m.BesideProxies, even, {}),
    "self.all_gather next to a right term": ("F20", partial(m.LightningGather, sync_grads=False), even, {}),
    "all_reduce in place": ("F20", m.InPlaceReduce, even, {}),
    "PML's wrapper around ArcFace": ("F24", wrapped(learned), even, {}),
    "PML's wrapper around SoftTriple, 3 ranks": ("F24", wrapped(soft_triple), few, THREE),
    "PML's wrapper around ProxyNCA, accumulated": ("F24", wrapped(proxy_nca), few, ACCUMULATED),
    "factor W on top of a gather with gradient": ("F21", m.DoubleScaling, even, {}),
    "a metric as loss": ("F27", m.MetricAsLoss, even, {}),
    "SupCon never gathered": ("F29", on(pml.SupConLoss), even, {}),
    "triplets never gathered under ddp_losses": ("F29", on(pml.TripletMarginLoss), even, GLOBAL),
    "contrast by hand never gathered": ("F29", m.HandWrittenContrast, even, {}),
    "the square of a mean": ("F29", m.SquaredMean, even, {}),
    "a penalty on a mean's gradient": ("F29", m.GradientPenalty, even, {}),
    "the same noise on every rank": ("F72", m.SameNoise, even, {}),
    "weights by place": ("", m.ByPlace, even, {}),
    "no positive pair on a rank": ("F31", on(own_pairs), two_eight, AS_GIVEN),
    "mean of means, rows": ("F30", Module, two_eight, AS_GIVEN),
    "mean of means, ArcFace under ddp_losses": ("F30", on(learned), of_three, AS_GIVEN | THREE | GLOBAL),
    "mean of means at a later step": ("F30", Module, later, AS_GIVEN | TWO_STEPS),
    "mean of means, ignored targets": ("F30", Module, masked, AS_GIVEN),
    "local batch norm": ("F59", m.BatchNorm, even, {}),
    "local batch norm under ddp_losses, a global loss": ("F59", on(supcon, m.BatchNorm), even, GLOBAL),
    "local batch norm and uneven rows": ("F30", m.BatchNorm, two_eight, AS_GIVEN),
    "local batch norm and SupCon": ("F29", on(pml.SupConLoss, m.BatchNorm), even, {}),
    "local batch norm and PML's wrapper": ("F24", wrapped(learned, m.BatchNorm), even, {}),
    "local batch norm and a covariance by hand": ("F29", m.OwnCovariance, even, {"tolerance": None}),
    "batch norm over all ranks and a covariance by hand": ("F29", m.OwnCovariance, even, SYNCED),
    "SupCon never gathered, manual optimisation": ("F29", lambda: m.Manual(pml.SupConLoss(), right=True), even, {}),
    "batch norm converted after the wrap": ("F60", m.ConvertedLate, even, UNUSED),
    "dropout": ("F72", m.Dropout, even, {}),
    "noise": ("F72", m.Noise, even, {}),
    "a random permutation": ("F72", m.Permuted, even, {}),
    "own rows first": ("F26", wrapped(pml.NPairsLoss), even, {}),
    "PML's wrapper around a memory": ("F26", wrapped(partial(memory, 24)), even, unsynchronised),
    "a memory of its own on each rank": ("F64", on(partial(memory, 64)), even, {}),
    "a loss in a list": ("F02", m.Hidden, even, {}),
    "a loss in a list, clipped": ("F13", m.Hidden, even, CLIPPED),
    "weights that start different": ("F04", m.RankSeeded, even, {}),
    "created after the wrap": ("F05", m.CreatedLate, even, {}),
    "replaced after the wrap": ("F06", m.Replaced, even, UNUSED),
    "dtype changed in forward": ("F07", m.ChangedDtype, even, ONE_STEP),
    "cast there and back after the wrap": ("F07", m.CastBack, even, {}),
    "one rank clips before the step": ("F13", m.ClippedInHook, even, {}),
    "one rank clips where Lightning does": ("F13", m.ClippedByOneRank, even, ONE_STEP),
    "clipped in training_step, accumulated": ("F13", m.ClippedInStep, few, ACCUMULATED),
    "one rank writes a parameter": ("SYNC", m.Nudged, even, TWO_STEPS),
    "unfrozen after the wrap": ("F08", m.Unfrozen, even, TWO_STEPS),
    "own backward": ("F09", m.OwnBackward, even, {}),
    "the second step of a batch": ("F26", m.TwoSteps, even, TWO_STEPS),
    "loss.backward in manual optimisation": ("F10", partial(m.Manual, right=False), even, {}),
    "registered in another order": ("F12", m.OtherOrder, even, {}),
    "learning rates that differ": ("F17", m.RateOfOwnLoss, even, {}),
    "loss scales that differ": ("F15", Module, even, {"trainer_kwargs": scaler()}),
    "infinite on one rank": ("F79", m.InfiniteOnOneRank, even, {}),
    "no valid target in a micro-batch": ("F79", Module, no_targets, AS_GIVEN_ACCUMULATED | ONE_STEP),
    "identical batches": ("F67", Module, same_rows, {}),
    "identical batches without a DataLoader": ("F67", Module, m.SameOnAllRanks, {}),
    "a sampler shuffled apart": ("F68", Module, by_class, {}),
    "a summed loss": ("F18", on(summed), even, {}),
    "rounding": ("F78", Module, even, {"tolerance": 1e-12}),
    "rounding of bf16": ("F78", Module, even, BF16 | {"tolerance": 1e-6}),
    "unknown": ("", m.RowsOfOthers, even, {}),
}


# where one fault has several faces, how the first title begins
TITLES = {
    "SupCon never gathered": "a loss over pairs",
    "local batch norm and SupCon": "a loss over pairs",
    "contrast by hand never gathered": "a loss that is no mean over its rows",
    "the square of a mean": "a loss that is no mean over its rows",
    "a penalty on a mean's gradient": "a loss that is no mean over its rows",
    "the same noise on every rank": "the same random numbers on every rank",
    "noise": "random numbers differ",
    "weights by place": "a row's place",
    "a loss in a list, clipped": "gradients are clipped by a norm",
    "clipped in training_step, accumulated": "gradients clipped before they are reduced",
    "one rank clips before the step": "gradients that are clipped or changed on some ranks",
    "one rank clips where Lightning does": "gradients that are clipped or changed on some ranks",
}


# what the first diagnosis says, beside its fault
WORDS = {
    "identical batches": "Leave the DistributedSampler to Lightning",
    "identical batches without a DataLoader": "`SameOnAllRanks` is not a DataLoader",
    "a metric as loss": "differentiable(metric)",
    "own slot beside a right term": "in own_slot: dist.all_gather(parts, z.detach())",
    "self.all_gather next to a right term": "in objective: rows = self.all_gather(z, ",
    "no valid target in a micro-batch": "batch 0: rank 0 1.",
    "local batch norm and a covariance by hand": "It compares rows with each other",
    "batch norm over all ranks and a covariance by hand": "With batch norm in evaluation mode",
    "infinite on one rank": "rank 1 inf",
}


# another face of what the same rule says of a row before it, on more ranks or with another loss
AGAIN = {
    "gather without autograd, ArcFace",
    "gather without any graph, ArcFace",
    "PML's wrapper around SoftTriple, 3 ranks",
    "PML's wrapper around ProxyNCA, accumulated",
    "triplets never gathered under ddp_losses",
    "SupCon never gathered, manual optimisation",
    "the square of a mean",
    "a penalty on a mean's gradient",
    "mean of means, ArcFace under ddp_losses",
    "local batch norm under ddp_losses, a global loss",
    "local batch norm and SupCon",
    "local batch norm and PML's wrapper",
    "a random permutation",
    "PML's wrapper around a memory",
    "cast there and back after the wrap",
    "one rank clips where Lightning does",
    "replaced after the wrap",
    "rounding of bf16",
}


@pytest.mark.parametrize("name", slow_parameters(FAULTS, AGAIN))
def test_the_first_diagnosis_is_the_fault(name: str) -> None:
    fault, make, data, options = FAULTS[name]
    report = audit(make(), data(), **(FAULTY | options))
    assert not report.equal, str(report)
    assert report.diagnoses[0].fault == fault, str(report)
    assert report.diagnoses[0].title.startswith(TITLES.get(name, "")), str(report)
    assert WORDS.get(name, "") in report.diagnoses[0].evidence + report.diagnoses[0].fix, str(report)
    assert report.diagnoses[0].fix


def cross_entropy() -> nn.Module:
    return GlobalBatchLoss(nn.CrossEntropyLoss())


EXACT_DRAWS = DDPLossStrategy(randomness="global")
BATCHED = {"strategy": DDPLossStrategy(global_batch="auto")}
ACCUMULATED_CLIPPED = {"trainer_kwargs": AS_GIVEN_ACCUMULATED["trainer_kwargs"] | {"gradient_clip_val": 0.1}}
HEALTHY: dict[str, tuple[m.Make, Any, dict[str, Any]]] = {
    "cross entropy under ddp": (Module, even, {}),
    "ArcFace under ddp_losses, clipped": (on(learned), even, GLOBAL | CLIPPED),
    "ArcFace under ddp_losses, 3 ranks": (on(learned), few, GLOBAL | THREE),
    "GlobalBatchLoss(SupCon)": (on(supcon), even, {}),
    "GlobalBatchLoss, uneven batches": (on(lambda: GlobalBatchLoss(learned())), of_three, THREE | AS_GIVEN),
    "GlobalBatchLoss, accumulated, uneven, clipped": (on(cross_entropy), two_eight, ACCUMULATED_CLIPPED),
    "global_batch='auto'": (on(pml.MultiSimilarityLoss), even, BATCHED),
    "GlobalBatchLoss around a memory": (on(lambda: GlobalBatchLoss(memory(24))), even, GLOBAL),
    "float64": (on(learned), even, GLOBAL | {"trainer_kwargs": {"precision": "64-true"}}),
    "PML's wrapper around SupCon": (wrapped(pml.SupConLoss), even, {}),
    "batch norm over all ranks": (m.BatchNorm, even, SYNCED),
    "batch norm over all ranks, by ddp_losses": (
        m.BatchNorm,
        even,
        GLOBAL | {"trainer_kwargs": {"sync_batchnorm": True}},
    ),
    "batch norm switched off": (m.BatchNorm, even, {"without": ["batch_norm"]}),
    "dropout, with the draws of one process": (m.Dropout, even, {"randomness": "global"}),
    "dropout under a strategy that draws as one process": (m.Dropout, even, {"strategy": EXACT_DRAWS}),
    "uneven batches switched off": (Module, two_eight, AS_GIVEN | {"without": ["uneven"]}),
    "a class-sharded weight": (m.Sharded, even, GLOBAL),
    "a class-sharded weight with replicas": (m.ShardedTwice, even, GLOBAL),
    "a class-sharded weight, 3 ranks": (m.Sharded, few, GLOBAL | THREE),
    "manual optimisation": (partial(m.Manual, right=True), even, {}),
    "self.all_gather with its gradient": (partial(m.LightningGather, sync_grads=True), even, {}),
    "adopted loss": (m.Hidden, even, {"strategy": DDPLossStrategy(adopt=True)}),
    "unfrozen under ddp_losses": (m.Unfrozen, even, GLOBAL),
    "fp16 with a scaler": (Module, even, {"trainer_kwargs": scaler(256.0)}),
}


ARCFACE_IN_BF16 = (on(learned), even, GLOBAL | BF16)


# what only meets again what rows of the suite have one by one
HEALTHY_AGAIN = {
    "ArcFace under ddp_losses, clipped",
    "GlobalBatchLoss, uneven batches",
    "GlobalBatchLoss(SupCon)",
    "float64",
    "batch norm over all ranks",
    "batch norm switched off",
    "a class-sharded weight",
    "a class-sharded weight with replicas",
    "unfrozen under ddp_losses",
}


@pytest.mark.parametrize("name", slow_parameters(HEALTHY, HEALTHY_AGAIN))
def test_healthy_modules_audit_as_equal(name: str) -> None:
    make, data, options = HEALTHY[name]
    report = audit(make(), data(), **({"strategy": "ddp", "steps": 2} | options))
    assert report.equal, str(report)
    assert report.rows, "nothing was compared"
    assert not report.diagnoses


@pytest.mark.slow
def test_16_bits_accuse_no_healthy_module() -> None:
    """This loss is steep: after a step in bfloat16, ranks and one process are further apart than its own runs. That is no fault."""
    make, data, options = ARCFACE_IN_BF16
    report = audit(make(), data(), steps=2, **options)
    assert report.verdict == "cannot tell", str(report)
    assert [diagnosis.fault for diagnosis in report.diagnoses] == ["F78"], str(report)
    assert all(row.verdict == "exact" for row in report.rows if row.step == 1), str(report)
