"""Values of other processes as bytes, read without running their content.

``torch.load`` with ``weights_only`` knows tensors, plain values and containers. numpy's arrays and numbers, and named tuples and
dataclasses of modules that this process has imported, are made too: they hold values and run no code. Any other class is refused. (A
pickle may run anything when it is read.) Trusted classes are named on every rank, with
``torch.serialization.add_safe_globals([Class])``.
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
"""Names in a pickle of a numpy array or number. They fill memory with bytes, and run no code."""


def pack(value: Any) -> bytes:
    """Return a value as bytes: tensors, arrays, plain values, containers of such."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(payload: bytes) -> Any:
    """Return the value that ``pack`` was given.

    Raises:
        pickle.UnpicklingError: for a class that could do something when it is made.
    """
    allowed = _numpy_dtypes()
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload)):
        found = _imported(name)
        if _NUMPY_PARTS.fullmatch(name) or _is_record(found):
            allowed.append(found)
    with torch.serialization.safe_globals(allowed):
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def pack_readable(value: Any, what: str) -> bytes:
    """Return a value of the user's program as bytes that every rank will read.

    Args:
        value: The value.
        what: Name of the value in the message.

    Raises:
        InputError: naming what in it the other ranks would refuse, or what cannot be sent.
    """
    try:
        payload = pack(value)
        unpack(payload)
    except Exception as error:  # any error of a class that is pickled
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
        PeerError: for a payload that could run something, or is damaged. It is not run.
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
    """Return the class that ``torch.load`` refused, from its error, without its advice. For another error return its first line."""
    text = str(error)
    refused = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", text)
    if refused is not None:
        return refused[1]
    lines = text.splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _numpy_dtypes() -> list[Any]:
    """Return the classes of numpy's dtypes. A pickle fills their instances. None if numpy is not loaded."""
    dtypes = getattr(sys.modules.get("numpy"), "dtypes", None)
    return [cls for cls in vars(dtypes).values() if isinstance(cls, type)] if dtypes is not None else []


def _imported(name: str) -> Any:
    """Return the object of this name in a module that is imported already. None if there is no such thing."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def _is_record(cls: Any) -> bool:
    """Return whether this is a class of named values: making one runs no code of the sender."""
    is_named_tuple = isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
    return is_named_tuple or (isinstance(cls, type) and dataclasses.is_dataclass(cls))
