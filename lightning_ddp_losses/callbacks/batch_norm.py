"""Batch norm's running statistics on the ranks: how far apart, and which layers synchronise nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.core.module_search import unregistered_modules

CHANNELS = 48  # of all layers together that are compared
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LEAST_VARIANCE = 1e-12


def plain_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Layers of torch's own plain batch norm on this rank's rows, by path; a subclass may synchronise by itself."""
    return {
        name: inner
        for name, inner in module.named_modules()
        if isinstance(inner, _BatchNorm) and type(inner) in _PLAIN and not synchronises(inner)
    }


def hidden_norms(module: nn.Module) -> dict[str, nn.Module]:
    """Batch norm in modules that are held in a list, a dict or a partial, where no conversion finds it."""
    return {
        f"{path}.{name}".rstrip("."): norm
        for path, outer in unregistered_modules(module, {})
        for name, norm in plain_norms(outer).items()
    }


def statistics(norms: dict[str, _BatchNorm]) -> list[float]:
    """Means, then variances, of channels spread evenly over all layers."""
    tracked = [norm for norm in norms.values() if norm.running_mean is not None and norm.running_var is not None]
    total = sum(norm.num_features for norm in tracked)
    chosen = {i * total // CHANNELS for i in range(CHANNELS)} if total > CHANNELS else set(range(total))
    means: list[float] = []
    variances: list[float] = []
    start = 0
    for norm in tracked:
        own = [i - start for i in sorted(chosen) if start <= i < start + norm.num_features]
        start += norm.num_features
        if own:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            means += norm.running_mean.detach()[own].double().tolist()
            variances += norm.running_var.detach()[own].double().tolist()
    return means + variances


def distances(rows: Sequence[Sequence[float]]) -> list[float]:
    """How far each rank's statistics are from those of all ranks: of the means in standard deviations, of the
    variances in natural logarithms, the larger of the two, root mean square over channels.
    """
    channels = len(rows[0]) // 2
    if not channels:
        return [0.0] * len(rows)
    middle = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    apart = []
    for row in rows:
        mean = variance = 0.0
        for i in range(channels):
            usual = max(middle[channels + i], _LEAST_VARIANCE)
            mean += (row[i] - middle[i]) ** 2 / usual
            variance += math.log(max(row[channels + i], _LEAST_VARIANCE) / usual) ** 2
        apart.append(math.sqrt(max(mean, variance) / channels))
    return apart
