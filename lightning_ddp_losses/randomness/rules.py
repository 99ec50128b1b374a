"""`places_after`: the position of the rows in the results of an operator, given their position in its arguments.

Rows are tracked only through operators that keep each row in place, with one rule per family of operators. An operator without a rule, or
whose rule does not apply, loses the rows (`LostRowsError`): its results may contain rows in an unknown position or order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.randomness.places import RowPlace, place_in_view

Places: TypeAlias = "list[RowPlace | None]"


class LostRowsError(Exception):
    """The rows cannot be tracked through an operator."""


class OperatorCall(NamedTuple):
    """An operator and its arguments by name.

    Attributes:
        name: Its name in aten.
        values: Its arguments.
        places: Positions of the rows in the tensor arguments that have rows, by ``id``.
        outputs: The tensors among its results.
        rows: Number of rows of this rank.
        is_pointwise: Whether it processes each element separately.
    """

    name: str
    values: Mapping[str, Any]
    places: Mapping[int, RowPlace]
    outputs: Sequence[Tensor]
    rows: int
    is_pointwise: bool

    def place(self, name: str) -> RowPlace | None:
        """Return the position of the rows in an argument."""
        return self.places.get(id(self.values.get(name)))

    def needed_place(self, name: str) -> RowPlace:
        """Return the position of the rows in an argument, which must be the only argument with rows."""
        place = self.place(name)
        if place is None or len(self.places) > 1:
            raise LostRowsError
        return place

    def dims(self, name: str, ndim: int) -> list[int]:
        """Return an argument that specifies dimensions, where None means all dimensions."""
        value = self.values.get(name)
        if value is None or value == []:
            return list(range(ndim))
        if isinstance(value, int):
            value = [value]
        return [dim % max(ndim, 1) for dim in value]


Rule: TypeAlias = "Callable[[OperatorCall], Places]"


def places_after(call: OperatorCall) -> Places:
    """Return the position of the rows in each result of an operator with at least one argument that has rows.

    Raises:
        LostRowsError: if it is unknown.
    """
    rule = _RULES.get(call.name)
    if rule is None and call.is_pointwise:
        rule = _pointwise
    if rule is None:
        raise LostRowsError
    places = rule(call)
    if len(places) != len(call.outputs):
        raise LostRowsError
    for place, output in zip(places, call.outputs, strict=True):
        if place is not None and output.shape[place.dim] != place.outer * call.rows * place.inner:
            raise LostRowsError
    return places


# ---------------------------------------------------------------------- element by element


def _pointwise(call: OperatorCall) -> Places:
    ndim = call.outputs[0].ndim
    found = set()
    tensors = [value for value in _flat(call.values.values()) if isinstance(value, Tensor)]
    for tensor in tensors:
        place = call.places.get(id(tensor))
        if place is not None:
            found.add(place._replace(dim=place.dim + ndim - tensor.ndim))
    if len(found) != 1:
        raise LostRowsError
    place = found.pop()
    for tensor in tensors:
        dim = place.dim - ndim + tensor.ndim
        if id(tensor) not in call.places and dim >= 0 and tensor.shape[dim] != 1:
            raise LostRowsError  # as many entries as rows, of unknown origin
    return [place] * len(call.outputs)


def _same(call: OperatorCall) -> Places:
    return [call.needed_place("self")] * len(call.outputs)


# ---------------------------------------------------------------------- along dimensions


def _along(argument: str) -> Rule:
    """Return the rule of an operator along one dimension that the result retains."""

    def rule(call: OperatorCall) -> Places:
        place = call.needed_place("self")
        if place.dim in call.dims(argument, call.values["self"].ndim):
            raise LostRowsError
        return [place] * len(call.outputs)

    return rule


def _gather(call: OperatorCall) -> Places:
    places = {call.place("self"), call.place("index")}
    if len(places) != 1:
        raise LostRowsError
    place = places.pop()
    tensor = call.values["self"]
    if place is None or place.dim == call.values["dim"] % tensor.ndim:
        raise LostRowsError
    return [place]


def _reduced(call: OperatorCall) -> Places:
    """A sum, a mean or a maximum: the rows are reduced, or their dimension moves to the left."""
    place = call.needed_place("self")
    tensor = call.values["self"]
    dims = call.dims("dim", tensor.ndim)
    if place.dim in dims:
        return [None] * len(call.outputs)
    if not call.values.get("keepdim", False):
        place = place._replace(dim=place.dim - sum(dim < place.dim for dim in dims))
    return [place] * len(call.outputs)


def _value_of_rows(call: OperatorCall) -> Places:
    """A maximum with its index, where an index of a row would count this rank's rows."""
    place = call.needed_place("self")
    is_value = "dim" not in call.values
    if not is_value and place.dim in call.dims("dim", call.values["self"].ndim):
        raise LostRowsError
    return _reduced(call)


