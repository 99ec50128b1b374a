"""Values that other processes have made, as bytes: read without running what is in them.

``torch.load`` with ``weights_only`` knows tensors, plain values and containers. Named tuples and dataclasses of modules that this process
has imported are made too: they hold values and run nothing. Any other class is refused. (A pickle may run anything when it is read.)
"""

from __future__ import annotations

import dataclasses
import io
import sys
from typing import Any

import torch


def pack(value: Any) -> bytes:
    """Return a value as bytes: tensors, plain values, containers of such."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    """Return what ``pack`` was given.

    Raises:
        pickle.UnpicklingError: for a class that could do something when it is made.
    """
    named = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload))
    found = [_imported(name) for name in named]
    with torch.serialization.safe_globals([cls for cls in found if _is_record(cls)]):
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def _imported(name: str) -> Any:
    """Return what has this name in a module that is imported already; None where there is no such thing."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _is_record(cls: Any) -> bool:
    """Say whether this is a class of named values: making one runs nothing of the sender's choice."""
    is_named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or (isinstance(cls, type) and dataclasses.is_dataclass(cls))
