"""`ddp-losses certify`: the certificate of a loss in a shell, its exit status, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_ddp_losses.cli import main, manual

LOSSES = """
import torch


def flops(rows):
    mean = rows.relu().mean(0)
    return (mean**2).sum()


def wrong():
    return flops, torch.randn(8, 4)


def right():
    return torch.nn.MSELoss(), torch.randn(8, 2), torch.randn(8, 2)


def no_example():
    return torch.nn.MSELoss()


def fails():
    raise ValueError("no data")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of losses in the current folder."""
    (tmp_path / "certified_by_command.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    # the command adds the current folder
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "certified_by_command", raising=False)
    return "certified_by_command"


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["ddp-losses", "certify", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


@pytest.mark.parametrize(("function", "status"), [("right", 0), ("wrong", 1)])
def test_status_and_text(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    status: int,
) -> None:
    assert status_of(monkeypatch, f"{module}:{function}") == status
    shown = capsys.readouterr().out
    assert shown.lower().startswith(function)
    assert ("certified_by_command.py:7: return (mean**2).sum()" in shown) == (function == "wrong")
    assert "8 ranks with 8 rows each" in shown


def test_json(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(monkeypatch, f"{module}:wrong", "--json") == 1
    read = json.loads(capsys.readouterr().out)
    assert read["verdict"] == "wrong"
    assert read["reasons"][0]["line"] == 7
    assert read["sent"]["gathered_bytes"] == 8 * 8 * 4 * 4


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("{}", "expected my_module:name"),
        ("{}:nothing", "expected nothing in"),
        ("no_such_module:right", "expected a module no_such_module"),
        ("{}:no_example", "expected a function that returns the loss and its arguments"),
        ("{}:fails", "ValueError: no data"),
    ],
)
def test_what_cannot_run_has_status_2(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, text: str
) -> None:
    assert status_of(monkeypatch, place.format(module)) == 2
    assert text in capsys.readouterr().err


def test_the_page_and_its_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = manual.find_page(["certificates"])
    assert page is not None
    assert manual.find_page(["certify"]) is not None
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "page.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {})
    assert "page.py:7: return (mean**2).sum()" in capsys.readouterr().out
