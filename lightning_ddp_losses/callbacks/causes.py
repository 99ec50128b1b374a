"""Why ranks went apart: what this rank knows of gradients, optimizers and the wrap, and what all ranks make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_ddp_losses.callbacks.ddp_state import Wrap
from lightning_ddp_losses.distributed.fingerprint import fingerprint

if TYPE_CHECKING:
    from lightning_ddp_losses.callbacks.runner import Session


FIXES = {
    "F02": "It is in an optimizer but not in module.parameters(): register the module it belongs to.",
    "F05": "It appeared after the wrap: create it in __init__ or configure_model.",
    "F06": "Another object stands in its place since the wrap: copy into the existing one (with torch.no_grad(): W.copy_(...)).",
    "F07": "Its dtype or device changed after the wrap, which took DDP's hook away: cast the inputs, not the parameter.",
    "F08": "It was frozen when DDP was built: keep requires_grad=True with a learning rate of 0 until then.",
    "F09": "The wrapper's forward did not run on this step: compute the loss inside training_step.",
    "F10": "Call self.manual_backward(loss), not loss.backward().",
    "F11": "The first step was not reduced: leave out static_graph, or upgrade Lightning.",
    "F13": "Its own gradient was reduced; the clip factor differs, because another gradient was not: {others}.",
    "F14": "Some ranks skipped the optimizer step: a gradient overflowed there that was not reduced.",
    "F15": "The gradient scales differ: restore the scaler from one checkpoint on all ranks.",
    "F17": "The optimizers' settings differ: log the value that the scheduler monitors with sync_dist=True.",
    "SYNC": "Something changed it on some ranks only, outside the optimizer step.",
    "reduce": "It was not reduced: look for a backward() of your own, comm hooks, no_sync, code that changes gradients per rank.",
}


class Cause(NamedTuple):
    """A fault, the ranks' values that show it, and what to do."""

    fault: str
    values: tuple[Any, ...]
    fix: str


def optimizer_settings(session: Session) -> list[dict[str, Any]]:
    """Plain settings of every parameter group, by optimizer."""
    groups = [group for optimizer in session.trainer.optimizers for group in optimizer.param_groups]
    return [
        {name: plain for name, value in group.items() if name != "params" and (plain := _plain(value)) is not None}
        for group in groups
    ]


def _plain(value: object) -> object:
    if isinstance(value, (bool, int, float, str, tuple, list)):
        return value
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None


def circumstances(session: Session, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """What this rank knows: gradients by name, what escapes the wrap, optimizer settings, the scaler."""
    gradients = {
        name: None if p.grad is None or p.grad.is_sparse else fingerprint(p.grad) for name, p in parameters.items()
    }
    scaler = getattr(session.trainer.precision_plugin, "scaler", None)
    return {
        "gradients": gradients,
        "escapes": session.shared(Wrap).escapes(parameters),
        "settings": optimizer_settings(session),
        "scale": None if scaler is None else float(scaler.get_scale()),
        "stepped": len(session.stepped),
        "clips": bool(session.trainer.gradient_clip_val),
        "static": bool(getattr(session.shared(Wrap).ddp, "static_graph", False)) and session.steps == 0,
    }


def why_unreduced(name: str, everyone: Sequence[Mapping[str, Any]], differing: Sequence[str]) -> Cause:
    """Why the gradient of ``name`` differs, given all that differ."""
    escapes = {n: fault for e in everyone for n, fault in e["escapes"].items()}
    if name in escapes:
        return Cause(escapes[name], (), FIXES[escapes[name]])
    others = [n for n in differing if n in escapes]
    if others and any(e["clips"] for e in everyone):
        return Cause("F13", (), FIXES["F13"].format(others=", ".join(f"`{n}`" for n in others[:4])))
    if any(e["static"] for e in everyone):
        return Cause("F11", (), FIXES["F11"])
    return Cause("F09", (), FIXES["reduce"])


def why_apart(name: str, everyone: Sequence[Mapping[str, Any]], *, at_start: bool) -> Cause:
    """Why the parameter ``name`` differs: its gradient was not reduced, or the optimizers went apart."""
    if at_start:
        fix = "Register the module before the wrap (DDP broadcasts rank 0's values), or seed before building it."
        return Cause("F04", (), fix)
    for key, fault in (("stepped", "F14"), ("scale", "F15")):
        values = tuple(e[key] for e in everyone)
        if len(set(values)) > 1:
            return Cause(fault, tuple(f"{key} {value}" for value in values), FIXES[fault])
    names = everyone[0]["gradients"]
    differing = [n for n in names if len({e["gradients"].get(n) for e in everyone}) > 1]
    if name in differing:
        return why_unreduced(name, everyone, differing)
    for groups in zip(*(e["settings"] for e in everyone), strict=False):
        keys = [k for k in groups[0] if any(g.get(k) != groups[0][k] for g in groups)]
        if keys:
            return Cause("F17", tuple(", ".join(f"{k} {g.get(k)}" for k in keys) for g in groups), FIXES["F17"])
    return Cause("SYNC", (), FIXES["SYNC"])
