"""What one process would have done: plain torch, float64, naive, and no line of the package under test.

ONE global batch per step comes from a seed; rank r of W gets a slice of it. Two rules say what the ranks together mean:

* *whole*: the loss of the global batch. For a loss that is a mean over rows it equals the mean over ranks of the ranks'
  means if all slices are equally long, and only then.
* *per rank*: the mean over ranks of each rank's own loss, which is what DDP computes with a loss that is not global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
# of pytorch-metric-learning: a loss for each row by itself, from a weight of one row (or several) a class
CLASS_LOSSES = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "LargeMarginSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
]


@dataclass(frozen=True)
class Task:
    """A small classification task; the same seed gives the same batches in every process."""

    seed: int = 0
    steps: int = 4  # more than one after what changes in the second; a window of 3 is followed by a shorter one
    rows: int = 12  # of a global batch: divisible by 1, 2 and 3
    features: int = 6
    dim: int = 4
    classes: int = 5


class Encoder(nn.Sequential):
    """Two linear layers, no batch norm: what a row becomes does not depend on its neighbours."""

    def __init__(self, task: Task) -> None:
        super().__init__(nn.Linear(task.features, 8), nn.Tanh(), nn.Linear(8, task.dim))


def batches(task: Task) -> list[Batch]:
    """The global batches (features [G, F] float64, labels [G])."""
    generator = torch.Generator().manual_seed(1000 + task.seed)
    return [
        (
            torch.randn(task.rows, task.features, generator=generator, dtype=torch.float64),
            torch.randint(task.classes, (task.rows,), generator=generator),
        )
        for _ in range(task.steps)
    ]


def cuts(rows: int, world_size: int, *, even: bool = True) -> list[slice]:
    """Which rows of a global batch each rank gets; uneven: rank r gets a share in proportion to r + 1."""
    weights = [1] * world_size if even else list(range(1, world_size + 1))
    if even and rows % world_size:
        raise ValueError(f"{rows} rows cannot be cut evenly for {world_size} ranks")
    ends = [rows * sum(weights[:rank]) // sum(weights) for rank in range(world_size + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def train(
    encoder: nn.Module,
    loss: Loss,
    steps: Iterable[Batch],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    ranks: Sequence[slice] | None = None,
) -> list[float]:
    """Train in one process, in place; returns the loss of each batch.

    Args:
        encoder: From features to embeddings.
        loss: Embeddings and labels to a scalar; its parameters are trained with the encoder's if it is a module.
        steps: The global batches.
        make_optimizer: From all parameters, the encoder's first.
        clip_norm: Largest norm of all gradients together.
        accumulate: Batches per optimizer step; each gradient is divided by it.
        ranks: None for the rule *whole*, the slices for the rule *per rank*.
    """
    parameters = [*encoder.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    optimizer = make_optimizer(parameters)
    values = []
    steps = list(steps)
    for index, (features, labels) in enumerate(steps):
        if ranks is None:
            value = loss(encoder(features), labels)
        else:
            value = sum(loss(encoder(features[part]), labels[part]) for part in ranks) / len(ranks)
        (value / accumulate).backward()
        values.append(value.item())
        if (index + 1) % accumulate == 0 or index + 1 == len(steps):
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return values


def own(sizes: Sequence[int], rank: int | None = None) -> slice:
    """Which rows of a global batch a rank has (None: this one, the first where there are none), of so many on each rank."""
    rank = (dist.get_rank() if dist.is_initialized() else 0) if rank is None else rank
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def graded(value: Tensor, **sources: Tensor | nn.Module) -> dict[str, Tensor]:
    """Run backward; the value, and the gradients that there are: of tensors by name, of the parameters of a module `m` as `m.name`."""
    value.backward()
    tensors: dict[str, Tensor] = {}
    for name, source in sources.items():
        if isinstance(source, nn.Module):
            tensors |= {f"{name}.{own}": parameter for own, parameter in source.named_parameters()}
        else:
            tensors[name] = source
    return {"value": value.detach()} | {name: t.grad for name, t in tensors.items() if t.grad is not None}


def joined(ranks: Sequence[Mapping[str, Tensor]], *rows: str, **shards: int) -> dict[str, Tensor]:
    """What `graded` found on ranks, as one process has it.

    Args:
        ranks: By rank; the value must be one number on all of them.
        *rows: Gradients of each rank's rows: one after the other, and over W, as DDP's mean leaves them in an encoder.
        **shards: Parts of a gradient: one after the other along a dimension. All other gradients are averaged.
    """
    assert len({float(rank["value"]) for rank in ranks}) == 1, (
        f"ranks return {[float(rank['value']) for rank in ranks]}"
    )
    assert all(rank.keys() == ranks[0].keys() for rank in ranks), (
        f"gradients on some ranks only: {list(map(list, ranks))}"
    )
    found = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if name in shards:
            found[name] = torch.cat(parts, shards[name])
        else:
            found[name] = torch.cat(parts) / len(ranks) if name in rows else torch.stack(parts).mean(0)
    return found


def differences(ours: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over norm of the oracle's tensor, by name (infinite where a finite one cannot be formed)."""
    result = {}
    for name, truth in oracle.items():
        got, truth = ours[name].detach().double(), truth.detach().double()
        result[name] = float("inf")
        if got.shape == truth.shape:
            off, scale = (got - truth).norm().item(), truth.norm().item()
            ratio = 0.0 if off == 0 else off / scale if scale else float("inf")
            result[name] = float("inf") if ratio != ratio else ratio
    return result


def assert_close(ours: Mapping[str, Tensor], oracle: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    """Same names, and each tensor within `rtol` of the oracle's, relative in norm; tells ratio and cosine of what is off."""
    assert sorted(ours) == sorted(oracle), f"names differ: ours {sorted(ours)}, oracle {sorted(oracle)}"
    lines = []
    for name, off in differences(ours, oracle).items():
        if off <= rtol:
            continue
        got, truth = ours[name].detach().double().flatten(), oracle[name].detach().double().flatten()
        detail = f"shapes {tuple(ours[name].shape)} and {tuple(oracle[name].shape)}"
        if ours[name].shape == oracle[name].shape:
            cosine = torch.nn.functional.cosine_similarity(got, truth, dim=0).item()
            detail = f"norm ratio {(got.norm() / truth.norm()).item():.6g}, cosine {cosine:.6g}"
        lines.append(f"{name}: relative difference {off:.3g} > {rtol:g} ({detail})")
    assert not lines, "\n".join(lines)


def problem(what: str, check: Callable[..., object], *args: object) -> list[str]:
    """In a list, what a check says is wrong, if anything is."""
    try:
        check(*args)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []
