"""The report as text, JSON, picture and page; the size of what an audit holds."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import AuditReport, DDPLossStrategy, audit
from lightning_ddp_losses.callbacks import FAULTS
from tests.audit import modules as m
from tests.audit.modules import Module, even, learned
from tests.doors import ComparedRow, Diagnosis, advice, draw_audit


@pytest.fixture(scope="module")
def wrong() -> AuditReport:
    return audit(Module(m.PMLWrapper(learned())), even(), strategy="ddp")


def test_the_worst_comes_first_and_a_narrow_terminal_will_do(wrong: AuditReport) -> None:
    assert wrong.worst()[0].parameter == "loss.loss.W"
    assert "Different: 2 ranks under ddp" in str(wrong)
    console = Console(file=StringIO(), width=80, color_system=None)
    console.print(wrong)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.index("loss.loss.W ") < text.index("encoder.0.weight ")


def test_the_error_of_a_gradient_that_is_zero_is_not_shown() -> None:
    wrong = ComparedRow(1, "w", "encoder", "gradient", 2.0, 1.0, 1.0, 1e-9, True, 0, "wrong scale")
    zero, exact = replace(wrong, error=0.5, verdict="zero"), replace(wrong, error=2e-10, verdict="exact")
    for others, shown in (([zero, zero], "-"), ([zero, exact], "2.0e-10")):
        text = str(AuditReport(rows=[wrong] * 12 + others, updates=[], losses=[], diagnoses=[], notes=[], equal=False))
        (row,) = [line.split() for line in text.splitlines() if "... 2 more" in line]
        assert row == ["...", "2", "more", shown, "exact"]


def test_json_holds_everything(wrong: AuditReport, tmp_path: Path) -> None:
    text = wrong.to_json(tmp_path / "new" / "report.json")
    found = json.loads((tmp_path / "new" / "report.json").read_text())
    assert json.loads(text) == found
    assert set(found) == {
        "equal",
        "rows",
        "updates",
        "losses",
        "diagnoses",
        "notes",
        "settings",
        "accumulation",
        "loss_verdicts",
    }
    assert len(found["rows"]) == 5 * 3
    (row,) = [row for row in found["rows"] if row["step"] == 1 and row["parameter"] == "loss.loss.W"]
    assert row["ratio"] == pytest.approx(2.0, rel=1e-4)
    assert found["losses"][0]["one"] == pytest.approx(found["losses"][0]["mean"] / 2, rel=1e-5)


class Balanced(HTMLParser):  # every tag that opens closes
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_escapes_what_it_shows(wrong: AuditReport, tmp_path: Path) -> None:
    wrong.settings["aliases"] = {"encoder.0.bias": "<script>alert(1)</script>"}
    wrong.to_html(tmp_path / "report.html")
    wrong.settings["aliases"] = {}
    text = (tmp_path / "report.html").read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert {"pre", "img", "h1"} <= parser.seen
    assert "script" not in parser.seen
    assert "data:image/png;base64," in text
    assert "http" not in text.replace("https://", "http"), "a page of its own"
    assert "GlobalBatchLoss(loss)" in text


def test_pictures_of_wrong_and_empty_reports(wrong: AuditReport, tmp_path: Path) -> None:
    wrong.plot(tmp_path / "a" / "ratios.png")
    assert (tmp_path / "a" / "ratios.png").read_bytes().startswith(b"\x89PNG")
    AuditReport(True, [], [], [], [], []).plot(tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()


@pytest.mark.parametrize(("owner", "told"), [("encoder", False), ("loss", True)])
def test_the_picture_explains_colours_that_are_there(owner: str, told: bool) -> None:
    row = ComparedRow(1, "weight", owner, "gradient", 2.0, 1.0, 1.0, 1e-9, True, 0, "wrong scale")
    (axes,) = draw_audit(AuditReport(False, [row], [], [], [], [])).axes
    assert ("brown" in axes.get_title()) == told
    assert (axes.get_xticklabels()[0].get_color() == "tab:brown") == told


# ---------------------------------------------------------------------- memory

SIZE = 12_000_000  # parameters: 46 MiB


class Large(Module):  # one large parameter; writes the largest size of its process
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.table = nn.Parameter(torch.ones(SIZE // 4000, 4000))

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 0:
            self.start = resident()
        return super().training_step(batch, index) + (self.table[0] * batch[0].mean()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_end(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (self.folder / f"{os.getpid()}").write_text(f"{m.world()} {peak}")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_no_process_holds_more_than_three_times_the_parameters(tmp_path: Path) -> None:
    assert audit(Module(), even(), strategy="ddp", steps=1).equal  # what is loaded at first use is no part of it
    before = resident()
    module = Large(tmp_path)
    bytes_of_parameters = 4 * SIZE
    data = DataLoader(list(zip(*m.rows(8).tensors, strict=True)), batch_size=2)
    report = audit(module, data, strategy="ddp", steps=1)
    assert report.equal, str(report)
    found = [path.read_text().split() for path in tmp_path.iterdir()]
    assert {world for world, _ in found} == {"1", "2"}
    extra = [int(peak) - before for _, peak in found]
    assert max(extra) <= 3.5 * bytes_of_parameters, [each / bytes_of_parameters for each in extra]
    assert resident() - before <= 3.0 * bytes_of_parameters, (resident() - before) / bytes_of_parameters


def test_a_notebook_shows_a_report_in_short() -> None:
    found = Diagnosis("F07", "a <dtype>", "seen.", "Do this.")
    shown = AuditReport(False, [], [], [], [found], [], {"devices": 2, "steps": 3})._repr_html_()
    assert shown.count("data:image/png;base64,") == 1
    short, rest = shown.split("<details>")
    assert "Different: 2 ranks" in short
    assert "a &lt;dtype&gt; (F07): Do this." in short
    assert "Diagnosis 1: a &lt;dtype&gt;" in rest


def test_advice_does_not_name_the_strategy_that_runs() -> None:
    fix = FAULTS["F07"].explain("audit", name="w", event="changed").fix
    assert fix == advice(fix, "ddp")
    assert fix.endswith("; or use strategy='ddp_losses'.")
    for ours in ("ddp_losses_find_unused_parameters_true", DDPLossStrategy()):
        assert advice(fix, ours).endswith("not the weight.")
    changed = FAULTS["F78"].explain("changed", name="w", event="changed").fix
    assert advice(changed, "ddp_losses").startswith("Run the loss outside autocast")
