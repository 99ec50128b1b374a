"""Reads the table of known faults, ``faults.yaml``: symptom, effect on training, detection, and fix.

It is the ONLY table of explanations: ``ddp-losses explain F24``, the messages of checks, the diagnoses of the audit and the manual show
its texts. An *error* makes ranks train something different from one process, or ends in a hang. A *warning* is likely a mistake but may
be intended. A *note* is for information. A healthy run does not have errors or warnings.

The file is read when the first fault is looked up, not on import. A check or a rule that finds a fault in its own way has a *case* in
the fault's row: templates of texts with named fields, which ``Fault.explain`` fills in::

    FAULTS["F13"].explain("spread", others="`loss.W`").fix
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

RowT = TypeVar("RowT")
Severity: TypeAlias = Literal["error", "warning", "note"]
_FILE = Path(__file__).parents[1] / "faults.yaml"
_GITHUB = "https://github.com"


class Explanation(NamedTuple):
    """Texts about one finding or diagnosis of a fault.

    Attributes:
        what: Sentence or title that names it.
        expected: Healthy state.
        evidence: Measurements that show it.
        fix: Advice, as a sentence.
        confirmed: Comparison or run that confirms it. Empty if only a pattern was found.
    """

    what: str
    expected: str
    evidence: str
    fix: str
    confirmed: str = ""


class Fault(NamedTuple):
    """One known way in which training goes wrong.

    Attributes:
        severity: Severity of its findings.
        seen_as: Group of symptoms that it belongs to, a key of ``SYMPTOMS``.
        title: Name in a few words.
        symptom: First sign of it for a user who is not aware of it.
        effect: Effect on training, and the reason.
        found_by: Part of this package that finds it, and when. ``not detected: ...`` with the reason if none does.
        fix: Advice, as a sentence.
        evidence: Reports of users, ``owner/repository#number`` on GitHub, and our own measurements (``measured: ...``).
        before: Code that has the fault, if code shows it.
        after: The same code without it.
        brings: Faults that follow from it later in a run.
        cases: Templates of the texts of one way to find it, by the name of that way.
    """

    severity: Severity
    seen_as: str
    title: str
    symptom: str
    effect: str
    found_by: str
    fix: str
    evidence: tuple[str, ...]
    before: str = ""
    after: str = ""
    brings: tuple[str, ...] | None = None
    cases: Mapping[str, Mapping[str, str]] = {}

    def explain(self, case: str = "", **fields: object) -> Explanation:
        """Return the texts of one case with its fields filled in, with the fault's own title and fix if the case does not define them.

        Args:
            case: Name of the case. If empty, the fault itself.
            **fields: Values of the fields that its templates name.
        """
        texts = {"what": self.title, "expected": "", "evidence": "", "fix": self.fix}
        if case:
            texts |= {name: template.format(**fields) for name, template in self.cases[case].items()}
        return Explanation(**texts)

    def links(self) -> list[str]:
        """Return the evidence with an address for each report. GitHub redirects if the number belongs to a pull request."""
        found = []
        for each in self.evidence:
            repository, _, number = each.partition("#")
            found.append(f"{_GITHUB}/{repository}/issues/{number}" if number.isdigit() else each)
        return found


@functools.cache
def _sections() -> dict[str, dict[str, Any]]:
    """Return the content of the file."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if PyYAML was built with it
    return cast("dict[str, dict[str, Any]]", yaml.load(_FILE.read_bytes(), loader))


class _LazyTable(Mapping[str, RowT]):
    """A mapping that is filled on first use."""

    def __init__(self, fill: Callable[[], dict[str, RowT]]) -> None:
        self._fill = functools.cache(fill)

    def __getitem__(self, key: str) -> RowT:
        return self._fill()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fill())

    def __len__(self) -> int:
        return len(self._fill())


def _read_faults() -> dict[str, Fault]:
    faults = {}
    for name, row in _sections()["faults"].items():
        faults[name] = Fault(**row)._replace(evidence=tuple(row["evidence"]))
    return faults


def _read_following() -> dict[str, frozenset[str]]:
    return {name: frozenset({name, *fault.brings}) for name, fault in FAULTS.items() if fault.brings is not None}


SYMPTOMS: Mapping[str, str] = _LazyTable(lambda: _sections()["symptoms"])
"""First signs of a fault, by the key that its row contains, in the order in which they are listed."""
UNUSED: Mapping[str, str] = _LazyTable(lambda: _sections()["unused"])
"""Unassigned fault numbers, and why."""
FAULTS: Mapping[str, Fault] = _LazyTable(_read_faults)
"""The table, by id."""
FOLLOWING: Mapping[str, frozenset[str]] = _LazyTable(_read_following)
"""By fault, the faults that follow from it, including the fault itself in another place."""
