"""Times, memory and counts on the pages of peers are those that the benchmarks have recorded; `test_recipes` measures the gradients."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import records
from lightning_ddp_losses.cli import manual


def recorded(benchmark: str, **fields: Any) -> dict[str, Any]:
    """The one row of a benchmark with these fields."""
    (row,) = [row for row in records.read(benchmark) if fields.items() <= row.items()]
    return row


def insightface() -> list[str]:
    row = recorded("large", ours="divided", size=1_000_000)
    return [
        f"{row['ratio']:.2f} of the time",
        f"{row['ours_peak_MiB']:.0f} MiB in place of {row['usual_peak_MiB']:,.0f}",
    ]


def open_clip() -> list[str]:
    first, second = (recorded("large", ours="tiles", size=size) for size in (8192, 16384))
    return [
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


def torchmetrics() -> list[str]:
    row = recorded("metric_sync", metric="PearsonCorrCoef")
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
