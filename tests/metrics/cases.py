"""One or more rows for every torchmetrics class that says `is_differentiable=True`: how to make it, and a global batch."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torchmetrics
import torchmetrics.functional.audio as audio_functions
from torch import Tensor
from torchmetrics import Metric, audio, classification, clustering, image, regression, text
from torchmetrics.multimodal.lve import LipVertexError

Batch = tuple[Any, ...]
G = 6  # rows of an image batch
ROWS = 12

NOT_FED = {
    "ARNIQA": "downloads its network",
    "DeepImageStructureAndTextureSimilarity": "downloads its network",
    "LearnedPerceptualImagePatchSimilarity": "downloads its network",
    "SpeechReverberationModulationEnergyRatio": "needs gammatone and torchaudio, and has no gradient then (numpy)",
}
"""Classes that a test cannot feed, and why."""


@dataclass(frozen=True)
class Case:
    """A metric and its inputs.

    Attributes:
        make: The metric, torchmetrics' own.
        batch: A global batch in float64 from a generator; the first argument gets the gradient.
        quantity: The scalar to train on, of what the metric returns.
        rtol: More than 1e-8 where torchmetrics itself rounds to float32.
    """

    make: Callable[[], Metric]
    batch: Callable[[torch.Generator], Batch]
    quantity: Callable[[Any], Tensor] = torch.sum
    rtol: float = 1e-8

    def global_batch(self, seed: int) -> Batch:
        return self.batch(torch.Generator().manual_seed(seed))


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def uniform(g: torch.Generator, *shape: int, low: float = 0.05, high: float = 0.95) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


def pair(g: torch.Generator, *shape: int) -> Batch:
    target = normal(g, *shape)
    return target + 0.5 * normal(g, *shape), target


def positive(g: torch.Generator, *shape: int) -> Batch:
    return uniform(g, *shape), uniform(g, *shape)


def probabilities(g: torch.Generator, *shape: int) -> Batch:
    return tuple(t / t.sum(-1, keepdim=True) for t in positive(g, *shape))


def classes(g: torch.Generator, number: int, *shape: int) -> Tensor:
    return torch.randint(number, shape, generator=g)


def clusters(g: torch.Generator) -> Batch:
    labels = torch.arange(ROWS) % 3
    return normal(g, ROWS, 4) + labels[:, None], labels


def images(g: torch.Generator, size: int = 16, channels: int = 3, rows: int = G) -> Batch:
    target = uniform(g, rows, channels, size, size)
    return (target + 0.1 * normal(g, rows, channels, size, size)).clamp(0.01, 0.99), target


def fusion(g: torch.Generator) -> Batch:
    """High resolution images, and the low resolution and panchromatic ones that they were made of."""
    target = {"ms": uniform(g, G, 3, 16, 16), "pan": uniform(g, G, 3, 32, 32), "pan_lr": uniform(g, G, 3, 16, 16)}
    return uniform(g, G, 3, 32, 32), target


def vector(*shape: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: pair(g, ROWS, *shape)


def image_of(size: int = 16, channels: int = 3) -> Callable[[torch.Generator], Batch]:
    return lambda g: images(g, size, channels)


SIGNALS: Callable[[torch.Generator], Batch] = lambda g: pair(g, ROWS, 40)  # noqa: E731 - one row of the table each
SPEAKERS: Callable[[torch.Generator], Batch] = lambda g: pair(g, ROWS, 2, 40)  # noqa: E731 - as above
FIRST: Callable[[Any], Tensor] = lambda value: value[0].sum()  # noqa: E731 - as above
SSIM = image.StructuralSimilarityIndexMeasure
MULTISCALE = partial(image.MultiScaleStructuralSimilarityIndexMeasure, kernel_size=3, betas=(0.5, 0.5))

CASES: dict[str, list[Case]] = {
    # ------------------------------------------------------------------ regression
    "ConcordanceCorrCoef": [Case(regression.ConcordanceCorrCoef, vector())],
    "CosineSimilarity": [
        Case(partial(regression.CosineSimilarity, reduction=how), vector(5), rtol=1e-6) for how in ("mean", "none")
    ],
    "ExplainedVariance": [
        Case(regression.ExplainedVariance, vector()),
        Case(partial(regression.ExplainedVariance, multioutput="raw_values"), vector(3)),
    ],
    "JensenShannonDivergence": [
        Case(partial(regression.JensenShannonDivergence, reduction=how), lambda g: probabilities(g, ROWS, 5))
        for how in ("mean", "none")
    ],
    "KLDivergence": [
        Case(partial(regression.KLDivergence, reduction=how), lambda g: probabilities(g, ROWS, 5))
        for how in ("mean", "sum", "none")
    ],
    "LogCoshError": [Case(regression.LogCoshError, vector())],
    "MeanAbsoluteError": [Case(regression.MeanAbsoluteError, vector())],
    "MeanAbsolutePercentageError": [Case(regression.MeanAbsolutePercentageError, vector())],
    "MeanSquaredError": [
        Case(regression.MeanSquaredError, vector()),
        Case(partial(regression.MeanSquaredError, squared=False, num_outputs=3), vector(3)),
    ],
    "MeanSquaredLogError": [Case(regression.MeanSquaredLogError, lambda g: positive(g, ROWS))],
    "MinkowskiDistance": [Case(partial(regression.MinkowskiDistance, p=3), vector())],
    "NormalizedRootMeanSquaredError": [
        Case(partial(regression.NormalizedRootMeanSquaredError, normalization=how), lambda g: positive(g, ROWS))
        for how in ("mean", "range", "std", "l2")
    ],
    "PearsonCorrCoef": [
        Case(regression.PearsonCorrCoef, vector()),
        Case(partial(regression.PearsonCorrCoef, num_outputs=3), vector(3)),
    ],
    "R2Score": [
        Case(regression.R2Score, vector()),
        Case(partial(regression.R2Score, multioutput="variance_weighted"), vector(3)),
    ],
    "RelativeSquaredError": [Case(regression.RelativeSquaredError, vector())],
    "SymmetricMeanAbsolutePercentageError": [Case(regression.SymmetricMeanAbsolutePercentageError, vector())],
    "TweedieDevianceScore": [
        Case(partial(regression.TweedieDevianceScore, power=power), lambda g: positive(g, ROWS)) for power in (0, 1.5)
    ],
    "WeightedMeanAbsolutePercentageError": [Case(regression.WeightedMeanAbsolutePercentageError, vector())],
    # ------------------------------------------------------------------ classification, clustering, text, multimodal
    "BinaryHingeLoss": [Case(classification.BinaryHingeLoss, lambda g: (uniform(g, ROWS), classes(g, 2, ROWS)))],
    "MulticlassHingeLoss": [
        Case(
            partial(classification.MulticlassHingeLoss, num_classes=4, multiclass_mode=mode, squared=True),
            lambda g: (normal(g, ROWS, 4), classes(g, 4, ROWS)),
        )
        for mode in ("crammer-singer", "one-vs-all")
    ],
    "CalinskiHarabaszScore": [Case(clustering.CalinskiHarabaszScore, clusters)],
    "DunnIndex": [Case(clustering.DunnIndex, clusters)],
    "Perplexity": [
        Case(text.Perplexity, lambda g: (normal(g, ROWS, 3, 5), classes(g, 5, ROWS, 3))),
        Case(partial(text.Perplexity, ignore_index=0), lambda g: (normal(g, ROWS, 3, 5), classes(g, 5, ROWS, 3))),
    ],
    "LipVertexError": [Case(partial(LipVertexError, mouth_map=[0, 2]), lambda g: pair(g, ROWS, 4, 3))],
    # ------------------------------------------------------------------ audio
    "ComplexScaleInvariantSignalNoiseRatio": [
        Case(audio.ComplexScaleInvariantSignalNoiseRatio, lambda g: pair(g, ROWS, 5, 6, 2))
    ],
    "PermutationInvariantTraining": [
        Case(partial(audio.PermutationInvariantTraining, audio_functions.scale_invariant_signal_noise_ratio), SPEAKERS)
    ],
    "ScaleInvariantSignalDistortionRatio": [Case(audio.ScaleInvariantSignalDistortionRatio, SIGNALS)],
    "ScaleInvariantSignalNoiseRatio": [Case(audio.ScaleInvariantSignalNoiseRatio, SIGNALS)],
    "SignalDistortionRatio": [Case(partial(audio.SignalDistortionRatio, filter_length=8), SIGNALS)],
    "SignalNoiseRatio": [Case(audio.SignalNoiseRatio, SIGNALS)],
    "SourceAggregatedSignalDistortionRatio": [Case(audio.SourceAggregatedSignalDistortionRatio, SPEAKERS)],
    # ------------------------------------------------------------------ image
    "ErrorRelativeGlobalDimensionlessSynthesis": [Case(image.ErrorRelativeGlobalDimensionlessSynthesis, image_of())],
    "MultiScaleStructuralSimilarityIndexMeasure": [
        Case(partial(MULTISCALE, data_range=1.0), image_of()),
        Case(MULTISCALE, image_of()),
        Case(partial(MULTISCALE, reduction=None, data_range=1.0), image_of()),
    ],
    "PeakSignalNoiseRatio": [
        Case(partial(image.PeakSignalNoiseRatio, data_range=1.0), image_of()),
        Case(partial(image.PeakSignalNoiseRatio, data_range=(0.0, 1.0), dim=(1, 2, 3), reduction="none"), image_of()),
    ],
    "PeakSignalNoiseRatioWithBlockedEffect": [
        Case(partial(image.PeakSignalNoiseRatioWithBlockedEffect, data_range=1.0), image_of(channels=1))
    ],
    "QualityWithNoReference": [Case(image.QualityWithNoReference, fusion)],
    "RelativeAverageSpectralError": [Case(image.RelativeAverageSpectralError, image_of())],
    "RootMeanSquaredErrorUsingSlidingWindow": [Case(image.RootMeanSquaredErrorUsingSlidingWindow, image_of())],
    "SpatialCorrelationCoefficient": [Case(image.SpatialCorrelationCoefficient, image_of(), rtol=5e-6)],
    "SpatialDistortionIndex": [Case(image.SpatialDistortionIndex, fusion)],
    "SpectralAngleMapper": [
        Case(image.SpectralAngleMapper, image_of()),
        Case(partial(image.SpectralAngleMapper, reduction="none"), image_of()),
    ],
    "SpectralDistortionIndex": [Case(image.SpectralDistortionIndex, image_of())],
    "StructuralSimilarityIndexMeasure": [
        Case(partial(SSIM, data_range=1.0, kernel_size=5), image_of()),
        Case(partial(SSIM, kernel_size=5), image_of()),
        Case(partial(SSIM, data_range=1.0, reduction="none", kernel_size=5), image_of()),
        Case(partial(SSIM, data_range=1.0, return_full_image=True, kernel_size=5), image_of(), FIRST),
    ],
    "TotalVariation": [
        Case(partial(image.TotalVariation, reduction=how), lambda g: images(g)[:1]) for how in ("mean", "sum", "none")
    ],
    "UniversalImageQualityIndex": [
        Case(partial(image.UniversalImageQualityIndex, reduction=how), image_of())
        for how in ("elementwise_mean", "none")
    ],
}


def differentiable_classes() -> dict[str, type[Metric]]:
    """Every public class of torchmetrics that says so of itself."""
    found: dict[str, type[Metric]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
            for name, cls in vars(import_module(module.name)).items():
                if not inspect.isclass(cls) or not issubclass(cls, Metric) or name.startswith("_"):
                    continue
                if cls.is_differentiable is True and cls.__module__ == module.name:
                    found[name] = cls
    return found
