"""``python -m tests.gpu`` on the pretended device, part by part; ``python -m benchmarks gpu`` on the CPU; both without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import records
from tests.processes import ROOT, run_python

SUITE, TIMES = ("-m", "tests.gpu"), ("-m", "benchmarks", "gpu")


def command(program: tuple[str, ...], *arguments: str) -> tuple[int, str]:
    done = run_python(*program, *arguments, folder=ROOT, seconds=600, HOME="/nowhere", COLUMNS="300")
    return done.returncode, done.stdout + done.stderr


def test_one_process() -> None:
    """Some of the numbers; nothing is recorded."""
    before = records.read("gpu")
    code, said = command(SUITE, "--device", "pretend", "--part", "a", "--every", "40")
    assert code == 0, said
    for expected in ("not recorded", "two towers", "class-sharded"):
        assert expected in said
    assert "WRONG" not in said
    assert records.read("gpu") == before


def test_times_in_small_sizes() -> None:
    """Every contest; nothing is recorded."""
    before = records.read("gpu")
    code, said = command(TIMES, "--device", "cpu")
    assert code == 0, said
    losses = "SigLIP", "CLIP", "SupCon", "NTXent", "MultiSimilarity", "Contrastive", "ArcFace"
    for expected in ("not recorded", *losses, "torch, float32", "products='auto'"):
        assert expected in said
    assert "WRONG" not in said
    assert records.read("gpu") == before


def test_ranks_that_share_the_device() -> None:
    """Collectives, losses, batch norm, a metric, the reduction of gradients and two fits: the numbers of the CPU."""
    code, said = command(SUITE, "--device", "pretend", "--part", "b", "--ranks", "3")
    assert code == 0, said
    for expected in ("3 ranks", "reduction", "class-sharded", "fit, Contrastive over all rows"):
        assert expected in said


def test_one_rank_and_two(tmp_path: Path) -> None:
    """Fits, compiled tiles, and a step that fails; each row is in a file as soon as it is known."""
    code, said = command(SUITE, "--device", "pretend", "--part", "e", "--output", str(tmp_path))
    assert code == 0, said
    fits = ("fit, 16-true", "deterministic=True", "fsdp2_ddp_losses")
    tiles = ("compile_tiles, SigLIP", "compile_tiles, ArcFace, class shards, bf16")
    assert "WRONG" not in said
    for expected in (*fits, *tiles, "2 ranks, gloo", "not run"):
        assert expected in said
    assert {file.name: len(file.read_text().splitlines()) for file in tmp_path.iterdir()} == {
        "gpu_e_rank_0_of_1.jsonl": 8,
        "gpu_e_rank_0_of_2.jsonl": 18,
        "gpu_e_rank_1_of_2.jsonl": 18,
    }


@pytest.mark.parametrize(("program", "instead"), [(SUITE, "pretend"), (TIMES, "cpu")])
def test_without_a_device(program: tuple[str, ...], instead: str) -> None:
    code, said = command(program)
    assert code != 0
    assert "no CUDA device can be used here" in said
    assert f"--device {instead}" in said
