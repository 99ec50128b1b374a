"""Parameters that go apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.callbacks.harness import WIDTH, Case, Subject

__all__ = ["CASES"]


class Order(Subject):
    """F12: two layers of one shape, registered in another order on one rank."""

    def build(self) -> None:
        for name in ("b", "a") if self.odd else ("a", "b"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.b(self.a(features)), labels, index)


class Nudged(Subject):
    """One rank changes one weight by one unit in the last place, after its second step."""

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 2:
            with torch.no_grad():
                weight = self.head.weight.view(-1)
                weight[1] = torch.nextafter(weight[1], torch.tensor(9.0, dtype=torch.float64))


CASES = [
    Case(Order, "F12", "ParameterSyncCheck", "a.weight"),
    Case(Nudged, "SYNC", "ParameterSyncCheck", "head.weight", step=2),
    Case(Nudged, "SYNC", "ParameterSyncCheck", "head.weight", step=2, strategy="ddp_losses"),
]
