"""What a value of a loss is as a function of the rows: the kinds that the trace of a loss computes with.

Rows are numbered i = 1 ... n. ``f`` and ``g`` denote any function of one row, the same for each row and for each n.

| kind | value |
|---|---|
| ``Constant`` | depends on no row and not on n |
| ``Count`` | a constant times n ** degree |
| ``Rows`` | row i depends on row i only: n ** degree * f(row i) |
| ``Sum`` | n ** degree * (sum of f(row i) over i), plus a constant if degree is -1 |
| ``Broken`` | any other value |

A ``Sum`` of degree -1 is a mean over rows. It is the only kind whose mean over ranks with equally many rows is its value on all rows, for
each number of ranks, and so is its gradient. A divisor that is a sum over rows without a gradient (the number of targets) counts as n,
and is noted: equal on all ranks, it divides as n does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_ddp_losses.losses.certificates.certificate import Reason
from lightning_ddp_losses.losses.certificates.lines import Blame


@dataclass(frozen=True)
class Scale:
    """Factor of a value.

    Attributes:
        degree: Power of the number of rows.
        counts: Sums over the rows of one rank that are used as a number of rows.
    """

    degree: float = 0
    counts: tuple[Reason, ...] = ()

    @property
    def is_one(self) -> bool:
        """Whether the factor is 1."""
        return self.degree == 0 and not self.counts

    def times(self, other: Scale) -> Scale:
        """Return the factor of a product."""
        return Scale(self.degree + other.degree, merged(self.counts, other.counts))

    def inverse(self) -> Scale:
        """Return the factor of the reciprocal."""
        return Scale(-self.degree, self.counts)


@dataclass(frozen=True)
class Constant:
    """A value that depends on no row and not on their number."""


@dataclass(frozen=True)
class Count:
    """A constant times a power of the number of rows."""

    scale: Scale


@dataclass(frozen=True)
class Rows:
    """A tensor whose row i depends on row i only.

    Attributes:
        dim: Dimension of the rows, of ``outer * n * inner`` entries: row i is at ``(a * n + i) * inner + b`` for each a and b.
        outer: Number of values of a.
        inner: Number of values of b.
        scale: Factor of all rows.
        selected: Mask that has selected some of the rows, by identity. None if all rows are present.
        is_same: All rows are equal, and depend on none.
        is_position: Row i is the number i.
        is_integral: The values are integers.
        is_data: They follow from inputs without a gradient only.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    scale: Scale = Scale()
    selected: int | None = None
    is_same: bool = False
    is_position: bool = False
    is_integral: bool = False
    is_data: bool = True

    def is_aligned(self, other: Rows) -> bool:
        """Return whether both hold the same rows in the same order. Their dimensions are compared elsewhere."""
        return (self.outer, self.inner, self.selected) == (other.outer, other.inner, other.selected)


@dataclass(frozen=True)
class Sum:
    """A sum over rows with a factor.

    Attributes:
        scale: Its factor. Degree -1 is a mean.
        removed: The operator that removed the rows, or the last one that scaled them.
        has_constant: A constant was added.
        is_integral: The values are integers.
        is_data: It follows from inputs without a gradient only.
        has_grad: It has a gradient.
    """

    scale: Scale
    removed: Reason
    has_constant: bool = False
    is_integral: bool = False
    is_data: bool = False
    has_grad: bool = True

    def blame(self) -> tuple[Reason, ...]:
        """Return why this is not a mean over rows. Empty if it is one."""
        if self.scale.degree == -1:
            return ()
        why = "a sum over rows that no number of elements divides: the mean over W ranks is 1/W of it"
        if self.scale.degree != 0:
            why = "the factor of this sum over rows is not one over the number of its elements"
        return (replace(self.removed, why=why),)


@dataclass(frozen=True)
class Broken:
    """A value that no other kind describes.

    Attributes:
        reasons: Operators that are the cause.
    """

    reasons: tuple[Reason, ...] = field(default=())


Kind = Constant | Count | Rows | Sum | Broken
CONSTANT = Constant()


