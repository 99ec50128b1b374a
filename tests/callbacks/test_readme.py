"""The README's troubleshooting table has one row for each known fault, and no check claims a fault that is not in the table."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.callbacks.base import DEFAULT_CHECKS

README = Path(__file__).parents[2] / "README.md"
ROW = re.compile(r"^\| (F\d\d) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_fault_has_a_row() -> None:
    rows = {row[0]: row for row in ROW.findall(README.read_text())}
    assert sorted(rows) == sorted({fault for fault in FAULTS if fault[0] == "F"} | {"F34"})


def test_checks_claim_known_faults() -> None:
    for check in DEFAULT_CHECKS:
        assert set(check.faults) <= set(FAULTS), check


def test_a_fault_that_no_check_claims_says_why() -> None:
    claimed = {fault for check in DEFAULT_CHECKS for fault in check.faults}
    for fault, _, said_by, _ in ROW.findall(README.read_text()):
        if "not detected" in said_by:
            assert fault not in claimed, fault
            assert len(said_by) > len("not detected: "), fault
