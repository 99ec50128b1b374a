"""A key or class of a config that is misspelled: the last line names it and what is similar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lightning_ddp_losses.cli import main, manual, misspelled
from lightning_ddp_losses.cli.configs import shipped_configs

(CONFIG,) = re.findall(r"```yaml\n(.*?)```", manual.about()["own_data"], re.DOTALL)
PML = "pytorch_metric_learning.losses"
MISTAKES = {
    (
        "batch_size: 32",
        "batchsize: 32",
    ): "data.init_args.batchsize: ArrayDataModule has no such option. Did you mean batch_size?",
    (
        "embedding_size: 8",
        "embedding_dim: 8",
    ): "model.init_args.encoder.init_args.embedding_dim: MLPEncoder has no such option. Did you mean embedding_size?",
    ("MLPEncoder", "MLPEncodr"): "model.init_args.encoder.class_path: there is no MLPEncodr. Did you mean MLPEncoder?",
    ("SupConLoss", "SupConLos"): f"there is no {PML}.SupConLos. Did you mean {PML}.SupConLoss?",
    ("max_epochs", "max_epoch"): "trainer.max_epoch: Trainer has no such option. Did you mean max_epochs?",
    ("trainer:", "trainr:"): "`trainr` is not a section of a config. Did you mean trainer?",
    (
        "batch_size: 32",
        "colour: red",
    ): "data.init_args.colour: ArrayDataModule has no such option. Its options: features, labels,",
}


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(("change", "expected"), MISTAKES.items(), ids=lambda value: str(value[1]))
def test_the_last_line_says_what_is_meant(
    change: tuple[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cells.yaml").write_text(CONFIG.replace(*change))
    monkeypatch.setattr("sys.argv", ["ddp-losses", "fit", "--config", "cells.yaml"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("cells.yaml: ")
    assert expected in last


def test_configs_of_the_package_have_no_mistakes() -> None:
    files = [*shipped_configs().values()]
    assert len(files) > 10
    assert misspelled.advice(files) == ""


def test_what_cannot_be_read_gets_no_advice(tmp_path: Path) -> None:
    wrong, empty = tmp_path / "wrong.yaml", tmp_path / "empty.yaml"
    wrong.write_text("a: [")
    empty.write_text("")
    assert misspelled.advice([wrong, empty, tmp_path / "missing.yaml"]) == ""


def test_options_that_a_class_passes_on_are_not_mistakes(tmp_path: Path) -> None:
    options = {"class_path": "torch.utils.data.DataLoader", "init_args": {"num_worker": 1}}
    passed_on = {"class_path": f"{PML}.TripletMarginLoss", "init_args": {"reducer": None, "collect_stats": True}}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"model": [options, passed_on]}))
    (line,) = misspelled.advice([file]).splitlines()
    assert line.endswith("model[0].init_args.num_worker: DataLoader has no such option. Did you mean num_workers?")
