"""Rules for operators on sums over rows, counts and constants: linear ones keep a mean over rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_ddp_losses.losses.certificates import kinds
from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Broken, Count, Kind, Rows, Scale, Sum
from lightning_ddp_losses.losses.certificates.operation import Operation, words

MOVES = words(
    "view _unsafe_view reshape permute transpose t unsqueeze squeeze expand select slice split split_with_sizes unbind alias detach "
    "cat stack repeat flip roll movedim diagonal unfold lift_fresh _reshape_alias swapaxes narrow chunk expand_copy"
)
"""Operators whose results hold the same entries at other places."""
SAME = words("clone _to_copy positive neg to contiguous")
"""Operators that keep each entry, up to its sign and dtype."""
PRODUCTS = words("mm bmm mv dot vdot addmm baddbmm addmv matmul")
LIKE = words("zeros_like ones_like full_like empty_like")
_LINEAR = MOVES | words("sum mean trace diag_embed tril triu cumsum")


def kind_of_sums(op: Operation, output: Tensor) -> Kind:
    """Return the kind of a result of sums over rows, counts and constants: linear operators only."""
    name = op.base_name
    rule = _RULES.get(name)
    if rule is not None:
        return rule(op, output)
    if name in _LINEAR:
        return kinds.added(op.kinds, op.blame)
    if name in LIKE:
        return CONSTANT
    first = op.kinds[0]
    if _keeps_counts(op, first):
        return first
    to_blame = kinds.merged(*(kind.blame() for kind in op.kinds if isinstance(kind, Sum)))
    return Broken((op.blame("not a linear function, of a sum or mean over the rows of one rank"), *to_blame))


def _copied(op: Operation, output: Tensor) -> Kind:
    to_integer = not output.is_floating_point() and any(not is_integral(kind) for kind in op.kinds)
    return op.broken("rounds a sum over the rows of one rank") if to_integer else op.kinds[0]


def _product(op: Operation, output: Tensor) -> Kind:
    other = op.kinds[1] if len(op.kinds) > 1 else CONSTANT
    return kinds.product(op.kinds[0], other, op.blame)


def _quotient(op: Operation, output: Tensor) -> Kind:
    if op.given.get("rounding_mode") is not None:
        return op.broken("rounds a sum over the rows of one rank")
    return kinds.quotient(op.kind("self") or CONSTANT, op.kind("other") or CONSTANT, op.blame)


def _inverse(op: Operation, output: Tensor) -> Kind:
    return kinds.inverse(op.kinds[0], op.blame)


def _sum(op: Operation, output: Tensor) -> Kind:
    terms = op.kinds if len(op.kinds) > 1 else [*op.kinds, CONSTANT]
    return kinds.added(terms, op.blame)


def _matrix_product(op: Operation, output: Tensor) -> Kind:
    if len(op.kinds) != 2:
        return op.broken("an operator without a rule")
    left, right = op.kinds
    return kinds.product(left, right, op.blame)


def _power(op: Operation, output: Tensor) -> Kind:
    exponent = 0.5 if op.base_name == "sqrt" else op.given.get("exponent")
    count = op.kinds[0]
    if not isinstance(count, Count) or not isinstance(exponent, (int, float)):
        to_blame = count.blame() if isinstance(count, Sum) else ()
        return Broken((op.blame("not a linear function, of a sum or mean over the rows of one rank"), *to_blame))
    return Count(Scale(count.scale.degree * exponent, count.scale.counts))


_RULES: dict[str, Callable[[Operation, Tensor], Kind]] = {
    **dict.fromkeys(SAME, _copied),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("div", "true_divide", "divide"), _quotient),
    "reciprocal": _inverse,
    **dict.fromkeys(("add", "sub", "rsub", "subtract"), _sum),
    **dict.fromkeys(PRODUCTS, _matrix_product),
    **dict.fromkeys(("sqrt", "pow"), _power),
}


def is_integral(kind: Kind) -> bool:
    """Return whether the values of a kind are known to be integers."""
    return isinstance(kind, (Sum, Rows)) and kind.is_integral


def _keeps_counts(op: Operation, kind: Kind) -> bool:
    """Return whether an operator preserves a count: a lower limit of 1 or less changes only a count of 0, whose sum is 0."""
    is_count = isinstance(kind, Sum) and kind.is_integral and kind.scale.is_one and not kind.has_grad
    lower, upper = op.given.get("min"), op.given.get("max")
    is_limit = op.base_name in ("clamp", "clamp_min") and isinstance(lower, (int, float)) and upper is None
    return is_count and is_limit and float(lower) <= 1  # type: ignore[arg-type]  # a number, if is_limit
