"""`certify`: is DDP's mean over ranks right for a loss?

1. The loss runs on the whole example, and on its two halves as two simulated ranks. If the mean of the halves is another value or
   gradient, the loss is wrong: that is a counterexample.
2. It is traced on two unequal parts (`tracing`). If both traces say that its value is a mean over rows, it is right for each number of
   ranks and all rows. The traces name the lines that decide.
3. The plan of ``GlobalBatchLoss`` says what that would send.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.core.function_loss import as_module
from lightning_ddp_losses.core.inputs import children_of, leaves, rebuild_nest
from lightning_ddp_losses.core.random_state import devices_in_use, global_generators, preserve_random_state
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.losses.certificates.certificate import Certificate, Reason, Sent, Verdict
from lightning_ddp_losses.losses.certificates.followed_numbers import Followed
from lightning_ddp_losses.losses.certificates.kinds import Broken, Constant, Kind, Sum, merged
from lightning_ddp_losses.losses.certificates.lines import blame_here, blame_of_error
from lightning_ddp_losses.losses.certificates.tracing import Trace
from lightning_ddp_losses.losses.global_batch_options import refuse_unfit
from lightning_ddp_losses.losses.plans.global_batch import LossPlan

RANKS = 8
"""Ranks that the bytes are stated for."""
_SIZES = (11, 13, 17, 19, 23, 29, 31)  # rows of the traced parts
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_SMALLEST = 1e-6  # values and gradients below this are rounding errors of a loss that is actually zero
_SEED = 0


def certify(loss: Callable[..., Tensor], *example: Any) -> Certificate:
    """Determine whether plain DDP is right for a loss, and if not, which line is wrong, without ranks and without data.

    DDP computes the mean of the ranks' gradients. This is the gradient of the whole batch only if the loss is a mean over rows. The loss is
    traced on parts of the example. It is *right* if all operators are allowed: each operator that removes rows is a mean, divided by the
    number of elements that it reduces, and only linear operators follow. The result then holds for every number of ranks and all rows, as
    long as the Python branches in ``limits`` have the same outcome as on the example. *Wrong* means that there is a counterexample: two
    simulated ranks differ from the whole example. In all other cases the verdict is *cannot tell*.

    Args:
        loss: A module or function from rows to a scalar, from torch.nn or your own code. A module is copied and not changed.
        *example: Its arguments: tensors with rows in dimension 0, which may be nested in lists and dicts. 0-dim tensors and other values
            do not belong to rows. Tensors that receive a gradient must have ``requires_grad=True``. If there are none, all floating-point
            tensors receive a gradient. 8 rows are enough. Use realistic values, so that the loss takes the same branches as in training.

    Returns:
        The ``Certificate``: ``verdict``, ``reasons`` and ``limits`` with file and line, and what ``GlobalBatchLoss`` sends.

    Communication: none.

    Raises:
        InputError: for an example without rows, with one row, or with different numbers of rows.
        ConfigurationError: for a loss that does not return a scalar, or whose result does not have a gradient.

    Example:
        >>> import torch
        >>> certify(torch.nn.MSELoss(), torch.randn(8, 2), torch.randn(8, 2)).verdict
        'right'
        >>> certify(lambda rows: rows.mean(0).square().sum(), torch.randn(8, 2)).verdict
        'wrong'
    """
    expect(
        callable(loss) and not isinstance(loss, type),
        "certify: loss",
        expected="a module or function",
        got=repr(loss),
        fix="Pass an object, such as torch.nn.MSELoss(), not a class.",
    )
    expect(
        not getattr(loss, "sees_global_batch", False),
        "certify: loss",
        expected="a loss of the rows of one rank",
        got=f"{type(loss).__name__}, which is exact for all ranks",
        fix="Certify the loss inside it: certify(loss.wrapped, ...).",
    )
    given = _Example.of(example)
    states = preserve_random_state(global_generators(devices_in_use()), seed=_SEED)
    with states, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss runs many times
        subject = _prepared(loss, given)
        changes = subject.changes_with_calls()
        difference = None if changes else subject.difference_of_halves()
        sizes = given.sizes_to_trace(loss)
        traces = [subject.traced(size) for size in sizes]
    verdict, reasons = _judge(_name_of(loss), traces, changes, difference)
    limits = merged(*(each.branches + each.assumptions for each in traces))
    return Certificate(verdict, reasons, limits, sent_for(loss, given.tensors, given.rows), difference)


# ---------------------------------------------------------------------- the example


@dataclass(frozen=True)
class _Example:
    """The arguments of a loss.

    Attributes:
        args: The arguments.
        rows: Number of rows.
    """

    args: tuple[Any, ...]
    rows: int

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> _Example:
        """Check an example."""
        found = [(path, leaf) for path, leaf in leaves(args, "example") if isinstance(leaf, Tensor) and leaf.ndim]
        fix = "Give the arguments of the loss: certify(loss, torch.randn(8, 16), torch.randint(4, (8,)))."
        expected = "tensors whose dimension 0 counts rows"
        expect(found, "certify: example", expected=expected, got="none", fix=fix, error=InputError)
        lengths = {path: leaf.shape[0] for path, leaf in found}
        listed = ", ".join(f"{path}: {length}" for path, length in lengths.items())
        expect(
            len(set(lengths.values())) == 1,
            "certify: example",
            expected="the same number of rows in each tensor",
            got=listed,
            fix="A tensor that is no batch belongs into the loss: certify(lambda rows: loss(rows, weights), rows).",
            error=InputError,
        )
        rows = found[0][1].shape[0]
        fix = "8 rows are enough."
        expect(rows >= 2, "certify: example", expected="2 rows or more", got=rows, fix=fix, error=InputError)
        return cls(args, rows)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [leaf for _, leaf in leaves(self.args) if isinstance(leaf, Tensor)]

    def sizes_to_trace(self, loss: Any) -> list[int]:
        """Return two numbers of rows that no dimension of the example and of the loss's tensors is a multiple of."""
        others = {size for tensor in self.tensors for size in tensor.shape[1:]}
        if isinstance(loss, nn.Module):
            for tensor in (*loss.parameters(), *loss.buffers()):
                others.update(tensor.shape)
        free = [size for size in _SIZES if not any(other and other % size == 0 for other in others)]
        return (free if len(free) > 1 else list(_SIZES))[:2]


