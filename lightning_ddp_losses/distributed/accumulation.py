"""The accumulation window: losses divided by the counts of all its micro-batches, not by those of each.

The global loss of one micro-batch is ``S_m / N_m``, a sum over a count. The mean of those over M micro-batches is not the loss of one
process on all rows, ``sum(S_m) / sum(N_m)``, unless all counts are equal. The divisor ``sum(N_m)`` is known before the window if the user
gives it (``counts``), else when the last micro-batch has come. Then each micro-batch back-propagates ``S_m / D``. The estimated divisor
``D`` is the first count that is not zero times M, and when the window ends all gradients are multiplied by ``D / sum(N_m)``, once. The
estimate keeps gradients in the range that a scaler of half-precision losses expects.

| part of a loss | its count | micro-batch m back-propagates it times | at the end times |
|---|---|---|---|
| mean | ``N_m`` | ``N_m / D`` | ``D / sum(N_m)`` |
| sum | none: it is not divided | 1 | 1 |
| once (a regulariser of a weight, which has no rows) | that of the mean next to it | ``N_m / D``, in all ``sum(N_m) / D`` | as the mean |

A part counts when it is back-propagated, in any order of calls. One backward is one micro-batch. Three conditions make one
multiplication right for all parameters, and each is checked:

1. Every path from a back-propagated value to a parameter passes exactly one part. ``WindowGraph`` walks the graph before each backward.
2. A part has the same upstream gradient in every micro-batch. A function that is not linear in a mean (a root, a product of two means)
   has another slope in each. With ``totals`` the mean of the window is known before, and so is its slope.
3. The factors at the end are equal. Losses with counts in other proportions need ``counts``.

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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.global_values import (
    current_reduction,
    gradient_reduction_of,
    open_window,
    reduced_by,
)
from lightning_ddp_losses.distributed.shard import local_part
from lightning_ddp_losses.distributed.window_parts import (
    EQUAL,
    Divisor,
    WindowCall,
    WindowGraph,
    WindowPart,
    compare_slopes,
    is_equal,
    nodes_of,
    window_call,
)
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect

Counts = float | Mapping[Any, float | Sequence[float]]
"""This rank's counts in a whole window: one number for all losses, or by loss, its path in the module, or the name of a ``global_mean``."""


@contextlib.contextmanager
def accumulation_window(
    model: nn.Module,
    *losses: nn.Module,
    micro_batches: int = 1,
    counts: Counts | None = None,
    totals: Mapping[str, float | Sequence[float]] | None = None,
) -> Iterator[AccumulationWindow]:
    """Make the micro-batches inside the block one batch: after it, gradients are those of one process on all their rows.

    Equivalent to: in one process, ``loss(all rows of all ranks and micro-batches).backward()``.

    Args:
        model: The model, or its DDP. ``no_sync`` stays the caller's.
        losses: Modules with further parameters.
        micro_batches: About how many there will be. Only the size of gradients inside the block depends on it, which matters for a
            scaler of half precision.
        counts: This rank's count in all micro-batches together, as the losses count: one number for all of them, or by loss, by its path
            in the model, or by the name of a ``global_mean``. Gradients are then divided by the right number from the start, without a
            correction at the end. None: counts become known as micro-batches come.
        totals: This rank's sums in all micro-batches together, by name of a ``global_mean``, for functions that are not linear in the
            mean. They need their ``counts``.

    Yields:
        The window. Its ``expect_counts`` takes ``counts`` later, before the first backward.

    A micro-batch ends with its ``backward``. Losses: ``GlobalBatchLoss`` in mode ``elements``, ``ClassShardedLoss``, ``global_mean``, and
    as differentiable metrics MeanSquaredError and MeanAbsoluteError.

    Gradient: inside the block in proportion to the true one. On leaving it all gradients of ``model`` and ``losses`` are corrected.

    Communication: that of the losses, one handshake on leaving, and one for ``counts``. The host divides by the counts. A
        count that an accelerator alone knows (ignored targets, a reducer's limits) is waited for once a micro-batch.
        Upstream gradients on an accelerator are compared when the next window ends.

    Raises:
        ConfigurationError: for another term in the back-propagated value, losses with different divisors, an upstream gradient that
            changes between micro-batches, ``counts`` other than those of the window, an optimizer step inside the block, or windows
            inside windows.
        InputError: on every rank, for counts that are negative or not finite.
        RankMismatchError: on every rank, if ranks have different numbers of micro-batches.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import accumulation_window, global_mean
        >>> model = torch.nn.Linear(3, 1)
        >>> with accumulation_window(model):
        ...     for rows in (torch.ones(4, 3), torch.ones(2, 3)):
        ...         global_mean(model(rows).square().sum(), len(rows)).backward()
    """
    expect(open_window.get() is None, "accumulation_window", expected="no window around it", got="one that is open")
    modules = {(f"losses[{i - 1}]" if i else ""): module for i, module in enumerate((model, *losses))}
    parameters = {}
    for prefix, module in modules.items():
        parameters.update(dict(module.named_parameters(prefix=prefix)))
    window = AccumulationWindow(parameters, micro_batches, modules)
    with handshake.raising_on_all_ranks("accumulation_window"):
        window.refuse_left_gradients()
        if counts is not None or totals is not None:
            window.expect_counts(counts, totals)
        of_strategy = current_reduction()  # which makes up for it in other parameters itself
        reduction = of_strategy or gradient_reduction_of(model.named_modules())
        with reduced_by(lambda: reduction), active(window), register_optimizer_step_pre_hook(_refuse_step):
            yield window
    # before anything is judged, ranks with another number of micro-batches are found
    handshake.all_gather("end of accumulation_window", {"micro-batches": window.micro_batch - 1})
    with handshake.raising_on_all_ranks("accumulation_window"):
        window.correct_(1.0 if of_strategy or reduction is None else reduction.scale)


