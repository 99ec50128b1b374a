"""The manual: its pages as Markdown, and ``ddp-losses explain TOPIC``, which shows them in the terminal.

A topic is a known fault (``F24``), a symptom (``hang``), a kind of reader (``tokens``), a public name (``GlobalBatchLoss``), or a host or
peer (``torchrun``, also ``migrate torchrun``). ``--all`` lists the faults by symptom. Any other words are searched for (``search``), and
the three best matching pages are listed with a line each.

The text of each page is used in the terminal and in the HTML manual (``nox -s docs``). Faults are read from ``faults.yaml``, names from
their docstrings, and all other pages from Markdown files: ``pages/<peer>.md`` is a recipe, ``pages/readers`` has a page for each kind of
reader, and ``pages/about`` all remaining pages. The first line of a file is its title. A line ``{faults: F20, F24}``, ``{recipes: pml}`` or
``{losses: SupCon}`` of a reader's page is replaced by the lines of these faults, recipes and losses.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.syntax import Syntax

from lightning_ddp_losses.cli import search
from lightning_ddp_losses.core.faults import FAULTS, SYMPTOMS, UNUSED
from lightning_ddp_losses.errors import expect

PACKAGE = "lightning_ddp_losses"
# modules with public names. If a name is in several, the first one is documented
PLACES = (
    PACKAGE,
    f"{PACKAGE}.collectives",
    f"{PACKAGE}.sharding",
    f"{PACKAGE}.errors",
    f"{PACKAGE}.losses",
    f"{PACKAGE}.metrics",
    f"{PACKAGE}.layers",
    f"{PACKAGE}.randomness",
    f"{PACKAGE}.samplers",
    f"{PACKAGE}.strategies",
    f"{PACKAGE}.ssl",
    f"{PACKAGE}.callbacks",
    f"{PACKAGE}.audit",
    f"{PACKAGE}.testing",
    f"{PACKAGE}.cli",
)
_BLOCK = re.compile(r"```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
_FENCED = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$\n*", re.DOTALL | re.MULTILINE)
_ENDINGS = {"python": ".py", "yaml": ".yaml", "bash": ".sh"}
_OURS = "\n## With this package\n"
PAGES = Path(__file__).parent / "pages"
HOSTS = (
    *(
        "accelerate",
        "fabric",
        "fabric_fsdp2",
        "fsdp2",
        "hf_trainer",
        "hydra",
        "kubernetes",
        "lightning_cli",
        "notebook",
    ),
    *("sentence_transformers", "slurm", "torchrun", "wandb"),
)
"""Recipes of the programs that run the loop. All other recipes start from a library of losses or metrics, or from a formula."""

# ---------------------------------------------------------------------- faults


def fault_page(fault: str) -> str:
    """Return the page of one fault: symptom, effect, finder, fix, code before and after.

    Args:
        fault: An id of the table, or an unassigned number.
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


def fault_list(*shown: str) -> str:
    """Return the list of faults, grouped by their first symptom.

    Args:
        *shown: Keys of ``SYMPTOMS``. Default: all of them, and the unassigned numbers.
    """
    parts = ["# Known faults, by how they show", "`ddp-losses explain F24` shows one of them."]
    for key in shown or SYMPTOMS:
        parts += [f"## {SYMPTOMS[key]}", fault_lines([fault for fault, row in FAULTS.items() if row.seen_as == key])]
    parts += [_ENDS[key] for key in shown if key in _ENDS]
    if not shown:
        parts.append(f"{', '.join(UNUSED)}: {next(iter(UNUSED.values()))}")
    return "\n\n".join(parts) + "\n"


_ENDS = {
    "hang": (
        "A loop of your own (plain DDP, `torchrun`) has no `DDPChecks`: `ddp-losses explain loop` has a section about hangs, with "
        "code that shows where each rank waits."
    )
}
"""Last paragraph of a symptom's page."""


def fault_lines(faults: Iterable[str]) -> str:
    """Return a list of faults, with the symptom and title of each."""
    return "\n".join(f"* `{fault}`: {FAULTS[fault].symptom} *{sentence(FAULTS[fault].title)}*" for fault in faults)


