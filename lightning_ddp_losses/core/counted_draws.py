"""Draws that a module makes from torch's seed and the number of its calls: a run that resumes has to go on counting.

Losses and miners that are evaluated on every rank draw so, and a class sampler: a generator of their own would have to be saved
with its state, and torch's own would draw differently by rank. The numbers are no part of a module's state dict, whose keys are those of
the plain module; the strategy writes them beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class CountedDraws:
    """Counts the calls of a module that draws anew in each.

    Attributes:
        number: Calls so far.
    """

    def __init__(self) -> None:
        self.number = 0


def read_draw_counts(module: nn.Module) -> dict[str, int]:
    """Return how often what a module holds has drawn, by its path."""
    return {path: draws.number for path, draws in _counters_in(module).items()}


def write_draw_counts_(module: nn.Module, counts: Mapping[str, int]) -> None:
    """Let what a module holds go on counting; a path that it does not have is left out."""
    for path, draws in _counters_in(module).items():
        draws.number = counts.get(path, draws.number)


def _counters_in(module: nn.Module) -> dict[str, CountedDraws]:
    """Return the counters of a module and of those in it."""
    found = {}
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if isinstance(value, CountedDraws):
                found[f"{path}.{name}"] = value
    return found
