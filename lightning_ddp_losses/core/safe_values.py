"""Values as bytes, for other ranks.

Values from other processes are read without executing their content. ``torch.load`` with ``weights_only`` accepts tensors, plain values
and containers. In addition, numpy arrays and numbers are allowed, and named tuples and dataclasses from modules that this process has
already imported: they hold values and do not run code. Any other class is rejected. (A pickle may execute anything when it is loaded.)
Trusted classes must be registered on every rank with ``torch.serialization.add_safe_globals([Class])``.
"""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from typing import Any

import torch

from lightning_ddp_losses.errors import InputError, PeerError

_READABLE = "tensors, arrays and plain values in dicts, lists, tuples, named tuples and dataclasses"
_NUMPY_PARTS = re.compile(r"numpy\.(ndarray|dtype|_?core\.multiarray\.(_reconstruct|scalar))")
"""Names in a pickle of a numpy array or number. They fill memory with bytes and do not run code."""


def pack(value: Any) -> bytes:
    """Return a value as bytes: tensors, arrays, plain values, and containers of these."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    """Return the value that ``pack`` was given.

    Raises:
        pickle.UnpicklingError: for a class whose construction could run code.
    """
    allowed = _numpy_dtypes()
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload)):
        found = _imported(name)
        if _NUMPY_PARTS.fullmatch(name) or _is_record(found):
            allowed.append(found)
    with torch.serialization.safe_globals(allowed):
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def pack_readable(value: Any, what: str) -> bytes:
    """Return a value of the user's program as bytes that every rank will accept.

    Args:
        value: The value.
        what: Name of the value in the message.

    Raises:
        InputError: naming the part that the other ranks would reject or that cannot be sent.
    """
    try:
        payload = pack(value)
        unpack(payload)
    except Exception as error:  # a class that is pickled may raise any error
        raise InputError(
            what,
            expected=f"{_READABLE}, which other ranks read without running anything",
            got=_reason(error),
            fix="Make it of such values (a state_dict of numbers, a batch of tensors in a dict). Where you trust the class, say so on "
            "every rank, before the fit: torch.serialization.add_safe_globals([TheClass]).",
        ) from error
    return payload


def unpack_from(payload: bytes, what: str, rank: int) -> Any:
    """Return the value that ``pack_readable`` was given on another rank.

    Raises:
        PeerError: for a payload that could run code, or is damaged. Its content is not run.
    """
    try:
        return unpack(payload)
    except Exception as error:
        raise PeerError(
            f"{what}, from rank {rank}",
            expected=_READABLE,
            got=_reason(error),
            fix="No rank of this package sends that: look at who can reach the run's ports (`ddp-losses explain security`).",
        ) from error


def _reason(error: Exception) -> str:
    """Return the class that ``torch.load`` rejected, without torch's advice. For any other error return its first line."""
    text = str(error)
    refused = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text)
    if refused is not None:
        return refused[1]
    lines = text.splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _numpy_dtypes() -> list[Any]:
    """Return the classes of numpy's dtypes, whose instances a pickle fills. The list is empty if numpy is not loaded."""
    dtypes = getattr(sys.modules.get("numpy"), "dtypes", None)
    return [cls for cls in vars(dtypes).values() if isinstance(cls, type)] if dtypes is not None else []


def _imported(name: str) -> Any:
    """Return the object with this qualified name from an already imported module, or None if it does not exist."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _is_record(cls: Any) -> bool:
    """Return whether this is a class of named values, whose construction does not run code of the sender."""
    is_named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or (isinstance(cls, type) and dataclasses.is_dataclass(cls))
