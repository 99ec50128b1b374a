"""Python's numbers that depend on the rows: sizes of a batch, and what ``Tensor.item()`` returns. They compute as ``int`` and ``float``.

Each has the kind of its value, so that ``x.sum() / x.shape[0]`` is known to be a mean. A comparison is a branch of Python, which the trace
notes. What leaves Python's arithmetic (``float(n)``, ``math.sqrt(n)``) is noted, too: it cannot be followed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from lightning_ddp_losses.losses.certificates.kinds import CONSTANT, Constant, Count, Kind


class Follower(Protocol):
    """The interface of the trace that its numbers use."""

    def combined(self, name: str, left: Kind, right: Kind, exponent: object) -> Kind:
        """Return the kind of a result of two numbers."""

    def note_branch(self, name: str, outcome: object) -> None:
        """Note that Python reads an outcome."""

    def note_escape(self, name: str, why: str) -> None:
        """Note that a number cannot be followed."""


class Followed:
    """Arithmetic of a number with a kind."""

    kind: Kind
    trace: Follower

    def __add__(self, other: Any) -> Any:
        return _result("add", operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _result("add", operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _result("sub", operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _result("sub", operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _result("mul", operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _result("mul", operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return _result("div", operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _result("div", operator.truediv, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _result("floor_divide", operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _result("floor_divide", operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _result("remainder", operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _result("remainder", operator.mod, other, self)

    def __pow__(self, other: Any) -> Any:
        return _result("pow", operator.pow, self, other)

    def __rpow__(self, other: Any) -> Any:
        return _result("rpow", operator.pow, other, self)

    def __neg__(self) -> Any:
        return _result("mul", operator.mul, self, -1)

    def __eq__(self, other: object) -> Any:
        return self._compare("==", operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", operator.ge, other)

    def _compare(self, name: str, compare: Callable[[Any, Any], bool], other: object) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = compare(plain(self), plain(other))
        # sizes of the same batch compare alike for any number of rows
        kind = kind_of_number(other)
        are_sizes = isinstance(self.kind, Count) and self.kind == kind and not self.kind.scale.counts
        if not are_sizes:
            self.trace.note_branch(name, outcome)
        return outcome

    def __bool__(self) -> bool:
        outcome = bool(plain(self))
        self.trace.note_branch("bool", outcome)
        return outcome

    def __hash__(self) -> int:
        self.trace.note_escape("hash", "a number that depends on the rows is looked up")
        return hash(plain(self))

    def __int__(self) -> int:
        return int(self._escape("int"))

    def __float__(self) -> float:
        return float(self._escape("float"))

    def __round__(self, digits: Any = None) -> Any:
        return round(self._escape("round"), digits)

    def __trunc__(self) -> int:
        return int(self._escape("trunc"))

    def __floor__(self) -> int:
        return int(self._escape("floor") // 1)

    def __ceil__(self) -> int:
        return -int(-self._escape("ceil") // 1)

    def __abs__(self) -> Any:
        return abs(self._escape("abs"))

    def _escape(self, name: str) -> Any:
        self.trace.note_escape(name, "a number that depends on the rows is computed with outside of torch")
        return plain(self)

    def __reduce__(self) -> Any:
        value = plain(self)
        return type(value), (value,)


class FollowedInt(Followed, int):  # type: ignore[misc]  # arithmetic of another type than int's
    """An integer with a kind."""

    __hash__ = Followed.__hash__


class FollowedFloat(Followed, float):  # type: ignore[misc]  # as above
    """A floating number with a kind."""

    __hash__ = Followed.__hash__


def followed(value: Any, kind: Kind, trace: Follower) -> Any:
    """Return a number with a kind. A constant is a plain number.

    Args:
        value: A plain number.
        kind: Its kind.
        trace: The trace that follows it.
    """
    if isinstance(kind, Constant):
        return value
    number: Any = FollowedInt(value) if isinstance(value, int) else FollowedFloat(value)
    number.kind = kind
    number.trace = trace
    return number


def plain(value: Any) -> Any:
    """Return a number without a kind."""
    if isinstance(value, FollowedInt):
        return int.__int__(value)
    if isinstance(value, FollowedFloat):
        return float.__float__(value)
    return value


def kind_of_number(value: object) -> Kind:
    """Return the kind of a number."""
    return value.kind if isinstance(value, Followed) else CONSTANT


def _result(name: str, compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Return the result of two numbers, with its kind."""
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return NotImplemented
    trace: Follower = next(number.trace for number in (left, right) if isinstance(number, Followed))
    value = compute(plain(left), plain(right))
    kind = trace.combined(name, kind_of_number(left), kind_of_number(right), right)
    return followed(value, kind, trace)
