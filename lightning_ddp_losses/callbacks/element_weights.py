"""How much one element of a rank's batch weighs in its loss: read off the autograd graph, from the loss down to its reductions.

DDP averages over ranks, so elements count alike on all ranks only where this weight is the same there. A mean over 3 targets on
one rank and over 1 on another is a mean of means; a sum divided by the number of all ranks' targets is not.

Numbers that lie on an accelerator are copied without waiting (``LateNumber``); ``read_weights`` reads them, later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad
from lightning_ddp_losses.core.host_copy import LateNumber
from lightning_ddp_losses.distributed.accumulation import noted_parts

# operations that leave a scalar what it is
_PASSED = ("View", "UnsafeView", "Squeeze", "Reshape", "Clone", "ToCopy", "Alias", "Expand")
_MAX_NODES = 64
_MEAN, _SUM = 1, 2  # torch's codes


@dataclass(frozen=True)
class ElementWeight:
    """Describes one reduction that the loss is made of.

    Attributes:
        weight: How much one element weighs in the loss.
        elements: How many elements are reduced.
        is_masked: Whether the elements were picked by a mask (as PML picks tuples with a loss).
        kind: Whether the elements are this rank's, or those of all ranks, of a loss that is global; ``unknown`` for a term whose
            reduction cannot be read, which has no figures.
    """

    weight: float | LateNumber
    elements: float | LateNumber
    is_masked: bool = False
    kind: Literal["local", "global", "unknown"] = "local"


_UNKNOWN = ElementWeight(0.0, 0.0, kind="unknown")


def read_weights(weights: Sequence[ElementWeight]) -> list[ElementWeight]:
    """Return the same with all numbers on the host; a mean over nothing is infinitely heavy, a term that cannot be read is unknown."""
    found = []
    for each in weights:
        weight, elements = float(each.weight), float(each.elements)
        if each.kind == "global" and not elements:
            weight = math.inf
        if math.isnan(weight) or (each.kind == "local" and not (weight and elements)):
            found.append(_UNKNOWN)
        else:
            found.append(replace(each, weight=weight, elements=elements))
    return found


def element_weights(loss: Tensor) -> list[ElementWeight]:
    """Return the reductions of a scalar loss, in graph order; one that is not known for all that lies behind other operations."""
    found: list[ElementWeight] = []
    # nodes of the graph, each with the factor that lies between it and the loss
    queue: list[tuple[Any, float | LateNumber]] = [(loss.grad_fn, 1.0)]
    for node, factor in queue:
        if node is None:
            continue
        if len(queue) > _MAX_NODES:
            return [*found, _UNKNOWN]
        of_all_ranks = _global_reductions(node, factor)
        if of_all_ranks:
            found += of_all_ranks
            continue
        name = type(node).__name__.rstrip("0123456789").removesuffix("Backward")
        parents = [parent for parent, _ in node.next_functions]
        if name == "Add" or name in _PASSED:
            # torch's alpha= is left out: it weighs all ranks alike
            queue += [(parent, factor) for parent in parents]
        elif attaches_zero_grad(node):  # its other children get nothing but zeros
            queue.append((parents[0], factor))
        elif name == "Sub":
            queue += list(zip(parents, (factor, -factor), strict=False))
        elif name == "Neg":
            queue += [(parent, -factor) for parent in parents]
        elif name in ("Mul", "Div"):
            behind = _through_product(node, name, parents, factor)
            queue += behind
            found += [] if behind else [_UNKNOWN]
        elif name == "Sum" and parents and noted_parts(parents[0]):
            queue.append((parents[0], factor))
        elif name == "Sum" and parents and type(parents[0]).__name__.startswith("StackBackward"):
            queue += [(parent, factor) for parent, _ in parents[0].next_functions]
        else:
            found.append(_reduction(node, name, parents, factor) or _UNKNOWN)
    return found


def _global_reductions(node: Any, factor: float | LateNumber) -> list[ElementWeight]:
    """Read what a loss over the rows of all ranks has noted of its divisors; nothing for any other node."""
    parts = noted_parts(node)
    if type(node).__name__.startswith("SelectBackward"):  # one of several means
        parent, index = node.next_functions[0][0], compat.saved_by_node(node, "index")
        parts = None if parent is None else noted_parts(parent)
        parts = parts and [parts[index % len(parts)]]
    found = []
    for part in parts or ():
        if part.kind == "sum":
            found.append(ElementWeight(factor, 1.0, kind="global"))
        elif part.kind == "mean":
            count = _as_number(part.count) or 0.0
            weight: float | LateNumber = math.inf
            if count:
                weight = factor / count
            found.append(ElementWeight(weight, count, kind="global"))
    return found


def _through_product(
    node: Any, name: str, parents: list[Any], factor: float | LateNumber
) -> list[tuple[Any, float | LateNumber]]:
    """Follow a product with, or a quotient by, one number."""
    number = _as_number(compat.saved_by_node(node, "other"))
    with_graph = [parent for parent in parents if parent is not None]
    if not number or len(with_graph) != 1:
        return []
    if name == "Mul":
        return [(with_graph[0], factor * number)]
    return [(with_graph[0], factor / number)]


def _reduction(node: Any, name: str, parents: list[Any], factor: float | LateNumber) -> ElementWeight | None:
    """Read a mean or a sum, or a loss of torch's that ends in one; None for any other node."""
    is_masked = any(type(parent).__name__.startswith(("IndexBackward", "MaskedSelect")) for parent in parents)
    if name in ("Mean", "Sum"):
        is_mean = name == "Mean"
        elements: float | LateNumber | None = math.prod(compat.saved_by_node(node, "self_sym_sizes", ()) or (0,))
        elements = elements or int(compat.saved_by_node(node, "self_sym_numel", 0))
    else:
        reduction = compat.saved_by_node(node, "reduction")
        if reduction not in (_MEAN, _SUM):
            return None
        is_mean = reduction == _MEAN
        elements = _as_number(compat.saved_by_node(node, "total_weight"))
        values = compat.saved_by_node(node, "self")
        if elements is None and isinstance(values, Tensor):
            elements = float(values.numel())
    if not elements:
        return None
    if is_mean:
        factor /= elements
    return ElementWeight(factor, elements, is_masked)


def _as_number(value: Any) -> float | LateNumber | None:
    """Return a number that autograd has saved, as it is or in a tensor; None for anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        return None
    if value.device.type != "cpu":
        return LateNumber.of(value)
    if not compat.is_in_dispatch_mode():
        return float(value)
    # a Python number that torch has wrapped becomes one again on its way through a dispatch mode, which then fails (torch 2.13)
    with compat.without_dispatch_modes():
        return float(value)
