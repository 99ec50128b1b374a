"""`randomness="by_row"`: each rank draws for its own rows, and W ranks train as one process does with the same option."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy, audit, global_randomness
from lightning_ddp_losses.randomness import row_blocks
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.audit import modules as m
from tests.each_rank import each_rank
from tests.oracle import assert_close
from tests.randomness.models import CASES, MIXUP, SHARED
from tests.randomness.test_block import SPLITS, WORLDS, Splits, some_rank_is_empty, totals, train
from tests.randomness.test_strategy import STRATEGIES, UNEVEN, fit

NOT_WITHOUT_ROWS = (MIXUP, SHARED)  # a rank without rows cannot draw these


def train_each(splits: Splits, names: list[str], chunk: int | None = None) -> dict[str, dict[str, Tensor]]:
    """Train each model on this rank's rows. Return the weights."""
    return {name: train(name, splits, "by_row", chunk=chunk) for name in names}


def assert_by_row_as_one_process(pool: RankPool, splits: Splits, names: list[str], chunk: int | None = None) -> None:
    """Ranks, in pieces or not, draw by row what one process draws by row for the whole batch."""
    (expected,) = pool.run(1, train_each, [(total,) for total in totals(splits)], names)
    for trained in pool.run(len(splits[0]), train_each, splits, names, chunk):
        for name, weights in trained.items():
            assert_close(weights, expected[name])


@pytest.mark.parametrize(("world_size", "split"), WORLDS)
def test_weights_are_those_of_one_process(pool: RankPool, world_size: int, split: str) -> None:
    splits = SPLITS[world_size][split]
    names = [name for name in CASES if not (some_rank_is_empty(splits) and name in NOT_WITHOUT_ROWS)]
    assert_by_row_as_one_process(pool, splits, names)


def drawn(counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Numbers of many kinds, with rows in several places, of this rank's rows."""
    rank = dist.get_rank()
    start, rows = sum(counts[:rank]), counts[rank]
    x = torch.linspace(0.1, 0.9, 11 * 6, dtype=torch.float32).view(11, 6)[start : start + rows]
    torch.manual_seed(3)
    with global_randomness(rows=x, randomness="by_row"):
        wide = x.mean(1, keepdim=True).expand(-1, 5000)
        return {
            "wide, last": wide.t().contiguous().normal_().t(),
            "wide, last, like": torch.rand_like(wide.t().contiguous()).t(),
            "wide, transposed": wide.contiguous().t().exponential_().t(),
            "wide, dropped": F.dropout(wide.t(), 0.5).t(),
            "rand": torch.rand(x.shape[0], 2, 3),
            "randn": torch.randn(x.shape[0], 500),
            "wide rows": torch.randn(x.shape[0], 5000),
            "randint": torch.randint(1000, (x.shape[0], 3)),
            "rand_like": torch.rand_like(x),
            "randint_like": torch.randint_like(x, 2, 9),
            "bernoulli": torch.bernoulli(x),
            "rates": torch.empty_like(x).bernoulli_(x),
            "normal": torch.normal(x, x),
            "multinomial": torch.multinomial(x, 3),
            "last": torch.randn_like(x.t().contiguous()).t(),
            "middle": torch.rand_like(x[None].expand(2, -1, -1)).movedim(1, 0),
            "a view": F.dropout(x.t(), 0.5).t(),
            "two views": F.dropout(torch.cat([x, x]), 0.5).view(2, -1, 6).movedim(1, 0),
            "two each": F.dropout(x.repeat_interleave(2, 0), 0.5).view(-1, 2, 6),
            "in place": F.dropout(x.clone(), 0.5, inplace=True),
            "exponential_": torch.empty_like(x).exponential_(),
            "half": F.dropout(x.bfloat16(), 0.5),
            "own generator": torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(8)),
            "no numbers": torch.rand(x.shape[0], 0),
        }


@pytest.mark.parametrize("counts", [(6, 5), (10, 1), (1, 10), (4, 3, 4), (1, 1, 9), (0, 11)], ids=str)
def test_numbers_are_bit_equal_to_those_of_one_process(pool: RankPool, counts: tuple[int, ...]) -> None:
    (expected,) = pool.run(1, drawn, (11,))
    parts = pool.run(len(counts), drawn, counts)
    for name, value in expected.items():
        found = torch.cat([part[name] for part, count in zip(parts, counts, strict=True) if count])
        assert torch.equal(found, value), name


@each_rank(1)
def test_numbers_are_those_of_a_generator_for_each_block() -> None:
    x = torch.ones(30, 700)
    torch.manual_seed(5)
    with global_randomness(rows=x, randomness="by_row"):
        found = torch.rand_like(x)
    after = torch.rand(())
    torch.manual_seed(5)
    key = int(torch.empty((), dtype=torch.int64).random_())
    blocks = []
    for number in range(6):
        generator = torch.Generator().manual_seed(key + number)
        blocks.append(torch.rand(5, 700, generator=generator))
    assert torch.equal(found, torch.cat(blocks))
    assert torch.equal(torch.rand(()), after), "a draw of rows takes one number of the step's generator"


@each_rank(1)
def test_rows_and_draws_have_different_numbers() -> None:
    x = torch.ones(64, 1000)
    with global_randomness(rows=x, randomness="by_row"):
        drawn = torch.cat([torch.rand_like(x), torch.rand_like(x)])
    assert len(drawn.unique(dim=0)) == 128
    assert abs(float(drawn.mean()) - 0.5) < 0.005
    assert float(torch.corrcoef(drawn).fill_diagonal_(0).abs().max()) < 0.2


@each_rank(2)
def test_a_rank_draws_its_own_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    seed = row_blocks._seed_
    monkeypatch.setattr(row_blocks, "_seed_", lambda value, device: (seeds.append(value), seed(value, device)))
    x = torch.ones(40, 4096)[dist.get_rank() * 20 :][:20]
    with global_randomness(rows=x, randomness="by_row"):
        F.dropout(x, 0.5)
    assert len(seeds) == 20


# ---------------------------------------------------------------------- the strategies


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fits_and_resumed_fits_are_those_of_one_process(pool: RankPool, tmp_path: Path, strategy: str) -> None:
    """Killed at step 2 of the second epoch on two ranks, resumed on three."""
    path = str(tmp_path / "killed.ckpt")
    for name in ("vit block", "checkpoint", "diffusion"):
        (expected,) = pool.run(1, fit_by_row, name, strategy, None, "", None)
        pool.run(2, fit_by_row, name, strategy, 5, path, None)
        (resumed, *_) = pool.run(3, fit_by_row, name, strategy, None, "", path)
        (uneven, *_) = pool.run(2, fit_by_row, name, strategy, None, "", None, UNEVEN[2])
        assert_all_close([resumed, uneven], expected)


def fit_by_row(
    name: str, strategy: str, kill: int | None, path: str, load: str | None, splits: list[tuple[int, ...]] | None = None
) -> dict[str, Tensor]:
    return fit(name, kill, path, load, strategy=strategy, splits=splits, randomness="by_row")


def test_an_audit_draws_so_in_one_process_too() -> None:
    options = {"steps": 2, "tolerance": 1e-5}
    by_strategy = audit(m.Dropout(), m.even(4), strategy=DDPLossStrategy(randomness="by_row"), **options)
    by_audit = audit(m.Dropout(), m.even(4), strategy="ddp", randomness="by_row", **options)
    for report in (by_strategy, by_audit):
        assert report.equal, str(report)
        assert report.settings["randomness"] == "by_row"
    (fault, *_) = audit(m.OwnSlotGather(), m.even(), strategy="ddp", randomness="by_row", **options).diagnoses
    assert fault.fault == "F20"
