"""The two data modules: real digits, and arrays of the user's own with everything that can be wrong with them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lightning_ddp_losses.cli import ArrayDataModule, CellsDataModule, CellsEncoder, DigitsDataModule
from lightning_ddp_losses.demo import cells
from lightning_ddp_losses.demo.data import HeldOutSlices, stratified_split
from lightning_ddp_losses.testing import RankPool
from tests.cli.shipped_configs import fit_config, smaller
from tests.processes import ROOT


def write_arrays(folder: Path) -> dict[str, Path]:
    """Write arrays that can be read and others; return their paths, and one of none, by name."""
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
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "objects.npy", np.array([None] * 60), allow_pickle=True)
    np.savez(folder / "archive.npz", arrays["features"])
    (folder / "nonsense.npy").write_text("no array")
    paths = {path.stem: path for path in folder.iterdir()}
    return paths | {"missing": folder / "missing.npy"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_arrays(tmp_path)


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


# The large example, small: counts that are drawn once and read from their file, and the same training on ranks and in
# one process.

CONFIG = ROOT / "configs" / "cells_supcon.yaml"


def data_of(folder: Path, number: int = 2500, **options: int) -> CellsDataModule:
    data = CellsDataModule(number, 30, 20, batch_size=40, held_out_cells=50, folder=folder, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_counts_are_drawn_from_their_seed_and_written_once(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    assert isinstance(data.features, np.memmap)
    assert (data.features.shape, data.features.dtype) == ((2500, 30), np.uint16)
    written = data.path.stat().st_mtime_ns
    again = data_of(tmp_path)
    assert again.path.stat().st_mtime_ns == written
    # another folder has the same, more cells begin with the same, another seed has others
    assert np.array_equal(data_of(tmp_path / "other").features, data.features)
    more = data_of(tmp_path, 3000)
    assert np.array_equal(more.labels[:2500], data.labels)
    assert np.array_equal(more.features[:2000], data.features[:2000])
    assert not np.array_equal(data_of(tmp_path, seed=1).features, data.features)
    # what could not be finished is not taken for the whole
    with mock.patch.object(cells, "draw_counts", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        data_of(tmp_path, 2600)
    assert not list(tmp_path.glob("counts_2600*.npy"))


def test_counts_look_like_those_of_cells() -> None:
    labels = cells.draw_types(1000, 20, seed=0)
    profiles = cells.draw_profiles(300, 20, seed=0)
    assert profiles.sum(1) == pytest.approx(1)
    counts = cells.draw_counts(profiles[labels], np.random.default_rng(0))
    library = counts.sum(1)
    assert np.quantile(library, 0.95) > 3 * np.quantile(library, 0.05)
    # more zeros than Poisson's: cells of one type differ, and small counts are lost
    expected = np.exp(-(profiles[labels] * library[:, None])).mean()
    assert 0.9 > (counts == 0).mean() > 1.3 * expected
    # a cell is more like its type than like its family, and more like that than like others
    rows = torch.nn.functional.normalize(cells.log_normalised(torch.as_tensor(counts.astype(np.float64))))
    alike = (rows @ rows.T).numpy()
    family = labels // 10
    same_type, same_family = labels[:, None] == labels, family[:, None] == family
    assert alike[same_type].mean() > alike[same_family & ~same_type].mean() > alike[~same_family].mean()


def test_the_encoder_looks_at_a_cell_whatever_its_library() -> None:
    encoder = CellsEncoder(6, embedding_size=3)
    counts = torch.randint(0, 9, (4, 6)).double()
    encoder.double()
    assert torch.allclose(encoder(counts), encoder(5 * counts))
    assert torch.isfinite(encoder(torch.zeros(1, 6).double())).all()


@pytest.mark.slow
def test_ranks_train_as_one_process(pool: RankPool, tmp_path: Path) -> None:
    options = [*smaller(CONFIG), "--data.init_args.folder", str(tmp_path)]
    ((one, _),) = pool.run(1, fit_config, str(CONFIG), options)
    assert {"train_loss", "val_loss", "map_at_r"} <= one.keys()
    for metrics, _ in pool.run(3, fit_config, str(CONFIG), options):
        assert metrics == pytest.approx(one, rel=1e-9)


# Which rows go into which global batch: the union over ranks of step k is the one-process batch k.

Steps = list[list[int]]


def train_steps(m_per_class: int | None, seed: int, epochs: tuple[int, ...], held_out: float = 0.25) -> list[Steps]:
    """This rank's row numbers, epoch by epoch, as its loader asks for them."""
    data = DigitsDataModule(60, held_out=held_out, seed=seed, m_per_class=m_per_class)
    batches = data.train_dataloader().batch_sampler
    found = []
    for epoch in epochs:
        batches.set_epoch(epoch)
        found.append(list(batches))
        assert len(found[-1]) == len(batches)
    return found


