"""Mean and covariance of features over the rows of all ranks, and the losses that are functions of them: Barlow Twins and VICReg.

A self-supervised loss that normalises by batch statistics needs the statistics of the global batch. With the statistics of one rank it is
another loss. Statistics that are summed over ranks without a gradient train the right loss with 1/W of its gradient. Gathering the rows
is right and moves (G, D) numbers. A covariance needs (D, D), however many rows there are.

1. One handshake: rows of each rank, and whether the ranks agree.
2. The sum of the rows over ranks gives the mean (D,).
3. Products of the centred rows, summed over ranks, give the covariances (D, D).

All ranks then compute the same function of the same numbers, so a sum over ranks does not need a collective in backward: its gradient is
W times this rank's own, and DDP's mean divides by W. The covariance uses rows centred by a constant mean: the derivative by the mean is
a sum of centred rows, which is zero.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` features.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.collectives import sum_with_grad
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    micro_batch_to_match,
    reduction_to_match,
    remember_global_value,
)
from lightning_ddp_losses.distributed.messages import Agreement, with_name
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import InputError

_ROWS = struct.Struct("<q?")  # rows of a rank, and whether they need a gradient


class Moments(NamedTuple):
    """Statistics of the rows of all ranks, equal on every rank.

    Attributes:
        mean: (D,).
        covariance: (D, D), divided by ``num_rows - 1`` as by ``torch.cov``.
        num_rows: G, the rows of all ranks.
    """

    mean: Tensor
    covariance: Tensor
    num_rows: int

    @property
    def variance(self) -> Tensor:
        """(D,), the diagonal of the covariance."""
        return self.covariance.diagonal()


@eager_recursive
def moments(rows: Tensor, *, name: str | None = None, group: Group = None) -> Moments:
    """Compute mean and covariance of features over the rows of all ranks.

    Equivalent to: ``rows.mean(0), torch.cov(rows.T)`` in one process on the rows of all ranks.

    Args:
        rows: (B, D), floating. Half precision is computed in float32.
        name: Name that is equal on all ranks. Ranks that make several calls in a different order get an error if the calls have names.
            Calls without names that have equal shapes and options cannot be told apart.
        group: Process group. If None, the world.

    Returns:
        ``Moments``, equal on every rank.

    Gradient:
        After DDP's mean over ranks, the gradient of one process, if all ranks compute the same function of the moments.

    Communication:
        Forward one handshake, an all-reduce of D numbers and one of D x D. Backward none.

    Raises:
        InputError: on every rank, for rows that are not (B, D), and for fewer than two rows on all ranks together.
        RankMismatchError: on every rank, for another D, dtype or device, and when ranks weigh the moments differently.

    Example:
        >>> import torch
        >>> mean, covariance, num_rows = moments(torch.eye(3))
        >>> covariance.shape, num_rows
        (torch.Size([3, 3]), 3)
    """
    (rows,), count, watch = _meet(with_name("moments", name), {"rows": rows}, {}, group)
    with precision.without_autocast([rows.device.type]):
        mean, centred = _centre(rows, count, group)
        covariance = sum_with_grad(centred.T @ centred, group) / (count - 1)
    mean, covariance = watch.watch((mean, covariance), group=group)
    return Moments(mean, covariance, count)


@eager_recursive
def cross_correlation(
    first: Tensor, second: Tensor, *, eps: float = 1e-5, name: str | None = None, group: Group = None
) -> Tensor:
    """Correlate the features of two views over the rows of all ranks.

    Equivalent to: ``batch_norm(first).T @ batch_norm(second) / G`` in one process on the rows of all ranks.

    Args:
        first: (B, D), floating. Row i of both is the same sample.
        second: (B, D).
        eps: Added to the variances, as ``batch_norm`` does.
        name: Name that is equal on all ranks (``moments``).
        group: Process group. If None, the world.

    Returns:
        (D, D), equal on every rank.

    Gradient:
        As ``moments``.

    Communication:
        Forward one handshake, an all-reduce of 2 D numbers and one of D x D + 2 D. Backward none.

    Raises:
        InputError: on every rank, as ``moments``, and for two views of different shapes.
        RankMismatchError: on every rank, as ``moments``.

    Example:
        >>> import torch
        >>> view = torch.randn(8, 3)
        >>> cross_correlation(view, view).diagonal().round()
        tensor([1., 1., 1.])
    """
    correlation, watch = _cross_correlation(with_name("cross_correlation", name), first, second, eps, {}, group)
    return watch.watch(correlation, group=group)  # type: ignore[no-any-return]


@eager_recursive
def barlow_twins(
    first: Tensor,
    second: Tensor,
    *,
    lambd: float = 5e-3,
    eps: float = 1e-5,
    name: str | None = None,
    group: Group = None,
) -> Tensor:
    """Compute the Barlow Twins loss ``sum_i (c_ii - 1)^2 + lambd * sum_ij c_ij^2`` (i != j) over the rows of all ranks.

    Equivalent to: ``lightly.loss.BarlowTwinsLoss(lambda_param=lambd)`` in one process on the rows of all ranks.

    Args:
        first: (B, D), projections of one view.
        second: (B, D), projections of the other view, with the same samples in the same order.
        lambd: Weight of the redundancy term.
        eps: Added to the variances.
        name: Name that is equal on all ranks (``moments``).
        group: Process group. If None, the world.

    Returns:
        The global loss, 0-dim, equal on every rank.

    Gradient:
        After DDP's mean over ranks, the gradient of one process.

    Communication:
        As ``cross_correlation``.

    Raises:
        InputError: on every rank, as ``cross_correlation``.
        RankMismatchError: on every rank, as ``cross_correlation``, and for another ``lambd``.

    Source:
        Zbontar et al., Barlow Twins (2021), arXiv 2103.03230, equation 1.

    Example:
        >>> import torch
        >>> loss = barlow_twins(torch.randn(8, 3), torch.randn(8, 3))
    """
    title = with_name("barlow_twins", name)
    correlation, watch = _cross_correlation(title, first, second, eps, {"lambd": lambd}, group)
    diagonal = correlation.diagonal()
    invariance = (diagonal - 1).square().sum()
    redundancy = (correlation - diagonal.diag()).square().sum()
    return _finish(invariance + lambd * redundancy, watch, group)


@eager_recursive
def vicreg(
    first: Tensor,
    second: Tensor,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    eps: float = 1e-4,
    name: str | None = None,
    group: Group = None,
) -> Tensor:
    """Compute the VICReg loss over the rows of all ranks.

    It is ``invariance * mse(first, second) + variance * v + covariance * c``. ``v`` is the mean of ``relu(1 - sqrt(var + eps))`` over
    features and both views. ``c`` is the sum of the squared covariances of different features, over D, of both views.

    Equivalent to: ``lightly.loss.VICRegLoss(invariance, variance, covariance, eps=eps)`` in one process on the rows of all ranks.

    Args:
        first: (B, D), projections of one view.
        second: (B, D), projections of the other view, with the same samples in the same order.
        invariance: Weight of the mean squared error.
        variance: Weight of the variance term.
        covariance: Weight of the covariance term.
        eps: Added to the variances.
        name: Name that is equal on all ranks (``moments``).
        group: Process group. If None, the world.

    Returns:
        The global loss, 0-dim, equal on every rank.

    Gradient:
        After DDP's mean over ranks, the gradient of one process.

    Communication:
        Forward one handshake, an all-reduce of 2 D numbers and one of 2 D x D + 1. Backward none.

    Raises:
        InputError: on every rank, as ``cross_correlation``.
        RankMismatchError: on every rank, as ``cross_correlation``, and for other weights.

    Source:
        Bardes et al., VICReg (2022), arXiv 2105.04906, equations 1 to 6.

    Example:
        >>> import torch
        >>> loss = vicreg(torch.randn(8, 3), torch.randn(8, 3))
    """
    options = {"weights": (invariance, variance, covariance), "eps": eps}
    views, count, watch = _meet(with_name("vicreg", name), {"first": first, "second": second}, options, group)
    features = first.shape[1]
    with precision.without_autocast([first.device.type]):
        _, centred = _centre(torch.cat(views, 1), count, group)
        own = [view.T @ view for view in (centred[:, :features], centred[:, features:])]
        error = (views[0] - views[1]).square().sum()
        summed = sum_with_grad(torch.cat([own[0].flatten(), own[1].flatten(), error.view(1)]), group)
        both = (summed[:-1] / (count - 1)).view(2, features, features)
        variances = both.diagonal(dim1=1, dim2=2)
        # 1. views of a sample agree
        value = invariance * summed[-1] / (count * features)
        # 2. each feature varies
        value = value + variance * (1 - (variances + eps).sqrt()).relu().mean()
        # 3. features are not correlated
        off_diagonal = both - torch.diag_embed(variances)
        value = value + covariance * off_diagonal.square().sum() / features
    return _finish(value, watch, group)


# ---------------------------------------------------------------------- steps


def _cross_correlation(
    title: str, first: Tensor, second: Tensor, eps: float, options: Mapping[str, object], group: Group
) -> tuple[Tensor, UpstreamGradWatch]:
    """Return the correlation of two views, and the watch of its upstream gradient."""
    views, count, watch = _meet(title, {"first": first, "second": second}, {**options, "eps": eps}, group)
    features = first.shape[1]
    with precision.without_autocast([first.device.type]):
        _, centred = _centre(torch.cat(views, 1), count, group)
        products = centred[:, :features].T @ centred[:, features:]
        own = torch.cat([products.flatten(), centred.square().sum(0)])
        means = sum_with_grad(own, group) / count
        deviations = (means[features * features :] + eps).sqrt()
        scale = deviations[:features, None] * deviations[None, features:]
        return means[: features * features].view(features, features) / scale, watch


def _meet(
    title: str, given: Mapping[str, Tensor], options: Mapping[str, object], group: Group
) -> tuple[list[Tensor], int, UpstreamGradWatch]:
    """Return this rank's tensors, the rows of all ranks, and the watch of upstream gradients. Communication: one handshake."""
    watch = UpstreamGradWatch.of(title, group)
    must_match = {
        "coefficient of the last backward": watch.take(),
        **options,
        **micro_batch_to_match(),
        **reduction_to_match(),
    }
    own, counts = meet(title, given, must_match, group, at_least=2)
    return own, sum(counts), watch


