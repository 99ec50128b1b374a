"""States of torchmetrics as they are about to be gathered: what makes a gather of them pair up wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks

__all__ = ["compare_states", "metrics_of", "states_of"]


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """torchmetrics' metrics by path, without Lightning's records of what was logged."""
    return {
        name: inner
        for name, inner in module.named_modules()
        if any(cls.__module__ == "torchmetrics.metric" and cls.__name__ == "Metric" for cls in type(inner).__mro__)
        and hasattr(inner, "_reductions")
    }


def states_of(module: nn.Module) -> dict[str, list[Any]]:
    """By state: how many tensors will be gathered one by one, their dimensions and their dtype (none of an empty list).

    A list that is concatenated first counts as one tensor, and may be empty on some ranks.
    """
    found: dict[str, list[Any]] = {}
    for path, metric in metrics_of(module).items():
        for name, reduction in metric._reductions.items():
            value = getattr(metric, name, None)
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = [1, value.ndim, str(value.dtype)]
            elif isinstance(value, list):
                kinds = {(item.ndim or 1, str(item.dtype)) for item in value if isinstance(item, Tensor)}
                several = sorted(kinds)[0] if kinds else None
                number = len(value) if reduction is None else -1
                found[f"{path}.{name}"] = [number, *(several or (None, None))]
    return found


def compare_states(finding: Finding, texts: Sequence[str]) -> list[Finding]:
    """Findings from the states of all ranks (JSON of ``states_of``), in place of one that only says that they differ."""
    everyone = [json.loads(text) for text in texts]
    found = []
    for name in dict.fromkeys(name for states in everyone for name in states):
        column = [states.get(name, [0, None, None]) for states in everyone]
        numbers = [number for number, *_ in column]
        kinds = [tuple(kind) for _, *kind in column]
        if len(set(numbers)) > 1:
            what = f"metric state `{name}`, a list that is gathered item by item"
            fix = "Call update() equally often on every rank, or give the state dist_reduce_fx='cat'."
            values = tuple(f"{number} updates" for number in numbers)
            expected = "the same number of updates on every rank"
            ranks = odd_ranks(numbers)
            found.append(replace(finding, fault="F51", what=what, expected=expected, name=name, values=values, fix=fix, ranks=ranks))
        elif len({kind for kind in kinds if kind[0] is not None}) > 1:
            what = f"metric state `{name}`"
            fix = "Make the inputs of update() alike on every rank (dtype, and a dimension of size 1 where there is one row)."
            values = tuple("empty" if n is None else f"{n} dimensions, {dtype}" for n, dtype in kinds)
            expected = "the same dimensions and dtype on every rank"
            ranks = odd_ranks(kinds)
            found.append(replace(finding, fault="F52", what=what, expected=expected, name=name, values=values, fix=fix, ranks=ranks))
    return found
