"""`ddp-losses certify`: the certificate of a loss in a shell, its exit status, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lightning_ddp_losses.cli import main, manual
from tests.processes import ROOT

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


def takes_rows(embeddings, labels, *, margin, scale=2.0):
    return embeddings.mean()


def a_list():
    return [torch.nn.MSELoss(), torch.randn(8, 2), torch.randn(8, 2)]


def rows_first():
    return torch.randn(8, 2), torch.nn.MSELoss()


class Loss(torch.nn.Module):
    pass


loss = torch.nn.MSELoss()
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


TUPLE = "expected a function without arguments that returns a tuple of the loss and an example, got "


@pytest.mark.parametrize(
    ("place", "texts"),
    [
        ("{}", ["expected my_module:name, got {}", "Write {}:my_function: a colon"]),
        ("{}.right", ["expected my_module:name", "Write {}:right: a colon"]),
        ("{}.py:right", ["expected my_module:name", "Write {}:right: a colon"]),
        ("{}:nothing", ["expected nothing in {}", "Name something that {} defines."]),
        ("{}:rihgt", ["expected rihgt in {}", "Did you mean {}:right?"]),
        (
            "no_such_module:right",
            ["expected a module no_such_module, got no such module in", "Run the command in the folder of"],
        ),
        (
            "imports_nothing:f",
            ["expected a module imports_nothing that can be imported", "ModuleNotFoundError: No module named "],
        ),
        ("imports_nothing:f", ["imports_nothing.py:2", 'Mend that first: python -c "import imports_nothing"']),
        ("half_written:f", ["SyntaxError", "(half_written.py, line 1)"]),
        ("{}:takes_rows", [TUPLE + "{}:takes_rows, which needs the arguments embeddings, labels, margin"]),
        ("{}:takes_rows", ["return takes_rows, torch.randn(8, 16)", "Then run: ddp-losses certify {}:example"]),
        ("{}:Loss", [TUPLE + "the class {}:Loss", "return Loss(), torch.randn(8, 16)"]),
        ("{}:loss", [TUPLE + "an object of class MSELoss", "return loss, torch.randn(8, 16)"]),
        ("{}:no_example", [TUPLE + "MSELoss", "return torch.nn.CrossEntropyLoss(), torch.randn(8, 16)"]),
        ("{}:a_list", [TUPLE + "a list of MSELoss, Tensor, Tensor"]),
        ("{}:rows_first", [TUPLE + "a tuple of Tensor, MSELoss"]),
    ],
)
def test_what_cannot_run_says_what_is_expected_and_what_to_do(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, texts: list[str]
) -> None:
    Path("imports_nothing.py").write_text("import torch\nimport no_such_package\n")
    Path("half_written.py").write_text("def f(:\n")
    assert status_of(monkeypatch, place.format(module)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    for text in texts:
        assert text.format(module) in error, error


def test_an_error_of_the_users_function_is_shown_with_its_lines(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, f"{module}:fails") == 2
    error = capsys.readouterr().err
    assert "ValueError: no data" in error
    assert f"{module}.py" in error


def test_the_function_of_the_advice_can_be_certified(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, f"{module}:no_example") == 2
    lines = capsys.readouterr().err.splitlines()
    begin = lines.index("  import torch")
    Path("advised.py").write_text("\n".join(line.removeprefix("  ") for line in lines[begin : begin + 3]))
    assert status_of(monkeypatch, "advised:example") == 0


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("shown_on", ["certificates", "README.md"])
def test_the_example_of_three_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shown_on: str
) -> None:
    text = (ROOT / shown_on).read_text() if shown_on == "README.md" else manual.about()[shown_on]
    blocks = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def example" in code]
    (code,) = blocks
    command, *lines = code.splitlines()
    assert len([line for line in lines if line]) == 3
    (file, module, function) = re.fullmatch(r"# (\w+\.py); then: ddp-losses certify (\w+):(\w+)", command).groups()  # type: ignore[union-attr]
    Path(file).write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert status_of(monkeypatch, f"{module}:{function}") == 0
    assert capsys.readouterr().out.startswith("Right under plain DDP")
    monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_page_and_its_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = manual.find_page(["certificates"])
    assert page is not None
    assert manual.find_page(["certify"]) is not None
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    file = tmp_path / "page.py"
    file.write_text(code)
    exec(compile(code, str(file), "exec"), {})
    assert "page.py:7: return (mean**2).sum()" in capsys.readouterr().out
