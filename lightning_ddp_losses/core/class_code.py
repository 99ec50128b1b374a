"""The names of attributes that the methods of a class set and read, extracted from their code without running it."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType
from typing import Any


@functools.cache
def names_written(cls: type, method: str) -> frozenset[str]:
    """Return the names of the attributes set by a method of a class, or by the methods of the class that it calls."""
    found: set[str] = set()
    for code in _codes(cls, method):
        found.update([str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"])
        if "setattr" in code.co_names:
            found |= _strings_in(code)
    return frozenset(found)


@functools.cache
def names_read(cls: type, method: str) -> frozenset[str]:
    """Return the names in the code of a method of a class, and of the methods of the class that it calls."""
    found: set[str] = set()
    for code in _codes(cls, method):
        found.update(code.co_names)
        found |= _strings_in(code)
    return frozenset(found)


def _codes(cls: type, method: str) -> list[CodeType]:
    """Return the code of a method, of the functions nested in it, and of the methods and properties of the class that it names."""
    found: dict[CodeType, None] = {}
    named = [method]
    seen = set(named)
    for name in named:
        codes = _codes_of(inspect.getattr_static(cls, name, None))
        for code in codes:
            found[code] = None
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            named += [other for other in code.co_names if other not in seen]
            seen.update(code.co_names)
    return list(found)


def _codes_of(member: Any) -> list[CodeType]:
    """Return the code of a function, a method or a property. Empty for other members of a class."""
    if isinstance(member, property):
        member = member.fget
    function = inspect.unwrap(getattr(member, "__func__", member)) if callable(member) else member
    code = getattr(function, "__code__", None)
    return [code] if isinstance(code, CodeType) else []


def _strings_in(code: CodeType) -> set[str]:
    """Return the strings in code, which may be names for ``getattr`` and ``setattr``."""
    return {constant for constant in code.co_consts if isinstance(constant, str)}
