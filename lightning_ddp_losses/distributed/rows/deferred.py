"""Operators that wait for sums over ranks (``pending``): which ones can, and what ranks compare of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Operation(NamedTuple):
    """An operator that waits for its operands.

    Attributes:
        func: A function or method of torch.
        args: Its arguments: pending values, numbers, and lists of these.
        kwargs: The same by name.
        has_grad_mode: Whether it runs with gradients.
        text: The operator, its operands and numbers, as ranks compare them.
        versions: Operands that have a value already, and how often that was written to.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_grad_mode: bool
    text: str
    versions: tuple[tuple[Tensor, int], ...]


class Numbered(NamedTuple):
    """An operand that is equal on all ranks.

    Attributes:
        number: Its number in the call.
    """

    number: int


_DEFERRED_NAMES = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sigmoid logit tanh sin cos
erf floor ceil round trunc sign relu isnan isinf isfinite logical_not bitwise_not nan_to_num add sub subtract mul multiply div divide
true_divide pow maximum minimum clamp clip clamp_min clamp_max masked_fill eq ne lt le gt ge logical_and logical_or
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__
__and__ __or__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__ __imul__ __itruediv__ rsub
sum mean prod var std logsumexp amax amin trace diagonal diag diag_embed tril triu
flatten view reshape unsqueeze squeeze t transpose permute __getitem__ select narrow
stack cat matmul mm __matmul__ softmax log_softmax float double detach
"""


def _operators(names: str) -> Iterable[Any]:
    for name in names.split():
        for owner in (torch, Tensor):
            operator = getattr(owner, name, None)
            if callable(operator):
                yield operator


def _getters(names: str) -> Iterable[Any]:
    return [getattr(Tensor, name).__get__ for name in names.split()]


DEFERRED = {*_operators(_DEFERRED_NAMES), functional.relu, *_getters("T mT")}
"""Operators that can wait: their shapes follow from those of their operands, and they draw no random numbers."""
FACTS = {
    *_operators("dim size numel nelement __len__ ndimension __hash__ is_floating_point is_complex"),
    *_getters("shape ndim dtype device layout"),
}
"""What is read from a value that is not known."""
UNCOUNTED = {
    *_operators("numpy __array__ data_ptr untyped_storage __dlpack__"),
    *_getters("data"),
}
"""What shows the memory of a value, so that writes to it are not counted."""
OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    Tensor.__iadd__: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.__itruediv__: torch.div,
}
"""Operators that write into their first operand, and those of the same result."""


def text_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return an operator, its operands and numbers. None if there are others than numbered ones, numbers and their lists."""
    # a list of numbers as an index chooses by value
    lists: tuple[type, ...] = (tuple,) if func is Tensor.__getitem__ else (tuple, list)
    texts = [_operand_text(value, lists) for value in (*args, *kwargs.values())]
    if any(text is None for text in texts):
        return None
    return " ".join([getattr(func, "__name__", ""), *kwargs, *(text for text in texts if text is not None)])


def _operand_text(value: Any, lists: tuple[type, ...]) -> str | None:
    text = None
    if isinstance(value, Numbered):
        text = f"#{value.number}"
    elif value is None or value is Ellipsis or isinstance(value, (int, float, complex, torch.dtype)):
        text = repr(value)
    elif isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        text = str(value) if all(part is None or type(part) is int for part in parts) else None
    elif isinstance(value, (tuple, list)) and isinstance(value, lists):
        texts = [_operand_text(each, lists) for each in value]
        text = None if None in texts else f"({' '.join(each for each in texts if each)})"
    return text
