"""Why ranks went apart: what this rank knows of gradients, optimizers and the wrap, and what all ranks make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_ddp_losses.fingerprint import fingerprint

if TYPE_CHECKING:
    from lightning_ddp_losses.callbacks.session import Session

__all__ = ["circumstances", "why_apart"]


def circumstances(session: Session, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank knows: gradients by name, optimizer settings."""
    gradients = {
        name: None if p.grad is None or p.grad.is_sparse else int(fingerprint(p.grad)) for name, p in parameters.items()
    }
    return {"gradients": gradients}


def why_apart(
    name: str, everyone: Sequence[Mapping[str, Any]], *, at_start: bool
) -> tuple[str, str, tuple[Any, ...], str]:
    """Fault, reason, the ranks' values, and what to do, for a parameter that differs."""
    if at_start:
        return (
            "F04",
            "",
            (),
            "Register the module before the wrap (DDP broadcasts rank 0's values), or seed before building it.",
        )
    return "SYNC", "", (), ""
