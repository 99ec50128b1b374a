"""Passes of batch norm over activations (B, C, ...), with torch's fused kernels, on any device: moments, normalization, sums of backward.

Rows may be empty. The precision is at least float32.

Legend: ``C`` channels, ``n`` values per channel. x^ = (x - mean) / sqrt(var + eps), for each channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITED_DEVICES = ("mps",)
"""Devices without float64 and ``torch.batch_norm_update_stats``."""


def local_moments(x: Tensor, count: int) -> Tensor:
    """Return mean and M2, the sum of squared deviations from it, of each channel, (2 C,), at least float32.

    Args:
        x: (B, C, ...), without a graph.
        count: n, which may be 0.
    """
    averages = x.new_zeros(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    if count == 0:
        return averages.view(-1)
    if x.device.type in LIMITED_DEVICES:
        var, mean = torch.var_mean(x.to(averages.dtype), [0, *range(2, x.ndim)], correction=0)
    else:
        # the running averages are computed as well but not used. Their dtype selects the dtype of the accumulation
        mean, var = torch.batch_norm_update_stats(x, averages[0], averages[1], 0.0)
    return torch.cat([mean, var * count])


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return weight x^ + bias, in the dtype and memory format of ``x``, in one pass over it."""
    if x.numel() == 0:
        return torch.empty_like(x)
    wide = mean.dtype
    weight = None if weight is None else weight.to(wide)
    bias = None if bias is None else bias.to(wide)
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


def in_layout_of(x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with the strides of ``x``, as the kernel of its sums requires, copied if necessary.

    An expanded gradient would be slow to read. With different strides torch's kernel on the CPU (2.13) returns wrong sums, without an
    error, if both tensors are contiguous in one of its memory formats (one row that is channels-last, next to a gradient that is not).
    """
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def local_sums(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor, inverse_std: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return sum(grad x^) and sum(grad) of each channel, with 1 / sqrt(var + eps) in ``inverse_std``."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    grad = in_layout_of(x, grad)
    # In evaluation mode, with given mean and variance, the weight and bias gradients are these sums. The CPU takes mean and variance from
    # the running statistics, CUDA from the saved ones, which it requires.
    _, dyx, dy = torch.ops.aten.native_batch_norm_backward(
        grad, x, torch.ones_like(mean), mean, var, mean, inverse_std, False, eps, [False, True, True]
    )
    return dyx, dy


def input_gradient(
    grad: Tensor, x: Tensor, means: Tensor, mean: Tensor, var: Tensor, scale: Tensor, eps: float
) -> Tensor:
    """Return scale (grad - means[1] - x^ means[0]), in the dtype of ``x``, in two passes over it.

    Args:
        grad: Gradient of x^, times the weight if there is one.
        x: (B, C, ...).
        means: (2, C), the means over all values of grad x^ and of grad.
        mean: (C,).
        var: (C,).
        scale: (C,), 1 / sqrt(var + eps), times the weight if there is one.
        eps: Added to the variance.
    """
    wide = mean.dtype
    dyx, dy = (means * -scale).unbind()
    found = affine(x.to(wide), dyx, dy, mean, var, eps)
    found.addcmul_(grad.to(wide), scale.view(-1, *[1] * (x.ndim - 2)))
    return found.to(x.dtype)
