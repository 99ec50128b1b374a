"""Batches as nests of rows: joined in rank order, cut, stored, told apart."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_losses.audit import replay
from tests.doors import inputs

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    name: str


def flat(tree: Any) -> list[str]:
    return [f"{path}: {leaf.tolist() if hasattr(leaf, 'tolist') else leaf!r}" for path, leaf in inputs.leaves(tree)]


def one(n: int, start: float) -> dict[str, Any]:
    x = torch.arange(start, start + n)
    return {
        "x": x,
        "wide": torch.stack([x, -x], 1),
        "names": [f"row {int(v)}" for v in x],
        "pair": Pair((x + 0.5,), None),
        "frozen": Frozen(x, "a batch"),
        "array": x.numpy(),
        "views": [x, -x],
        "class weights": torch.arange(7.0),
        "scalar": torch.tensor(2.0),
        "number": 3,
    }


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (1, 4, 0), (3,)])
def test_joined_rows_are_those_of_one_batch(sizes: tuple[int, ...]) -> None:
    starts = [float(sum(sizes[:r])) for r in range(len(sizes))]
    joined = replay.join_batches([one(n, start) for n, start in zip(sizes, starts, strict=True)], list(sizes))
    assert flat(joined) == flat(one(sum(sizes), 0.0))
    assert type(joined["pair"]) is Pair
    assert type(joined["frozen"]) is Frozen
    assert isinstance(joined["array"], np.ndarray)


def test_a_part_of_the_rows() -> None:
    assert flat(replay.take_rows(one(5, 0.0), range(1, 4))) == flat(one(3, 1.0))


def detector(n: int, boxes: int) -> tuple[list[Any], list[Any]]:
    images = [torch.zeros(3, 4, 4 + i) for i in range(n)]
    return images, [{"boxes": torch.zeros(boxes + i, 4), "label": torch.tensor(i)} for i in range(n)]


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 1)])
def test_lists_of_samples_of_their_own_size(sizes: tuple[int, int]) -> None:
    images, targets = replay.join_batches([detector(n, 1) for n in sizes])
    assert [image.shape[-1] for image in images] == [4 + i for n in sizes for i in range(n)]
    assert len(targets) == sum(sizes)
    assert replay.count_rows((images, targets)) == sum(sizes)
    assert len(replay.take_rows((images, targets), [0, 1])[1]) == 2


def test_batches_of_two_loaders_are_joined_and_cut_loader_by_loader() -> None:
    counts: list[Any] = [[4, 2], [2, 2]]  # of each rank, of each loader
    batches = [{"large": one(4, 0.0), "small": one(2, 0.0)}, {"large": one(2, 4.0), "small": one(2, 2.0)}]
    assert [replay.count_loader_rows(batch, [4, 2]) for batch in batches] == counts
    joined = replay.join_batches(batches, counts)
    assert flat(joined) == flat({"large": one(6, 0.0), "small": one(4, 0.0)})
    part = replay.join_batches(batches, counts, replay.even_rows(1, 2))
    assert flat(part) == flat({"large": one(3, 3.0), "small": one(2, 2.0)})


def test_rows_of_two_ranks_are_exchanged_loader_by_loader() -> None:
    batches = [{"large": one(4, 0.0), "small": one(2, 0.0)}, {"large": one(2, 10.0), "small": one(2, 20.0)}]
    exchanged = replay.join_batches(batches, [[4, 2], [2, 2]], replay.exchanged_rows)
    assert exchanged["large"]["x"].tolist() == [0, 11, 2, 3]
    assert exchanged["small"]["names"] == ["row 0", "row 21"]
    # a loader that has come to its end gives None
    exchanged = replay.join_batches([{"large": one(4, 0.0), "small": None}] * 2, [[4, None]] * 2, replay.exchanged_rows)
    assert exchanged["large"]["x"].tolist() == [0, 1, 2, 3]
    assert exchanged["small"] is None


def test_stored_batches_come_back_and_have_a_digest(tmp_path: Path) -> None:
    batch = one(3, 0.0)
    replay.save_batch(batch, tmp_path / "b")
    back = replay.load_batch(tmp_path / "b")
    assert flat(back) == flat(batch)
    assert replay.batch_digest(back) == replay.batch_digest(batch)
    back["views"][1][0] = 9.0
    assert replay.batch_digest(back) != replay.batch_digest(batch)
