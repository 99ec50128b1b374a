"""`ddp-losses explain fit_numbers`: what it quotes is what a fit prints, and what it states of the measures is so."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss

from lightning_ddp_losses.cli import DigitsDataModule, manual
from lightning_ddp_losses.cli import main as run_command
from lightning_ddp_losses.demo.evaluation import retrieval_metrics
from tests.processes import ROOT

PAGE = manual.about()["fit_numbers"]
WORDS = " ".join(PAGE.split())
MEASURES = ("precision@1", "R-precision", "MAP@R")


def quoted() -> dict[str, list[float]]:
    """The table of the page: values of each row, without those that are not there."""
    rows = re.findall(r"^│ (\S+) +│ +(\S+) │ +(\S+) │$", PAGE, re.MULTILINE)
    return {name: [float(value) for value in values if value != "-"] for name, *values in rows}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["ddp-losses", *arguments])
    run_command()


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    return DigitsDataModule(batch_size=64).held_out()


def test_raw_pixels_are_those_of_the_page() -> None:
    raw = retrieval_metrics(*digits()).values()
    assert [quoted()[name][1] for name in MEASURES] == pytest.approx(list(raw), abs=5e-5)
    assert f"({len(digits()[1])} rows)" in PAGE


def test_values_by_chance_are_those_of_the_page() -> None:
    labels = digits()[1]
    random = torch.Generator().manual_seed(0)
    found = [list(retrieval_metrics(torch.randn(len(labels), 32, generator=random), labels).values()) for _ in range(8)]
    shown = re.search(r"For the held-out digits they are ([\d.]+), ([\d.]+) and ([\d.]+)\.", WORDS)
    assert shown is not None
    np.testing.assert_allclose(np.mean(found, 0), [float(value) for value in shown.groups()], atol=0.012)


def test_the_example_of_map_at_r() -> None:
    """A row of class 0 with three others of its class: the nearest three rows are right, wrong, right."""
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3, 3.0])
    labels = torch.tensor([0, 0, 1, 0, 0])
    rows = torch.stack([angles.cos(), angles.sin()], 1).double()
    order = ((rows[0] - rows[1:]) ** 2).sum(1).argsort()
    right = (labels[1:][order] == 0)[:3].tolist()
    assert right == [True, False, True]
    by_hand = (1 + 2 / 3) / 3
    assert f"R-precision is 2/3 = {2 / 3:.3f} and the MAP@R is (1 + 2/3) / 3 = {by_hand:.3f}" in WORDS
    # the measure's own value of this one row, from the mean over the four rows of its class
    every = retrieval_metrics(rows, labels)
    others = [naive(rows, labels, row) for row in (1, 3, 4)]
    assert every["map_at_r"] * 4 - sum(found[1] for found in others) == pytest.approx(by_hand)
    assert every["r_precision"] * 4 - sum(found[0] for found in others) == pytest.approx(2 / 3)


def naive(rows: torch.Tensor, labels: torch.Tensor, query: int) -> tuple[float, float]:
    """R-precision and average precision at R of one row."""
    distances = ((rows - rows[query]) ** 2).sum(1)
    order = [row for row in distances.argsort().tolist() if row != query]
    right = [float(labels[row] == labels[query]) for row in order]
    wanted = int(sum(right))
    right = right[:wanted]
    precisions = [sum(right[: place + 1]) / (place + 1) * is_right for place, is_right in enumerate(right)]
    return sum(right) / wanted, sum(precisions) / wanted


def test_map_at_r_is_never_above_r_precision() -> None:
    assert "MAP@R is never above R-precision" in WORDS
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        rows, labels = torch.randn(30, 3, generator=random), torch.randint(4, (30,), generator=random)
        found = retrieval_metrics(rows, labels)
        assert found["map_at_r"] <= found["r_precision"] + 1e-12


def test_supcon_is_lower_if_a_batch_has_fewer_rows() -> None:
    assert "SupCon's is lower if a batch has fewer rows" in WORDS
    rows, labels = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
    many, few = (float(SupConLoss()(rows[:count], labels[:count])) for count in (48, 12))
    assert few < many


SMALL = ("--trainer.devices", "1", "--trainer.max_epochs", "3", "--trainer.enable_progress_bar", "false")


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.filterwarnings("ignore")
def test_its_options_run_and_the_best_checkpoint_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs/digits_arcface.yaml")
    (best,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    Path("best.yaml").write_text(best)
    command(
        monkeypatch, "fit", "--config", config, "--config", "best.yaml", "--trainer.num_sanity_val_steps", "-1", *SMALL
    )
    shown = capsys.readouterr().out
    assert "untrained" in shown
    assert "meaning    ddp-losses explain fit_numbers" in shown
    with Path("logs/digits_arcface/version_0/metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["map_at_r"]]
    best_step = max(rows, key=lambda row: float(row["map_at_r"]))["step"]
    (kept,) = Path("logs/digits_arcface/version_0/checkpoints").iterdir()
    assert kept.stem.endswith(f"step={int(best_step) + 1}")
    # the last lines have the command that embeds every row
    (line,) = re.findall(r"^embed rows ddp-losses (.+)$", shown, re.MULTILINE)
    command(monkeypatch, *line.split())
    assert "Embedded 1797 rows, all of the data: 450 of them are held out" in capsys.readouterr().out


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.filterwarnings("ignore")
def test_new_classes_are_measured_with_a_file_of_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config,) = re.findall(r"```yaml\n(.*?)```", manual.about()["own_data"], re.DOTALL)
    Path("cells.yaml").write_text(config)
    random = np.random.default_rng(0)
    for name, kinds in (("cells", "ab"), ("new", "cd")):
        lines = [f"{kinds[row % 2]},{','.join(map(str, random.normal(size=3).round(3)))}" for row in range(64)]
        Path(f"{name}.csv").write_text("\n".join(["cell_type,x,y,z", *lines]))
    new = ("--data.init_args.val_features", "new.csv")
    command(monkeypatch, "fit", "--config", "cells.yaml", *new, *SMALL)
    command(monkeypatch, "validate", "--config", "cells.yaml", *new, *SMALL[:2], "--ckpt_path", checkpoint())
    assert "map_at_r" in capsys.readouterr().out


def checkpoint() -> str:
    (found,) = Path("logs/fit/version_0/checkpoints").iterdir()
    return str(found)


@pytest.mark.slow
@pytest.mark.usefixtures("empty_folder")
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_what_a_fit_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In one process, which has the values of two ranks up to rounding; another torch ends near them."""
    config = str(ROOT / "configs/digits_arcface.yaml")
    command(monkeypatch, "fit", "--config", config, "--trainer.devices", "1", "--trainer.enable_progress_bar", "false")
    shown = capsys.readouterr().out
    title, head = re.findall(r"^(Retrieval.+|┃ metric.+)$", PAGE, re.MULTILINE)
    assert title in shown
    assert head in shown
    printed: dict[str, Any] = dict(re.findall(r"^│ (\S+) +│ +([\d.]+) │", shown, re.MULTILINE))
    for name in MEASURES:
        assert float(printed[name]) == pytest.approx(quoted()[name][0], abs=0.02)
    assert float(printed["loss"]) == pytest.approx(quoted()["loss"][0], abs=0.3)
    # the paragraph about overfitting
    with Path("logs/digits_arcface/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    values = [float(row["map_at_r"]) for row in rows if row["map_at_r"]]
    assert "MAP@R stays at 0.96 from epoch 11 on" in WORDS
    assert values[10:] == pytest.approx([0.96] * 5, abs=0.02)
    last = [float(row["train_loss"]) for row in rows if row["train_loss"]][-1]
    assert last < 0.05 * float(printed["loss"])
