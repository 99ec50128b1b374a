"""Plans of calls: what the signature of a call fixes is decided once, and kept for the calls with the same signature.

A signature has what the rules of a call follow from: kinds of arguments and parameters, the state of torch, options. A plan holds these
rules. It holds no outcome (numbers of rows, dtypes of other ranks' rows), no tensor and no module.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_ddp_losses.core import compat

_MOST_PLANS = 32

Plan = TypeVar("Plan")
Signature: TypeAlias = tuple[Any, ...]


class Plans(Generic[Plan]):
    """The plans of one loss, by signature. If there are too many, the oldest goes. A copy or pickle begins without plans."""

    def __init__(self) -> None:
        self._plans: dict[Signature, Plan] = {}

    def get(self, signature: Signature) -> Plan | None:
        """Return the plan of a signature. None if it is new."""
        return self._plans.get(signature)

    def keep(self, signature: Signature, plan: Plan) -> Plan:
        """Keep a plan for further calls, and return it."""
        if len(self._plans) == _MOST_PLANS:
            oldest = next(iter(self._plans))
            del self._plans[oldest]
        self._plans[signature] = plan
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        return Plans, ()


def kind_of(value: object) -> Any:
    """Return the part of an argument, or of a parameter, from which rules follow: of a tensor all but its number of rows."""
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.shape[1:], value.requires_grad
    return type(value)


def state_of_torch() -> Signature:
    """Return the modes and defaults of torch from which rules follow."""
    return torch.is_grad_enabled(), compat.is_any_autocast_on(), torch.get_default_dtype()
