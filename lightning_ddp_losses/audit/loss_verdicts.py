"""Certificates of the losses that a step calls: is DDP's mean over ranks correct for them, and if not, because of which line?

A loss is a submodule of the audited module that returns one number with a gradient. A few rows of its first call in the one process are
stored, and passed to ``certify`` after the run. A loss inside another loss is part of the outer one. A loss over the rows of all ranks is
exact and is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.inputs import map_tensors, tensors_in
from lightning_ddp_losses.losses import certify
from lightning_ddp_losses.losses.certificates.certificate import Certificate

_ROWS = 64
"""Largest number of rows in an example. A certificate is valid for any number of rows."""
_CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class LossVerdict:
    """The result of ``certify`` for one loss of the audited module.

    Attributes:
        name: Path of the loss in the module.
        kind: Class of the loss.
        verdict: Verdict of its ``Certificate``.
        line: The line that determines the verdict, with file and number. Empty if the loss is correct, or if there is no Python line.
        why: What is wrong with the loss, or why there is no verdict. Empty if it is correct.
    """

    name: str
    kind: str
    verdict: str
    line: str
    why: str

    def __str__(self) -> str:
        head = f"{self.name} ({self.kind}): {self.verdict}"
        parts = [part for part in (self.line, self.why) if part]
        return f"{head}. {': '.join(parts)}" if parts else f"{head}."


class FirstCalls:
    """Stores the first call of each loss of a module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._calls: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        for name, child in module.named_modules():
            if name:
                child.register_forward_hook(functools.partial(self._see, name), with_kwargs=True)

    def _see(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        is_number = isinstance(output, Tensor) and output.numel() == 1 and output.ndim < 2 and output.requires_grad
        if is_number and name not in self._calls and any(tensor.ndim for tensor in tensors_in((args, kwargs))):
            self._calls[name] = module, *_few_rows(args, kwargs)

    def verdicts(self) -> list[LossVerdict]:
        """Return the result of ``certify`` for each loss, sorted by path. This removes the hooks of the audit from the losses."""
        found = []
        for name in _outermost(self._calls):
            module, args, kwargs = self._calls[name]
            if not any(getattr(part, "sees_global_batch", False) for part in module.modules()):
                remove_hooks_(module)
                found.append(_verdict_of(name, module, args, kwargs))
        return found


class _ByName(nn.Module):
    """Wraps a loss with keyword arguments, so that ``certify`` can pass all arguments by position."""

    def __init__(self, loss: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.loss, self.names = loss, names

    def forward(self, *args: Any) -> Any:
        by_position = len(args) - len(self.names)
        return self.loss(*args[:by_position], **dict(zip(self.names, args[by_position:], strict=True)))


def _few_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of the arguments, with only the first rows if all tensors have the same number of rows."""
    rows = {tensor.shape[0] for tensor in tensors_in((args, kwargs)) if tensor.ndim}
    may_cut = len(rows) == 1

    def taken(tensor: Tensor) -> Tensor:
        part = tensor.detach()[:_ROWS] if may_cut and tensor.ndim else tensor.detach()
        return part.clone().requires_grad_(tensor.requires_grad)

    with torch.no_grad():
        return map_tensors(taken, args), map_tensors(taken, kwargs)


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the sorted paths that are not inside another path."""
    found: list[str] = []
    for name in sorted(names):
        if not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def remove_hooks_(module: nn.Module) -> None:
    """Remove the hooks of the audit, because a copy of the module would copy the objects that they reference."""
    for part in module.modules():
        for hooks in torch_compat.hooks_of_calls(part):
            for number, hook in list(hooks.items()):
                function = getattr(hook, "func", hook)
                if getattr(function, "__module__", "").startswith(__package__):
                    del hooks[number]


def _verdict_of(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossVerdict:
    kind = type(module).__name__
    loss = _ByName(module, tuple(kwargs)) if kwargs else module
    try:
        certificate = certify(loss, *args, *kwargs.values())
    except Exception as error:  # the user's loss may raise anything when it is called once more
        return LossVerdict(name, kind, _CANNOT_TELL, "", f"{type(error).__name__}: {error}".splitlines()[0])
    return LossVerdict(name, kind, certificate.verdict, *_first_reason(certificate))


def _first_reason(certificate: Certificate) -> tuple[str, str]:
    """Return the line that determines the verdict, and what is wrong with it."""
    if not certificate.reasons:
        return "", ""
    first = certificate.reasons[0]
    place, _, rest = str(first).partition("\n")
    return place if first.file else "", rest.strip()
