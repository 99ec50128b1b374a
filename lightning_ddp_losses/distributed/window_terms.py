"""The terms of an accumulation window: how a loss is identified across micro-batches, and which counts were given for it.

A loss is identified by its path in the modules of the window, a ``global_mean`` by its ``name=``. Otherwise they are identified by the line
of the program that calls them. A loss that is called several times in a micro-batch has a term for each of its calls, and one with several
means, or sub-losses, has a term for each of these.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core.transparent import wrapped_module
from lightning_ddp_losses.distributed.window_parts import Term, calling_line
from lightning_ddp_losses.errors import InputError, expect, listed

Counts = float | Mapping[Any, float | Sequence[float]]
"""This rank's counts in a whole window: one number for all losses, or by loss, its path in the module, or the name of a ``global_mean``."""


Totals = Mapping[str, float | Sequence[float]]
"""This rank's sums in a whole window, by the name of a ``global_mean``."""

_ALL = object()  # represents all losses, if one count applies to all of them


class WindowTerms:
    """The terms of one window.

    Args:
        modules: Modules by prefix of the paths of their losses.

    Attributes:
        has_counts: Whether the counts of the window were given.
        has_totals: Whether totals were also given.
        averages: Number of micro-batches over whose losses the program takes the mean, as Lightning does, if counts are given.
        micro_batches: Number of micro-batches that were declared.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.has_counts = self.has_totals = False
        self.averages = 1
        self.micro_batches = 0
        self._modules = modules
        self._terms: dict[tuple[str, int, int], Term] = {}  # by name, index of the call in its micro-batch, and part
        self._expected_of_all: float | None = None
        self._given: list[object] = []  # losses outside of the modules for which counts were given

    def all(self) -> Collection[Term]:
        """Return each term once."""
        return {id(term): term for term in self._terms.values()}.values()

    # ------------------------------------------------------------------ names

    def known_as(self, source: object, title: str) -> tuple[str, str]:
        """Return the name of a loss, the same in all micro-batches and on all ranks, and its title in messages."""
        if isinstance(source, str):
            if source:
                return f"mean {source}", title
        else:
            inner = _inner(source)
            for i, given in enumerate(self._given):
                if given is inner:
                    return f"given {i}", title
            path = self._paths.get(id(inner))
            wrappers = self._wrappers.get(id(inner), [])
            expect(
                len(wrappers) < 2,
                f"accumulation window: {title}",
                expected="a loss with one name",
                got=f"one that {listed([f'`{name}`' for name in wrappers])} share",
                fix="Give each of them a loss of its own: in a window, losses are known by their paths.",
            )
            if path is not None:
                return f"loss {path}", f"{title} `{path}`" if path else title
        line = calling_line()
        return f"line {line}", f"{title} at {line}"

    @functools.cached_property
    def _losses(self) -> dict[str, nn.Module]:
        """The modules by path, outer ones first, without the prefixes of wrappers."""
        found: dict[str, nn.Module] = {}
        for prefix, module in self._modules.items():
            for name, inner in module.named_modules(prefix=prefix):
                path = ".".join(part for part in name.split(".") if part not in ("", "module"))
                found.setdefault(path, inner)
        return found

    @functools.cached_property
    def _wrappers(self) -> dict[int, list[str]]:
        """The paths of the global losses around each loss."""
        found: dict[int, list[str]] = {}
        for path, module in self._losses.items():
            if _inner(module) is not module:
                found.setdefault(id(_inner(module)), []).append(path)
        return found

    @functools.cached_property
    def _paths(self) -> dict[int, str]:
        """The first path of each module. A loss inside a global loss has the path of the global loss."""
        found: dict[int, str] = {}
        for path, module in self._losses.items():
            found.setdefault(id(_inner(module)), path)
        return found

    def term(self, name: str, call: int, part: int, title: str, ranks: Sequence[int]) -> Term:
        """Return the term of a part of the loss call with this index in each micro-batch."""
        term = self._terms.get((name, call, part))
        if term is None:
            term = self._terms[name, call, part] = Term("", title, expected=self._expected_of_all)
        expect(
            term.name in ("", name),
            f"accumulation window: counts of {title}",
            expected="a name that belongs to one loss",
            got=f"that of {term.title}, too",
            fix="Give the global_mean a name= that is no path of a loss in the model.",
        )
        term.name = name
        # a loss over some of the ranks has separate counts for them
        term.key = f"{name}|{call}|{part}|{ranks[0]}+{len(ranks)}"
        term.title = title
        return term

    # ------------------------------------------------------------------ counts that are known in advance

    def checked(self, counts: Counts | None, totals: Totals | None) -> tuple[list[str], list[list[float]]]:
        """Return the titles and the numbers of ``expect_counts``, the counts before the totals.

        Raises:
            InputError: for a count that is negative or not finite, and for a total without a count.
        """
        by_loss = _by_loss(counts)
        totals = totals or {}
        titles = [*map(_title_of, by_loss), *(f"total of `{name}`" for name in totals)]
        own: list[list[float]] = []
        for title, numbers in zip(titles, [*by_loss.values(), *totals.values()], strict=True):
            own.append(_as_numbers(f"expect_counts: {title}", numbers, is_count=len(own) < len(by_loss)))
        is_one = _ALL not in by_loss or len(own[0]) == 1
        expect(
            is_one,
            "expect_counts: all losses",
            expected="one number",
            got=own,
            fix="Give a list by loss.",
            error=InputError,
        )
        for name in totals:
            what = f"expect_counts: total of `{name}`"
            expect(
                _ALL in by_loss or name in by_loss,
                what,
                expected="its count, too",
                got="none",
                error=InputError,
                fix="Pass a count by its name as well.",
            )
        return titles, own

    def expect_(self, counts: Counts | None, totals: Totals | None, sums: Sequence[Sequence[float]]) -> None:
        """Set the numbers of ``expect_counts`` over all ranks, in the order of ``checked``."""
        by_loss = _by_loss(counts)
        totals = totals or {}
        for source, several in zip(by_loss, sums, strict=False):
            self._expect_count_(source, several)
        for name, several in zip(totals, sums[len(by_loss) :], strict=True):
            for i, number in enumerate(several):
                term = Term(f"mean {name}|{i}", _title_of(name), expected=self._expected_of_all)
                self._terms.setdefault((f"mean {name}", 0, i), term).expected_total = number
        self.has_counts |= bool(by_loss)
        self.has_totals |= bool(totals)

    def _expect_count_(self, source: object, several: Sequence[float]) -> None:
        """Set the counts of one loss over all ranks."""
        if source is _ALL:
            (self._expected_of_all,) = several
            return
        names = []
        if isinstance(source, str):
            # either the name of a global_mean or the path of a module, decided by the first call
            names.append(f"mean {source}")
        inner = _inner(self._losses.get(source) if isinstance(source, str) else source)
        path = self._paths.get(id(inner))
        if path is not None:
            names.append(f"loss {path}")
        elif not names:
            names.append(f"given {len(self._given)}")
            self._given.append(inner)
        for i, number in enumerate(several):
            term = Term(f"{names[0]}|{i}", _title_of(source), expected=number)
            for name in names:
                # several calls with one mean each, or one call with several means
                self._terms[name, i, 0] = self._terms[name, 0, i] = term


def _by_loss(counts: Any) -> Mapping[Any, Any]:
    if counts is None:
        return {}
    return counts if isinstance(counts, Mapping) else {_ALL: counts}


def _as_numbers(title: str, given: object, *, is_count: bool) -> list[float]:
    """Return one number, or several, as a list.

    Raises:
        InputError: for a value that is not a finite number, and for a negative count.
    """
    several: Any = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(several, Sequence) or isinstance(several, str):
        several = [several]
    is_right = all(isinstance(number, (Real, Tensor)) and math.isfinite(number) for number in several)
    if is_count:
        is_right = is_right and min(several, default=0) >= 0
    expected = "finite counts, not negative" if is_count else "finite sums"
    expect(is_right, title, expected=expected, got=given, error=InputError)
    return list(map(float, several))


def add_counts(title: str, of_batches: Sequence[object]) -> Counts:
    """Return the total counts of several batches.

    Args:
        title: Name of the source of the counts, in messages.
        of_batches: The counts of each batch, in the same form as the counts of a window.

    Raises:
        InputError: for counts that are negative or not finite, and if batches differ in their losses or numbers of calls.
    """
    sums: dict[Any, list[float]] = {}
    for number, counts in enumerate(of_batches):
        by_loss = _by_loss(counts)
        own = {}
        for source, given in by_loss.items():
            own[source] = _as_numbers(
                f"{title}: {_title_of(source)}, batch {number + 1} of the window", given, is_count=True
            )
        if number == 0:
            sums = own
            continue
        expect(
            {source: len(each) for source, each in own.items()} == {source: len(each) for source, each in sums.items()},
            title,
            expected=f"counts of the same losses in each batch of the window: {_shown_counts(sums)}",
            got=f"{_shown_counts(own)} in batch {number + 1}",
            fix="Give 0 for a loss that counts nothing in a batch.",
            error=InputError,
        )
        for source, each in own.items():
            sums[source] = list(map(operator.add, sums[source], each))
    return sums


def _shown_counts(counts: Mapping[Any, Sequence[float]]) -> str:
    return ", ".join(f"{_title_of(source)} ({len(each)})" for source, each in counts.items()) or "none"


def _inner(source: object) -> object:
    """Return the loss inside a global loss, or the loss itself."""
    wrapped = wrapped_module(source) if isinstance(source, nn.Module) else None
    if wrapped is not None:
        return wrapped
    return getattr(source, "loss", source) if getattr(source, "sees_global_batch", False) else source


def _title_of(source: object) -> str:
    if source is _ALL:
        return "all losses"
    if isinstance(source, str):
        return f"global_mean `{source}`"
    return type(source).__name__
