"""Checkpoints of class shards: exact at any number of ranks also where a class has several rows, and never silently another weight."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from lightning_ddp_losses import ClassShardedLoss
from lightning_ddp_losses.testing import RankPool
from tests.doors import METADATA, RECORDS
from tests.oracle import assert_close
from tests.refusals import assert_same_error
from tests.strategies.jobs import TASK, fit_alone
from tests.strategies.sharded_jobs import Plain, Sharded, fit_sharded, whole_state
from tests.strategies.test_shards import Parts

SHARDED = {"sharded_checkpoints": True}
# five classes of several weight rows each, which neither two nor three ranks divide
WEIGHTS = {"SubCenterArcFaceLoss": "loss.W", "SoftTripleLoss": "loss.fc"}


def save_half(pool: RankPool, world_size: int, path: Path, loss: str = "SubCenterArcFaceLoss", **options: Any) -> str:
    """Train one of two epochs on so many ranks and save."""
    pool.run(world_size, fit_sharded, loss, "adam", save=str(path), **options)
    return str(path)


def go_on(pool: RankPool, world_size: int, path: str, loss: str = "SubCenterArcFaceLoss") -> dict[str, Tensor]:
    found = pool.run(world_size, fit_sharded, loss, "adam", load=path, max_epochs=2)
    return whole_state(found, WEIGHTS.get(loss, "loss.W"))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Tensor]]:
    """Both epochs in one process."""
    return {loss: fit_alone(partial(Plain, loss, "adam"), max_epochs=2) for loss in WEIGHTS}


@pytest.fixture(scope="module")
def halves(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Where so many ranks have saved one of two epochs, which each of them trains once; what is there stays as it is."""
    root = tmp_path_factory.mktemp("halves")

    def half(world_size: int, strategy: dict[str, Any], loss: str = "SubCenterArcFaceLoss") -> str:
        path = root / f"{world_size}-{len(strategy)}-{loss}"
        return str(path) if path.exists() else save_half(pool, world_size, path, loss, strategy=strategy)

    return half


@pytest.mark.parametrize("loss", WEIGHTS)
@pytest.mark.parametrize("strategy", [{}, SHARDED], ids=["whole", "sharded"])
@pytest.mark.parametrize("source", [1, 2, 3])
def test_classes_of_several_rows_go_on_at_any_size(
    pool: RankPool, halves: Any, expected: dict[str, Any], source: int, strategy: dict[str, Any], loss: str
) -> None:
    path = halves(source, strategy, loss)
    assert Path(path, METADATA).is_file() == bool(strategy)
    # by turns of the losses: each number of ranks to each, whole and sharded
    first = 1 + (source + list(WEIGHTS).index(loss)) % 2
    for target in range(first, 4, 2):
        assert_close(go_on(pool, target, path, loss), expected[loss])


def test_a_folder_is_written_again(pool: RankPool, tmp_path: Path, expected: dict[str, Any]) -> None:
    save_half(pool, 3, tmp_path / "half", strategy=SHARDED, max_epochs=2)
    path = save_half(pool, 2, tmp_path / "half", strategy=SHARDED)
    assert_close(go_on(pool, 2, path), expected["SubCenterArcFaceLoss"])


def test_shards_with_replicas_are_saved_by_one_rank_each(pool: RankPool, tmp_path: Path) -> None:
    path = save_half(pool, 4, tmp_path / "parts", "ArcFaceLoss", make=Parts, strategy=SHARDED)
    saved = FileSystemReader(path).read_metadata().state_dict_metadata["state_dict.loss.W"]
    assert sorted((chunk.offsets[1], chunk.sizes[1]) for chunk in saved.chunks) == [(0, 3), (3, 2)]
    assert_close(go_on(pool, 3, path, "ArcFaceLoss"), fit_alone(lambda: Plain("ArcFaceLoss", "adam"), max_epochs=2))


def blocks_of(folder: Path) -> Path:
    """Where a sharded checkpoint has its blocks."""
    (found,) = folder.glob("blocks-*")
    return found


def without_records(path: str) -> None:
    file = Path(path, METADATA) if Path(path).is_dir() else Path(path)
    checkpoint = torch.load(file)
    del checkpoint[RECORDS]
    torch.save(checkpoint, file)


