"""Runs drawn cases on the rank pool and compares them with one process."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests import oracle
from tests.fuzz import forms
from tests.fuzz.data import DTYPES, global_rows, own
from tests.oracle import Found
from tests.tensor_cores import multiplying_bf16


class NotDefined(Exception):
    """One process cannot compute this case either: there is nothing to compare with."""


@dataclass(frozen=True)
class Refused:
    """An error of the package in place of results: allowed where every rank raises the same."""

    kind: str
    text: str


class Place(oracle.Place):
    """Where a drawn case is played, whose rows lie in memory as the case says.

    Args:
        case: With `rows`, or with `ranks` only.
        rank: None: one process.
    """

    def __init__(self, case: Any, rank: int | None = None) -> None:
        super().__init__(case.ranks, rank)
        self.case = case

    def data(self, views: int = 1) -> dict[str, Tensor]:
        """Rows of all ranks."""
        return global_rows(self.case.rows, DTYPES[self.case.dtype], views)

    def own(self, tensor: Tensor) -> Tensor:
        return tensor if self.rank is None else own(self.case.rows, tensor, self.rank)

    def leaf(self, name: str, tensor: Tensor, *, trained: bool = True) -> Tensor:
        made = leaf(tensor) if self.alone else self.own(tensor)
        self.leaves[name] = made.requires_grad_(trained)
        return self.leaves[name]

    def parts(self, tensor: Tensor, sizes: Sequence[int] | None = None) -> Any:
        """A tensor with a row for each row that is here, as `rank ...` is compared."""
        return tensor if self.rank is not None else list(tensor.split(list(sizes or self.sizes)))


def _play_on_rank(play: Callable[[Any, Place], Found], case: Any) -> Found:
    place = Place(case, dist.get_rank())
    with multiplying_bf16() if forms.is_in_bf16(case) else contextlib.nullcontext():
        found = play(case, place)
    return found | {f"rank {name}": zero_or(x) / dist.get_world_size() for name, x in place.leaves.items()}


def _play_alone(play: Callable[[Any, Place], Found], case: Any) -> dict[str, Any]:
    place = Place(case)
    try:
        found: dict[str, Any] = play(case, place)
    except Exception as error:
        raise NotDefined from error
    tensors = [each for value in found.values() for each in (value if isinstance(value, list) else [value])]
    if not all(tensor.isfinite().all() for tensor in [*tensors, *map(zero_or, place.leaves.values())]):
        raise NotDefined
    return found | {f"rank {name}": place.parts(zero_or(x)) for name, x in place.leaves.items()}


@dataclass(frozen=True)
class Domain:
    """One kind of case.

    Attributes:
        name: For tables and the command line.
        cases: Draws a case: plain data with `ranks` (rows of each rank) and `dtype`.
        on_rank: What a rank finds: names of per-rank tensors (`rank ...`), of sums over ranks (`sum ...`), of means over ranks (all
            others, as DDP leaves gradients), and of values that every rank must hold (`value ...`).
        alone: The same names in one process, without the package; `rank ...` as a list, one tensor per rank.
    """

    name: str
    cases: SearchStrategy[Any]
    on_rank: Callable[[Any], Found]
    alone: Callable[[Any], dict[str, Any]]

    @classmethod
    def of(cls, name: str, cases: SearchStrategy[Any], play: Callable[[Any, Place], Found]) -> Domain:
        """A domain whose ranks and whose one process do the same, each in its place."""
        return cls(name, cases, partial(_play_on_rank, play), partial(_play_alone, play))

    def play(self, pool: RankPool, case: Any) -> list[Found | Refused]:
        """Return what each rank finds; a domain whose ranks come and go plays its own."""
        return pool.run(len(case.ranks), guarded, self.on_rank, case)


@dataclass
class Count:
    """What came of a domain's cases."""

    exact: int = 0
    refused: int = 0
    not_defined: int = 0
    texts: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return self.exact + self.refused + self.not_defined


@dataclass(frozen=True)
class Finding:
    """A case that is neither exact nor refused."""

    domain: str
    text: str


def leaf(tensor: Tensor) -> Tensor:
    """A copy that collects a gradient."""
    return tensor.detach().clone().requires_grad_()


def zero_or(tensor: Tensor) -> Tensor:
    """Its gradient; what a loss left out of the graph has one of zeros."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def guarded(on_rank: Callable[[Any], Found], case: Any) -> Found | Refused:
    """What a rank finds, or the package's own error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return on_rank(case)
        except DDPLossError as error:
            return Refused(type(error).__name__, str(error))