def sentence(text: str) -> str:
    """Capitalise the first letter and end with a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def fenced(code: str) -> str:
    """Return Python code as a block of Markdown."""
    return f"```python\n{code}\n```"


def linked(evidence: str) -> str:
    """Return an address as a link, any other text as a sentence."""
    if evidence.startswith("https://"):
        return f"<{evidence}>"
    return sentence(evidence)


# ---------------------------------------------------------------------- recipes, readers, the package itself


def recipes() -> dict[str, str]:
    """Return the text of every recipe by the host or peer from which it starts."""
    return _texts(PAGES)


def about() -> dict[str, str]:
    """Return the pages about the package itself by name: losses, parts, "Is my loop right?", security, changelog, citation."""
    version = importlib.import_module(PACKAGE).__version__
    return {name: text.replace("VERSION", version) for name, text in _texts(PAGES / "about").items()}


def readers() -> dict[str, str]:
    """Return a page for each kind of reader by name: the calls, their cost, and the recipes and faults that matter to them."""
    return {name: _MADE.sub(_made_rows, text) for name, text in _texts(PAGES / "readers").items()}


_MADE = re.compile(r"^\{(faults|recipes|losses): (.+)\}$", re.MULTILINE)


def _made_rows(line: re.Match[str]) -> str:
    """Return the rows that replace a line of a reader's page."""
    names = line[2].split(", ")
    if line[1] == "faults":
        return fault_lines(names)
    if line[1] == "recipes":
        return commands({name: title_of(recipes()[name]) for name in names})
    head, rule, *rows = [row for row in about()["losses"].splitlines() if row.startswith("|")]
    return "\n".join([head, rule, *(row for row in rows if row.startswith(tuple(f"| {name}" for name in names)))])


def _texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.md"))}


def title_of(page: str) -> str:
    """Return the title of a page: its first line."""
    return page.partition("\n")[0].removeprefix("# ")


def commands(titles: Mapping[str, str]) -> str:
    """Return a list of commands that show pages.

    Args:
        titles: Title of each page by its topic.
    """
    return "\n".join(f"* `ddp-losses explain {topic}`: {title}" for topic, title in titles.items())


def reader_list() -> str:
    """Return the list of readers' pages."""
    titles = {name: title_of(text) for name, text in readers().items()}
    return f"# What do you train?\n\n{commands(titles)}\n"


def recipe_list() -> str:
    """Return the list of recipes."""
    titles = {name: title_of(text) for name, text in recipes().items()}
    parts = [
        "# Coming from a host or a peer",
        "A recipe has the peer's own way, ours, and the difference.",
        *("## Hosts: where the loop runs", commands({name: titles.pop(name) for name in HOSTS})),
        *("## Peers: where the loss comes from", commands(titles)),
    ]
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------- names


def public_names() -> dict[str, object]:
    """Return every public class and function by the dotted name from which a user imports it, each once, at its first place."""
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
        dotted: Its name including the module from which a user imports it.
        value: The class or function.
    """
    module, _, name = dotted.rpartition(".")
    code = f"from {module} import {name}\n\n{signature_text(name, value)}"
    return f"# {name}\n\n{fenced(code)}\n\n{docstring_as_markdown(inspect.getdoc(value) or '')}\n"


class _Plain(str):
    """An annotation that is already text, shown without quotes."""

    __repr__ = str.__str__


def signature_text(name: str, value: object) -> str:
    """Return a call in source form: one line if it fits, otherwise one line for each parameter."""
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
    # the star precedes the first keyword-only option
    texts = [str(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = ")" if returns is inspect.Signature.empty else f") -> {returns}"
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + end


# sections of a docstring. In the first group, each line describes a name
_OF_NAMES = ("Args", "Attributes", "Raises", "Returns", "Yields")
_OTHERS = ("Communication", "Equivalent to", "Example", "Examples", "Forward", "Gradient", "Legend", "Source")
_SECTION = re.compile(rf"^({'|'.join(_OF_NAMES + _OTHERS)}):(?: (.*))?$", re.MULTILINE)
_NAMED = re.compile(r"^(\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*): ", re.MULTILINE)
_CODE = re.compile(r"^ *>>>.*(?:\n(?! *$).+)*", re.MULTILINE)


def docstring_as_markdown(docstring: str) -> str:
    """Return a docstring as Markdown: sections with headings, arguments as lists, examples as code, without losing any text.

    (``docstring_parser``, which jsonargparse uses, drops a section that has text on the line of its name, such as our ``Gradient:`` and
    ``Communication:``.)

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
    """Return text with its examples as blocks of code, and with Markdown's marks for inline code."""
    return _CODE.sub(lambda found: f"\n```python\n{found[0]}\n```", text.replace("``", "`"))


# ---------------------------------------------------------------------- ddp-losses explain

