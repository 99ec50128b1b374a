"""`draw_own_part`: a draw with rows draws the numbers of all rows, like one process, and keeps this rank's numbers.

Generators in the same state yield the same numbers on every rank. In one process, an operator fills memory for ``G`` rows in order. Each
rank fills memory of the same shape and order, and takes its rows. Afterwards the generator is also in the same state as in one process.

This is not possible for an operator whose number of draws depends on its values (``poisson``), that draws inside a fused kernel, or that
mixes rows of all ranks (``randperm``). Such operators raise an error that names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.inputs import tensors_in
from lightning_ddp_losses.randomness.places import (
    RowPlace,
    Rows,
    empty_whole,
    own_part,
    put_own_,
    whole_shape,
)
from lightning_ddp_losses.randomness.twin_table import map_call


class DrawCall(NamedTuple):
    """A call of an operator that draws.

    Attributes:
        function: Operator of aten.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the operator."""
        return operator_name(self.function)

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def shape(self) -> list[int]:
        """The shape that an operator without tensor arguments draws. Empty if no argument is a shape."""
        index = self._index_of_size()
        if index is None:
            return []
        return list(self.args[index] if index < len(self.args) else self.kwargs["size"])

    def run(self, *first: Any) -> Any:
        """Run the operator, with other first positional arguments if they are given."""
        return self.function(*first, *self.args[len(first) :], **self.kwargs)

    def mapped(self, replace: Callable[[Any], Any]) -> DrawCall:
        """Return the call with other tensors and numbers."""
        return DrawCall(self.function, map_call(replace, self.args), map_call(replace, self.kwargs))

    def without_generator(self) -> DrawCall:
        """Return the call with torch's generator instead of the user's."""
        kept = {name: value for name, value in self.kwargs.items() if name != "generator"}
        return self._replace(kwargs=kept)

    def with_size(self, shape: Sequence[int]) -> DrawCall:
        """Return the call of an operator without tensor arguments, with another shape to draw."""
        index = self._index_of_size()
        assert index is not None
        if index < len(self.args):
            return self._replace(args=(*self.args[:index], shape, *self.args[index + 1 :]))
        return self._replace(kwargs={**self.kwargs, "size": shape})

    def _index_of_size(self) -> int | None:
        names = [argument.name for argument in torch_compat.operator_schema(self.function).arguments]
        return names.index("size") if "size" in names else None


Draw: TypeAlias = "Callable[[DrawCall, RowPlace, Rows], Any]"


class CannotDrawError(Exception):
    """An operator cannot be drawn for the rows of all ranks.

    Attributes:
        got: The reason.
        fix: What to do.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got, self.fix = _REASONS.get(name, ("an operator whose numbers cannot be drawn row by row", _REPLACE))


def draw_own_part(call: DrawCall, place: RowPlace, rows: Rows) -> Any:
    """Return this rank's result of an operator that draws.

    Args:
        call: The call with this rank's rows.
        place: Position of the rows in the numbers that it draws.
        rows: Rows of this rank among the rows of all ranks.

    Raises:
        CannotDrawError: for an operator that cannot be drawn for the rows of all ranks.
    """
    return rule_of_draw(call, place)(call, place, rows)


def rule_of_draw(call: DrawCall, place: RowPlace) -> Draw:
    """Return how an operator is drawn for the rows of all ranks.

    Raises:
        CannotDrawError: for an operator for which this is impossible.
    """
    name = call.name
    draw = _DRAWS.get(name)
    if draw is None and name.endswith("_") and not any(isinstance(value, Tensor) for value in call.args[1:]):
        draw = _fill
    is_among_rows = name == "multinomial" and place.dim == call.args[0].ndim - 1
    if draw is None or is_among_rows:
        raise CannotDrawError(name)
    return draw


@functools.cache
def operator_name(function: Any) -> str:
    """Return the name of an operator of aten, such as ``bernoulli_``."""
    return str(torch_compat.operator_schema(function).name).partition("::")[2]


_NAMES_OF_CHOICES = {"_fused_sdp_choice"}  # torch marks it as drawing, although it does not draw


@functools.cache
def is_random(function: Any) -> bool:
    """Return whether an operator draws random numbers in some calls."""
    return torch.Tag.nondeterministic_seeded in function.tags and operator_name(function) not in _NAMES_OF_CHOICES


def draws_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers in this call. A dropout rate of 0 and evaluation mode prevent it."""
    if not is_random(function):
        return False
    schema = torch_compat.operator_schema(function)
    named = {argument.name: index for index, argument in enumerate(schema.arguments)}
    for name, idle in (("dropout_p", 0.0), ("dropout", 0.0), ("train", False), ("training", False)):
        if name not in named:
            continue
        index = named[name]
        default = schema.arguments[index].default_value
        value = args[index] if index < len(args) else kwargs.get(name, default)
        if value is not None and value == idle:
            return False
    return True


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


def _fill(call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw in place: ``normal_``, ``uniform_``, ``bernoulli_``, ``exponential_`` and the like."""
    tensor: Tensor = call.args[0]
    whole = call.run(empty_whole(tensor, place, rows.total))
    return tensor.copy_(own_part(whole, place, rows))


def _fill_by_rate(call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw in place with a tensor of rates: ``bernoulli_(p)``."""
    if len(call.args) < 2 or not isinstance(call.args[1], Tensor):
        return _fill(call, place, rows)
    tensor: Tensor = call.args[0]
    rates = _filled(call.args[1].expand_as(tensor), 0.0, place, rows)
    whole = call.run(empty_whole(tensor, place, rows.total), rates)
    return tensor.copy_(own_part(whole, place, rows))


def _like(call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw the shape of a tensor: ``rand_like``, ``randn_like``, ``randint_like``."""
    like = torch.empty_like(call.args[0])  # a view of part of a tensor may not be dense, but the result is
    return own_part(call.run(empty_whole(like, place, rows.total)), place, rows)


def _of_shape(call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw a given shape: ``rand``, ``randn``, ``randint``, ``normal``."""
    of_all = call.with_size(whole_shape(call.shape, place, rows.total))
    return own_part(of_all.run(), place, rows).clone()


def _by_values(filler: float, call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw one number for each rate (``bernoulli``), or from the weights of each row (``multinomial``)."""
    whole = call.run(_filled(call.args[0], filler, place, rows))
    return own_part(whole, place, rows)


def _normal(call: DrawCall, place: RowPlace, rows: Rows) -> Tensor:
    """Draw with tensors of means or deviations: ``normal``."""
    tensors = [value for value in call.args[:2] if isinstance(value, Tensor)]
    shape = torch.broadcast_tensors(*tensors)[0].shape  # type: ignore[no-untyped-call]
    wholes = []
    for value, filler in zip(call.args[:2], (0.0, 1.0), strict=True):
        whole = value
        if isinstance(value, Tensor):
            whole = _filled(value.expand(shape), filler, place, rows)
        wholes.append(whole)
    return own_part(call.run(*wholes), place, rows)


def _dropout(call: DrawCall, place: RowPlace, rows: Rows) -> tuple[Tensor, Tensor]:
    """Draw the mask of all rows in one kernel, and drop from this rank's rows: ``native_dropout``."""
    tensor, rate = call.args[:2]
    whole = empty_whole(tensor, place, rows.total).fill_(1)
    _, mask = call.function(whole, rate, True)
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
    "bernoulli": functools.partial(_by_values, 0.0),
    "multinomial": functools.partial(_by_values, 1.0),
    "normal": _normal,
    "native_dropout": _dropout,
}
