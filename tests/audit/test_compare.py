"""The comparison alone: recordings written by hand, with a known difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses.audit import rank_record
from tests.doors import (
    MULTIPLE,
    ModuleInfo,
    RankRecord,
    Recording,
    Tolerances,
    compare,
    measure_tolerances,
    store_tensor,
)


def recording(folder: Path, *ranks: Tensor | None, step: int = 1) -> Recording:
    folder.mkdir(exist_ok=True)
    records = []
    for gradient in ranks:
        record = RankRecord(steps=step, module_info=ModuleInfo(owners={"w": "encoder"}))
        record.tensors[step, "gradient"] = {"w": store_tensor(gradient, folder)}
        records.append(record)
    return Recording(folder, records)


TRUTH = torch.linspace(-1, 2, 11, dtype=torch.float64).reshape(11, 1)
ACROSS = TRUTH.clone()
ACROSS[3] += 0.1
BAD = TRUTH.clone()
BAD[0] = float("nan")
# what: (ranks, one process, verdict, ratio, cosine, agree)
CASES: dict[str, tuple[list[Tensor | None], Tensor | None, str, float | None, bool]] = {
    "the same": ([TRUTH, TRUTH.clone()], TRUTH, "exact", 1.0, True),
    "rounding": ([TRUTH * (1 + 1e-12)] * 2, TRUTH, "exact", 1.0, True),
    "twice": ([2 * TRUTH] * 2, TRUTH, "wrong scale", 2.0, True),
    "half": ([TRUTH / 2] * 2, TRUTH, "wrong scale", 0.5, True),
    "reversed": ([-TRUTH] * 2, TRUTH, "wrong direction", 1.0, True),
    "elsewhere": ([ACROSS] * 2, TRUTH, "wrong direction", None, True),
    "desynchronized": ([TRUTH, 2 * TRUTH], TRUTH, "wrong scale", 2.0, False),
    "desynchronized by a bit": ([TRUTH, TRUTH * (1 + 1e-15)], TRUTH, "exact", 1.0, False),
    "missing": ([None, None], TRUTH, "missing", 0.0, True),
    "missing on one rank": ([TRUTH, None], TRUTH, "missing", 0.0, False),
    "only on the ranks": ([TRUTH] * 2, None, "missing", math.inf, True),
    "missing on both": ([None, None], None, "no gradient", 1.0, True),
    "zero and missing": ([TRUTH * 0] * 2, None, "exact", 1.0, True),
    "zero and something": ([TRUTH * 0] * 2, TRUTH, "wrong direction", 0.0, True),
    "not a number": ([BAD] * 2, TRUTH, "not finite", None, True),
    "not a number on both": ([BAD * (1 + 1e-13)] * 2, BAD, "exact", None, True),
    "transposed": ([TRUTH.T] * 2, TRUTH, "wrong direction", None, True),
    "bf16": ([TRUTH.bfloat16()] * 2, TRUTH.bfloat16(), "exact", 1.0, True),
}


@pytest.mark.parametrize("piece", [3, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    monkeypatch.setattr(rank_record.Entry.pieces, "__defaults__", (piece,))
    ranks, one, verdict, ratio, agree = CASES[name]
    found = compare(recording(tmp_path / "ranks", *ranks), recording(tmp_path / "one", one), Tolerances(1e-9))
    (row,) = found.rows
    assert (row.verdict, row.ranks_agree) == (verdict, agree)
    if ratio is not None:
        assert row.ratio == pytest.approx(ratio, rel=1e-9)
    if name == "elsewhere":
        assert row.error == pytest.approx(0.1 / float(TRUTH.norm()), rel=1e-9)
        cosine = torch.nn.functional.cosine_similarity(ACROSS.flatten(), TRUTH.flatten(), dim=0)
        assert row.cosine == pytest.approx(float(cosine), rel=1e-12)
    assert found.equal == (verdict in ("exact", "no gradient") and agree)


def test_the_tolerance_is_measured(tmp_path: Path) -> None:
    one = recording(tmp_path / "one", TRUTH)
    perturbed = [recording(tmp_path / f"perturbed {k}", TRUTH * (1 + k * 1e-6)) for k in (1, 3)]
    allowed = measure_tolerances(one, perturbed, 1e-8)
    assert allowed.of(1, "gradient", "w") == pytest.approx(MULTIPLE * 3e-6, rel=1e-5)
    assert allowed.of(1, "gradient", "unseen") == MULTIPLE * 1e-8
    assert measure_tolerances(one, perturbed, 1e-8, fixed=0.5).of(1, "gradient", "w") == 0.5


def test_rounding_of_some_per_cent_does_not_hide_a_factor_of_two(tmp_path: Path) -> None:
    one, moved = recording(tmp_path / "one", TRUTH), recording(tmp_path / "moved", TRUTH * 1.1)
    found = compare(recording(tmp_path / "ranks", TRUTH / 2), one, measure_tolerances(one, [moved], 1e-8))
    assert [row.verdict for row in found.rows] == ["wrong scale"]


# in bf16, where runs of one process are apart by 1 %: the error of a gradient at a step, and the verdict
IN_16_BITS = [
    (1, 0.007, "exact"),
    (1, 0.012, "unclear"),
    (1, 0.03, "wrong scale"),
    (2, 0.007, "exact"),
    (2, 0.03, "unclear"),  # later steps add up differences
    (2, 0.2, "wrong scale"),
]


@pytest.mark.parametrize(("step", "error", "verdict"), IN_16_BITS)
def test_in_16_bits_a_verdict_follows_from_the_spread(tmp_path: Path, step: int, error: float, verdict: str) -> None:
    one = recording(tmp_path / "one", TRUTH, step=step)
    allowed = measure_tolerances(one, [recording(tmp_path / "moved", TRUTH * 1.01, step=step)], 2.0**-8)
    found = compare(recording(tmp_path / "ranks", TRUTH * (1 + error), step=step), one, allowed)
    row = next(row for row in found.rows if row.step == step)
    assert row.verdict == verdict
    assert found.equal == (verdict in ("exact", "unclear"))
    assert bool(found.unclear) == (verdict == "unclear")


def test_a_parameter_that_rests_in_one_step_is_compared_in_the_next(tmp_path: Path) -> None:
    runs = []
    for name, factor in (("ranks", 2.0), ("one", 1.0)):
        found = recording(tmp_path / name, TRUTH, step=2)
        for step, kind, weight in ((0, "initial", TRUTH), (1, "parameter", TRUTH), (2, "parameter", TRUTH + factor)):
            found.records[0].tensors[step, kind] = {"w": store_tensor(weight, tmp_path / name)}  # type: ignore[index]
        runs.append(found)
    updates = compare(*runs, Tolerances(1e-9)).updates
    assert [row.verdict for row in updates] == ["exact", "wrong scale"]


def test_the_same_bits_are_stored_once(tmp_path: Path) -> None:
    found = recording(tmp_path, TRUTH, TRUTH.clone(), 2 * TRUTH)
    assert len(list(tmp_path.iterdir())) == 2
    assert torch.equal(found.entries(1, 1, "gradient")["w"].tensor(), TRUTH)


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3.0), torch.empty(0, 4), torch.ones(4, 3).T, torch.ones(3, dtype=torch.bool)]
)
def test_any_tensor_comes_back(tmp_path: Path, tensor: Tensor) -> None:
    back = recording(tmp_path, tensor).entries(0, 1, "gradient")["w"].tensor()
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype
