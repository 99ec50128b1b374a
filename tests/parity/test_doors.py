"""The doors to a parity: the plugin's fixture, the command, functions of `__main__`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ddp_losses import ConfigurationError
from lightning_ddp_losses.cli import main
from lightning_ddp_losses.testing import RankFailure, Ranks
from tests.parity.loops import batches, encoder, regression, summed

HERE = "tests.parity.loops:"


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LookupError("broken here")


def test_the_fixture_asserts_parity(ddp_ranks: Callable[[int], Ranks]) -> None:
    assert ddp_ranks(3).assert_parity(encoder, regression, batches()).equal
    with pytest.raises(AssertionError, match="F18"):
        ddp_ranks(2).assert_parity(encoder, summed, batches())


def test_the_fixture_runs_functions_on_ranks(ddp_ranks: Callable[[int], Ranks]) -> None:
    assert ddp_ranks(2).run(dist.get_rank) == [0, 1]
    with pytest.raises(RankFailure, match=r"(?s)rank 1: LookupError.*broken here"):
        ddp_ranks(2).run(fail_on_rank_1)
    with pytest.raises(ConfigurationError, match=r"the function.*lambda"):
        ddp_ranks(2).run(lambda: None)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["encoder", "regression", "batches"], 0, "Equal: 2 ranks"),
        (["encoder", "summed", "batches", "--ranks", "3"], 1, "(F18)"),
        (["encoder", "plain_loop", "batches", "--loop", "--wrap", f"{HERE}keeps_buffers"], 0, "Equal"),
        (["encoder", "regression", "batches", "--splits", "7,5"], 1, "(F30)"),
        (["encoder", "regression", "batches", "--steps", "3"], 2, "3 global batches"),
        (["encoder", "no_such_function", "batches"], 2, "no_such_function"),
    ],
)
def test_the_command_shows_the_report(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = [f"{HERE}{name}" for name in arguments[:3]]
    monkeypatch.setattr(sys, "argv", ["ddp-losses", "parity", *functions, *arguments[3:]])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == status
    shown: Any = capsys.readouterr()
    assert words in shown.out + shown.err


def test_what_cannot_be_sent_to_a_rank_is_named(ddp_ranks: Callable[[int], Ranks]) -> None:
    def local() -> None:
        return None

    for what, call in (("the function", (local,)), ("argument 1", (dist.get_rank, 0, local))):
        with pytest.raises(ConfigurationError, match=rf"{what}.*local"):
            ddp_ranks(2).run(*call)


def test_functions_of_main_are_compared(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from lightning_ddp_losses import parity\n"
        "def build(): return torch.nn.Linear(3, 1)\n"
        "report = parity(build, lambda model, x: model(x).square().mean(), [torch.randn(8, 3)])\n"
        "print(report.summary())\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert "Equal: 2 ranks" in found.stdout
