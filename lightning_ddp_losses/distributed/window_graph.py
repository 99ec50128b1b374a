"""The graph of a backward in an accumulation window: from its root to the parts of losses, and from these to their leaves.

One factor corrects all gradients at the end of a window. This is correct if the back-propagated value is a weighted sum of parts: from the
root to each part there are only sums, views, and products with a number without gradient. ``WindowGraph`` verifies this before each
backward. With counts each value is a share of the window's loss, so other terms may be added and weights may be learned: the remaining
factors of a product may have gradients, but must not depend on a loss. Anything else is an error that names the path and the fix.

Below the parts, the leaves are checked. A loss that depends on another loss is an error, and so is a parameter of a module that the window
does not correct. Other tensors with a gradient (an input, a plain tensor that is trained) are corrected like parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.autograd_graph import attaches_zero_grad, walk_graph
from lightning_ddp_losses.distributed.window_parts import WindowCall, has_parts, not_a_weighted_sum, window_call
from lightning_ddp_losses.errors import ConfigurationError

TITLE = "lightning_ddp_losses: loss"
"""Key of a graph node's metadata: the name of the loss whose value the node computed."""

# nodes that add, forward or select values
_LINEAR = re.compile(
    "(Add|Sub|Rsub|Neg|Sum|Mean|Stack|Cat|Select|Slice|Index|Split|Chunk|Unbind|View|UnsafeView|ReshapeAlias|Alias|AsStrided|Squeeze|"
    "Unsqueeze|Expand|Clone|ToCopy|_DDPSink)Backward[0-9]*$"
)
_PRODUCT = re.compile("(Mul|Div|Dot|Mv)Backward[0-9]*$")
_SHOWN_NOT = re.compile(
    "Add|Sub|Neg|Clone|ToCopy|_DDPSink|View|Alias|Stack|Sum|Select|AccumulateGrad|_AttachZeroGrad|_Part"
)
_CHECKPOINT = "CheckpointFunctionBackward"  # its parameters are not in the graph
_Place = tuple[Any, bool]  # a node, and whether a function above it is not linear


def nodes_of(roots: Sequence[Tensor]) -> list[Any]:
    """Return the graph nodes that computed some values, skipping values without a graph."""
    return [root.grad_fn for root in roots if root.grad_fn is not None]


