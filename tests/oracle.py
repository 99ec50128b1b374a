"""What one process would have done: plain torch, float64, naive, and no line of the package under test.

`parity` is the test that all folders share: it plays a case in a `Place` on every rank and in one process, and compares.

ONE global batch per step comes from a seed; rank r of W gets a slice of it. Two rules say what the ranks together mean:

* *whole*: the loss of the global batch. For a loss that is a mean over rows it equals the mean over ranks of the ranks'
  means if all slices are equally long, and only then.
* *per rank*: the mean over ranks of each rank's own loss, which is what DDP computes with a loss that is not global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_ddp_losses.testing import RankPool

Batch = tuple[Tensor, Tensor]
Loss = Callable[..., Tensor]
Found = dict[str, Tensor]
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


def normal(*shape: int, seed: int | torch.Generator) -> Tensor:
    """Normal numbers in float64, the same in every process: of a seed, or the next ones of a generator."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def batches(task: Task) -> list[Batch]:
    """The global batches (features [G, F] float64, labels [G])."""
    generator = torch.Generator().manual_seed(1000 + task.seed)
    found = []
    for _ in range(task.steps):
        features = normal(task.rows, task.features, seed=generator)
        found.append((features, torch.randint(task.classes, (task.rows,), generator=generator)))
    return found


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


