"""All tests of this folder are slow ones where those are asked for: `nox -s slow` runs them with the marked ones of other folders."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("markexpr") != "slow":
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)
