"""The table of faults is whole, and everything that is raised, warned of or diagnosed is in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from string import Formatter

import pytest

import lightning_ddp_losses
from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.errors import DDPLossError
from tests.doors import DEFAULT_CHECKS, FAULT_OF_CUT, FAULTS_AFTER_WRAP, FOLLOWING, SYMPTOMS, UNUSED
from tests.processes import run_python

ROOT = Path(lightning_ddp_losses.__file__).parent
ID = re.compile(r"F\d\d")
ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+")
WORDS = {fault for fault in FAULTS if not ID.fullmatch(fault)}


def ids_in(folder: str) -> dict[str, set[str]]:
    """By file, the ids that stand in its code as texts of their own."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        ids = {text for text in texts if isinstance(text, str) and (ID.fullmatch(text) or text in WORDS)}
        if ids:
            found[path.name] = ids
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_has_all_fields(fault: str) -> None:
    row = FAULTS[fault]
    assert row.severity in ("error", "warning", "note")
    assert row.seen_as in SYMPTOMS
    for text in (row.title, row.symptom, row.effect, row.found_by, row.fix):
        assert len(text) > 8
    for text in (row.symptom, row.effect, row.fix):
        assert text.rstrip("`")[-1] in ".)!", text
    # code comes in pairs, and can be read
    assert bool(row.before) == bool(row.after)
    assert row.before != row.after or not row.before
    for code in (row.before, row.after):
        inside = "\n".join(f"    {line}" for line in code.splitlines()) or "    pass"
        ast.parse(f"def step():\n{inside}\n")
    # each report has an address; anything else says what was measured, or where it is written
    assert row.evidence
    for text, link in zip(row.evidence, row.links(), strict=True):
        assert ("#" in text) == bool(ADDRESS.fullmatch(link)), link
        assert "#" in text or ": " in text, text


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cases_of_a_row_can_be_filled_in(fault: str) -> None:
    for case, templates in FAULTS[fault].cases.items():
        assert templates
        fields = {name: 1 for text in templates.values() for _, name, _, _ in Formatter().parse(text) if name}
        explained = FAULTS[fault].explain(case, **fields)
        assert explained.what
        assert explained.fix
        for name, text in templates.items():
            assert getattr(explained, name) == text.format(**fields)


@pytest.mark.slow
def test_the_table_is_read_when_a_fault_is_looked_up() -> None:
    read = "print(faults._sections.cache_info().currsize)"
    code = f"import lightning_ddp_losses; from lightning_ddp_losses.core import faults; {read}; faults.FAULTS['F24']; {read}"
    assert run_python("-c", code).stdout.split() == ["0", "1"]


def test_the_numbers_have_no_gap_without_a_word() -> None:
    numbers = {int(fault[1:]) for fault in FAULTS if fault not in WORDS}
    unused = {int(fault[1:]) for fault in UNUSED}
    assert sorted(numbers | unused) == list(range(1, max(numbers) + 1))
    assert not numbers & unused
    assert all(UNUSED.values())


def test_every_symptom_has_a_fault() -> None:
    assert {row.seen_as for row in FAULTS.values()} == set(SYMPTOMS)


@pytest.mark.parametrize("check", DEFAULT_CHECKS, ids=lambda check: check.__name__)
def test_the_table_names_the_check_that_finds_a_fault(check: type) -> None:
    faults = set(check.faults)  # type: ignore[attr-defined]
    assert faults <= set(FAULTS)
    unnamed = [fault for fault in faults if check.__name__ not in FAULTS[fault].found_by]
    assert not unnamed, f"{check.__name__} finds them, and the table does not say so"
    # and claims no more of it; what is as F07 is raised under that name
    named = {
        fault for fault, row in FAULTS.items() if f"`{check.__name__}`" in row.found_by and " as F" not in row.found_by
    }
    without_finding = {"F57", "TWICE"}  # a figure that is shown, and a note of no number
    assert named - without_finding <= faults, f"the table says that {check.__name__} finds them"


def test_what_the_code_raises_is_in_the_table() -> None:
    for folder in ("callbacks", "audit", "strategies", "cli"):
        for name, ids in ids_in(folder).items():
            assert ids <= set(FAULTS), f"{folder}/{name}"
    assert {fault for lead in FOLLOWING.values() for fault in lead} | set(FOLLOWING) <= set(FAULTS)


def test_the_table_says_what_an_audit_finds() -> None:
    found = {*FAULTS_AFTER_WRAP.values(), *FAULT_OF_CUT.values()}.union(*ids_in("audit").values())
    unnamed = [fault for fault in sorted(found) if "ddp-losses audit" not in FAULTS[fault].found_by]
    assert not unnamed
    # what is said to be found under another id
    claimed = {fault for fault, row in FAULTS.items() if "ddp-losses audit" in row.found_by}
    elsewhere = {fault for fault in claimed if re.search(r"audit`[^.;]* as F\d\d", FAULTS[fault].found_by)}
    elsewhere |= {fault for fault in claimed if "audit` (as F" in FAULTS[fault].found_by}
    in_sentences = {"F35", "F38"}  # of a run that failed
    by_shared_rules = set(re.findall(r"\bF\d\d\b", (ROOT / "core" / "fault_rules.py").read_text()))
    assert claimed - found - elsewhere - in_sentences - by_shared_rules == set()


def test_a_fault_that_nobody_finds_says_why() -> None:
    for fault, row in FAULTS.items():
        if row.found_by.startswith("not detected"):
            assert len(row.found_by) > len("not detected: "), fault
            assert not [check for check in DEFAULT_CHECKS if fault in check.faults], fault


def test_errors_with_a_page_name_it() -> None:
    pages = {cls.__name__: cls.page for cls in _subclasses(DDPLossError) if cls.page in FAULTS}
    by_name = {"HiddenLossError": "F02", "LossCallError": "F37", "RankMismatchError": "F47", "PeerError": "F42"}
    assert pages == {**by_name, "TooFewValuesError": "F62"}


def _subclasses(cls: type[DDPLossError]) -> list[type[DDPLossError]]:
    ours = [each for each in cls.__subclasses__() if each.__module__.startswith("lightning_ddp_losses")]
    return [*ours, *(below for each in ours for below in _subclasses(each))]
