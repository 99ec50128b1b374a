"""The large example, small: counts that are drawn once and read from their file, and the same training on ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from lightning_ddp_losses.cli import CellsDataModule, CellsEncoder
from lightning_ddp_losses.demo import cells
from lightning_ddp_losses.testing import RankPool
from tests.cli.shipped_configs import fit_config, smaller
from tests.processes import ROOT

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