def merged(*reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Return all reasons once, in order."""
    return tuple(dict.fromkeys(reason for each in reasons for reason in each))


def broken_of(kinds: Sequence[Kind]) -> Broken | None:
    """Return what is broken among operands. None if nothing is."""
    found = [kind for kind in kinds if isinstance(kind, Broken)]
    if not found:
        return None
    return Broken(merged(*(kind.reasons for kind in found)))


# ---------------------------------------------------------------------- values without rows


def product(left: Kind, right: Kind, blame: Blame) -> Kind:
    """Return the kind of a product of two values without rows."""
    if isinstance(left, Constant) and isinstance(right, Constant):
        return CONSTANT
    if not isinstance(left, Sum) and not isinstance(right, Sum):
        scales = [kind.scale for kind in (left, right) if isinstance(kind, Count)]
        return Count(scales[0].times(scales[-1]) if len(scales) > 1 else scales[0])
    if not isinstance(left, Sum):
        left, right = right, left
    assert isinstance(left, Sum)
    if isinstance(right, Sum):
        return _product_of_sums(left, right, blame)
    if isinstance(right, Count):
        return _scaled(left, right.scale, blame)
    return replace(left, is_integral=False)


def _product_of_sums(left: Sum, right: Sum, blame: Blame) -> Kind:
    """Return the kind of a product of two sums: one of them may be a count."""
    for factor, other in ((right, left), (left, right)):
        count = as_count(factor, blame)
        if isinstance(count, Count):
            return _scaled(other, count.scale, blame)
    return Broken((*left.blame(), *right.blame(), blame("a product of two sums over the rows of one rank")))


def _scaled(total: Sum, factor: Scale, blame: Blame) -> Kind:
    """Return a sum times a factor."""
    if total.has_constant and factor.degree != 0:
        return Broken((blame("a constant that was added to a mean is scaled by a number of rows"),))
    removed = total.removed
    if factor.degree != 0:
        removed = blame("scaled by a number of rows")
    return replace(total, scale=total.scale.times(factor), removed=removed, is_integral=False)


def inverse(kind: Kind, blame: Blame) -> Kind:
    """Return the kind of the reciprocal of a value without rows."""
    if isinstance(kind, Sum):
        kind = as_count(kind, blame)
    if isinstance(kind, Count):
        return Count(kind.scale.inverse())
    return kind


def quotient(left: Kind, right: Kind, blame: Blame) -> Kind:
    """Return the kind of a quotient of two values without rows."""
    divisor = inverse(right, blame)
    if isinstance(divisor, Broken):
        return divisor
    return product(left, divisor, blame)


def as_count(total: Sum, blame: Blame) -> Kind:
    """Return a sum over rows as a number of rows, if it may be one."""
    if total.has_grad or not (total.is_integral or total.is_data):
        return Broken((*total.blame(), blame("a sum over the rows of one rank is a factor or a divisor")))
    if total.has_constant:
        return Broken((blame("a factor or divisor that is not the number of elements: a constant was added"),))
    counted = blame("the divisor is a sum over the rows of one rank, such as a count of targets")
    return Count(Scale(total.scale.degree + 1, merged(total.scale.counts, (counted,))))


def added(terms: Sequence[Kind], blame: Blame) -> Kind:
    """Return the kind of a sum, difference or join of values without rows of their own."""
    kinds = list(dict.fromkeys(terms))
    if len(kinds) == 1:
        return kinds[0]
    totals = [kind for kind in kinds if isinstance(kind, Sum)]
    counts = [kind for kind in kinds if isinstance(kind, Count)]
    if counts and not totals:
        return Broken((blame("a number that is not proportional to the number of rows"),))
    to_blame = merged(*(total.blame() for total in totals))
    if counts:
        return Broken((*to_blame, blame("a number of rows is added to a sum over rows")))
    has_constant = len(totals) < len(kinds)
    if has_constant and to_blame:
        return Broken((*to_blame, blame("a constant is added to a sum over rows that is not a mean")))
    if len({total.scale.degree for total in totals}) > 1:
        return Broken(to_blame)
    return _joined(totals, has_constant)


def _joined(totals: list[Sum], has_constant: bool) -> Sum:
    """Return a sum of sums that have the same factor."""
    first = totals[0]
    scale = Scale(first.scale.degree, merged(*(total.scale.counts for total in totals)))
    return Sum(
        scale,
        first.removed,
        has_constant=has_constant or any(total.has_constant for total in totals),
        is_integral=not has_constant and all(total.is_integral for total in totals),
        is_data=all(total.is_data for total in totals),
        has_grad=any(total.has_grad for total in totals),
    )
