"""One loss on ranks and in one process: the same encoder, the same loss, slices of ONE global batch.

The one process calls the loss itself on the whole batch, with no code of ours. What a rank holds after backward is averaged
over the ranks, as DDP does; every gradient that exists in one process must exist on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss
from tests.doors import process_groups
from tests.oracle import Encoder, Found, Place, Task, assert_near, joined, normal, own, problem

ROWS, DIM, CLASSES = 12, 6, 4
TASK = Task(rows=ROWS, features=5, dim=DIM, classes=CLASSES)
SEED = 7
SPLITS: dict[int, dict[str, list[int]]] = {  # rows per rank
    1: {"even": [12]},
    2: {"even": [6, 6], "uneven": [4, 8], "a rank without rows": [0, 12]},
    3: {"even": [4, 4, 4], "uneven": [1, 4, 7], "a rank without rows": [5, 0, 7]},
}
SEVEN: dict[int, list[int]] = {1: [7], 2: [2, 5], 3: [4, 0, 3]}


def splits_by_turns(number: int, world_size: int) -> dict[str, list[int]]:
    """Return uneven rows, and even ones or a rank without rows: by turns of the cases, and for each the other on the other W."""
    other = ("even", "a rank without rows")[(number + world_size) % 2]
    splits = SPLITS[world_size]
    return {name: sizes for name, sizes in splits.items() if name in ("uneven", other) or world_size == 1}


Rows = dict[str, Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Net(Encoder):
    """An encoder with a temperature that is no batch."""

    def __init__(self) -> None:
        super().__init__(TASK)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))


def by_labels(net: Net, rows: Rows) -> Arguments:
    """Embeddings and labels, as PML's losses take them."""
    return (net(rows["features"]), rows["labels"]), {}


@dataclass(frozen=True)
class Case:
    """One configured loss and how it is called.

    Attributes:
        make: The loss.
        give: Its arguments from a slice of the batch.
        give_alone: The arguments in one process where they are not those of a slice that holds everything; it also
            learns the rows per rank.
        modes: What `exact_modes` must be; None: not pinned here.
        options: Of `GlobalBatchLoss`.
        random: The loss draws: one process then is `GlobalBatchLoss` in a world of one, with rank 0's seed.
    """

    make: Callable[[], nn.Module]
    give: Callable[[Net, Rows], Arguments] = by_labels
    give_alone: Callable[[Net, Rows, list[int]], Arguments] | None = None
    modes: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False


def line_of_rows(width: int = DIM, count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    """Embeddings that are the same on every rank, for calls that are about something else."""
    return torch.linspace(-1, 1, count * width, dtype=dtype).view(count, width).sin().requires_grad_()


def small_net() -> nn.Sequential:
    """From three features to two numbers."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def seven_rows() -> Tensor:
    """The features of as many rows as `SEVEN` cuts."""
    return normal(7, 3, seed=4)


def global_rows() -> Rows:
    """The one global batch: as many rows of each class; two views; targets for torch's losses."""
    generator = torch.Generator().manual_seed(11)
    labels = torch.arange(ROWS) % CLASSES
    return {
        "features": normal(ROWS, TASK.features, seed=generator),
        "views": normal(ROWS, TASK.features, seed=generator),
        "third": normal(ROWS, TASK.features, seed=generator),
        "labels": labels[torch.randperm(ROWS, generator=generator)],
        "targets": normal(ROWS, DIM, seed=generator),
        "signs": torch.randint(2, (ROWS,), generator=generator).double() * 2 - 1,
        "bits": torch.randint(2, (ROWS, DIM), generator=generator).double(),
    }


def own_rows(sizes: Sequence[int], rank: int | None = None) -> Rows:
    """The slice of a rank; None: this one."""
    return {name: tensor[own(sizes, rank)] for name, tensor in global_rows().items()}


def fresh(case: Case) -> tuple[Net, nn.Module]:
    torch.manual_seed(1)
    return Net().double(), case.make().double()


def play(place: Place, case: Case, mode: str = "auto", **options: Any) -> Found:
    """Value and gradients; on a rank (of `group`, if that is among the further options) of the wrapped loss."""
    net, loss = fresh(case)
    rows = {name: place.own(tensor) for name, tensor in global_rows().items()}
    torch.manual_seed(SEED + (place.rank or 0))  # a random loss draws from rank 0's seed
    if place.alone:
        args, kwargs = case.give_alone(net, rows, list(place.sizes)) if case.give_alone else case.give(net, rows)
        value = (GlobalBatchLoss(loss, **case.options) if case.random else loss)(*args, **kwargs)
    else:
        wrapped = GlobalBatchLoss(loss, **{**case.options, "mode": mode, **options})
        before, numpy_before = torch.get_rng_state(), numpy_state()
        args, kwargs = case.give(net, rows)
        value = wrapped(*args, **kwargs)
        assert torch.equal(before, torch.get_rng_state()), "this rank's own generator moved"
        assert numpy_before == numpy_state(), "this rank's own numpy generator moved"
    found = place.graded(value, net=net, loss=loss)
    assert not place.alone or any(grad.any() for name, grad in found.items() if name != "value"), (
        "the case tests nothing: no gradient"
    )
    return found


# with the case, which keeps its place in memory
_truths: dict[tuple[Any, ...], tuple[Case, Found]] = {}


def truth_of(case: Case, sizes: Sequence[int] = (ROWS,)) -> Found:
    """Value and gradients in one process, once for a case; where its arguments follow the rows per rank, for each number of them."""
    key = (id(case), case.give_alone and tuple(sizes))
    if key not in _truths:
        _truths[key] = case, play(Place(sizes), case)
    return _truths[key][1]


def numpy_state() -> tuple[Any, ...]:
    """Return the state of numpy's own generator, to compare."""
    name, keys, *rest = np.random.get_state()
    return name, keys.tobytes(), *rest


def on_ranks(case: Case, sizes: list[int], mode: str, **options: Any) -> Found:
    """This rank's value and gradients."""
    return play(Place(sizes, process_groups.rank(options.get("group"))), case, mode, **options)


def in_modes(
    case: Case, splits: Mapping[str, list[int]], modes: Sequence[str] | None = None, **options: Any
) -> dict[str, Found]:
    """What this rank finds by "split, mode", in the modes that are exact unless others are given."""
    modes = modes or GlobalBatchLoss(case.make(), **case.options).exact_modes()
    found = {}
    for split, sizes in splits.items():
        for mode in modes:
            found[f"{split}, {mode}"] = on_ranks(case, sizes, mode, **options)
    return found


def check(case: Case, results: Sequence[Mapping[str, Mapping[str, Tensor]]], splits: Mapping[str, list[int]]) -> None:
    """Compare what ranks found (each by "split, mode") with one process; `splits`: rows per rank."""
    problems = []
    for key in results[0]:
        truth = truth_of(case, splits[key.split(", ")[0]])
        problems += problem(key, assert_near, joined([each[key] for each in results]), truth)
    assert not problems, "\n".join(problems)
