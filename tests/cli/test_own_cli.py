"""LossCLI in a user's own cli.py: it takes what LightningCLI takes, audits, and reports what the user's module logged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses.cli import EmbeddingModule, LossCLI, main
from tests.doors import process_groups

pytestmark = pytest.mark.usefixtures("empty_folder")


class Mine(LightningModule):  # has names of its own for what it measures, among them those of our modules
    def __init__(self, width: int = 2, loss: str = "square") -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, width)
        self.held_out = 0.25

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("my_square", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class MyData(LightningDataModule):  # has a method that ours have too, with other arguments
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.inputs_name, self.held_out = "mine", 0.1

    def check(self) -> None:
        raise AssertionError("nobody asked")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3)), batch_size=self.batch_size)


CONFIG = """
    model: {width: 4}
    data: {batch_size: 4}
    trainer: {accelerator: cpu, devices: 1, max_epochs: 1, log_every_n_steps: 1, enable_progress_bar: false}
"""


def test_the_config_of_a_users_own_cli_trains_and_is_audited(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(CONFIG)
    LossCLI(Mine, MyData, args=["fit", "--config", "mine.yaml"])
    process_groups.close(world=True)
    shown = capsys.readouterr().out
    assert "my_square" in shown
    assert "MAP@R" not in shown
    assert {path.name for path in Path("logs/fit/version_0").iterdir()} >= {"config.yaml", "metrics.csv", "checkpoints"}
    assert not Path("logs/fit/version_0/loss_curve.png").exists(), "nothing that it could show was logged"

    # what fit saved is audited
    cli = LossCLI(Mine, MyData, args=["audit", "--config", "logs/fit/version_0/config.yaml", "--audit.steps", "2"])
    assert cli.exit_status == 0
    assert "Equal: 2 ranks under ddp_losses, 2 steps" in capsys.readouterr().out


class Stronger(Callback):  # makes gradients stronger on ranks, so that an audit which forgets it is equal
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if trainer.world_size > 1:
            loss.register_hook(lambda grad: grad * self.factor)


class WithCallback(LossCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(Stronger, "stronger")


@pytest.mark.slow
def test_an_audit_has_the_callbacks_and_the_optimizer_of_the_users_cli(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(CONFIG)
    line = ["audit", "--config", "mine.yaml", "--audit.steps", "1"]
    assert LossCLI(Mine, MyData, args=line, trainer_defaults={"callbacks": Stronger()}).exit_status == 1
    assert WithCallback(Mine, MyData, args=line).exit_status == 1
    with pytest.warns(UserWarning, match="`Mine.configure_optimizers` will be overridden"):
        cli = LossCLI(Mine, MyData, args=[*line, "--optimizer", "SGD", "--optimizer.lr", "0.5"])
    assert cli.exit_status == 0
    assert cli.model.configure_optimizers().param_groups[0]["lr"] == 0.5
    capsys.readouterr()


class MyTrainer(Trainer):
    pass


def make_trainer(devices: int = 1, callbacks: list[Callback] | None = None) -> Trainer:
    return Trainer(accelerator="cpu", devices=devices, callbacks=callbacks, logger=False, enable_checkpointing=False)


@pytest.mark.parametrize(
    ("options", "made"),
    [({}, Trainer), ({"trainer_class": MyTrainer}, MyTrainer), ({"trainer_class": make_trainer}, Trainer)],
    ids=["Trainer", "a subclass", "a function"],
)
def test_the_trainer_is_the_one_that_was_asked_for(options: dict[str, Any], made: type[Trainer]) -> None:
    cli = LossCLI(Mine, MyData, args=["--trainer.devices", "1"], run=False, **options)
    assert type(cli.trainer) is made
    assert cli.model.layer.out_features == 2


def test_arguments_by_position_are_those_of_lightning() -> None:
    positional = (Mine, MyData, None, {}, MyTrainer, {"max_epochs": 3}, 7)
    line = ["--trainer.devices", "1", "--trainer.logger", "false"]
    cli = LossCLI(*positional, args=line, run=False)
    theirs = LightningCLI(*positional, args=line, run=False)
    for each in (cli, theirs):
        assert (each.trainer.max_epochs, each.config["seed_everything"], each.save_config_callback) == (3, 7, None)


class Sized(torch.nn.Module):  # a loss whose number of classes may be left out
    def __init__(self, num_classes=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__()


ENCODER = [
    *("--model.encoder", "lightning_ddp_losses.cli.DigitsEncoder", "--model.encoder.embedding_size", "4"),
    *("--trainer.devices", "1", "--model.loss"),
]


def test_a_size_is_missing_only_where_the_class_asks_for_one() -> None:
    assert isinstance(LossCLI(EmbeddingModule, args=[*ENCODER, f"{__name__}.Sized"], run=False).model.loss, Sized)


def test_a_config_without_a_class_says_who_can_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(CONFIG)
    sys.argv[1:] = ["audit", "--config", "mine.yaml"]
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert "mine.yaml: `model` has no class_path" in said
    assert "LossCLI (from lightning_ddp_losses.cli) in its place" in said
    # a config that names its class has another mistake
    Path("mine.yaml").write_text(yaml.safe_dump({"model": {"class_path": "tests.cli.test_own_cli.Mine"}, "nothing": 1}))
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "has no class_path" not in capsys.readouterr().err