@pytest.mark.parametrize("strategy", [{}, SHARDED], ids=["whole", "sharded"])
def test_a_checkpoint_without_records_loads(
    pool: RankPool, halves: Any, tmp_path: Path, expected: dict[str, Any], strategy: dict[str, Any]
) -> None:
    copy, path = shutil.copytree if strategy else shutil.copy, str(tmp_path / "half")
    copy(halves(2, strategy), path)
    without_records(path)
    assert_close(go_on(pool, 3, path), expected["SubCenterArcFaceLoss"])


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def spoil(path: Path) -> None:
    """Change one number of the weights, where torch stores it."""
    data = bytearray(path.read_bytes())
    first = data.index(b"data/0") + 6
    place = first + 64 - first % 64 + 64  # behind the padding, in the first tensor
    data[place] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Any] = {
    "a block that is cut off": lambda folder, other: cut_off(blocks_of(folder) / "__1_0.distcp"),
    "a block that is missing": lambda folder, other: (blocks_of(folder) / "__1_0.distcp").unlink(),
    "one bit": lambda folder, other: spoil(blocks_of(folder) / "__1_0.distcp"),
    "a block of another checkpoint": lambda folder, other: shutil.copy(
        blocks_of(other) / "__1_0.distcp", blocks_of(folder)
    ),
    "all blocks of another checkpoint": lambda folder, other: [
        shutil.copy(blocks_of(other) / name, blocks_of(folder))
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata")
    ],
    "the rest of another checkpoint": lambda folder, other: shutil.copy(other / METADATA, folder),
    "no metadata": lambda folder, other: (blocks_of(folder) / ".metadata").unlink(),
}


@pytest.fixture(scope="module")
def two_folders(pool: RankPool, halves: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sharded checkpoints of two ranks after one epoch and after two."""
    second = tmp_path_factory.mktemp("folders") / "two"
    save_half(pool, 2, second, strategy=SHARDED, max_epochs=2)
    return Path(halves(2, SHARDED)), second


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_the_same_error_on_every_rank(
    pool: RankPool, tmp_path: Path, two_folders: tuple[Path, Path], damage: str
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(two_folders[0], folder)
    DAMAGE[damage](folder, two_folders[1])
    errors = pool.errors(2, fit_sharded, "SubCenterArcFaceLoss", "adam", load=str(folder), max_epochs=3)
    assert_same_error(errors, f"checkpoint {folder}", "blocks-")
    assert errors[0].type == "InputError"


class OtherRows(Sharded):  # as many weight rows, of other classes
    def build(self, loss: str) -> None:
        self.loss = ClassShardedLoss(pml.ArcFaceLoss(num_classes=3 * TASK.classes, embedding_size=TASK.dim).double())


@pytest.mark.parametrize("strategy", [{}, SHARDED], ids=["whole", "sharded"])
def test_as_many_rows_of_other_classes_are_refused(pool: RankPool, halves: Any, strategy: dict[str, Any]) -> None:
    options = {"load": halves(2, strategy), "make": OtherRows, "max_epochs": 2}
    errors = pool.errors(2, fit_sharded, "", "adam", **options)
    assert_same_error(errors, "loss.W", "15 classes of 1 weight rows", "5 classes of 3")


class Doubles(Callback):
    """Writes to the weight of a checkpoint, or puts another in its place; on rank 0, which saves it."""

    def __init__(self, *, in_place: bool) -> None:
        self.in_place = in_place

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == 0:
            state = checkpoint["state_dict"]
            state["loss.W"] = state["loss.W"].mul_(2) if self.in_place else state["loss.W"] * 2


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_hook_puts_into_a_checkpoint_counts(pool: RankPool, tmp_path: Path, in_place: bool) -> None:
    path = str(tmp_path / "doubled.ckpt")
    own = whole_state(pool.run(2, fit_sharded, save=path, callbacks=[Doubles(in_place=in_place)]))
    loaded = whole_state(pool.run(3, fit_sharded, "ArcFaceLoss", "sgd", load=path, max_epochs=1))
    assert_close({"W": loaded["loss.W"]}, {"W": 2 * own["loss.W"]})
