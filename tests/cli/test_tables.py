"""A table of the user's own: a csv is read with its names, every row is embedded, and pictures can be read."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.losses import ArcFaceLoss

from lightning_ddp_losses.cli import (
    ArrayDataModule,
    EmbeddingModule,
    MLPEncoder,
    manual,
)
from lightning_ddp_losses.cli import main as run_command
from lightning_ddp_losses.cli.report import draw_embedding, draw_loss_curve
from lightning_ddp_losses.errors import InputError
from tests.fits import trainer_alone

pytestmark = pytest.mark.usefixtures("empty_folder")
TYPES = ("T", "B", "NK")
ROWS = 60


def write_table(path: str, *, delimiter: str = ",", label_place: int = 0) -> np.ndarray[Any, Any]:
    """Write rows of three numbers and a type, whose mean they are near. Return the numbers."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=(ROWS, 3)).round(3) + np.arange(ROWS)[:, None] % 3
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        head, types = ["CD3D", "CD19", "NKG7"], [TYPES[row % 3] for row in range(ROWS)]
        head.insert(label_place, "cell_type")
        writer.writerow(head)
        for cells, name in zip(numbers.tolist(), types, strict=True):
            line = [*map(str, cells)]
            line.insert(label_place, name)
            writer.writerow(line)
    return numbers


@pytest.mark.parametrize(("delimiter", "ending", "place"), [(",", "csv", 0), (";", "csv", 3), ("\t", "tsv", 1)])
def test_a_table_is_read_with_the_names_of_its_classes(delimiter: str, ending: str, place: int) -> None:
    numbers = write_table(f"cells.{ending}", delimiter=delimiter, label_place=place)
    data = ArrayDataModule(f"cells.{ending}", label="cell_type" if place else None, batch_size=6)
    np.testing.assert_array_equal(data.features, numbers)
    assert list(data.class_names) == ["B", "NK", "T"]
    assert [data.class_names[label] for label in data.labels[:4]] == ["T", "B", "NK", "T"]
    assert len(data.held_out_rows) == ROWS // 4
    x, labels = next(iter(data.train_dataloader()))
    assert (x.shape, x.dtype, labels.dtype) == ((6, 3), torch.float32, torch.int64)


def test_labels_that_are_numbers_stay_so_and_a_file_needs_no_names() -> None:
    Path("plain.csv").write_text("2,0.5,1\n7,1.5,2\n2,0.25,3\n7,1,4\n")
    data = ArrayDataModule("plain.csv", batch_size=2, held_out=0.5)
    assert data.labels.tolist() == [2, 7, 2, 7]
    assert not data.class_names
    assert data.features.shape == (4, 2)


def test_a_held_out_table_has_the_same_classes() -> None:
    Path("train.csv").write_text("kind,x,y\nb,1,2\na,1,3\n")
    Path("other.csv").write_text("kind,x,y\nc,4,5\na,6,7\n")
    data = ArrayDataModule("train.csv", val_features="other.csv", batch_size=2)
    assert (data.class_names, data.labels.tolist(), data.held_out_labels.tolist()) == (["a", "b", "c"], [1, 0], [2, 0])
    assert data.num_classes == 3


def table_with(values: list[int], path: str = "t.csv") -> None:
    """Write a table whose column `number` has these values."""
    lines = [f"{'ab'[row % 2]},{value},{row / 7:.3f}" for row, value in enumerate(values)]
    Path(path).write_text("\n".join(["kind,number,x", *lines]))


LOOKS_LIKE_ONE = (
    r"column number of t.csv, which is a feature: expected measurements, got 30 different whole numbers in 30 rows"
)


def test_a_feature_that_looks_like_an_identifier_is_warned_of() -> None:
    table_with([1000 + 7 * row for row in range(30)])
    with pytest.warns(UserWarning, match=LOOKS_LIKE_ONE) as warned:
        data = ArrayDataModule("t.csv", batch_size=6)
    assert "set data.init_args.id to number: " in str(warned[0].message)
    assert data.features.shape == (30, 2)


@pytest.mark.parametrize(
    "values", [[row % 5 for row in range(30)], [7 * row for row in range(19)]], ids=["counts", "too few rows"]
)
@pytest.mark.filterwarnings("error")
def test_counts_are_no_identifiers(values: list[int]) -> None:
    table_with(values)
    assert ArrayDataModule("t.csv", batch_size=2).features.shape == (len(values), 2)


@pytest.mark.filterwarnings("error")
def test_many_columns_of_different_whole_numbers_are_measurements() -> None:
    lines = [f"{'ab'[row % 2]},{row * 3},{row * 5},{row * 11}" for row in range(30)]
    Path("t.csv").write_text("\n".join(["kind,x,y,z", *lines]))
    assert ArrayDataModule("t.csv", batch_size=2).features.shape == (30, 3)


@pytest.mark.filterwarnings("error")
def test_identifiers_are_kept_and_are_no_feature() -> None:
    Path("t.csv").write_text(",barcode,kind,x\n0,AAC-1,a,1.5\n1,GTT-1,b,2.5\n2,CAT-1,a,3.5\n3,TTT-1,b,4.5\n")
    data = ArrayDataModule("t.csv", label="kind", id="barcode", batch_size=2)
    assert list(data.row_ids) == ["AAC-1", "GTT-1", "CAT-1", "TTT-1"]
    assert data.features.tolist() == [[row, row + 1.5] for row in range(4)]
    # a column without a name, as pandas writes its index, is named by its number; the label is then the next one
    Path("u.csv").write_text(",kind,x\n10,a,1.5\n11,b,2.5\n12,a,3.5\n13,b,4.5\n")
    data = ArrayDataModule("u.csv", id="column 1", batch_size=2)
    assert (list(data.row_ids), data.class_names) == (["10", "11", "12", "13"], ["a", "b"])


