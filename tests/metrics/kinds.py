"""Small metrics of our own, one for each kind of state, on torchmetrics' base (one process) and on ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_ddp_losses.metrics import DifferentiableMetric


def log_sum_exp(stacked: Tensor) -> Tensor:
    return torch.logsumexp(stacked, 0)


def joined(pieces: Any) -> Tensor:
    return torch.cat(list(pieces)) if isinstance(pieces, (list, tuple)) else pieces


KINDS: dict[str, tuple[Any, Any]] = {  # default, reduction
    "sum": (torch.zeros(3), "sum"),
    "mean": (torch.zeros(3), "mean"),
    "min": (torch.full((3,), torch.inf), "min"),
    "max": (torch.full((3,), -torch.inf), "max"),
    "cat tensor": (torch.zeros(0, 3), "cat"),
    "cat list": ([], "cat"),
    "None tensor": (torch.zeros(3), None),
    "None list": ([], None),
    "callable": (torch.full((3,), -torch.inf), log_sum_exp),
    "callable list": ([], joined),
}


class _Body:
    """Rows (n, 3); the value depends on their order where the state keeps them."""

    full_state_update: bool | None = False
    _reductions: dict[str, Any]

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        default, reduction = KINDS[kind]
        self.kind = kind
        self.add_state("kept", default.clone() if isinstance(default, Tensor) else [], reduction)  # type: ignore[attr-defined]
        self.add_state("seen", torch.tensor(0), "sum")  # type: ignore[attr-defined]

    def update(self, rows: Tensor) -> None:
        kept, kind = self.kept, self.kind  # type: ignore[has-type]
        self.seen = self.seen + len(rows)  # type: ignore[has-type]
        if isinstance(kept, list):
            kept.append(rows)
        elif kind in ("sum", "None tensor"):
            self.kept = kept + rows.square().sum(0)
        elif kind == "mean":
            self.kept = kept + (rows.square().mean(0) - kept) / self._update_count  # type: ignore[attr-defined]
        elif kind in ("min", "max"):
            extreme = torch.amin if kind == "min" else torch.amax
            self.kept = extreme(torch.stack([kept, extreme(rows, 0)]), 0)
        elif kind == "cat tensor":
            self.kept = torch.cat([kept, rows])
        else:
            self.kept = log_sum_exp(torch.stack([kept, log_sum_exp(rows)]))

    def compute(self) -> Tensor:
        kept = joined(self.kept)
        if self.kind == "None tensor" and kept.ndim == 2:
            kept = kept.sum(0)
        weights = torch.arange(1, kept.numel() + 1, dtype=kept.dtype).reshape(kept.shape)
        return (kept * weights).sum().square() / self.seen


class Stock(_Body, Metric):
    """One process."""

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        local, n = self.kept, self._update_count
        super()._reduce_states(incoming_state)
        if self.kind == "mean":  # torchmetrics rounds it to float32
            self.kept = ((n - 1) * incoming_state["kept"] + local) / n


class Ours(_Body, DifferentiableMetric):
    """Any number."""


class StockTwice(Stock):
    full_state_update = True


class OursTwice(Ours):
    full_state_update = None