def _centre(rows: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the mean over all ranks, and this rank's rows minus that mean as a constant."""
    mean = sum_with_grad(rows.sum(0), group) / count
    return mean, rows - mean.detach()


def _finish(value: Tensor, watch: UpstreamGradWatch, group: Group) -> Tensor:
    remember_global_value(value)
    return watch.watch(value, group=group)  # type: ignore[no-any-return]


def meet(
    title: str,
    given: Mapping[str, Tensor],
    must_match: Mapping[str, object],
    group: Group,
    *,
    features: int | None = None,
    parts: int = 1,
    at_least: int = 1,
) -> tuple[list[Tensor], list[int]]:
    """Check the rows that the ranks hand in.

    Args:
        title: Name of the function in messages.
        given: This rank's tensors by name, of one shape (B, D).
        must_match: Values that must be equal on all ranks, by name.
        group: Process group.
        features: The only D that is allowed, or None for any.
        parts: Number of equal parts that B must consist of.
        at_least: Number of rows that all ranks must have together.

    Returns:
        This rank's tensors, (B, D) each, in the dtype of the computation. They need a gradient if any rank's do. B of each rank.

    Raises:
        InputError: on every rank.
        RankMismatchError: on every rank.

    Communication: one handshake.
    """
    tensors = list(given.values())
    with handshake.raising_on_all_ranks(title, group=group):
        _check(title, given, features, parts)
    rows = tensors[0]
    dtype = precision.compute_dtype(tensors)
    agreement = _agreement(title, rows.shape[1], dtype, rows.device.type, torch.is_grad_enabled())
    payload = _ROWS.pack(len(rows), any(tensor.requires_grad for tensor in tensors))
    payloads = handshake.all_gather(agreement, must_match, payload, group=group)
    counts, needs_grad = zip(*map(_ROWS.unpack, payloads), strict=True)
    if sum(counts) < at_least:  # all ranks have the same counts, so all raise
        expected = f"{at_least} or more on all ranks together"
        raise InputError(
            f"{title}: rows",
            expected=expected,
            ranks=counts,
            collective=True,
            fix="Raise the batch size, or skip the loss on every rank for such a batch.",
        )
    return [match_requires_grad(tensor.to(dtype), any(needs_grad)) for tensor in tensors], list(counts)


@functools.lru_cache(maxsize=32)
def _agreement(title: str, width: int, dtype: torch.dtype, device_type: str, has_gradients: bool) -> Agreement:
    """Return what the ranks agree on in all calls on rows of this kind. The options of a call are compared next to it."""
    gradients = "on" if has_gradients else "off"
    return Agreement(title, {"rows": f"(rows, {width}) {dtype} on {device_type}", "gradients": gradients})


def _check(title: str, given: Mapping[str, Tensor], features: int | None, parts: int) -> None:
    """Raise an ``InputError`` for tensors that are not floating, (B, D) and of one shape."""
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
            got = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else repr(tensor)
            raise InputError(
                f"{title}: {name}",
                expected="a floating tensor (rows, features)",
                got=got,
                fix="Convert integers by x.float(), and flatten the features of each row by x.flatten(1).",
            )
        if features is not None and tensor.shape[1] != features:
            raise InputError(f"{title}: features of {name}", expected=features, got=tensor.shape[1])
        if len(tensor) % parts:
            raise InputError(
                f"{title}: {name}",
                expected=f"a multiple of {parts} rows",
                got=len(tensor),
                fix="Concatenate all views of every row: torch.cat(views).",
            )
    if len({(tensor.shape, tensor.device) for tensor in given.values()}) > 1:
        got = ", ".join(f"{name} {tuple(tensor.shape)} on {tensor.device}" for name, tensor in given.items())
        raise InputError(
            title,
            expected="views of one shape on one device",
            got=got,
            fix="Pass the views of the same rows, on the same device.",
        )
