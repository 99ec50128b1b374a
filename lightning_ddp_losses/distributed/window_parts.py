"""The parts of losses in an accumulation window: their counts, divisors and weights, and the graphs that they stand in.

A loss that is called in a window marks the value of each of its parts (``WindowCall.mark``). When the value is back-propagated, its
gradient is multiplied by the part's weight, and the upstream gradient is noted. It must be the same in every micro-batch
(``compare_slopes``). ``accumulation`` has the mathematics.

One factor corrects all gradients at the end of a window. That is right only if the value which is back-propagated is a weighted sum of
such losses, and if their gradients reach no parameter but those of the window. ``WindowGraph`` walks the graph before each backward.
Anything else is an error then, which names the path and the fix.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad, walk_graph
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.errors import ConfigurationError, expect

EQUAL = 1e-12  # relative difference of two factors that counts as rounding
_PARTS = "lightning_ddp_losses: parts"  # a key of a graph node's metadata
_call_numbers = itertools.count()


@dataclass(frozen=True)
class WindowPart:
    """One part of a loss in one micro-batch.

    Attributes:
        kind: Kind in the table of ``accumulation``.
        count: N_m of a mean over all ranks. Outside a window it may still be on its device.
        total: S_m over all ranks, of a ``global_mean`` on the CPU. None: unknown.
    """

    kind: Literal["mean", "sum", "once"]
    count: Any = 0.0
    total: float | None = None


@dataclass
class Divisor:
    """The divisor of one part of a loss, over a window.

    Attributes:
        title: Title of the loss.
        expected: The sum over all ranks of the given ``counts``.
        expected_total: The sum over all ranks of the given ``totals``.
        estimate: D, None until a count that is not zero was back-propagated.
        counted: Sum of the counts that were back-propagated.
        total: Sum of the totals that were back-propagated. None: one of them is unknown.
        is_sum: It is not divided.
        slopes: Upstream gradient of each micro-batch that it counts in.
        functions: Functions of it that are back-propagated, for messages.
    """

    title: str
    expected: float | None = None
    expected_total: float | None = None
    estimate: float | None = None
    counted: float = 0.0
    total: float | None = 0.0
    is_sum: bool = False
    slopes: list[Tensor] = field(default_factory=list)
    functions: str = ""

    def count_(self, part: WindowPart, micro_batches: int) -> float:
        """Count a part that is back-propagated. Return its weight in this micro-batch."""
        if part.kind == "sum":
            self.is_sum = True
            return 1.0
        if part.kind == "once" or not part.count:
            return 0.0
        if self.estimate is None:
            self.estimate = self.expected or part.count * micro_batches
        self.counted += part.count
        self.total = None if self.total is None or part.total is None else self.total + part.total
        return float(part.count) / self.estimate

    @property
    def expected_mean(self) -> float | None:
        """The mean of the whole window, if both its total and its count were given."""
        return self.expected_total / self.expected if self.expected and self.expected_total is not None else None

    @property
    def is_used(self) -> bool:
        """Whether anything of it was back-propagated."""
        return self.is_sum or self.counted > 0

    @property
    def factor(self) -> float:
        """What corrects the estimate at the end."""
        if self.is_sum:
            return 1.0
        assert self.estimate is not None
        return self.estimate / self.counted

    def describe(self) -> str:
        """Return the divisor that was used, and the one that it should have been."""
        if self.is_sum:
            return f"{self.title}: a sum, not divided"
        return f"{self.title}: divided by {self.estimate:.17g}, counted {self.counted:.17g}"


@dataclass(eq=False)
class WindowCall:
    """One call of a loss in a window.

    Attributes:
        key: Identity of the loss. Its calls in other micro-batches share their divisors.
        title: Title of the loss in messages.
        parts: Parts of its value, over all ranks.
        values: Value of each part in the whole window, if ``totals`` were given. None: unknown.
        number: Calls of a window count up.
        functions: Names of the functions of its value that are back-propagated, for messages.
        divisors: Divisors by part, once the call is back-propagated.
        weights: Factor of the gradient of each part in this micro-batch, once the call is back-propagated.
    """

    key: object
    title: str
    parts: Sequence[WindowPart]
    values: list[float] | None = None
    number: int = field(default_factory=lambda: next(_call_numbers))
    functions: str = ""
    divisors: Sequence[Divisor] = ()
    weights: list[float] = field(default_factory=list)

    def mark(self, value: Tensor, first: int = 0) -> Tensor:
        """Return the value of a part, or of several parts from ``first`` on. Its gradient will be weighed."""
        return _Part.apply(value, self, first)  # type: ignore[no-untyped-call, no-any-return]

    @property
    def counts_nothing(self) -> bool:
        """Whether one of its means has no count in this micro-batch: a value that may be no number, and no gradient."""
        return any(part.kind == "mean" and not part.count for part in self.parts)


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, call: WindowCall, first: int) -> Tensor:
        ctx.window_call, ctx.first = call, first
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        call: WindowCall = ctx.window_call
        expect(
            call.weights,
            f"accumulation window: {call.title}",
            expected="Tensor.backward or torch.autograd.backward inside the window",
            got="another way to back-propagate it, or one outside of the window",
        )
        places = slice(ctx.first, ctx.first + grad.numel())
        for divisor, part, slope in zip(
            call.divisors[places], call.parts[places], grad.reshape(-1).unbind(), strict=True
        ):
            if part.kind == "mean" and part.count:
                divisor.slopes.append(slope.detach())
                divisor.functions = call.functions
        weights = call.weights[places]
        return grad * (weights[0] if grad.ndim == 0 else grad.new_tensor(weights)), None, None


def is_equal(left: float, right: float) -> bool:
    """Return whether two counts or factors differ by rounding at most."""
    return math.isclose(left, right, rel_tol=EQUAL)


# of the last window on an accelerator, which the host does not wait for
_late_slopes: list[tuple[Divisor, HostNumbers]] = []


def compare_slopes(divisors: Sequence[Divisor] = ()) -> None:
    """Compare the upstream gradients of a window. Those on an accelerator are compared at the next call, which waits for no device.

    Args:
        divisors: Divisors of a window that ends. None are given when training ends.

    Raises:
        ConfigurationError: on every rank, for a loss without the same upstream gradient in all micro-batches.
    """
    due = _late_slopes[:]
    _late_slopes.clear()
    for divisor in divisors:
        if len(divisor.slopes) > 1:
            is_on_host = divisor.slopes[0].device.type == "cpu"
            (due if is_on_host else _late_slopes).append((divisor, HostNumbers(divisor.slopes)))
    for divisor, numbers in due:
        slopes, rounding = numbers.read(), 8 * torch.finfo(divisor.slopes[0].dtype).eps
        expect(
            all(math.isclose(slope, slopes[0], rel_tol=rounding) for slope in slopes),
            "accumulation window: what is back-propagated",
            expected="a weighted sum of losses, with the same weights in every micro-batch",
            got=f"{divisor.functions}{divisor.title}, whose upstream gradients are {', '.join(f'{s:.6g}' for s in slopes)}",
            fix="Weigh losses by the same numbers in all micro-batches, and add them. What is not linear in a global_mean (its root, a "
            "product of two) needs the counts and totals of the whole window.",
        )


def note_parts(value: Tensor, parts: Callable[[], Sequence[WindowPart]]) -> None:
    """Note the parts of a global loss, for checks that look at its graph. Only they compute them."""
    if value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[_PARTS] = parts


def noted_parts(node: Any) -> Sequence[WindowPart] | None:
    """Return the parts of the global loss that made its value at a graph node. None for other nodes."""
    parts: Callable[[], Sequence[WindowPart]] | None = node.metadata.get(_PARTS)
    return None if parts is None else parts()


# ---------------------------------------------------------------------- the graph of a window


TITLE = "lightning_ddp_losses: loss"
"""Key of a graph node's metadata: the name of the loss that has its value from the node."""

# nodes that only pass on, scale or add the values below them
_PASSED = re.compile("Add|Sub|Mul|Div|Neg|Clone|ToCopy|_DDPSink|View|AccumulateGrad")
_ADDED = re.compile("Add|Sub|Neg|Clone|ToCopy|_DDPSink|View|_AttachZeroGrad|_ValueWithGrad")
_CHECKPOINT = "CheckpointFunctionBackward"  # its parameters are not in the graph


def window_call(node: Any) -> WindowCall | None:
    """Return the call of a loss that made its value at a graph node. None for other nodes."""
    found: WindowCall | None = getattr(node, "window_call", None)
    return found


def nodes_of(roots: Sequence[Tensor]) -> list[Any]:
    """Return the graph nodes that made some values. A value without a graph has none."""
    return [root.grad_fn for root in roots if root.grad_fn is not None]


class WindowGraph:
    """Walks the graphs of one window.

    Args:
        parameters: Corrected parameters, by name.
        modules: Modules with parameters that ``fully_shard`` may divide. Then the gathered tensors stand in graphs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._modules = modules

    def calls_below(self, roots: Sequence[Tensor]) -> tuple[list[WindowCall], list[Any]]:
        """Return the calls of losses in a graph, each once, in the order of their making, and the nodes below them.

        Args:
            roots: The values that are back-propagated.

        Raises:
            ConfigurationError: for a path to a parameter that passes none of the losses.
        """
        found, below = dict[WindowCall, None](), list[Any]()
        above = dict[Any, Any]()
        queue = nodes_of(roots)
        for node in queue:
            call, children = window_call(node), node.next_functions
            if call is not None:
                call.functions = _functions_above(node, above)
                found[call] = None
                below += [child for child, _ in children]
                continue
            if self._name_of(node) is not None:
                raise self._no_divisor(node, above)
            if attaches_zero_grad(node):  # its other children get zeros alone
                children = children[:1]
            for child, _ in children:
                if child is not None and child not in above:
                    above[child] = node
                    queue.append(child)
        return sorted(found, key=lambda call: call.number), below

    def check_below(self, nodes: Sequence[Any], title: str) -> None:
        """Refuse what reaches a parameter through two losses, and parameters with gradients that would not be corrected.

        Args:
            nodes: Nodes below a loss.
            title: Title of the loss in messages.

        Raises:
            ConfigurationError: naming the losses, or the parameter.
        """
        for node, _ in walk_graph([], nodes=nodes):
            call = window_call(node)
            if call is not None:
                raise ConfigurationError(
                    f"accumulation window: {title}",
                    expected="a loss of rows",
                    got=f"one that depends on {call.title}, whose divisor counts already",
                    fix="Add the two, or detach the inner one.",
                )
            variable = getattr(node, "variable", None)
            if not isinstance(variable, Tensor) or self._is_known(variable) or not isinstance(variable, nn.Parameter):
                continue
            raise ConfigurationError(
                f"accumulation window: {title}",
                expected="parameters of the module, or of what was handed to accumulation_window",
                got=self._name_of(node),
                fix="Its gradient would not be corrected: hand in the module that holds it.",
            )

    def _is_known(self, variable: Tensor) -> bool:
        if id(variable) not in self._names:
            for module in self._modules:
                self._names.update({id(tensor): name for name, tensor in compat.gathered_parameters(module).items()})
        return id(variable) in self._names

    def _name_of(self, node: Any) -> str | None:
        """Return the name of the parameters of a node in messages. None for any other node."""
        if node.name() == _CHECKPOINT:
            return "the parameters of a re-entrant checkpoint"
        variable = getattr(node, "variable", None)
        if id(variable) in self._names:
            return f"`{self._names[id(variable)]}`"
        return f"a parameter of shape {tuple(variable.shape)}" if isinstance(variable, nn.Parameter) else None

    def _no_divisor(self, leaf: Any, above: Mapping[Any, Any]) -> ConfigurationError:
        """Return the error for a path to a parameter that passes none of the losses."""
        path = _path_to(leaf, above)
        titles = [node.metadata[TITLE] for node in path if TITLE in node.metadata]
        terms = [node.name() for node in path if not _PASSED.match(node.name())]
        if titles:
            term = titles[0]
            fix = (
                "It is no sum over rows that a micro-batch has a part of: use lightning_ddp_losses.microbatched for the whole "
                "batch, and windows of one micro-batch."
            )
        else:
            term = " of ".join(["a term", *terms[:3]])
            fix = "Write it as global_mean(total, count), or wrap a loss of torch.nn or pytorch-metric-learning in GlobalBatchLoss."
        return ConfigurationError(
            "accumulation window: what is back-propagated",
            expected="losses that are divided by what the whole window counts",
            got=f"{term}, which reaches {self._name_of(leaf)}",
            fix=fix,
        )


def _path_to(node: Any, above: Mapping[Any, Any]) -> list[Any]:
    """Return the nodes from the back-propagated value down to a node."""
    path = [node]
    while path[-1] in above:
        path.append(above[path[-1]])
    return path[::-1]


def _functions_above(node: Any, above: Mapping[Any, Any]) -> str:
    """Return the functions of a loss that are back-propagated, for messages. Those that only add or pass on are left out."""
    names = [each.name() for each in _path_to(node, above)[:-1]]
    return "".join(f"{name} of " for name in names if not _ADDED.match(name))
