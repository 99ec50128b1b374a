"""Rules for the operators of a loss: the kind of each result, from the kinds of the operands.

What no rule names is ``Broken``. So a loss is a mean over rows only if each of its operators has a rule that says so.

| operators | rule |
|---|---|
| pointwise | row by row, if the rows of all operands are the same. Linear ones also of sums |
| sums, means | over the rows: a ``Sum``. Over other dimensions: row by row |
| maxima, norms, softmax, ... | row by row over other dimensions, broken over the rows |
| views, joins | rows at another place (`Operation.moved`) |
| matrix products | row by row with a constant. Products that sum over the rows of both sides are a ``Sum`` |
| lookups | a row of a table for each row, an entry of each row, rows that a mask selects |
| losses of torch | their elements row by row, then the mean or the sum |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.losses.certificates import kinds
from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Broken, Constant, Count, Kind, Rows, Scale, Sum
from lightning_ddp_losses.losses.certificates.operation import Operation

MOVES = frozenset(
    "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand select slice split split_with_sizes unbind alias detach "
    "cat stack repeat flip roll movedim diagonal unfold lift_fresh _reshape_alias swapaxes narrow chunk expand_copy".split()
)
# entries of a sum at other places, and sums of them
_LINEAR_ON_SUMS = MOVES | frozenset(["sum", "mean", "trace", "diag_embed", "tril", "triu", "cumsum"])
_SAME = frozenset(["clone", "_to_copy", "positive", "neg", "to", "contiguous"])
_ALONG = frozenset(
    "amax amin max min argmax argmin prod logsumexp var std linalg_vector_norm norm any all median mode _softmax _log_softmax "
    "cumsum cumprod sort topk logcumsumexp cummax cummin var_mean std_mean nansum count_nonzero aminmax kthvalue glu".split()
)
_PRODUCTS = frozenset(["mm", "bmm", "mv", "dot", "vdot", "addmm", "baddbmm", "addmv", "matmul", "linear"])
_FILLS = frozenset(["zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor"])
_LIKE = frozenset(["zeros_like", "ones_like", "full_like", "empty_like"])
_ELEMENTWISE_LOSSES = frozenset(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss".split()
)
_ROW_LOSSES = frozenset(
    ["nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward"]
)
_NEEDS_COUNT = frozenset(["nll_loss_forward", "nll_loss2d_forward"])  # their mean is over the targets that count
_BATCHED = frozenset(
    "convolution avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d native_group_norm "
    "constant_pad_nd".split()
)
_POINTWISE_UNTAGGED = frozenset(["_to_copy", "log_sigmoid_forward", "masked_fill", "fill", "zero", "copy", "isfinite", "isinf"])
_NO_MEAN, _MEAN = 0, 1  # torch's numbers of reductions


def kinds_of(operation: Operation, outputs: list[Tensor]) -> list[Kind]:
    """Return the kind of each result of an operator."""
    found = _kinds(operation, outputs)
    return [_without_second_rows(operation, kind, each) for kind, each in zip(found, outputs, strict=True)]


def _kinds(op: Operation, outputs: list[Tensor]) -> list[Kind]:
    broken = kinds.broken_of(op.kinds)
    if torch.Tag.nondeterministic_seeded in op.function.tags:
        random = op.broken("draws random numbers, other ones on each rank")
        broken = random if broken is None else Broken((*random.reasons, *broken.reasons))
    if broken is not None:
        return [broken] * len(outputs)
    name = op.base_name
    if name in _FILLS or name == "arange":
        return [_created(op, each) for each in outputs]
    if all(isinstance(kind, Constant) for kind in op.kinds):
        return [_constant(op, each) for each in outputs]
    if any(isinstance(kind, Rows) for kind in op.kinds):
        if name in MOVES:
            return op.moved(outputs)
        return [_of_rows(op, each) for each in outputs]
    return [_of_sums(op, each) for each in outputs]


def _without_second_rows(op: Operation, kind: Kind, output: Tensor) -> Kind:
    """Refuse a result with a second dimension that is as long as the batch: its size would scale what sums over it."""
    if isinstance(kind, (Constant, Broken)):
        return kind
    own = kind.dim if isinstance(kind, Rows) else None
    others = [size for dim, size in enumerate(output.shape) if dim != own]
    if any(map(op.is_as_long_as_rows, others)):
        return op.broken("rows against rows: a second dimension as long as the batch")
    return kind


# ---------------------------------------------------------------------- no rows among the operands


def _constant(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of constants. Repeated for each row it is rows that are all equal."""
    if op.base_name in ("expand", "repeat", "expand_copy"):
        return _repeated(op, output)
    return CONSTANT


