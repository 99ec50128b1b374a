"""Search for pages by the words that people type.

The index is SQLite's FTS5, from the standard library: words are compared by their stems (Porter), and pages ranked by bm25. A page has four
columns, and a word has more weight in a name, a title or a symptom than in a text. ``words.yaml`` has additional words for the topic of a
page. A word that does not occur in any page is replaced by the most similar one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import yaml

from lightning_ddp_losses.core.faults import SYMPTOMS
from lightning_ddp_losses.errors import ConfigurationError

if TYPE_CHECKING:
    import sqlite3

MOST = 3
"""Maximum number of pages to show."""
WEIGHTS = {"title": 8.0, "words": 8.0, "summary": 4.0, "text": 1.0}
"""bm25 weight of each column. The topic is not searched."""
_LITTLE = """
    a about all am an and are as at be but by can do does for from has have how i if in is it its me my no not of on only or our so that the
    their them there they this to too use using was we what when where which while why will with you your
"""
# these words name the place of a symptom: left out if other words remain
_SCENE = """
    again anymore ddp distributed does doesn even gpu gpus it just multi multiple node nodes program run running several single start t than
    then torchrun train trains training two up nothing
"""
SYMPTOM_FACTOR = 1.8
"""Factor of the rank of a symptom's page, because it lists the pages of its faults."""
_OF_A_SYMPTOM = tuple(symptom for symptom in SYMPTOMS if symptom != "data")  # a word with many other uses
_WORD = re.compile(r"[^\W_]+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FILE = Path(__file__).with_name("words.yaml")


class Page(NamedTuple):
    """A page as indexed by the search.

    Attributes:
        topic: Argument of ``ddp-losses explain``.
        title: Name and title.
        words: Words that people type for it.
        summary: Symptom, or an empty text.
        text: The page.
    """

    topic: str
    title: str
    words: str
    summary: str
    text: str


def page(topic: str, title: str, text: str, summary: str = "") -> Page:
    """Return a page with the words that people type for it. The parts of a name such as ``GlobalBatchLoss`` are also words."""
    named = f"{topic} {_CAPITAL.sub(' ', topic)} {title}"
    return Page(topic, named, typed_words().get(topic, ""), summary, text)


def typed_words() -> dict[str, str]:
    """Return the words that people type, by the topic of the page."""
    found: dict[str, str] = yaml.safe_load(_FILE.read_text())
    return found


class Index:
    """The words of all pages.

    Args:
        pages: All pages.

    Raises:
        ConfigurationError: Python was built without SQLite or without FTS5.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self._table = _empty_table()
        self._table.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?)", pages)
        self._topics = [each.topic for each in pages]
        self._vocabulary = sorted({word for each in pages for word in _words(" ".join(each[1:]))})

    def best(self, typed: str) -> list[str]:
        """Return the topics of the best matching pages, at most ``MOST``, best first.

        Args:
            typed: Words as typed by a user.
        """
        words = dict.fromkeys(word for word in _words(typed) if word not in _LITTLE.split())
        words = dict.fromkeys(word for word in words if word not in _SCENE.split()) or words
        known = [found for found in map(self._known, words) if found]
        # a misspelled name
        named = []
        if len(known) == 1:
            named = [topic for topic in self._topics if topic.lower() == known[0]]
        return list(dict.fromkeys([*named, *self._matches(known)]))[:MOST]

    def _known(self, word: str) -> str:
        """Return the word if it occurs in some page, otherwise the most similar one that does, or an empty text."""
        if self._matches([word]):
            return word
        similar = difflib.get_close_matches(word, self._vocabulary, n=1, cutoff=0.8)
        return similar[0] if similar else ""

    def _matches(self, words: Sequence[str]) -> list[str]:
        """Return the topics of pages with any of the words, by bm25."""
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        # the smallest is the best
        rank = f"bm25(pages, 0.0, {', '.join(map(str, WEIGHTS.values()))})"
        symptoms = ", ".join(f"'{key}'" for key in _OF_A_SYMPTOM)
        factor = f"CASE WHEN topic IN ({symptoms}) THEN {SYMPTOM_FACTOR} ELSE 1.0 END"
        found = self._table.execute(
            f"SELECT topic FROM pages WHERE pages MATCH ? ORDER BY {rank} * {factor} LIMIT {MOST}", (query,)
        )
        return [topic for (topic,) in found]


def _empty_table() -> sqlite3.Connection:
    """Return an in-memory table for pages."""
    columns = "topic UNINDEXED, title, words, summary, text"
    try:
        import sqlite3

        table = sqlite3.connect(":memory:")
        table.execute(f"CREATE VIRTUAL TABLE pages USING fts5({columns}, tokenize='porter')")
    except Exception as error:  # Python without the module, or its library without the extension
        fix = "Name a page: `ddp-losses explain` lists them, and `ddp-losses explain --all` the known faults."
        expected = "Python with SQLite and its FTS5"
        raise ConfigurationError("a search", expected=expected, got=str(error), fix=fix) from error
    return table


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
