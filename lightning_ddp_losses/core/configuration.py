"""The configuration of a loss or a metric as text, which ranks compare once: what must be equal, without what training changes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from lightning_ddp_losses.core import compat

_READ_CHARACTERS = 2000  # of a configuration, in an error
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_COUNTERS = ("training", "queue_idx", "has_been_filled")  # change in the course of training
# tensors that hold a loss's earlier batches
_MEMORIES = ("embedding_memory", "label_memory", "curr_batch_idx", "position", "hist_", "bank_ptr")


def configuration(loss: nn.Module) -> str:
    """Return classes and plain attributes of a loss and everything inside it, sorted, without statistics and states of metrics."""
    lines = []
    for name, module in loss.named_modules():
        settings = ", ".join(_settings(module))
        lines.append(f"{name or 'loss'}: {type(module).__name__}({settings})")
    return "; ".join(lines)


def configuration_digest(module: nn.Module) -> str:
    """Return the configuration, for an error that shows how ranks differ, and a hash of all of it."""
    text = configuration(module)
    return f"{text[:_READ_CHARACTERS]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"


def _settings(module: nn.Module) -> list[str]:
    """Return what must be equal of one module: plain attributes, hashes of tensors that are settings, shapes of parameters."""
    states = compat.torchmetrics_states(module)
    is_metric = states is not None
    changing = {*compat.recorded_statistics(module), *(states or ())}
    settings = []
    for key, value in sorted(vars(module).items()):
        if key.startswith("_") or key in changing or key in _COUNTERS:
            continue
        if _is_plain(value):
            settings.append(f"{key}={value!r}")
    # a metric also remembers batches in plain attributes
    tensors: dict[str, Any] = {} if is_metric else dict(vars(module))
    tensors.update(compat.buffer_slots(module))
    own = [key for key in sorted(tensors) if key not in changing and _sets_up(key, tensors[key])]
    settings += [f"{key}#{_hash(tensors[key])}" for key in own]
    settings += [f"{key}{tuple(parameter.shape)}" for key, parameter in module.named_parameters(recurse=False)]
    return settings


def _sets_up(name: str, value: Any) -> bool:
    """Return whether a value is a tensor that sets the loss up (class weights), and not one that remembers its batches."""
    return isinstance(value, torch.Tensor) and not name.startswith("_") and name not in _MEMORIES


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
    return hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=6).hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, _PLAIN)
