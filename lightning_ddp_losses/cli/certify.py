"""`ddp-losses certify module:function`: is plain DDP right for a loss, and if not, which line?

`named` imports the object that a command line names.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console
from torch import nn

from lightning_ddp_losses.errors import ConfigurationError, expect
from lightning_ddp_losses.losses import certify

_EXPECTED = "a function without arguments that returns a tuple of the loss and an example"


def run_certify(arguments: Sequence[str], console: Console | None = None) -> int:
    """Certify a loss, show the certificate, and return the exit status: 0 if it is right for equal numbers of rows per rank, else 1.

    Args:
        arguments: Arguments after ``ddp-losses certify``.
        console: Console of the certificate. Default: standard output.

    Raises:
        ConfigurationError: A name of another form, or a function that returns something else.
    """
    text = "Is DDP's mean over ranks right for a loss? Status 0 right, 1 not right or not known, 2 could not run."
    parser = argparse.ArgumentParser(prog="ddp-losses certify", description=text)
    parser.add_argument(
        "function", help="my_module:example, a function without arguments that returns (loss, rows, labels)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # not on the path of a console script
    found = example_of(given.function)
    certificate = certify(*found)
    shown = certificate.to_json() if given.json else str(certificate)
    (console or Console()).print(shown, soft_wrap=True, highlight=False, markup=False)
    return int(certificate.verdict != "right")


def example_of(place: str) -> tuple[Any, ...]:
    """Call the function that makes the example, and return a loss and its arguments.

    Args:
        place: ``my_module:function``. The function does not take arguments.

    Raises:
        ConfigurationError: A name that does not exist, something that is not a function, a function with arguments, or another result.
    """
    what = f"ddp-losses certify {place}"
    function = named("ddp-losses certify", place)
    is_function = callable(function) and not isinstance(function, (type, nn.Module))
    got = f"the class {place}" if isinstance(function, type) else f"an object of class {type(function).__name__}"
    expect(is_function, what, expected=_EXPECTED, got=got, fix=_example_for(function, place))
    needed = _needed_arguments(function)
    got = f"{place}, which needs the arguments {', '.join(needed)}"
    expect(not needed, what, expected=_EXPECTED, got=got, fix=_example_for(function, place))
    found = function()
    is_example = isinstance(found, tuple) and len(found) > 1 and callable(found[0])
    got = _described_result(found)
    expect(is_example, what, expected=_EXPECTED, got=got, fix=_example_for(None, place))
    return tuple(found)


def _needed_arguments(function: Any) -> list[str]:
    """Return the names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in several]


def _described_result(found: Any) -> str:
    """Describe a result that is not an example."""
    if isinstance(found, (tuple, list)):
        contents = ", ".join(type(part).__name__ for part in found)
        return f"a {type(found).__name__} of {contents or 'nothing'}"
    return f"{type(found).__name__}"


def _example_for(loss: Any, place: str) -> str:
    """Return advice with a function that makes an example, for a loss of the user's module or for one of torch."""
    module, _, name = place.partition(":")
    advice = (
        "Write a function that returns the loss and the arguments of one call: 8 rows of random numbers are enough."
    )
    call, rows = "torch.nn.CrossEntropyLoss()", "torch.randn(8, 16), torch.randint(4, (8,))"
    if isinstance(loss, type):
        call = f"{name}()"
    elif loss is not None and callable(loss):
        call = name
    function = f"def example():\n      return {call}, {rows}"
    return f"{advice}\n  import torch\n  {function}\nThen run: ddp-losses certify {module}:example"


def named(command: str, place: str) -> Any:
    """Return the object referred to by ``my_module:name``.

    Args:
        command: The command that the user typed.
        place: Module and name.

    Raises:
        ConfigurationError: Another form, a module that does not exist or that fails when it is imported, or one without the name.
    """
    module, colon, name = place.partition(":")
    dotted = module.removesuffix(".py").replace(os.sep, ".").strip(".")
    if not colon and "." in dotted:
        dotted, _, name = dotted.rpartition(".")
    fix = f"Write {dotted or 'my_module'}:{name or 'my_function'}: a colon separates the module and the name in it."
    is_written = bool(colon and module and name and module == dotted)
    expect(is_written, command, expected="my_module:name", got=place, fix=fix)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the module runs the user's code
        raise _import_error(command, module, error) from error
    try:
        return attrgetter(name)(found)
    except AttributeError as error:
        similar = difflib.get_close_matches(name, vars(found), n=1)
        fix = f"Did you mean {module}:{similar[0]}?" if similar else f"Name something that {module} defines."
        got = f"a module without it, {getattr(found, '__file__', module)}"
        raise ConfigurationError(command, expected=f"{name} in {module}", got=got, fix=fix) from error


def _import_error(command: str, module: str, error: Exception) -> ConfigurationError:
    """Return the error for a module that is missing, or that fails when it is imported."""
    is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
    if is_missing:
        fix = f"Run the command in the folder of {module.partition('.')[0]}, or install the package that contains it."
        got = f"no such module in {os.getcwd()} and among the installed packages"
        return ConfigurationError(command, expected=f"a module {module}", got=got, fix=fix)
    # the last line of the traceback outside of importlib
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f", {frames[-1].filename}:{frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        where = ""  # its text names file and line
    got = f"{type(error).__name__}: {error}{where}"
    fix = f'Mend that first: python -c "import {module}" shows the whole traceback.'
    return ConfigurationError(command, expected=f"a module {module} that can be imported", got=got, fix=fix)
