"""What losses do on an accelerator, over several ranks: numbers that stay on the device, rows that are not listed.

The CPU takes those ways here, so that ranks can be compared with one process; ``tests/test_pretend_device.py`` runs them on a device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss, InputError, SigLipLoss
from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.losses import partial_sums, sharded_weight
from lightning_ddp_losses.losses.tiled import evaluator
from lightning_ddp_losses.testing import RankPool
from tests.losses import harness, sharded_cases
from tests.losses.cases import PML
from tests.losses.harness import SPLITS, Case
from tests.losses.torch_cases import TORCH
from tests.oracle import assert_close
from tests.strategies.jobs import TASK, Job, fit

ROWS = ["ContrastiveLoss", "MultiSimilarityLoss", "NTXentLoss", "SupConLoss", "TripletMarginLoss", "SelfSupervisedLoss"]
ELEMENTS = [
    "ArcFaceLoss",
    "SoftTripleLoss",
    "nn.CrossEntropyLoss, all three",
    "nn.MSELoss, sum",
    "nn.KLDivLoss, batchmean",
]
CASES: dict[str, tuple[Case, str]] = {
    **{name: (PML[name], "rows") for name in ROWS},
    **{name: ({**PML, **TORCH}[name], "elements") for name in ELEMENTS},
}


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """Inside the block numbers of the ranks stay tensors, and no row is listed."""
    with (
        mock.patch.object(partial_sums, "travels_on_device", return_value=True),
        mock.patch.object(sharded_weight, "waits_to_list", return_value=True),
    ):
        yield


def losses_on_a_rank() -> dict[str, dict[str, dict[str, Tensor]]]:
    """By case, "split, mode" and name: value and gradients."""
    world, found = dist.get_world_size(), {}
    with as_on_a_device():
        for name, (case, mode) in CASES.items():
            splits = SPLITS[world].items()
            found[name] = {f"{split}, {mode}": harness.on_ranks(case, sizes, mode) for split, sizes in splits}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_that_stay_on_the_device(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, losses_on_a_rank)
    for name, (case, _) in CASES.items():
        harness.check(case, [result[name] for result in results], world_size)


def class_sharded_on_a_rank(names: list[str]) -> dict[str, dict[str, Tensor]]:
    with as_on_a_device():
        return sharded_cases.measure(names)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_are_not_listed(pool: RankPool, world_size: int) -> None:
    names = [name for name in sharded_cases.CASES if "chunks" in name or "mined" in name]
    results = pool.run(world_size, class_sharded_on_a_rank, names)
    for name in names:
        case = sharded_cases.CASES[name]
        for split, sizes in SPLITS[world_size].items():
            found = [result[f"{name}; {split}"] for result in results]
            truth = sharded_cases.judge(case, sizes)
            weight = sharded_cases.whole([each.pop("weight") for each in found], case.name)
            assert_close({"weight": weight}, {"weight": truth.pop("weight")})
            harness.compare(harness.mean_over_ranks(found), truth, f"{name}; {split}")


def few_classes_on_a_rank(sizes: list[int]) -> dict[str, Tensor]:
    """Four classes over three ranks leave one without any."""
    rows = harness.own_rows(sizes, dist.get_rank())
    embeddings, labels = rows["targets"].clone().requires_grad_(), rows["labels"] % 4
    torch.manual_seed(2)
    loss = ClassShardedLoss(pml.ArcFaceLoss(4, harness.DIM).double())
    with as_on_a_device():
        value = loss(embeddings, labels)
    value.backward()
    return {"value": value.detach(), "embeddings": embeddings.grad, "weight": loss.weight.grad}


def test_a_rank_without_classes(pool: RankPool) -> None:
    sizes = [4, 1, 7]
    found = pool.run(3, few_classes_on_a_rank, sizes)
    assert [rank["weight"].shape[1] for rank in found] == [2, 2, 0]
    # one process
    rows = harness.global_rows()
    embeddings = rows["targets"].clone().requires_grad_()
    torch.manual_seed(2)
    loss = pml.ArcFaceLoss(4, harness.DIM).double()
    value = loss(embeddings, rows["labels"] % 4)
    value.backward()
    weight = torch.cat([rank["weight"] for rank in found], 1)
    # the mean over ranks is the encoder's, as DDP takes it
    own = torch.cat([rank["embeddings"] for rank in found]) / 3
    assert_close(
        {"value": found[2]["value"], "weight": weight, "embeddings": own},
        {"value": value.detach(), "weight": loss.W.grad, "embeddings": embeddings.grad},
    )


def two_ways(rows: int) -> list[list[Tensor]]:
    """Value and gradients of SigLIP: through the hosts, then on the device."""
    torch.manual_seed(dist.get_rank())
    images, texts = torch.randn(2, rows, 4, dtype=torch.float64)
    found = []
    for block in (contextlib.nullcontext(), as_on_a_device()):
        leaf, loss = images.clone().requires_grad_(), SigLipLoss().double()
        with block:
            value = loss(leaf, texts)
        value.backward()
        found.append([value.detach(), leaf.grad, loss.logit_scale.grad, loss.logit_bias.grad])
    return found


def test_siglip(pool: RankPool) -> None:
    for through_hosts, on_device in pool.run(2, two_ways, 3):
        for expected, got in zip(through_hosts, on_device, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


class WrongAtTheEnd(Job):
    """Its last batch has a label that no class has, on rank 1; ``wrong_at`` is the batch."""

    wrong_at = TASK.steps - 1

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        wrong = (index == self.wrong_at) * dist.get_rank() * 100
        return super().objective(features, labels + wrong, index)


def fit_with_wrong_labels() -> str:
    with mock.patch.object(inputs, "on_host", return_value=False):
        try:
            fit(WrongAtTheEnd)
        except InputError as error:
            return str(error)
    return "no error"


def test_labels_of_the_last_step_end_the_fit(pool: RankPool) -> None:
    first, second = pool.run(2, fit_with_wrong_labels)
    assert first == second
    assert f"labels of call {TASK.steps}" in first
    assert "got 1" in first


def handshake_sizes(rows: int) -> set[int | None]:
    """Sizes of the handshakes that a tiled loss agrees on, with its numbers on a device."""
    sizes = set()
    real = handshake.all_gather

    def recorded(*args: object, handshake_bytes: int | None = None, **kwargs: object) -> list[bytes]:
        sizes.add(handshake_bytes)
        return real(*args, handshake_bytes=handshake_bytes, **kwargs)  # type: ignore[arg-type]

    embeddings = torch.randn(rows, 4, requires_grad=True)
    with (
        as_on_a_device(),
        mock.patch.object(evaluator, "travels_on_device", return_value=True),
        mock.patch.object(handshake, "all_gather", recorded),
    ):
        GlobalBatchLoss(pml.SupConLoss(), mode="rows")(embeddings, torch.arange(rows).flip(0) % 3).backward()
    return sizes - {None}


def test_handshakes_are_not_filled_up_for_statistics_that_stay_on_the_device(pool: RankPool) -> None:
    few, many = (pool.run(2, handshake_sizes, rows, fresh=True) for rows in (6, 600))
    assert few == many
    assert all(sizes for sizes in few)
