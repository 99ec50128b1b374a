"""The signature of a call of a loss whose arguments are few and known, without a walk over nests (``core.signature``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core.signature import Signature, modes_of_torch


def kind_of(value: object) -> Any:
    """Return the part of an argument, or of a parameter, from which rules follow: of a tensor all but its number of rows."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape[1:], value.requires_grad
    return type(value)


def signature_of(arguments: Iterable[Any], weights: Iterable[Tensor]) -> Signature:
    """Return the signature of a call.

    Args:
        arguments: Kinds of the arguments, and options that decide how they are computed.
        weights: Parameters of the loss.
    """
    return Signature(tuple(arguments), tuple(map(kind_of, weights)), modes_of_torch())
