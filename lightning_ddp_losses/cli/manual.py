"""The manual's pages as Markdown: known faults, public names, the way from a peer's library to this one.

One text of each page serves the terminal (``explain``), and the HTML manual (``nox -s docs``). Faults come from ``faults.yaml``,
names from their docstrings, recipes from the files in ``pages/``: a recipe is one file there, ``<peer>.md``, whose first line is its
title.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path

from lightning_ddp_losses.core.faults import FAULTS, SYMPTOMS, UNUSED

PACKAGE = "lightning_ddp_losses"
# where public names lie, the documented place of a name first
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
    f"{PACKAGE}.callbacks",
    f"{PACKAGE}.audit",
    f"{PACKAGE}.cli",
)
RECIPES = Path(__file__).parent / "pages"

# ---------------------------------------------------------------------- faults


def fault_page(fault: str) -> str:
    """Return the page of one fault: how it shows, what it does, who finds it, what to do, code before and after.

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
    # each with an anchor of its own, to which the table leads
    for fault in FAULTS:
        parts += [f'<a id="{fault}"></a>', _one_deeper(fault_page(fault))]
    return "\n\n".join(parts)


def _one_deeper(page: str) -> str:
    """Return a page whose headings are a level deeper, outside of code."""
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
    """Return the pages about the package itself by name: the changelog, and how to cite it."""
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
    """Return what the benchmarks measured, for the HTML manual; its pictures are named from the folder of the pages."""
    folder = RECIPES.parents[2] / "benchmarks"
    if not folder.is_dir():
        return "The numbers stand in the repository: `benchmarks/README.md`."
    # the manual embeds a picture that it finds beside the page's file
    text = (folder / "README.md").read_text()
    return re.sub(r"\]\((results/[\w./]+\.png)\)", rf"]({_way_up(folder)}/\1)", text)


def _way_up(folder: Path) -> str:
    """Return the relative path from the folder of the pages to another one."""
    return os.path.relpath(folder, RECIPES)


# ---------------------------------------------------------------------- names


def public_names() -> dict[str, object]:
    """Return every public class and function by its dotted name, as a user imports it; each once, at its first place."""
    found: dict[str, object] = {}
    seen: set[int] = set()
    for place in PLACES:
        module = importlib.import_module(place)
        for name in getattr(module, "__all__", None) or _defined_in(module):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and id(value) not in seen:
                seen.add(id(value))
                found[f"{place}.{name}"] = value
    return found


def _defined_in(module: object) -> list[str]:
    """Return the public classes and functions of a module that has no list of them."""
    name = getattr(module, "__name__", "")
    return [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == name
    ]


def name_page(dotted: str, value: object) -> str:
    """Return the page of a public name: where it is imported from, its signature, its docstring.

    Args:
        dotted: Its name with the module that a user imports it from.
        value: The class or function.
    """
    module, _, name = dotted.rpartition(".")
    code = f"from {module} import {name}\n\n{signature_text(name, value)}"
    return f"# {name}\n\n{fenced(code)}\n\n{docstring_as_markdown(inspect.getdoc(value) or '')}\n"


def signature_text(name: str, value: object) -> str:
    """Return a call as it is written: one line where it fits, else one line for each parameter."""
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except ValueError:  # a class that takes what its base in C takes
        return f"{name}(...)"
    parameters = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        # annotations are texts already; str() would quote them
        text = str(parameter)
        if isinstance(parameter.annotation, str):
            text = text.replace(repr(parameter.annotation), parameter.annotation, 1)
        parameters.append(text)
    returns = signature.return_annotation
    end = f") -> {returns}" if isinstance(returns, str) and not inspect.isclass(value) else ")"
    line = f"{name}({', '.join(parameters)}{end}"
    if len(line) <= 88:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + end


_SECTION = re.compile(r"^([A-Z][a-z]+(?: [a-z]+)?):(?: (.*))?$")
# sections of a docstring; of the first, each line names something
_OF_NAMES = frozenset({"Args", "Attributes", "Raises", "Returns", "Yields"})
_SECTIONS = _OF_NAMES | {
    "Communication",
    "Equivalent to",
    "Example",
    "Examples",
    "Forward",
    "Gradient",
    "Legend",
    "Source",
}
_NAMED = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): (.*)$")


def docstring_as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections with headings, arguments as lists, examples as code; nothing is left out.

    (``docstring_parser``, which jsonargparse brings, drops a section that has text on the line of its name, as ``Gradient:`` and
    ``Communication:`` have here.)

    Args:
        docstring: Dedented, in Google's style.
    """
    lines: list[str] = []
    section = ""
    in_example = False
    for line in inspect.cleandoc(docstring).splitlines():
        # an example ends at the next blank line or section
        is_code = line.lstrip().startswith((">>> ", "... ", ">>>")) or (in_example and line.strip() and section != "")
        if in_example and not is_code:
            lines.append("```")
            in_example = False
        begins = _SECTION.match(line)
        if begins and begins[1] in _SECTIONS:
            section = begins[1]
            lines += ["", f"**{section}.**"]
            if begins[2]:
                lines[-1] += f" {begins[2][:1].upper()}{begins[2][1:]}".replace("``", "`")
            else:
                lines.append("")
            continue
        if line and not line.startswith(" "):
            section = ""
        if is_code:
            if not in_example:
                lines += ["", "```python"]
            in_example = True
            lines.append(line.strip() if section else line)
            continue
        lines.append(_text_line(line, section))
    if in_example:
        lines.append("```")
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _text_line(line: str, section: str) -> str:
    """Return one line of a docstring: inside a section without its indent, a named entry as an item of a list."""
    if not section:
        return line.replace("``", "`")
    text = line.removeprefix("    ").replace("``", "`")
    entry = _NAMED.match(text)
    if entry and section in _OF_NAMES:
        return f"* `{entry[1]}`: {entry[2]}"
    return text.removeprefix("    ") if section not in _OF_NAMES else text.replace("    ", "  ", 1)
