"""An encoder that `fully_shard` divides is compared whole with one process."""

from __future__ import annotations

from pytorch_metric_learning.losses import ArcFaceLoss
from torch.distributed.fsdp import fully_shard

from lightning_ddp_losses import GlobalBatchLoss, ModelParallelLossStrategy, audit
from tests.audit.modules import CLASSES, Module, even


class Divided(Module):
    """Its encoder in parts, where there is a mesh for that."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])


def test_ranks_with_parts_equal_one_process() -> None:
    module = Divided(GlobalBatchLoss(ArcFaceLoss(CLASSES, CLASSES)))
    report = audit(module, even(), strategy=ModelParallelLossStrategy(), steps=2)
    assert report.equal, str(report)
    assert {row.parameter.split(".")[0] for row in report.rows} == {"encoder", "loss"}
