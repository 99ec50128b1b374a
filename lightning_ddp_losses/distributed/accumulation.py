"""The accumulation window: losses divided by what all its micro-batches hold, not by what each of them holds.

The global loss of one micro-batch is ``S_m / N_m``, a sum over a count. The mean of those over M micro-batches is not the loss of one
process on all rows, ``sum(S_m) / sum(N_m)``, unless all counts are equal; and ``sum(N_m)`` is known only when the last one has come. So
each micro-batch back-propagates ``S_m / D``, where the estimated divisor ``D`` is the first count that is not zero times M, and when the
window ends all gradients are multiplied by ``D / sum(N_m)``, once. The estimate keeps gradients in the range that a scaler of
half-precision losses expects.

| part of a loss | its count | micro-batch m back-propagates it times | at the end times |
|---|---|---|---|
| mean | ``N_m`` | ``N_m / D`` | ``D / sum(N_m)`` |
| sum | none: nothing divides it | 1 | 1 |
| once (a regulariser of a weight, which has no rows) | that of the mean beside it | ``N_m / D``, in all ``sum(N_m) / D`` | as the mean |

One multiplication serves all parameters only if every path from what is back-propagated to a parameter passes exactly one such loss, and
their factors at the end are equal. The graph is walked before each backward; anything else is an error that says what to do
(``global_mean``, ``expect_counts``).

In a loop without Lightning, with the model's DistributedDataParallel, and ``cross_entropy`` a ``GlobalBatchLoss(CrossEntropyLoss())``::

    optimizer.zero_grad()  # a window starts without gradients
    with accumulation_window(model, micro_batches=4):
        for i, (rows, labels) in enumerate(micro_batches):
            model.require_backward_grad_sync = i == 3  # what model.no_sync() sets
            cross_entropy(model(rows), labels).backward()
    optimizer.step()
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.shard import local_part
from lightning_ddp_losses.distributed.window_graph import TITLE, WindowGraph, window_call
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect


@contextlib.contextmanager
def accumulation_window(model: nn.Module, *losses: nn.Module, micro_batches: int = 1) -> Iterator[AccumulationWindow]:
    """Make the micro-batches inside the block one batch: after it, gradients are those of one process on all their rows.

    Equivalent to: in one process, ``loss(all rows of all ranks and micro-batches).backward()``.

    Args:
        model: The model, or its DDP; ``no_sync`` stays the caller's.
        losses: Modules with further parameters.
        micro_batches: About how many there will be. Only the size of gradients inside the block depends on it, which matters for a
            scaler of half precision.

    Yields:
        The window; its ``expect_counts`` is for losses whose counts are not in proportion.

    A micro-batch ends with its ``backward``. Losses: ``GlobalBatchLoss`` in mode ``elements``, ``ClassShardedLoss``, ``global_mean``, and
    as differentiable metrics MeanSquaredError and MeanAbsoluteError.

    Gradient: inside the block in proportion to the true one; on leaving it all gradients of ``model`` and ``losses`` are corrected.

    Communication: what the losses do, and one handshake on leaving. The host divides by what is counted: a loss whose count an
        accelerator alone knows (targets that are ignored, what passes a reducer's limits) is waited for once a micro-batch.

    Raises:
        ConfigurationError: for another term in what is back-propagated, for losses with different divisors, an optimizer step inside the
            block, or windows inside windows.
        RankMismatchError: on every rank, where ranks have different numbers of micro-batches.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import accumulation_window, global_mean
        >>> model = torch.nn.Linear(3, 1)
        >>> with accumulation_window(model):
        ...     for rows in (torch.ones(4, 3), torch.ones(2, 3)):
        ...         global_mean(model(rows).square().sum(), len(rows)).backward()
    """
    expect(not is_open(), "accumulation_window", expected="no window around it", got="one that is open")
    parameters = {}
    for i, module in enumerate((model, *losses)):
        named = module.named_parameters(prefix=f"losses[{i - 1}]" if i else "")
        parameters.update(dict(named))
    window = AccumulationWindow(parameters, micro_batches)
    try:
        window.refuse_left_gradients()
        with active(window), _backward_commits(window), _refuses_steps(window):
            yield window
    except Exception as error:  # the peers are inside their blocks, or wait at the end of them
        handshake.raise_on_all_ranks(error, "accumulation_window")
    # before anything is judged, ranks with another number of micro-batches are found
    handshake.all_gather("end of accumulation_window", {"micro-batches": window.micro_batch - 1})
    window.correct_()


@contextlib.contextmanager
def _backward_commits(window: AccumulationWindow) -> Iterator[None]:
    """Look at what is back-propagated inside the block; ``Tensor.backward`` calls this function of torch too."""
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        window.commit(roots)
        plain(roots, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain


@contextlib.contextmanager
def _refuses_steps(window: AccumulationWindow) -> Iterator[None]:
    """Refuse a step of an optimizer inside the block."""

    def refuse(optimizer: Any, *_: Any) -> None:
        raise step_inside_window(type(optimizer).__name__)

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


_EQUAL = 1e-12  # relative difference of two factors that counts as rounding
_PARTS = "lightning_ddp_losses: parts"  # a key of a graph node's metadata
_active: ContextVar[AccumulationWindow | None] = ContextVar("accumulation_window", default=None)


@dataclass(frozen=True)
class WindowPart:
    """One part of a loss in one micro-batch.

    Attributes:
        kind: As in the table above.
        count: N_m over all ranks, of a mean; outside a window perhaps still on its device.
    """

    kind: Literal["mean", "sum", "once"]
    count: Any = 0.0


@dataclass
class _Divisor:
    """What one part of a loss is divided by, over a window.

    Attributes:
        title: Of the loss.
        expected: The sum over all ranks of what ``expect_counts`` was told.
        estimate: D; None until a count that is not zero was back-propagated.
        total: Sum of the counts that were back-propagated.
        is_sum: Nothing divides it.
    """

    title: str
    expected: float | None = None
    estimate: float | None = None
    total: float = 0.0
    is_sum: bool = False

    def estimate_for(self, count: float, micro_batches: int) -> float:
        """Return D, as it is or as this count would make it."""
        if self.expected is not None:
            return self.expected
        return self.estimate or count * micro_batches

    def add_(self, part: WindowPart, micro_batches: int) -> None:
        """Count a part that is back-propagated."""
        if part.kind == "sum":
            self.is_sum = True
        elif part.kind == "mean" and part.count:
            self.estimate = self.estimate_for(part.count, micro_batches)
            self.total += part.count

    @property
    def is_used(self) -> bool:
        """Whether anything of it was back-propagated."""
        return self.is_sum or self.total > 0

    @property
    def factor(self) -> float:
        """What corrects the estimate at the end."""
        if self.is_sum:
            return 1.0
        assert self.estimate is not None
        return self.estimate / self.total

    def describe(self) -> str:
        """Return what it was divided by and what it should have been."""
        if self.is_sum:
            return f"{self.title}: a sum, not divided"
        return f"{self.title}: divided by {self.estimate:.17g}, counted {self.total:.17g}"


@dataclass
class WindowCall:
    """One call of a loss in a window.

    Attributes:
        title: Of the loss.
        weights: Of each part, what its gradient is multiplied with in this micro-batch.
    """

    title: str
    weights: list[float]
    _parts: Sequence[WindowPart]
    _divisors: Sequence[_Divisor]
    _micro_batches: int
    _is_committed: bool = field(default=False, init=False)

    def mark(self, value: Tensor, weight: float = 1.0) -> Tensor:
        """Return the value of the call, to be found again in the graph of what is back-propagated; its gradient times a weight."""
        return _WindowValue.apply(value, self, weight)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def counts_nothing(self) -> bool:
        """Whether one of its means counts nothing in this micro-batch: a value that may be no number, and no gradient."""
        return any(part.kind == "mean" and not part.count for part in self._parts)

    def commit_(self) -> None:
        """Count the rows of the call, once: it is back-propagated."""
        if self._is_committed:
            return
        self._is_committed = True
        for part, divisor in zip(self._parts, self._divisors, strict=True):
            divisor.add_(part, self._micro_batches)


class _WindowValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, call: WindowCall, weight: float) -> Tensor:
        ctx.window_call, ctx.weight = call, weight
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.weight, None, None


# ---------------------------------------------------------------------- one window


class AccumulationWindow:
    """The losses of one accumulation window.

    Args:
        parameters: By name, those whose gradients will be corrected.
        micro_batches: How many there will be, as far as is known; only the size of the estimate depends on it.
        gathered: Returns by name what stands in graphs for parameters that ``fully_shard`` divides; their gradients go to the parts.

    Attributes:
        micro_batch: Which one is computed now, from 1 on.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        micro_batches: int,
        gathered: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._parameters = dict(parameters)
        self._graph = WindowGraph(parameters, gathered)
        self._expected_micro_batches = max(micro_batches, 1)
        self._divisors: dict[tuple[object, int, int], _Divisor] = {}
        self._without_rows: dict[object, str] = {}  # losses with a part without rows, beside which nothing counted yet
        self._sources: list[object] = []  # kept, so that an id stays theirs
        self._calls: dict[object, int] = {}  # of each loss, in this micro-batch
        self._is_last: bool | None = None
        self.micro_batch = 1

    @property
    def is_single(self) -> bool:
        """Whether the window is one micro-batch: its own divisors are those of the window."""
        return self._is_last is True and self.micro_batch == 1

    @property
    def is_open(self) -> bool:
        """Whether something was back-propagated."""
        return any(divisor.is_used for divisor in self._divisors.values())

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        """Say which micro-batch comes now and whether it is the last; where nobody says so, a micro-batch ends with each backward."""
        self.micro_batch, self._is_last = number, is_last
        self._calls.clear()

    def refuse_left_gradients(self) -> None:
        """Refuse gradients that were there before the window, which would be corrected with it.

        Raises:
            ConfigurationError: naming a parameter.
        """
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            values = grad.coalesce().values() if grad.is_sparse else local_part(grad)
            if bool(values.any()):
                raise ConfigurationError(
                    "accumulation window: gradients before it",
                    expected="none, or zeros",
                    got=f"that of `{name}`",
                    fix="Call optimizer.zero_grad() before the window.",
                )

    # ------------------------------------------------------------------ forward

    def enter(self, source: object, title: str, parts: Sequence[WindowPart]) -> WindowCall:
        """Say how much each part of a loss counts in this micro-batch.

        Args:
            source: The loss, or its name: calls with the same one in other micro-batches share their divisors.
            title: How messages name it.
            parts: Over all ranks.
        """
        key = self._key(source)
        number = self._calls.get(key, 0)
        self._calls[key] = number + 1
        if number:
            title += f", call {number + 1}"
        divisors = [self._divisors.setdefault((key, number, i), _Divisor(title)) for i in range(len(parts))]
        weights = [self._weight(part, divisor) for part, divisor in zip(parts, divisors, strict=True)]
        call = WindowCall(title, weights, parts, divisors, self._expected_micro_batches)
        if any(part.kind == "once" for part in parts):
            self._weigh_once_(call, (key, number), parts, divisors)
        return call

    def _weight(self, part: WindowPart, divisor: _Divisor) -> float:
        if part.kind == "sum":
            return 1.0
        if not part.count:
            return 0.0
        return float(part.count) / divisor.estimate_for(part.count, self._expected_micro_batches)

    def _weigh_once_(
        self, call: WindowCall, place: object, parts: Sequence[WindowPart], divisors: Sequence[_Divisor]
    ) -> None:
        """Weigh what has no rows such that it counts once in the whole window."""
        beside = next((i for i, part in enumerate(parts) if part.kind != "once"), None)
        if beside is None or parts[beside].kind == "sum":
            # its factor at the end is 1: in the first micro-batch
            weight = float(beside is None or not divisors[beside].is_sum)
        else:
            # as the mean beside it, whose weights add up to one over the factor at the end
            weight = call.weights[beside]
            self._without_rows.pop(place, None)
            if divisors[beside].total + parts[beside].count == 0:
                if self._is_last:
                    weight = 1.0
                else:
                    self._without_rows[place] = call.title
        for i, part in enumerate(parts):
            if part.kind == "once":
                call.weights[i] = weight

    def _key(self, source: object) -> object:
        """Return by what a loss is known; the loss inside a global one is that one."""
        if isinstance(source, str):
            return source
        if getattr(source, "sees_global_batch", False):
            source = getattr(source, "loss", source)
        if not any(known is source for known in self._sources):
            self._sources.append(source)
        return id(source)

    # ------------------------------------------------------------------ counts that are known before

    def expect_counts(self, counts: Mapping[Any, float | Sequence[float]]) -> None:
        """Say what losses count in the whole window, where their counts are not in the same proportion in each micro-batch.

        Each of them is divided by that from the start, and nothing is corrected at the end.

        Args:
            counts: By loss, or by the name of a ``global_mean``: this rank's own count in all micro-batches together. A list where a
                loss is called several times in a micro-batch, or has several means.

        Raises:
            InputError: on every rank, for a count that is negative or not finite, or after the first backward.
            RankMismatchError: on every rank, for other losses on some ranks.

        Communication: one handshake.
        """
        own = {}
        for source, given in counts.items():
            several = list(given) if isinstance(given, Sequence) else [given]
            own[_title_of(source)] = [float(count) for count in several]
        try:
            self._refuse_expectations(own)
        except InputError as error:
            handshake.raise_on_all_ranks(error, "expect_counts")
        must_match = {"losses": ", ".join(f"{title} ({len(several)})" for title, several in own.items())}
        payloads = handshake.all_gather("expect_counts", must_match, json.dumps(list(own.values())).encode())
        by_rank = [json.loads(payload) for payload in payloads]
        for i, source in enumerate(counts):
            counts_by_rank = [several[i] for several in by_rank]
            self._expect(source, [math.fsum(column) for column in zip(*counts_by_rank, strict=True)])

    def _refuse_expectations(self, counts: Mapping[str, Sequence[float]]) -> None:
        for title, several in counts.items():
            is_count = all(math.isfinite(count) and count >= 0 for count in several)
            expected = "finite counts, not negative"
            expect(is_count, f"expect_counts: {title}", expected=expected, got=several, error=InputError)
        expected, got = "before the first backward of the accumulation window", f"in micro-batch {self.micro_batch}"
        expect(not self.is_open, "expect_counts", expected=expected, got=got, error=InputError)

    def _expect(self, source: object, totals: Sequence[float]) -> None:
        key, title = self._key(source), _title_of(source)
        for i, total in enumerate(totals):
            # several calls of one mean each, or one call of several means
            self._divisors[key, i, 0] = self._divisors[key, 0, i] = _Divisor(title, expected=total)

    # ------------------------------------------------------------------ backward

    def commit(self, roots: Sequence[Tensor]) -> None:
        """Count the calls that are about to be back-propagated, after a look at every path to a parameter.

        Args:
            roots: What is back-propagated.

        Raises:
            ConfigurationError: for a path that passes none of the losses, or two of them, or ends in an unknown parameter.
        """
        if not self.is_single:
            for call in self._graph.calls_below(roots):
                call.commit_()
        if self._is_last is None:
            self.micro_batch += 1
            self._calls.clear()

    # ------------------------------------------------------------------ end

    def finish(self) -> float:
        """Return what all gradients are to be multiplied with; every rank knows the same.

        Raises:
            ConfigurationError: on every rank, for losses whose factors differ, or counts that are not those that were expected.
        """
        divisors = {id(divisor): divisor for divisor in self._divisors.values()}.values()
        for divisor in divisors:
            if divisor.expected is not None and not _is_equal(divisor.total, divisor.expected):
                raise ConfigurationError(
                    f"accumulation window: expect_counts of {divisor.title}",
                    expected=f"{divisor.expected:.17g} over all ranks and micro-batches, as was said",
                    got=f"{divisor.total:.17g}",
                    fix="Say this rank's count in all micro-batches of the window, as the loss counts.",
                    collective=True,
                )
        if self._without_rows:
            raise ConfigurationError(
                f"accumulation window: {next(iter(self._without_rows.values()))}",
                expected="a row that counts in some micro-batch",
                got="none, beside a regulariser that counts once",
                fix="Leave out the step.",
                collective=True,
            )
        used = [divisor for divisor in divisors if divisor.is_used]
        factors = [divisor.factor for divisor in used] or [1.0]
        if not all(_is_equal(factor, factors[0]) for factor in factors):
            raise ConfigurationError(
                "accumulation window: losses with different divisors",
                expected="counts in the same proportion in every micro-batch",
                got="; ".join(divisor.describe() for divisor in used),
                fix="Say before the first micro-batch what each counts in the whole window: expect_counts({loss or name: count of this "
                "rank}), of the strategy or of what accumulation_window gives.",
                collective=True,
            )
        return 1.0 if _is_equal(factors[0], 1.0) else factors[0]

    def correct_(self) -> None:
        """Multiply all gradients with what ``finish`` returns."""
        factor = self.finish()
        grads = [local_part(parameter.grad) for parameter in self._parameters.values() if parameter.grad is not None]
        if factor != 1.0:
            compat.multiply_(grads, factor)


def _is_equal(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=_EQUAL)


def _title_of(source: object) -> str:
    if isinstance(source, str):
        return f"global_mean `{source}`"
    return type(source).__name__


# ---------------------------------------------------------------------- the window that runs


def current_window() -> AccumulationWindow | None:
    """Return the window whose micro-batch is computed now; None outside of one, without gradients, and where one micro-batch is all."""
    window = _active.get()
    if window is None or window.is_single or not torch.is_grad_enabled():
        return None
    return window


def micro_batch_to_match() -> dict[str, object]:
    """Return what the handshake of a loss compares of the window that runs."""
    window = current_window()
    return {} if window is None else {"micro-batch of the accumulation window": window.micro_batch}


def name_value(value: object, title: str) -> None:
    """Let errors of the window name a loss that compares rows, by its value."""
    if is_open() and isinstance(value, Tensor) and value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[TITLE] = title


def counts_nothing(loss: Tensor) -> bool:
    """Say whether a loss in a window depends on a mean that counts nothing in this micro-batch, and adds nothing to the window."""
    for node, _ in walk_graph([loss], through=lambda node: window_call(node) is None):
        call = window_call(node)
        if call is not None and call.counts_nothing:
            return True
    return False


def note_parts(value: Tensor, parts: Sequence[WindowPart]) -> None:
    """Note by what a global loss is divided, for checks that look at its graph."""
    if value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[_PARTS] = tuple(parts)


def noted_parts(node: Any) -> Sequence[WindowPart] | None:
    """Return by what the global loss is divided whose value a graph node made; None for all other nodes."""
    found: Sequence[WindowPart] | None = node.metadata.get(_PARTS)
    return found


@contextlib.contextmanager
def active(window: AccumulationWindow) -> Iterator[None]:
    """Let losses inside the block count in a window."""
    before = _active.set(window)
    try:
        yield
    finally:
        _active.reset(before)


def step_inside_window(optimizer: str) -> ConfigurationError:
    """Return the error for an optimizer that steps before gradients are corrected."""
    return ConfigurationError(
        f"accumulation window: step of {optimizer}",
        expected="after the window, when its gradients are corrected",
        got="inside it",
        fix="Step after the block; for a step per micro-batch leave the window out.",
    )


def is_open() -> bool:
    """Say whether a window is open around this."""
    return _active.get() is not None
