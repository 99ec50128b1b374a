"""States of torchmetrics as they are about to be gathered: what makes a gather of them pair up wrongly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks


def metrics_of(module: nn.Module) -> dict[str, Any]:
    """Torchmetrics' metrics by path, without Lightning's records of what was logged."""
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


def compare_states(finding: Finding, texts: Sequence[str]) -> Finding:
    """What a state that differs is on all ranks (JSON of its entry of ``states_of``)."""
    column = [json.loads(text) or [0, None, None] for text in texts]
    numbers = [number for number, *_ in column]
    if len(set(numbers)) > 1:
        return replace(
            finding,
            fault="F51",
            what=f"metric state `{finding.name}`, a list that is gathered item by item",
            expected="the same number of updates on every rank",
            values=tuple(f"{number} updates" for number in numbers),
            ranks=odd_ranks(numbers),
            fix="Call update() equally often on every rank, or give the state dist_reduce_fx='cat'.",
        )
    kinds = [tuple(kind) for _, *kind in column]
    return replace(
        finding,
        what=f"metric state `{finding.name}`",
        expected="the same dimensions and dtype on every rank",
        values=tuple("empty" if n is None else f"{n} dimensions, {dtype}" for n, dtype in kinds),
        ranks=odd_ranks(kinds),
        fix="Make the inputs of update() alike on every rank (dtype, and a dimension of size 1 where there is one row).",
    )
