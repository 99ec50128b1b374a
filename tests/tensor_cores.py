"""A device that multiplies bf16 into float32 itself, pretended on the CPU: the values of tensor cores, in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.doors import forms

__all__ = ["multiplying_bf16", "off"]


def off(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


@contextlib.contextmanager
def multiplying_bf16() -> Iterator[list[torch.Size]]:
    """A device that multiplies bf16 into float32 itself; yields the shapes of the left operands."""
    calls: list[torch.Size] = []
    plain_mm, plain_addmm = torch.mm, torch.addmm

    def mm(left: Tensor, right: Tensor, *, out_dtype: Any = None, out: Tensor | None = None) -> Tensor:
        if out_dtype is None:
            return plain_mm(left, right, out=out)
        assert (left.dtype, right.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        calls.append(left.shape)
        return plain_mm(left.float(), right.float(), out=out)

    def addmm(sums: Tensor, left: Tensor, right: Tensor, *, out_dtype: Any = None, **options: Any) -> Tensor:
        if out_dtype is None:
            return plain_addmm(sums, left, right, **options)
        assert (left.dtype, right.dtype, sums.dtype, out_dtype) == (*[torch.bfloat16] * 2, *[torch.float32] * 2)
        calls.append(left.shape)
        return plain_addmm(sums, left.float(), right.float(), **options)

    with (
        mock.patch.object(forms, "multiplies_into_float32", return_value=True),
        mock.patch.multiple(torch, mm=mm, addmm=addmm),
    ):
        yield calls
