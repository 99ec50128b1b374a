"""The command: every config, the real launcher with two ranks, what it leaves behind, and what it says to a mistake."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_ddp_losses.cli import main
from lightning_ddp_losses.cli.app import extend_module_path_
from tests.cli.shipped_configs import smaller
from tests.processes import ROOT, run_python
from tests.slow_parameters import slow_parameters

CONFIGS = ROOT / "configs"
ARCFACE = CONFIGS / "digits_arcface.yaml"
IN_THE_SUITE = {"digits_arcface", "digits_ntxent_global"}


pytestmark = pytest.mark.usefixtures("empty_folder")


def command(subcommand: str, config: Path, *options: str) -> list[str]:
    """The command line in one process, short."""
    return [subcommand, "--config", str(config), "--trainer.devices", "1", *options]


def run(*arguments: str) -> None:
    """The console script, in this process."""
    sys.argv[1:] = arguments
    main()


def run_folder(config: Path, version: int = 0) -> Path:
    return Path("logs") / config.stem / f"version_{version}"


def message(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says as it refuses; nothing may be left behind."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code not in (0, None)
    assert list(Path().iterdir()) == []
    return f"{stop.value.code}\n{capsys.readouterr().err}"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in IN_THE_SUITE else pytest.mark.slow)
        for path in sorted(CONFIGS.glob("*.yaml"))
    ],
)
def test_every_config_trains(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = config.read_text().split("seed_everything")[0]
    assert f"ddp-losses fit --config configs/{config.name}" in header
    run(*command("fit", config, "--trainer.max_steps", "2", *smaller(config)))
    assert "on the held-out set" in capsys.readouterr().out
    assert (run_folder(config) / "config.yaml").is_file()


def test_the_untrained_encoder_stands_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "digits_dino.yaml"
    run(*command("fit", config, "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2"))
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("embeddings", "untrained", "raw pixels"))
    for name in ("precision@1", "MAP@R", "effective rank"):
        row = next(line for line in shown.splitlines() if name in line)
        assert len(re.findall(r" \d+\.\d{4} ", row)) == 3


def metrics(folder: Path) -> dict[str, float]:
    """Last value of each column of metrics.csv; what the checks say of the ranks depends on their number."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {k: float(v) for row in rows for k, v in row.items() if v and not k.startswith("ddp_c")}


