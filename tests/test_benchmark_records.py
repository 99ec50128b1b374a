"""What benchmarks record and draw: rows that are added replace those of the same job, and every recorded point is drawn."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest

from benchmarks import device_parts, figures, records
from benchmarks.tiled_rows import MEMORY_TABLE, TIME_TABLE
from benchmarks.window import windows_of
from tests import gpu


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    return tmp_path


def timed(loss: str, size: int, ms: float) -> dict[str, Any]:
    return {"table": TIME_TABLE, "loss": loss, "global_batch": size, "ours_ms": ms, "PML exact_ms": ms * 4}


def test_added_rows_replace_those_of_the_same_job() -> None:
    records.write("some", [timed("SupCon", 512, 5.0), timed("SupCon", 4096, 90.0)])
    records.write("some", [timed("SupCon", 512, 6.0), timed("NTXent", 512, 7.0)], add=True)
    found = {(row["loss"], row["global_batch"]): row["ours_ms"] for row in records.read("some")}
    assert found == {("SupCon", 512): 6.0, ("SupCon", 4096): 90.0, ("NTXent", 512): 7.0}
    both = [{**timed("NTXent", 512, ms), "note": ms} for ms in (1.0, 2.0)]  # what a run measured is never dropped
    records.write("some", both, add=True)
    assert sorted(row["ours_ms"] for row in records.read("some")) == [1.0, 2.0, 6.0, 90.0]
    path = records.write("some", [timed("NTXent", 512, 8.0)])
    assert [json.loads(line)["ours_ms"] for line in path.read_text().splitlines()] == [8.0]


def test_a_part_on_a_gpu_that_fails_leaves_its_rows_and_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run_ranks(
        work: Any,
        opens: Any,
        part: str,
        module: str,
        device: str,
        every: int,
        folder: str,
        *,
        world_size: int,
        **_: Any,
    ) -> None:
        for rank in range(world_size):
            row = {"table": "some", "loss": part}
            device_parts.file_of(folder, part, world_size, rank).write_text(json.dumps(row) + "\n")
        if part == "b":
            raise RuntimeError("no answer in time")

    monkeypatch.setattr(device_parts, "run_ranks", run_ranks)
    monkeypatch.setattr(gpu, "PRETENDED_RELEASE", "")
    rows = gpu.main(["--device", "pretend", "--ranks", "2", "--output", str(tmp_path / "rows")])
    found = [f"{row['loss']} {row.get('rank', '')}".strip() for row in rows]
    assert found == ["a", "b 0", "b 1", "c", "e", "e 0", "e 1"]
    assert rows.failed
    assert not rows.recorded
    assert "part b with 2 rank(s) failed: no answer in time" in capsys.readouterr().err


def test_pictures_show_every_recorded_point(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    plot = matplotlib.axes.Axes.plot

    def watched(axis: Any, x: Any, y: Any, **options: Any) -> Any:
        drawn.extend(zip(x, y, strict=True))
        return plot(axis, x, y, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", watched)
    memory = {
        "table": MEMORY_TABLE,
        "loss": "SupCon",
        "who": "open_clip",
        "at_512": 3.0,
        "at_2048": 40.0,
        "at_8192": None,
    }
    records.write("tiled_rows", [timed("SupCon", 512, 5.0), timed("SupCon", 4096, 90.0), memory])
    large = {"usual_ms": 30.0, "ours_ms": 11.0, "usual_peak_MiB": 600.0, "ours_peak_MiB": 50.0}
    records.write("large", [{"ours": "tiles", "size": 1024, **large}, {"ours": "divided", "size": 10_000, **large}])
    figures.draw()
    assert {path.name for path in results.glob("*.png")} == {"batch_time.png", "batch_memory.png", "classes.png"}
    pairs = [(512, 5), (512, 20), (4096, 90), (4096, 360), (512, 3), (2048, 40)]
    assert sorted(drawn) == sorted([*pairs, *[(x, y) for x in (1024, 10_000) for y in (11, 30, 50, 600)]])


def test_windows_are_whole() -> None:
    """Micro-batches of a window add up, fit by fit; one that time cut short is left out."""
    rounds = [(1.0, 2.0, float(10 * number)) for number in range(11)]
    assert windows_of(rounds) == [(4.0, 8.0, 60.0), (4.0, 8.0, 220.0)]


def test_nothing_recorded_draws_nothing(results: Path) -> None:
    figures.draw()
    assert not list(results.iterdir())


def test_no_benchmark_imports_the_tests() -> None:
    """Benchmarks run from an installed package."""
    files = sorted(Path(figures.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            found += [f"{file.name}:{node.lineno}" for name in names if name.partition(".")[0] == "tests"]
    assert not found
