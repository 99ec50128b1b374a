"""A fit goes on under a `GlobalBatchLoss` from a checkpoint of the plain loss, and back, and from those of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.strategies.fsdp_jobs import Towers, fit_sharded_model
from tests.strategies.jobs import fit, fit_alone, make_loss


class Wrapped(Towers):
    """Encoder, a plain parameter, ArcFace over all ranks, AdamW."""

    def __init__(self) -> None:
        super().__init__("ArcFaceLoss", "adamw")


class Plain(Wrapped):
    is_global = False


class Compiled(Wrapped):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss.compile(backend="eager")


class Registered(nn.Module):
    """Gives the names of earlier versions, in which the wrapper registered the loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.loss(embeddings, labels)


class Earlier(Wrapped):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss = Registered(GlobalBatchLoss(make_loss("ArcFaceLoss")))


JOBS = {"plain": Plain, "wrapped": Wrapped, "compiled": Compiled, "earlier": Earlier}
# who trains, on how many ranks, and how: in one process, under "ddp", "ddp_losses", or FSDP2 into a folder or a file
ROUTES = [
    ("plain one", "wrapped ddp_losses"),
    ("plain one", "wrapped folder"),
    ("wrapped ddp_losses", "plain one"),
    ("wrapped ddp_losses", "wrapped folder"),
    ("wrapped file", "wrapped ddp"),
    ("earlier ddp_losses", "wrapped ddp_losses"),
    ("earlier ddp_losses", "compiled ddp_losses"),
    ("earlier ddp", "wrapped ddp"),
    ("earlier ddp_losses", "wrapped folder"),
    ("earlier folder", "wrapped folder"),
    ("earlier folder", "wrapped ddp_losses"),
    ("earlier file", "wrapped file"),
]


def train(pool: RankPool, who: str, **options: Any) -> dict[str, Tensor]:
    kind, how = who.split()
    job = JOBS[kind]
    if how == "one":
        return fit_alone(job, ckpt_path=options.pop("load", None), **options)
    strategy: Any = {"folder": {}, "file": {"save_distributed_checkpoint": False}, "ddp_losses": {}, "ddp": "ddp"}[how]
    ranks = pool.run(2, fit_sharded_model, job, "adamw", strategy, ddp=how.startswith("ddp"), **options)
    for state in ranks[1:]:
        assert_close(state, ranks[0], rtol=0)
    found: dict[str, Tensor] = ranks[0]
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize(("before", "after"), ROUTES)
def test_a_fit_goes_on(pool: RankPool, tmp_path: Path, before: str, after: str) -> None:
    path = str(tmp_path / "checkpoint")
    found = train(pool, before, save=path)
    assert ("loss.loss.W" in found) == before.startswith("earlier")
    expected = fit_alone(Plain, max_epochs=2)
    assert_close(train(pool, after, load=path, max_epochs=2), expected, rtol=1e-8)


def test_a_lone_file_of_an_earlier_version_is_read(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    state = train(pool, "earlier ddp_losses", save=str(path))
    module = Wrapped.load_from_checkpoint(path, weights_only=True)
    assert torch.equal(module.loss.W, state["loss.loss.W"])


class Pruned(Wrapped):
    """A hook of the wrapper computes the weight that the loss reads."""

    def build(self, loss: str) -> None:
        super().build(loss)
        prune.l1_unstructured(self.loss, "W", 0.5)


class PrunedPlain(Pruned):
    is_global = False


class Scaled(GlobalBatchLoss):
    """A class of one's own, with a parameter that the wrapped loss does not read."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__(loss)
        self.gain = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.gain * super().forward(*args, **kwargs)


class ScaledPlain(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((), 1.5, dtype=torch.float64))
        self.W = loss.W
        self.inner = [loss]

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        return self.gain * self.inner[0](embeddings, labels)


class ScaledJob(Wrapped):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss = Scaled(make_loss("ArcFaceLoss"))


class ScaledPlainJob(Wrapped):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss = ScaledPlain(make_loss("ArcFaceLoss"))


@pytest.mark.parametrize("strategy", [{}, "ddp"], ids=["ddp_losses", "ddp"])
@pytest.mark.parametrize(("job", "plain"), [(Pruned, PrunedPlain), (ScaledJob, ScaledPlainJob)])
def test_tensors_beside_those_of_the_loss(pool: RankPool, job: Any, plain: Any, strategy: Any) -> None:
    expected = fit_alone(plain)
    for state in pool.run(2, fit, job, strategy):
        assert_close(state, expected, rtol=1e-8)
