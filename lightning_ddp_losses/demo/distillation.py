"""Learning without labels: a student predicts the output of a running mean of itself, the teacher, for another view of the image (DINO).

| step | over the rows of all ranks |
|---|---|
| targets of the teacher | ``ssl.Center`` or ``ssl.sinkhorn`` |
| cross entropy of the student | ``global_mean`` |
| spread of the embeddings | ``ssl.koleo`` |

The teacher needs no synchronisation: it is a running mean of weights that are equal on every rank. The views follow from the seed and
the place of an image in the global batch, so they are those of one process on any number of ranks.

Source: Caron et al., DINO (2021), arXiv 2104.14294, algorithm 1; Oquab et al., DINOv2 (2023), arXiv 2304.07193, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_ddp_losses import ssl
from lightning_ddp_losses.core.compat import is_made_by_command_line
from lightning_ddp_losses.demo.evaluation import HeldOutModule, effective_rank
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.losses.partial_sums import global_mean
from lightning_ddp_losses.samplers.seeded_draw import share

# the largest change of a view: turn (radians), size, shear, move (of half an image), brightness, and the noise of a pixel
_TURN, _SIZE, _SHEAR, _MOVE, _BRIGHTNESS, _NOISE = 0.3, 0.15, 0.2, 0.2, 0.3, 0.1


class PrototypeHead(nn.Module):
    """Cosines (B, K) of projected embeddings and K learned prototypes.

    Args:
        embedding_size: Width of the embeddings.
        prototypes: K.
        hidden: Width of the layer between.
    """

    def __init__(self, embedding_size: int, prototypes: int, hidden: int = 128) -> None:
        super().__init__()
        layers = [nn.Linear(embedding_size, hidden), nn.GELU(), nn.Linear(hidden, embedding_size)]
        self.layers = nn.Sequential(nn.GELU(), *layers)
        self.prototypes = nn.Parameter(torch.randn(prototypes, embedding_size))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compare embeddings (B, D) with the prototypes."""
        return functional.normalize(self.layers(embeddings)) @ functional.normalize(self.prototypes).T


class SelfDistillationModule(HeldOutModule):
    """Trains `encoder` on grey images (B, 1, H, W) without their labels.

    Logged: ``train_loss`` (mean over the epoch), and on validation ``precision_at_1``, ``r_precision``, ``map_at_r`` and
    ``effective_rank`` of the teacher's embeddings of the global held-out set. On test the names begin with ``test_``.

    Args:
        encoder: x -> embeddings (B, embedding_size).
        embedding_size: Width of the embeddings.
        prototypes: Number of prototypes, K.
        targets: ``"center"`` or ``"sinkhorn"``, the method that keeps the teacher from giving all images one prototype.
        student_temperature: Divides the student's cosines.
        teacher_temperature: Divides the teacher's cosines. It is lower, which makes the teacher surer.
        koleo_weight: Weight of the spread of the embeddings.
        teacher_momentum: Share of the former teacher that a step keeps.
        seed: Fixes the views.
        lr: Learning rate.
        optimizer: Makes the optimizer from parameters.

    Example:
        >>> from lightning_ddp_losses.cli import DigitsEncoder
        >>> module = SelfDistillationModule(DigitsEncoder())
        >>> module.embed(module.student, torch.rand(2, 1, 8, 8))[1].shape
        torch.Size([2, 64])
    """

    report_rows = (*HeldOutModule.report_rows, ("effective rank", "effective_rank"))

    def __init__(
        self,
        encoder: nn.Module,
        *,
        embedding_size: int = 32,
        prototypes: int = 64,
        targets: Literal["center", "sinkhorn"] = "center",
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.03,
        koleo_weight: float = 0.02,
        teacher_momentum: float = 0.99,
        seed: int = 0,
        lr: float = 2e-3,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        super().__init__()
        # the command line describes a module by its plain config. Elsewhere its parts are no hyperparameters.
        parts = () if is_made_by_command_line() else ("encoder", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.student = nn.Sequential(encoder, PrototypeHead(embedding_size, prototypes))
        running_mean = get_ema_multi_avg_fn(teacher_momentum)  # type: ignore[no-untyped-call]
        self.teacher = AveragedModel(self.student, multi_avg_fn=running_mean, use_buffers=True).requires_grad_(False)
        self.center = ssl.Center(prototypes)
        self.targets, self.koleo_weight, self.seed = targets, koleo_weight, seed
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.lr, self.make_optimizer = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Embed images with the teacher's encoder."""
        return self.embed(self.teacher.module, x)[0]

    def embed(self, network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, D) and cosines (B, K) of one of the two networks."""
        encoder, head = network.children()
        embeddings: Tensor = encoder(x)
        return embeddings, head(embeddings)

    def measure(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of all held-out rows, and how many directions they spread over."""
        return {**super().measure(embeddings, labels), "effective_rank": effective_rank(embeddings)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer for the student."""
        return self.make_optimizer(self.student.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch, without its labels."""
        images = batch[0]
        # 1. two views of each image
        numbers = [self.seed, self.current_epoch, batch_idx]
        views = torch.cat([distorted(images, np.random.default_rng([*numbers, view])) for view in range(2)])
        # 2. both networks
        embeddings, cosines = self.embed(self.student, views)
        with torch.no_grad():
            targets = self._targets(self.embed(self.teacher.module, views)[1])
        # 3. the student's view of an image meets the teacher's other view
        log_student = (cosines / self.student_temperature).log_softmax(1)
        swapped = torch.cat(targets.chunk(2)[::-1])
        cross_entropy = global_mean(-(swapped * log_student).sum(), len(swapped), name="student and teacher")
        loss = cross_entropy + self.koleo_weight * ssl.koleo(embeddings, groups=2)
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(images)
        )
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the teacher towards the student."""
        self.teacher.update_parameters(self.student)

    def _targets(self, cosines: Tensor) -> Tensor:
        """Return the distributions (2B, K) over prototypes that the student is to predict."""
        if self.targets == "sinkhorn":
            return ssl.sinkhorn(cosines, temperature=self.teacher_temperature)
        targets = self.center.softmax(cosines, self.teacher_temperature)
        self.center.update(cosines)
        return targets


def distorted(images: Tensor, random: np.random.Generator) -> Tensor:
    """Return one view of each of this rank's images: turned, scaled, sheared, moved, brighter or darker, and noisy.

    The numbers of all ranks' images are drawn, and each rank keeps those of its images.

    Args:
        images: (B, 1, H, W), as many on every rank.
        random: Generator in the same state on every rank.
    """
    world_size = process_groups.world_size()
    everyone = len(images) * world_size
    own = share(everyone, world_size, process_groups.rank())
    shifts = images.new_tensor(random.uniform(-1, 1, (6, everyone))[:, own])
    noise = images.new_tensor(random.normal(0, _NOISE, (everyone, *images.shape[1:]))[own])
    turn, size, shear, across, down, brightness = shifts
    sine, cosine, size = (_TURN * turn).sin(), (_TURN * turn).cos(), 1 + _SIZE * size
    first = torch.stack([size * cosine, _SHEAR * shear - size * sine, _MOVE * across], 1)
    second = torch.stack([size * sine, size * cosine, _MOVE * down], 1)
    grid = functional.affine_grid(torch.stack([first, second], 1), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    views: Tensor = moved * (1 + _BRIGHTNESS * brightness)[:, None, None, None] + noise
    return views
