"""Finds the submodules of a LightningModule that are losses, and whether they share parameters with the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytorch_metric_learning.losses as pml
import torchmetrics
from pytorch_metric_learning.losses.base_metric_loss_function import BaseMetricLossFunction
from torch import Tensor, nn

from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES, uncompiled
from lightning_ddp_losses.core.transparent import all_modules, wrapped_module
from lightning_ddp_losses.errors import ConfigurationError

Selection = str | Sequence[str]
T = TypeVar("T", bound=type)
ADOPTED = "_adopted_losses"
"""Attribute of the LightningModule under which adopted losses are registered."""
_PACKAGE = __name__.partition(".")[0]

_loss_types: list[type] = [
    BaseMetricLossFunction,
    pml.CrossBatchMemory,
    pml.MultipleLosses,
    pml.SelfSupervisedLoss,
    *TORCH_LOSS_TYPES,
    nn.AdaptiveLogSoftmaxWithLoss,
]


@dataclass(frozen=True)
class FoundLoss:
    """Describes a loss and its path.

    Attributes:
        name: Path from the LightningModule (``loss``, ``heads.arc``).
        module: The module that is called, which is the compiled wrapper for a compiled loss.
        learnable: True if the loss has parameters.
        owned: True if the strategy reduces its parameters. False for a loss without parameters, and for a loss that shares a parameter with
            the model.
    """

    name: str
    module: nn.Module
    learnable: bool
    owned: bool

    @property
    def sees_global_batch(self) -> bool:
        """Whether the loss itself evaluates the rows of all ranks."""
        return bool(getattr(uncompiled(self.module), "sees_global_batch", False))

    @property
    def title(self) -> str:
        """Class and path of the loss, for messages."""
        return f"{type(uncompiled(self.module)).__name__} `{self.name}`"


def register_loss_type(cls: T) -> T:
    """Let the strategy treat every instance of ``cls`` as a loss (usable as a class decorator).

    Example:
        >>> @register_loss_type
        ... class CenterLoss(torch.nn.Module): ...
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigurationError(
            "register_loss_type",
            expected="a subclass of torch.nn.Module",
            got=repr(cls),
            fix="Pass the class, not an object of it.",
        )
    if cls not in _loss_types:
        _loss_types.append(cls)
    return cls


def is_loss(module: nn.Module) -> bool:
    """Return whether ``module`` is of a loss type, or a metric with trainable parameters."""
    inner = uncompiled(module)
    if isinstance(inner, torchmetrics.Metric):
        return any(p.requires_grad for p in inner.parameters())
    return isinstance(inner, tuple(_loss_types))


def find_losses(root: nn.Module, losses: Selection = "auto") -> list[FoundLoss]:
    """Find losses under ``root``, outermost first, each module once, in the order of ``named_modules``.

    Args:
        root: The LightningModule.
        losses: ``"auto"`` finds losses by type. A list contains exact paths. Any other string is a regular expression that must match a
            whole path. It matches modules of any type with parameters, or losses without parameters if there are no such modules.

    Raises:
        ConfigurationError: for a name without a match (with the names that exist).
    """
    # find losses by type
    if losses == "auto":
        return _describe(root, list(_outermost(root, lambda _, module: is_loss(module))))
    # find losses by a regular expression for whole paths
    if isinstance(losses, str):
        try:
            pattern = re.compile(losses)
        except re.error as error:
            raise ConfigurationError(
                "losses",
                expected="'auto', a list of names, or a regular expression",
                got=f"{losses!r}: {error}",
                fix="Put a name in a list to match it exactly: ['name'].",
            ) from None
        found = list(_outermost(root, lambda n, m: bool(pattern.fullmatch(n)) and _has_parameters(m)))
        if not found:  # the same configuration may be used with a loss without weights
            found = list(_outermost(root, lambda n, m: bool(pattern.fullmatch(n)) and is_loss(m)))
        if not found:
            raise _no_match(root, f"the regular expression {losses!r}")
        return _describe(root, found)
    # find losses by name
    modules = dict(root.named_modules(remove_duplicate=False))
    for name in losses:
        if name not in modules or name == "":
            raise _no_match(root, f"{name!r}")
    names = set(losses)
    return _describe(root, list(_outermost(root, lambda n, _: n in names)))


def _outermost(root: nn.Module, matches: Callable[[str, nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the matching modules that are not inside another matching module, depth first."""
    seen = {id(root)}
    stack = [(name, child) for name, child in root.named_children()][::-1]
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if matches(name, module):
            seen.update(id(inner) for inner in all_modules(module))
            yield name, module
        else:
            stack += [(f"{name}.{n}", child) for n, child in module.named_children()][::-1]


def _describe(root: nn.Module, found: list[tuple[str, nn.Module]]) -> list[FoundLoss]:
    """Describe each found module: whether it has parameters, and whether it shares one with the model."""
    inside: set[int] = set()
    for _, module in found:
        inside.update(map(id, all_modules(module)))
    outside: set[int] = set()
    for module in root.modules():
        if id(module) not in inside:
            outside.update(map(id, module.parameters(recurse=False)))
    described = []
    for name, module in found:
        parameters = list(module.parameters())
        shares = any(id(p) in outside for p in parameters)
        described.append(FoundLoss(name, module, bool(parameters), bool(parameters) and not shares))
    return described


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _no_match(root: nn.Module, got: str) -> ConfigurationError:
    exist = [
        f"{name} ({type(uncompiled(m)).__name__})"
        for name, m in _outermost(root, lambda _, m: is_loss(m))
        if _has_parameters(m)
    ]
    others = [f"{name} ({type(m).__name__})" for name, m in root.named_children() if _has_parameters(m)]
    return ConfigurationError(
        "losses",
        expected="names of modules under the LightningModule",
        got=f"{got}, which matches none",
        fix=f"Learnable losses that exist: {', '.join(exist) or 'none'}. Children with parameters: {', '.join(others) or 'none'}.",
    )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers, each once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def loss_kinds(losses: Iterable[FoundLoss]) -> list[str]:
    """Return ``name: class`` of each loss, with the inner class if a loss only evaluates another over all ranks or divides its classes."""
    found = []
    for loss in losses:
        module = uncompiled(loss.module)
        # a checkpoint can be exchanged between a loss and its wrapper if their parameters have the same names
        module = wrapped_module(module) or module
        inner = getattr(module, "loss", None)
        while type(module).__module__.partition(".")[0] == _PACKAGE and isinstance(inner, nn.Module):
            module, inner = inner, getattr(inner, "loss", None)
        found.append(f"{loss.name}: {type(module).__qualname__}")
    return found
