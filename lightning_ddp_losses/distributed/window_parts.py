"""The parts of losses in an accumulation window: their counts, the terms that they belong to, and their weights in backward.

A loss that is called in a window marks the value of each of its parts (``WindowCall.mark``). When the value is back-propagated, its
gradient is multiplied by the part's weight, and the upstream gradient is recorded. It must be the same in every micro-batch
(``SlopeCheck``). ``accumulation`` describes the mathematics.

A ``Term`` is the total of the parts of all micro-batches. It is identified by the path of its loss in the module, by the ``name=`` of a
``global_mean``, or otherwise by the line of the program that calls it (``calling_line``).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed.user_line import callers
from lightning_ddp_losses.errors import ConfigurationError, expect

EQUAL = 1e-12  # relative difference of two factors that is attributed to rounding
_SUMMED = 64  # units in the last place by which a sum of weights may differ
_PARTS = "lightning_ddp_losses: parts"  # a key of a graph node's metadata
_LIBRARIES = ("lightning_ddp_losses", "torch", "torchmetrics", "pytorch_metric_learning")
_PROGRAMS = "lightning_ddp_losses.demo"
_TOP_NODES = 16  # number of nodes of a value's graph that are searched for its parts


@dataclass(frozen=True)
class WindowPart:
    """One part of a loss in one micro-batch.

    Attributes:
        kind: Kind in the table of ``accumulation``.
        count: N_m of a mean over all ranks. Outside of a window it may still be on its device.
        own_count: This rank's share of it. If None, each rank computes the part from the rows of all ranks, and all ranks have to
            back-propagate the same micro-batches.
        total: S_m over all ranks, of a ``global_mean`` on the CPU. None if unknown.
    """

    kind: Literal["mean", "sum", "once"]
    count: Any = 0.0
    own_count: float | None = None
    total: float | None = None


@dataclass
class Term:
    """The parts of one loss in all micro-batches of a window.

    Attributes:
        key: Text that is the same on all ranks whose rows it counts.
        name: Name of the loss (``WindowTerms.known_as``). Empty before its first call.
        title: Title of the loss in messages.
        kind: ``"beside"`` is a regulariser without rows, which is corrected in the same way as the mean next to it.
        expected: The sum of the given ``counts`` over its ranks.
        expected_total: The sum of the given ``totals`` over its ranks.
        estimate: D, the same on all ranks. None until the first nonzero count.
        is_together: Whether all ranks have to back-propagate the same micro-batches.
        rounding: Relative tolerance for counts that are not whole numbers (sums of weights in the precision of the loss).
    """

    key: str
    title: str
    name: str = ""
    kind: Literal["mean", "sum", "beside"] = "mean"
    expected: float | None = None
    expected_total: float | None = None
    estimate: float | None = None
    is_together: bool = False
    rounding: float = EQUAL

    def take_(self, part: WindowPart, micro_batches: int) -> None:
        """Add a part of the next micro-batch. The first nonzero count determines the estimate."""
        if self.estimate is None and part.kind == "mean" and part.count:
            self.estimate = float(part.count) * micro_batches
        if part.own_count is None and part.kind == "mean":
            self.is_together = True

    @property
    def divisor(self) -> float | None:
        """Return what backward divides by: the expected count if given, otherwise the estimate."""
        return self.expected or self.estimate

    @property
    def expected_mean(self) -> float | None:
        """Return the mean of the whole window, if both its total and its count were given."""
        return self.expected_total / self.expected if self.expected and self.expected_total is not None else None


@dataclass(eq=False)
class WindowCall:
    """One call of a loss in a window.

    Attributes:
        title: Title of the loss in messages.
        parts: Parts of its value, over all ranks.
        terms: The term of each part.
        values: Value of each part in the whole window, if ``totals`` were given, otherwise None.
        weights: Factor of the gradient of each part, once the call is back-propagated.
        is_share: Whether the value of each part has the same factor, because counts were given.
        slopes: Upstream gradient of each part. None for a part that was not back-propagated, or has a count of zero.
        is_weighed: Whether it is multiplied by a value with a gradient, so that its weight is learned.
        is_counted: Whether a backward that ran through it has ended.
    """

    title: str
    parts: Sequence[WindowPart]
    terms: Sequence[Term]
    values: list[float] | None = None
    weights: list[float] = field(default_factory=list)
    is_share: bool = False
    slopes: list[Tensor | None] = field(default_factory=list)
    is_weighed: bool = False
    is_counted: bool = False

    def mark(self, value: Tensor, first: int = 0) -> Tensor:
        """Return the value of one part, or of parts from ``first`` on, with weighed gradients. The value of a share is weighed as well."""
        rounding = _SUMMED * min(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps)
        for term in self.terms:
            term.rounding = max(term.rounding, rounding)
        return _Part.apply(value, self, first)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def counts_nothing(self) -> bool:
        """Whether one of its means has a zero count in this micro-batch, so that its value may be NaN and does not have a gradient."""
        return any(part.kind == "mean" and not part.count for part in self.parts)

    def note_slopes_(self, grad: Tensor, first: int) -> None:
        """Add the upstream gradient of some parts. A second backward through them adds to the first."""
        if not self.slopes:
            self.slopes = [None] * len(self.parts)
        for index, slope in enumerate(grad.detach().reshape(-1).unbind(), start=first):
            part = self.parts[index]
            if part.kind == "mean" and part.count:
                before = self.slopes[index]
                self.slopes[index] = slope if before is None else before + slope


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, call: WindowCall, first: int) -> Tensor:
        ctx.window_call, ctx.first = call, first
        if not call.is_share:
            return value.clone()
        weights = call.weights[first : first + value.numel()]
        share: Tensor = value * _factor(weights, value)
        if 0.0 in weights:  # a mean without rows may be NaN
            share = share.masked_fill(_factor(weights, value) == 0, 0.0) if value.ndim else torch.zeros_like(value)
        return share

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        call: WindowCall = ctx.window_call
        expect(
            call.weights,
            f"accumulation window: {call.title}",
            expected="Tensor.backward or torch.autograd.backward inside the window",
            got="another way to back-propagate it, or one outside of the window",
            fix="Call loss.backward() inside the window.",
        )
        call.note_slopes_(grad, ctx.first)
        weights = call.weights[ctx.first : ctx.first + grad.numel()]
        return grad * _factor(weights, grad), None, None


def _factor(weights: Sequence[float], like: Tensor) -> Any:
    """Return the weights of some parts as a factor for a tensor, which is a number for a single part."""
    return weights[0] if like.ndim == 0 else like.new_tensor(weights)


def is_equal(left: float, right: float) -> bool:
    """Return whether two counts or factors differ by at most rounding."""
    return math.isclose(left, right, rel_tol=EQUAL)


def window_call(node: Any) -> WindowCall | None:
    """Return the loss call whose value a graph node computed, or None for other nodes."""
    found: WindowCall | None = getattr(node, "window_call", None)
    return found


def counts_nothing(loss: Tensor) -> bool:
    """Return whether a loss in a window depends on a mean with a zero count in this micro-batch, so it does not add to the window."""
    for node, _ in walk_graph([loss], through=lambda node: window_call(node) is None):
        call = window_call(node)
        if call is not None and call.counts_nothing:
            return True
    return False


def is_window_part(value: Tensor) -> bool:
    """Return whether a value has just been marked as a part of a window."""
    walk = walk_graph([value], through=lambda node: window_call(node) is None)
    top = itertools.islice(walk, _TOP_NODES)
    return any(window_call(node) is not None for node, _ in top)


def calling_line() -> str:
    """Return the file and line of the program that calls a loss: the innermost line outside of the libraries of losses.

    Unlike in ``users_line``, an installed package that calls losses counts as a program, because its lines distinguish the losses.
    """
    for frame in callers(inspect.currentframe()):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _LIBRARIES or module.startswith(_PROGRAMS):
            return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return "an unknown line"


def note_parts(value: Tensor, parts: Callable[[], Sequence[WindowPart]]) -> None:
    """Attach the parts of a global loss to its value, for checks of the graph. They are computed only if a check requests them."""
    if value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[_PARTS] = parts


def has_parts(node: Any) -> bool:
    """Return whether a graph node computed the value of a global loss."""
    return _PARTS in node.metadata


def noted_parts(node: Any) -> Sequence[WindowPart] | None:
    """Return the parts of the global loss whose value a graph node computed, or None for other nodes."""
    parts: Callable[[], Sequence[WindowPart]] | None = node.metadata.get(_PARTS)
    return None if parts is None else parts()


# ---------------------------------------------------------------------- upstream gradients


@dataclass(frozen=True)
class _TermSlopes:
    """The upstream gradients of a term in the micro-batches of a window."""

    key: str
    title: str
    numbers: HostNumbers
    rounding: float

    def agreed(self) -> float:
        """Return the upstream gradient, the same in all micro-batches.

        Raises:
            ConfigurationError: if micro-batches differ.
        """
        slopes = self.numbers.read()
        for slope in slopes:
            if math.isclose(slope, slopes[0], rel_tol=self.rounding) or _are_not_numbers(slope, slopes[0]):
                continue
            raise other_slopes(self.title, slopes)
        return float(slopes[0])


def _are_not_numbers(left: float, right: float) -> bool:
    return not math.isfinite(left) and not math.isfinite(right)


class SlopeCheck:
    """Compares the upstream gradients of a window, on an accelerator when the next window ends, so that the host does not wait."""

    def __init__(self) -> None:
        self._late: list[_TermSlopes] = []

    def compare(self, calls: Sequence[WindowCall] = ()) -> dict[str, float]:
        """Compare the micro-batches of a window that ends.

        Args:
            calls: Counted calls of the window. Empty when training ends.

        Returns:
            The upstream gradient by the key of the term, of this window on the CPU and of the previous window on an accelerator.

        Raises:
            ConfigurationError: for a loss whose upstream gradient differs between micro-batches.
        """
        by_term: dict[str, list[Tensor]] = {}
        titles: dict[str, str] = {}
        for call in calls:
            for term, slope in zip(call.terms, call.slopes, strict=False):
                if slope is not None:
                    by_term.setdefault(term.key, []).append(slope)
                    titles[term.key] = term.title
        due = self._late
        self._late = []
        for key, slopes in by_term.items():
            rounding = 8 * torch.finfo(slopes[0].dtype).eps
            of_term = _TermSlopes(key, titles[key], HostNumbers(slopes), rounding)
            (due if slopes[0].device.type == "cpu" else self._late).append(of_term)
        return {of_term.key: of_term.agreed() for of_term in due}


def other_slopes(title: str, slopes: Sequence[float]) -> ConfigurationError:
    """Return the error for a loss that is weighed differently in some micro-batches, or on some ranks."""
    shown = ", ".join(f"{slope:.6g}" for slope in slopes)
    return not_a_weighted_sum(f"{title}, whose upstream gradients are {shown}")


def not_a_weighted_sum(got: str) -> ConfigurationError:
    """Return the error for a back-propagated value that is not a weighted sum of losses."""
    return ConfigurationError(
        "accumulation window: what is back-propagated",
        expected="a weighted sum of losses, with the same weights in every micro-batch",
        got=got,
        fix="Weigh losses by the same numbers in all micro-batches, and add them. A weight that is learned (exp(-s) * loss + s) needs the "
        "counts of the window: accumulation_window(model, counts=...), with Lightning loss_counts(batch) of the module. What is not "
        "linear in a global_mean (its root, a product of two) needs the counts and totals of the whole window.",
    )


SLOPES = SlopeCheck()
"""Stores the upstream gradients of the last window on an accelerator."""
