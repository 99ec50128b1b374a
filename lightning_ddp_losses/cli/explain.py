"""`ddp-losses explain TOPIC`: the manual in the terminal.

A topic is a known fault (``F24``), a public name (``GlobalBatchLoss``), or ``migrate`` with a peer's name. ``--all`` is the table of
faults by how they show. Any other word is searched for: similar names, and faults that mention it.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Sequence
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table

from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.core.faults import FAULTS, UNUSED

_WIDEST = 110  # characters, as longer lines are hard to read
_MOST_MATCHES = 8
_SECURITY = "security"
_OVERVIEW = """# The manual

* `ddp-losses explain loop`: is my loop right? N ranks of any training loop against one process
* `ddp-losses explain losses`: every loss by its usual name, with the call and its cost
* `ddp-losses explain parts`: a tour of what the package does, with code
* `ddp-losses explain --all`: the known faults, by how they show
* `ddp-losses explain F24`: one fault; checks, audits and errors name it
* `ddp-losses explain GlobalBatchLoss`: a public name, with its arguments, what it sends and an example
* `ddp-losses explain migrate`: recipes for those who come from another library, `ddp-losses explain migrate pml` one of them
* `ddp-losses explain changelog`, `ddp-losses explain citation`
* `ddp-losses explain security`: what is trusted, and what is not

Any other words are searched for: `ddp-losses explain loss is nan`.
"""
_LITTLE = re.compile("a|an|and|are|at|by|do|does|i|in|is|it|my|not|of|on|or|the|to|why|with")
# words that no page uses, and the topics that serve them
_OWN_FORMULA = ("GlobalBatchLoss", "DifferentiableMetric")
_MEANT = {
    **dict.fromkeys(("dice", "iou", "jaccard", "lovasz", "tversky", "segmentation"), _OWN_FORMULA),
    **dict.fromkeys(("tokens", "masked"), ("global_mean", "migrate token_means")),
    **dict.fromkeys(("moe", "experts", "router", "balancing"), ("global_mean", "migrate moe")),
    **dict.fromkeys(("distillation", "teacher", "student"), ("global_mean", "migrate distillation")),
    **dict.fromkeys(
        ("barlow", "vicreg", "sinkhorn", "swav", "dino", "byol", "simclr", "moco", "ema"), ("migrate lightly",)
    ),
    **dict.fromkeys(("clip", "siglip"), ("ClipLoss", "SigLipLoss", "migrate open_clip")),
    **dict.fromkeys(("hang", "deadlock", "stuck", "freeze"), ("F32",)),
    "nan": ("F79",),
}


class _FoldedTable(TableElement):
    """A table whose long words go on in the next line. rich would cut them off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                column.overflow = "fold"
            yield table


class _Page(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _FoldedTable}


def run_explain(arguments: Sequence[str], console: Console | None = None) -> int:
    """Show a page and return the exit status: 0, or 1 if there is no such page.

    Args:
        arguments: Arguments after ``ddp-losses explain``.
        console: Console of the page. Default: standard output.
    """
    parser = argparse.ArgumentParser(prog="ddp-losses explain", description="The manual in the terminal.")
    topics = "a fault (F24), a public name (GlobalBatchLoss), migrate, migrate PEER"
    parser.add_argument("topic", nargs="*", help=topics)
    parser.add_argument("--all", action="store_true", help="all known faults, by how they show")
    given = parser.parse_args(arguments)
    # which page
    found = find_page(given.topic) if given.topic else _OVERVIEW
    if given.all:
        found = manual.fault_table()
    page = found or not_found(" ".join(given.topic))
    # on the terminal, no wider than can be read
    console = console or Console()
    console.print(_Page(page), width=min(console.width, _WIDEST))
    return int(found is None)


def find_page(topic: Sequence[str]) -> str | None:
    """Return the page of a topic in upper or lower case, or None.

    Args:
        topic: The words of the command line.
    """
    first, *peer = topic
    if first.lower() == "migrate":
        peers = {_letters(name): text for name, text in manual.recipes().items()}
        return peers.get(_letters(" ".join(peer))) if peer else manual.recipe_list()
    if peer:
        return None
    pages = manual.about() | {_SECURITY: manual.recipes()[_SECURITY]}
    if first.lower() in pages:
        return pages[first.lower()]
    if first.upper() in FAULTS or first.upper() in UNUSED:
        return manual.fault_page(first.upper())
    return _name_page(first)


def _name_page(name: str) -> str | None:
    """Return the page of a public name, by itself or with any part of its path."""
    wanted = name.removeprefix(f"{manual.PACKAGE}.").lower()
    for dotted, value in manual.public_names().items():
        full = dotted.removeprefix(f"{manual.PACKAGE}.").lower()
        if wanted in (full, full.rpartition(".")[2]):
            return manual.name_page(dotted, value)
    return None


def _letters(name: str) -> str:
    """Return a peer's name however it is written: without hyphens, underscores and capitals."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def not_found(text: str) -> str:
    """Return a page for words that are no topic: similar names, and faults, names and recipes that contain the words.

    Args:
        text: The words, as the user typed them.
    """
    values = {dotted.rpartition(".")[2]: value for dotted, value in manual.public_names().items()}
    recipes = {f"migrate {name}": page for name, page in manual.recipes().items()}
    peers = {name.removeprefix("migrate "): name for name in recipes}
    topics = {topic.lower(): topic for topic in (*FAULTS, *values, *recipes)} | peers
    # other words for it
    words = _words(text)
    meant = {stem: found for word, found in _MEANT.items() for stem in _words(word)}
    near = [topic for word in words for topic in meant.get(word, ())]
    near += [topics[match] for match in difflib.get_close_matches(text.lower(), topics, n=_MOST_MATCHES, cutoff=0.7)]
    # by whole words, also if a letter is missing
    pages = {fault: f"{row.title} {row.symptom} {row.effect} {row.fix}" for fault, row in FAULTS.items()}
    pages |= {name: f"{name} {inspect.getdoc(value)}" for name, value in values.items()} | recipes
    indexed = {topic: set(_words(page)) for topic, page in pages.items()}
    vocabulary = set().union(*indexed.values())
    spelt = [difflib.get_close_matches(word, vocabulary, n=1, cutoff=0.8) for word in words]
    if words and not near:
        words = [word if word in vocabulary else (match or [word])[0] for word, match in zip(words, spelt, strict=True)]
    speaking = [topic for topic, found in indexed.items() if words and found.issuperset(words)]
    for kind in (FAULTS, recipes, values):
        near += [topic for topic in speaking if topic in kind][:_MOST_MATCHES]
    if not near:
        return f"# No page for “{text}”\n\n{_OVERVIEW.partition(chr(10))[2]}"
    titles = {fault: row.title for fault, row in FAULTS.items()}
    titles |= {name: (inspect.getdoc(value) or "").partition("\n")[0] for name, value in values.items()}
    titles |= {name: manual.title_of(page) for name, page in recipes.items()}
    lines = [f"* `ddp-losses explain {topic}`: {titles[topic]}" for topic in dict.fromkeys(near)]
    return "\n".join([f"# No page for “{text}”", "", "Near to it:", "", *lines])


def _words(text: str) -> list[str]:
    """Return the words of a text without endings and little words, each as it is searched for."""
    found = [word for word in re.findall(r"[a-z0-9]+", text.lower()) if not _LITTLE.fullmatch(word)]
    return [re.sub(r"(?<=[a-z]{3})(?:ings?|ed|e?s|e)$", "", word) for word in found]