def _with_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nest with its tensors changed."""
    parts = children_of(nest)
    if parts is not None:
        return rebuild_nest(nest, [_with_tensors(part, change) for _, part in parts])
    return change(nest) if isinstance(nest, Tensor) else nest


# ---------------------------------------------------------------------- runs


@dataclass(frozen=True)
class _Traced:
    """What a trace has found.

    Attributes:
        kind: Kind of the value.
        branches: Branches of Python on values.
        assumptions: What else the kind assumes about values.
        escapes: What cannot be followed.
        numbers: Numbers among the arguments of each operator.
        rounding: Relative difference that may be rounding in the narrowest dtype of its operators.
    """

    kind: Kind
    branches: tuple[Reason, ...] = ()
    assumptions: tuple[Reason, ...] = ()
    escapes: tuple[Reason, ...] = ()
    numbers: tuple[Any, ...] = ()
    rounding: float = 1e-9


@dataclass(frozen=True)
class _Subject:
    """A loss with its example, in the dtype of the runs.

    Attributes:
        loss: The loss. Each run has a copy.
        example: The example.
        dtype: Dtype of floating-point tensors. If None, their dtype is not changed.
        wants_grad: Whether each tensor of the example receives a gradient, in order.
    """

    loss: Any
    example: _Example
    dtype: torch.dtype | None
    wants_grad: tuple[bool, ...]

    def copy_of_loss(self) -> Any:
        """Return the loss for one run."""
        if not isinstance(self.loss, nn.Module):
            return self.loss
        found = copy.deepcopy(self.loss)
        return found if self.dtype is None else found.to(self.dtype)

    def arguments(self, rows: Sequence[int]) -> tuple[Any, ...]:
        """Return new leaves with some rows of the example."""
        index = torch.tensor(list(rows))
        wanted = iter(self.wants_grad)

        def taken(tensor: Tensor) -> Tensor:
            found = tensor.detach()
            found = found.index_select(0, index.to(tensor.device)) if tensor.ndim else found.clone()
            if self.dtype is not None and found.is_floating_point():
                found = found.to(self.dtype)
            return found.requires_grad_(next(wanted))

        return tuple(_with_tensors(self.example.args, taken))

    def value_and_gradients(self, rows: Sequence[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the value, the gradients of the loss's parameters, and the gradients of the rows."""
        loss = self.copy_of_loss()
        args = self.arguments(rows)
        value = loss(*args)
        _check_value(value)
        of_rows = [leaf for _, leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.requires_grad]
        parameters = [each for each in loss.parameters() if each.requires_grad] if isinstance(loss, nn.Module) else []
        found = torch.autograd.grad(value, [*parameters, *of_rows], allow_unused=True, materialize_grads=True)
        count = len(parameters)
        return value.detach(), list(found[:count]), list(found[count:])

    def changes_with_calls(self) -> bool:
        """Return whether a second call on the same rows gives another value: the loss draws random numbers, or keeps a state."""
        loss = self.copy_of_loss()
        values = [loss(*self.arguments(range(self.example.rows))).detach() for _ in range(2)]
        return not torch.equal(*(value.nan_to_num() for value in values))

    def difference_of_halves(self) -> float | None:
        """Return how far two simulated ranks are from the whole example, relative to it. None if they cannot run."""
        half = self.example.rows // 2
        parts = [range(half), range(half, 2 * half)]
        value, of_parameters, of_rows = self.value_and_gradients(range(2 * half))
        try:
            first, second = (self.value_and_gradients(part) for part in parts)
        except Exception:  # the user's loss may raise anything on a part
            return None
        pairs = [(value, (first[0] + second[0]) / 2)]
        pairs += [(whole, (a + b) / 2) for whole, a, b in zip(of_parameters, first[1], second[1], strict=True)]
        for whole, a, b in zip(of_rows, first[2], second[2], strict=True):
            joined = torch.cat([a, b]) / 2 if whole.ndim else (a + b) / 2
            pairs.append((whole, joined))
        # relative to the largest: a gradient that is zero in truth is all rounding
        scale = max(_SMALLEST, *(float(each.norm()) for pair in pairs for each in pair))
        found = [float((whole - part).norm()) for whole, part in pairs]
        if not all(map(math.isfinite, (scale, *found))):
            return None
        return max(found) / scale

    def traced(self, size: int) -> _Traced:
        """Trace the loss on a number of rows."""
        trace = Trace(size)
        loss = self.copy_of_loss()
        args = self.arguments([row % self.example.rows for row in range(size)])
        of_rows = [leaf for _, leaf in leaves(args) if isinstance(leaf, Tensor) and leaf.ndim]
        try:
            kind, value = trace.run(loss, args, of_rows)
        except Exception as error:  # the user's loss may raise anything on a part
            why = f"the loss cannot be followed on a part of the example: {type(error).__name__}: {error}"
            kind = Broken((blame_of_error(error, _name_of(loss))(why.splitlines()[0]),))
            value = None
        escapes = [*trace.escapes, *_own_gradients(value), *_states_of_rows(loss, trace)]
        rounding = max(_ROUNDING.get(dtype, 0.1) for dtype in (torch.float64, *trace.dtypes))
        return _Traced(
            kind, tuple(trace.branches), tuple(trace.assumptions), tuple(escapes), tuple(trace.numbers), rounding
        )


