"""lightly's losses in `GlobalBatchLoss`: known by their path, computed from moments or in tiles, equal to one process on all rows.

lightly needs torchvision, so its formulas stand here under its paths.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ConfigurationError, GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.lightly_paths import paths_of_lightly
from tests.oracle import Found, Place, normal, parity
from tests.ssl.test_ssl import naive_barlow, naive_vicreg

ROWS, FEATURES = 40, 6


class BarlowTwinsLoss(nn.Module):
    def __init__(self, *, gather_distributed: bool = False) -> None:
        super().__init__()
        self.lambda_param, self.gather_distributed = 5e-3, gather_distributed

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return naive_barlow(z_a, z_b)


class VICRegLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lambda_param, self.mu_param, self.nu_param, self.eps = 25.0, 25.0, 1.0, 1e-4
        self.gather_distributed = False

    def forward(self, z_a: Tensor, z_b: Tensor) -> Tensor:
        return naive_vicreg(z_a.flatten(0, -2), z_b.flatten(0, -2))


class MemoryBank(nn.Module):
    """Like lightly's: without rows, its pointer is memory that nobody has written."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.size = (rows,)
        self.register_buffer("bank", torch.empty(0), persistent=False)
        garbage = 1234 + dist.get_rank() if dist.is_initialized() else 1234
        self.register_buffer("bank_ptr", torch.tensor([garbage]), persistent=False)


class NTXentLoss(nn.Module):
    def __init__(self, temperature: float = 0.5, rows_of_bank: int = 0) -> None:
        super().__init__()
        self.temperature, self.memory_bank = temperature, MemoryBank(rows_of_bank)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        rows = functional.normalize(torch.cat([out0, out1]))
        logits = (rows @ rows.T / self.temperature).fill_diagonal_(-torch.inf)
        return functional.cross_entropy(logits, torch.arange(len(rows)).roll(len(out0)))


class DINOLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(FEATURES, dtype=torch.float64))

    def forward(self, teacher_out: list[Tensor], student_out: list[Tensor]) -> Tensor:
        targets = ((torch.stack(teacher_out).detach() - self.center) / 0.04).softmax(-1)
        log_student = (torch.stack(student_out) / 0.1).log_softmax(-1)
        loss = -torch.einsum("tbd,sbd->ts", targets, log_student).fill_diagonal_(0).sum() / (2 * len(teacher_out[0]))
        self.center.lerp_(torch.cat(teacher_out).mean(0).detach(), 0.1)
        return loss


CLASSES = (BarlowTwinsLoss, VICRegLoss, NTXentLoss, DINOLoss)

# the loss, the mode that it runs in, and whether it takes lists; the calls of each train two steps
CASES: dict[str, tuple[Any, str, bool]] = {
    "Barlow Twins": (BarlowTwinsLoss, "moments", False),
    "VICReg": (VICRegLoss, "moments", False),
    "NT-Xent": (NTXentLoss, "rows", False),
    "NT-Xent with a memory bank": (lambda: NTXentLoss(rows_of_bank=8), "replicated", False),
    "DINO": (DINOLoss, "replicated", True),
}


def views() -> list[Tensor]:
    return [*normal(2, ROWS, FEATURES, seed=1)]


def play(place: Place, name: str) -> Found:
    """Values of two calls, and the gradients of their rows."""
    make, mode, takes_lists = CASES[name]
    plain, found = make(), {}
    with paths_of_lightly(*CLASSES):
        loss = plain if place.alone else GlobalBatchLoss(plain)
        assert place.alone or loss.exact_modes()[0] == mode
        for step in range(2):
            plain.temperature = 0.5 - 0.2 * step  # read in every call
            leaves = [place.leaf(f"{view} of step {step}", rows) for view, rows in enumerate(views())]
            value = loss(leaves, leaves) if takes_lists else loss(*leaves)
            found |= place.graded(value) | {f"value {step}": value.detach()}
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_process(pool: RankPool, name: str) -> None:
    for sizes in ([20, 20], [29, 11]):
        parity(pool, play, sizes, name, rtol=1e-10)


def test_what_gathers_by_itself_is_refused() -> None:
    words = r"gather_distributed.*expected False in GlobalBatchLoss.*Make the loss with gather_distributed=False"
    with paths_of_lightly(*CLASSES), pytest.raises(ConfigurationError, match=f"(?s){words}"):
        GlobalBatchLoss(BarlowTwinsLoss(gather_distributed=True))
