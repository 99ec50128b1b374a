"""Checkpoint files: whole or not there, and what is wrong with one is the same error on every rank, before training."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, ModelParallelLossStrategy
from lightning_ddp_losses.strategies import checkpoint_files, whole_checkpoint
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.doors import WholeFileIO, write_whole
from tests.fits import make_trainer
from tests.refusals import assert_same_error
from tests.strategies.jobs import TASK, Job, loader, make_loss
from tests.strategies.sharded_jobs import Sharded, fit_sharded

LIMIT = 200 << 10
SHARDED = {"sharded_checkpoints": True}


class Large(Job):  # its checkpoint is larger than the limit
    def build(self, loss: str) -> None:
        super().build(loss)
        self.register_buffer("filler", torch.ones(LIMIT // 4))


class LargeShards(Large, Sharded):
    """So is the file of each rank."""


def train(make: Callable[..., Job], *, epochs: int = 1, **options: Any) -> dict[str, Tensor]:
    return fit_sharded(make=make, max_epochs=epochs, **options)


def flip(path: Path) -> None:
    """Change one bit of the weights, which torch loads without a word."""
    data = bytearray(path.read_bytes())
    weight = torch.load(path, weights_only=True)["state_dict"]["loss.W"]
    data[data.index(weight.numpy().tobytes()) + 3] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one bit": (flip, "checksum"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-300]), "Error: "),
    "half": (lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]), "Error: "),
    "empty": (lambda path: path.write_bytes(b""), "EOFError"),
    "a text": (lambda path: path.write_text("not a checkpoint"), "UnpicklingError"),
    "something else": (lambda path: torch.save({"weights": torch.ones(3)}, path), "state_dict"),
    "gone": (lambda path: path.unlink(), "FileNotFoundError"),
}


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "good.ckpt"
    pool.run(2, train, Job, save=str(path))
    return path.read_bytes()


@pytest.fixture
def good(tmp_path: Path, saved: bytes) -> Path:
    path = tmp_path / "good.ckpt"
    path.write_bytes(saved)
    return path


def load_own(paths: list[str]) -> None:
    train(Job, load=paths[dist.get_rank()], epochs=2)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_the_same_error_on_every_rank(pool: RankPool, good: Path, damage: str) -> None:
    spoil, word = DAMAGE[damage]
    spoil(good)
    assert_cannot_be_loaded(pool, good, Job, word)


def assert_cannot_be_loaded(pool: RankPool, path: Path, make: Callable[..., Job], *words: str) -> None:
    errors = pool.errors(2, train, make, load=str(path), epochs=2)
    assert errors[0].type == "InputError"
    assert_same_error(errors, f"checkpoint {path}", *words)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_file_damaged_for_one_rank_alone_is_an_error_on_every_rank(
    pool: RankPool, tmp_path: Path, saved: bytes, bad_rank: int
) -> None:
    paths = [tmp_path / f"{rank}.ckpt" for rank in range(3)]
    for rank, path in enumerate(paths):
        path.write_bytes(saved[:-300] if rank == bad_rank else saved)
    errors = pool.errors(3, load_own, [str(path) for path in paths])
    assert {error.type for error in errors} == {"InputError"}
    assert all(f"rank {bad_rank}: " in error.message for error in errors)
    assert all("rank 2: nothing wrong" in error.message for error in errors)


def test_files_of_different_steps_or_weights_are_refused(pool: RankPool, tmp_path: Path, good: Path) -> None:
    first, second, changed = str(good), str(tmp_path / "second.ckpt"), str(tmp_path / "changed.ckpt")
    pool.run(2, train, Job, load=first, save=second, epochs=2)
    errors = pool.errors(2, load_own, [first, second])
    assert_same_error(errors, "loading a checkpoint", "global_step", "rank 1")
    checkpoint = torch.load(first)
    checkpoint["state_dict"]["loss.W"][0, -1] += 1e-9
    torch.save(checkpoint, changed)
    errors = pool.errors(3, load_own, [first, changed, first])
    assert_same_error(errors, "loading a checkpoint", "content", "rank 0", "rank 1", "rank 2")


class Cosine(Job):  # another loss of the same shape
    def build(self, loss: str) -> None:
        super().build("CosFaceLoss")


class WithAdam(Job):
    def __init__(self, loss: str, optimizer: str) -> None:
        super().__init__(loss, "adam")


class OtherClasses(Job):
    def build(self, loss: str) -> None:
        self.loss = pml.ArcFaceLoss(num_classes=TASK.classes + 2, embedding_size=TASK.dim).double()


class Wrapped(Job):
    def build(self, loss: str) -> None:
        self.arc = GlobalBatchLoss(make_loss(loss))

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.arc(embeddings, labels)


OTHERS: dict[str, tuple[Callable[[], Job], tuple[str, ...]]] = {
    "another loss of the same shape": (Cosine, ("CosFaceLoss", "got loss: ArcFaceLoss")),
    "other classes": (OtherClasses, ("size mismatch for loss.W", f"{TASK.classes + 2}")),
    "another place": (Wrapped, ("Missing key", "arc.W")),
    "another optimizer": (WithAdam, ()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_module_is_the_same_error_on_every_rank(pool: RankPool, good: Path, other: str) -> None:
    make, words = OTHERS[other]
    assert_cannot_be_loaded(pool, good, make, *words)


def test_a_loss_and_what_divides_its_classes_are_one_loss(pool: RankPool, good: Path) -> None:
    pool.run(2, train, Sharded, load=str(good), epochs=2)


def save_on_full_disk(make: Callable[[], Job], path: str, full: tuple[int, ...], **strategy: Any) -> None:
    """Save; then train on and save to the same name while these ranks may write no large file."""
    module = make()
    trainer = make_trainer(DDPLossStrategy(**strategy), max_epochs=1)
    data = loader()
    trainer.fit(module, data)
    trainer.save_checkpoint(path)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    try:
        trainer.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names_below(folder: Path) -> list[str]:
    return sorted(str(found.relative_to(folder)) for found in folder.rglob("*"))


@pytest.mark.parametrize(("make", "strategy"), [(Large, {}), (LargeShards, SHARDED)], ids=["file", "folder"])
def test_a_full_disk_is_an_error_on_every_rank_and_the_last_checkpoint_stays(
    pool: RankPool, tmp_path: Path, make: Callable[[], Job], strategy: dict[str, Any]
) -> None:
    good, path = tmp_path / "good" / "x.ckpt", tmp_path / "kept" / "x.ckpt"
    pool.run(2, train, make, save=str(good), strategy=strategy)
    errors = pool.errors(2, save_on_full_disk, make, str(path), (0,), **strategy)
    assert_same_error(errors, f"checkpoint {path}", "rank 0", "File too large")
    if not strategy:
        assert names_below(path.parent) == names_below(good.parent)
    assert len(names_below(path.parent)) == len(names_below(good.parent))
    # it goes on from there as from one that was saved in peace
    states = [pool.run(2, train, make, load=str(file), epochs=2, strategy=strategy)[0] for file in (path, good)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_file_that_fails_half_way_leaves_the_former_one(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"before")

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert [found.name for found in tmp_path.iterdir()] == ["x.ckpt"]
    assert path.read_bytes() == b"before"


def killed_while_writing(path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    write_whole(path, write)


def test_what_a_killed_process_left_goes_with_the_next_save(pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"before")
    with pytest.raises(RankFailure, match="SIGKILL"):
        pool.run(1, killed_while_writing, path, distributed=False)
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2
    # another process that writes now, and another machine's, are left alone
    others = [tmp_path / f".partial-{host}-{os.getppid()}-00ff" for host in (socket.gethostname(), "elsewhere")]
    for other in others:
        other.touch()
    write_whole(path, lambda file: file.write(b"after"))
    assert path.read_bytes() == b"after"
    assert set(tmp_path.iterdir()) == {path, *others}


def test_the_users_own_plugin_stays_and_lightnings_default_is_replaced(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        pass

    own, around = Own(), AsyncCheckpointIO()
    assert DDPLossStrategy(checkpoint_io=own).checkpoint_io is own
    assert isinstance(DDPLossStrategy().checkpoint_io, WholeFileIO)
    assert DDPLossStrategy(checkpoint_io=around).checkpoint_io is around
    assert isinstance(around.checkpoint_io, WholeFileIO)
    # a remote path is Lightning's
    WholeFileIO().save_checkpoint({"x": 1}, "memory://somewhere/x.ckpt")
    assert WholeFileIO().load_checkpoint("memory://somewhere/x.ckpt") == {"x": 1}


@pytest.mark.parametrize("strategy", [DDPLossStrategy, ModelParallelLossStrategy])
def test_a_plugin_of_the_trainer_beside_an_instance(strategy: Any) -> None:
    around = AsyncCheckpointIO()
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy(), plugins=[around], logger=False)
    assert trainer.strategy.checkpoint_io is around
    assert isinstance(around.checkpoint_io, WholeFileIO)


def test_a_folder_that_cannot_be_written_says_so_in_one_process(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailure, match=r"checkpoint .*file/x.ckpt: expected a file that can be written\n\s*rank 0"):
        pool.run(1, train, Job, save=str(tmp_path / "file" / "x.ckpt"))


def save_and_die(path: str, index: bool) -> None:
    """Save, double the weight, and lose rank 0 while it replaces the file that names the new blocks, or the index for torch alone."""
    module, strategy = Sharded(), DDPLossStrategy(sharded_checkpoints=True)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    module.loss.weight.data.mul_(2)

    def die(file: Path, write: Callable[[IO[bytes]], Any]) -> None:
        if file.name == (".metadata" if index else "meta.pt"):
            os.kill(os.getpid(), signal.SIGKILL)
        write_whole(file, write)

    with mock.patch.object(checkpoint_files, "write_whole", die):
        trainer.save_checkpoint(path)


@pytest.mark.parametrize("index", [False, True], ids=["before it counts", "after"])
def test_a_killed_save_of_a_folder_leaves_one_of_both_checkpoints(pool: RankPool, tmp_path: Path, index: bool) -> None:
    path, good = str(tmp_path / "x.ckpt"), str(tmp_path / "good.ckpt")
    with pytest.raises(RankFailure):
        pool.run(2, save_and_die, path, index)
    states = pool.run(2, train, Sharded, save=good, strategy=SHARDED)
    weight = torch.cat([state["loss.W"] for state in states], 1)
    assert torch.equal(whole_checkpoint(path)["state_dict"]["loss.W"], 2 * weight if index else weight)
    # what was left goes with the next save
    pool.run(2, train, Sharded, load=path, save=path, epochs=2, strategy=SHARDED)
    assert len(names_below(Path(path))) == len(names_below(Path(good)))


def test_a_folder_without_its_main_file_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "rest.ckpt").write_bytes(b"")
    assert_cannot_be_loaded(pool, tmp_path / "folder", Job, "expected a whole file", "directory")
