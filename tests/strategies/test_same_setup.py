"""A node with another release or another option is refused at set-up, on every rank, with the difference; what else differs is a note."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml

import lightning_ddp_losses
from lightning_ddp_losses.strategies import loss_parallelism
from lightning_ddp_losses.testing import RankPool
from tests.strategies.jobs import TASK, Job, fit

OPTIONS: dict[str, dict[str, Any]] = {"accumulation": {"accumulation": "window"}, "bucket_cap_mb": {"bucket_cap_mb": 1}}


class OtherMargin(Job):  # rank 1 has another margin, which no shape shows
    def build(self, loss: str) -> None:
        torch.manual_seed(1)
        margin = 28.6 + dist.get_rank()
        self.loss = pml.ArcFaceLoss(TASK.classes, TASK.dim, margin=margin).double()


def fit_otherwise(what: str) -> Any:
    is_other = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if is_other and what == "torch":
            patch.setattr(torch, "__version__", "2.12.1+cu130")
        if is_other and what == "package":
            patch.setattr(lightning_ddp_losses, "__version__", "0.0.9")
        options = OPTIONS.get(what, {}) if is_other else {}
        precision = "bf16-mixed" if is_other and what == "precision" else "64-true"
        return fit(OtherMargin if what == "loss" else Job, options, precision=precision)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("torch", "set-up: torch: expected the same on every rank"),
        ("package", "lightning_ddp_losses=0.0.9"),
        ("accumulation", "strategy option accumulation='window'"),
        ("precision", "precision=bf16-mixed"),
        ("bucket_cap_mb", "strategy option bucket_cap_mb=1"),
        ("loss", r"loss loss=ArcFaceLoss\(.*margin="),
    ],
)
def test_a_rank_that_is_set_up_otherwise_is_refused_on_all(pool: RankPool, what: str, named: str) -> None:
    errors = pool.errors(2, fit_otherwise, what)
    (text,) = {error.message for error in errors}
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert re.search(named, text), text


def test_builds_and_other_libraries_are_a_note() -> None:
    notes = [{"python": "3.12.1", "torch": "2.13.0+cpu"}] * 9 + [{"python": "3.12.1", "torch": "2.13.0+cu130"}]
    words = r"torch: 2.13.0\+cpu on rank 0, .* 7 and 1 more, 2.13.0\+cu130 on rank 9\.$"
    with pytest.warns(UserWarning, match=words) as said:
        loss_parallelism.note_differences([json.dumps(note).encode() for note in notes])
    assert "python" not in str(said[0].message)
    loss_parallelism.note_differences([loss_parallelism.pack_notes()] * 3)


def test_the_facts_of_a_set_up_fit_into_a_handshake() -> None:
    assert len(loss_parallelism.pack_notes()) < 400
