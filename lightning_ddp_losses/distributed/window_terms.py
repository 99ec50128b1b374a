"""The terms of an accumulation window: by which name a loss is known in all micro-batches, and which counts were given for it.

A loss is known by its path in the modules of the window, a ``global_mean`` by its ``name=``. Others are known by the line of the program
that calls them. A loss that is called several times in a micro-batch has a term for each of its calls, and one with several means, or
sub-losses, a term for each of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_ddp_losses.distributed.window_parts import Term, calling_line
from lightning_ddp_losses.errors import InputError, expect, listed

Counts = float | Mapping[Any, float | Sequence[float]]
"""This rank's counts in a whole window: one number for all losses, or by loss, its path in the module, or the name of a ``global_mean``."""


Totals = Mapping[str, float | Sequence[float]]
"""This rank's sums in a whole window, by the name of a ``global_mean``."""

_ALL = object()  # stands for all losses, if one count serves for them


class WindowTerms:
    """The terms of one window.

    Args:
        modules: Modules by prefix of the paths of their losses.

    Attributes:
        has_counts: Whether the counts of the window were given.
        has_totals: Whether totals were given, too.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.has_counts = self.has_totals = False
        self._modules = modules
        self._terms: dict[tuple[str, int, int], Term] = {}  # by name, number of the call in its micro-batch, and part
        self._expected_of_all: float | None = None
        self._given: list[object] = []  # losses outside the modules that counts were given for
        self._several: set[str] = set()  # losses with counts of several calls, or means

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
        """The modules by path, outer ones first, without the prefixes of wraps."""
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
        """The first path of each module. A loss inside a global one has the path of the global one."""
        found: dict[int, str] = {}
        for path, module in self._losses.items():
            found.setdefault(id(_inner(module)), path)
        return found

    def term(self, name: str, call: int, part: int, title: str, ranks: Sequence[int]) -> Term:
        """Return the term of a part of the n-th call of a loss in each micro-batch."""
        term = self._terms.get((name, call, part))
        if term is None:
            term = self._terms[name, call, part] = Term("", title, expected=self._expected_of_all)
        # a loss of some ranks has its own counts there
        term.key = f"{name}|{call}|{part}|{ranks[0]}+{len(ranks)}"
        term.title = title
        return term

    def has_several(self, name: str) -> bool:
        """Return whether a list of counts was given for a loss."""
        return name in self._several

    # ------------------------------------------------------------------ counts that are known before

    def checked(self, counts: Counts | None, totals: Totals | None) -> tuple[list[str], list[list[float]]]:
        """Return the titles and the numbers of ``expect_counts``, of the counts first.

        Raises:
            InputError: for a count that is negative or not finite, and for a total without a count.
        """
        by_loss = _by_loss(counts)
        totals = totals or {}
        titles = [*map(_title_of, by_loss), *(f"total of `{name}`" for name in totals)]
        own = [*map(_listed, by_loss.values()), *map(_listed, totals.values())]
        for i, (title, numbers) in enumerate(zip(titles, own, strict=True)):
            is_count = i < len(by_loss)
            is_right = all(math.isfinite(number) and (number >= 0 or not is_count) for number in numbers)
            expected = "finite counts, not negative" if is_count else "finite sums"
            expect(is_right, f"expect_counts: {title}", expected=expected, got=numbers, error=InputError)
        for name in totals:
            what = f"expect_counts: total of `{name}`"
            expect(_ALL in by_loss or name in by_loss, what, expected="its count, too", got="none", error=InputError)
        return titles, own

    def expect_(self, counts: Counts | None, totals: Totals | None, sums: Sequence[Sequence[float]]) -> None:
        """Take the numbers of ``expect_counts`` over all ranks, in the order of ``checked``."""
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
        """Take the counts of one loss over all ranks."""
        if source is _ALL:
            (self._expected_of_all,) = several
            return
        # a path in the module, a loss, or the name of a global_mean
        if isinstance(source, str) and source not in self._losses:
            name = f"mean {source}"
        else:
            inner = _inner(self._losses[source] if isinstance(source, str) else source)
            path = self._paths.get(id(inner))
            name = f"loss {path}"
            if path is None:
                name = f"given {len(self._given)}"
                self._given.append(inner)
        if len(several) > 1:
            self._several.add(name)
        for i, number in enumerate(several):
            # several calls of one mean each, or one call of several means
            term = Term(f"{name}|{i}", _title_of(source), expected=number)
            self._terms[name, i, 0] = self._terms[name, 0, i] = term


def _by_loss(counts: Counts | None) -> Mapping[Any, float | Sequence[float]]:
    if counts is None:
        return {}
    return counts if isinstance(counts, Mapping) else {_ALL: counts}


def _listed(number: float | Sequence[float]) -> list[float]:
    return [float(each) for each in number] if isinstance(number, Sequence) else [float(number)]


def _inner(source: object) -> object:
    """Return the loss inside a global one, or the loss itself."""
    return getattr(source, "loss", source) if getattr(source, "sees_global_batch", False) else source


def _title_of(source: object) -> str:
    if source is _ALL:
        return "all losses"
    if isinstance(source, str):
        return f"global_mean `{source}`"
    return type(source).__name__