def test_no_message_advises_to_load_pickles() -> None:
    Path("features.txt").write_text("1,2\n")
    np.save("objects.npy", np.array([None]), allow_pickle=True)
    for name, got in (
        ("features.txt", "a .txt file without numpy's header"),
        ("objects.npy", "an array of Python objects"),
    ):
        with pytest.raises(InputError, match=got) as caught:
            ArrayDataModule(name, "labels.npy")
        assert "pickle" not in str(caught.value)
        assert ".csv file with a label in each row" in str(caught.value)


@pytest.mark.filterwarnings("ignore:The number of training batches", "ignore:Total length of `list`")
def test_no_row_and_every_row_may_be_held_out() -> None:
    write_table("cells.csv")
    module = EmbeddingModule(MLPEncoder(3, 4), ArcFaceLoss(3, 4))
    data = ArrayDataModule("cells.csv", batch_size=20, held_out=0)
    assert len(data.train_rows) == ROWS
    fitted = trainer_alone()
    fitted.fit(module, datamodule=data)
    assert set(fitted.callback_metrics) == {"train_loss"}
    assert fitted.global_step == 3
    with pytest.raises(InputError, match="held-out rows: expected at least one"):
        data.check(1, "validate")
    # and with none to train on, a trained module is evaluated
    data = ArrayDataModule("cells.csv", batch_size=20, held_out=1)
    (metrics,) = trainer_alone().validate(module, datamodule=data, verbose=False)
    assert metrics["precision_at_1"] > 0
    assert module.held_out is not None
    assert len(module.held_out.labels) == ROWS
    with pytest.raises(InputError, match="training rows: expected at least batch_size=20, got 0"):
        data.check(1)


def test_every_row_is_embedded_with_its_number_and_label(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's own config, as its reader types it."""
    numbers = write_table("cells.csv")
    head, *lines = Path("cells.csv").read_text().splitlines()
    named = [f"cell-{number},{line}" for number, line in enumerate(lines)]
    Path("cells.csv").write_text("\n".join([f"barcode,{head}", *named]))
    (config,) = re.findall(r"```yaml\n(.*?)```", manual.about()["own_data"], re.DOTALL)
    Path("cells.yaml").write_text(config.replace("accelerator: auto, devices: 2, max_epochs: 20", SMALL))
    Path("cells.yaml").write_text(
        Path("cells.yaml").read_text().replace("label: cell_type", "label: cell_type, id: barcode")
    )
    for command in (["fit"], ["predict", "--ckpt_path", "logs/fit/version_0/checkpoints/epoch=1-step=2.ckpt"]):
        monkeypatch.setattr("sys.argv", ["ddp-losses", *command, "--config", "cells.yaml"])
        run_command()
    assert "Embedded 60 rows, all of the data: 15 of them are held out from training" in capsys.readouterr().out
    with Path("logs/fit/version_1/embeddings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [str(row) for row in range(ROWS)]
    assert [row["id"] for row in rows] == [f"cell-{row}" for row in range(ROWS)]
    assert [row["label"] for row in rows] == [TYPES[row % 3] for row in range(ROWS)]
    held_out = ArrayDataModule("cells.csv", label="cell_type", id="barcode", batch_size=32).held_out_rows
    assert [int(row["row"]) for row in rows if row["held_out"] == "1"] == held_out.tolist()
    # the embedding of each row, by the encoder of the checkpoint
    found = np.array([[float(row[f"embedding_{dimension}"]) for dimension in range(8)] for row in rows])
    weights = torch.load("logs/fit/version_0/checkpoints/epoch=1-step=2.ckpt", weights_only=True)["state_dict"]
    encoder = MLPEncoder(3, 8)
    encoder.load_state_dict(
        {name.removeprefix("encoder."): value for name, value in weights.items() if name.startswith("encoder.")}
    )
    expected = encoder(torch.as_tensor(numbers, dtype=torch.float32)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.load("logs/fit/version_1/embeddings.npy"), found, rtol=1e-6)


SMALL = "accelerator: cpu, devices: 1, max_epochs: 2, enable_progress_bar: false"


def test_a_legend_has_the_names_of_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = watch_axes(monkeypatch)
    rows, labels = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    draw_embedding(rows, labels, tmp_path / "picture.png", title="", class_names=("B", "NK", "T"))
    draw_embedding(rows, labels, tmp_path / "picture.png", title="")
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in drawn]
    assert legends == [["B", "NK", "T"], ["0", "1", "2"]]


@pytest.mark.parametrize("values", [(2.3025, 2.3024, 2.3026), (0.7, 0.7, 0.7), (3.0, 1.0, 0.5)], ids=str)
def test_a_flat_curve_has_ticks_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[float, ...]
) -> None:
    drawn = watch_axes(monkeypatch)
    draw_loss_curve({"train_loss": list(enumerate(values))}, tmp_path / "curve.png")
    (axes,) = drawn
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    ticks = [(place, text.get_text()) for place, text in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)]
    shown = [(place, text) for place, text in ticks if low <= place <= high and text]
    assert len(shown) >= 2
    # a label is its number: no offset to add, no power to multiply by
    assert [float(text) for _, text in shown] == pytest.approx([place for place, _ in shown], abs=1e-9)
    assert len({text for _, text in shown}) == len(shown)


def watch_axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep the axes of all pictures."""
    from lightning_ddp_losses.cli import report

    made, drawn = report._axes, []

    def keep(*given: Any, **options: Any) -> Any:
        drawn.append(made(*given, **options))
        return drawn[-1]

    monkeypatch.setattr(report, "_axes", keep)
    return drawn
