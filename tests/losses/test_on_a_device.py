"""What losses do on an accelerator, over several ranks: numbers that stay on the device, rows that are not listed.

The CPU takes those ways here, so that ranks can be compared with one process; ``tests/pretended`` runs them on a device.
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

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.losses import partial_sums, sharded_weight
from lightning_ddp_losses.testing import RankPool
from tests.doors import evaluator, handshake, inputs
from tests.each_rank import each_rank
from tests.losses import harness, sharded_cases
from tests.losses.cases import PML
from tests.losses.harness import SPLITS, Case
from tests.losses.torch_cases import TORCH
from tests.oracle import Found, Place, graded, parity
from tests.refusals import refusals
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
    splits, found = SPLITS[dist.get_world_size()], {}
    with as_on_a_device():
        for name, (case, mode) in CASES.items():
            found[name] = harness.in_modes(case, splits, [mode])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_that_stay_on_the_device(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, losses_on_a_rank)
    for name, (case, _) in CASES.items():
        harness.check(case, [result[name] for result in results], SPLITS[world_size])


def class_sharded(place: Place, case: sharded_cases.Case) -> Found:
    with as_on_a_device():
        return sharded_cases.play(place, case)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_that_are_not_listed(pool: RankPool, world_size: int) -> None:
    names = [name for name in sharded_cases.CASES if "chunks" in name or "mined" in name]
    sharded_cases.assert_as_one_process(pool, world_size, names, class_sharded)


def few_classes(place: Place) -> Found:
    """Four classes over three ranks leave one without any."""
    rows = harness.global_rows()
    embeddings, labels = place.leaf("", rows["targets"]), place.own(rows["labels"]) % 4
    torch.manual_seed(2)
    plain = pml.ArcFaceLoss(4, harness.DIM).double()
    loss = plain if place.alone else ClassShardedLoss(plain)
    with as_on_a_device():
        value = loss(embeddings, labels)
    (weight,) = loss.parameters()
    assert weight.shape[1] == (4 if place.alone else [2, 2, 0][place.rank])
    return place.graded(value, weight=weight)


def test_a_rank_without_classes(pool: RankPool) -> None:
    parity(pool, few_classes, [4, 1, 7], shards=lambda _: {"weight": 1})


@each_rank(2)
def test_siglip() -> None:
    """Value and gradients of SigLIP: through the hosts, then on the device."""
    torch.manual_seed(dist.get_rank())
    images, texts = torch.randn(2, 3, 4, dtype=torch.float64)
    found = []
    for block in (contextlib.nullcontext(), as_on_a_device()):
        leaf, loss = images.clone().requires_grad_(), SigLipLoss().double()
        with block:
            value = loss(leaf, texts)
        found.append(graded(value, leaf=leaf, loss=loss))
    through_hosts, on_device = found
    torch.testing.assert_close(on_device, through_hosts, rtol=1e-12, atol=1e-14)


class WrongAtTheEnd(Job):
    """Its last batch has a label that no class has, on rank 1; ``wrong_at`` is the batch."""

    wrong_at = TASK.steps - 1

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        wrong = (index == self.wrong_at) * dist.get_rank() * 100
        return super().objective(features, labels + wrong, index)


def fit_with_wrong_labels(rank: int) -> None:
    with mock.patch.object(inputs, "on_host", return_value=False):
        fit(WrongAtTheEnd)


REFUSED = {"labels of the last step": (fit_with_wrong_labels, (f"labels of call {TASK.steps}", "got 1"), "InputError")}


test_what_is_found_at_the_end_ends_the_fit = refusals(__name__, "REFUSED")


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
