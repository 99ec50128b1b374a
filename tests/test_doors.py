"""Tests enter the package by public names, or by the table of `tests/doors.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import doors

HERE = Path(__file__).parent
PUBLIC = {
    *("audit", "callbacks", "cli", "collectives", "demo", "errors", "integrations", "layers", "losses", "metrics"),
    *("microbatch", "randomness", "requirements", "samplers", "sharding", "ssl", "strategies", "testing"),
}


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Modules of the package and of the tests that a file imports names from, and the names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("lightning_ddp_losses", "tests"):
            yield node.module or "", [alias.name for alias in node.names]


def test_every_other_name_comes_through_the_door() -> None:
    past: list[str] = []
    for path in sorted(HERE.rglob("*.py")):
        for module, names in imports(path):
            place = module.split(".")[1:]
            may_be_deep = place[:1] in (["cli"], ["demo"], ["integrations"])
            is_public = not place or (place[0] in PUBLIC and (len(place) == 1 or may_be_deep))
            if module.startswith("lightning_ddp_losses") and not is_public:
                past.append(f"{path.relative_to(HERE)}: {module} {names}")
    assert not past, "import these from tests.doors:\n" + "\n".join(past)


def test_the_table_has_no_name_that_nothing_uses() -> None:
    used = {
        name
        for path in HERE.rglob("*.py")
        for module, names in imports(path)
        if module == "tests.doors"
        for name in names
    }
    assert used == set(doors.INSIDE)
