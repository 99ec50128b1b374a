"""The accumulation window: losses divided by the counts of all micro-batches in it, instead of the counts of each one.

The global loss of one micro-batch is ``S_m / N_m``, a sum over a count. The mean of these losses over M micro-batches differs from the
loss of one process on all rows, ``sum(S_m) / sum(N_m)``, unless all counts are equal. The divisor ``sum(N_m)`` is known before the window
if the user passes it (``counts``). In that case each micro-batch back-propagates ``S_m / sum(N_m)``, which is the best option if counts are
known in advance, such as the tokens of a batch. The value of the loss is the same share, so it can be used in any expression whose sum over
the micro-batches is intended: ``exp(-s) * loss + s / M`` with a learned weight ``s``.

Without counts the user declares micro-batches (``window.micro_batch()``). Each one back-propagates ``S_m / D``, and when the window ends
all gradients are multiplied once by ``D / sum(N_m)``. ``D`` is the first nonzero count times the expected number of micro-batches. It
keeps gradients in the range that a scaler of half-precision losses expects, and is equal on all ranks.

| part of a loss | its count | micro-batch m back-propagates it times | at the end times |
|---|---|---|---|
| mean | ``N_m`` | ``N_m / D`` | ``D / sum(N_m)`` |
| sum | none, as it is not divided | 1 | 1 |
| once (a regulariser of a weight, without rows) | count of the mean next to it | ``N_m / D``, in total ``sum(N_m) / D`` | like the mean |

A part is counted when a backward through it has ended, in any order, and only once even if it is back-propagated repeatedly. Each rank
sends the sums of what it has back-propagated, so ranks may skip different micro-batches. A single factor is correct for all parameters
under three conditions, each of which is checked:

1. What is back-propagated is a weighted sum of parts (``window_graph``), with the same weights in every micro-batch and on every rank.
2. Nothing but backward changes gradients before the window ends (``window_gradients``), and every backward ends.
3. The factors at the end are equal. Losses whose counts have different proportions require ``counts``.

In a loop without Lightning, with the model's DistributedDataParallel, and ``cross_entropy`` a ``GlobalBatchLoss(CrossEntropyLoss())``::

    optimizer.zero_grad()  # a window must start without gradients
    with accumulation_window(model, micro_batches=4) as window:
        for i, (rows, labels) in enumerate(micro_batches):
            model.require_backward_grad_sync = i == 3  # what model.no_sync() sets
            with window.micro_batch():
                loss = cross_entropy(model(rows), labels)
            loss.backward()
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

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.autograd_graph import walk_graph
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.global_values import (
    current_reduction,
    gradient_reduction_of,
    open_window,
    reduced_by,
)
from lightning_ddp_losses.distributed.window_end import Note, end_of_window
from lightning_ddp_losses.distributed.window_gradients import WindowGradients
from lightning_ddp_losses.distributed.window_graph import WindowGraph, nodes_of
from lightning_ddp_losses.distributed.window_parts import SLOPES, Term, WindowCall, WindowPart, window_call
from lightning_ddp_losses.distributed.window_terms import Counts, WindowTerms
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect


@contextlib.contextmanager
def accumulation_window(
    model: nn.Module,
    *losses: nn.Module,
    micro_batches: int = 1,
    counts: Counts | None = None,
    totals: Mapping[str, float | Sequence[float]] | None = None,
) -> Iterator[AccumulationWindow]:
    """Treat the micro-batches inside the block as one batch: after it, gradients are equal to those of one process on all their rows.

    Equivalent to: in one process, ``loss(all rows of all ranks and micro-batches).backward()``.

    Args:
        model: The model, or its DDP. The caller remains responsible for ``no_sync``.
        losses: Modules with further parameters.
        micro_batches: Approximate number of micro-batches, the same on every rank. It only affects the size of gradients inside the block,
            which matters for a scaler of half precision. With ``counts`` and without ``window.micro_batch()`` it is the number of
            calls of each loss.
        counts: This rank's total count over all micro-batches, in the units in which the losses count: one number for all losses, or by
            loss, by its path in the model, or by the name of a ``global_mean``. Each loss requires its count. Gradients are then divided
            by the right number from the start, without a correction at the end. The value of a loss is this micro-batch's share of the
            window's loss, so that the values of all micro-batches add up to it. Other terms may be added to the losses, and weights of
            losses may be learned. A term that is added in each micro-batch is divided by their number: ``exp(-s) * loss + s / M``. If
            None, the forward of each micro-batch must run inside ``window.micro_batch()``.
        totals: This rank's total sums over all micro-batches, by name of a ``global_mean``, for functions that are not linear in the
            mean. They require the corresponding ``counts``. The value of each loss is then the loss of the whole window, and other terms
            are rejected.

    Yields:
        The window. Call its ``micro_batch()`` around the forward of each micro-batch. Its ``expect_counts`` accepts ``counts`` later, up to
        the first loss.

    Losses: ``GlobalBatchLoss`` in mode ``elements``, ``ClassShardedLoss``, ``global_mean``, and as differentiable metrics MeanSquaredError
    and MeanAbsoluteError. A loss is identified across micro-batches by its path in ``model`` or ``losses``, a ``global_mean`` by its
    ``name``. Losses without either are identified by the line of the program that calls them. Calls of one loss in a micro-batch are
    distinguished by their order. Consequently, a loss (or a line) that computes a different task in each micro-batch is treated as one
    task, and its means are merged: use a separate loss in the model, or a separate ``name=``, for each task.

    Not detected: gradients changed through ``.data``, and parameter hooks that are not linear in the gradient (a clamp), which are called
    with gradients that are not corrected yet.

    Gradient: inside the block, proportional to the true gradient. On exit, all gradients of ``model`` and ``losses``, and of other tensors
        that the losses depend on, are corrected. A micro-batch counts if it was back-propagated. Ranks may skip different micro-batches.
        If an exception leaves the block, the gradients are dropped.

    Communication: the collectives of the losses, one handshake on exit, and one for ``counts``. The host divides by the counts. A
        count that is only available on an accelerator (ignored targets, a reducer's limits) is waited for once per micro-batch.
        Upstream gradients on an accelerator are compared when the next window ends.

    Raises:
        ConfigurationError: on every rank, for a loss outside of a micro-batch without ``counts``, for another term in the back-propagated
            value, losses with different divisors, an upstream gradient that changes between micro-batches or ranks, a backward that failed,
            gradients that were dropped or changed inside the block, ``counts`` that differ from the window's, an optimizer step inside the
            block, unnamed losses that differ between micro-batches or ranks, or nested windows.
        InputError: on every rank, for counts that are negative or not finite.
        RankMismatchError: on every rank, if ranks have different numbers of micro-batches.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import accumulation_window, global_mean
        >>> model = torch.nn.Linear(3, 1)
        >>> with accumulation_window(model) as window:
        ...     for rows in (torch.ones(4, 3), torch.ones(2, 3)):
        ...         with window.micro_batch():
        ...             loss = global_mean(model(rows).square().sum(), len(rows))
        ...         loss.backward()
    """
    expect(
        open_window.get() is None,
        "accumulation_window",
        expected="no window around it",
        got="one that is open",
        fix="Close the outer window first, or use one window.",
    )
    modules = {"": model}
    for i, module in enumerate(losses):
        modules[f"losses[{i}]"] = module
    parameters = {}
    for prefix, module in modules.items():
        parameters.update(dict(module.named_parameters(prefix=prefix)))
    window = AccumulationWindow(parameters, micro_batches, modules)
    of_strategy = current_reduction()  # the strategy compensates for its reduction in further parameters itself
    with handshake.raising_on_all_ranks("accumulation_window"):
        reduction = of_strategy or gradient_reduction_of(model.named_modules())
        if counts is not None or totals is not None:
            window.expect_counts(counts, totals)
        with reduced_by(lambda: reduction), window.block():
            yield window
    scale = 1.0 if of_strategy or reduction is None else reduction.scale
    window.end_("accumulation_window", scale)


# ---------------------------------------------------------------------- one window


class AccumulationWindow:
    """The losses of one accumulation window.

    Args:
        parameters: Parameters by name, whose gradients will be corrected. A parameter with several names is counted once.
        micro_batches: Expected number of micro-batches, which only affects the size of the estimate.
        modules: Modules by prefix of the paths of their losses.
        compares_ranks: Whether the end of the window compares the upstream gradients of the ranks. If False, the losses do.

    Attributes:
        number: Number of the current micro-batch, starting at 1. None outside of a micro-batch.
        expected_micro_batches: Expected number of micro-batches, 1 or more, equal on all ranks.
        gradients: Gradients that it corrects.
        calls: Calls of losses, in order of creation.
        terms: Totals of the parts of these calls.
        has_begun: Whether something was back-propagated.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        micro_batches: int,
        modules: Mapping[str, nn.Module],
        *,
        compares_ranks: bool = True,
    ) -> None:
        self.gradients = WindowGradients(parameters)
        self.compares_ranks = compares_ranks
        self.number: int | None = None
        self.calls: list[WindowCall] = []
        self.terms = WindowTerms(modules)
        self.has_begun = False
        self._graph = WindowGraph(parameters, [*modules.values()])
        self.expected_micro_batches = max(micro_batches, 1)
        self._declared = 0
        self._is_last = False
        self._calls_now = Counter[str]()  # in the current micro-batch
        self._undeclared = Counter[str]()  # calls outside of declared micro-batches
        self._unnamed: dict[int, set[str]] = {}
        self._regularised: set[str] = set()  # terms without rows and without a mean that were back-propagated
        self._failure = ""

    # ------------------------------------------------------------------ micro-batches

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Declare a micro-batch: the losses inside the block belong to its rows. ``backward`` may be called inside the block or after it.

        Raises:
            ConfigurationError: inside another micro-batch, or if ``training_step`` already is one.
        """
        expect(
            self.number is None,
            "window.micro_batch()",
            expected="no micro-batch around it",
            got=f"micro-batch {self.number}, which has not ended",
            fix="In automatic optimisation each training_step is a micro-batch.",
        )
        self.begin_micro_batch(self._declared + 1, is_last=False)
        try:
            yield
        finally:
            self.number = None

    def begin_micro_batch(self, number: int, *, is_last: bool) -> None:
        """Set the number of the micro-batch that starts now, and whether it is known to be the last."""
        self.number = self._declared = number
        self.terms.micro_batches += 1
        self._is_last = is_last
        self._calls_now.clear()

    @property
    def is_single(self) -> bool:
        """Whether the window is a single micro-batch, so that its divisors are equal to the window's."""
        return self._is_last and self._declared == 1

    @property
    def averages(self) -> int:
        """Number of micro-batches over whose losses the program takes the mean, if counts are given."""
        return self.terms.averages

    @property
    def gives_shares(self) -> bool:
        """Whether the value of a loss is its share of the window's loss. With totals it is the value of the whole window."""
        return self.terms.has_counts and not self.terms.has_totals

    # ------------------------------------------------------------------ forward

    def enter(self, source: object, title: str, parts: Sequence[WindowPart], ranks: Sequence[int]) -> WindowCall:
        """Return the record of a loss call in this micro-batch.

        Args:
            source: Loss, or the name of a ``global_mean``, which may be empty.
            title: Name in messages.
            parts: Parts over all ranks.
            ranks: Ranks of the world whose rows they count.

        Raises:
            ConfigurationError: outside of a micro-batch without counts, and for a loss without a count if other losses have one.
        """
        name, shown = self.terms.known_as(source, title)
        if self.number is None:
            self._refuse_undeclared(shown)
        number = self._calls_now[name]
        if self.number is not None:
            self._calls_now[name] += 1
        else:
            self._undeclared[shown] += 1
        if number:
            shown += f", call {number + 1}"
        if name.startswith("line "):
            self._unnamed.setdefault(self.number or 0, set()).add(shown)
        terms = [self.terms.term(name, number, i, shown, ranks) for i in range(len(parts))]
        kinds = {part.kind for part in parts}
        for part, term in zip(parts, terms, strict=True):
            self._join_(part, term, has_mean="mean" in kinds)
            # each rank computes the whole regulariser, and the totals are sums over all ranks
            term.is_together |= "once" in kinds or term.expected_total is not None
        means = [term.expected_mean for term in terms]
        values = [mean for mean in means if mean is not None]
        call = WindowCall(shown, parts, terms, values if len(values) == len(parts) else None)
        is_lone = "once" in kinds and "mean" not in kinds  # the micro-batch that includes it is chosen in backward
        if self.gives_shares and not is_lone:
            self._weigh_(call)
            call.is_share = True
        self.calls.append(call)
        return call

    def _join_(self, part: WindowPart, term: Term, *, has_mean: bool) -> None:
        """Add a part to its term."""
        if part.kind == "mean":
            expect(
                not self.terms.has_counts or term.expected is not None,
                f"accumulation window: {term.title}",
                expected="its count, too, as other losses have theirs",
                got="none in expect_counts",
                fix="Give counts for all losses of the window, or for none.",
            )
            term.take_(part, self.expected_micro_batches)
        else:
            term.kind = "beside" if part.kind == "once" and has_mean else "sum"

    def _refuse_undeclared(self, shown: str) -> None:
        """Reject a loss outside of a micro-batch, unless its divisor is known."""
        expect(
            self.terms.has_counts,
            f"accumulation window: {shown}",
            expected="a forward inside a micro-batch, or the counts of the window",
            got="neither",
            fix="Declare each micro-batch:\n"
            "    with accumulation_window(model) as window:\n"
            "        with window.micro_batch():  # around each forward\n"
            "Or give before the first loss what this rank counts in the whole window: accumulation_window(model, counts=...).",
        )

    def expect_counts(
        self, counts: Counts | None = None, totals: Mapping[str, float | Sequence[float]] | None = None
    ) -> None:
        """Set the total counts of losses in the whole window.

        Each loss is divided by its count from the start, without a correction at the end.

        Args:
            counts: This rank's total count over all micro-batches: one number for all losses, or by loss, by its path in the module,
                or by the name of a ``global_mean``. Use a list for several calls of a loss in a micro-batch, or for several means.
            totals: This rank's total sums over all micro-batches, by name of a ``global_mean``.

        Raises:
            InputError: on every rank, for a count that is negative or not finite, for a total without a count, or after the first loss.
            RankMismatchError: on every rank, if the losses differ between ranks.

        Communication: one handshake.
        """
        with handshake.raising_on_all_ranks("expect_counts"):
            expected = "before the first loss of the accumulation window"
            got = f"after {len(self.calls)} of them, in micro-batch {self._declared}"
            expect(
                not self.calls,
                "expect_counts",
                expected=expected,
                got=got,
                error=InputError,
                fix="Move the call to the start of the window.",
            )
            titles, own = self.terms.checked(counts, totals)
        must_match = {"numbers": ", ".join(f"{title} ({len(each)})" for title, each in zip(titles, own, strict=True))}
        payloads = handshake.all_gather("expect_counts", must_match, json.dumps(own).encode())
        by_title = zip(*map(json.loads, payloads), strict=True)
        sums = [list(map(math.fsum, zip(*of_ranks, strict=True))) for of_ranks in by_title]
        self.terms.expect_(counts, totals, sums)

    # ------------------------------------------------------------------ backward

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Count losses inside the block in the window when they are back-propagated. An exception drops the window's gradients."""
        self.gradients.refuse_left()
        self.gradients.note()
        try:
            with active(self), register_optimizer_step_pre_hook(_refuse_step):
                yield
        except BaseException:
            self.gradients.drop_()
            raise

    @contextlib.contextmanager
    def backward(self, roots: Sequence[Tensor], inputs: object = None) -> Iterator[None]:
        """Count the calls that are back-propagated inside the block when the block has ended.

        Args:
            roots: Values that are back-propagated.
            inputs: Leaves that receive gradients. If None, all leaves.

        Raises:
            ConfigurationError: as ``begin_backward``.
        """
        if torch_compat.graph_task_id() != -1:  # a checkpoint back-propagates what it has recomputed
            leaves = self._graph.leaves_below(nodes_of(roots), "a checkpoint", is_checkpoint=True)
            self.gradients.take_leaves_(leaves)
            yield
            return
        try:
            calls = self.begin_backward(roots)
            expect(
                inputs is None or not calls,
                "accumulation window: backward(inputs=...)",
                expected="gradients of all parameters in each backward",
                got="those of some tensors alone, which others would be corrected for",
                fix="Call backward() without inputs.",
            )
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise
        self.end_backward_(calls)

    def begin_backward(self, roots: Sequence[Tensor]) -> list[WindowCall]:
        """Return the calls that are about to be back-propagated, after checking every path to them and their leaves.

        Raises:
            ConfigurationError: for a value that is not a weighted sum of losses, for leaves that cannot be corrected, and for gradients
                that were changed since the last backward.
        """
        if self.is_single:
            return []
        if self.has_begun:
            self.gradients.refuse_changed()
        else:
            self.gradients.refuse_left()
        # with shares, any sum of terms is correct. Totals allow functions of means, from which a separate term cannot be told apart
        calls, below = self._graph.calls_below(roots, takes_others=self.gives_shares)
        for call in calls:
            expect(
                any(call is known for known in self.calls),
                f"accumulation window: {call.title}",
                expected="a loss that was computed in this window",
                got="one of an earlier window, whose rows do not count in this one",
                fix="Back-propagate each loss in the window that it was computed in, or detach it.",
            )
            if not call.weights:
                self._weigh_(call)
        if not self.terms.has_counts and calls:
            self.gradients.take_leaves_(self._graph.leaves_below(below, calls[-1].title))
        self.has_begun = True
        return calls

    def end_backward_(self, calls: Sequence[WindowCall]) -> None:
        """Count calls whose backward has ended, and record the gradients that it produced."""
        for call in calls:
            call.is_counted = True
        self.gradients.note()

    def refuse_gradients_of_losses(self, outputs: Sequence[Tensor]) -> None:
        """Reject ``torch.autograd.grad`` of a loss: the gradients that it returns would not be corrected.

        Raises:
            ConfigurationError: naming the loss.
        """
        if self.is_single or torch_compat.graph_task_id() != -1:
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

    def _weigh_(self, call: WindowCall) -> None:
        """Set the weights of a call: with counts when it is created, otherwise when it is back-propagated for the first time."""
        beside = 0.0
        has_mean = False
        for part, term in zip(call.parts, call.terms, strict=True):
            if part.kind == "mean" and not has_mean:
                has_mean = True
                # if no micro-batch has had a row so far, the last one includes the whole regulariser
                beside = float(part.count) / term.divisor if term.divisor else float(self._is_last)
        weights = []
        for part, term in zip(call.parts, call.terms, strict=True):
            if part.kind == "mean":
                weights.append(float(part.count) / term.divisor if term.divisor else 0.0)
            elif part.kind == "sum":
                weights.append(1.0)
            elif has_mean:
                weights.append(beside)
            else:
                # its factor at the end is 1, so it is included in the first micro-batch only
                weights.append(float(term.key not in self._regularised))
                self._regularised.add(term.key)
        call.weights = [weight * self.averages for weight in weights]

    # ------------------------------------------------------------------ end

    def note(self) -> Note:
        """Return what this rank has back-propagated.

        Raises:
            ConfigurationError: for a backward that failed, gradients that were changed, and losses that differ between micro-batches.
        """
        expect(
            not self._failure,
            "accumulation window: a backward inside it",
            expected="one that ends",
            got=self._failure,
            fix="A backward that fails leaves parts of its gradients. Drop the gradients and leave out the step.",
        )
        if self.has_begun:
            self.gradients.refuse_changed()
        self._refuse_several_undeclared()
        expect(
            self.averages in (1, self.terms.micro_batches) or not self._graph.has_others,
            "accumulation window: terms beside its losses, or learned weights",
            expected=f"{self.averages} micro-batches, over which they are averaged",
            got=f"{self.terms.micro_batches}, where the epoch ended",
            fix="Give the loader a length (__len__), or the module a method loss_counts(batch).",
        )
        return Note.of(self.calls, self._unnamed)

    def _refuse_several_undeclared(self) -> None:
        """Reject several undeclared calls of a loss that may belong to one micro-batch and would be divided by too large a count."""
        for shown, number in self._undeclared.items():
            expect(
                number in (1, self.expected_micro_batches),
                f"accumulation window: {shown}, outside of declared micro-batches",
                expected=f"one call in each of micro_batches={self.expected_micro_batches}",
                got=f"{number} calls",
                fix=f"Give accumulation_window(model, micro_batches={number}, counts=...) if each micro-batch calls it once. If one calls "
                "it several times, put its forward into `with window.micro_batch():`, and give a count for each call.",
            )

    def note_of_all(self) -> Note:
        """Return what all ranks have back-propagated, if their losses were compared in each backward and are therefore the same."""
        return Note.of(self.calls, self._unnamed, of_all=True)

    def end_(self, title: str, scale: float = 1.0) -> None:
        """Compare the ranks, and correct all gradients.

        Args:
            title: Name of the block.
            scale: As in ``correct_``.

        Raises:
            ConfigurationError: on every rank, as ``note`` and ``correct_``.
            RankMismatchError: on every rank, if ranks have different numbers of micro-batches.

        Communication: one handshake.
        """
        try:
            with handshake.raising_on_all_ranks(title):
                note = self.note()
                note.slopes = SLOPES.compare([call for call in self.calls if call.is_counted])
            must_match = {"micro-batches": self._declared}
            payloads = handshake.all_gather(f"end of {title}", must_match, note.pack())
            self.correct_([Note.read(payload) for payload in payloads], scale)
        except BaseException:
            self.gradients.drop_()
            raise

    def correct_(self, notes: Sequence[Note], scale: float = 1.0) -> None:
        """Multiply all gradients by the factor of the window, which is equal on every rank.

        Args:
            notes: What all ranks have back-propagated, in rank order. Only this rank's note if the ranks have already compared their
                losses.
            scale: Factor that compensates for the reduction by ``fully_shard``. It must not be applied to gradients that
                ``fully_shard`` does not divide, which are means or belong to class shards.

        Raises:
            ConfigurationError: on every rank, for losses with different factors, for ranks that weigh or back-propagate losses
                differently, or for unexpected counts.
        """
        factor = end_of_window(self.terms.all(), self.calls, notes)
        self.gradients.multiply_(factor, divided_by=scale)
        for call in self.calls:  # a backward after the window would not be corrected
            call.weights = []


