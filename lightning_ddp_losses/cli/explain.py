"""`ddp-losses explain TOPIC`: the manual in the terminal.

A topic is a known fault (``F24``), a public name (``GlobalBatchLoss``), or ``migrate`` with a peer's name; ``--all`` is the table of
faults by how they show. What is no topic is searched for: names like it, and faults that speak of it.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from rich.console import Console
from rich.markdown import Markdown

from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.core.faults import FAULTS, UNUSED

_WIDEST = 110  # characters; longer lines are hard to read
_MOST_MATCHES = 8
_SECURITY = "security"
_OVERVIEW = """# The manual

* `ddp-losses explain --all`: the known faults, by how they show
* `ddp-losses explain F24`: one fault; checks, audits and errors name it
* `ddp-losses explain GlobalBatchLoss`: a public name, with its arguments, what it sends and an example
* `ddp-losses explain migrate`: recipes for those who come from another library, `ddp-losses explain migrate pml` one of them
* `ddp-losses explain changelog`, `ddp-losses explain citation`
* `ddp-losses explain security`: what is trusted, and what is not

Any other word is searched for: `ddp-losses explain gather`.
"""


def run_explain(arguments: Sequence[str], console: Console | None = None) -> int:
    """Show a page; return the exit status: 0, or 1 where there is no such page.

    Args:
        arguments: What follows ``ddp-losses explain``.
        console: Where it is shown; None: standard output.
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
    console.print(Markdown(page), width=min(console.width, _WIDEST))
    return int(found is None)


def find_page(topic: Sequence[str]) -> str | None:
    """Return the page of a topic, in whatever case it is written; None where there is none.

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
    """Return a page for what is no topic: names like it, and faults and recipes that speak of it.

    Args:
        text: As it was written.
    """
    names = {dotted.rpartition(".")[2]: dotted for dotted in manual.public_names()}
    recipes = {f"migrate {name}": text for name, text in manual.recipes().items()}
    peers = [name.removeprefix("migrate ") for name in recipes]
    topics = {topic.lower(): topic for topic in (*FAULTS, *names, *recipes, *peers)}
    near = [topics[match] for match in difflib.get_close_matches(text.lower(), topics, n=_MOST_MATCHES, cutoff=0.6)]
    near = [f"migrate {match}" if f"migrate {match}" in recipes else match for match in near]
    near += _speaking_of(text, {name: name for name in names})
    lines = [f"# No page for “{text}”"]
    lines += [f"* `ddp-losses explain {topic}`" for topic in dict.fromkeys(near)]
    # faults and recipes by their words, also where a letter is missing
    titles = {fault: f"{row.title} {row.symptom} {row.effect}" for fault, row in FAULTS.items()}
    vocabulary = set(re.findall(r"[a-z_]{4,}", " ".join([*titles.values(), *recipes.values()]).lower()))
    spelt = [difflib.get_close_matches(word, vocabulary, n=1, cutoff=0.8) for word in text.lower().split()]
    if text.lower() not in " ".join(titles.values()).lower() and all(spelt):
        text = " ".join(match for (match,) in spelt)
    lines += [f"* `ddp-losses explain {fault}`: {FAULTS[fault].title}" for fault in _speaking_of(text, titles)]
    spoken = _speaking_of(text, recipes)
    lines += [f"* `ddp-losses explain {name}`: {manual.title_of(recipes[name])}" for name in spoken]
    if len(lines) == 1:
        return f"{lines[0]}\n\n{_OVERVIEW.partition(chr(10))[2]}"
    return "\n".join([lines[0], "", "Near to it:", "", *dict.fromkeys(lines[1:])])


def _speaking_of(text: str, texts: dict[str, str]) -> list[str]:
    """Return the first keys of those texts that hold all words."""
    words = text.lower().split()
    found = [key for key, value in texts.items() if all(word in value.lower() for word in words)]
    return found[:_MOST_MATCHES]
