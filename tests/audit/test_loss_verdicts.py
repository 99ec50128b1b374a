"""The audit's section about the losses of a module: verdict and line of each, by `certify`, on the inputs of the audited step."""

from __future__ import annotations

import linecache
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses import AuditReport, GlobalBatchLoss, audit
from tests.audit.modules import CLASSES, Module, even


class BatchDice(nn.Module):
    """A quotient of sums over the batch."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        chances = embeddings.sigmoid()
        wanted = nn.functional.one_hot(labels, CLASSES)
        return 1 - 2 * (chances * wanted).sum() / (chances + wanted).sum()


class Classifier(nn.Module):
    """A mean over rows, with a loss of torch inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)
        self.inner = nn.CrossEntropyLoss()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.inner(self.head(embeddings), labels)


class Weighted(nn.Module):
    """Called with its labels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier()

    def forward(self, embeddings: Tensor, *, labels: Tensor) -> Tensor:
        return self.inner(embeddings, labels)


class ByName(nn.Module):
    """Calls a loss with its labels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Weighted()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.named(embeddings, labels=labels) + 0 * labels.float().mean()


class Drawn(nn.Module):
    """Draws random numbers, so two calls differ."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.dropout(embeddings, 0.5).square().mean()


# the loss; its verdict; what its line holds; what is wrong with it; whether gradients of ranks are those of one process
LOSSES: dict[str, tuple[Any, str, str, str, bool]] = {
    "right": (Classifier, "right", "", "", True),
    "by name": (ByName, "right", "", "", True),
    "wrong": (BatchDice, "wrong", "(chances * wanted).sum() / (chances + wanted).sum()", "a sum over rows", False),
    "cannot tell": (Drawn, "cannot tell", "dropout(embeddings, 0.5)", "draws random numbers", False),
}


def audited(loss: nn.Module) -> AuditReport:
    return audit(Module(loss), even(), strategy="ddp", steps=1)


@pytest.mark.parametrize("name", LOSSES)
def test_verdict_and_line(name: str) -> None:
    make, verdict, line, why, is_equal = LOSSES[name]
    report = audited(make())
    (found,) = report.loss_verdicts
    assert (found.name, found.kind, found.verdict) == ("loss", make.__name__, verdict)
    assert line in found.line
    assert why in found.why
    assert report.equal == is_equal
    assert f"loss ({make.__name__}): {verdict}" in str(report)
    if line:
        number = int(re.search(r":(\d+): ", found.line)[1])  # type: ignore[index]
        assert line in linecache.getline(__file__, number)


def test_a_loss_that_is_exact_already_has_no_verdict() -> None:
    report = audited(GlobalBatchLoss(BatchDice()))
    assert report.loss_verdicts == []
    assert "certify" not in str(report)


def test_a_loss_keeps_its_state() -> None:
    class Counting(BatchDice):
        calls = 0

        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(embeddings, labels) + torch.zeros(()) * self.calls

    loss = Counting()
    assert audited(loss).loss_verdicts[0].verdict in ("wrong", "cannot tell")
    assert loss.calls == 0
