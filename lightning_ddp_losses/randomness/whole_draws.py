"""`draw_own_part`: a draw with rows draws the numbers of all rows, like one process, and keeps this rank's numbers.

Generators in the same state yield the same numbers on every rank. In one process, an operator fills memory for ``G`` rows in order. Each
rank fills memory of the same shape and order, and takes its rows. Afterwards the generator is also in the same state as in one process.

This is not possible for an operator whose number of draws depends on its values (``poisson``), that draws inside a fused kernel, or that
mixes rows of all ranks (``randperm``). Such operators raise an error that names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.randomness.places import (
    RowPlace,
    Rows,
    empty_whole,
    own_part,
    put_own_,
    whole_shape,
)

Draw: TypeAlias = "Callable[[Any, tuple[Any, ...], dict[str, Any], RowPlace, Rows], Any]"


class CannotDrawError(Exception):
    """An operator cannot be drawn for the rows of all ranks.

    Attributes:
        got: The reason.
        fix: What to do.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got, self.fix = _REASONS.get(name, ("an operator whose numbers cannot be drawn row by row", _REPLACE))


def draw_own_part(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Return this rank's result of an operator that draws.

    Args:
        function: Operator of aten.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        place: Position of the rows in the numbers that it draws.
        rows: Rows of this rank among the rows of all ranks.

    Raises:
        CannotDrawError: for an operator that cannot be drawn for the rows of all ranks.
    """
    return draw_of(function, args, place)(function, args, kwargs, place, rows)


def draw_of(function: Any, args: tuple[Any, ...], place: RowPlace) -> Draw:
    """Return how an operator is drawn for the rows of all ranks.

    Raises:
        CannotDrawError: for an operator for which this is impossible.
    """
    name = operator_name(function)
    draw = _DRAWS.get(name)
    if draw is None and name.endswith("_") and not any(isinstance(value, Tensor) for value in args[1:]):
        draw = _fill
    is_among_rows = name == "multinomial" and place.dim == args[0].ndim - 1
    if draw is None or is_among_rows:
        raise CannotDrawError(name)
    return draw


@functools.cache
def operator_name(function: Any) -> str:
    """Return the name of an operator of aten, such as ``bernoulli_``."""
    return str(torch_compat.operator_schema(function).name).partition("::")[2]


def shape_drawn(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int] | None:
    """Return the shape that an operator without tensor arguments draws, or None if no argument is a shape."""
    schema = torch_compat.operator_schema(function)
    for index, argument in enumerate(schema.arguments):
        if argument.name == "size":
            return list(args[index] if index < len(args) else kwargs["size"])
    return None


def with_size(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Sequence[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator without tensor arguments, with another shape to draw."""
    schema = torch_compat.operator_schema(function)
    index = [argument.name for argument in schema.arguments].index("size")
    if index < len(args):
        return (*args[:index], shape, *args[index + 1 :]), kwargs
    return args, {**kwargs, "size": shape}


_NAMES_OF_CHOICES = {"_fused_sdp_choice"}  # torch marks it as drawing, although it does not draw


@functools.cache
def is_random(function: Any) -> bool:
    """Return whether an operator draws random numbers in some calls."""
    return torch.Tag.nondeterministic_seeded in function.tags and operator_name(function) not in _NAMES_OF_CHOICES


def draws_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers in this call."""
    return is_random(function) and not _draws_nothing(function, args, kwargs)


def _draws_nothing(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator does not draw in this call, because of its dropout rate or because it is in evaluation mode."""
    schema = torch_compat.operator_schema(function)
    named = {argument.name: index for index, argument in enumerate(schema.arguments)}
    for name, idle in (("dropout_p", 0.0), ("dropout", 0.0), ("train", False), ("training", False)):
        if name not in named:
            continue
        index = named[name]
        default = schema.arguments[index].default_value
        value = args[index] if index < len(args) else kwargs.get(name, default)
        if value is not None and value == idle:
            return True
    return False


_REPLACE = "Replace the operator, or run it outside of the block, where each rank draws its own numbers."
_FUSED = (
    "a fused kernel, which draws inside",
    "Use torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or no dropout in this operator.",
)
_BY_VALUE = ("an operator that draws as many numbers as its values ask for", _REPLACE)
_MIXES = (
    "an order of rows, whose partners lie on other ranks",
    "Draw it for the rows of all ranks outside of the block and gather the rows, or let partners be rows of the same rank.",
)
_REASONS = {
    "randperm": _MIXES,
    "multinomial": _MIXES,
    "_scaled_dot_product_flash_attention": _FUSED,
    "_scaled_dot_product_efficient_attention": _FUSED,
    "_scaled_dot_product_cudnn_attention": _FUSED,
    "_flash_attention_forward": _FUSED,
    "_efficient_attention_forward": _FUSED,
    "_cudnn_rnn": ("a fused kernel, which draws inside", "Write the layers one by one, with dropout between them."),
    "rrelu_with_noise": _BY_VALUE,
    "rrelu_with_noise_": _BY_VALUE,
    "rrelu_with_noise_functional": _BY_VALUE,
    "poisson": _BY_VALUE,
    "binomial": _BY_VALUE,
    "_standard_gamma": _BY_VALUE,
    "_sample_dirichlet": _BY_VALUE,
}


# ---------------------------------------------------------------------- kinds of operators


def _fill(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw in place: ``normal_``, ``uniform_``, ``bernoulli_``, ``exponential_`` and the like."""
    tensor = args[0]
    whole = function(empty_whole(tensor, place, rows.total), *args[1:], **kwargs)
    return tensor.copy_(own_part(whole, place, rows))


def _fill_by_rate(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw in place with a tensor of rates: ``bernoulli_(p)``."""
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return _fill(function, args, kwargs, place, rows)
    tensor = args[0]
    rates = _filled(args[1].expand_as(tensor), 0.0, place, rows)
    whole = function(empty_whole(tensor, place, rows.total), rates, *args[2:], **kwargs)
    return tensor.copy_(own_part(whole, place, rows))


def _like(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw the shape of a tensor: ``rand_like``, ``randn_like``, ``randint_like``."""
    like = torch.empty_like(args[0])  # a view of part of a tensor may not be dense, but the result is
    whole = function(empty_whole(like, place, rows.total), *args[1:], **kwargs)
    return own_part(whole, place, rows)


def _of_shape(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw a given shape: ``rand``, ``randn``, ``randint``, ``normal``."""
    shape = shape_drawn(function, args, kwargs)
    assert shape is not None
    args, kwargs = with_size(function, args, kwargs, whole_shape(shape, place, rows.total))
    return own_part(function(*args, **kwargs), place, rows).clone()


def _by_rate(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw one number for each rate: ``bernoulli``."""
    whole = function(_filled(args[0], 0.0, place, rows), *args[1:], **kwargs)
    return own_part(whole, place, rows)


def _by_weight(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw from the weights of each row: ``multinomial``."""
    whole = function(_filled(args[0], 1.0, place, rows), *args[1:], **kwargs)
    return own_part(whole, place, rows)


def _normal(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw with tensors of means or deviations: ``normal``."""
    tensors = [value for value in args[:2] if isinstance(value, Tensor)]
    shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
    wholes = []
    for value, filler in zip(args[:2], (0.0, 1.0), strict=True):
        whole = value
        if isinstance(value, Tensor):
            whole = _filled(value.expand(shape), filler, place, rows)
        wholes.append(whole)
    return own_part(function(*wholes, *args[2:], **kwargs), place, rows)


def _dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: RowPlace, rows: Rows) -> Any:
    """Draw the mask of all rows in one kernel, and drop from this rank's rows: ``native_dropout``."""
    tensor, rate = args[0], args[1]
    whole = empty_whole(tensor, place, rows.total).fill_(1)
    _, mask = function(whole, rate, True)
    own = own_part(mask, place, rows)
    scale = 0.0
    if rate < 1:
        scale = 1 / (1 - rate)
    return tensor * own * scale, own


def _filled(own: Tensor, filler: float, place: RowPlace, rows: Rows) -> Tensor:
    """Return a tensor of all rows that contains this rank's values in its rows, and a filler in the rows of other ranks."""
    whole = empty_whole(own, place, rows.total).fill_(filler)
    put_own_(whole, own, place, rows)
    return whole


_DRAWS: dict[str, Draw] = {
    "bernoulli_": _fill_by_rate,
    "rand_like": _like,
    "randn_like": _like,
    "randint_like": _like,
    "rand": _of_shape,
    "randn": _of_shape,
    "randint": _of_shape,
    "bernoulli": _by_rate,
    "multinomial": _by_weight,
    "normal": _normal,
    "native_dropout": _dropout,
}
