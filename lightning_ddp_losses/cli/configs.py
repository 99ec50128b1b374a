"""`ddp-losses configs`: the configs included in the package, which `ddp-losses fit --config NAME` finds by name.

They are stored in the folder ``configs`` at the top of the repository, and in a wheel inside the package.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_ddp_losses.errors import expect

_PACKAGE = Path(__file__).parents[1]
# folder in an installed wheel, and in a checkout
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def shipped_configs() -> dict[str, Path]:
    """Return the configs included in the package by name, without the ending."""
    for folder in _FOLDERS:
        found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def summary_of(config: Path) -> str:
    """Return the first sentence of a config's header."""
    lines = config.read_text().splitlines()
    header = itertools.takewhile(lambda line: line.startswith("#") and line.strip("# "), lines)
    text = " ".join(line.removeprefix("#").strip() for line in header)
    return text.partition(". ")[0].rstrip(".") + "."


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the full paths of configs included in the package.

    A user's file takes precedence. ``digits_arcface``, ``digits_arcface.yaml`` and ``configs/digits_arcface.yaml`` are equivalent.

    Args:
        arguments: Arguments of ``ddp-losses``.

    Raises:
        ConfigurationError: A name that is neither a file nor one of these configs.
    """
    found = list(arguments)
    for place, option, value in named_configs(arguments):
        found[place] = option + _full_path(value)
    return found


def named_configs(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the index of each config on a command line, the option if it is part of the same argument, and the config's name."""
    for place, (before, argument) in enumerate(zip(("", *arguments), arguments, strict=False)):
        attached = re.fullmatch("(--config=|-c=?)(.+)", argument, flags=re.DOTALL)
        if attached is not None:
            yield place, attached[1], attached[2]
        elif before in ("--config", "-c"):
            yield place, "", argument


def _full_path(given: str) -> str:
    path, shipped = Path(given), shipped_configs()
    is_name = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml", ".yml")
    if path.exists() or not is_name:
        return given
    if path.stem in shipped:
        return str(shipped[path.stem])
    # a text of YAML is not a name
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    expect(
        not re.fullmatch(r"[\w-]+(\.ya?ml)?", path.name),
        f"--config {given}",
        expected=f"a file, or one of {', '.join(shipped)}",
        got="neither",
        fix=f"Did you mean {near[0]}?" if near else "List them with what they train: ddp-losses configs.",
    )
    return given


def run_configs(arguments: Sequence[str], console: Console | None = None) -> int:
    """List the configs or copy them, and return the exit status.

    Args:
        arguments: Arguments after ``ddp-losses configs``.
        console: Console of the list. Default: standard output.

    Raises:
        ConfigurationError: A name that does not belong to a config, or a file that already exists.
    """
    parser = argparse.ArgumentParser(prog="ddp-losses configs", description="The configs that come with the package.")
    parser.add_argument("name", nargs="*", help="which; none: all")
    parser.add_argument("--copy", metavar="FOLDER", type=Path, help="copy them there, to change them")
    given = parser.parse_args(arguments)
    shipped, console = shipped_configs(), console or Console()
    # selected configs
    names = [Path(name).stem for name in given.name] or list(shipped)
    unknown = [name for name in names if name not in shipped]
    expect(
        not unknown,
        "ddp-losses configs",
        expected=f"names out of {', '.join(shipped)}",
        got=", ".join(unknown),
        fix="Run `ddp-losses configs` to list them.",
    )
    if given.copy is None:
        table = Table("config", "what it trains")
        for name in names:
            table.add_row(name, summary_of(shipped[name]))
        console.print(table, highlight=False)
        use = "ddp-losses fit --config NAME trains one, ddp-losses configs --copy FOLDER copies them."
        console.print(use, highlight=False)
        return 0
    # copy without overwriting a file
    folder: Path = given.copy
    there = [name for name in names if (folder / shipped[name].name).exists()]
    got = f"{', '.join(there)} in it"
    expect(
        not there,
        f"ddp-losses configs --copy {folder}",
        expected="a folder without them",
        got=got,
        fix="Choose another folder, or remove these files.",
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(shipped[name], folder)
        console.print(str(folder / shipped[name].name), soft_wrap=True, highlight=False, markup=False)
    return 0
