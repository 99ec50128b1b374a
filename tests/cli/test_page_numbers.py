"""Times, memory and counts of the README and on the pages of peers are those recorded; `test_recipes` measures the gradients."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import records
from lightning_ddp_losses.cli import manual
from tests.processes import ROOT


def recorded(benchmark: str, **fields: Any) -> dict[str, Any]:
    (row,) = [row for row in records.read(benchmark) if fields.items() <= row.items()]
    return row


def on_a_gpu(loss: str, size: str, who: str) -> tuple[float, float]:
    """Milliseconds and peak MiB."""
    row = recorded("gpu", loss=loss, size=size, who=who)
    return row["median_ms"], row["peak_mib"]


def times_of_a_gpu(loss: str, size: str, who: str) -> str:
    return "{:.0f} ms and {:,.0f} MiB".format(*on_a_gpu(loss, size, who))


def insightface() -> list[str]:
    row = recorded("large", ours="divided", size=1_000_000)
    ways = ("ours, compiled, products='bf16'", "ours", "torch, float32")
    compiled, eager, plain = (times_of_a_gpu("ArcFace", "3000000 classes x 512", who) for who in ways)
    return [
        f"took {compiled}, {eager} without these two, and {plain} in plain torch",
        f"{row['ratio']:.2f} of the time",
        f"{row['ours_peak_MiB']:.0f} MiB in place of {row['usual_peak_MiB']:,.0f}",
    ]


def open_clip() -> list[str]:
    first, second = (recorded("large", ours="tiles", size=size) for size in (8192, 16384))
    ways = ("ours, compiled, products='auto'", "torch, bf16", "torch, float32")
    compiled, bf16, plain = (times_of_a_gpu("CLIP", "65536 x 768", who) for who in ways)
    return [
        f"took {compiled}",
        f"plain torch took {bf16} in bfloat16",
        f"and {plain} in float32",
        f"{first['ratio']:.2f} of the time and {first['ours_peak_MiB']:.0f} MiB in place of {first['usual_peak_MiB']:,.0f}",
        f"{second['ratio']:.2f} and {second['ours_peak_MiB']:.0f} in place of {second['usual_peak_MiB']:,.0f}",
    ]


def lightly() -> list[str]:
    rows = [recorded("tiled_rows", loss="NTXent", evaluation="tiled, symmetric", global_batch=n) for n in (2048, 16384)]
    return ["{:.2f} to {:.2f} of the time".format(*(row["ours/open_clip"] for row in rows))]


def pml() -> list[str]:
    even, uneven = (
        recorded("parity", who="PML DistributedLossWrapper", ranks=2, batches=batches) for batches in ("even", "uneven")
    )
    ours = [row for row in records.read("parity") if row.get("who") == "GlobalBatchLoss, every exact mode"]
    assert uneven["exact"] == 0
    assert {row["exact"] for row in ours} == {even["cases"]}
    return [f"Of {even['cases']} uses", f"exact in {even['exact']} on two ranks", f"ours in {even['cases']}"]


def pearson() -> dict[str, Any]:
    """The forward of Pearson's correlation: its row has a gradient."""
    (row,) = [
        row
        for row in records.read("metric_sync")
        if row.get("metric") == "PearsonCorrCoef" and row["gradient_over_torchmetrics"]
    ]
    return row


def torchmetrics() -> list[str]:
    row = pearson()
    counts = f"makes {row['torchmetrics_collectives']} collectives in a forward, ours {row['collectives']}"
    return [counts, f"in {row['ratio']:.2f} of the time"]


def sync_batch_norm() -> list[str]:
    modes = ("each rank's", "all ranks'")
    local, ours = (
        recorded("batch_norm_study", comparison="same batch, unbalanced", ranks=4, statistics_of_rows=mode)
        for mode in modes
    )
    alone = recorded("batch_norm_study", comparison="one process")
    assert ours["map_at_r"] == pytest.approx(alone["map_at_r"])
    return [f"{local['map_at_r']:.3f} under local statistics", f"{ours['map_at_r']:.3f} with ours"]


@pytest.mark.parametrize("expected", [insightface, open_clip, lightly, pml, torchmetrics, sync_batch_norm])
def test_a_page_says_what_is_recorded(expected: Any) -> None:
    text = " ".join(manual.recipes()[expected.__name__].split())
    assert [words for words in expected() if words not in text] == []