def _refuse_step(optimizer: Any, *_: Any) -> None:
    """Refuse a step of an optimizer inside a block."""
    raise step_inside_window(type(optimizer).__name__)


_ALL = object()  # stands for all losses, if one count serves for them


# ---------------------------------------------------------------------- one window


class AccumulationWindow:
    """The losses of one accumulation window.

    Args:
        parameters: Parameters by name. Their gradients will be corrected. One that has several names counts once.
        micro_batches: Expected number of micro-batches. Only the size of the estimate depends on it.
        modules: Modules by prefix of the paths of their losses.

    Attributes:
        micro_batch: Number of the current one, from 1 on.
    """

    def __init__(self, parameters: Mapping[str, Tensor], micro_batches: int, modules: Mapping[str, nn.Module]) -> None:
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self._graph = WindowGraph(parameters, [*modules.values()])
        self._modules = modules
        self._expected_micro_batches = max(micro_batches, 1)
        self._divisors: dict[tuple[object, int, int], Divisor] = {}
        self._expected_of_all: float | None = None
        self._without_rows: dict[object, str] = {}  # losses with a part without rows whose mean has not counted yet
        self._sources: list[object] = []  # kept, so that an id stays theirs
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
        """Note the number of the micro-batch that comes now, and whether it is the last. Without this call each backward ends one."""
        self.micro_batch, self._is_last = number, is_last

    def refuse_left_gradients(self) -> None:
        """Refuse gradients that were there before the window, which would be corrected with it.

        Raises:
            ConfigurationError: naming a parameter.
        """
        for name, parameter in self._parameters.values():
            grad = parameter.grad
            if grad is None:
                continue
            values = grad.coalesce().values() if grad.is_sparse else local_part(grad)
            expect(
                not values.any(),
                "accumulation window: gradients before it",
                expected="none, or zeros",
                got=f"that of `{name}`",
                fix="Call optimizer.zero_grad() before the window.",
            )

    # ------------------------------------------------------------------ forward

    def enter(self, source: object, title: str, parts: Sequence[WindowPart]) -> WindowCall:
        """Return a call of a loss in this micro-batch.

        Args:
            source: Loss, or its name. Calls with the same one in other micro-batches share their divisors.
            title: Name in messages.
            parts: Parts over all ranks.
        """
        key = self._key(source)
        divisors = [self._divisors.get((key, 0, i)) for i in range(len(parts))]
        means = [divisor.expected_mean for divisor in divisors if divisor is not None]
        values = [mean for mean in means if mean is not None]
        return WindowCall(key, title, parts, values if len(values) == len(parts) else None)

    def _key(self, source: object) -> object:
        """Return the key of a loss. A global loss has the key of the loss inside it."""
        if isinstance(source, str):
            return source
        source = _inner(source)
        if not any(known is source for known in self._sources):
            self._sources.append(source)
        return id(source)

    @functools.cached_property
    def _losses(self) -> dict[str, nn.Module]:
        """The modules by path, outer ones first, without the prefixes of wraps."""
        found: dict[str, nn.Module] = {}
        for prefix, module in self._modules.items():
            for name, inner in module.named_modules(prefix=prefix):
                path = ".".join(part for part in name.split(".") if part not in ("", "module"))
                found.setdefault(path, inner)
        return found

    # ------------------------------------------------------------------ counts that are known before

    def expect_counts(
        self, counts: Counts | None = None, totals: Mapping[str, float | Sequence[float]] | None = None
    ) -> None:
        """Take what losses count in the whole window.

        Each of them is divided by that from the start, without a correction at the end.

        Args:
            counts: This rank's own count in all micro-batches together: one number for all losses, or by loss, by its path in the module,
                or by the name of a ``global_mean``. Several calls of a loss in a micro-batch, or several means, take a list.
            totals: This rank's sums in all micro-batches together, by name of a ``global_mean``.

        Raises:
            InputError: on every rank, for a count that is negative or not finite, for an unknown loss, or after the first backward.
            RankMismatchError: on every rank, for other losses on some ranks.

        Communication: one handshake.
        """
        by_loss: Mapping[Any, Any] = (
            counts if isinstance(counts, Mapping) else {_ALL: counts} if counts is not None else {}
        )
        totals = totals or {}
        titles = [*map(_title_of, by_loss), *(f"total of `{name}`" for name in totals)]
        own = [*map(_several, by_loss.values()), *map(_several, totals.values())]
        with handshake.raising_on_all_ranks("expect_counts"):
            for i, (title, numbers) in enumerate(zip(titles, own, strict=True)):
                is_count = i < len(by_loss)
                is_right = all(math.isfinite(number) and (number >= 0 or not is_count) for number in numbers)
                expected = "finite counts, not negative" if is_count else "finite sums"
                expect(is_right, f"expect_counts: {title}", expected=expected, got=numbers, error=InputError)
            for name in totals:
                what = f"expect_counts: total of `{name}`"
                expect(
                    _ALL in by_loss or name in by_loss, what, expected="its count, too", got="none", error=InputError
                )
            expected, got = "before the first backward of the accumulation window", f"in micro-batch {self.micro_batch}"
            expect(not self.is_open, "expect_counts", expected=expected, got=got, error=InputError)
        must_match = {"numbers": ", ".join(f"{title} ({len(each)})" for title, each in zip(titles, own, strict=True))}
        payloads = handshake.all_gather("expect_counts", must_match, json.dumps(own).encode())
        by_title = zip(*map(json.loads, payloads), strict=True)
        sums = [list(map(math.fsum, zip(*of_ranks, strict=True))) for of_ranks in by_title]
        for source, several in zip(by_loss, sums, strict=False):
            if source is _ALL:
                (self._expected_of_all,) = several
                continue
            # a path in the module, a loss, or the name of a global_mean
            key = self._key(self._losses.get(source, source) if isinstance(source, str) else source)
            for i, number in enumerate(several):
                # several calls of one mean each, or one call of several means
                divisor = Divisor(_title_of(source), expected=number)
                self._divisors[key, i, 0] = self._divisors[key, 0, i] = divisor
        for name, several in zip(totals, sums[len(by_loss) :], strict=True):
            for i, number in enumerate(several):
                self._divisor(name, 0, i, _title_of(name)).expected_total = number

    # ------------------------------------------------------------------ backward

    def commit(self, roots: Sequence[Tensor]) -> None:
        """Count the calls that are about to be back-propagated, after a look at every path to a parameter.

        Args:
            roots: Values that are back-propagated.

        Raises:
            ConfigurationError: for a path that passes none of the losses, or two of them, or ends in an unknown parameter.
        """
        if compat.graph_task_id() != -1:  # a checkpoint back-propagates what it has computed again
            self._graph.check_below(nodes_of(roots), "a checkpoint")
            return
        if not self.is_single:
            seen = Counter[object]()
            calls, below = self._graph.calls_below(roots)
            for call in calls:
                if not call.weights:
                    self._weigh_(call, seen[call.key])
                seen[call.key] += 1
            # with the counts of all losses there is no correction, so their gradients may reach other parameters
            if any(divisor.expected is None for divisor in self._divisors.values()):
                # an outer loss was made after those that it depends on
                self._graph.check_below(below, calls[-1].title if calls else "")
        if self._is_last is None:
            self.micro_batch += 1

    def refuse_gradients_of_losses(self, outputs: Sequence[Tensor]) -> None:
        """Refuse ``torch.autograd.grad`` of a loss: the gradients that it returns would not be corrected.

        Raises:
            ConfigurationError: naming the loss.
        """
        if self.is_single or compat.graph_task_id() != -1:
            return
        for node, _ in walk_graph(outputs, through=lambda node: window_call(node) is None):
            call = window_call(node)
            expect(
                call is None,
                f"accumulation window: {call and call.title}",
                expected="backward()",
                got="torch.autograd.grad, whose result the end of the window does not correct",
                fix="Call backward(), or take the gradient of a loss of this rank's rows.",
            )

    def _weigh_(self, call: WindowCall, number: int) -> None:
        """Give a call its divisors and weights, when it is back-propagated for the first time.

        Args:
            call: The call.
            number: Number of earlier calls of the same loss in this backward. Each has separate divisors.
        """
        title = self._titled(call)
        if number:
            title += f", call {number + 1}"
        call.divisors = [self._divisor(call.key, number, i, title) for i in range(len(call.parts))]
        was_counted = [divisor.is_used for divisor in call.divisors]
        pairs = zip(call.divisors, call.parts, strict=True)
        call.weights = [divisor.count_(part, self._expected_micro_batches) for divisor, part in pairs]
        if all(part.kind != "once" for part in call.parts):
            return
        # what has no rows counts once in the whole window
        beside = next((i for i, part in enumerate(call.parts) if part.kind == "mean"), None)
        if beside is None:
            # its factor at the end is 1: in the first micro-batch
            weight = float(not any(was_counted))
            for divisor in call.divisors:
                divisor.is_sum = True
        else:
            # as the mean next to it: its weights add up to one over the factor at the end
            weight = call.weights[beside]
            self._without_rows.pop((call.key, number), None)
            if not call.divisors[beside].counted:
                weight = float(self._is_last is True)
                if not self._is_last:
                    self._without_rows[call.key, number] = title
        for i, part in enumerate(call.parts):
            if part.kind == "once":
                call.weights[i] = weight

    def _divisor(self, key: object, call: int, part: int, title: str) -> Divisor:
        """Return the divisor of a part of the n-th call of a loss in each backward."""
        divisor = self._divisors.setdefault((key, call, part), Divisor(title, expected=self._expected_of_all))
        divisor.title = title
        return divisor

    def _titled(self, call: WindowCall) -> str:
        """Return the name of the loss of a call in messages: with its path, if it has one in the modules."""
        if isinstance(call.key, str):
            return call.title
        path = next((path for path, module in self._losses.items() if path and id(_inner(module)) == call.key), None)
        return call.title if path is None else f"{call.title} `{path}`"

    # ------------------------------------------------------------------ end

    def correct_(self, scale: float = 1.0) -> None:
        """Multiply all gradients by the factor of the window. It is equal on every rank.

        Args:
            scale: Factor that makes up for the reduction by ``fully_shard``. Gradients that it does not divide are means, or those of
                class shards, and must not have it.

        Raises:
            ConfigurationError: on every rank, for losses with different factors, for one with a changed upstream gradient, or for
                unexpected counts.
        """
        divisors = list({id(divisor): divisor for divisor in self._divisors.values()}.values())
        for divisor in divisors:
            _refuse_other_numbers("count", divisor.title, divisor.expected, divisor.counted)
            _refuse_other_numbers("total", divisor.title, divisor.expected_total, divisor.total)
        expect(
            not self._without_rows,
            f"accumulation window: {next(iter(self._without_rows.values()), '')}",
            expected="a row that counts in some micro-batch",
            got="none, beside a regulariser that counts once",
            fix="Leave out the step.",
            collective=True,
        )
        used = [divisor for divisor in divisors if divisor.is_used]
        compare_slopes(used)
        factors = [divisor.factor for divisor in used] or [1.0]
        expect(
            all(is_equal(factor, factors[0]) for factor in factors),
            "accumulation window: losses with different divisors",
            expected="counts in the same proportion in every micro-batch",
            got="; ".join(divisor.describe() for divisor in used),
            fix="Give before the first micro-batch what each counts in the whole window: expect_counts({loss or name: count of this "
            "rank}), of the strategy or of what accumulation_window gives.",
            collective=True,
        )
        grads = [p.grad for _, p in self._parameters.values() if p.grad is not None]
        if not is_equal(factors[0], 1.0):
            compat.multiply_([local_part(grad) for grad in grads], factors[0])
        if scale != 1.0:
            compat.multiply_([grad for grad in grads if local_part(grad) is grad], 1 / scale)