def _name_of(loss: Any) -> str:
    """Return the name of a function, or of a module's class."""
    return str(getattr(loss, "__name__", type(loss).__name__))


def _prepared(loss: Any, example: _Example) -> _Subject:
    """Return the subject in float64 if the loss runs in it, else in the dtype of the example."""
    given = tuple(tensor.requires_grad for tensor in example.tensors)
    floating = tuple(tensor.is_floating_point() for tensor in example.tensors)
    expected = "a floating tensor, which gets the gradient"
    expect(
        any(floating),
        "certify: example",
        expected=expected,
        got="none",
        error=InputError,
        fix="Pass the embeddings or logits that the loss compares, as float32 or float64.",
    )
    first = floating.index(True)
    only_first = tuple(place == first for place in range(len(floating)))
    choices = [given] if any(given) else [floating, only_first]
    rows = range(2 * (example.rows // 2))
    for dtype in (torch.float64, None):
        for wants_grad in choices:
            subject = _Subject(loss, example, dtype, wants_grad)
            try:
                subject.value_and_gradients(rows)
            except ConfigurationError:
                raise
            except Exception:  # perhaps it runs in the dtype that was given
                continue
            return subject
    # the user's own error
    subject.value_and_gradients(range(example.rows))
    return subject


def _check_value(value: object) -> None:
    """Reject a value that is not a loss."""
    is_tensor = isinstance(value, Tensor)
    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    fix = "Let the loss reduce: reduction='mean', or .mean()."
    if not is_tensor:
        fix = "Return the loss itself: certify(lambda rows: model_step(rows)['loss'], rows)."
    expected = "a scalar tensor"
    expect(isinstance(value, Tensor) and value.numel() == 1, "certify: loss", expected=expected, got=got, fix=fix)
    assert isinstance(value, Tensor)
    expect(
        value.requires_grad,
        "certify: loss",
        expected="a value with a gradient",
        got="one without",
        fix="Compute it from the floating tensors of the example, without detach() or no_grad().",
    )


def _own_gradients(value: Tensor | None) -> Iterator[Reason]:
    """Yield a reason for each function in a graph whose backward is Python of the user's."""
    if value is None or value.grad_fn is None:
        return
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += [after for after, _ in node.next_functions if after is not None]
        if issubclass(type(node), BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            yield Reason("", 0, "", name, "an autograd.Function, whose backward is not traced")


def _states_of_rows(loss: Any, trace: Trace) -> Iterator[Reason]:
    """Yield a reason for each attribute of a module that follows from rows after a call."""
    if not isinstance(loss, nn.Module):
        return
    for path, module in loss.named_modules():
        for name, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            if any(_follows_from_rows(each, trace) for each in torch_compat.tree_leaves(value)):
                place = f"{path}.{name}" if path else name
                yield Reason(
                    "", 0, "", place, "an attribute that the loss sets, and that follows from the rows of one rank"
                )


def _follows_from_rows(value: Any, trace: Trace) -> bool:
    if isinstance(value, Followed):
        return True
    return isinstance(value, Tensor) and not isinstance(trace.known.kind(value, blame_here("state")), Constant)


# ---------------------------------------------------------------------- the verdict


def _judge(
    name: str, traces: list[_Traced], changes: bool, difference: float | None
) -> tuple[Verdict, tuple[Reason, ...]]:
    """Return the verdict, and the reasons unless it is "right"."""
    to_blame = merged(*(_blame(each) for each in traces), _other_numbers(*traces))
    if changes:
        why = "another value in a second call on the same rows: random numbers, or a state that the loss keeps"
        to_blame = (*to_blame, Reason("", 0, "", name, why))
    is_different = difference is not None and difference > max(each.rounding for each in traces)
    if to_blame and is_different:
        return "wrong", to_blame
    if to_blame:
        return "cannot tell", merged(*(each.escapes for each in traces), to_blame)
    counts = merged(*(each.kind.scale.counts for each in traces if isinstance(each.kind, Sum)))
    if counts:
        return "right for equal counts only", counts
    branches = merged(*(each.branches for each in traces))
    if branches:
        return ("wrong" if is_different else "right on this path only"), branches
    if is_different:
        why = "operators say that it is a mean over rows, and two simulated ranks differ from the whole example"
        return "cannot tell", (Reason("", 0, "", name, why),)
    return "right", ()


def _blame(traced: _Traced) -> tuple[Reason, ...]:
    """Return why a trace does not show a mean over rows. Empty if it does."""
    kind = traced.kind
    found: tuple[Reason, ...] = ()
    if isinstance(kind, Broken):
        found = kind.reasons
    elif isinstance(kind, Sum):
        found = kind.blame()
    else:
        found = (Reason("", 0, "", "the loss", "its value is not a mean over rows: it depends on none of them"),)
    return merged(found, traced.escapes)


def _other_numbers(first: _Traced, second: _Traced) -> tuple[Reason, ...]:
    """Return the first operator that has another number on another number of rows: torch computes with their number inside."""
    nothing = (None, ())
    for one, other in zip_longest(first.numbers, second.numbers, fillvalue=nothing):
        blame = one[0] or other[0]
        if blame is None or one == other:
            continue
        if one[0] is None or other[0] is None or one[0].operator != other[0].operator:
            return (blame("other operators run on another number of rows"),)
        if one[1] != other[1]:
            return (blame(f"a number that changes with the number of rows: {one[1]} and {other[1]}"),)
    return ()


# ---------------------------------------------------------------------- what is sent


def sent_for(loss: Any, tensors: Sequence[Tensor], rows: int) -> Sent:
    """Return what ``GlobalBatchLoss`` sends for a loss.

    Args:
        loss: The loss.
        tensors: Its arguments.
        rows: Rows of each rank.
    """
    module = as_module(loss)
    try:
        refuse_unfit(module)
    except ConfigurationError as error:
        return Sent("", str(error), RANKS, rows, 0)
    configuration = Configuration()
    text = configuration.read(module)
    plan = LossPlan.of(module, "own_slice", text, configuration.unread)
    evaluation = plan.modes[0]
    gathered = 0
    if evaluation in ("rows", "replicated"):
        gathered = RANKS * sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.ndim)
    shown = str(plan).partition("\ncompared:")[0]
    return Sent(evaluation, shown, RANKS, rows, gathered)
