"""Which parameters a loss reaches through its graph, before backward.

The whole graph is walked only when the part of it next to the loss has not been seen before: there losses and heads branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_TOP = 64  # nodes by which a graph is recognised


class Reach:
    """Remembers what graphs of known beginnings reach."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], frozenset[int]] = {}

    def missing(self, loss: Tensor, parameters: Mapping[str, Tensor]) -> list[str]:
        """Names of the parameters that backward from ``loss`` will not reach."""
        if loss.grad_fn is None:
            return list(parameters)
        key = (*[type(node).__name__ for node in _walk(loss.grad_fn, _TOP)], len(parameters))
        if key in self._known and self._known[key].issuperset(map(id, parameters.values())):
            return []
        # a graph not seen before, or the same beginning with another end
        reached = self._known[key] = frozenset(_leaves(_walk(loss.grad_fn)))
        return [name for name, p in parameters.items() if id(p) not in reached]


def _walk(root: Any, most: int | None = None) -> list[Any]:
    """The nodes of the graph, or its first ``most``, breadth first."""
    queue, seen = [root], {root, None}
    for node in queue:
        for child, _ in node.next_functions:
            if child not in seen:
                seen.add(child)
                queue.append(child)
        if most is not None and len(queue) >= most:
            break
    return queue[:most]


def _leaves(nodes: list[Any]) -> Iterator[int]:
    """Ids of the parameters among them: their own nodes are leaves, and to ask the others costs more than the walk."""
    for node in nodes:
        variable = None if node.next_functions else getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)
