"""Part d: forward and backward at full size, ours beside plain torch that makes the whole matrix, and figures from elsewhere.

Gradients are compared with float64 first; ours are not timed where they are off. Contestants then take turns, one step each, and the
median counts. Memory is what one step takes beyond what was there before, gradients included. On the CPU sizes are small,
times are the CPU's and there is no figure of memory: it only shows that all this runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu.contests import OF_PAIRS, ArcFace, Clip, Contest, SigLip, TwoOfEachClass
from benchmarks.gpu.peers import NotInstalledError
from benchmarks.memory import MIB
from benchmarks.records import Row

ROUNDS, SECONDS = 15, 4.0  # of one contest; at least 3 rounds
_TABLE = "gpu d: forward + backward"
# what others report, on one Hopper GPU (siglip-kernel 0.1.1) and on 8 V100 together (InsightFace's partial_fc_v2, a GPU's memory)
ELSEWHERE: dict[tuple[str, str], str] = {
    ("SigLIP", "65536 x 768"): "siglip-kernel 48.8 ms, 1400 MB or 54.3 ms, 640 MB; eager 102 ms, 33000 MB",
    ("ArcFace", "3000000 classes x 512"): "partial_fc_v2, 8 V100: 451 ms (2271 images/s), 28900 MB",
}

Step = Callable[[], Tensor]


def contests(device: str) -> Iterator[tuple[str, str, Callable[[], Contest]]]:
    """Yield loss, size, and what makes the contest."""
    small = not device.startswith("cuda")
    place = device
    width = 16 if small else 768
    for rows in (64,) if small else (1024, 8192, 16_384, 32_768, 65_536):
        yield "SigLIP", f"{rows} x {width}", lambda rows=rows: SigLip(rows, width, place)
        yield "CLIP", f"{rows} x {width}", lambda rows=rows: Clip(rows, width, place)
    width = 16 if small else 512
    for rows in (64,) if small else (1024, 16_384, 65_536):
        for name in OF_PAIRS:
            yield name, f"{rows} x {width}", lambda name=name, rows=rows: TwoOfEachClass(name, rows, width, place)
    batch = 32 if small else 1024
    for classes in (100,) if small else (1_000_000, 3_000_000):
        yield (
            "ArcFace",
            f"{classes} classes x {width}",
            lambda classes=classes: ArcFace(classes, batch, width, place),
        )


def rows_of(device: str, every: int = 1) -> Iterator[Row]:
    """Run every contest; one row a contestant."""
    for loss, size, make in contests(device):
        about = {"table": _TABLE, "loss": loss, "size": size}
        try:
            for row in _contest_rows(device, make(), ELSEWHERE.get((loss, size))):
                yield {**about, **row}
        except torch.OutOfMemoryError as error:
            # the inputs, or the formula in float64, beside which nobody can be judged
            yield {**about, **_unfit(device, "comparison", error)}
        except Exception as error:  # the other contests are measured all the same
            yield {**about, **_failed("comparison", error)}
        _return_memory(device)


def _contest_rows(device: str, contest: Contest, elsewhere: str | None) -> Iterator[Row]:
    # 1. gradients of everybody, beside float64
    truth = contest.truth()
    ways = {**contest.ours, **contest.plain}
    found: dict[str, Row] = {}
    for who, way in ways.items():
        try:
            found[who] = _compared(contest, who, way, truth)
        except NotInstalledError as error:
            found[who] = {"who": who, "off_from_float64": f"not run: {error}", "limit": None, "verdict": "not run"}
        except torch.OutOfMemoryError as error:
            found[who] = _unfit(device, who, error, of_ours=who in contest.ours)
        except Exception as error:
            found[who] = _failed(who, error)
        _return_memory(device)
    del truth
    # 2. time and memory of those that are right
    right = [who for who, row in found.items() if row["verdict"] in ("equal", "rougher")]
    steps = {who: _step(contest, ways[who]) for who in right}
    times = _timed_in_turns(device, steps)
    for who, row in found.items():
        measured: Row = {"median_ms": None, "peak_mib": None}
        if who in right:
            measured = {"median_ms": statistics.median(times[who]), "peak_mib": _peak_mib(device, contest, steps[who])}
        yield {"who": who, **measured, **row, "elsewhere": elsewhere if who in contest.ours else None}


def _step(contest: Contest, way: Step) -> Callable[[], None]:
    def step() -> None:
        _clear(contest)
        way().backward()

    return step


def _clear(contest: Contest) -> None:
    for leaf in contest.leaves.values():
        leaf.grad = None


def _compared(contest: Contest, who: str, way: Step, truth: dict[str, Tensor]) -> Row:
    """Compare the gradients of one contestant with float64."""
    limit = next(value for name, value in contest.tolerance.items() if who.startswith(name))
    _step(contest, way)()
    off = {}
    for name, leaf in contest.leaves.items():
        assert leaf.grad is not None
        off[name] = _relative(leaf.grad, truth[name])
    _clear(contest)
    verdict = "equal" if all(value <= limit for value in off.values()) else "WRONG"
    if verdict == "WRONG" and who in contest.plain:
        verdict = "rougher"  # half precision is what many train with
    shown = ", ".join(f"{name} {value:.1e}" for name, value in off.items())
    return {"off_from_float64": shown, "limit": limit, "verdict": verdict}


def _relative(got: Tensor, expected: Tensor) -> float:
    """Compute the norm of the difference over that of the truth; large ones in pieces, so that no copy of all of it is made."""
    difference = norm = 0.0
    pieces = zip(got.reshape(-1).split(1 << 26), expected.reshape(-1).split(1 << 26), strict=True)
    if got.ndim == 2 and got.stride(0) < got.stride(1):
        pieces = zip(got.t().reshape(-1).split(1 << 26), expected.t().reshape(-1).split(1 << 26), strict=True)
    for ours, theirs in pieces:
        wide = theirs.double()
        difference += float((ours.double() - wide).square().sum())
        norm += float(wide.square().sum())
    return float((difference / max(norm, 1e-30)) ** 0.5)


def _unfit(device: str, who: str, error: BaseException, *, of_ours: bool = True) -> Row:
    """Say that somebody needs more memory than the device has; ours should not."""
    text = f"out of memory: {str(error).splitlines()[0][:120]}"
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        text += f" ({free // MIB} of {total // MIB} MiB free now)"
    return {"who": who, "off_from_float64": text, "limit": None, "verdict": "WRONG" if of_ours else "does not fit"}


def _failed(who: str, error: BaseException) -> Row:
    """Say what somebody failed with."""
    text = f"{type(error).__name__}: {str(error)[:500]}"
    return {"who": who, "off_from_float64": text, "limit": None, "verdict": "WRONG"}


def _return_memory(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _timed_in_turns(device: str, steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Time the steps in turns; the first two rounds warm up."""
    table: dict[str, list[float]] = {who: [] for who in steps}
    ended = time.monotonic() + SECONDS
    for number in range(ROUNDS + 2):
        for who, step in steps.items():
            table[who].append(_milliseconds(device, step))
        if number >= 4 and time.monotonic() > ended:
            break
    return {who: measured[2:] for who, measured in table.items()}


def _milliseconds(device: str, step: Callable[[], None]) -> float:
    """Time one step: on a GPU by its own clock, from an idle device to the end of the last kernel."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def _peak_mib(device: str, contest: Contest, step: Callable[[], None]) -> float | None:
    """Measure what one step takes at most beyond what is there when it begins, which is no gradient."""
    if not device.startswith("cuda"):
        return None
    _clear(contest)
    _return_memory(device)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / MIB
