"""What modules, data and metrics of the shipped configs refuse: one row for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_losses.cli import CellsDataModule, CellsEncoder, DigitsDataModule, DigitsEncoder, MLPEncoder, configs
from lightning_ddp_losses.demo.data import check_classes, check_cut, stratified_split
from lightning_ddp_losses.demo.evaluation import HeldOutRows
from lightning_ddp_losses.errors import ConfigurationError, InputError

LABELS = np.arange(100) % 5
SHARE = "expected 0 or more, below 1"
CLASSES = r"m_per_class \(.* batch of 20\): expected a divisor of 20, got 3"
UNLABELLED = partial(DigitsDataModule, missing_labels=0.1)
FEW = "held-out rows: expected at least one for each of 4 ranks, got 3"
# the call, and words of its error
OPTIONS: list[tuple[Callable[[], Any], str]] = [
    (partial(DigitsDataModule, missing_labels=1), f"missing_labels .*: {SHARE}, got 1"),
    (partial(DigitsDataModule, missing_labels=-0.1), f"{SHARE}, got -0.1"),
    (partial(DigitsDataModule, missing_labels=float("nan")), f"{SHARE}, got nan"),
    (partial(UNLABELLED, ignore_index=9), "ignore_index: expected below 0, as classes are not, got 9"),
    (partial(UNLABELLED, m_per_class=8), "m_per_class: expected none beside missing_labels.*, got 8"),
    (partial(CellsDataModule, 300, types=0), "types"),
    (partial(CellsDataModule, 300, genes=0), "genes"),
    (partial(CellsDataModule, 300, held_out_cells=300), "held_out_cells"),
    (partial(check_classes, LABELS, 3, 20), CLASSES),
    (partial(check_classes, LABELS, 2, 20), r"at least 4, as there are 5 classes, got 2\nRaise m_per_class"),
    (partial(check_classes, LABELS, 0, 20), "expected a divisor"),
    (partial(check_cut, 100, 64, 3, shuffle=True), r"multiple of the 3 ranks, got 64\n.*63 or 66"),
    (partial(check_cut, 100, 0, 3, shuffle=True), "got 0"),
    (partial(stratified_split, LABELS, 1.5, seed=0), r"between 0 and 1, got 1\.5"),
    (partial(configs.run_configs, ["digits"]), r"expected names out of .*digits_arcface.*, got digits"),
]
INPUTS: list[tuple[Callable[[], Any], str]] = [
    (partial(check_cut, 63, 64, 2, shuffle=True), "training rows: expected at least batch_size=64, got 63"),
    (partial(check_cut, 3, 64, 4, shuffle=False), FEW),
    (partial(DigitsEncoder(), torch.zeros(2, 8, 8)), r"images: expected \(B, 1, 8, 8\), got \(2, 8, 8\)"),
    (partial(MLPEncoder(5), torch.zeros(2, 3, 4)), r"length: expected in_features=5, got 12 \(shape \(2, 3, 4\)\)"),
    (partial(CellsEncoder(6), torch.zeros(2, 5)), "genes=6"),
    (HeldOutRows().gather, "held-out rows of this rank: expected one at least, got 0"),
]
REFUSED = [(*row, ConfigurationError) for row in OPTIONS] + [(*row, InputError) for row in INPUTS]


@pytest.mark.parametrize(("call", "words", "error"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_a_mistake_is_refused(call: Callable[[], Any], words: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=words):
        call()