# ---------------------------------------------------------------------- shapes


def _view(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    new = place_in_view(call.values["self"].shape, place, call.rows, call.outputs[0].shape)
    if new is None:
        raise LostRowsError
    return [new]


def _permute(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    dims = call.dims("dims", call.values["self"].ndim)
    return [place._replace(dim=dims.index(place.dim))]


def _transpose(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    ndim = call.values["self"].ndim
    first, second = call.values.get("dim0", 0) % ndim, call.values.get("dim1", 1) % ndim
    moved = {first: second, second: first}
    return [place._replace(dim=moved.get(place.dim, place.dim))]


def _unsqueeze(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    added = call.values["dim"] % (call.values["self"].ndim + 1)
    return [place._replace(dim=place.dim + (added <= place.dim))]


def _squeeze(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    shape = call.values["self"].shape
    dims = [dim for dim in call.dims("dim", len(shape)) if shape[dim] == 1]
    return [place._replace(dim=place.dim - sum(dim < place.dim for dim in dims))]


def _expand(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    added = call.outputs[0].ndim - call.values["self"].ndim
    return [place._replace(dim=place.dim + added)]


def _repeat(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    added = call.outputs[0].ndim - call.values["self"].ndim
    dim = place.dim + added
    return [RowPlace(dim, place.outer * call.values["repeats"][dim], place.inner)]


def _select(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    dim = call.values["dim"] % call.values["self"].ndim
    if dim == place.dim:
        raise LostRowsError
    return [place._replace(dim=place.dim - (dim < place.dim))]


def _slice(call: OperatorCall) -> Places:
    place = call.needed_place("self")
    before, after = call.values["self"], call.outputs[0]
    if before.shape[place.dim] != after.shape[place.dim]:
        raise LostRowsError
    is_along_rows = call.values["dim"] % before.ndim == place.dim
    end = call.values.get("end")
    if is_along_rows and end is not None and end <= before.shape[place.dim]:
        raise LostRowsError  # the size equals the number of rows, possibly by chance
    return [place]


def _split(call: OperatorCall) -> Places:
    """Split along another dimension, or between blocks of all rows (two views)."""
    place = call.needed_place("self")
    if place.dim != call.values.get("dim", 0) % call.values["self"].ndim:
        return [place] * len(call.outputs)
    found: Places = []
    for output in call.outputs:
        blocks, rest = divmod(output.shape[place.dim], call.rows * place.inner)
        if rest or not blocks:
            raise LostRowsError
        found.append(place._replace(outer=blocks))
    return found


def _unbind(call: OperatorCall) -> Places:
    return _select(call) * len(call.outputs)


def _cat(call: OperatorCall) -> Places:
    """Concatenate along another dimension, or concatenate blocks of all rows (two views)."""
    tensors = call.values["tensors"]
    dim = call.values.get("dim", 0) % call.outputs[0].ndim
    places = [call.places.get(id(tensor)) for tensor in tensors]
    if None in places:
        raise LostRowsError
    certain = [place for place in places if place is not None]
    if certain[0].dim == dim:
        if any(place.dim != dim or place.inner != 1 for place in certain):
            raise LostRowsError
        return [RowPlace(dim, sum(place.outer for place in certain))]
    if len(set(certain)) > 1:
        raise LostRowsError
    return [certain[0]]


def _stack(call: OperatorCall) -> Places:
    places = {call.places.get(id(tensor)) for tensor in call.values["tensors"]}
    if len(places) != 1:
        raise LostRowsError
    place = places.pop()
    if place is None:
        raise LostRowsError
    dim = call.values.get("dim", 0) % call.outputs[0].ndim
    return [place._replace(dim=place.dim + (dim <= place.dim))]


# ---------------------------------------------------------------------- products and layers


def _product(first: str, second: str) -> Rule:
    """Return the rule of ``(.., n, k) @ (.., k, m)``."""

    def rule(call: OperatorCall) -> Places:
        if "self" not in (first, second) and call.place("self") is not None:
            raise LostRowsError
        left, right = call.place(first), call.place(second)
        ndim = call.outputs[0].ndim
        if left is not None and right is not None:
            if left == right and ndim == 3 and left.dim == 0:
                return [left]
            if left.dim == ndim - 1 and right == left._replace(dim=ndim - 2):
                return [None]
            raise LostRowsError
        if left is not None and left.dim == ndim - 2:
            return [left]
        if right is not None and right.dim == ndim - 1:
            return [right]
        raise LostRowsError

    return rule


def _of_first_dim(*without: int) -> Rule:
    """Return the rule of a layer that processes each row of dimension 0 separately.

    Args:
        without: Indices of results without rows.
    """

    def rule(call: OperatorCall) -> Places:
        place = call.needed_place("input")
        if place.dim != 0:
            raise LostRowsError
        return [None if number in without else place for number in range(len(call.outputs))]

    return rule


def _recurrent(call: OperatorCall) -> Places:
    """A layer of an LSTM in one kernel: inputs ``(T, B, E)``, states ``(..., B, H)``, and memory for backward."""
    states = [call.values["hx_"], call.values["cx_"]]
    others = {id(state): RowPlace(state.ndim - 2) for state in states if id(state) in call.places}
    expected = {id(call.values["input"]): RowPlace(1), **others}
    if dict(call.places) != expected:
        raise LostRowsError
    new_states = call.outputs[1:-1]
    return [RowPlace(1), *[RowPlace(state.ndim - 2) for state in new_states], None]


def _pooled(call: OperatorCall) -> Places:
    """The last two dimensions are spatial, preceded by rows and channels."""
    place = call.needed_place("self")
    if place.dim >= call.values["self"].ndim - 2:
        raise LostRowsError
    return [place] * len(call.outputs)


def _layer_norm(call: OperatorCall) -> Places:
    place = call.needed_place("input")
    if place.dim >= call.values["input"].ndim - len(call.values["normalized_shape"]):
        raise LostRowsError
    return [place] * len(call.outputs)


def _embedding(call: OperatorCall) -> Places:
    return [call.needed_place("indices")]


def _index(call: OperatorCall) -> Places:
    """``table[index]`` with the rows in the index, or an index in another dimension than the rows."""
    given = [(dim, index) for dim, index in enumerate(call.values["indices"]) if index is not None]
    if len(given) != 1 or given[0][1].dtype is torch.bool:
        raise LostRowsError
    dim, index = given[0]
    place, of_index = call.place("self"), call.places.get(id(index))
    if place is None and of_index is not None:
        return [of_index._replace(dim=of_index.dim + dim)]
    if place is None or of_index is not None or place.dim == dim:
        raise LostRowsError
    return [place._replace(dim=place.dim + (index.ndim - 1) * (place.dim > dim))]


def _index_select(call: OperatorCall) -> Places:
    tensor = call.values["self"]
    dim = call.values["dim"] % tensor.ndim
    place, of_index = call.place("self"), call.place("index")
    if place is None and of_index is not None:
        return [of_index._replace(dim=dim)]
    if place is None or of_index is not None or place.dim == dim:
        raise LostRowsError
    return [place]


def _attention(call: OperatorCall) -> Places:
    """Attention without dropout."""
    places = {call.place(name) for name in ("query", "key", "value")}
    if places != {RowPlace(0)} or call.values.get("attn_mask") is not None:
        raise LostRowsError
    return [RowPlace(0)] * len(call.outputs)


def _loss(call: OperatorCall) -> Places:
    """A loss with ``reduction``, where 0 means none and keeps the rows in dimension 0."""
    places = {call.place("self"), call.place("target")}
    if places != {RowPlace(0)}:
        raise LostRowsError
    if call.values["reduction"] == 0:
        return [RowPlace(0), *[None] * (len(call.outputs) - 1)]
    return [None] * len(call.outputs)


def _elementwise_loss(call: OperatorCall) -> Places:
    places: Places = [None]
    if call.values["reduction"] == 0:
        places = _pointwise(call)
    return places


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += value
        else:
            found.append(value)
    return found


def _table(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_RULES: dict[str, Rule] = {
    **_table(
        _same, "detach", "alias", "_to_copy", "lift_fresh", "contiguous", "clone", "view_as_real", "fill_", "zero_"
    ),
    **_table(_same, "zeros_like", "ones_like", "empty_like", "full_like"),
    **_table(_pointwise, "copy_", "masked_fill_", "native_dropout_backward", "expand_as", "threshold", "relu_"),
    **_table(
        _along("dim"),
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
    ),
    **_table(_along("dim"), "sort", "argsort", "topk"),
    **_table(_along("dims"), "flip", "roll"),
    **_table(_gather, "gather"),
    **_table(_reduced, "sum", "mean", "amax", "amin", "var", "std", "logsumexp", "linalg_vector_norm", "norm", "prod"),
    **_table(_reduced, "any", "all", "var_mean", "nansum"),
    **_table(_value_of_rows, "max", "min", "argmax", "argmin", "median", "kthvalue", "mode"),
    **_table(_view, "view", "_unsafe_view", "reshape", "_reshape_alias"),
    **_table(_permute, "permute"),
    **_table(_transpose, "transpose", "t", "swapaxes"),
    **_table(_unsqueeze, "unsqueeze"),
    **_table(_squeeze, "squeeze"),
    **_table(_expand, "expand"),
    **_table(_repeat, "repeat"),
    **_table(_select, "select"),
    **_table(_slice, "slice"),
    **_table(_split, "split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"),
    **_table(_unbind, "unbind"),
    **_table(_cat, "cat"),
    **_table(_stack, "stack"),
    **_table(_product("self", "mat2"), "mm", "bmm"),
    **_table(_product("mat1", "mat2"), "addmm"),
    **_table(_product("batch1", "batch2"), "baddbmm"),
    **_table(_of_first_dim(), "convolution", "native_group_norm"),
    **_table(_of_first_dim(1, 2, 3, 4), "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"),
    **_table(_recurrent, "mkldnn_rnn_layer"),
    **_table(_pooled, "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool2d"),
    **_table(_pooled, "upsample_nearest2d", "upsample_bilinear2d", "reflection_pad2d", "replication_pad2d"),
    **_table(_layer_norm, "native_layer_norm"),
    **_table(_embedding, "embedding"),
    **_table(_index, "index"),
    **_table(_index_select, "index_select"),
    **_table(_attention, "_scaled_dot_product_flash_attention_for_cpu"),
    **_table(_loss, "nll_loss_forward"),
    **_table(_elementwise_loss, "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
}
