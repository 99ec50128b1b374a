"""The graph of a loss inside an accumulation window: every path to a parameter must pass exactly one loss that counts in the window.

One factor corrects all gradients at the end of a window. That is right only if the value which is back-propagated is a weighted sum of such
losses, and if their gradients reach no parameter but those of the window. Anything else is an error before backward, which names the path
and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad, walk_graph
from lightning_ddp_losses.errors import ConfigurationError

TITLE = "lightning_ddp_losses: loss"
"""Key of a graph node's metadata: the name of the loss whose value the node made."""

# nodes that only pass on, scale or add the values below them
_PASSED = re.compile("Add|Sub|Mul|Div|Neg|Clone|ToCopy|_DDPSink|_Scaled|AccumulateGrad")
_ADDED = re.compile("Add|Sub|Neg|Clone|ToCopy|_DDPSink|_Note|_Scaled|_AttachZeroGrad|_ValueWithGrad")
_CHECKPOINT = "CheckpointFunctionBackward"  # its parameters are not in the graph


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

    def calls_below(self, roots: Sequence[Tensor]) -> list[Any]:
        """Return the calls of losses in a graph, each once, in the order in which they were made.

        Args:
            roots: The values that are back-propagated.

        Raises:
            ConfigurationError: for a path to a parameter that passes none of the losses.
        """
        found = dict[Any, None]()
        above = dict[Any, Any]()
        queue: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
        for node in queue:
            call = window_call(node)
            if call is not None:
                call.functions = _functions_above(node, above)
                found[call] = None
                continue
            if self._name_of(node) is not None:
                raise self._no_divisor(node, above)
            children = node.next_functions
            if attaches_zero_grad(node):  # its other children get nothing but zeros
                children = children[:1]
            for child, _ in children:
                if child is not None and child not in above:
                    above[child] = node
                    queue.append(child)
        return sorted(found, key=lambda call: call.number)

    def check_below(self, roots: Sequence[Tensor], *, inside: str | None = None) -> None:
        """Refuse what reaches a parameter through two losses, and parameters whose gradients would not be corrected.

        Args:
            roots: The values that are back-propagated.
            inside: What they are a part of, if that is below a loss already. None: they are above the losses.

        Raises:
            ConfigurationError: naming the losses, or the parameter.
        """
        nodes, title, top = list[Any](), inside or "", list[Any]()
        if inside is None:
            for node, children in walk_graph(roots, through=lambda node: window_call(node) is None):
                if window_call(node) is not None:
                    top.append(window_call(node))
                    nodes += [child for child, _ in children]
            # an outer loss was made after those that it depends on
            title = max(top, key=lambda call: call.number).title if top else ""
        else:
            nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
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
            self._names.update({id(tensor): known for known, tensor in self._gathered().items()})
        return id(variable) in self._names

    def _name_of(self, node: Any) -> str | None:
        """Return how messages name the parameters whose node this is; None for any other node."""
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
    """Return the nodes from what is back-propagated down to a node."""
    path = [node]
    while path[-1] in above:
        path.append(above[path[-1]])
    return path[::-1]


def _functions_above(node: Any, above: Mapping[Any, Any]) -> str:
    """Return the functions of a loss that are back-propagated, for messages; those that only add or pass on are left out."""
    names = [each.name() for each in _path_to(node, above)[:-1]]
    return "".join(f"{name} of " for name in names if not _ADDED.match(name))