def held_out_steps(size: int, batch_size: int) -> list[Steps]:
    return [list(HeldOutSlices(size, batch_size))]


def unions(per_rank: list[list[Steps]]) -> list[Steps]:
    """Step by step, the ranks' rows in rank order."""
    return [
        [list(chain(*step)) for step in zip(*epoch, strict=True)]  # as many steps on every rank
        for epoch in zip(*per_rank, strict=True)
    ]


@pytest.mark.parametrize("m_per_class", [None, 10])
def test_training_batches_join_to_those_of_one_process(pool: RankPool, m_per_class: int | None) -> None:
    one = train_steps(m_per_class, 3, (0, 1))
    for world_size in (2, 3):
        per_rank = pool.run(world_size, train_steps, m_per_class, 3, (0, 1))
        assert {len(step) for rank in per_rank for epoch in rank for step in epoch} == {60 // world_size}
        assert unions(per_rank) == one


@pytest.mark.parametrize("size", [3, 11, 12, 13, 25, 47])
def test_held_out_rows_come_once_in_order_on_any_number_of_ranks(pool: RankPool, size: int) -> None:
    (whole,) = held_out_steps(size, 12)
    assert list(chain(*whole)) == list(range(size))
    assert max(len(step) for step in whole) <= 12
    for world_size in (2, 3):
        per_rank = pool.run(world_size, held_out_steps, size, 12)
        assert unions(per_rank) == [whole]
        assert all(step for rank in per_rank for epoch in rank for step in epoch)  # no rank gets an empty batch


def test_with_one_row_for_each_rank_no_rank_gets_an_empty_held_out_batch(pool: RankPool) -> None:
    per_rank = pool.run(2, held_out_steps, 7, 2)
    assert unions(per_rank) == [[[0, 1, 2], [3, 4], [5, 6]]]
    assert all(step for rank in per_rank for epoch in rank for step in epoch)


def test_training_takes_rows_once_drops_the_ragged_batch_and_changes_with_seed_and_epoch() -> None:
    first, second = train_steps(None, 0, (0, 1))
    assert {len(step) for step in first} == {60}
    assert len(set(chain(*first))) == 60 * len(first) == 1347 // 60 * 60
    assert first != second
    assert [first, second] == train_steps(None, 0, (0, 1))
    assert first != train_steps(None, 5, (0,))[0]


def test_batches_by_class_hold_that_many_of_each_and_do_not_depend_on_the_epochs_before() -> None:
    data = DigitsDataModule(60, m_per_class=10)
    _, _, last = epochs = train_steps(10, 0, (0, 1, 2))
    for step in chain(*epochs):
        assert len(set(step)) == 60
        assert sorted(np.bincount(data.labels[data.train_rows[step]], minlength=10)) == [0] * 4 + [10] * 6
    assert train_steps(10, 0, (2,)) == [last]  # as a resumed run asks for it


def test_split_is_stratified_without_overlap_and_fixed_by_its_seed() -> None:
    labels = np.repeat([4, 7, 9, 11], [100, 40, 2, 1])
    train, held_out = stratified_split(labels, 0.25, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(len(labels)))
    assert [int((labels[held_out] == label).sum()) for label in (4, 7, 9, 11)] == [25, 10, 1, 0]
    np.testing.assert_array_equal(held_out, stratified_split(labels, 0.25, seed=0)[1])
    assert not np.array_equal(held_out, stratified_split(labels, 0.25, seed=1)[1])