def test_arrays_of_the_users_own_train(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    labels = np.arange(120) % 30
    np.save("features.npy", random.normal(size=(120, 5)) + labels[:, None])
    np.save("labels.npy", labels)
    Path("config.yaml").write_text("""
        trainer: {accelerator: cpu, devices: 1, max_epochs: 1, enable_progress_bar: false}
        model:
          class_path: EmbeddingModule
          init_args:
            encoder: {class_path: MLPEncoder, init_args: {in_features: 5, embedding_size: 4}}
            loss: {class_path: pytorch_metric_learning.losses.CosFaceLoss, init_args: {num_classes: 30, embedding_size: 4}}
        data: {class_path: ArrayDataModule, init_args: {features: features.npy, labels: labels.npy, batch_size: 10}}
    """)
    run("fit", "--config", "config.yaml")
    assert "raw features" in capsys.readouterr().out
    assert Path("logs/fit/version_0/embedding_2d.png").is_file()


USERS_MODULE = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class {name}(LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("square", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(24.0).reshape(8, 3)), batch_size=2)
"""


@pytest.mark.slow
def test_a_config_names_a_module_beside_it_or_in_the_current_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("configs").mkdir()
    for module, folder in (("lies_in_the_current_folder", "."), ("lies_beside_the_config", "configs")):
        monkeypatch.delitem(sys.modules, module, raising=False)
        Path(folder, f"{module}.py").write_text(USERS_MODULE.format(name="Mine"))
        Path("configs", "mine.yaml").write_text(f"model: {module}.Mine")
        run("audit", f"--config={Path('configs', 'mine.yaml')}", "--audit.steps", "1")
        assert "Equal: 2 ranks" in capsys.readouterr().out
    # both last: nothing that is installed hides behind a user's file
    assert sys.path[-2:] == [str(Path("configs").absolute()), str(Path.cwd())]
    run(*command("fit", Path("configs", "mine.yaml"), "--trainer.max_steps", "1"))


@pytest.mark.parametrize("arguments", [["fit", "-c"], ["fit", "--config", "trainer: {}"], ["fit", "-c", "no.yaml"], []])
def test_a_command_line_without_a_config_file_adds_the_current_folder_alone(arguments: list[str]) -> None:
    path = ["installed"]
    extend_module_path_(path, arguments)
    assert path == ["installed", str(Path.cwd())]


@pytest.mark.parametrize("package", slow_parameters(["matplotlib", "sklearn.manifold"], {"sklearn.manifold"}))
def test_without_the_plotting_packages_training_ends_well_and_says_what_is_missing(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(package + ".")] + [package]:
        monkeypatch.setitem(sys.modules, name, None)
    run(*command("fit", ARCFACE, "--trainer.max_epochs", "1"))
    named = package.split(".", maxsplit=1)[0]
    assert f"{named} is missing: pip install 'lightning-ddp-losses[demo]'" in capsys.readouterr().out
    assert not (run_folder(ARCFACE) / "embedding_2d.png").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--trainer.devices", "0"], "trainer.devices: expected 1 or more ranks, got 0"),
        (["--trainer.devices", "2", "--data.init_args.batch_size", "63"], "multiple of the 2 ranks, got 63"),
        (["--data.init_args.batch_size", "4000"], "training rows: expected at least batch_size=4000, got 1347"),
        (["--data.init_args.m_per_class", "7"], "batch of 64): expected a divisor of 64, got 7"),
        (["--data.init_args.m_per_class", "4"], "expected at least 7, as there are 10 classes, got 4"),
        (["--data.init_args.held_out", "2"], "held_out (share of every class): expected between 0 and 1, got 2.0"),
        (["--trainer.bogus", "1"], "unrecognized arguments: --trainer.bogus"),
        (["--model.init_args.loss.init_args.margins", "1"], "Option 'margins' is not accepted"),
        (["--trainer.strategy", "dpp"], "strategy='dpp'"),
        (["--trainer.strategy", "ddp_loses"], "Did you mean ddp_losses?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_before_anything_is_written(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in message(capsys, *command("fit", ARCFACE), *options)


SIZE = "init_args.embedding_size: expected a number, got nothing"


@pytest.mark.parametrize(
    ("name", "text", "instead", "expected"),
    [
        ("digits_arcface", "max_epochs", "max_epoch", "max_epoch"),
        (
            "digits_arcface",
            "        num_classes: 10\n",
            "",
            "loss.init_args.num_classes: expected a number, got nothing",
        ),
        ("digits_arcface", "        embedding_size: 32 # the encoder's\n", "", f"loss.{SIZE}"),
        ("digits_xbm_global", "embedding_size: 32 # the", "# the", f"model.init_args.loss.init_args.loss.{SIZE}"),
    ],
    ids=["an unknown key", "no number of classes", "no size", "no size of a loss inside a loss"],
)
def test_a_mistake_in_the_file_is_told(
    name: str,
    text: str,
    instead: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = tmp_path_factory.mktemp("configs") / "wrong.yaml"
    config.write_text((CONFIGS / f"{name}.yaml").read_text().replace(text, instead))
    assert expected in message(capsys, *command("fit", config))


@pytest.mark.slow
def test_the_config_that_fit_takes_is_equal_and_leaves_its_report(tmp_path: Path) -> None:
    line = ["-m", "lightning_ddp_losses", "audit", "--config", str(ARCFACE), "--audit.steps", "2"]
    done = run_python(*line, folder=tmp_path, COLUMNS="120", TERM="dumb")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: 2 ranks under ddp_losses, 2 steps" in done.stdout
    assert "Warning" not in done.stderr
    written = {path.name for path in (tmp_path / "logs" / "audit" / "version_0").iterdir()}
    assert written == {"report.html", "report.json", "ratios.png"}


@pytest.mark.slow
def test_a_config_for_fsdp_is_audited(capsys: pytest.CaptureFixture[str]) -> None:
    run("audit", "--config", str(CONFIGS / "digits_fsdp2.yaml"), "--audit.steps", "1")
    assert "Equal: 2 ranks under ModelParallelLossStrategy" in capsys.readouterr().out


def audit_status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as stop:
        run("audit", "--config", *arguments)
    return stop.value.code


def test_a_difference_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(ARCFACE.read_text())
    arcface = config["model"]["init_args"]["loss"]
    wrapper = "pytorch_metric_learning.utils.distributed.DistributedLossWrapper"
    config["model"]["init_args"]["loss"] = {"class_path": wrapper, "init_args": {"loss": arcface}}
    Path("c.yaml").write_text(yaml.safe_dump(config))
    assert audit_status("c.yaml", "--trainer.strategy", "ddp", "--audit.steps", "1", "--audit.output", "out") == 1
    assert "(F24)" in capsys.readouterr().out
    assert Path("out/version_0/report.json").is_file()


def test_an_audit_that_cannot_run_has_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ARCFACE)
    assert audit_status(config, "--audit.devices", "3") == 2
    assert "multiple of the 3 ranks" in capsys.readouterr().err
    assert audit_status(config, "--model.init_args.encoder", "no.such.Class") == 2
    assert audit_status(config, "--trainer.accelerator", "gpu") == 2
    assert "2 GPUs, got 0" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_terminal_without_some_letters_gets_the_page(tmp_path: Path) -> None:
    done = run_python("-m", "lightning_ddp_losses", "explain", "losses", folder=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "ArcFace" in done.stdout


def test_a_start_that_another_jobs_variables_spoil_names_them(tmp_path: Path) -> None:
    arguments = ("-m", "lightning_ddp_losses", "fit", "--config", ARCFACE)
    done = run_python(*arguments, folder=tmp_path, SLURM_NTASKS="4")
    assert done.returncode == 1
    assert (
        "SLURM_NTASKS=4: Lightning expects that srun starts each rank. If another job left that behind" in done.stderr
    )
    done = run_python(*arguments, folder=tmp_path, MASTER_ADDR="10.255.255.1")
    assert done.returncode == 1
    assert "MASTER_ADDR: expected an address of this machine, on which all ranks of one node start" in done.stderr
