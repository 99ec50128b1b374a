"""Every error a user can cause, under one root, and the common format of their texts.

A text reads ``<what>: expected <A>, got <B>``, then one line per rank if ranks matter, then what to do. An error that was
decided by all ranks together is marked ``collective``: no rank needs to report it again.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard


def explained_by(topic: str) -> str:
    """Return the last line of a message that has a page in the manual: the command that shows the page, and its address if known."""
    site = manual_address()
    if not site:
        return f"More: ddp-losses explain {topic}"
    return f"More: ddp-losses explain {topic}, or {site}/explain/{topic}.html"


@functools.cache
def manual_address() -> str:
    """Return the address of the HTML manual from the metadata of the installed package, or an empty text if it is not available."""
    try:
        addresses = importlib.metadata.metadata("lightning-ddp-losses").get_all("Project-URL") or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    by_name = {name: address for name, _, address in (each.partition(", ") for each in addresses)}
    page: str = by_name.get("Documentation", "")
    return page.rpartition("/")[0]


class DDPLossError(RuntimeError):
    """Root of all errors of this package, which formats its text.

    Args:
        what: The object that is wrong, in the user's terms. If no other part is given, it is the whole text.
        expected: The right value, or a description of it.
        got: The value found.
        ranks: One entry per rank (a sequence in rank order, or a mapping for some ranks only).
        fix: Advice, as a sentence.
        findings: Findings of the checks, if a check raised it. Otherwise empty.
        collective: True if every rank raises this error at the same place, so it does not have to be reported to the peers.
        page: The topic of ``ddp-losses explain``, if it differs from the topic of the class.

    Attributes: the arguments, by name.

    An error class that results from a known fault names its page: the traceback ends with the command that shows it (a note of the
    exception, so that the text itself is not changed).

    Example:
        >>> print(DDPLossError("rows", expected=8, ranks=[8, 6], fix="Drop the last batch."))
        rows: expected 8
          rank 0: 8
          rank 1: 6
        Drop the last batch.
    """

    page: str = ""
    """The topic of ``ddp-losses explain``, or an empty text."""

    def __init__(
        self,
        what: str = "",
        *,
        expected: object | None = None,
        got: object | None = None,
        ranks: Mapping[int, object] | Sequence[object] | None = None,
        fix: str | None = None,
        findings: Sequence[Any] = (),
        collective: bool = False,
        page: str = "",
    ) -> None:
        super().__init__(format_error(what, expected=expected, got=got, ranks=ranks, fix=fix))
        self.what, self.expected, self.got, self.ranks, self.fix = what, expected, got, ranks, fix
        self.findings = list(findings)
        self.collective, self.page = collective, page or self.page
        if self.page:
            self.__notes__ = [explained_by(self.page)]

    def parts_as_text(self) -> dict[str, Any]:
        """Return the parts of the text, as arguments of ``format_error``, each as text."""
        parts: dict[str, Any] = {"what": self.what, "expected": self.expected, "got": self.got, "fix": self.fix}
        parts = {name: str(part) for name, part in parts.items() if part is not None}
        if self.ranks is not None:
            parts["ranks"] = {rank: str(entry) for rank, entry in _rank_entries(self.ranks)}
        return parts

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the attributes in a pickle, converting values that may not be portable to text, and omitting process groups."""
        state = {name: value for name, value in vars(self).items() if name != "reported_in"}
        state.update({name: _portable(getattr(self, name)) for name in ("what", "expected", "got", "fix")})
        if self.ranks is not None:
            state["ranks"] = {rank: _portable(entry) for rank, entry in _rank_entries(self.ranks)}
        return _rebuild_error, (type(self), self.args, state)


def _rebuild_error(cls: type[DDPLossError], args: tuple[Any, ...], state: dict[str, Any]) -> DDPLossError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _rank_entries(ranks: Mapping[int, object] | Sequence[object]) -> Iterable[tuple[int, object]]:
    return ranks.items() if isinstance(ranks, Mapping) else enumerate(ranks)


