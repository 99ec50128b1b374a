"""Rules for operators on rows: those that keep the rows apart, and those that sum over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.losses.certificates import kinds
from lightning_ddp_losses.losses.certificates.certificate import Reason
from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Broken, Constant, Count, Kind, Rows, Scale, Sum
from lightning_ddp_losses.losses.certificates.lookups import LOOKUPS
from lightning_ddp_losses.losses.certificates.operation import Operation, words
from lightning_ddp_losses.losses.certificates.sum_rules import LIKE, PRODUCTS, SAME, is_integral

_ALONG = words(
    "amax amin max min argmax argmin prod logsumexp var std linalg_vector_norm norm any all median mode _softmax _log_softmax "
    "cumsum cumprod sort topk logcumsumexp cummax cummin var_mean std_mean nansum count_nonzero aminmax kthvalue glu"
)
_ELEMENTWISE_LOSSES = words(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"
)
_ROW_LOSSES = words("nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward")
_NEEDS_COUNT = words("nll_loss_forward nll_loss2d_forward")  # their mean is over the targets that count
_BATCHED = words(
    "convolution avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d "
    "_adaptive_avg_pool3d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d native_group_norm "
    "native_layer_norm native_batch_norm constant_pad_nd"
)
_POINTWISE_UNTAGGED = words("_to_copy log_sigmoid_forward masked_fill fill zero copy isfinite isinf")
_NO_MEAN, _MEAN = 0, 1  # torch's numbers of reductions


def kind_of_rows(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of an operator with rows among its operands."""
    name = op.base_name
    rule = _RULES.get(name) or LOOKUPS.get(name)
    if rule is not None:
        return rule(op, output)
    if torch.Tag.pointwise in op.function.tags or name in _POINTWISE_UNTAGGED:
        return pointwise(op, output.ndim, is_integer=not output.is_floating_point())
    return op.broken("an operator without a rule")


