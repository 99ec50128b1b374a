"""The configs that come with the package go by their names; the doctor says what there is and tries two ranks."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import yaml
from rich.console import Console

import lightning_ddp_losses
from lightning_ddp_losses import AuditReport
from lightning_ddp_losses.cli import configs, doctor, main
from lightning_ddp_losses.cli.app import COMMANDS, MORE_COMMANDS
from tests.doors import ComparedRow
from tests.processes import ROOT

pytestmark = pytest.mark.usefixtures("empty_folder")
# where the package is imported from, and its configs: inside of a wheel, beside a checkout
PACKAGE = Path(lightning_ddp_losses.__file__).parent
ARCFACE = str(configs.shipped_configs()["digits_arcface"])


def run(*arguments: str) -> str:
    """The console script, in this process; what it ends with."""
    sys.argv[1:] = arguments
    with pytest.raises(SystemExit) as stop:
        main()
    return str(stop.value.code)


def console() -> Console:
    return Console(file=StringIO(), width=120, color_system=None)


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, StringIO)
    return shown.file.getvalue()


def test_all_configs_are_listed_with_what_they_train() -> None:
    shown = console()
    assert configs.run_configs([], shown) == 0
    text = text_of(shown)
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f" {path.stem} " in text
        summary = configs.summary_of(path)
        assert 20 < len(summary) < 200
        assert "ddp-losses" not in summary


def test_configs_are_copied_and_nobody_is_overwritten() -> None:
    assert run("configs", "digits_arcface", "digits_cosface.yaml", "--copy", "new/folder") == "0"
    copied = sorted(path.name for path in Path("new/folder").iterdir())
    assert copied == ["digits_arcface.yaml", "digits_cosface.yaml"]
    assert Path("new/folder/digits_arcface.yaml").read_text() == Path(ARCFACE).read_text()
    Path("new/folder/digits_arcface.yaml").write_text("mine")
    assert "expected a folder without them, got digits_arcface, digits_cosface in it" in run(
        "configs", "--copy", "new/folder"
    )
    assert Path("new/folder/digits_arcface.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["digits_arcface", "digits_arcface.yaml", "configs/digits_arcface.yaml"])
def test_a_config_goes_by_its_name(name: str) -> None:
    given = configs.with_shipped_configs(["fit", "--config", name, f"-c={name}", "--trainer.devices", "1"])
    assert given == ["fit", "--config", ARCFACE, f"-c={ARCFACE}", "--trainer.devices", "1"]


def test_a_file_of_the_users_goes_first_and_others_stay_as_they_are() -> None:
    Path("digits_arcface.yaml").write_text("seed_everything: 1")
    line = [
        "fit",
        "--config",
        "digits_arcface.yaml",
        "--config",
        "mine/digits_cosface.yaml",
        "--config=mine/unknown.yaml",
        "-c",
    ]
    assert configs.with_shipped_configs(line) == line


def test_a_name_that_no_config_has_is_told_with_the_nearest() -> None:
    said = run("fit", "--config", "digits_arcfase.yaml")
    assert "--config digits_arcfase.yaml: expected a file, or one of" in said
    assert "Did you mean digits_arcface?" in said
    assert "digits_dino" in said
    assert "List them with what they train: ddp-losses configs." in run("fit", "-c", "qqq")


def test_a_config_by_its_name_trains(capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv[1:] = ["fit", "--config", "digits_arcface.yaml", "--trainer.devices", "1", "--trainer.max_steps", "1"]
    main()
    assert "on the held-out set" in capsys.readouterr().out
    saved = yaml.safe_load(Path("logs/digits_arcface/version_0/config.yaml").read_text())
    assert saved["trainer"]["max_steps"] == 1


def test_the_wheel_holds_configs_and_pages() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[tool.hatch.build.targets.wheel.force-include]\nconfigs = "lightning_ddp_losses/configs"' in project
    assert configs._FOLDERS[0] == PACKAGE / "configs"
    # of the source distribution a wheel is built
    sources = tomllib.loads(project)["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"lightning_ddp_losses", "configs"} <= set(sources)


def test_the_help_names_what_does_not_train() -> None:
    assert all(f"`ddp-losses {command}`" in MORE_COMMANDS for command in COMMANDS)


def test_the_doctor_finds_two_ranks_equal_to_one_process() -> None:
    shown = console()
    assert doctor.run_doctor([], shown) == 0
    text = text_of(shown)
    assert "Everything works." in text
    assert re.search(r"two ranks +. the gradient of one process, error \d\.\de-1\d, gloo", text)
    for name in ("torch", "lightning", "torchmetrics", "pytorch-metric-learning"):
        assert f"{name} " in text
        assert importlib.metadata.version(name) in text
    assert all(
        word in text for word in ("Python", "gloo", "interfaces", "ddp_losses_fork", "fsdp2_ddp_losses", "cores")
    )
    assert "at most 252 at 64 ranks, 4,092 at 1,024 ranks" in text


def test_the_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ComparedRow(1, "weight", "encoder", "gradient", error=0.5, verdict="wrong scale")
    monkeypatch.setattr(doctor, "parity", lambda *given, **options: AuditReport(False, [row], [], [], [], []))
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["torch>=99", "absent>=1", "other>=2; extra == 'demo'"]
    )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    shown = console()
    assert doctor.run_doctor([], shown) == 1
    text = text_of(shown)
    assert "not the gradient of one process, error 5.0e-01" in text
    assert "needs >=99" in text
    assert "missing, needs >=1" in text
    assert "other" not in text
    assert "GLOO_SOCKET_IFNAME=eth7" in text
    assert "Look at: torch, absent, two ranks." in text


def test_sources_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU machine that has a copy of the repository on its path."""
    monkeypatch.setattr(importlib.metadata, "requires", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    assert list(doctor.versions())[2:] == [
        ("installed", f"no, read from {PACKAGE.parent}: its requirements are not known", False)
    ]
    assert "read from" in doctor.version_line()


def test_ranks_that_cannot_start_are_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no socket")

    monkeypatch.setattr(doctor, "parity", fail)
    assert doctor.two_ranks() == ("two ranks", "failed: OSError: no socket", True)


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv[1:] = ["--version"]
    main()
    line = capsys.readouterr().out
    assert line.startswith(f"ddp-losses {lightning_ddp_losses.__version__} ")
    assert line.count("\n") == 1
    assert f"torch {importlib.metadata.version('torch')}" in line