def rows_of_a_gpu() -> list[str]:
    """Those of the README's table: eager, then compiled, beside torch with rows and products of the same dtype."""
    towers, pairs, classes = "65536 x 768", "65536 x 512", "3000000 classes x 512"
    auto = ", products='auto'"
    found = []
    for loss, size, what, next_to, dtype, form in (
        ("SigLIP", towers, "65,536 rows", "torch, bf16", "bf16", auto),
        ("CLIP", towers, "65,536 rows", "the same", "bf16", auto),
        ("SupCon", pairs, "65,536 rows", "torch, float32", "float32", ""),
        ("ArcFace", classes, "3 million classes", "the same", "float32", ""),
    ):
        ms, mib = on_a_gpu(loss, size, f"ours{form}")
        compiled_ms, compiled_mib = on_a_gpu(loss, size, f"ours, compiled{form}")
        plain_ms, plain_mib = on_a_gpu(loss, size, f"torch, {dtype}")
        times = f"{ms / plain_ms:.2f}/{compiled_ms / plain_ms:.2f}"
        memory = f"{mib:,.0f}/{compiled_mib:,.0f} MiB of {plain_mib:,.0f}"
        found.append(f"H200: {loss}, {what} | {next_to} | {times} | {memory}")
    return found


def rows_of_the_readme() -> list[str]:
    """The table of numbers, row by row, as it follows from what is recorded."""
    even, uneven = (
        recorded("parity", who="PML DistributedLossWrapper", ranks=2, batches=batches) for batches in ("even", "uneven")
    )
    supcon = recorded("global_batch", loss="SupCon", mode="rows", global_batch=2048)
    supcon_cost = f"peak memory {supcon['memory_ratio']:.2f}"
    clip, classes = recorded("large", ours="tiles", size=8192), recorded("large", ours="divided", size=1_000_000)
    metric = pearson()
    steps = [row for row in records.read("strategy_overhead") if row.get("module") == "ArcFace" and "plain_ms" in row]
    short, long = sorted(steps, key=lambda row: row["plain_ms"])
    checks = recorded("checks_cost", parameters="100 M", fit="default")
    cases = f"{even['cases']} uses of losses, even and uneven ranks"
    theirs = f"theirs {even['exact']} even, {uneven['exact']} uneven"
    clip_peak = f"peak memory {clip['ours_peak_MiB']:.0f} MiB of {clip['usual_peak_MiB']:.0f}"
    classes_peak = f"peak memory {classes['ours_peak_MiB']:.0f} MiB of {classes['usual_peak_MiB']:.0f}"
    collectives = f"{metric['collectives']} collective of {metric['torchmetrics_collectives']}"
    step = f"ArcFace step of {short['plain_ms']:.0f} ms"
    return [
        f"{cases} | PML's wrapper | | {even['cases']} exact; {theirs}",
        f"SupCon, 2048 rows | the same | {supcon['ratio']:.2f} | {supcon_cost}",
        f"CLIP, 8192 rows | open_clip's way | {clip['ratio']:.2f} | {clip_peak}",
        f"ArcFace, a million classes | PML under DDP | {classes['ratio']:.2f} | {classes_peak}",
        *rows_of_a_gpu(),
        f"Pearson's correlation as the loss | torchmetrics | {metric['ratio']:.2f} | {collectives}",
        f'{step} under `"ddp_losses"` | `"ddp"` | {short["ratio"]:.2f} | {long["ratio"]:.2f} at {long["plain_ms"]:.0f} ms',
        f"all checks, 100 M parameters | no checks | {checks['ratio']:.2f} |",
    ]


def test_the_readme_says_what_is_recorded() -> None:
    page = (ROOT / "README.md").read_text()
    table = page.partition("## Numbers")[2].partition("\n## ")[0].splitlines()
    assert [row.strip("| ") for row in table if row.startswith("|")][2:] == [
        row.strip("| ") for row in rows_of_the_readme()
    ]
    counts = [
        row["torchmetrics_collectives"] for row in records.read("metric_sync") if row["table"].startswith("Forward")
    ]
    assert f"in {min(counts)} to {max(counts)} collectives" in " ".join(manual.about()["parts"].split())