_WIDEST = 110  # characters, because longer lines are hard to read
_OVERVIEW = """# The manual

## What do you see?

SYMPTOMS

## What do you train?

READERS

## What do you look for?

* `ddp-losses explain symptoms`: which of these am I? Ten things that people say
* `ddp-losses explain losses`: every loss by its usual name, with the call and its cost
* `ddp-losses explain loop`: is my loop right? N ranks of any training loop against one process
* `ddp-losses explain certificates`: is plain DDP right for my loss, and if not, which line?
* `ddp-losses explain own_data`: train on a csv file or arrays of yours, without programming
* `ddp-losses explain fit_numbers`: what the table and the pictures of a fit mean, and whether a value is good
* `ddp-losses explain retrieval`: recall@k, MAP@R and kNN accuracy over all ranks
* `ddp-losses explain maxsim`: late interaction (ColBERT) over texts of different lengths
* `ddp-losses explain extending`: your own loss, check, strategy or recipe
* `ddp-losses explain testing`: parity as a test, in continuous integration
* `ddp-losses explain parts`: a tour of what the package does, with code
* `ddp-losses explain migrate`: recipes for those who come from another host or library
* `ddp-losses explain GlobalBatchLoss`: a public name, with its arguments, what it sends and an example
* `ddp-losses explain F24`: one fault; checks, audits and errors name it
* `ddp-losses explain --all`: all known faults, by how they show
* `ddp-losses explain security`: what is trusted, and what is not
* `ddp-losses explain changelog`: what has changed
* `ddp-losses explain citation`: how to cite

Any other words are searched for: `ddp-losses explain loss is nan`.
"""

_TABLE = re.compile(r"(?:^\|.+\n)+", re.MULTILINE)


def _table_as_list(table: re.Match[str]) -> str:
    """Return a wide table as a list with an entry for each row, because columns narrower than a call would break it inside a word."""
    lines = table[0].splitlines()
    if max(map(len, lines)) < _WIDEST:
        return table[0]
    (_, *heads), _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    entries = []
    for name, *cells in rows:
        entries += [f"* **{name}**", *(f"  * {head}: {cell}" for head, cell in zip(heads, cells, strict=True))]
    return "\n".join(entries) + "\n"


def run_explain(arguments: Sequence[str], console: Console | None = None) -> int:
    """Show a page, or the best matching pages for the words, and return the exit status: 1 if there is none.

    Args:
        arguments: Arguments after ``ddp-losses explain``.
        console: Console of the page. Default: standard output.
    """
    parser = argparse.ArgumentParser(prog="ddp-losses explain", description="The manual in the terminal.")
    topics = (
        "a fault (F24), a symptom (hang), a public name (GlobalBatchLoss), a host or peer (torchrun), readers, migrate"
    )
    parser.add_argument("topic", nargs="*", help=topics)
    parser.add_argument("--all", action="store_true", help="all known faults, by how they show")
    parser.add_argument("--save", metavar="FILE", help="write the page's code to a new file: .py, .yaml or .sh")
    given = parser.parse_args(arguments)
    # find the page
    found = find_page(given.topic) if given.topic else overview()
    if given.all:
        found = fault_list()
    words = " ".join(given.topic)
    found = found or search_page(words)
    page = found or f"# No page for “{words}”\n\n{overview().partition(chr(10))[2]}"
    # limit the width on the terminal for readability
    console = console or Console()
    if given.save is not None:
        save_code(page, Path(given.save))
        console.print(f"Saved to {given.save}: the code of `ddp-losses explain {words}`.", highlight=False)
        return 0
    show(page, console)
    return int(found is None)


def show(page: str, console: Console) -> None:
    """Print a page. Text is wrapped, and lines of code are not, so that a copy of them runs whatever the width.

    Args:
        page: Markdown.
        console: Where to print.
    """
    width = min(console.width, _WIDEST)
    end = 0
    for block in _FENCED.finditer(page):
        console.print(Markdown(_TABLE.sub(_table_as_list, page[end : block.start()])), width=width)
        syntax = Syntax("", block["language"] or "text", theme="ansi_dark", background_color="default")
        code = syntax.highlight(block["code"].rstrip())
        code.rstrip()
        console.print("", code, "", sep="\n", soft_wrap=True)
        end = block.end()
    console.print(Markdown(_TABLE.sub(_table_as_list, page[end:])), width=width)


