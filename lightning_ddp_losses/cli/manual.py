"""The manual's pages as Markdown: known faults, public names, the way from a peer's library to this one.

One text of each page serves the terminal (``explain``), and the HTML manual (``nox -s docs``). Faults come from ``faults.yaml``,
names from their docstrings, recipes from the files in ``pages/``: a recipe is one file there, ``<peer>.md``. Its first line is its
title.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

from lightning_ddp_losses.core.faults import FAULTS, SYMPTOMS, UNUSED

PACKAGE = "lightning_ddp_losses"
# modules of public names, the documented one of a name first
PLACES = (
    PACKAGE,
    f"{PACKAGE}.collectives",
    f"{PACKAGE}.sharding",
    f"{PACKAGE}.errors",
    f"{PACKAGE}.losses",
    f"{PACKAGE}.metrics",
    f"{PACKAGE}.layers",
    f"{PACKAGE}.samplers",
    f"{PACKAGE}.strategies",
    f"{PACKAGE}.ssl",
    f"{PACKAGE}.callbacks",
    f"{PACKAGE}.audit",
    f"{PACKAGE}.testing",
    f"{PACKAGE}.cli",
)
RECIPES = Path(__file__).parent / "pages"

# ---------------------------------------------------------------------- faults


def fault_page(fault: str) -> str:
    """Return the page of one fault: symptom, effect, finder, fix, code before and after.

    Args:
        fault: An id of the table, or a number that no fault has.
    """
    if fault in UNUSED:
        return f"# {fault}\n\n{UNUSED[fault]}\n"
    row = FAULTS[fault]
    parts = [
        f"# {fault}: {row.title}",
        f"*{row.severity.capitalize()}. {SYMPTOMS[row.seen_as]}.*",
        f"**How it shows.** {row.symptom}",
        f"**What it does to training.** {row.effect}",
        f"**Found by.** {sentence(row.found_by)}",
        f"**What to do.** {row.fix}",
    ]
    if row.before:
        parts += ["Before:", fenced(row.before), "After:", fenced(row.after)]
    parts += ["**Evidence.**", "\n".join(f"* {linked(each)}" for each in row.links())]
    return "\n\n".join(parts) + "\n"


def fault_table() -> str:
    """Return the table of all faults, by how they show first."""
    parts = ["# Known faults, by how they show", "`ddp-losses explain F24` shows one of them."]
    for key, heading in SYMPTOMS.items():
        lines = ["| id | it shows as | it is | found by |", "|---|---|---|---|"]
        for fault, row in FAULTS.items():
            if row.seen_as == key:
                cells = (fault, row.symptom, row.title, row.found_by)
                lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        parts += [f"## {heading}", "\n".join(lines)]
    parts.append(f"{', '.join(UNUSED)}: {next(iter(UNUSED.values()))}")
    return "\n\n".join(parts) + "\n"


def all_faults() -> str:
    """Return one page with the table and every fault, for the HTML manual."""
    table = _one_deeper(fault_table()).removeprefix("#")
    parts = [re.sub(r"^\| ([A-Z]\w+) \|", r"| [\1](#\1) |", table, flags=re.MULTILINE)]
    # each with a separate anchor, the target of the table's links
    for fault in FAULTS:
        parts += [f'<a id="{fault}"></a>', _one_deeper(fault_page(fault))]
    return "\n\n".join(parts)


def _one_deeper(page: str) -> str:
    """Return a page with its headings one level deeper, except in code."""
    lines = []
    in_code = False
    for line in page.splitlines():
        in_code ^= line.startswith("```")
        is_heading = line.startswith("#") and not in_code
        lines.append("#" * is_heading + line)
    return "\n".join(lines)


def sentence(text: str) -> str:
    """Begin with a capital letter and end with a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def fenced(code: str) -> str:
    """Return Python code as a block of Markdown."""
    return f"```python\n{code}\n```"


def linked(evidence: str) -> str:
    """Return an address as a link, anything else as a sentence."""
    if evidence.startswith("https://"):
        return f"<{evidence}>"
    return sentence(evidence)


# ---------------------------------------------------------------------- recipes


def recipes() -> dict[str, str]:
    """Return the text of every recipe by the peer it starts from."""
    return {path.stem: path.read_text() for path in sorted(RECIPES.glob("*.md"))}


def about() -> dict[str, str]:
    """Return the pages about the package itself by name: "Is my loop right?", the changelog, and how to cite it."""
    version = importlib.import_module(PACKAGE).__version__
    return {
        path.stem: path.read_text().replace("VERSION", version) for path in sorted((RECIPES / "about").glob("*.md"))
    }


def title_of(page: str) -> str:
    """Return the title of a page: its first line."""
    return page.partition("\n")[0].removeprefix("# ")