def _created(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a new tensor. A dimension as long as the batch is one of rows."""
    if op.base_name != "arange":
        return _repeated(op, output)
    if not op.is_as_long_as_rows(output.numel()):
        return CONSTANT
    starts_at_0 = not op.given.get("start")
    if output.numel() == op.rows and starts_at_0 and op.given.get("step", 1) == 1:
        return Rows(0, is_position=True, is_integral=True)
    return op.broken("numbers the rows of one rank")


def _repeated(op: Operation, output: Tensor) -> Kind:
    long = [dim for dim, size in enumerate(output.shape) if op.is_as_long_as_rows(size)]
    if not long:
        return CONSTANT
    if len(long) > 1:
        return op.broken("rows against rows: two dimensions as long as the batch")
    return Rows(long[0], 1, output.shape[long[0]] // op.rows, is_same=True, is_integral=not output.is_floating_point())


def _of_sums(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of sums over rows, counts and constants: linear operators only."""
    name = op.base_name
    found = op.kinds
    if name in _SAME:
        to_integer = not output.is_floating_point() and any(not _is_integral(kind) for kind in found)
        return op.broken("rounds a sum over the rows of one rank") if to_integer else found[0]
    if name in ("mul", "multiply"):
        return kinds.product(found[0], found[1] if len(found) > 1 else CONSTANT, op.blame)
    if name in ("div", "true_divide", "divide") and op.given.get("rounding_mode") is None:
        return kinds.quotient(op.kind("self") or CONSTANT, op.kind("other") or CONSTANT, op.blame)
    if name == "reciprocal":
        return kinds.inverse(found[0], op.blame)
    if name in ("add", "sub", "rsub", "subtract"):
        return kinds.added(found if len(found) > 1 else [*found, CONSTANT], op.blame)
    if name in ("cat", "stack") or name in _LINEAR_ON_SUMS:
        return kinds.added(found, op.blame)
    if name in _PRODUCTS and len(found) == 2:
        return kinds.product(*found, op.blame)
    if name in ("sqrt", "pow") and isinstance(found[0], Count):
        return _power_of_count(op, found[0])
    if name in _LIKE:
        return CONSTANT
    if _keeps_counts(op, found[0]):
        return found[0]
    to_blame = kinds.merged(*(kind.blame() for kind in found if isinstance(kind, Sum)))
    return Broken((op.blame("not a linear function, of a sum or mean over the rows of one rank"), *to_blame))


def _is_integral(kind: Kind) -> bool:
    return isinstance(kind, (Sum, Rows)) and kind.is_integral


def _power_of_count(op: Operation, count: Count) -> Kind:
    exponent = 0.5 if op.base_name == "sqrt" else op.given.get("exponent")
    if not isinstance(exponent, (int, float)):
        return op.broken("a number that is not proportional to the number of rows")
    return Count(Scale(count.scale.degree * exponent, count.scale.counts))


def _keeps_counts(op: Operation, kind: Kind) -> bool:
    """Return whether an operator leaves a count as it is: a lower limit of 1 or less changes a count of 0 only, whose sum is 0."""
    is_count = isinstance(kind, Sum) and kind.is_integral and kind.scale.is_one and not kind.has_grad
    lower, upper = op.given.get("min"), op.given.get("max")
    is_limit = op.base_name in ("clamp", "clamp_min") and isinstance(lower, (int, float)) and upper is None
    return is_count and is_limit and lower <= 1


# ---------------------------------------------------------------------- rows


def _of_rows(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of an operator with rows among its operands."""
    name = op.base_name
    if name in _LIKE:
        ((_, kind),) = op.of_rows
        is_integral = not output.is_floating_point()
        return replace(kind, scale=Scale(), is_same=True, is_integral=is_integral, is_position=False, is_data=True)
    if name in ("sum", "mean"):
        return _reduced(op, output)
    if name in _ALONG:
        return _along(op, output)
    if name in _PRODUCTS:
        return _matrix_product(op, output)
    if name in _LOOKUPS:
        return _LOOKUPS[name](op, output)
    if name in _ELEMENTWISE_LOSSES or name in _ROW_LOSSES:
        return _loss_of_torch(op)
    if name in _BATCHED or name == "native_layer_norm" or name == "native_batch_norm":
        return _batched(op)
    if torch.Tag.pointwise in op.function.tags or name in _POINTWISE_UNTAGGED:
        return pointwise(op, output.ndim, is_integral=not output.is_floating_point())
    if name in ("_cdist_forward", "_euclidean_dist", "_pdist_forward"):
        return op.broken("rows against rows")
    return op.broken("an operator without a rule")


def pointwise(op: Operation, ndim: int, *, is_integral: bool) -> Kind:
    """Return the kind of an entry by entry function of rows and other operands.

    Args:
        op: The operator.
        ndim: Dimensions of the result.
        is_integral: The result is of integers.
    """
    first, kind = op.of_rows[0]
    from_right = first.ndim - kind.dim
    factor = Scale()
    for tensor, other in op.tensors:
        if isinstance(other, Rows):
            if not kind.is_aligned(other) or tensor.ndim - other.dim != from_right:
                return op.broken("rows against rows")
            if other.is_position:
                return op.broken("uses the position of a row in the batch")
        elif isinstance(other, Constant):
            if tensor.ndim >= from_right and tensor.shape[-from_right] != 1:
                return op.broken("a constant for each row of the batch")
        else:
            found = _factor(op, tensor, other)
            if isinstance(found, Broken):
                return found
            factor = factor.times(found)
    scale = _scale_of_rows(op)
    if scale is None:
        return op.broken("rows that are scaled by a number of rows")
    keeps_integers = op.base_name in ("mul", "clone", "_to_copy", "neg") and all(map(_is_integral, op.kinds))
    return Rows(
        ndim - from_right,
        kind.outer,
        kind.inner,
        scale.times(factor),
        kind.selected,
        is_same=all(isinstance(each, Constant) or (isinstance(each, Rows) and each.is_same) for each in op.kinds),
        is_integral=is_integral or keeps_integers,
        is_data=all(isinstance(each, Constant) or (isinstance(each, Rows) and each.is_data) for each in op.kinds),
    )


def _factor(op: Operation, tensor: Tensor, kind: Kind) -> Scale | Broken:
    """Return the factor that a sum or a count gives to rows that it multiplies or divides."""
    is_divisor = op.base_name == "div" and op.given.get("other") is tensor and op.given.get("rounding_mode") is None
    if isinstance(kind, Sum):
        kind = kinds.as_count(kind, op.blame)
    if isinstance(kind, Count) and is_divisor:
        return kind.scale.inverse()
    if isinstance(kind, Count) and op.base_name == "mul":
        return kind.scale
    return op.broken("rows meet a sum, mean or number of the rows of one rank")


def _scale_of_rows(op: Operation) -> Scale | None:
    """Return the factor that rows have after a pointwise operator. None if it is not linear and they have one before it."""
    scales = [kind.scale for _, kind in op.of_rows]
    if all(scale.is_one for scale in scales):
        return scales[0]
    name = op.base_name
    if name in _SAME:
        return scales[0]
    if name == "mul":
        found = Scale()
        for scale in scales:
            found = found.times(scale)
        return found
    if name == "div" and isinstance(op.kind("self"), Rows):
        other = op.kind("other")
        is_plain = not isinstance(other, Rows) or other.scale.is_one
        return scales[0] if is_plain and op.given.get("rounding_mode") is None else None
    is_sum = name in ("add", "sub") and len(scales) == len(op.tensors) == 2
    return scales[0] if is_sum and scales[0] == scales[1] else None


def _reduced(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a sum or mean."""
    ((tensor, kind),) = op.of_rows
    over = op.dims("dim", tensor.ndim)
    if kind.dim not in over:
        return replace(kind, dim=_dim_after(tensor, output, kind.dim, over), is_integral=False)
    if kind.is_position:
        return op.broken("uses the position of a row in the batch")
    scale = kind.scale
    if op.base_name == "mean":
        counted: tuple[kinds.Reason, ...] = ()
        if kind.selected is not None:
            counted = (op.blame("the divisor is the number of selected rows of one rank"),)
        scale = scale.times(Scale(-1, counted))
    if kind.is_same and kind.selected is None:
        factor = scale.times(Scale(1))
        return CONSTANT if factor.is_one else Count(factor)
    return Sum(
        scale,
        op.blame(""),
        is_integral=kind.is_integral and op.base_name == "sum",
        is_data=kind.is_data,
        has_grad=output.requires_grad or _has_grad(op),
    )


def _has_grad(op: Operation) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in op.tensors)


def _dim_after(tensor: Tensor, output: Tensor, dim: int, over: list[int]) -> int:
    """Return the place of a dimension after others were reduced."""
    if output.ndim == tensor.ndim:
        return dim
    return dim - sum(each < dim for each in over)


def _along(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a function along dimensions that is not linear."""
    if len(op.of_rows) != 1 or len(op.tensors) != 1:
        return op.broken("an operator without a rule")
    ((tensor, kind),) = op.of_rows
    if kind.is_position or not kind.scale.is_one:
        return op.broken("a function of the number of rows")
    over = op.dims("dim", tensor.ndim)
    if kind.dim in over:
        return op.broken(f"{op.base_name.strip('_')} over the rows of one rank")
    is_integral = not output.is_floating_point()
    return replace(kind, dim=_dim_after(tensor, output, kind.dim, over), is_integral=is_integral)


def _matrix_product(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a product of two matrices, with an addend or without."""
    factors = op.tensors[-2:]
    addend = op.tensors[0] if len(op.tensors) == 3 else None
    name = op.base_name
    if name == "linear":
        return op.broken("an operator without a rule")
    found = _plain_product(op, *factors, output)
    if addend is None or isinstance(found, Broken):
        return found
    tensor, kind = addend
    if not isinstance(kind, Constant):
        return op.broken("rows are added to a product of rows")
    if isinstance(found, Sum):
        return kinds.added([found, CONSTANT], op.blame)
    assert isinstance(found, Rows)
    from_right = output.ndim - found.dim
    if tensor.ndim >= from_right and tensor.shape[-from_right] != 1 or not found.scale.is_one:
        return op.broken("a constant for each row of the batch")
    return found


def _plain_product(op: Operation, left: tuple[Tensor, Kind], right: tuple[Tensor, Kind], output: Tensor) -> Kind:
    (a, kind_a), (b, kind_b) = left, right
    contracted_a = a.ndim - 1
    contracted_b = max(b.ndim - 2, 0)
    sides = [kind for kind in (kind_a, kind_b) if isinstance(kind, Rows)]
    if any(side.is_position for side in sides):
        return op.broken("uses the position of a row in the batch")
    is_data = all(side.is_data for side in sides)
    if len(sides) == 2:
        assert isinstance(kind_a, Rows)
        assert isinstance(kind_b, Rows)
        scale = kind_a.scale.times(kind_b.scale)
        if not kind_a.is_aligned(kind_b):
            return op.broken("rows against rows")
        if (kind_a.dim, kind_b.dim) == (contracted_a, contracted_b):
            return Sum(scale, op.blame(""), is_data=is_data, has_grad=_has_grad(op))
        is_batch = a.ndim == b.ndim == 3 and kind_a.dim == kind_b.dim == 0
        return replace(kind_a, scale=scale, is_data=is_data, is_integral=False) if is_batch else op.broken("rows against rows")
    (rows,) = sides
    if not isinstance(kind_a if rows is kind_b else kind_b, Constant):
        return op.broken("rows meet a sum, mean or number of the rows of one rank")
    dim, contracted, ndim = (rows.dim, contracted_a, a.ndim) if rows is kind_a else (rows.dim, contracted_b, b.ndim)
    if dim == contracted or (ndim == 3 and dim == 0):
        return op.broken("a constant for each row of the batch")
    # rows of the left side stay where they are, columns of the right side are last
    place = dim if rows is kind_a else output.ndim - 1
    return replace(rows, dim=place, is_integral=False, is_same=False, is_data=is_data and not _has_grad(op))


def _loss_of_torch(op: Operation) -> Kind:
    """Return the kind of a loss of torch: its elements, then their mean or sum."""
    if any(not kind.scale.is_one or kind.is_position for _, kind in op.of_rows):
        return op.broken("a function of the number or position of rows")
    if op.base_name in _ROW_LOSSES:
        elements = _batched(op)
    else:
        elements = pointwise(op, max(tensor.ndim for tensor, _ in op.tensors), is_integral=False)
    reduction = op.given["reduction"]
    if isinstance(elements, Broken) or reduction == _NO_MEAN:
        return elements
    assert isinstance(elements, Rows)
    counted = elements.selected is not None or op.base_name in _NEEDS_COUNT
    scale = Scale()
    if reduction == _MEAN:
        reasons = (op.blame("the divisor is the number of targets that count"),) if counted else ()
        scale = Scale(-1, reasons)
    return Sum(scale, op.blame(""), has_grad=_has_grad(op))


def _batched(op: Operation) -> Kind:
    """Return the kind of a layer or loss that treats each row of dimension 0 by itself."""
    (first, kind), *others = op.of_rows
    if any(not kind.is_aligned(other) or other.dim != 0 or other.is_position for _, other in others):
        return op.broken("rows against rows")
    if kind.dim != 0 or kind.is_position or not kind.scale.is_one:
        return op.broken("an operator without a rule for rows in this dimension")
    if any(not isinstance(each, (Rows, Constant)) for each in op.kinds) or op.tensors[0][0] is not first:
        return op.broken("rows meet a sum, mean or number of the rows of one rank")
    if op.base_name == "native_batch_norm" and op.given.get("training"):
        return op.broken("normalises by the mean and variance of the rows of one rank")
    if op.base_name == "native_layer_norm" and len(op.given["normalized_shape"]) >= first.ndim:
        return op.broken("normalises over the rows of one rank")
    if op.base_name == "constant_pad_nd" and len(op.given["pad"]) >= 2 * first.ndim:
        return op.broken("pads the rows of one rank")
    return replace(kind, is_same=False, is_integral=False, is_data=kind.is_data and not _has_grad(op))


# ---------------------------------------------------------------------- lookups


def _index(op: Operation, output: Tensor) -> Kind:
    """Return the kind of ``values[...]`` with tensors between the brackets."""
    values, kind = op.tensors[0]
    places = [(place, each) for place, each in enumerate(op.given["indices"]) if each is not None]
    by_id = {id(tensor): each for tensor, each in op.tensors}
    if len(places) == 1:
        place, index = places[0]
        chosen = by_id[id(index)]
        if isinstance(kind, Rows) and isinstance(chosen, Rows) and index.dtype == torch.bool:
            return _selected(op, kind, chosen, place, index)
        if isinstance(kind, Constant) and isinstance(chosen, Rows) and not chosen.is_position and chosen.scale.is_one:
            return _looked_up(op, chosen, place + chosen.dim, output)
        is_plain = index.dtype != torch.bool and index.ndim == 1
        if isinstance(kind, Rows) and isinstance(chosen, Constant) and place != kind.dim and is_plain:
            return replace(kind, is_same=False)
        return op.broken("takes rows by number")
    # one entry of each row: values[arange(n), labels]
    numbered = [place for place, each in places if getattr(by_id[id(each)], "is_position", False)]
    is_plain = isinstance(kind, Rows) and kind.scale.is_one and (kind.outer, kind.inner, kind.selected) == (1, 1, None)
    if is_plain and isinstance(kind, Rows) and numbered == [kind.dim] and not kind.is_position:
        others = [by_id[id(each)] for place, each in places if place != kind.dim]
        vectors = all(each.ndim == 1 for _, each in places)
        aligned = all(isinstance(each, Rows) and each.is_aligned(kind) and each.dim == 0 for each in others)
        ordered = [place for place, _ in places]
        if vectors and aligned and ordered == list(range(ordered[0], ordered[0] + len(ordered))):
            return replace(kind, dim=ordered[0], is_same=False, is_data=_all_data(op))
    return op.broken("takes rows by number")


def _all_data(op: Operation) -> bool:
    are_data = all(isinstance(each, Constant) or (isinstance(each, Rows) and each.is_data) for each in op.kinds)
    return are_data and not _has_grad(op)


def _selected(op: Operation, kind: Rows, mask: Rows, place: int, index: Tensor) -> Kind:
    """Return the kind of the rows that a mask selects."""
    is_along = place + mask.dim == kind.dim and kind.is_aligned(mask)
    if not is_along or kind.selected is not None or kind.is_position:
        return op.broken("selects rows by a mask that is not one of these rows")
    return replace(kind, dim=place, outer=1, inner=1, selected=id(index), is_same=False)


def _looked_up(op: Operation, chosen: Rows, dim: int, output: Tensor) -> Kind:
    is_integral = not output.is_floating_point()
    return replace(chosen, dim=dim, is_same=False, is_integral=is_integral, is_data=_all_data(op))


def _embedding(op: Operation, output: Tensor) -> Kind:
    """Return the kind of rows of a table."""
    table, chosen = op.kinds
    is_lookup = isinstance(table, Constant) and isinstance(chosen, Rows)
    if not is_lookup or not isinstance(chosen, Rows) or chosen.is_position or not chosen.scale.is_one:
        return op.broken("an operator without a rule")
    return _looked_up(op, chosen, chosen.dim, output)


def _index_select(op: Operation, output: Tensor) -> Kind:
    """Return the kind of the entries along one dimension that numbers select."""
    values, chosen = op.kinds[0], op.kinds[1]
    if isinstance(values, Rows) and isinstance(chosen, Constant):
        dim = op.given["dim"] % op.tensors[0][0].ndim
        return replace(values, is_same=False) if dim != values.dim else op.broken("takes rows by number")
    if isinstance(values, Constant) and isinstance(chosen, Rows) and not chosen.is_position and chosen.scale.is_one:
        return _looked_up(op, chosen, op.given["dim"] % output.ndim, output)
    return op.broken("takes rows by number")


def _gather(op: Operation, output: Tensor) -> Kind:
    """Return the kind of entries of each row that are taken, or written, at numbers that the row has."""
    (first, kind), *others = op.tensors
    dim = op.given["dim"] % first.ndim
    fits = isinstance(kind, Rows) and kind.dim != dim and kind.scale.is_one and not kind.is_position
    for tensor, other in others:
        aligned = isinstance(other, Rows) and isinstance(kind, Rows) and kind.is_aligned(other)
        fits = fits and aligned and isinstance(other, Rows) and other.dim == kind.dim and other.scale.is_one
        fits = fits and not getattr(other, "is_position", False) and tensor.shape[other.dim] == first.shape[other.dim]
    if not fits or not isinstance(kind, Rows):
        return op.broken("takes entries across rows")
    is_integral = kind.is_integral and all(map(_is_integral, op.kinds))
    return replace(kind, is_same=False, is_integral=is_integral, is_data=_all_data(op))


def _masked_select(op: Operation, output: Tensor) -> Kind:
    """Return the kind of the entries that a mask selects, in one dimension."""
    (values, kind), (mask, chosen) = op.tensors
    if not isinstance(kind, Rows) or not isinstance(chosen, Rows) or values.shape != mask.shape:
        return op.broken("an operator without a rule")
    if kind.dim != chosen.dim:
        return op.broken("rows against rows")
    return _selected(op, kind, replace(chosen, dim=kind.dim), 0, mask)


_LOOKUPS: dict[str, Callable[[Operation, Tensor], Kind]] = {
    "index": _index,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _gather,
    "scatter_add": _gather,
    "masked_select": _masked_select,
}