# ---------------------------------------------------------------------- the current window


@contextlib.contextmanager
def active(window: AccumulationWindow) -> Iterator[None]:
    """Count losses inside the block in a window when they are back-propagated (``Tensor.backward`` also calls torch's function)."""
    plain_backward, plain_grad = torch.autograd.backward, torch.autograd.grad
    plain_unscale = torch.amp.GradScaler.unscale_

    @functools.wraps(plain_backward)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        inputs = args[_INPUTS] if len(args) > _INPUTS else kwargs.get("inputs")
        with window.backward(_as_tensors(tensors), inputs):
            plain_backward(tensors, *args, **kwargs)

    @functools.wraps(plain_grad)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        window.refuse_gradients_of_losses(_as_tensors(outputs))
        return plain_grad(outputs, *args, **kwargs)

    @functools.wraps(plain_unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        # all gradients are divided by one number, so the factor of the window is the same before and after
        window.gradients.refuse_changed()
        plain_unscale(self, optimizer)
        window.gradients.note()

    before = open_window.set(window)
    torch.autograd.backward, torch.autograd.grad = backward, grad
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = plain_backward, plain_grad
        torch.amp.GradScaler.unscale_ = plain_unscale  # type: ignore[method-assign]
        open_window.reset(before)


_INPUTS = 4  # index of ``inputs`` among the arguments of ``torch.autograd.backward`` after the tensors


def _as_tensors(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _refuse_step(optimizer: Any, *_: Any) -> None:
    """Reject a step of an optimizer inside a block."""
    raise step_inside_window(type(optimizer).__name__)


def step_inside_window(optimizer: str) -> ConfigurationError:
    """Return the error for an optimizer that steps before gradients are corrected."""
    return ConfigurationError(
        f"accumulation window: step of {optimizer}",
        expected="after the window, when its gradients are corrected",
        got="inside it",
        fix="Step after the block; for a step per micro-batch leave the window out.",
    )
