"""The graph of a loss inside an accumulation window: every path to a parameter must pass exactly one loss that counts in the window.

One factor corrects all gradients at the end of a window. That is right only if the value which is back-propagated is a weighted sum of such
losses, and if their gradients reach no parameter but those of the window. Anything else is an error before backward, which names the path
and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad, walk_graph
from lightning_ddp_losses.errors import ConfigurationError

TITLE = "lightning_ddp_losses: loss"
"""Key of a graph node's metadata: the name of the loss that has its value from the node."""

# nodes that only pass on, scale or add the values below them
_PASSED = re.compile("Add|Sub|Mul|Div|Neg|Clone|ToCopy|_DDPSink|View|AccumulateGrad")
_ADDED = re.compile("Add|Sub|Neg|Clone|ToCopy|_DDPSink|View|_AttachZeroGrad|_ValueWithGrad")
_CHECKPOINT = "CheckpointFunctionBackward"  # its parameters are not in the graph


def window_call(node: Any) -> Any:
    """Return the call of a loss (``accumulation.WindowCall``) that made its value at a graph node. None for other nodes."""
    return getattr(node, "window_call", None)


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

    def calls_below(self, roots: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """Return the calls of losses in a graph, each once, in the order of their making, and the nodes below them.

        Args:
            roots: The values that are back-propagated.

        Raises:
            ConfigurationError: for a path to a parameter that passes none of the losses.
        """
        found, below = dict[Any, None](), list[Any]()
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