def _portable(value: object) -> object:
    """Return a plain value, or a tuple of plain values, unchanged. Any other value is converted to text."""
    if isinstance(value, tuple):
        return tuple(_portable(item) for item in value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


class ConfigurationError(DDPLossError):
    """An invalid option, name or combination of options.

    Example:
        >>> print(ConfigurationError("chunk_size", expected="1 or more", got=0))
        chunk_size: expected 1 or more, got 0
    """


class HiddenLossError(ConfigurationError):
    """A trainable loss that is not a registered submodule and is therefore not moved, synchronised or saved.

    Example:
        >>> issubclass(HiddenLossError, ConfigurationError)
        True
    """

    page = "F02"


class InputError(DDPLossError):
    """Embeddings, labels or data that a loss or a data module does not accept.

    Example:
        >>> print(InputError("embeddings", expected="(B, D)", got=(8,)))
        embeddings: expected (B, D), got (8,)
    """


class LossCallError(DDPLossError):
    """A loss that ran, or that received a gradient, on some ranks only.

    Example:
        >>> print(LossCallError("loss", expected="a call on every rank", ranks={1: "not called"}))
        loss: expected a call on every rank
          rank 1: not called
    """

    page = "F37"


class RankMismatchError(DDPLossError):
    """Ranks that took part in one collective with different shapes, dtypes or names, or at different places of the program.

    Example:
        >>> print(RankMismatchError("dtype", expected="one", ranks=["float32", "float64"]))
        dtype: expected one
          rank 0: float32
          rank 1: float64
    """

    page = "F47"


class PeerError(DDPLossError):
    """Another rank failed. This rank stops as well instead of waiting for it.

    Example:
        >>> print(PeerError("rank 1 failed: out of memory"))
        rank 1 failed: out of memory
    """

    page = "F42"


class AuditError(DDPLossError):
    """An audit that could not run because one of its processes failed, died or took too long. The text includes its traceback.

    Example:
        >>> print(AuditError("rank 1 of the audit", expected="a result", got="exit status 1"))
        rank 1 of the audit: expected a result, got exit status 1
    """

    page = "loop"


_BY_NAME: dict[str, type[DDPLossError]] = {}


def register_error(cls: type[DDPLossError]) -> type[DDPLossError]:
    """Make peers raise this class too when the error occurs on one rank only (the name is sent, so peers must have the class).

    Example:
        >>> @register_error
        ... class OwnError(DDPLossError):
        ...     pass
    """
    _BY_NAME[cls.__name__] = cls
    return cls


for _cls in (
    AuditError,
    ConfigurationError,
    DDPLossError,
    HiddenLossError,
    InputError,
    LossCallError,
    PeerError,
    RankMismatchError,
):
    register_error(_cls)


def error_class(name: str) -> type[DDPLossError]:
    """Return the registered class with this name, or ``PeerError`` for a class of another package."""
    return _BY_NAME.get(name, PeerError)


def format_error(
    what: str,
    *,
    expected: object | None = None,
    got: object | None = None,
    ranks: Mapping[int, object] | Sequence[object] | None = None,
    fix: str | None = None,
) -> str:
    """Build an error text: what, expected, got, one line per rank, what to do.

    Args:
        what: The object that is wrong, in the user's terms.
        expected: The right value, or a description of it.
        got: The value found.
        ranks: One entry per rank (a sequence in rank order, or a mapping for some ranks only).
        fix: Advice, as a sentence.

    Example:
        >>> print(format_error("rows", expected=8, got=6))
        rows: expected 8, got 6
    """
    parts = []
    if expected is not None:
        parts.append(f"expected {expected}")
    if got is not None:
        parts.append(f"got {got}")
    lines = [f"{what}: {', '.join(parts)}" if parts else what]
    if ranks is not None:
        lines += [f"  rank {rank}: {entry}" for rank, entry in _rank_entries(ranks)]
    if fix:
        lines.append(fix)
    return "\n".join(lines)


def listed(names: Sequence[str], at_most: int = 6) -> str:
    """Return the first of some names, and the number of remaining ones.

    Example:
        >>> listed(["a", "b", "c"], at_most=2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return f"{', '.join(names[:at_most])}{more}"


def expect(
    holds: object,
    what: str,
    *,
    expected: object | None = None,
    got: object | None = None,
    fix: str | None = None,
    error: type[DDPLossError] = ConfigurationError,
    collective: bool = False,
) -> None:
    """Raise an error unless a condition holds. The arguments are the same as for ``DDPLossError``.

    Example:
        >>> expect(0.1 <= 1, "sample_rate", expected="at most 1", got=0.1)
    """
    if not holds:
        raise error(what, expected=expected, got=got, fix=fix, collective=collective)


def expect_option(what: str, value: object, allowed: Iterable[object]) -> None:
    """Raise a ``ConfigurationError`` unless an option is one of the allowed values. A ``bool`` does not count as a number.

    Example:
        >>> expect_option("mode", "rows", ("auto", "rows"))
    """
    allowed = tuple(allowed)
    found = any(type(value) is type(each) and value == each for each in allowed)
    expect(found, what, expected=f"one of {', '.join(map(repr, allowed))}", got=repr(value))


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def expect_count(what: str, value: object, *, at_least: int = 1) -> None:
    """Raise a ``ConfigurationError`` unless an option is an integer that is large enough.

    Example:
        >>> expect_count("every_n_steps", 2)
    """
    expect(is_whole(value) and value >= at_least, what, expected=f"an integer, {at_least} or more", got=repr(value))
