"""Statistics of self-supervised losses over the rows of all ranks, equal to one process on the global batch, with little communication.

| function | for | ranks exchange |
|---|---|---|
| ``sinkhorn`` | SwAV, DINOv2: balanced assignments to prototypes | 2 K numbers per iteration |
| ``Center`` | DINO: the running mean of the teacher's outputs | D numbers |
| ``koleo`` | DINOv2: spread of the rows | all rows, once |
| ``cross_correlation``, ``barlow_twins`` | Barlow Twins | D x D numbers |
| ``moments``, ``vicreg`` | VICReg, whitening | D x D numbers |

An EMA teacher does not need any change, because it is a function of parameters that are equal on every rank. For a momentum queue, use
pytorch-metric-learning's ``CrossBatchMemory`` in a ``GlobalBatchLoss``.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``D`` features, ``K`` prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import gather_with_grad, sum_with_grad
from lightning_ddp_losses.distributed.global_values import name_value, outside_window
from lightning_ddp_losses.distributed.messages import with_name
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import all_gather_rows, max_over_ranks
from lightning_ddp_losses.errors import InputError, expect, expect_count
from lightning_ddp_losses.losses.moments import (
    Moments,
    barlow_twins,
    cross_correlation,
    meet,
    moments,
    vicreg,
)
from lightning_ddp_losses.losses.partial_sums import global_mean
from lightning_ddp_losses.losses.tile_results import TileResults

__all__ = ["Center", "Moments", "barlow_twins", "cross_correlation", "koleo", "moments", "sinkhorn", "vicreg"]

_TILE_BYTES = 64 << 20


# ---------------------------------------------------------------------- targets of a teacher, without a gradient


@eager_recursive
@torch.no_grad()
def sinkhorn(
    logits: Tensor, *, temperature: float, iterations: int = 3, name: str | None = None, group: Group = None
) -> Tensor:
    """Assign rows to prototypes so that all prototypes get the same weight over the rows of all ranks.

    Equivalent to: Sinkhorn-Knopp on ``exp(logits / temperature)`` of the rows of all ranks in one process. It is computed with
    logarithms, so that large logits at a small temperature neither overflow nor vanish.

    Args:
        logits: (B, K), floating point and finite. Half precision is computed in float32.
        temperature: Positive number that divides the logits.
        iterations: Number of normalisations of both prototypes and rows.
        name: Name that is equal on all ranks (``moments``).
        group: Process group. None is the world.

    Returns:
        (B, K), the assignments of this rank's rows. Each row sums to 1. They do not have a gradient.

    Communication:
        One handshake. Per iteration an all-reduce of K maxima and one of K sums. The host waits for the device once.

    Raises:
        ConfigurationError: on every rank, for a temperature that is not positive, or fewer than one iteration.
        InputError: on every rank, for logits that are not (B, K) or not finite, and if all ranks are without rows.
        RankMismatchError: on every rank, if K, dtype, temperature or number of iterations differ.

    Source:
        Caron et al., SwAV (2020), arXiv 2006.09882, section 3.1. Oquab et al., DINOv2 (2023), arXiv 2304.07193.

    Example:
        >>> import torch
        >>> sinkhorn(torch.eye(2), temperature=0.1).round()
        tensor([[1., 0.],
                [0., 1.]])
    """
    title = with_name("sinkhorn", name)
    with handshake.raising_on_all_ranks(title, group=group):
        expect_positive("sinkhorn: temperature", temperature)
        expect_count("sinkhorn: iterations", iterations)
    options = {"temperature": temperature, "iterations": iterations}
    (rows,), _ = meet(title, {"logits": logits}, options, group)
    scaled = rows / temperature
    # convert any number that is not finite to NaN, which every sum preserves
    scaled = scaled.nan_to_num(torch.nan, torch.nan, torch.nan)
    row_weights = scaled.new_zeros(len(scaled), 1)
    for iteration in range(iterations):
        # 1. each prototype gets the same weight over all rows
        prototype_weights = -_logsumexp_of_all_rows(scaled + row_weights, group)
        if iteration == 0 and not prototype_weights.isfinite().all():
            _refuse_not_finite(logits, group)
        # 2. each row has weight 1
        row_weights = -torch.logsumexp(scaled + prototype_weights, 1, keepdim=True)
    return (scaled + prototype_weights).softmax(1)


def _logsumexp_of_all_rows(values: Tensor, group: Group) -> Tensor:
    """Return the logarithm of the sum of exponentials over the rows of all ranks, (K,)."""
    own = values.amax(0) if len(values) else values.new_full(values.shape[1:], -torch.inf)
    largest = max_over_ranks(own, group)
    return largest + sum_with_grad((values - largest).exp().sum(0), group).log()


def _refuse_not_finite(logits: Tensor, group: Group) -> None:
    """Raise an error on every rank, because all ranks have computed the same sums."""
    number = int((~logits.isfinite()).sum())
    payloads = handshake.all_gather("sinkhorn: numbers that are not finite", {}, str(number).encode(), group=group)
    ranks = [f"{sent.decode()} numbers that are not finite" for sent in payloads]
    raise InputError(
        "sinkhorn: logits",
        expected="finite numbers",
        ranks=ranks,
        collective=True,
        fix="Look for the layer that overflows on these ranks, lower the learning rate, or clip gradients.",
    )


class Center(WithProcessGroup, nn.Module):
    """The running mean of a teacher's outputs over the rows of all ranks, which DINO subtracts.

    A mean of the ranks' means would give more weight to the rows of a small batch. This mean is over rows, and a rank may be without rows.

    Args:
        dim: D, number of outputs.
        momentum: Share of the previous centre that ``update`` keeps, from 0 to 1.
        name: Name in messages. Ranks compare which of several centres they update, by name or by the order of their construction.
        group: Process group. None is the world.

    Attributes:
        center: (D,), a buffer, equal on every rank.

    Example:
        >>> import torch
        >>> center = Center(3)
        >>> outputs = torch.randn(4, 3)
        >>> targets = center.softmax(outputs, temperature=0.04)
        >>> center.update(outputs)
    """

    center: Tensor

    def __init__(self, dim: int, momentum: float = 0.9, *, name: str | None = None, group: Group = None) -> None:
        super().__init__()
        expect_count("Center: dim", dim)
        expect(0 <= momentum <= 1, "Center: momentum", expected="a number from 0 to 1", got=momentum)
        self.momentum = momentum
        self.set_group(group, "Center", name)
        self.register_buffer("center", torch.zeros(dim))

    @eager_recursive
    @torch.no_grad()
    def update(self, outputs: Tensor) -> None:
        """Move the centre towards the mean of the outputs of all ranks.

        Args:
            outputs: (B, D), outputs of the teacher.

        Communication: one handshake and one all-reduce of D numbers.

        Raises:
            InputError: on every rank, for outputs that are not (B, D), and if all ranks are without rows.
            RankMismatchError: on every rank, if D, dtype or momentum differ, or if ranks update different centres.
        """
        must_match = {"momentum": self.momentum, "which": self._instance}
        (rows,), counts = meet("Center", {"outputs": outputs}, must_match, self._group, features=len(self.center))
        mean = sum_with_grad(rows.sum(0), self._group) / sum(counts)
        self.center.lerp_(mean.to(self.center.dtype), 1 - self.momentum)

    def softmax(self, logits: Tensor, temperature: float) -> Tensor:
        """Return ``softmax((logits - center) / temperature)``, (B, D), at least in float32. Communication: none."""
        expect_positive("Center: temperature", temperature)
        wide = logits.to(precision.compute_dtype([logits, self.center]))
        return ((wide - self.center) / temperature).softmax(-1)

    def extra_repr(self) -> str:
        """Show the size and the momentum."""
        return f"dim={len(self.center)}, momentum={self.momentum}"


# ---------------------------------------------------------------------- spread of the rows


@eager_recursive
def koleo(rows: Tensor, *, groups: int = 1, eps: float = 1e-8, name: str | None = None, group: Group = None) -> Tensor:
    """Compute the KoLeo loss: minus the mean logarithm of each row's distance to its nearest neighbour over all ranks.

    Equivalent to: ``lightly.loss.KoLeoLoss()`` in one process on the rows of all ranks.

    Args:
        rows: (B, D), floating point. They are normalised first.
        groups: Number of equal consecutive parts of this rank's rows, such as the crops of its images. A row is compared with
            the same part on all ranks. The loss is the mean over all rows (DINOv2 adds the losses of its crops).
        eps: Added to the distances.
        name: Name that is equal on all ranks (``moments``).
        group: Process group. None is the world.

    Returns:
        The global loss, 0-dim, equal on every rank.

    Gradient:
        After DDP's mean over ranks, the gradient of one process. A row also receives the gradient as another rank's neighbour.

    Communication:
        Forward a handshake, a gather of (G, D) and a handshake. Backward one exchange of (G, D). Memory:
        G x D, and a tile of at most 64 MiB.

    Raises:
        ConfigurationError: on every rank, for ``groups`` that is not a positive integer.
        InputError: on every rank, for rows that are not (B, D) or not divisible by ``groups``, and for a part with fewer than two rows.
        RankMismatchError: on every rank, if D, dtype or ``groups`` differ.

    Source:
        Sablayrolles et al., Spreading vectors for similarity search (2019), arXiv 1806.03198, equation 2.

    Example:
        >>> import torch
        >>> loss = koleo(torch.randn(8, 3))
    """
    title = with_name("koleo", name)
    with handshake.raising_on_all_ranks(title, group=group):
        expect_count("koleo: groups", groups)
    must_match = {"groups": groups, "eps": eps}
    (own,), counts = meet(title, {"rows": rows}, must_match, group, parts=groups, at_least=2 * groups)
    with precision.without_autocast([rows.device.type]):
        own = functional.normalize(own, dim=1, eps=eps)
        everywhere = _gather(title, own, counts, group)
        # the nearest neighbour of each row in its part
        nearest = _nearest_rows(own, everywhere, counts, groups, group)
        distances = functional.pairwise_distance(own, everywhere[nearest], eps=eps)
        total = -(distances + eps).log().sum()
    of_mean = "koleo" if name is None else f"koleo {name}"
    with outside_window():
        value = global_mean(total, len(rows), name=of_mean, group=group)
    name_value(value, title)
    return value


def _gather(title: str, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Return the rows of all ranks. Their gradients are summed over ranks."""
    if process_groups.world_size(group) == 1:
        return rows
    sizes = list(counts)
    return gather_with_grad(title, [all_gather_rows(rows, sizes, group)], [rows], [sizes], "sum", group)[0]