def _refuse_other_numbers(what: str, title: str, expected: float | None, got: float | None) -> None:
    """Refuse numbers of a window that are not those that the user gave."""
    if expected is None or got is None:
        return
    expect(
        math.isclose(got, expected, rel_tol=EQUAL if what == "count" else 1e-6),
        f"accumulation window: {what} in expect_counts of {title}",
        expected=f"{expected:.17g} over all ranks and micro-batches, as was said",
        got=f"{got:.17g}",
        fix=f"Give this rank's {what} in all micro-batches of the window, as the loss counts.",
        collective=True,
    )


def _several(number: float | Sequence[float]) -> list[float]:
    return [float(each) for each in number] if isinstance(number, Sequence) else [float(number)]


def _inner(source: object) -> object:
    """Return the loss inside a global one, or the loss itself."""
    return getattr(source, "loss", source) if getattr(source, "sees_global_batch", False) else source


def _title_of(source: object) -> str:
    if source is _ALL:
        return "all losses"
    if isinstance(source, str):
        return f"global_mean `{source}`"
    return type(source).__name__


# ---------------------------------------------------------------------- the window that runs


def counts_nothing(loss: Tensor) -> bool:
    """Return whether a loss in a window depends on a mean without a count in this micro-batch, so it adds no part to the window."""
    for node, _ in walk_graph([loss], through=lambda node: window_call(node) is None):
        call = window_call(node)
        if call is not None and call.counts_nothing:
            return True
    return False


@contextlib.contextmanager
def active(window: AccumulationWindow) -> Iterator[None]:
    """Let losses inside the block count in a window when they are back-propagated (``Tensor.backward`` calls torch's function, too)."""
    plain_backward, plain_grad = torch.autograd.backward, torch.autograd.grad

    @functools.wraps(plain_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        window.commit(_listed(tensors))
        plain_backward(tensors, *args, **kwargs)

    @functools.wraps(plain_grad)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        window.refuse_gradients_of_losses(_listed(outputs))
        return plain_grad(outputs, *args, **kwargs)

    before = open_window.set(window)
    torch.autograd.backward, torch.autograd.grad = backward, grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = plain_backward, plain_grad
        open_window.reset(before)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def step_inside_window(optimizer: str) -> ConfigurationError:
    """Return the error for an optimizer that steps before gradients are corrected."""
    return ConfigurationError(
        f"accumulation window: step of {optimizer}",
        expected="after the window, when its gradients are corrected",
        got="inside it",
        fix="Step after the block; for a step per micro-batch leave the window out.",
    )
