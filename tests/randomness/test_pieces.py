"""`microbatched` inside the block: pieces decide memory, and draw the numbers of one run of plain torch on the rows of all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ddp_losses import global_randomness, microbatched
from lightning_ddp_losses.randomness import shared_draws
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.oracle import assert_close
from tests.randomness import test_strategy
from tests.randomness.models import SHARED, batches, loss_of
from tests.randomness.test_block import SPLITS, WORLDS, Splits, assert_as_one_process, own_rows, some_rank_is_empty
from tests.randomness.test_by_row import assert_by_row_as_one_process

NAMES = ["vit block", "encoder layer, time first", "lstm", "noise", "two views", "gan", "mc dropout", SHARED]
STEPS = 3


def names_for(splits: Splits) -> list[str]:
    return [name for name in NAMES if not (some_rank_is_empty(splits) and name == SHARED)]


@pytest.mark.parametrize(("world_size", "split"), WORLDS)
@each_rank()
def test_weights_are_those_of_plain_torch_on_the_whole_batch(world_size: int, split: str) -> None:
    splits = SPLITS[world_size][split][:STEPS]
    for name in names_for(splits):
        assert_as_one_process(name, splits, chunk=2)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@each_rank(2)
def test_pieces_of_any_size(chunk: int) -> None:
    for name in ("vit block", "noise", SHARED):
        assert_as_one_process(name, [(4, 2), (1, 5)], chunk=chunk)


@pytest.mark.parametrize("splits", [[(3, 4), (7, 1)], [(3, 0), (1, 5)]], ids=str)
@each_rank(2)
def test_inside_of_ddp(splits: Splits) -> None:
    for name in ("encoder layer", "two views", "mc dropout"):
        assert_as_one_process(name, splits, chunk=2, ddp=True)


@pytest.mark.parametrize("splits", [[(4, 3), (1, 5)], [(2, 0), (4, 4)], [(3, 2, 4), (0, 1, 5)]], ids=str)
def test_by_row_pieces_draw_what_the_whole_batch_draws_in_one_process(pool: RankPool, splits: Splits) -> None:
    assert_by_row_as_one_process(pool, splits, names_for(splits), chunk=2)


class Dropped(nn.Module):
    """Returns its mask, and a result that was drawn with the channels in another order of memory."""

    def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
        mask = F.dropout(torch.ones_like(x), 0.5)
        with shared_draws():
            factor = float(numpy.random.rand()) + torch.rand(())
        noise = torch.rand_like(x.t().contiguous()).t()
        return {"mask": mask, "noise": noise * scale, "scaled": x * factor}


@pytest.mark.parametrize("randomness", ["global", "by_row"])
@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_two_views_and_entries_of_rows_without_a_graph(world_size: int, randomness: str) -> None:
    """Pieces are cut from two views after each other, or from tokens, and end within a row."""
    x = torch.arange(70.0).view(7, 10)
    own = own_rows(x, (7,) if world_size == 1 else (4, 3))
    encoder = Dropped()
    found = []
    for run in (encoder, microbatched(encoder, 3), microbatched(encoder, 5)):
        torch.manual_seed(2)
        numpy.random.seed(2)
        with torch.no_grad(), global_randomness(rows=own, randomness=randomness):  # type: ignore[arg-type]
            views = run(torch.cat([own, own + 1]), 2.0)
            tokens = run(own.view(-1, 2), 1.0)
            behind = {"dropped": F.dropout(tokens["noise"].view(-1, 5, 2), 0.5)}  # rows are followed behind the pieces
            found.append([*views.values(), *tokens.values(), *behind.values(), torch.rand_like(own)])
    for others in found[1:]:
        for number, (one, other) in enumerate(zip(found[0], others, strict=True)):
            assert torch.equal(one, other), number


@each_rank(2)
def test_rows_behind_pieces_are_rows() -> None:
    """A draw behind the pieces, and a second backward, which draws the same again."""
    x = batches([5])[0].mean(1)
    own = own_rows(x, (3, 2))
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)).double()
    nn.init.eye_(layer[0].weight)
    torch.manual_seed(1)
    expected = F.dropout(layer(x), 0.3)
    expected.sum().backward()
    of_one = layer[0].weight.grad
    layer.zero_grad()
    torch.manual_seed(1)
    with global_randomness(rows=own):
        found = F.dropout(microbatched(layer, 1)(own), 0.3)
        found.sum().backward(retain_graph=True)
        found.sum().backward()
    torch.testing.assert_close(found, own_rows(expected, (3, 2)), rtol=1e-9, atol=1e-12)
    dist.all_reduce(layer[0].weight.grad)
    torch.testing.assert_close(layer[0].weight.grad, 2 * of_one, rtol=1e-9, atol=1e-12)


@each_rank(2)
def test_an_encoder_that_draws_nothing_takes_rows_of_any_kind() -> None:
    table = nn.Parameter(torch.ones(4, 3))
    x = own_rows(torch.ones(6, 3), (4, 2))
    layer = nn.Linear(3, 2)
    with global_randomness(rows=x):
        microbatched(layer, 2)(table).sum().backward()
    assert table.grad is not None


@each_rank(1)
def test_outside_of_a_block_each_piece_may_be_shuffled() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[torch.randperm(x.shape[0])]

    x = torch.ones(5, 2)
    microbatched(Shuffled(), 2)(x)


class InPieces(test_strategy.Module):
    """A module whose encoder runs in pieces."""

    def __init__(self, name: str, **kind: object) -> None:
        super().__init__(name, **kind)  # type: ignore[arg-type]
        self.in_pieces = microbatched(self.net, 2)

    def loss(self, x: Tensor) -> Tensor:
        return loss_of(self.in_pieces, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", test_strategy.STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_fits_are_those_of_one_process_on_whole_batches(world_size: int, strategy: str) -> None:
    for name in ("vit block", "diffusion"):
        for splits in (None, test_strategy.UNEVEN[world_size]):
            found = test_strategy.fit(name, strategy=strategy, splits=splits, module=InPieces)
            assert_close(found, test_strategy.by_hand(name))


def fit_in_pieces(kill: int | None, path: str, load: str | None, randomness: str) -> dict[str, Tensor]:
    return test_strategy.fit("vit block", kill, path, load, module=InPieces, epochs=3, randomness=randomness)


@pytest.mark.parametrize("kill", [5, 6])
def test_a_run_killed_in_its_second_epoch_goes_on_with_other_ranks_and_pieces(
    pool: RankPool, tmp_path: Path, kill: int
) -> None:
    """At step 2, and at step 3, the last one of the epoch."""
    path = str(tmp_path / "killed.ckpt")
    expected = {"global": test_strategy.by_hand("vit block", epochs=3)}
    (expected["by_row"],) = pool.run(1, fit_in_pieces, None, "", None, "by_row")
    for randomness, weights in expected.items():
        pool.run(2, fit_in_pieces, kill, path, None, randomness)
        for world_size in (1, 3):
            (resumed, *_) = pool.run(world_size, fit_in_pieces, None, "", path, randomness)
            assert_close(resumed, weights)
