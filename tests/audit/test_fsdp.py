"""An encoder that `fully_shard` divides is compared whole with one process."""

from __future__ import annotations

import weakref
from typing import Any

from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_ddp_losses import GlobalBatchLoss, ModelParallelLossStrategy, audit
from tests.audit.modules import CLASSES, Module, even


class Divided(Module):  # its encoder in parts, where there is a mesh for that
    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])


def test_ranks_with_parts_equal_one_process() -> None:
    module = Divided(GlobalBatchLoss(ArcFaceLoss(CLASSES, CLASSES)))
    report = audit(module, even(), strategy=ModelParallelLossStrategy(), steps=2)
    assert report.equal, str(report)
    assert {row.parameter.split(".")[0] for row in report.rows} == {"encoder", "loss"}


class OneAtATime(Divided):  # a rank that has two gathered parameters at the same time fails
    def configure_model(self) -> None:
        super().configure_model()
        gather, alive = DTensor.full_tensor, [0]

        def counted(self: DTensor, **options: Any) -> Tensor:
            assert not alive[0], "another one is still whole"
            whole = gather(self, **options)
            alive[0] += 1
            weakref.finalize(whole, lambda: alive.__setitem__(0, alive[0] - 1))
            return whole

        if self.device_mesh is not None:
            DTensor.full_tensor = counted  # type: ignore[method-assign]


def test_no_rank_holds_two_gathered_parameters() -> None:
    module = OneAtATime(GlobalBatchLoss(ArcFaceLoss(CLASSES, CLASSES)))
    report = audit(module, even(), strategy=ModelParallelLossStrategy(), steps=1)
    assert report.equal, str(report)
