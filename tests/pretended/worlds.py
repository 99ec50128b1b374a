"""What a call costs on two ranks: launches, waits and uploads of every way that ranks exchange, and the numbers of the CPU.

Two ranks over gloo, whose tensors travel through the host, which waits for them; and two whose collectives carry the device's tensors,
as NCCL does, where no line of ours waits. Each rank is a fork of one process with the device and has half of the rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    GlobalBatchMiner,
    InputError,
    RankMismatchError,
    SigLipLoss,
    SyncBatchNorm,
    accumulation_window,
    differentiable,
    global_mean,
    global_rows,
)
from tests.doors import map_tensors
from tests.losses.rows_cases import barlow_of_torch
from tests.pretended import backend, ranks
from tests.pretended.devices import Counting, Device
from tests.pretended.fits import handshakes
from tests.pretended.forks import write_found
from tests.pretended.runs import (
    ROWS,
    WIDTH,
    Bound,
    Found,
    Mined,
    by_rows,
    classes_of_rows,
    measure,
    pairs_of_rows,
    rows,
    two_columns,
    two_towers,
)

BACKENDS = {"as NCCL": True, "gloo": False}  # and whether it carries the device's tensors
WORLD = 2


class Window(nn.Module):
    """An accumulation window of two micro-batches: a linear model and a loss.

    Args:
        loss: Of embeddings and labels.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = nn.Linear(WIDTH, WIDTH), loss

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        modules = [self.loss] if isinstance(self.loss, nn.Module) else []
        total = rows.new_zeros(())
        with accumulation_window(self.model, *modules, micro_batches=2) as window:
            for part, own in zip(rows.detach().split(len(rows) // 2), labels.split(len(rows) // 2), strict=True):
                with window.micro_batch():
                    value = self.loss(self.model(part), own)
                total += value.detach()
                value.backward()
                backend.catch_up()  # what one micro-batch has noted arrives before the next
        return total


def mean_of_squares(rows: Tensor, labels: Tensor) -> Tensor:
    return global_mean(rows.square().sum(), len(rows))


def with_stats(loss: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    """Makes a loss that records what it counts."""
    return lambda: GlobalBatchLoss(loss(collect_stats=True), mode="rows")


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH))
    SyncBatchNorm().apply(model)
    return model


def elements(loss: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: GlobalBatchLoss(loss())


def class_sharded() -> nn.Module:
    return ClassShardedLoss(pml.ArcFaceLoss(256, WIDTH))


def proxy_nca(**options: float) -> nn.Module:
    return ClassShardedLoss(pml.ProxyNCALoss(256, WIDTH, **options))


def mined(loss: Callable[[], nn.Module], *, over_all_ranks: bool = False) -> Callable[[], nn.Module]:
    """Makes a loss of what a miner names, over the rows of all ranks or of its own."""

    def make() -> nn.Module:
        miner = miners.MultiSimilarityMiner()
        return Mined(loss(), GlobalBatchMiner(miner) if over_all_ranks else miner)

    return make


def arcface() -> nn.Module:
    return pml.ArcFaceLoss(256, WIDTH)


def squared_error() -> nn.Module:
    return differentiable(torchmetrics.MeanSquaredError())


def pearson() -> nn.Module:
    return differentiable(torchmetrics.PearsonCorrCoef())


def ntxent(**options: bool) -> nn.Module:
    return pml.NTXentLoss(reducer=reducers.MeanReducer(**options))


def contrastive(**options: bool) -> nn.Module:
    return pml.ContrastiveLoss(reducer=reducers.AvgNonZeroReducer(**options))


def vicreg(first: Tensor, second: Tensor) -> Tensor:
    """VICReg from one covariance matrix a view, whose diagonal is the variance."""
    value = 25 * F.mse_loss(first, second)
    for view in (first, second):
        centred = view - view.mean(0)
        covariance = centred.T @ centred / (len(view) - 1)
        variance = covariance.diagonal()
        value = value + 12.5 * (1 - (variance + 1e-4).sqrt()).relu().mean()
        value = value + (covariance - variance.diag()).square().sum() / view.shape[1]
    return value


def formula(function: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    """Makes a loss whose rows stay on their rank. From the second call on, its sums need no handshake."""
    return lambda: GlobalBatchLoss(function, mode="rows")


# At 256 rows x 32 on each of two ranks, from the third call on: as NCCL, and the waits over gloo, through which all travels by the host.
# A window is two micro-batches with their backward. Our waits as NCCL: Circle's list of pairs (a list's length is known to the host); what
# a miner names, of which this rank's positives, its negatives and each row's are counted, tuples of one rank are looked at, and in row
# tiles whether all ranks have enough; once a micro-batch how many targets a cross entropy counts, which the host divides by; and what
# `collect_stats` records, which is numbers of the host; and a formula's plain tensors and whether a rank has left its list, at its end. All
# others are PML's and torchmetrics' own.
WORLDS: dict[str, tuple[Bound, int]] = {
    "SupCon, tiles": (Bound(by_rows(pml.SupConLoss), pairs_of_rows, 71, 0, 0, messages=2), 4),
    "NTXent, tiles": (Bound(by_rows(pml.NTXentLoss), pairs_of_rows, 89, 0, 0), 4),
    "MultiSimilarity, tiles": (Bound(by_rows(pml.MultiSimilarityLoss), pairs_of_rows, 82, 0, 0), 4),
    "Contrastive, tiles": (Bound(by_rows(pml.ContrastiveLoss), pairs_of_rows, 85, 0, 0), 4),
    "Triplet, tiles": (Bound(by_rows(pml.TripletMarginLoss), classes_of_rows, 94, 0, 0), 4),
    "Circle, row tiles": (Bound(by_rows(pml.CircleLoss), pairs_of_rows, 168, 12, 0, own_waits=1), 15),
    "MultiSimilarity, mined over all ranks": (
        Bound(mined(by_rows(pml.MultiSimilarityLoss), over_all_ranks=True), classes_of_rows, 207, 7, 0, own_waits=3),
        11,
    ),
    "MultiSimilarity, mined on each rank": (
        Bound(mined(by_rows(pml.MultiSimilarityLoss)), classes_of_rows, 249, 8, 1, own_waits=4),
        11,
    ),
    "Circle, row tiles, mined on each rank": (
        Bound(mined(by_rows(pml.CircleLoss)), classes_of_rows, 256, 20, 2, own_waits=5),
        23,
    ),
    "ArcFace, class-sharded, mined on each rank": (
        Bound(mined(class_sharded), classes_of_rows, 165, 5, 0, own_waits=1),
        8,
    ),
    "ProxyNCA, class-sharded": (Bound(proxy_nca, pairs_of_rows, 124, 0, 0), 3),
    "ArcFace, elements": (Bound(elements(arcface), pairs_of_rows, 115, 2, 1), 3),
    "cross entropy, elements": (Bound(elements(nn.CrossEntropyLoss), classes_of_rows, 23, 0, 0), 1),
    "NCA, replicated": (Bound(elements(pml.NCALoss), pairs_of_rows, 92, 4, 0), 5),
    "ArcFace, class-sharded": (Bound(class_sharded, pairs_of_rows, 120, 0, 0, messages=2), 3),
    "CLIP": (Bound(ClipLoss, two_towers, 95, 0, 0, messages=2), 3),
    "SigLIP": (Bound(SigLipLoss, two_towers, 57, 0, 0, messages=2), 3),
    "CLIP, ring": (Bound(lambda: ClipLoss(gather="ring"), two_towers, 135, 0, 0), 5),
    "SigLIP, ring": (Bound(lambda: SigLipLoss(gather="ring"), two_towers, 74, 0, 0), 4),
    "VICReg, a formula": (Bound(formula(vicreg), two_towers, 134, 2, 3, own_waits=2, messages=2), 6),
    "Barlow, a formula": (Bound(formula(barlow_of_torch), two_towers, 201, 2, 3, own_waits=2, messages=2), 6),
    "batch norm": (Bound(batch_norm, lambda: (rows(),), 51, 0, 0), 2),
    "MeanSquaredError": (Bound(squared_error, two_columns, 25, 0, 0), 1),
    "PearsonCorrCoef": (Bound(pearson, two_columns, 331, 10, 0), 11),
    "reduction": (Bound(ranks.reduced, pairs_of_rows, 30, 0, 0), 3),
    "window, ArcFace in elements": (Bound(lambda: Window(elements(arcface)()), pairs_of_rows, 246, 4, 2), 6),
    "window, cross entropy": (
        Bound(lambda: Window(elements(nn.CrossEntropyLoss)()), classes_of_rows, 67, 2, 0, own_waits=2),
        2,
    ),
    "window, class-sharded": (Bound(lambda: Window(class_sharded()), pairs_of_rows, 290, 0, 0), 6),
    "window, class-sharded, rows without a loss": (
        Bound(lambda: Window(proxy_nca(softmax_scale=100)), pairs_of_rows, 300, 2, 0, own_waits=2),
        8,
    ),
    "window, global_mean": (Bound(lambda: Window(mean_of_squares), pairs_of_rows, 51, 0, 0), 2),
    "stats, mean": (Bound(with_stats(ntxent), pairs_of_rows, 157, 3, 1, own_waits=3), 4),
    "stats, average of the non-zero": (Bound(with_stats(contrastive), pairs_of_rows, 153, 3, 1, own_waits=3), 4),
}


@contextlib.contextmanager
def _with_messages(counting: Counting) -> Iterator[Counter[str]]:
    """Counts the handshakes of a block too."""
    before = handshakes()
    with counting() as counts:
        yield counts
    counts["messages"] = handshakes() - before


def _measured(device: Device, name: str) -> Found:
    """Runs one row of ``WORLDS`` with this rank's part of the rows; what it found was counted at the third call."""
    bound, _ = WORLDS[name]
    start = dist.get_rank() * ROWS // WORLD

    def own_part(tensor: Tensor) -> Tensor:
        part = tensor[start : start + ROWS // WORLD].clone()
        return part.requires_grad_(part.is_floating_point())

    counted = replace(device, counting=partial(_with_messages, device.counting))
    return measure(counted, bound.make, map_tensors(own_part, bound.inputs()), calls=3)


def _refusal(device: Device) -> str:
    """Gives a loss tuples of other rows than this rank's; returns what it says."""
    embeddings, labels = (device.to_device(tensor[: ROWS // WORLD]) for tensor in classes_of_rows())
    anchors, others = labels.new_tensor([0, 1]), labels.new_tensor([1, ROWS // WORLD])
    try:
        by_rows(pml.MultiSimilarityLoss)()(embeddings, labels, (anchors, others, anchors, others))
    except InputError as error:
        return str(error)
    return "nothing"


def _steps_but(place: int, rows: Tensor) -> Tensor:
    """Three sums in turn. Before the one of this number the formula reads another sum."""

    def leave(number: int) -> None:
        if number == place:
            rows.sum().item()

    leave(0)
    centred = rows - rows.mean(0)
    leave(1)
    scaled = centred / (1 + centred.square().mean(0))
    leave(2)
    return (scaled.T @ scaled).square().mean()


def _departures(device: Device) -> list[str]:
    """Lets rank 1 leave a formula's list in the third call, at each of its places. Returns values, and whether the error names the line."""
    found = []
    for place in range(3):
        for call in range(5):
            steps = partial(_steps_but, place if call == 2 and dist.get_rank() == 1 else -1)
            rows = device.to_device(two_towers()[0].detach()[: ROWS // WORLD])
            try:
                value = global_rows(steps, rows, name=f"departure {place}")
                outcome = f"{float(device.to_host(value)):.5g}"
            except RankMismatchError as error:
                outcome = f"{'rows.sum().item()' in str(error)}"
            found.append(outcome)
    return found


def _as_rank(device: Device, rank: int) -> dict[str, Any]:
    """Returns by name what this rank found."""
    found: dict[str, Any] = {name: asdict(_measured(device, name)) for name in WORLDS}
    found["refusal"] = _refusal(device)
    found["departures"] = _departures(device)
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything over both backends, each rank a fork of this process; writes by backend and name what each rank found."""
    write_found(path, partial(_as_rank, device), {name: (WORLD, carries) for name, carries in BACKENDS.items()})
