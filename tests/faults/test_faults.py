"""What befalls a rank: every rank ends, the output names it, nothing is left running, and a relaunch ends as if nothing had happened."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy
from tests.faults.ranks import Ended, processes_of, run_ranks
from tests.faults.training import CLASSES, DIM, Strike, fit, kill
from tests.fits import QUIET
from tests.strategies.jobs import Job, loader

LIMIT = 90.0  # generous; what matters is that all ends by itself


def states(folder: Path, world_size: int) -> list[dict[str, Tensor]]:
    """What the ranks had in the end."""
    return [torch.load(folder / f"state-{rank}", weights_only=True) for rank in range(world_size)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Tensor]]]:
    """The states of two and of three ranks that nothing befell."""
    found = {}
    for world_size in (2, 3):
        folder = tmp_path_factory.mktemp(f"undisturbed-{world_size}")
        ended = run_ranks(world_size, fit, Strike(), folder, folder=folder, seconds=LIMIT)
        assert ended.codes == [0] * world_size, ended
        found[world_size] = states(folder, world_size)
    return found


def assert_same_end(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """Bit for bit on two ranks; on three, where DDP adds in another order before its buckets are rebuilt, to 1e-13."""
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            if len(found) == 2 or not value.is_floating_point():
                assert torch.equal(value, other[name]), name
            else:
                torch.testing.assert_close(value, other[name], rtol=1e-13, atol=1e-13, msg=name)


# a rank that is slow to learn of it may find that another one has come to its end since
KILLED = r"rank {rank} \(process \d+ on \S+\).* ha(s|ve) ended"
# who is struck, and what the others' output says of it
FAULTS: dict[str, tuple[Strike, str]] = {
    "killed in forward": (Strike("killed in forward"), KILLED),
    "killed in backward": (Strike("killed in backward"), KILLED),
    "killed in a ring": (Strike("killed in a ring"), KILLED),
    "rank 0 killed while saving": (Strike("killed while saving", rank=0), KILLED),
    "rank 0 killed in forward": (Strike("killed in forward", rank=0), KILLED),
    "raises": (Strike("raises"), r"ZeroDivisionError: the user's own\n\(rank {rank} of"),
    "raises in a callback": (Strike("raises in a callback"), r"ZeroDivisionError: of a callback\n\(rank {rank} of"),
    "stalls": (Strike("stalls"), r"rank {rank} \(process \d+ on \S+\) has said nothing"),
}


def relaunch(folder: Path, strike: Strike, world_size: int) -> Ended:
    return run_ranks(world_size, fit, strike, folder, folder=folder, seconds=LIMIT)


def assert_saved_after_the_error(folder: Path, strike: Strike, ended: Ended) -> None:
    """Classes are divided: all ranks have saved together, or the log says why nothing is saved."""
    path = folder / "on_exception.ckpt"
    # the peers of a rank that raises receive its error, in a callback too: there they save a checkpoint, which is a meeting
    if strike.kind.startswith("raises"):
        assert torch.load(path, weights_only=True)["state_dict"]["classes.W"].shape == (DIM, CLASSES)
        return
    assert not path.exists()
    peers = [output for rank, output in enumerate(ended.outputs) if rank != strike.rank]
    assert all("a checkpoint after an error: expected all ranks" in output for output in peers), ended


@pytest.mark.parametrize(
    ("fault", "world_size"),
    [*((fault, 2) for fault in FAULTS), ("killed in backward", 3), ("killed in a ring", 3), ("stalls", 3)],
)
def test_every_rank_ends_and_a_relaunch_goes_on(
    tmp_path: Path, undisturbed: dict[int, list[dict[str, Tensor]]], fault: str, world_size: int
) -> None:
    strike, words = FAULTS[fault]
    ended = relaunch(tmp_path, strike, world_size)
    assert None not in ended.codes, ended
    assert 0 not in ended.codes, ended
    assert processes_of(tmp_path) == []
    for rank in set(range(world_size)) - {strike.rank}:
        assert re.search(words.format(rank=strike.rank), ended.outputs[rank]), ended
    assert_saved_after_the_error(tmp_path, strike, ended)
    # the last checkpoint is whole; what the killed rank was writing goes with the next save
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] >= strike.step - 1
    again = relaunch(tmp_path, strike, world_size)
    assert again.codes == [0] * world_size, again
    assert list(tmp_path.glob(".partial-*")) == []
    assert_same_end(states(tmp_path, world_size), undisturbed[world_size])


class Kills(Job):  # nothing in it is divided; rank 1 is killed in its third step
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        if self.global_rank == 1 and self.global_step == 2:
            kill()
        return super().objective(features, labels, index)


def fit_and_be_killed(folder: Path) -> None:
    module, rank = Kills(), int(os.environ["RANK"])
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPLossStrategy(),
        plugins=[LightningEnvironment()],
        callbacks=[OnExceptionCheckpoint(folder)],
        **(QUIET | {"enable_checkpointing": True}),
    )
    trainer.fit(module, loader(2, rank))


def test_after_a_peer_was_killed_rank_0_saves_what_every_rank_holds(tmp_path: Path) -> None:
    ended = run_ranks(2, fit_and_be_killed, tmp_path, folder=tmp_path, seconds=LIMIT)
    assert ended.codes == [1, -9], ended
    assert re.search(KILLED.format(rank=1), ended.outputs[0]), ended
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("rank", [0, 1, -1])
def test_sigterm_ends_all_ranks_after_the_same_step(
    tmp_path: Path, undisturbed: dict[int, list[dict[str, Tensor]]], rank: int
) -> None:
    strike = Strike("SIGTERM", rank)
    ended = relaunch(tmp_path, strike, 2)
    assert None not in ended.codes, ended
    assert processes_of(tmp_path) == []
    told = "0, 1" if rank == -1 else rank
    assert f"SIGTERM reached rank {told}: all 2 ranks end after this step" in ended.outputs[0], ended
    assert not any("PeerError" in output for output in ended.outputs), ended
    # the step in which it came is in the checkpoint of the run's end
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == strike.step + 1
    again = relaunch(tmp_path, strike, 2)
    assert again.codes == [0, 0], again
    assert_same_end(states(tmp_path, 2), undisturbed[2])


def test_a_corrupt_checkpoint_is_named_by_all_ranks_and_ends_the_run(tmp_path: Path) -> None:
    strike = Strike("killed in forward")
    relaunch(tmp_path, strike, 2)
    last = tmp_path / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    ended = relaunch(tmp_path, strike, 2)
    assert ended.codes == [1, 1], ended
    for output in ended.outputs:
        assert f"InputError: checkpoint {last}" in output, ended
