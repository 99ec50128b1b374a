"""Facts that must be the same on every rank before anything trains: names of parameters, releases, options, precision.

DDP pairs parameters by position and would broadcast and average the wrong tensors without a word. A node with another release or option
computes another gradient, which no shape shows. All facts travel in one handshake at set-up, and a difference is an error on every rank.
Facts that may differ (Python, builds, releases of other libraries) travel along, and a difference is a warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import RankMismatchError, listed
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss, named_tensors

_PACKAGE = __name__.partition(".")[0]
_TRAINER_OPTIONS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
_LIBRARIES_OF_LOSSES = ("torch.", "pytorch_metric_learning.")
_MAY_DIFFER = ("timeout", "start_method")  # how a node waits and starts its processes changes no gradient
_MAX_SHOWN = 6  # differing names shown in an error


def stable_texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a strategy's arguments as text, which two nodes can compare.

    Args:
        arguments: Arguments of its ``__init__`` by name, with those of ``**ddp_kwargs``. Objects (a plugin, a hook) and Lightning's
            defaults are left out.
    """
    defaults = inspect.signature(DDPStrategy.__init__).parameters
    found = {}
    for name, value in sorted(arguments.items()):
        is_default = name in defaults and value == defaults[name].default
        if name not in _MAY_DIFFER and not is_default and has_stable_repr(value):
            found[name] = repr(value)
    return found


def has_stable_repr(value: object) -> bool:
    """Return whether equal values have the same text in every process."""
    if isinstance(value, (list, tuple)):
        return all(map(has_stable_repr, value))
    return isinstance(value, (bool, int, float, str, torch.dtype, timedelta))


def setup_facts(
    losses: Sequence[FoundLoss], options: Mapping[str, str], *, precision: object, trainer: Any
) -> dict[str, str]:
    """Return what must match on every rank, by name.

    Args:
        losses: Losses of the module.
        options: Options of the strategy.
        precision: Name of the precision, by its plugin.
        trainer: Lightning's trainer, or None.
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
    """Return a loss's class, and the options with which a known library has made it. A user's own class may keep what differs by rank."""
    kind = type(module)
    known = kind.__module__.startswith(_LIBRARIES_OF_LOSSES)
    names = inspect.signature(kind.__init__).parameters if known else ()
    # a library keeps most of its arguments under their names. The others become an object
    shown = [f"{name}={getattr(module, name)!r}" for name in names if has_stable_repr(getattr(module, name, module))]
    return f"{kind.__qualname__}({', '.join(shown)})"


# ---------------------------------------------------------------------- names


def compare_names(module: nn.Module, facts: Mapping[str, str]) -> None:
    """Compare what must be the same on every rank: names, shapes, dtypes and order of parameters and buffers, and what else is given.

    Args:
        module: The module that is trained.
        facts: Releases and options (``setup_facts``).

    Raises:
        RankMismatchError: on every rank, with the first names that differ.

    Communication: one handshake. One more gather if ranks differ.
    """
    own = [_describe_tensor(name, tensor) for name, tensor in named_tensors(module)]
    # which modules are gathered by themselves: ranks must do so in the same order
    own += [f"{name} divided by fully_shard" for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    digest = hashlib.sha256("\n".join(own).encode()).digest()
    received = handshake.all_gather("set-up", facts, digest + pack_notes())
    note_differences([payload[len(digest) :] for payload in received])
    if len({payload[: len(digest)] for payload in received}) == 1:
        return
    # swap all names, and show the first that differ
    tables: list[list[str]] = handshake.all_gather_json("all names", {}, own)
    columns = list(itertools.zip_longest(*tables, fillvalue="nothing"))
    places = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    ranks = []
    for rank in range(len(tables)):
        shown = [f"position {i}: {columns[i][rank]}" for i in places[:_MAX_SHOWN]]
        ranks.append("; ".join(shown))
    raise RankMismatchError(
        f"parameters and buffers ({len(places)} of {len(columns)} positions)",
        expected="the same names, shapes and dtypes in the same order on every rank",
        ranks=ranks,
        fix="Register submodules in a fixed order (sort names; no iteration over sets), with the same sizes on every rank.",
        collective=True,
    )


def _describe_tensor(name: str, tensor: Tensor) -> str:
    shard = shard_of(tensor)
    if is_lazy(tensor):  # the user has excluded it from DDP, or DDP refuses it
        return f"{name} uninitialized"
    shape = f"{tuple(tensor.shape)}"
    if shard is not None:  # ranks hold different rows of the same whole
        shape = f"{shard.whole_shape(tensor)} divided over ranks"
    elif isinstance(tensor, DTensor):
        shape += f" {tensor.placements} over {tuple(tensor.device_mesh.shape)}"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name} {shape} {tensor.dtype}{' frozen' * frozen}"


# ---------------------------------------------------------------------- what may differ


def pack_notes() -> bytes:
    """Return what may differ between nodes. Short, so that it fits into a handshake."""
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
    """Warn once of harmless differences between nodes.

    Args:
        payloads: Result of ``pack_notes`` on each rank.
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
            shown = [f"{value} on rank {listed(list(map(str, ranks)), 8)}" for value, ranks in ranks_of.items()]
            differences.append(f"{name}: {', '.join(shown)}")
    rank_zero_warn(f"Nodes differ, which changes no option of this package: {'; '.join(differences)}.")
