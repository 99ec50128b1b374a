"""Fits whose ranks are processes of the main one (`ddp_losses_fork`, `_spawn`, `_notebook`): what they trained comes back whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import StrategyRegistry

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.doors import WholeStateLauncher
from tests.fits import make_trainer
from tests.oracle import assert_close, batches
from tests.processes import run_python
from tests.strategies.jobs import TASK, fit_alone, loader
from tests.strategies.sharded_jobs import Plain, Sharded

SCRIPT = """
import os, sys
import torch
from lightning.pytorch import Trainer
import lightning_ddp_losses
from lightning_ddp_losses import DDPLossStrategy
from tests.oracle import batches
from tests.strategies.jobs import TASK, loader
from tests.strategies.sharded_jobs import Sharded
from tests.strategies.test_adopted_shards import NotYet
from tests.strategies.test_shards import Built


class Loads:
    def train_dataloader(self):
        return loader(self.trainer.world_size, self.global_rank, even=False)


class Given(Loads, Sharded):
    def predict_step(self, batch, index):
        return self.loss.predict(self.encoder(batch[0]), k=2)[1]


class Drawn(Loads, Built):
    pass


class Adopted(Loads, NotYet):
    pass


def fit(module, strategy):
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(module)
    return trainer


if __name__ == "__main__":
    method = sys.argv[1]
    torch.set_num_threads(1)
    given = Given("SubCenterArcFaceLoss", "adam")
    trainer = fit(given, f"ddp_losses_{method}")
    # the module can be used, here and on ranks
    states, (features, labels) = {"first": {k: v.clone() for k, v in given.state_dict().items()}}, batches(TASK)[0]
    value = given.objective(features, labels, 0)
    value.backward()
    states["value"] = {"value": value.detach(), "slope": given.loss.weight.grad}
    if method == "fork":
        given.zero_grad()
        trainer.predict(given, loader(1, 0))
        fit(given, f"ddp_losses_{method}")
        states["second"] = given.state_dict()
        drawn, twin = Drawn(), Drawn()
        fit(drawn, DDPLossStrategy(start_method="fork", sharded_checkpoints=True))
        states["drawn"], states["drawn before"] = drawn.state_dict(), twin.state_dict()
        fit(Adopted(), DDPLossStrategy(start_method="fork", adopt=True))
    torch.save(states, "states.pt")
"""


def run_script(folder: Path, method: str) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    (folder / "train.py").write_text(SCRIPT)
    done = run_python("train.py", method, folder=folder, seconds=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "states.pt"), done.stderr


def plain_again(state: dict[str, torch.Tensor], loss: str, optimizer: str) -> Plain:
    module = Plain(loss, optimizer)
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_main_process_has_the_whole_weight_after_the_fit(tmp_path: Path, method: str) -> None:
    states, output = run_script(tmp_path, method)
    options = ("SubCenterArcFaceLoss", "adam")
    expected = fit_alone(lambda: Plain(*options))
    assert_close(states["first"], expected)
    # what the module says in the main process
    module, (features, labels) = plain_again(expected, *options), batches(TASK)[0]
    value = module.objective(features, labels, 0)
    assert value is not None
    value.backward()
    assert_close(states["value"], {"value": value, "slope": module.loss.W.grad})
    if method == "fork":
        # it goes on on ranks, while a graph of the main process is still alive
        assert_close(states["second"], fit_alone(lambda: plain_again(expected, *options)))
        drawn = states["drawn before"]
        assert_close(states["drawn"], fit_alone(lambda: plain_again(drawn, "ArcFaceLoss", "sgd")))
        # what cannot come back says so
        assert "_adopted_losses.losses_0: losses that the module does not register" in output


def wholes_on(receivers: list[int], strategy: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Train; this rank's state as the first ranks of several nodes get it."""
    module = Sharded("SubCenterArcFaceLoss", "adam")
    trainer = make_trainer(DDPLossStrategy(**strategy))
    trainer.fit(module, loader())
    state = trainer.strategy.whole_module_state(receivers)
    assert state["loss.W"].is_meta == (dist.get_rank() not in receivers)
    return None if state["loss.W"].is_meta else state


@pytest.mark.parametrize("strategy", [{}, {"sharded_checkpoints": True}], ids=str)
def test_the_first_rank_of_each_node_gets_the_whole(pool: RankPool, strategy: dict[str, Any]) -> None:
    expected = fit_alone(lambda: Plain("SubCenterArcFaceLoss", "adam"))
    first, second, third = pool.run(3, wholes_on, [0, 2], strategy)
    assert second is None
    assert_all_close((first, third), expected)


def test_every_start_method_has_the_launcher() -> None:
    for name in ("fork", "spawn", "notebook"):
        entry = StrategyRegistry[f"ddp_losses_{name}"]
        strategy = entry["strategy"](**entry["init_params"])
        assert strategy._start_method in ("fork", "spawn")
    assert WholeStateLauncher.__mro__[1].__name__ == "_MultiProcessingLauncher"
