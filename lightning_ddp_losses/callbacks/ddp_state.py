"""What DDP knew of the module when training started, and why a gradient can escape it afterwards.

DDP lists parameters once and hangs its hooks on those objects. A parameter that is created, replaced, cast or unfrozen later
has no hook; a forward that does not go through the wrapper arms none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_ddp_losses.callbacks.runner import Session


class _Known(NamedTuple):
    parameter: Tensor
    dtype: torch.dtype
    device: torch.device
    trains: bool


class Wrap:
    """The state at the start of training (``session.shared(Wrap)``).

    Attributes:
        ddp: The model's DDP; None where there is none.
        forwards: Forward passes through it since the last batch ended.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        model = session.trainer.strategy.model
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.forwards = 0
        self._known: dict[str, _Known] = {}
        self._handle = self.ddp.register_forward_pre_hook(self._count) if self.ddp is not None else None
        for name, parameter in session.module.named_parameters():
            self._known[name] = _Known(parameter, parameter.dtype, parameter.device, parameter.requires_grad)
        ignored = self.ddp.parameters_to_ignore if self.ddp is not None else ()
        self._hooked = {n: k.parameter for n, k in self._known.items() if k.trains and n not in ignored}

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def batch_end(self) -> None:
        """Start to count anew."""
        self.forwards = 0

    def close(self) -> None:
        """Leave no hook behind."""
        if self._handle is not None:
            self._handle.remove()

    @property
    def tolerates_absence(self) -> bool:
        """Whether a backward without some of DDP's parameters ends well."""
        return self.ddp is None or bool(self.ddp.find_unused_parameters or self.ddp.static_graph)

    def awaited(self) -> dict[str, Tensor]:
        """The parameters for whose gradients DDP waits in every backward."""
        if self.tolerates_absence:
            return {}
        return {name: parameter for name, parameter in self._hooked.items() if parameter.requires_grad}

    def escape(self, name: str, parameter: Tensor) -> str:
        """The fault through which this parameter's gradient escapes DDP, as far as this rank can tell; else empty."""
        known = self._known.get(name)
        manual = not self._session.module.automatic_optimization
        reasons = {
            "F02": name.startswith("optimizer "),
            "F05": known is None,
            "F06": known is not None and known.parameter is not parameter,
            "F07": known is not None and (known.dtype, known.device) != (parameter.dtype, parameter.device),
            "F08": known is not None and parameter.requires_grad and not known.trains,
            "F10": manual and not self._session.backwards,
            "F09": not self._session.backwards or (self.ddp is not None and not self.forwards),
        }
        return next((fault for fault, holds in reasons.items() if holds), "")

    def escapes(self, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """``escape`` of each parameter that has one."""
        found = {name: self.escape(name, parameter) for name, parameter in parameters.items()}
        return {name: fault for name, fault in found.items() if fault}