def clip_of(logits: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """CLIP's loss of products of images and texts; texts without an image follow those that have one."""
    target = torch.arange(len(logits))
    of_texts = logits[:, : len(logits)].t()
    first = nn.functional.cross_entropy(logits, target, label_smoothing=label_smoothing)
    second = nn.functional.cross_entropy(of_texts, target, label_smoothing=label_smoothing)
    return (first + second) / 2


def siglip_of(logits: Tensor) -> Tensor:
    """SigLIP's loss of products of images and texts; texts without an image follow those that have one."""
    signs = 2 * torch.eye(*logits.shape, dtype=logits.dtype) - 1
    return -nn.functional.logsigmoid(signs * logits).sum() / len(logits)


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
        ranks: By rank; `value`, and what is called `value ...`, must be the same on all of them, and `rows ...` is each rank's part.
        *rows: Gradients of each rank's rows: one after the other, and over W, as DDP's mean leaves them in an encoder.
        **shards: Parts of a gradient: one after the other along a dimension. All other gradients are averaged.
    """
    assert all(rank.keys() == ranks[0].keys() for rank in ranks), (
        f"gradients on some ranks only: {list(map(list, ranks))}"
    )
    found = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if name.split(" ")[0] == "value":
            assert all(torch.equal(part, parts[0]) for part in parts), f"ranks return {parts} as {name}"
        if name in shards:
            found[name] = torch.cat(parts, shards[name])
        elif name in rows:
            found[name] = torch.cat(parts) / len(ranks)
        elif name.startswith("rows "):
            found[name] = torch.cat(parts)
        else:
            found[name] = torch.stack(parts).mean(0)
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


def assert_near(ours: Mapping[str, Tensor], oracle: Mapping[str, Tensor], rtol: float = 1e-9) -> None:
    """As `assert_close`. What one process lacks, or has as a zero but for rounding, ours has as such a zero, or not at all."""
    __tracebackhide__ = True
    # a gradient that is zero but for rounding (a bias before a difference) has no direction to compare
    floor = 1e-12 * max([float(t.norm()) for name, t in oracle.items() if name != "value"])
    small = {name for name, t in oracle.items() if name != "value" and t.norm() < floor}
    small |= set(ours) - set(oracle)
    large = [name for name in small & set(ours) if ours[name].norm() > floor]
    assert not large, f"should vanish: {large}"
    ours, oracle = ({name: t for name, t in side.items() if name not in small} for side in (ours, oracle))
    assert_close(ours, oracle, rtol)


def problem(what: str, check: Callable[..., object], *args: object) -> list[str]:
    """In a list, what a check says is wrong, if anything is."""
    try:
        check(*args)
    except AssertionError as error:
        return [f"{what}: {error}"]
    return []


# ---------------------------------------------------------------------- one case, on ranks and in one process


@dataclass
class Place:
    """Where a case is played: on a rank with its own rows, or in one process with all rows and without the package.

    Attributes:
        sizes: Rows of each rank.
        rank: None: one process.
        leaves: Rows whose gradients are compared, by name.
    """

    sizes: Sequence[int]
    rank: int | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.rank is None

    @property
    def world_size(self) -> int:
        return 1 if self.alone else len(self.sizes)

    @property
    def part(self) -> slice:
        """Which rows of a global batch are here."""
        return slice(None) if self.rank is None else own(self.sizes, self.rank)

    def own(self, tensor: Tensor) -> Tensor:
        """The rows of a global batch that are here."""
        return tensor[self.part]

    def leaf(self, name: str, tensor: Tensor) -> Tensor:
        """The rows that are here, as a tensor whose gradient is compared."""
        self.leaves[name] = self.own(tensor).detach().clone().requires_grad_()
        return self.leaves[name]

    def ddp(self, module: nn.Module) -> nn.Module:
        """The module, on a rank in torch's `DistributedDataParallel`."""
        return module if self.alone else DistributedDataParallel(module)

    def evaluated(self, theirs: Loss, ours: Loss, *tensors: Tensor, **sources: Tensor | nn.Module) -> Found:
        """Value and gradients of a function of rows: `ours` on a rank, `theirs` in one process.

        Args:
            theirs: From the rows to a scalar.
            ours: Likewise.
            *tensors: Of all ranks. The gradients of floating ones are compared, as those of "rows 0", "rows 1", ...
            **sources: As in `graded`.
        """
        given = []
        for number, tensor in enumerate(tensors):
            given.append(self.leaf(str(number), tensor) if tensor.is_floating_point() else self.own(tensor))
        return self.graded((theirs if self.alone else ours)(*given), **sources)

    def graded(self, value: Tensor, **sources: Tensor | nn.Module) -> Found:
        """Run backward; as `graded`, with the gradients of leaves as DDP's mean leaves them in an encoder."""
        found = graded(value, **{name: getattr(source, "module", source) for name, source in sources.items()})
        rows = {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}
        return found | {f"rows {name}": grad.double() / self.world_size for name, grad in rows.items()}


Play = Callable[..., Found]


def played(play: Play, sizes: Sequence[int], calls: Sequence[tuple[Any, ...]]) -> list[Found]:
    """What this rank finds, call by call."""
    return [play(Place(sizes, dist.get_rank()), *call) for call in calls]


def parity(
    pool: RankPool,
    play: Play,
    sizes: Sequence[int],
    *given: Any,
    cases: Iterable[Any] | None = None,
    rtol: float | Callable[[Any], float] = 1e-9,
    every_rank: bool = False,
    compare: Callable[..., None] = assert_close,
    shards: Callable[[Any], dict[str, int]] | None = None,
    **options: Any,
) -> None:
    """Fail unless ranks find what one process finds on all their rows.

    Args:
        pool: The ranks.
        play: A function of a module that does the same in each `Place`: with its case, if there are some, and what is given.
        sizes: Rows of each rank.
        *given: Further arguments of `play`.
        cases: All are played in one visit to the ranks; None: there is one, without a name.
        rtol: For all cases, or of a case.
        every_rank: Whether each rank by itself has all that one process finds. Otherwise they have it together, see `joined`.
        compare: Two dictionaries and `rtol`.
        shards: Of a case, as in `joined`.
        **options: Of the pool.
    """
    __tracebackhide__ = True
    named = [None] if cases is None else list(cases)
    calls = [given if cases is None else (case, *given) for case in named]
    results = pool.run(len(sizes), played, play, sizes, calls, **options)
    problems = []
    for number, case in enumerate(named):
        found = [result[number] for result in results]
        truth = play(Place(sizes), *calls[number])
        limit = rtol(case) if callable(rtol) else rtol
        if every_rank:
            for rank, state in enumerate(found):
                problems += problem(f"{case} on rank {rank}", compare, state, truth, limit)
        else:
            problems += problem(
                str(case), _compare_joined, compare, found, truth, limit, shards(case) if shards else {}
            )
    assert not problems, "\n".join(problems)


def _compare_joined(
    compare: Callable[..., None], found: list[Found], truth: Found, rtol: float, shards: dict[str, int]
) -> None:
    compare(joined(found, **shards), truth, rtol)
