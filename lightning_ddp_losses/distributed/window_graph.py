"""The graph of a loss inside an accumulation window: every path to a parameter must pass exactly one loss that counts in the window.

One factor corrects all gradients at the end of a window. That is right only if the value which is back-propagated is a weighted sum of such
losses, and if their gradients reach no parameter but those of the window. Anything else is an error before backward, which names the path
and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad, walk_graph
from lightning_ddp_losses.errors import ConfigurationError, expect

TITLE = "lightning_ddp_losses: loss"
"""Key of a graph node's metadata: the name of the loss whose value the node made."""

_TOP = 32  # nodes by which the form of a graph is recognised
# nodes that only pass on, scale or add the values below them
_PASSED = re.compile("Add|Sub|Mul|Div|Neg|Clone|ToCopy|_DDPSink|AccumulateGrad")
# nodes whose value is linear in each of their inputs
_LINEAR = re.compile(
    "Add|Sub|Rsub|Mul|Div|Neg|Clone|ToCopy|Alias|_DDPSink|_AttachZeroGrad|_Note|SumBackward|MeanBackward|Stack|Cat|Select|Slice|"
    "Unbind|Index|Squeeze|Unsqueeze|View|Reshape|Expand|Permute"
)


def window_call(node: Any) -> Any:
    """Return the call of a loss (``accumulation.WindowCall``) whose value a graph node made; None for all other nodes."""
    return getattr(node, "window_call", None)


class WindowGraph:
    """Walks the graphs of one window.

    Args:
        parameters: The parameters whose gradients are corrected, by name.
        gathered: Returns by name the tensors that stand in graphs for parameters which ``fully_shard`` divides.
    """

    def __init__(self, parameters: Mapping[str, Tensor], gathered: Callable[[], Mapping[str, Tensor]]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._gathered = gathered
        self._known_forms: set[tuple[str, ...]] = set()

    def calls_below(self, roots: Sequence[Tensor]) -> list[Any]:
        """Return the calls of losses in a graph.

        Args:
            roots: The values that are back-propagated.

        Raises:
            ConfigurationError: for a path that passes none of the losses, or two of them, or ends in an unknown parameter.
        """
        found = list[Any]()
        above = dict[Any, Any]()
        parents = dict[Any, list[tuple[Any, int]]]()
        queue: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
        for node in queue:
            if window_call(node) is not None:
                found.append(node)
                continue
            if self._name_of(node) is not None:
                raise self._no_divisor(node, above)
            children = node.next_functions
            if attaches_zero_grad(node):  # its other children get nothing but zeros
                children = children[:1]
            for place, (child, _) in enumerate(children):
                if child is not None:
                    parents.setdefault(child, []).append((node, place))
                if child is not None and child not in above:
                    above[child] = node
                    queue.append(child)
        _refuse_nonlinear(found, parents)
        # what lies below is looked at once for each form of the graph
        form = tuple(type(node).__name__ for node, _ in islice(walk_graph(roots), _TOP))
        if form not in self._known_forms:
            for node in found:
                self._check_below(node)
            self._known_forms.add(form)
        return [node.window_call for node in found]

    def _check_below(self, node: Any) -> None:
        """Refuse a loss of a loss, and parameters whose gradients nobody will correct."""
        title = node.window_call.title
        for inner, _ in walk_graph([], nodes=[child for child, _ in node.next_functions]):
            call = window_call(inner)
            if call is not None:
                raise ConfigurationError(
                    f"accumulation window: {title}",
                    expected="a loss of rows",
                    got=f"one that depends on {call.title}, whose divisor counts already",
                    fix="Add the two, or detach the inner one.",
                )
            name = self._name_of(inner)
            if name is None:
                continue
            if id(inner.variable) not in self._names:
                self._names.update({id(tensor): known for known, tensor in self._gathered().items()})
            expect(
                id(inner.variable) in self._names,
                f"accumulation window: {title}",
                expected="parameters of the module, or of what was handed to accumulation_window",
                got=name,
                fix="Its gradient would not be corrected: hand in the module that holds it.",
            )

    def _name_of(self, node: Any) -> str | None:
        """Return how messages name the parameter whose node this is; None for any other node."""
        variable = getattr(node, "variable", None)
        if id(variable) in self._names:
            return f"`{self._names[id(variable)]}`"
        return f"a parameter of shape {tuple(variable.shape)}" if isinstance(variable, nn.Parameter) else None

    def _no_divisor(self, leaf: Any, above: Mapping[Any, Any]) -> ConfigurationError:
        """Return the error for a path to a parameter that passes none of the losses."""
        path = [leaf]
        while path[-1] in above:
            path.append(above[path[-1]])
        path.reverse()  # from the loss down
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


def _refuse_nonlinear(calls: Sequence[Any], parents: Mapping[Any, Sequence[tuple[Any, int]]]) -> None:
    """Refuse what is no weighted sum of the losses: its slope in a micro-batch is not that in the whole window.

    Args:
        calls: Nodes of the losses' values.
        parents: Of each node, the nodes above it, and as which of their inputs.
    """
    reached = dict[Any, set[int]]()  # nodes that depend on a loss, and through which inputs
    queue = list(calls)
    for node in queue:
        for parent, place in parents.get(node, ()):
            if parent not in reached:
                queue.append(parent)
            reached.setdefault(parent, set()).add(place)
    for node, places in reached.items():
        name = node.name()
        is_product_of_two = name.startswith("Mul") and len(places) > 1
        is_denominator = name.startswith("Div") and 1 in places
        expect(
            _LINEAR.match(name) and not is_product_of_two and not is_denominator,
            "accumulation window: what is back-propagated",
            expected="a weighted sum of losses",
            got=f"{name} of {calls[0].window_call.title}",
            fix="Weigh losses by numbers and add them. What is not linear in a loss (its root, a product of two) has another "
            "slope in a micro-batch than in the whole window.",
        )
