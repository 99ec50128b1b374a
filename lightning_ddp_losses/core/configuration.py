"""The configuration of a loss or a metric as text, to compare between ranks once."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_COUNTERS = ("training", "queue_idx", "has_been_filled")  # change in the course of training

_MEMORIES = ("embedding_memory", "label_memory", "curr_batch_idx", "position", "hist_")


def configuration(loss: nn.Module) -> str:
    """Classes and plain attributes of the loss and everything inside it, sorted, without statistics and states of metrics."""
    lines = []
    for name, module in loss.named_modules():
        statistics = {*getattr(module, "_record_these_stats", ()), *getattr(module, "_defaults", ())}
        own = [
            f"{key}={value!r}"
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and key not in statistics and key not in _COUNTERS and _is_plain(value)
        ]
        # a metric keeps what it remembers in plain attributes too
        held = {**({} if hasattr(module, "_defaults") else vars(module)), **module._buffers}
        own += [f"{k}#{_hash(held[k])}" for k in sorted(held) if k not in statistics and _is_setting(k, held[k])]
        shapes = [f"{k}{tuple(p.shape)}" for k, p in module.named_parameters(recurse=False)]
        lines.append(f"{name or 'loss'}: {type(module).__name__}({', '.join([*own, *shapes])})")
    return "; ".join(lines)


def _is_setting(name: str, value: Any) -> bool:
    """Class weights and the like; not what a loss remembers of its batches."""
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


def configuration_digest(module: nn.Module) -> str:
    """The configuration's beginning, for reading, and a hash of all of it."""
    text = configuration(module)
    return f"{text[:160]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