def examine(pool: RankPool, domain: Domain, case: Any) -> str:
    """Judge one case: `exact`, `not defined`, or the text of the refusal; anything else is an AssertionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            truth = domain.alone(case)
        except NotDefined:
            return "not defined"
    found = domain.play(pool, case)
    refusals = [each for each in found if isinstance(each, Refused)]
    if refusals:
        assert all(each == refusals[0] for each in found), (
            f"not the same error on all ranks: {[str(each)[:300] for each in found]}"
        )
        return f"{refusals[0].kind}: {refusals[0].text.splitlines()[0]}"
    compare([each for each in found if not isinstance(each, Refused)], truth, case.dtype, forms.rounding_of(case))
    return "exact"


def compare(found: Sequence[Found], truth: dict[str, Any], dtype: str, rounding: float = 0.0) -> None:
    """Every tensor of one process, on the ranks.

    Float64 is judged exactly. Float32 is there for what goes by dtype, and shows wrong factors and rows: exponents up to 20 make many of
    these cases ill-conditioned, so that one process itself is off by 3e-3 (SoftTriple, one row; 300 seeds). `rounding` is what a form of
    products may round beyond that.
    """
    tolerance = max({"float64": 1e-9, "float32": 1e-2}[dtype], rounding)
    smallest = {"float64": 1e-3, "float32": 1e-1}[
        dtype
    ]  # norms below count as this: equal rows leave nothing but rounding
    names = sorted(truth)
    assert all(sorted(each) == names for each in found), f"expected {names}, got {[sorted(each) for each in found]}"
    lines = []
    largest = max(
        map(norm, chain.from_iterable(t if isinstance(t, list) else [t] for t in truth.values())), default=1.0
    )
    for name in names:
        pairs: list[tuple[str, Tensor, Tensor]]
        if name.startswith("rank "):
            pairs = [(f"{name} on rank {r}", each[name], truth[name][r]) for r, each in enumerate(found)]
        elif name.startswith("value "):
            pairs = [(f"{name} on rank {r}", each[name], truth[name]) for r, each in enumerate(found)]
        else:
            total = torch.stack([each[name].double() for each in found]).sum(0)
            own = total if name.startswith("sum ") else total / len(found)
            pairs = [(name, own, truth[name])]
        # what cancels in a sum over rows is judged by the size of the rows
        scale = max(max(norm(t) for _, _, t in pairs), 1e-2 * largest, smallest)
        for title, got, expected in pairs:
            off = difference(got.double(), expected.double())
            if not off <= tolerance * scale:
                lines.append(f"{title}: off by {off:.3g} of {scale:.3g}; got {short(got)}, expected {short(expected)}")
    assert not lines, "\n".join(lines)


def difference(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference; where one process has no finite number, the ranks must have none either."""
    if got.shape != expected.shape:
        return float("inf")
    odd = ~expected.isfinite()
    if not torch.equal(odd, ~got.isfinite()):
        return float("inf")
    return float((got - expected)[~odd].norm())


def norm(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num(0, 0, 0).norm())


def short(tensor: Tensor) -> str:
    values = tensor.flatten()[:6].tolist()
    return f"{tuple(tensor.shape)} {[float(f'{value:.6g}') for value in values]}"


def explore(
    pool: RankPool,
    domain: Domain,
    *,
    examples: int,
    number: int,
    count: Count,
    shrink: bool = True,
    until: float = float("inf"),
) -> Finding | None:
    """Examine some cases of one seed; the first that is wrong comes back, minimised."""

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
    @given(domain.cases)
    def judge(case: Any) -> None:
        if time.monotonic() > until:
            return
        try:
            verdict = examine(pool, domain, case)
        except (AssertionError, RankFailure) as error:
            raise AssertionError(f"{error}\ncase: {case!r}") from None
        if verdict == "exact":
            count.exact += 1
        elif verdict == "not defined":
            count.not_defined += 1
        else:
            count.refused += 1
            count.texts[verdict] += 1

    try:
        judge()
    except AssertionError as error:
        return Finding(domain.name, str(error))
    except FlakyFailure as error:  # wrong once, and right when it was run again
        return Finding(domain.name, f"not the same when run again: {error.exceptions[0]}")
    return None
