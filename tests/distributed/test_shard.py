"""The tag of a class-sharded parameter: set by a loss, read by strategy and checks, kept by copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_ddp_losses.sharding import ClassShard
from tests.doors import shard_of, tag_shard


def test_a_tag_is_read_back_and_survives_deepcopy_of_its_module_and_moves() -> None:
    module = nn.Linear(3, 2)
    assert shard_of(module.weight) is None
    tag_shard(module.weight, ClassShard(start=0, stop=2, num_classes=4, dim=1))
    tag_shard(module.weight, ClassShard(0, 2, 4))
    for again in (module, copy.deepcopy(module), module.double(), module.to("cpu")):
        assert shard_of(again.weight) == ClassShard(0, 2, 4, dim=0)
        assert shard_of(again.bias) is None


def test_a_shard_survives_pickle_and_cannot_change() -> None:
    shard = ClassShard(1, 2, 3)
    assert pickle.loads(pickle.dumps(shard)) == shard
    with pytest.raises(AttributeError):
        shard.start = 0  # type: ignore[misc]


@pytest.mark.parametrize("bounds", [(0, 0, 0), (3, 3, 3), (0, 3, 3)])
def test_empty_and_full_blocks_are_fine(bounds: tuple[int, int, int]) -> None:
    ClassShard(*bounds)


@pytest.mark.parametrize(("classes", "world"), [(7, 3), (4, 3), (9, 2), (5, 5), (1, 1)])
def test_blocks_are_those_of_torch_chunk(classes: int, world: int) -> None:
    whole = torch.arange(2 * classes * 3).view(2, classes * 3)
    shards = [ClassShard.of_rank(classes, world, rank, dim=1, per_class=3) for rank in range(world)]
    parts = [shard.own_part(whole) for shard in shards]
    assert torch.equal(torch.cat(parts, 1), whole)
    sizes = [len(part) for part in torch.arange(classes).chunk(world)]
    assert [shard.classes for shard in shards] == sizes + [0] * (world - len(sizes))
    assert {shard.whole_shape(part) for shard, part in zip(shards, parts, strict=True)} == {tuple(whole.shape)}
