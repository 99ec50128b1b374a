"""Follows one step through the modules: a few numbers for each row of each output and of its gradient, in forward order.

Two runs that part are compared call by call; the first call whose rows differ is where they part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.core import precision

_PROJECTIONS = 4


class Trace:
    """Hooks on all modules that have no children; they note what passes while ``on``.

    Args:
        module: The LightningModule.
        home: Where the numbers go; one file for each tensor.
    """

    def __init__(self, module: nn.Module, home: Path) -> None:
        self.home, self.on = home, False
        self.seen: list[dict[str, Any]] = []
        self._files = 0
        self._handles = [
            child.register_forward_hook(functools.partial(self._note, name))
            for name, child in module.named_modules()
            if name and next(child.children(), None) is None
        ]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = next(iter(precision.tensors_in(output)), None)
        if not self.on or first is None or not first.is_floating_point():
            return
        call = {"name": name, "kind": type(module).__name__, "output": self._store(first), "gradient": ""}
        self.seen.append(call)
        if first.requires_grad:
            first.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: call.update(gradient=self._store(gradient))
            )

    def _store(self, values: Tensor) -> str:
        """A few random projections of each row; a scalar is one row."""
        self._files += 1
        path = self.home / f"trace-{self._files}.pt"
        wide = values.detach().double().cpu()
        flat = wide.reshape(wide.shape[0] if wide.ndim else 1, -1)
        generator = torch.Generator().manual_seed(flat.shape[1])
        directions = torch.randn(flat.shape[1], _PROJECTIONS, generator=generator, dtype=torch.float64)
        torch.save(flat @ directions, path)
        return str(path)


def part(ranks: Recording, one: Recording, allowed: float) -> str:
    """Where two traced runs part, in forward order, as a sentence.

    Args:
        ranks: Traced run of the ranks.
        one: Traced run of one process on the joined batches.
        allowed: Relative difference that is rounding.
    """
    columns = list(zip(*(page["trace"] for page in ranks.facts), strict=False))
    calls = list(zip(columns, one.facts[0]["trace"], strict=False))
    for key, what, scale in (("output", "Activations", 1.0), ("gradient", "Gradients", float(ranks.ranks))):
        order = calls if key == "output" else calls[::-1]  # gradients come from behind
        for column, call in order:
            if (
                not call[key]
                or not all(each[key] for each in column)
                or any(each["name"] != call["name"] for each in column)
            ):
                continue
            ours = torch.cat([torch.load(each[key]) for each in column]) / scale
            theirs = torch.load(call[key])
            if ours.shape != theirs.shape:
                continue  # not rows: a loss has one value on each rank
            off = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
            if not off <= allowed:
                end = (
                    "in forward order"
                    if key == "output"
                    else "from the loss backwards; all activations that are rows agree"
                )
                return f"{what} part first at `{call['name']}` ({call['kind']}), by {off:.2g}, {end}."
    return (
        "Activations and gradients of all modules that give one row per sample agree; "
        "what parts is inside the loss or beside the modules."
    )
