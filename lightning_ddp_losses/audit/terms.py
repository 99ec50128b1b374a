"""The terms of a loss: most losses are sums, and the autograd graph contains a separate node for each summand.

An audit may test the effect of a single term. The other terms are switched off in backward, by replacing their gradients with zeros where
they enter the sum. Forward, the graph and its collectives are unchanged on every rank.

A sum is followed through additions, signs, constant factors and ``torch.stack(...).sum()``, and ends at any other operation. A
product of two terms is one term.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.distributed.user_line import package_of

_OFF = "term "
_SUMS = ("AddBackward0", "SubBackward0")
_UNARY = ("NegBackward0", "RsubBackward1", "ToCopyBackward0", "CloneBackward0", "AliasBackward0", "SqueezeBackward0")
_SCALED = ("MulBackward0", "DivBackward0")  # followed only for a constant factor
_REDUCED = ("SumBackward0", "MeanBackward0")  # followed only for stacked values
_STACKS = ("StackBackward0", "CatBackward0")
_FRAME = re.compile(r'File "(?P<path>.*)", line (?P<number>\d+), in (?P<name>.*)\n\s*(?P<text>.*)')


class Term(NamedTuple):
    """A summand of a loss.

    Attributes:
        parent: Node of the sum that contains the term.
        place: Index of the term among the parent's children.
        node: Node of the term.
    """

    parent: Any
    place: int
    node: Any

    @property
    def line(self) -> str:
        """The user's line that computed the term. Empty unless the graph was built under ``torch.autograd.set_detect_anomaly``."""
        frames = self.node.metadata.get("traceback_", [])
        for frame in reversed(frames):
            found = _FRAME.search(frame)
            if found is not None and not package_of(found["path"]):
                return (
                    f"{os.path.basename(found['path'])}:{found['number']}, in {found['name']}: {found['text'].strip()}"
                )
        return ""


def terms_of(loss: Tensor) -> list[Term]:
    """List the terms of a loss in the order of the code. Empty if the loss is not a sum, or if a term depends on a partial sum."""
    terms: list[Term] = []
    sums = {loss.grad_fn}
    edges = [(loss.grad_fn, place) for place in reversed(_summands(loss.grad_fn))]
    while edges:
        parent, place = edges.pop()
        child = parent.next_functions[place][0]  # type: ignore[union-attr]
        summands = _summands(child)
        if not summands:
            terms.append(Term(parent, place, child))
        elif child not in sums:
            sums.add(child)
            edges += [(child, below) for below in reversed(summands)]
    below_terms = {node for node, _ in walk_graph([], nodes=[term.node for term in terms])}
    if len(terms) < 2 or not below_terms.isdisjoint(sums):
        return []
    return terms


def _summands(node: Any) -> list[int]:
    """Return the indices of a sum's children that have a gradient. Empty if the node is not a sum."""
    if node is None:
        return []
    name = node.name()
    places = [place for place, (child, _) in enumerate(node.next_functions) if child is not None]
    if name in (*_SUMS, *_STACKS, *_UNARY):
        return places
    if name in _SCALED and len(places) == 1:
        is_divisor = name == "DivBackward0" and places != [0]
        return [] if is_divisor else places
    if name in _REDUCED and node.next_functions[0][0].name() in _STACKS:
        return places
    return []


class TermSwitch:
    """Numbers the terms of the losses of one process, and switches some off.

    Args:
        off: Numbers of the terms that are switched off.

    Attributes:
        lines: The user's line of each term, in the order of their numbers. Unknown lines are empty strings.
    """

    def __init__(self, off: frozenset[int]) -> None:
        self.off = off
        self.lines: list[str] = []
        self._numbers: dict[tuple[str, int], int] = {}

    def see(self, loss: Tensor, call: str) -> None:
        """Number the terms of a loss before its backward, and replace the gradients of terms that are switched off with zeros.

        Args:
            loss: The loss.
            call: The user's line that calls backward. It distinguishes several losses of one step.
        """
        for index, term in enumerate(terms_of(loss)):
            number = self._numbers.setdefault((call, index), len(self._numbers))
            if number == len(self.lines):
                self.lines.append("")
            self.lines[number] = self.lines[number] or term.line
            if number in self.off:
                term.parent.register_hook(_zero_at(term.place))


def term_off(number: int) -> str:
    """Return the name of a term among the parts that a run switches off."""
    return f"{_OFF}{number}"


def terms_off(parts: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the terms among the parts that a run switches off."""
    return frozenset(int(part.removeprefix(_OFF)) for part in parts if part.startswith(_OFF))


def _zero_at(place: int) -> Callable[..., tuple[Any, ...]]:
    """Return a hook that replaces the gradient of one child of a node by zero."""

    def replaced(gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        found = list(gradients)
        if found[place] is not None:
            found[place] = torch.zeros_like(found[place])
        return tuple(found)

    return replaced
