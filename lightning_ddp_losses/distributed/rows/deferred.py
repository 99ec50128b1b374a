"""Operators that can be deferred until sums over ranks are exchanged (``pending``), and the text by which ranks compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Operation(NamedTuple):
    """A deferred operator.

    Attributes:
        func: A function or method of torch.
        args: Its arguments: pending values, numbers, and lists of these.
        kwargs: Its keyword arguments.
        has_grad_mode: Whether it runs with gradients enabled.
        text: The operator, its operands and numbers, in the form in which ranks compare them.
        versions: Operands that already have a value, with the version of that value.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_grad_mode: bool
    text: str
    versions: tuple[tuple[Tensor, int], ...]


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
"""Operators that can be deferred. Their shapes depend only on the shapes of their operands, and they do not draw random numbers."""
FACTS = {
    *_operators("dim size numel nelement __len__ ndimension __hash__ is_floating_point is_complex"),
    *_getters("shape ndim dtype device layout"),
}
"""Attributes that can be read from a pending value."""
UNCOUNTED = {
    *_operators("numpy __array__ data_ptr untyped_storage __dlpack__"),
    *_getters("data"),
}
"""Operators that expose the memory of a value, so that writes to it do not change its version."""
OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    Tensor.__iadd__: torch.add,
    Tensor.__isub__: torch.sub,
    Tensor.__imul__: torch.mul,
    Tensor.__itruediv__: torch.div,
}
"""Operators that write into their first operand, with the out-of-place operator that has the same result."""


def text_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return an operator with its operands and numbers, or None if an operand is not a pending value, a number or a list of these."""
    # a list of numbers as an index selects by value
    lists: tuple[type, ...] = (tuple,) if func is Tensor.__getitem__ else (tuple, list)
    texts = [_operand_text(value, lists) for value in (*args, *kwargs.values())]
    if any(text is None for text in texts):
        return None
    return " ".join([getattr(func, "__name__", ""), *kwargs, *(text for text in texts if text is not None)])


def _operand_text(value: Any, lists: tuple[type, ...]) -> str | None:
    text = None
    if isinstance(value, Tensor):
        # pending values have a number, which is equal on all ranks
        number = getattr(value, "_number", None)
        text = None if number is None else f"#{number}"
    elif value is None or value is Ellipsis or isinstance(value, (int, float, complex, torch.dtype)):
        text = repr(value)
    elif isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        text = str(value) if all(part is None or type(part) is int for part in parts) else None
    elif isinstance(value, (tuple, list)) and isinstance(value, lists):
        texts = [_operand_text(each, lists) for each in value]
        text = None if None in texts else f"({' '.join(each for each in texts if each)})"
    return text
