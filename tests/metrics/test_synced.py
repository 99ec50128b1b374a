"""`synced`: updates (3, 0, 1) on three ranks equal those of one process, in one exchange; the rest is as torchmetrics has it."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics import MetricCollection, classification, detection, regression, retrieval, text
from torchmetrics.detection import mean_ap
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MetricTracker, MinMaxMetric, MultioutputWrapper, Running

from lightning_ddp_losses import ConfigurationError, differentiable, synced
from lightning_ddp_losses.core.nests import map_tensors
from tests.counting import CountCollectives
from tests.rank_pool import RankPool

UPDATES = (3, 0, 1)
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- batches, by a number


def pair(seed: int) -> Batch:
    target = torch.randn(5, generator=seeded(seed))
    return (target + torch.randn(5, generator=seeded(seed + 50)), target), {}


def pair_of_two(seed: int) -> Batch:
    return tuple(torch.randn(5, 2, generator=seeded(seed + k)) for k in (0, 50)), {}


def binary(seed: int) -> Batch:
    return (torch.rand(6 + seed % 3, generator=seeded(seed)), torch.randint(2, (6 + seed % 3,), generator=seeded(seed))), {}


def classes(seed: int) -> Batch:
    return tuple(torch.randint(3, (7,), generator=seeded(seed + k)) for k in (0, 50)), {}


def queries(seed: int) -> Batch:
    indexes = torch.randint(4, (8,), generator=seeded(seed))
    return (torch.rand(8, generator=seeded(seed)), torch.arange(8) % 2 == 0), {"indexes": indexes}


def panoptic(seed: int) -> Batch:
    def one(k: int) -> Tensor:
        return torch.stack([torch.randint(2, (1, 4, 4), generator=seeded(seed + k)), torch.zeros(1, 4, 4).long()], -1)

    return (one(0), one(50)), {}


def sentences(seed: int) -> Batch:
    words = "the cat sat on a mat by my door".split()
    order = torch.randperm(len(words), generator=seeded(seed)).tolist()
    return ([" ".join(words[i] for i in order), " ".join(words[:5])], [[" ".join(words)], [" ".join(words[2:6])]]), {}


def rouge(seed: int) -> Batch:
    (found, truth), _ = sentences(seed)
    return (found[: 1 + seed % 2], [each[0] for each in truth][: 1 + seed % 2]), {}


def masks(seed: int) -> Batch:
    def one(k: int, number: int) -> dict[str, Tensor]:
        shape = torch.rand(number, 8, 8, generator=seeded(seed + k)) > 0.4
        return {"masks": shape, "labels": torch.arange(number) % 2, "scores": torch.rand(number, generator=seeded(seed))}

    number = 1 + seed % 3
    return ([one(0, number)], [one(0, 2)]), {}


def numbers(seed: int) -> Batch:
    return (torch.randn(4 + seed % 2, generator=seeded(seed)),), {}


# ---------------------------------------------------------------------- metrics


class Sentences(tm.Metric):
    """Lists of text, of lists of tensors, and of numbers that are summed as the metric says."""

    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("texts", [], None)
        self.add_state("nested", [], None)
        self.add_state("sums", [], lambda tensors: torch.stack(tensors).sum(0))
        self.add_state("least", torch.tensor(9.0), "min")
        self.add_state("stacked", torch.zeros(2), lambda stacked: stacked.amax(0))

    def update(self, rows: Tensor) -> None:
        self.texts.append(f"{float(rows.sum()):.3f}")
        self.nested.append([rows, [rows[:1]]])
        self.sums.append(rows[:2])
        self.least = torch.minimum(self.least, rows.min())
        self.stacked = torch.maximum(self.stacked, rows[:2])

    def compute(self) -> dict[str, Any]:
        flat = torch.cat([torch.cat([rows, *first]) for rows, first in self.nested])
        sums = self.sums if isinstance(self.sums, Tensor) else torch.stack(self.sums).sum(0)
        code = torch.tensor([float(text) * k for k, text in enumerate(self.texts)])
        return {"flat": flat, "code": code, "sums": sums, "least": self.least, "stacked": self.stacked}


class Mean(tm.Metric):
    """The mean of means: exact as every update has as many rows."""

    full_state_update = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("mean", torch.tensor(0.0), "mean")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.mean = self.mean + ((preds - target).abs().mean() - self.mean) / self._update_count

    def compute(self) -> Tensor:
        return self.mean


def segmentations() -> tm.Metric:
    mean_ap._TORCHVISION_AVAILABLE = True  # asked for, and not needed for masks
    return detection.MeanAveragePrecision(iou_type="segm")


def binned_and_others() -> MetricCollection:
    names = ("BinaryAccuracy", "BinaryPrecision", "BinaryAUROC", "BinaryAveragePrecision", "BinaryMatthewsCorrCoef")
    return MetricCollection([getattr(classification, name)() for name in names])


def mixed() -> MetricCollection:
    window = Running(tm.MeanSquaredError(), window=9)
    return MetricCollection({"a": tm.SpearmanCorrCoef(), "b": MinMaxMetric(tm.MeanAbsoluteError()), "c": window})


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "ConfusionMatrix": (lambda: tm.ConfusionMatrix(task="multiclass", num_classes=3), classes),
    "AUROC, exact": (lambda: tm.AUROC(task="binary"), binary),
    "AUROC, binned": (lambda: tm.AUROC(task="binary", thresholds=7), binary),
    "PearsonCorrCoef": (tm.PearsonCorrCoef, pair),
    "CatMetric": (tm.CatMetric, numbers),
    "MaxMetric": (tm.MaxMetric, numbers),
    "MeanMetric": (tm.MeanMetric, numbers),
    "SpearmanCorrCoef": (tm.SpearmanCorrCoef, pair),
    "NormalizedRootMeanSquaredError": (regression.NormalizedRootMeanSquaredError, pair),
    "R2Score": (lambda: tm.R2Score(multioutput="raw_values"), pair_of_two),
    "RetrievalMAP": (retrieval.RetrievalMAP, queries),
    "PanopticQuality": (lambda: detection.PanopticQuality(things={0}, stuffs={1}), panoptic),
    "BLEUScore": (lambda: text.BLEUScore(n_gram=2), sentences),
    "ROUGEScore": (lambda: text.rouge.ROUGEScore(rouge_keys=("rouge1", "rougeL")), rouge),
    "MeanAveragePrecision": (segmentations, masks),
    "Sentences": (Sentences, numbers),
    "Mean": (Mean, pair),
    "MinMaxMetric": (lambda: MinMaxMetric(tm.MeanSquaredError()), pair),
    "ClasswiseWrapper": (lambda: ClasswiseWrapper(classification.MulticlassRecall(3, average=None)), classes),
    "MultioutputWrapper": (lambda: MultioutputWrapper(tm.SpearmanCorrCoef(), 2), pair_of_two),
    "Running": (lambda: Running(tm.MeanSquaredError(), window=9), pair),
    "composition": (lambda: 2 * tm.SpearmanCorrCoef() - tm.MeanSquaredError(), pair),
    "compute groups": (binned_and_others, binary),
    "collection": (mixed, pair),
}
PACKAGES = {"ROUGEScore": "rouge_score", "MeanAveragePrecision": "pycocotools"}


def updated(metric: Any, batch: Callable[[int], Batch], seeds: list[int]) -> Any:
    for seed in seeds:
        args, kwargs = batch(seed)
        metric.update(*args, **kwargs)
    return metric


def own_seeds(rank: int) -> list[int]:
    return [10 * step + rank for step in range(UPDATES[rank])]


def all_seeds() -> list[int]:
    """In the order of one process: by update, then by rank."""
    return sorted(seed for rank in range(len(UPDATES)) for seed in own_seeds(rank))


def offline(metric: Any) -> Any:
    for part in torch.nn.Module.modules(metric):
        if isinstance(part, tm.Metric):
            part.distributed_available_fn = lambda: False
    return metric


def numbers_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t.detach().double().flatten()), value)
    return found


def assert_equal(ours: Any, truth: Any) -> None:
    ours, truth = numbers_in(ours), numbers_in(truth)
    assert len(ours) == len(truth) > 0
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def uneven(name: str) -> list[str]:
    """Compute, compare with one process, and go on: what was synced is put back."""
    make, batch = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank, plain = dist.get_rank(), make()
        metric = updated(synced(plain), batch, own_seeds(rank))
        assert isinstance(metric, type(plain))
        with CountCollectives() as collectives:
            value = metric.compute()
        alone = updated(offline(make()), batch, all_seeds())
        assert_equal(value, alone.compute())
        metric = updated(pickle.loads(pickle.dumps(metric)) if rank and name != "Sentences" else metric, batch, [40 + rank])
        assert_equal(metric.compute(), updated(alone, batch, [40, 41, 42]).compute())
        metric.reset()
        assert not any(each._is_synced for each in metric.modules() if isinstance(each, tm.Metric))
        return collectives.names


@pytest.mark.parametrize("name", CASES)
def test_uneven_updates_equal_one_process_in_one_exchange(pool: RankPool, name: str) -> None:
    if name in PACKAGES and not importlib.util.find_spec(PACKAGES[name]):
        pytest.skip(f"needs {PACKAGES[name]}")
    for names in pool.run(3, uneven, name, fresh=True):
        assert 1 <= len(names) <= 3  # a handshake, at a size that it has not grown to yet, and a gather
        assert not any("barrier" in each for each in names)
