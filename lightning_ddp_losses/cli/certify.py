"""`ddp-losses certify module:function`: is plain DDP right for a loss, and if not, which line?

`named` imports the object that a command line names.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console

from lightning_ddp_losses.errors import ConfigurationError, expect
from lightning_ddp_losses.losses import certify


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
        "function", help="my_module:function, which returns the arguments of certify: loss, rows, labels"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    given = parser.parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # not on the path of a console script
    function = named("ddp-losses certify", given.function)
    what = f"ddp-losses certify {given.function}"
    expect(callable(function), what, expected="a function", got=type(function).__name__)
    found = function()
    fix = "return torch.nn.MSELoss(), torch.randn(8, 2), torch.randn(8, 2)"
    is_given = isinstance(found, tuple) and len(found) > 1
    expect(
        is_given, what, expected="a function that returns the loss and its arguments", got=type(found).__name__, fix=fix
    )
    certificate = certify(*found)
    shown = certificate.to_json() if given.json else str(certificate)
    (console or Console()).print(shown, soft_wrap=True, highlight=False, markup=False)
    return int(certificate.verdict != "right")


def named(command: str, place: str) -> Any:
    """Return the object referred to by ``my_module:name``.

    Args:
        command: The command that the user typed.
        place: Module and name.

    Raises:
        ConfigurationError: Another form, a module that does not exist, or one without the name.
    """
    module, colon, name = place.partition(":")
    expect(bool(colon and module and name), command, expected="my_module:name", got=place)
    try:
        return attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the user's module imports
        raise ConfigurationError(command, expected=f"a module {module}", got=str(error)) from error
    except AttributeError as error:
        raise ConfigurationError(command, expected=f"{name} in {module}", got=str(error)) from error
