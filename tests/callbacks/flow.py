"""Gradients that are missing, not finite, or zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.callbacks.harness import CLASSES, WIDTH, Case, Subject

__all__ = ["CASES"]


class ZeroLoss(Subject):
    """No positive pair on one rank: the loss is zero times the embeddings, and the head is not in its graph."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.odd and index == 1:
            return (self.encoder(features) * 0).sum()
        return super().objective(features, labels, index)


class Branch(Subject):
    """One of two heads, chosen by rank."""

    def build(self) -> None:
        self.other = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        unused = 0 * self.other(features).sum()
        if self.odd and index == 1:
            return nn.functional.cross_entropy(self.other(self.encoder(features)), labels)
        return super().objective(features, labels, index) + unused


class Unused(Subject):
    """A head that no rank's loss uses."""

    def build(self) -> None:
        if self.sick:
            self.other = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


class Infinite(Subject):
    """A finite loss whose gradient is not: the root of zero, on one rank."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        if self.odd and index == 1:
            loss = loss + (self.encoder.weight * 0).sum().abs().sqrt()
        return loss


class Cut(Subject):
    """Embeddings times zero: the encoder learns nothing."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        return nn.functional.cross_entropy(self.head(embeddings * (0 if self.sick else 1)), labels)


class ZeroStart(Subject):
    """Healthy in both forms: a head that starts at zero gives the encoder no gradient in the first step."""

    def build(self) -> None:
        nn.init.zeros_(self.head.weight)


G = "GradientFlowCheck"
CASES = [
    Case(ZeroLoss, "F32", G, "head.weight", step=1),
    Case(Branch, "F37", G, "head.weight", step=1),
    Case(Unused, "F38", G, "other.weight", ranks=()),
    Case(Infinite, "F79", G, "encoder.weight", step=1, ranks=(0, 1)),
    Case(Cut, "DETACHED", G, "encoder", step=3, ranks=()),
]
