"""Whole commands: the real launcher with two ranks and what it leaves behind, and configs whose metrics are those of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torchmetrics import PearsonCorrCoef

from lightning_ddp_losses.cli import EmbeddingModule, RegressionModule
from lightning_ddp_losses.testing import RankPool
from tests.cli.conftest import empty_folder  # noqa: F401 - a fixture
from tests.cli.shipped_configs import fit_config
from tests.cli.test_app import ARCFACE, CONFIGS, command, metrics, run, run_folder
from tests.oracle import assert_close
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("empty_folder")


def two_ranks(*arguments: str) -> str:
    """What the command shows in a process of its own, which launches the second rank (before any run in this process)."""
    done = run_python("-m", "lightning_ddp_losses", *arguments, TERM="dumb")
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "Warning" not in shown
    return shown


def test_the_command_on_two_ranks_and_what_it_leaves_behind(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trainer.max_epochs", "2", "--trainer.precision", "64-true"]
    arguments = ["fit", "--config", str(ARCFACE), *options]
    shown = two_ranks(*arguments)
    assert "Epoch 1: 100%" in shown
    assert all(name in shown for name in ("precision@1", "R-precision", "MAP@R", "raw pixels", "on 2 ranks"))
    folder = run_folder(ARCFACE)
    for picture in ("loss_curve.png", "embedding_2d.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert str(checkpoint) in shown

    # the same config in one process: the same numbers
    run(*command("fit", ARCFACE, *options))
    two, one = (metrics(run_folder(ARCFACE, version)) for version in (0, 1))
    assert {"train_loss", "val_loss", "precision_at_1", "r_precision", "map_at_r"} < set(one)
    assert two == pytest.approx(one, rel=1e-9)

    # and its checkpoint, with one process: validated, embedded, loaded without the config
    run(*command("validate", ARCFACE, "--ckpt_path", str(checkpoint), "--trainer.precision", "64-true"))
    assert f"{two['map_at_r']:.6f}"[:7] in capsys.readouterr().out
    run(*command("predict", ARCFACE, "--ckpt_path", str(checkpoint)))
    folder = run_folder(ARCFACE, 3)
    # all rows, with their numbers: those that were trained on and those held out
    assert np.load(folder / "embeddings.npy").shape == (1797, 32)
    table = (folder / "embeddings.csv").read_text().splitlines()
    assert table[0].startswith("row,label,held_out,")
    assert len(table) == 1798
    assert sum(line.split(",")[2] == "1" for line in table[1:]) == 450
    module = EmbeddingModule.load_from_checkpoint(checkpoint)
    assert module.loss.num_classes == 10


def test_a_global_config_gives_the_same_metrics_on_two_ranks_and_on_one_with_and_without_the_wrapper(
    pool: RankPool,
) -> None:
    config = CONFIGS / "digits_ntxent_global.yaml"
    options = ["--trainer.limit_train_batches", "4", "--trainer.max_epochs", "1", "--trainer.precision", "64-true"]
    two, _ = pool.run(2, fit_config, str(config), [], limit_train_batches=4)[0]
    run(*command("fit", config, *options))

    plain = yaml.safe_load(config.read_text())
    model = plain["model"]["init_args"]
    model["loss"] = model["loss"]["init_args"]["loss"]
    Path("plain.yaml").write_text(yaml.safe_dump(plain))
    auto = ["--trainer.strategy.class_path", "lightning_ddp_losses.DDPLossStrategy"]
    auto += ["--trainer.strategy.init_args.global_batch", "auto"]
    run(*command("fit", Path("plain.yaml"), *auto, *options))
    saved = (run_folder(config, 1) / "config.yaml").read_text()
    assert "GlobalBatchLoss" not in saved
    assert "global_batch: auto" in saved

    one, auto_metrics = (metrics(run_folder(config, version)) for version in range(2))
    assert two == pytest.approx({name: one[name] for name in two}, rel=1e-6)
    assert auto_metrics == pytest.approx(one, rel=1e-6)


def test_windows_of_missing_labels_train_as_one_process_on_whole_windows(pool: RankPool) -> None:
    config = CONFIGS / "digits_masked_window.yaml"
    options = ["--trainer.max_epochs", "1", "--trainer.precision", "64-true"]
    _, two = pool.run(2, fit_config, str(config), [], limit_train_batches=8)[0]
    mean = ["--trainer.strategy.init_args.accumulation", "mean"]
    run(*command("fit", config, *mean, *options, "--trainer.limit_train_batches", "8"))

    # the oracle: plain Lightning and torch's own loss on batches that are whole windows
    plain = yaml.safe_load(config.read_text())
    model, trainer, data = plain["model"]["init_args"], plain["trainer"], plain["data"]["init_args"]
    model["loss"] = model["loss"]["init_args"]["loss"]
    data["batch_size"] *= trainer.pop("accumulate_grad_batches")
    del trainer["strategy"], trainer["callbacks"]
    Path("plain.yaml").write_text(yaml.safe_dump(plain))
    run(*command("fit", Path("plain.yaml"), *options, "--trainer.limit_train_batches", "2"))

    of_means, one = (trained(run_folder(config, version)) for version in range(2))
    assert_close(two, one)
    with pytest.raises(AssertionError):
        assert_close(of_means, one, rtol=1e-4)


def test_a_batch_norm_config_gives_the_same_metrics_on_two_ranks_and_on_one(pool: RankPool) -> None:
    config = CONFIGS / "digits_arcface_syncbn.yaml"
    options = ["--trainer.limit_train_batches", "4", "--trainer.max_epochs", "1", "--trainer.precision", "64-true"]
    two, _ = pool.run(2, fit_config, str(config), [], limit_train_batches=4)[0]
    plugin = ["--trainer.sync_batchnorm", "false", "--trainer.plugins", "lightning_ddp_losses.SyncBatchNorm"]
    run(*command("fit", config, *plugin, *options))
    assert "lightning_ddp_losses.SyncBatchNorm" in (run_folder(config) / "config.yaml").read_text()
    one = metrics(run_folder(config))
    assert two == pytest.approx({name: one[name] for name in two}, rel=1e-9)


def test_a_metric_as_the_loss_gives_the_same_on_two_ranks_and_on_one(
    pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS / "digits_metric_loss.yaml"
    options = ["--trainer.limit_train_batches", "8", "--trainer.max_epochs", "2", "--trainer.precision", "64-true"]
    two, _ = pool.run(2, fit_config, str(config), [], limit_train_batches=8, max_epochs=2)[0]
    run(*command("fit", config, *options))
    assert "Regression on the held-out set" in capsys.readouterr().out
    one = metrics(run_folder(config))
    assert {"train_loss", "val_loss", "val_metric"} < set(one)
    assert two == pytest.approx({name: one[name] for name in two}, rel=1e-9)

    (checkpoint,) = (run_folder(config) / "checkpoints").iterdir()
    assert isinstance(RegressionModule.load_from_checkpoint(checkpoint).metric, PearsonCorrCoef)
    run(*command("test", config, "--ckpt_path", str(checkpoint), "--trainer.precision", "64-true"))
    assert f"{two['val_metric']:.6f}"[:7] in capsys.readouterr().out


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """The state of the module after two optimizer steps."""
    (path,) = (folder / "checkpoints").iterdir()
    checkpoint = torch.load(path, weights_only=False)
    assert checkpoint["global_step"] == 2
    state: dict[str, torch.Tensor] = checkpoint["state_dict"]
    return state
