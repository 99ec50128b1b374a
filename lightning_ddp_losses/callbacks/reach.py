"""Which parameters a loss reaches through its graph, before backward.

The whole graph is walked only when the part of it next to the loss has not been seen before: there losses and heads branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["Reach"]

_TOP = 64  # nodes by which a graph is recognised


class Reach:
    """Remembers what graphs of known beginnings reach."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], frozenset[int]] = {}

    def missing(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of the parameters that backward from ``loss`` will not reach."""
        if loss.grad_fn is None:
            return list(parameters)
        key = (*_walk(loss.grad_fn, _TOP)[0], len(parameters))
        missing = [name for name, p in parameters.items() if id(p) not in self._known.get(key, ())]
        if missing:  # a graph not seen before, or the same beginning with another end
            self._known[key] = frozenset(_walk(loss.grad_fn)[1])
            missing = [name for name, p in parameters.items() if id(p) not in self._known[key]]
        return missing


def _walk(root: Any, most: int | None = None) -> tuple[list[str], set[int]]:
    """Kinds of nodes breadth first, and ids of the leaves, of the whole graph or its first ``most`` nodes."""
    queue, seen = [root], {root}
    leaves: set[int] = set()
    for node in queue:
        below = node.next_functions
        if not below:  # a parameter's own node is a leaf; to ask the others costs more than the rest of the walk
            variable = getattr(node, "variable", None)
            if variable is not None:
                leaves.add(id(variable))
        for child, _ in below:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
        if most is not None and len(queue) >= most:
            break
    return [type(node).__name__ for node in queue[:most]], leaves
