"""What must be the same on every node before anything trains: releases, options of strategy and losses, precision.

A node with another release or option computes another gradient, which no shape shows. These facts ride in the handshake that compares
names at set-up, and a difference is an error on every rank. What may differ and still explain something (Python, builds, releases of
other libraries) rides along, and is a note.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_ddp_losses.strategies.loss_discovery import FoundLoss

_PACKAGE = __name__.partition(".")[0]
_TRAINER_OPTIONS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_MAY_DIFFER = ("timeout", "start_method")  # how a node waits and starts its processes changes no gradient
_LIBRARIES_OF_LOSSES = ("torch.", "pytorch_metric_learning.")
_SHOWN_RANKS = 8


def options_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a strategy's options, as text, that two nodes can compare.

    Args:
        arguments: Of its ``__init__``, by name, those of ``**ddp_kwargs`` too. Objects (a plugin, a hook) are left out, and what is
            Lightning's default.
    """
    defaults = inspect.signature(DDPStrategy.__init__).parameters
    found = {}
    for name, value in sorted(arguments.items()):
        is_default = name in defaults and value == defaults[name].default
        if name not in _MAY_DIFFER and not is_default and _has_stable_repr(value):
            found[name] = repr(value)
    return found


def setup_facts(
    losses: Sequence[FoundLoss], options: Mapping[str, str], *, precision: object, trainer: Any
) -> dict[str, str]:
    """Return what must match on every rank, by name.

    Args:
        losses: Those found in the module.
        options: Of the strategy.
        precision: As the precision plugin calls it.
        trainer: Lightning's; None without.
    """
    facts = {
        _PACKAGE: str(getattr(sys.modules[_PACKAGE], "__version__", "")),
        "torch": torch.__version__.partition("+")[0],
        "precision": str(precision),
    }
    facts.update({f"strategy option {name}": value for name, value in options.items()})
    facts.update({f"Trainer({name})": repr(getattr(trainer, name, None)) for name in _TRAINER_OPTIONS})
    for loss in losses:
        facts[f"loss {loss.name}"] = _describe_loss(loss.module)
    return {name: " ".join(value.split()) for name, value in facts.items()}


def _describe_loss(module: nn.Module) -> str:
    """Return a loss's class, and the options with which a known library has made it; a user's own class may keep what differs by rank."""
    kind = type(module)
    known = kind.__module__.startswith(_LIBRARIES_OF_LOSSES)
    names = inspect.signature(kind.__init__).parameters if known else ()
    # a library keeps most of its arguments under their names; what it makes of the others is an object
    shown = [f"{name}={getattr(module, name)!r}" for name in names if _has_stable_repr(getattr(module, name, module))]
    return f"{kind.__qualname__}({', '.join(shown)})"


def _has_stable_repr(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_has_stable_repr, value))
    return isinstance(value, (bool, int, float, str, torch.dtype, timedelta))


# ---------------------------------------------------------------------- what may differ


def pack_notes() -> bytes:
    """Return what may differ between nodes; short, so that it fits into a handshake."""
    notes = {"python": platform.python_version(), "torch": torch.__version__, **_releases()}
    return json.dumps(notes).encode()


@functools.cache  # a process loads a library once, and reading what is installed takes a fifth of a small fit
def _releases() -> dict[str, str]:
    """Return the releases of the libraries that training stands on."""
    found = {}
    for name in ("lightning", "pytorch-lightning", "pytorch-metric-learning", "torchmetrics"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def note_differences(payloads: Sequence[bytes]) -> None:
    """Say once what differs between nodes and is no error.

    Args:
        payloads: What ``pack_notes`` returned on each rank.
    """
    if len(set(payloads)) == 1:
        return
    notes = [json.loads(payload) for payload in payloads]
    names = sorted(set().union(*notes))
    differences = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, own in enumerate(notes):
            ranks_of.setdefault(own.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            shown = [f"{value} on rank {_some(ranks)}" for value, ranks in ranks_of.items()]
            differences.append(f"{name}: {', '.join(shown)}")
    rank_zero_warn(f"Nodes differ, which changes no option of this package: {'; '.join(differences)}.")


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return f"{shown} and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else shown
