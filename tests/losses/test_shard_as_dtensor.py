"""A class shard is read by torch's own tools as a `DTensor` in the same memory: saved, loaded over other ranks, clipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from lightning_ddp_losses import ClassShardedLoss
from lightning_ddp_losses.testing import RankPool
from tests.doors import process_groups
from tests.each_rank import each_rank
from tests.oracle import assert_close, normal

CLASSES, DIM, ROWS = 5, 4, 12  # on 4 ranks: 2, 2, 1 and 0 classes
CENTERS = {"ArcFaceLoss": 1, "ProxyNCALoss": 1, "SubCenterArcFaceLoss": 3, "SoftTripleLoss": 2}


def plain(name: str, seed: int = 0) -> pml.BaseMetricLossFunction:
    torch.manual_seed(seed)
    option = {"SubCenterArcFaceLoss": "sub_centers", "SoftTripleLoss": "centers_per_class"}.get(name)
    options = {option: CENTERS[name]} if option else {}
    return getattr(pml, name)(num_classes=CLASSES, embedding_size=DIM, **options).double()


def rows_of(name: str, weight: Tensor) -> Tensor:
    """The weight of one process as a DTensor's whole: classes first."""
    rows = weight if name == "ProxyNCALoss" else weight.t()
    return rows.reshape(CLASSES, CENTERS[name], DIM) if CENTERS[name] > 1 else rows


def whole_weight(name: str) -> Tensor:
    (weight,) = plain(name).parameters()
    return rows_of(name, weight.detach())


def save(name: str, folder: str) -> Tensor:
    loss = ClassShardedLoss(plain(name))
    weight = loss.weight_as_dtensor()
    assert weight.placements == (Shard(0),)
    assert weight.to_local().data_ptr() == loss.weight.data_ptr(), "a copy"
    dcp.save({"weight": weight}, checkpoint_id=folder)
    return weight.full_tensor()


def load(name: str, folder: str) -> Tensor:
    loss = ClassShardedLoss(plain(name, seed=1))
    dcp.load({"weight": loss.weight_as_dtensor()}, checkpoint_id=folder)
    # what the loss itself has
    return loss.weight_as_dtensor(init_device_mesh("cpu", (dist.get_world_size(),))).full_tensor()


@pytest.mark.parametrize("name", CENTERS)
def test_it_is_saved_and_loaded_over_other_ranks(pool: RankPool, tmp_path: Path, name: str) -> None:
    whole = whole_weight(name)
    for saved in pool.run(3, save, name, str(tmp_path)):
        assert torch.equal(saved, whole)
    for world_size in (2, 4):
        for found in pool.run(world_size, load, name, str(tmp_path)):
            assert torch.equal(found, whole)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    rows = normal(ROWS, DIM, seed=generator)
    return rows, torch.randint(CLASSES, (ROWS,), generator=generator)


def clip(name: str, limit: float) -> tuple[Tensor, Tensor]:
    """The norm that torch finds, and the gradient that it leaves in the loss's own weight."""
    loss, rank, world_size = ClassShardedLoss(plain(name)), dist.get_rank(), dist.get_world_size()
    embeddings, labels = batch()
    loss(embeddings[rank::world_size], labels[rank::world_size]).backward()
    norm = torch.nn.utils.clip_grad_norm_([loss.weight_as_dtensor()], limit)
    left = loss.weight_as_dtensor().grad
    assert left is not None
    assert left.to_local().data_ptr() == loss.weight.grad.data_ptr(), "a copy"
    return norm.full_tensor(), left.full_tensor()


@pytest.mark.parametrize(("name", "world_size"), [("ArcFaceLoss", 2), ("SubCenterArcFaceLoss", 4)])
def test_its_gradient_is_clipped_by_torch(pool: RankPool, name: str, world_size: int) -> None:
    loss = plain(name)
    loss(*batch()).backward()
    (weight,) = loss.parameters()
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.01)
    expected = {"norm": norm, "gradient": rows_of(name, weight.grad)}
    for found in pool.run(world_size, clip, name, 0.01):
        assert_close(dict(zip(expected, found, strict=True)), expected)


@each_rank(4)
def test_parts_of_the_world_are_replicas() -> None:
    name = "SubCenterArcFaceLoss"
    loss = ClassShardedLoss(plain(name), group=process_groups.subgroup_of_size(2))
    over_own_part = loss.weight_as_dtensor()
    weight = loss.weight_as_dtensor(init_device_mesh("cpu", (2, 2)))
    assert weight.placements == (Replicate(), Shard(0))
    assert torch.equal(over_own_part.full_tensor(), weight.full_tensor())
    assert torch.equal(weight.full_tensor(), whole_weight(name))


def on_other_ranks() -> None:
    ClassShardedLoss(plain("ArcFaceLoss")).weight_as_dtensor(DeviceMesh("cpu", [0, 2, 1]))
