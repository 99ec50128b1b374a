"""Kinds of torch's functions that divide by a number internally, where a trace of operators would only contain the number.

``cross_entropy`` and ``nll_loss`` divide by the number, or the weights, of the targets that are not ignored. ``kl_div`` with
``"batchmean"`` divides by the number of rows. ``one_hot`` reads the values only to reject invalid ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.losses.certificates.certificate import Reason
from lightning_ddp_losses.losses.certificates.kinds import Broken, Constant, Kind, Rows, Scale, Sum
from lightning_ddp_losses.losses.certificates.lines import Blame
from lightning_ddp_losses.losses.certificates.memory import KnownTensors

_IGNORED = -100  # torch's default of ignore_index
_NONE_IGNORED = "no target of the example is ignore_index (-100). If some are, all ranks need equally many that are not"


class Ruled(NamedTuple):
    """The result of a function that has a rule.

    Attributes:
        value: What it returned.
        kind: Its kind.
        assumption: What the kind assumes about values.
    """

    value: Tensor
    kind: Kind
    assumption: Reason | None = None


def _class_loss(known: KnownTensors, function: Any, given: dict[str, Any], blame: Blame) -> Ruled:
    """Run ``cross_entropy`` or ``nll_loss`` with ``reduction="mean"``."""
    kind = _kind_of_elements(known, function, given, blame)
    with torch_compat.without_dispatch_modes():
        value = function(**given)
        has_ignored = bool((given["target"] == given["ignore_index"]).any())
    # classes as probabilities: all rows count
    if not isinstance(kind, Sum) or given["target"].is_floating_point():
        return Ruled(value, kind)
    if given["weight"] is not None:
        counted = blame("the divisor is the sum of the class weights of one rank's targets")
    elif given["ignore_index"] != _IGNORED or has_ignored:
        counted = blame("the divisor is the number of one rank's targets that are not ignore_index")
    elif not known.is_argument(given["target"]):
        counted = blame(
            "the loss computes its targets, of which some may be ignore_index: the divisor is the number of the others"
        )
    else:
        return Ruled(value, kind, blame(_NONE_IGNORED))
    return Ruled(value, replace(kind, scale=kind.scale.times(Scale(0, (counted,)))))


def _kl_div(known: KnownTensors, function: Any, given: dict[str, Any], blame: Blame) -> Ruled:
    """Run ``kl_div`` with ``reduction="batchmean"``."""
    kind = _kind_of_elements(known, function, given, blame)
    with torch_compat.without_dispatch_modes():
        value = function(**given)
    return Ruled(value, kind)


def _kind_of_elements(known: KnownTensors, function: Any, given: dict[str, Any], blame: Blame) -> Kind:
    """Return the kind of the mean over rows of a loss: a sum, if its elements are rows."""
    elements = function(**{**given, "reduction": "none"})
    kind = known.kind(elements, blame)
    if isinstance(kind, (Broken, Constant)):
        return kind
    if not isinstance(kind, Rows) or not kind.scale.is_one or kind.is_position:
        return Broken((blame("a loss of something that is not rows"),))
    counted: tuple[Any, ...] = ()
    if kind.selected is not None:
        counted = (blame("the divisor is the number of selected rows of one rank"),)
    return Sum(Scale(-1, counted), blame(""), has_grad=elements.requires_grad)


def _one_hot(known: KnownTensors, function: Any, given: dict[str, Any], blame: Blame) -> Ruled:
    """Run ``one_hot``."""
    kind = known.kind(given["self"], blame)
    with torch_compat.without_dispatch_modes():
        value = function(*given.values())
    if isinstance(kind, Rows):
        if given["num_classes"] == -1:
            kind = Broken((blame("the number of classes is that of one rank's rows"),))
        elif kind.is_position or not kind.scale.is_one:
            kind = Broken((blame("uses the position of a row in the batch"),))
        else:
            kind = replace(kind, is_same=False, is_integral=True)
    elif not isinstance(kind, (Broken, Constant)):
        kind = Broken((blame("not a linear function, of a sum or mean over the rows of one rank"),))
    return Ruled(value, kind)


_MEANS = {"size_average": None, "reduce": None, "reduction": "mean"}
_BATCH_MEANS = {**_MEANS, "reduction": "batchmean"}
Run = Callable[[KnownTensors, Any, dict[str, Any], Blame], Ruled]
# function, the options that its rule is for, and names of its arguments if torch does not tell them
_RULES: dict[Any, tuple[Run, dict[str, Any], tuple[str, ...]]] = {
    functional.cross_entropy: (_class_loss, _MEANS, ()),
    functional.nll_loss: (_class_loss, _MEANS, ()),
    functional.kl_div: (_kl_div, _BATCH_MEANS, ()),
    functional.one_hot: (_one_hot, {}, ("self", "num_classes")),
}


def rule_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, dict[str, Any]] | None:
    """Return the rule of a function and all of its arguments by name. None if its operators are followed.

    Args:
        function: A function of torch.
        args: Its arguments.
        kwargs: The same by name.
    """
    try:
        rule = _RULES.get(function)
    except TypeError:  # no hash
        return None
    if rule is None:
        return None
    run, options, names = rule
    if names:
        named = dict(zip(names, args, strict=False)) | kwargs
        given = {"self": named.get("self", named.get("tensor")), "num_classes": named.get("num_classes", -1)}
    else:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
    if any(given.get(name) != value for name, value in options.items()):
        return None
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    return (run, given) if tensors and torch.is_tensor(tensors[0]) else None