def _like(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a new tensor with the shape of rows."""
    ((_, kind),) = op.of_rows
    is_integer = not output.is_floating_point()
    return replace(kind, scale=Scale(), is_same=True, is_integral=is_integer, is_position=False, is_data=True)


def _pairs(op: Operation, output: Tensor) -> Kind:
    """Return the kind of distances."""
    return op.broken("rows against rows")


def pointwise(op: Operation, ndim: int, *, is_integer: bool) -> Kind:
    """Return the kind of an entry by entry function of rows and other operands.

    Args:
        op: The operator.
        ndim: Dimensions of the result.
        is_integer: The result is of integers.
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
    keeps_integers = op.base_name in ("mul", "clone", "_to_copy", "neg") and all(map(is_integral, op.kinds))
    return Rows(
        ndim - from_right,
        kind.outer,
        kind.inner,
        scale.times(factor),
        kind.selected,
        is_same=all(isinstance(each, Constant) or (isinstance(each, Rows) and each.is_same) for each in op.kinds),
        is_integral=is_integer or keeps_integers,
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
    if name in SAME:
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
        counted: tuple[Reason, ...] = ()
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
        has_grad=op.has_grad,
    )


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
    is_integer = not output.is_floating_point()
    return replace(kind, dim=_dim_after(tensor, output, kind.dim, over), is_integral=is_integer)


def _matrix_product(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a product of two matrices, with an addend or without."""
    left, right = op.tensors[-2:]
    addend = op.tensors[0] if len(op.tensors) == 3 else None
    found = _plain_product(op, left, right, output)
    if addend is None or isinstance(found, Broken):
        return found
    tensor, kind = addend
    if not isinstance(kind, Constant):
        return op.broken("rows are added to a product of rows")
    if isinstance(found, Sum):
        return kinds.added([found, CONSTANT], op.blame)
    assert isinstance(found, Rows)
    from_right = output.ndim - found.dim
    if not found.scale.is_one or (tensor.ndim >= from_right and tensor.shape[-from_right] != 1):
        return op.broken("a constant for each row of the batch")
    return found


def _plain_product(op: Operation, left: tuple[Tensor, Kind], right: tuple[Tensor, Kind], output: Tensor) -> Kind:
    """Return the kind of a product of two matrices."""
    (a, kind_a), (b, kind_b) = left, right
    sides = [kind for kind in (kind_a, kind_b) if isinstance(kind, Rows)]
    if any(side.is_position for side in sides):
        return op.broken("uses the position of a row in the batch")
    if isinstance(kind_a, Rows) and isinstance(kind_b, Rows):
        return _product_of_rows(op, a, kind_a, b, kind_b)
    is_left = isinstance(kind_a, Rows)
    (rows,) = sides
    if not isinstance(kind_b if is_left else kind_a, Constant):
        return op.broken("rows meet a sum, mean or number of the rows of one rank")
    contracted = a.ndim - 1 if is_left else max(b.ndim - 2, 0)
    ndim = a.ndim if is_left else b.ndim
    if rows.dim == contracted or (ndim == 3 and rows.dim == 0):
        return op.broken("a constant for each row of the batch")
    # rows of the left side stay where they are, columns of the right side are last
    place = rows.dim if is_left else output.ndim - 1
    return replace(rows, dim=place, is_integral=False, is_same=False, is_data=rows.is_data and not op.has_grad)


def _product_of_rows(op: Operation, a: Tensor, kind_a: Rows, b: Tensor, kind_b: Rows) -> Kind:
    """Return the kind of a product of two matrices of rows: summed over the rows, or one for each row."""
    scale = kind_a.scale.times(kind_b.scale)
    is_data = kind_a.is_data and kind_b.is_data
    is_aligned = kind_a.is_aligned(kind_b)
    if is_aligned and (kind_a.dim, kind_b.dim) == (a.ndim - 1, max(b.ndim - 2, 0)):
        return Sum(scale, op.blame(""), is_data=is_data, has_grad=op.has_grad)
    if is_aligned and a.ndim == b.ndim == 3 and kind_a.dim == kind_b.dim == 0:
        return replace(kind_a, scale=scale, is_data=is_data, is_integral=False)
    return op.broken("rows against rows")


def _loss_of_torch(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a loss of torch: its elements, then their mean or sum."""
    if any(not kind.scale.is_one or kind.is_position for _, kind in op.of_rows):
        return op.broken("a function of the number or position of rows")
    if op.base_name in _ROW_LOSSES:
        elements = _batched(op)
    else:
        elements = pointwise(op, max(tensor.ndim for tensor, _ in op.tensors), is_integer=False)
    reduction = op.given["reduction"]
    if isinstance(elements, Broken) or reduction == _NO_MEAN:
        return elements
    assert isinstance(elements, Rows)
    counted = elements.selected is not None or op.base_name in _NEEDS_COUNT
    scale = Scale()
    if reduction == _MEAN:
        reasons = (op.blame("the divisor is the number of targets that count"),) if counted else ()
        scale = Scale(-1, reasons)
    return Sum(scale, op.blame(""), has_grad=op.has_grad)


def _batched(op: Operation, output: Tensor | None = None) -> Kind:
    """Return the kind of a layer or loss that processes each row of dimension 0 separately."""
    (first, kind), *others = op.of_rows
    if any(not kind.is_aligned(other) or other.dim != 0 or other.is_position for _, other in others):
        return op.broken("rows against rows")
    if kind.dim != 0 or kind.is_position or not kind.scale.is_one:
        return op.broken("an operator without a rule for rows in this dimension")
    if any(not isinstance(each, (Rows, Constant)) for each in op.kinds) or op.tensors[0][0] is not first:
        return op.broken("rows meet a sum, mean or number of the rows of one rank")
    mixing = _mixing(op, first)
    if mixing:
        return op.broken(mixing)
    return replace(kind, is_same=False, is_integral=False, is_data=kind.is_data and not op.has_grad)


def _mixing(op: Operation, first: Tensor) -> str:
    """Return how a layer mixes rows with these options. Empty if it does not."""
    if op.base_name == "native_batch_norm" and op.given.get("training"):
        return "normalises by the mean and variance of the rows of one rank"
    if op.base_name == "native_layer_norm" and len(op.given["normalized_shape"]) >= first.ndim:
        return "normalises over the rows of one rank"
    if op.base_name == "constant_pad_nd" and len(op.given["pad"]) >= 2 * first.ndim:
        return "pads the rows of one rank"
    return ""


_RULES: dict[str, Callable[[Operation, Tensor], Kind]] = {
    **dict.fromkeys(LIKE, _like),
    **dict.fromkeys(("sum", "mean"), _reduced),
    **dict.fromkeys(_ALONG, _along),
    **dict.fromkeys(PRODUCTS, _matrix_product),
    **dict.fromkeys(_ELEMENTWISE_LOSSES | _ROW_LOSSES, _loss_of_torch),
    **dict.fromkeys(_BATCHED, _batched),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist", "_pdist_forward"), _pairs),
}