def recipe_list() -> str:
    """Return the list of recipes."""
    lines = [
        "# Coming from a peer",
        "`ddp-losses explain migrate pml` shows one recipe: the peer's own way, ours, and the difference.",
    ]
    rows = [f"| `{name}` | {title_of(text)} |" for name, text in recipes().items()]
    return "\n\n".join([*lines, "\n".join(["| name | coming from |", "|---|---|", *rows])]) + "\n"


def all_recipes() -> str:
    """Return one page with the list and every recipe, for the HTML manual."""
    return "\n\n".join([recipe_list(), *(_one_deeper(text) for text in recipes().values())])


# ---------------------------------------------------------------------- numbers


def numbers() -> str:
    """Return the figures of the benchmarks for the HTML manual. Paths of pictures start at the folder of the pages."""
    folder = RECIPES.parents[2] / "benchmarks"
    if not folder.is_dir():
        return "The numbers stand in the repository: `benchmarks/README.md`."
    # the manual embeds a picture that it finds relative to the page's file
    text = (folder / "README.md").read_text()
    return re.sub(r"\]\((results/[\w./]+\.png)\)", rf"]({os.path.relpath(folder, RECIPES)}/\1)", text)


# ---------------------------------------------------------------------- names


def public_names() -> dict[str, object]:
    """Return every public class and function by its dotted name, as a user imports it. Each appears once, at its first place."""
    found: dict[str, object] = {}
    for place in PLACES:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name != "pytest":  # only ``testing`` needs it, and few users have it where they train
                raise
            continue
        defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == place]
        for name in getattr(module, "__all__", None) or defined:
            value = getattr(module, name)
            is_shown = (inspect.isclass(value) or inspect.isfunction(value)) and not name.startswith("_")
            if is_shown and not any(value is each for each in found.values()):
                found[f"{place}.{name}"] = value
    return found


def name_page(dotted: str, value: object) -> str:
    """Return the page of a public name: its import, its signature, its docstring.

    Args:
        dotted: Its name with the module that a user imports it from.
        value: The class or function.
    """
    module, _, name = dotted.rpartition(".")
    code = f"from {module} import {name}\n\n{signature_text(name, value)}"
    return f"# {name}\n\n{fenced(code)}\n\n{docstring_as_markdown(inspect.getdoc(value) or '')}\n"


class _Plain(str):
    """An annotation that is text already, shown without quotes."""

    __repr__ = str.__str__


def signature_text(name: str, value: object) -> str:
    """Return a call as it is written: one line if it fits, else one line for each parameter."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except ValueError:  # a class with the signature of its base in C
        return f"{name}(...)"
    parameters = []
    for parameter in signature.parameters.values():
        shown = _Plain(parameter.annotation) if isinstance(parameter.annotation, str) else parameter.annotation
        parameters.append(parameter.replace(annotation=shown))
    returns: Any = _Plain(signature.return_annotation)
    if inspect.isclass(value) or not isinstance(signature.return_annotation, str):
        returns = inspect.Signature.empty
    line = name + str(inspect.Signature(parameters, return_annotation=returns))
    if len(line) <= 88:
        return line
    # the star stands before the first option that comes by name only
    texts = [str(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = ")" if returns is inspect.Signature.empty else f") -> {returns}"
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + end


# sections of a docstring. Each line of the first ones names something.
_OF_NAMES = ("Args", "Attributes", "Raises", "Returns", "Yields")
_OTHERS = ("Communication", "Equivalent to", "Example", "Examples", "Forward", "Gradient", "Legend", "Source")
_SECTION = re.compile(rf"^({'|'.join(_OF_NAMES + _OTHERS)}):(?: (.*))?$", re.MULTILINE)
_NAMED = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ", re.MULTILINE)
_CODE = re.compile(r"^ *>>>.*(?:\n(?! *$).+)*", re.MULTILINE)


def docstring_as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections with headings, arguments as lists, examples as code. No text is lost.

    (``docstring_parser``, which jsonargparse brings, drops a section that has text on the line of its name, as ``Gradient:`` and
    ``Communication:`` have here.)

    Args:
        docstring: Dedented, in Google's style.
    """
    first, *rest = _SECTION.split(inspect.cleandoc(docstring))
    parts = [_with_code(first)]
    # name, text on the line of the name, and body of each section
    for name, line, body in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        text = re.sub("^    ", "", body, flags=re.MULTILINE)
        if name in _OF_NAMES:
            text = _NAMED.sub(r"* `\1`: ", text).replace("\n    ", "\n  ")
        begin = f" {line[:1].upper()}{line[1:]}" if line else "\n"
        parts.append(_with_code(f"**{name}.**{begin}{text}"))
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).strip()


def _with_code(text: str) -> str:
    """Return text with its examples as blocks of code, and the marks of Markdown for code elsewhere."""
    return _CODE.sub(lambda found: f"\n```python\n{found[0]}\n```", text.replace("``", "`"))
