"""Every public name has an example in its docstring, and it runs (those that start processes are read by `tests/audit`)."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch

import lightning_ddp_losses as ddl


@pytest.fixture
def folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For what an example's trainer logs."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, .tensorboardX. has been removed")
@pytest.mark.usefixtures("folder_of_its_own")
@pytest.mark.parametrize("name", ddl.__all__)
def test_a_public_name_has_an_example_that_runs(name: str) -> None:
    known = {each: getattr(ddl, each) for each in ddl.__all__} | {"torch": torch, "nn": torch.nn}
    found = doctest.DocTestFinder(recurse=False).find(getattr(ddl, name), name, module=False, globs=known)
    assert any(test.examples for test in found)
    shown: list[str] = []
    for test in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=shown.append)
    assert "".join(shown) == ""