class WindowGraph:
    """Walks the graphs of one window.

    Args:
        parameters: Corrected parameters, by name.
        modules: Modules whose parameters ``fully_shard`` may divide, in which case graphs contain the gathered tensors.

    Attributes:
        has_others: Whether something other than losses weighed by numbers was back-propagated.
    """

    def __init__(self, parameters: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
        self.has_others = False
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._modules = modules

    def calls_below(self, roots: Sequence[Tensor], *, takes_others: bool) -> tuple[list[WindowCall], list[Any]]:
        """Return the calls of losses in a graph, each once, and the nodes below them.

        Args:
            roots: The values that are back-propagated.
            takes_others: Whether other terms may be added to the losses, and their weights may be learned.

        Raises:
            ConfigurationError: for a value that is not a weighted sum of losses.
        """
        found: dict[WindowCall, None] = {}
        below: list[Any] = []
        bent: list[_Place] = []  # losses below a function that may not be linear
        above: dict[_Place, _Place | None] = {}
        queue: list[_Place] = []
        for node in nodes_of(roots):
            above.setdefault((node, False), None)
            queue.append((node, False))
        for place in queue:
            node, is_bent = place
            call = window_call(node)
            if call is not None:
                if is_bent and call.values is None:
                    if not (takes_others and call.is_share):
                        raise not_a_weighted_sum(f"{_functions_above(place, above)}{call.title}")
                    bent.append(place)
                found[call] = None
                below += [child for child, _ in node.next_functions]
                continue
            if has_parts(node) and not _titles(_path_to(place, above)):
                raise ConfigurationError(
                    "accumulation window: what is back-propagated",
                    expected="losses that are computed inside the window",
                    got="one from before it, or from another thread",
                    fix="Compute it in the thread that opened the window, or detach it.",
                )
            if self._name_of(node) is not None:
                if not takes_others:
                    raise self._no_divisor(place, above)
                self.has_others = True
            bends = is_bent or not _is_linear(node)
            for child in _children_of(node):
                following = child, bends
                if following not in above:
                    above[following] = place
                    queue.append(following)
        if bent:
            _note_learned_weights(bent, above)
        return list(found), below

    def leaves_below(self, nodes: Sequence[Any], title: str, *, is_checkpoint: bool = False) -> list[Tensor]:
        """Return the leaves below some losses that are not parameters of the window.

        Args:
            nodes: Nodes below a loss.
            title: Title of the loss in messages.
            is_checkpoint: Whether the nodes belong to a re-entrant checkpoint, in its own backward.

        Raises:
            ConfigurationError: for a loss that depends on another one, or is recomputed, and for a parameter of another module.
        """
        leaves = []
        for node, _ in walk_graph([], nodes=nodes):
            call = window_call(node)
            if call is not None and is_checkpoint:
                raise ConfigurationError(
                    f"accumulation window: {call.title}",
                    expected="a loss outside of a re-entrant checkpoint",
                    got="one that backward computes again",
                    fix="Compute the loss outside of the checkpoint, or take checkpoint(..., use_reentrant=False).",
                )
            if call is not None:
                raise ConfigurationError(
                    f"accumulation window: {title}",
                    expected="a loss of rows",
                    got=f"one that depends on {call.title}, whose divisor counts already",
                    fix="Add the two, or detach the inner one.",
                )
            variable = getattr(node, "variable", None)
            if not isinstance(variable, Tensor) or self._is_known(variable):
                continue
            if isinstance(variable, nn.Parameter):
                raise ConfigurationError(
                    f"accumulation window: {title}",
                    expected="parameters of the module, or of what was handed to accumulation_window",
                    got=self._name_of(node),
                    fix="Its gradient would not be corrected: hand in the module that holds it.",
                )
            leaves.append(variable)
        return leaves

    def _is_known(self, variable: Tensor) -> bool:
        if id(variable) not in self._names and isinstance(variable, nn.Parameter):
            for module in self._modules:
                self._names.update(
                    {id(tensor): name for name, tensor in torch_compat.gathered_parameters(module).items()}
                )
        return id(variable) in self._names

    def _name_of(self, node: Any) -> str | None:
        """Return the name of a node's leaf in messages, or None for a node without a leaf."""
        if node.name() == _CHECKPOINT:
            return "the parameters of a re-entrant checkpoint"
        variable = getattr(node, "variable", None)
        if not isinstance(variable, Tensor):
            return None
        if id(variable) in self._names:
            return f"`{self._names[id(variable)]}`"
        kind = "parameter" if isinstance(variable, nn.Parameter) else "tensor"
        return f"a {kind} of shape {tuple(variable.shape)}"

    def _no_divisor(self, leaf: _Place, above: Mapping[_Place, _Place | None]) -> ConfigurationError:
        """Return the error for a path to a parameter that does not pass through any of the losses."""
        path = _path_to(leaf, above)
        titles = _titles(path)
        if titles:
            term = titles[0]
            fix = (
                "It is no sum over rows that a micro-batch has a part of: use lightning_ddp_losses.microbatched for the whole "
                "batch, and windows of one micro-batch."
            )
        else:
            names = [node.name() for node in path if not _is_linear(node) and node is not leaf[0]]
            term = " of ".join(["a term", *names[:3]])
            fix = "Write it as global_mean(total, count), or wrap a loss of torch.nn or pytorch-metric-learning in GlobalBatchLoss."
        return ConfigurationError(
            "accumulation window: what is back-propagated",
            expected="losses that are divided by what the whole window counts",
            got=f"{term}, which reaches {self._name_of(leaf[0])}",
            fix=fix,
        )


def _is_linear(node: Any) -> bool:
    """Return whether a node's value is a weighted sum of the values below it, with weights that do not have a gradient."""
    name = node.name()
    if _LINEAR.match(name) or attaches_zero_grad(node):
        return True
    if not _PRODUCT.match(name):
        return False
    children = [child for child, _ in node.next_functions]
    # in a quotient only the numerator may have a gradient
    is_numerator = not name.startswith("Div") or children[0] is not None
    return is_numerator and sum(child is not None for child in children) == 1


def _note_learned_weights(bent: Sequence[_Place], above: Mapping[_Place, _Place | None]) -> None:
    """Reject values that are not linear in the losses. Weights may have gradients, in which case the call is marked.

    Args:
        bent: Places of the losses to check.
        above: All places that the walk has found.
    """
    # 1. the nodes that are above some loss
    parents: dict[Any, set[Any]] = {}
    for node, _ in above:
        if window_call(node) is None:
            for child in _children_of(node):
                parents.setdefault(child, set()).add(node)
    of_losses = _and_above([node for node, _ in above if window_call(node) is not None], parents)
    # 2. each of them must add values, or multiply one of them by something independent of the losses
    for place in bent:
        call = window_call(place[0])
        assert call is not None
        nodes_above = _and_above([place[0]], parents) - {place[0]}
        if not all(_is_weighed(node, of_losses) for node in nodes_above):
            raise not_a_weighted_sum(f"{_functions_above(place, above)}{call.title}")
        call.is_weighed = True


def _and_above(nodes: Sequence[Any], parents: Mapping[Any, set[Any]]) -> set[Any]:
    """Return some nodes and all nodes above them."""
    queue = list(nodes)
    seen = set(queue)
    for node in queue:
        new = parents.get(node, set()) - seen
        seen |= new
        queue += new
    return seen


def _is_weighed(node: Any, of_losses: set[Any]) -> bool:
    """Return whether a node's value is linear in the losses below it, whose weights may have gradients."""
    if _is_linear(node):
        return True
    if not _PRODUCT.match(node.name()):
        return False
    are_of_losses = [child in of_losses for child, _ in node.next_functions]
    is_numerator = not node.name().startswith("Div") or are_of_losses[0]
    return is_numerator and sum(are_of_losses) == 1


def _children_of(node: Any) -> list[Any]:
    """Return the nodes that receive a gradient from a node, except those that receive only zeros."""
    children = node.next_functions
    if attaches_zero_grad(node):
        children = children[:1]
    return [child for child, _ in children if child is not None]


def _titles(path: Sequence[Any]) -> list[str]:
    """Return the names of the losses on a path that compare rows."""
    return [node.metadata[TITLE] for node in path if TITLE in node.metadata]


def _path_to(place: _Place, above: Mapping[_Place, _Place | None]) -> list[Any]:
    """Return the nodes from the back-propagated value down to a place."""
    path = []
    step: _Place | None = place
    while step is not None:
        path.append(step[0])
        step = above[step]
    return path[::-1]


def _functions_above(place: _Place, above: Mapping[_Place, _Place | None]) -> str:
    """Return the functions of a loss that are back-propagated, for messages, without those that only add or forward values."""
    names = [node.name() for node in _path_to(place, above)[:-1]]
    return "".join(f"{name} of " for name in names if not _SHOWN_NOT.match(name))