def save_code(page: str, file: Path) -> None:
    """Write the code of a page to a new file, with the text before each block as a comment. For a recipe, only the part for this package.

    Args:
        page: Markdown.
        file: Its ending determines the language.

    Raises:
        ConfigurationError: An ending without a block of its language on the page, or a file that already exists.
    """
    part = page.partition(_OURS)[2].partition("\n## ")[0] or page
    blocks = list(_BLOCK.finditer(part))
    endings = {_ENDINGS.get(block["language"]) for block in blocks} - {None}
    expected = ", ".join(sorted(map(str, endings))) or "no file: the page has no code"
    expect(file.suffix in endings, "--save: ending", expected=expected, got=file.name, fix="Choose another ending.")
    expect(
        not file.exists(), "--save", expected="a new file", got=f"{file}, which is there", fix="Choose another name."
    )
    written, last = [], 0
    for block in blocks:
        if _ENDINGS.get(block["language"]) == file.suffix:
            text = part[last : block.start()].strip()
            written += [f"# {line}".rstrip() for line in text.splitlines()]
            written.append(f"{block['code']}\n")
        last = block.end()
    file.write_text("\n".join(written))


def find_page(topic: Sequence[str]) -> str | None:
    """Return the page of a topic, ignoring case, or None.

    Args:
        topic: The words of the command line.
    """
    first, *peer = topic
    wanted = {_letters(name): text for name, text in recipes().items()}
    if first.lower() == "migrate":
        return wanted.get(_letters(" ".join(peer))) if peer else recipe_list()
    if peer:
        return None
    pages = {_letters(name): text for name, text in (about() | readers()).items()} | {"readers": reader_list()}
    if _letters(first) in pages:
        return pages[_letters(first)]
    if first.lower() in SYMPTOMS:
        return fault_list(first.lower())
    if first.upper() in FAULTS or first.upper() in UNUSED:
        return fault_page(first.upper())
    return _name_page(first) or wanted.get(_letters(first))


def overview() -> str:
    """Return the first page, which lists all other pages."""
    return _OVERVIEW.replace("SYMPTOMS", commands(SYMPTOMS)).replace(
        "READERS", reader_list().partition("\n\n")[2].strip()
    )


def _name_page(name: str) -> str | None:
    """Return the page of a public name, given as the name only or with any part of its path."""
    wanted = name.removeprefix(f"{PACKAGE}.").lower()
    for dotted, value in public_names().items():
        full = dotted.removeprefix(f"{PACKAGE}.").lower()
        if wanted in (full, full.rpartition(".")[2]):
            return name_page(dotted, value)
    return None


def _letters(name: str) -> str:
    """Return a peer's name without hyphens, underscores and capitals, to match any spelling."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def search_page(text: str) -> str | None:
    """Return the list of the pages that best match some words, with a line for each, or None if no page has any of the words.

    Args:
        text: The words as typed by the user.
    """
    found = search.Index(searched_pages()).best(text)
    if not found:
        return None
    lines = commands({topic: title_of_topic(topic) for topic in found})
    return f"# Pages about “{text}”\n\n{lines}\n\nNot it? `ddp-losses explain --all` lists the known faults.\n"


def searched_pages() -> list[search.Page]:
    """Return every page that a search may lead to: symptoms, faults, recipes, readers, names, and pages about the package."""
    pages = [search.page(key, title, "") for key, title in SYMPTOMS.items()]
    for fault, row in FAULTS.items():
        cases = " ".join(text for templates in row.cases.values() for text in templates.values())
        pages.append(search.page(fault, row.title, f"{fault_page(fault)} {cases}", row.symptom))
    for topic, text in _files_by_topic().items():
        pages.append(search.page(topic, title_of(text), text))
    for dotted, value in public_names().items():
        documented = inspect.getdoc(value) or ""
        pages.append(search.page(dotted.rpartition(".")[2], documented.partition("\n")[0], documented))
    return pages


def _files_by_topic() -> dict[str, str]:
    """Return the text of each searchable page that is a file, by its topic, except two pages that mention every topic."""
    recipe_pages = {f"migrate {name}": text for name, text in recipes().items()}
    others = about()
    del others["changelog"], others["symptoms"]
    return recipe_pages | readers() | others


def title_of_topic(topic: str) -> str:
    """Return the title of the page of a topic."""
    if topic in SYMPTOMS:
        return SYMPTOMS[topic]
    if topic in FAULTS:
        return FAULTS[topic].title
    files = _files_by_topic()
    if topic in files:
        return title_of(files[topic])
    named = {dotted.rpartition(".")[2]: value for dotted, value in public_names().items()}
    return (inspect.getdoc(named[topic]) or "").partition("\n")[0]
