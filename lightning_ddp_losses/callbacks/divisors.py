"""How much one element of a rank's batch weighs in its loss: read off the graph, from the loss down to its reductions.

DDP averages over ranks, so elements count alike on all ranks only where this weight is the same there. A mean over 3 targets on
one rank and over 1 on another is a mean of means; a sum divided by the number of all ranks' targets is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

_PASSED = ("View", "UnsafeView", "Squeeze", "Reshape", "Clone", "ToCopy", "Alias", "Expand")
_MOST = 64
_MEAN, _SUM = 1, 2  # torch's codes


@dataclass(frozen=True)
class Term:
    """A reduction that the loss is made of.

    Attributes:
        weight: Of one element in the loss.
        elements: It reduces so many.
        chosen: The elements were picked by a mask (as PML picks tuples with a loss).
    """

    weight: float
    elements: float
    chosen: bool


def terms(loss: Tensor) -> list[Term]:
    """The reductions of a scalar loss, in graph order; those behind operations that are not known are left out."""
    found: list[Term] = []
    queue: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for node, coefficient in queue:
        if node is None or len(queue) > _MOST:
            continue
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        parents = [parent for parent, _ in node.next_functions]
        if name in ("Add", "Sub"):
            # torch's alpha= is left out: it weighs all ranks alike
            sign = 1 if name == "Add" else -1
            queue += list(zip(parents, (coefficient, coefficient * sign), strict=False))
        elif name in ("Mul", "Div"):
            factor = _scalar(getattr(node, "_saved_other", None))
            if factor and len([p for p in parents if p is not None]) == 1:
                queue += [(p, coefficient * factor if name == "Mul" else coefficient / factor) for p in parents if p]
        elif name == "Neg":
            queue += [(p, -coefficient) for p in parents]
        elif name in _PASSED:
            queue += [(p, coefficient) for p in parents]
        elif name == "Sum" and parents and type(parents[0]).__name__.startswith("StackBackward"):
            queue += [(p, coefficient) for p, _ in parents[0].next_functions]
        else:
            term = _reduction(node, name, parents, coefficient)
            if term is not None:
                found.append(term)
    return found


def _reduction(node: Any, name: str, parents: list[Any], coefficient: float) -> Term | None:
    chosen = any(type(p).__name__.startswith(("IndexBackward", "MaskedSelect")) for p in parents)
    if name in ("Mean", "Sum"):
        elements = math.prod(getattr(node, "_saved_self_sym_sizes", ()) or (0,))
        elements = elements or int(getattr(node, "_saved_self_sym_numel", 0))
        if not elements:
            return None
        return Term(coefficient / elements if name == "Mean" else coefficient, elements, chosen)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return None
    total = _scalar(getattr(node, "_saved_total_weight", None))
    if total is None:
        own = getattr(node, "_saved_self", None)
        total = float(own.numel()) if isinstance(own, Tensor) else None
    if not total:
        return None
    return Term(coefficient / total if reduction == _MEAN else coefficient, total, chosen)


def _scalar(value: Any) -> float | None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        if not is_in_torch_dispatch_mode():
            return float(value)
        # a Python number that torch has wrapped becomes one again on its way through a dispatch mode, which then fails
        with _disable_current_modes():
            return float(value)
    return float(value) if isinstance(value, (int, float)) else None