@torch.no_grad()
def _nearest_rows(own: Tensor, everywhere: Tensor, counts: Sequence[int], groups: int, group: Group) -> Tensor:
    """Return the positions (B,) of the nearest neighbours of this rank's rows among the rows of all ranks."""
    rank, starts = process_groups.rank(group), [sum(counts[:rank]) for rank in range(len(counts))]
    nearest = TileResults(len(own), own.new_empty(0, dtype=torch.int64))
    for part in range(groups):
        # positions of this part's rows on all ranks
        ranges = []
        for start, count in zip(starts, counts, strict=True):
            size = count // groups
            ranges.append(torch.arange(start + part * size, start + (part + 1) * size, device=own.device))
        places = torch.cat(ranges)
        columns = everywhere[places]
        first = sum(count // groups for count in counts[:rank])
        size = counts[rank] // groups
        tile_rows = max(1, _TILE_BYTES // max(1, columns.shape[0] * columns.element_size()))
        for start in range(0, size, tile_rows):
            stop = min(start + tile_rows, size)
            similarities = own[part * size + start : part * size + stop] @ columns.T
            # a row is not its own neighbour
            itself = torch.arange(first + start, first + stop, device=own.device)
            similarities.scatter_(1, itself[:, None], -torch.inf)
            nearest.store_(places[similarities.argmax(1)], part * size + start)
            del similarities  # release it before the next tile is computed
    return nearest.joined()


# ---------------------------------------------------------------------- steps


def expect_positive(what: str, value: float) -> None:
    """Raise a ``ConfigurationError`` unless a number is positive and finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    expect(is_number and 0 < value < math.inf, what, expected="a positive number", got=repr(value))
