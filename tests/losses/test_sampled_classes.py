"""Sampled classes with ``unbiased=True``, where targets and drawn negatives share a shard."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from pytorch_metric_learning import losses as pml

from lightning_ddp_losses import ClassShardedLoss

CLASSES, DIM = 20, 4


@pytest.mark.parametrize(("labels", "rate"), [([3, 3, 11], 0.4), ([0, 5, 7, 19], 0.3), ([2] * 6, 0.9)])
def test_negatives_weigh_the_inverse_of_their_probability(labels: Sequence[int], rate: float) -> None:
    """The value is the formula: each drawn negative stands for all classes that are no targets, divided by how many were drawn."""
    torch.manual_seed(3)
    plain = pml.NormalizedSoftmaxLoss(CLASSES, DIM, temperature=0.5).double()
    weight = plain.W.detach().clone()
    loss = ClassShardedLoss(plain, sample_rate=rate, unbiased=True)
    loss.attach(torch.optim.SGD(loss.parameters(), lr=0.1))
    rows, target = torch.randn(len(labels), DIM, dtype=torch.float64), torch.tensor(labels)
    value = loss(rows, target)
    drawn = loss.sampler.sampled.tolist()
    targets = set(labels)
    negatives = [each for each in drawn if each not in targets]
    assert targets <= set(drawn)
    assert negatives
    logits = torch.nn.functional.normalize(rows) @ torch.nn.functional.normalize(weight, dim=0) / 0.5
    stands_for = (CLASSES - len(targets)) / len(negatives)
    expected = []
    for row, label in zip(logits, labels, strict=True):
        of_targets = sum(math.exp(row[each]) for each in targets)
        of_negatives = stands_for * sum(math.exp(row[each]) for each in negatives)
        expected.append(math.log(of_targets + of_negatives) - float(row[label]))
    torch.testing.assert_close(float(value.detach()), math.fsum(expected) / len(expected), rtol=1e-9, atol=0)
