"""The two data modules: real digits, and arrays of the user's own with everything that can be wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_ddp_losses.cli import ArrayDataModule, DigitsDataModule
from lightning_ddp_losses.errors import ConfigurationError, InputError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    random = np.random.default_rng(0)
    arrays = {
        "features": random.normal(size=(60, 3, 4)),
        "labels": np.arange(60) % 5,
        "short": np.arange(59) % 5,
        "floats": np.arange(60) / 7,
        "column": np.zeros((60, 1), int),
        "negative": np.arange(60) - 1,
        "flat": np.zeros(60),
        "empty": np.zeros((60, 0)),
        "text": np.array([["a"]] * 60),
        "other_width": np.zeros((8, 3, 5)),
        "eight": np.arange(8) % 2,
        "single": np.arange(60),
    }
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    np.save(tmp_path / "objects.npy", np.array([None] * 60), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", arrays["features"])
    (tmp_path / "nonsense.npy").write_text("no array")
    paths = {path.stem: path for path in tmp_path.iterdir()}
    return paths | {"missing": tmp_path / "missing.npy"}


def test_digits_are_images_between_0_and_1_split_by_class_without_overlap() -> None:
    data = DigitsDataModule(64, held_out=0.25, seed=1)
    x, labels = next(iter(data.train_dataloader()))
    assert (x.shape, x.dtype, labels.dtype) == ((64, 1, 8, 8), torch.get_default_dtype(), torch.int64)
    assert x.min() == 0
    assert x.max() == 1
    held_out, classes = data.held_out()
    share = torch.bincount(classes) / torch.bincount(torch.as_tensor(data.labels))
    torch.testing.assert_close(share, torch.full((10,), 0.25), atol=0.005, rtol=0)
    assert not set(data.train_rows) & set(data.held_out_rows)
    assert len(data.train_rows) + len(held_out) == 1797
    indices = torch.cat([batch[2] for batch in data.val_dataloader()])
    assert indices.tolist() == list(range(len(held_out)))


def test_missing_labels_are_a_share_of_the_training_images_alone() -> None:
    whole, data = DigitsDataModule(seed=1), DigitsDataModule(seed=1, missing_labels=0.25, ignore_index=-1)
    missing = data.labels == -1
    assert missing.sum() == round(0.25 * len(data.train_rows))
    np.testing.assert_array_equal(data.labels[~missing], whole.labels[~missing])
    np.testing.assert_array_equal(data.train_rows, whole.train_rows)
    assert torch.equal(data.held_out()[1], whole.held_out()[1])


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-ddp-losses\[demo\]'"):
        DigitsDataModule()


def test_arrays_stay_on_disk_and_keep_the_precision_that_the_job_has(files: dict[str, Path]) -> None:
    data = ArrayDataModule(files["features"], files["labels"], batch_size=10)
    assert isinstance(data.features, np.memmap)
    whole = np.load(files["features"])
    x, labels, indices = next(iter(data.val_dataloader()))
    np.testing.assert_array_equal(x.numpy(), whole[data.held_out_rows[indices]].astype(np.float32))
    assert labels.tolist() == (data.held_out_rows[indices] % 5).tolist()
    assert data.num_classes == 5
    data.trainer = Trainer(precision="64-true", accelerator="cpu", logger=False, enable_checkpointing=False)
    exact, *_ = next(iter(data.val_dataloader()))
    np.testing.assert_array_equal(exact.numpy(), whole[data.held_out_rows[indices]])


def test_arrays_of_their_own_for_validation(files: dict[str, Path]) -> None:
    data = ArrayDataModule(files["features"], files["labels"], files["features"], files["labels"], batch_size=20)
    assert len(data.train_rows) == len(data.held_out_rows) == 60


AN_ARRAY = "expected an .npy file"
OTHERS = {"val_features": "other_width", "val_labels": "eight"}
OTHER_SHAPE = r"shape of .*other_width.npy: expected \(N, 3, 4\) like .*, got \(N, 3, 5\)"
# the files of features, labels and held-out rows, and words of the error
BAD: list[tuple[str, str, dict[str, str], str]] = [
    ("missing", "labels", {}, f"features .*missing.npy: {AN_ARRAY}.*, got no such file\nPaths are"),
    ("features", "missing", {}, f"labels .*missing.npy: {AN_ARRAY}"),
    ("nonsense", "labels", {}, f"features .*nonsense.npy: {AN_ARRAY}"),
    ("objects", "labels", {}, f"features .*objects.npy: {AN_ARRAY}"),
    ("archive", "labels", {}, "got an .npz archive"),
    ("flat", "labels", {}, r"shape of .*flat.npy: expected \(N, D\).*, got \(60,\)"),
    ("empty", "labels", {}, r"got \(60, 0\)"),
    ("text", "labels", {}, "dtype of .*text.npy: expected floating or integer numbers, got <U1"),
    ("features", "short", {}, "rows of .*short.npy: expected 60, as in .*, got 59"),
    ("features", "floats", {}, "dtype of .*floats.npy: expected integers, got float64\n.*unique"),
    ("features", "column", {}, r"shape of .*column.npy: expected \(60,\), got \(60, 1\)"),
    ("features", "negative", {}, "labels in .*negative.npy: expected 0 or more, got -1"),
    ("features", "labels", {"val_features": "features"}, "expected both val_features and val_labels"),
    ("features", "labels", OTHERS, OTHER_SHAPE),
    ("features", "single", {}, "at least one of two rows"),
]


@pytest.mark.parametrize(("features", "labels", "others", "message"), BAD, ids=lambda value: str(value)[:30])
def test_bad_arrays_are_refused_with_what_was_expected_and_what_came(
    files: dict[str, Path], features: str, labels: str, others: dict[str, str], message: str
) -> None:
    kwargs: dict[str, Any] = {name: files[value] for name, value in others.items()}
    with pytest.raises((InputError, ConfigurationError), match=message):
        ArrayDataModule(files[features], files[labels], **kwargs)
