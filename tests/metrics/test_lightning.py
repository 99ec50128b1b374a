"""A metric in a LightningModule: trained on, logged, under `ddp` and `ddp_losses`, as in one process with plain torchmetrics."""

from __future__ import annotations

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_losses import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.fits import make_trainer
from tests.metrics.lightning_jobs import JOBS, Alone, Job, fit
from tests.oracle import assert_close

QUIET = "ignore:.*sync_dist=True.*when logging on epoch level"


RUNS = [(1, "ddp"), (2, "ddp_losses"), (3, "ddp"), (3, "ddp_losses")]


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(("even", "accumulate"), [(True, 1), (False, 2)], ids=["even", "uneven, accumulated"])
@pytest.mark.parametrize("kind", JOBS)
def test_training_is_that_of_one_process(pool: RankPool, kind: str, even: bool, accumulate: int) -> None:
    if kind == "beside others" and not even:
        return  # a mean over each rank's rows is one of means there, by its nature
    (one,) = pool.run(1, fit, Alone, kind, None, True, accumulate, distributed=False)
    for world_size, strategy in RUNS:
        for many in pool.run(world_size, fit, Job, kind, strategy, even, accumulate):
            assert_close(many["weights"], one["weights"])
            assert many["logged"] == pytest.approx(one["logged"], rel=1e-9)


class Mixed(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(4, 1)
        self.metric = differentiable(tm.MeanSquaredError())
        self.seen: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.encoder(batch)[:, 0]
        assert out.dtype in (torch.bfloat16, torch.float32)
        value: Tensor = self.metric(out, batch.sum(1))
        self.seen.append(value.detach())
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@each_rank(2)
def test_low_precision_does_not_reach_the_metric(precision: str) -> None:
    """dtypes of the values and their float64 truth from the same outputs."""
    module = Mixed()
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * 30
    data = [rows.to(torch.bfloat16) if precision == "bf16-true" else rows] * 3
    make_trainer("ddp_losses", precision=precision).fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"), torch.no_grad():
        out = module.encoder(data[0])[:, 0]
        target = data[0].sum(1)
    truth = float((out.double() - target.double()).square().mean())
    offs = [abs(float(value) - truth) / truth for value in module.seen]
    total = abs(float(module.metric.compute()) - truth) / truth
    assert {value.dtype for value in module.seen} == {torch.float32} == {module.metric.sum_squared_error.dtype}
    assert max(offs) < 1e-5
    assert total < 1e-5
