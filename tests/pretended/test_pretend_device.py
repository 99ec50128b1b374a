"""On an accelerator: the numbers of the CPU, and no more launches, waits and uploads than a table allows (``runs.BOUNDS``).

The device is pretended (``backend``) and needs a process of its own: one runs all calls, another all fits. More jobs of
several ranks are in ``slow/test_benchmark_gpu``.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pretended import failures, fits, runs, worlds
from tests.pretended.devices import HOST, waits_in
from tests.processes import run_python

PROGRAM = """
import sys
from pathlib import Path
from tests.pretended.devices import pretended
device = pretended()
{}
"""
# a program after the other, and what became of it
EACH = """
import json, traceback
found = {}
for name, program in json.loads(sys.argv[1]).items():
    try:
        exec(compile(program, name, "exec"), {"device": device})
        found[name] = "fine"
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""
ROUNDED = 1e-6  # float32, where the CPU's tiles have other sizes, and compare each pair of rows once
FITTED = 1e-12  # float64, relative, of parameters and buffers

Results = dict[str, Any]


def found_by(module: str, folder: Path, *, carried: bool = True) -> Results:
    """What each run of a module's `main` found, by its name; collectives may carry the device's tensors."""
    file = folder / "found.json"
    program = "from tests.pretended.forks import install\ninstall()\n" if carried else ""
    program += f"from tests.pretended.{module} import main\nmain(device, Path(sys.argv[1]))"
    done = run_python("-c", PROGRAM.format(program), str(file), seconds=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Results = json.loads(file.read_text())
    return found


@pytest.mark.slow
def test_runs(tmp_path: Path) -> None:
    """Launches, waits and uploads within their bounds, launches of a tile more too, and the numbers of the CPU, for every case.

    One test for all of them: they share a process, which each worker of pytest that had one of them would start for itself.
    """
    found = found_by("runs", tmp_path, carried=False)
    slopes = found.pop("slopes")
    for name, slope in runs.SLOPES.items():
        launches, difference = slopes[name]
        assert launches <= slope.launches, f"{name}: {launches} launches a tile, at most {slope.launches}"
        assert difference < ROUNDED, f"{name}: {difference}"
    passes = found.pop("passes")
    for name, most in runs.PASSES.items():
        for unit, number in passes[name].items():
            limit = getattr(most, unit)
            assert number < limit + 0.05, f"{name}: {number} {unit}, at most {limit}"
    problems = {name: text for name, bound in runs.BOUNDS.items() if (text := beyond(found[name], bound, ROUNDED))}
    kinds: Counter[str] = Counter()
    for name, each in found.items():
        if name in runs.BOUNDS:
            continue
        kinds[name.partition(";")[0]] += 1
        if each["error"] or not each["difference"] < runs.EXACT:
            problems[name] = str(each["error"] or each["difference"])
    assert not problems, "\n".join(f"{name}: {text}" for name, text in problems.items())
    names = [
        *runs.LOSSES,
        *runs.TILED,
        *runs.MINERS,
        *runs.CLASS_SHARDED,
        *runs.TOWERS,
        *runs.metric_cases(),
    ]
    assert set(names) <= set(found)
    assert kinds.pop("layer") == 1
    assert set(kinds) == {"loss", "tiles", "miner", "class-sharded", "two towers", "metric", "fingerprint"}
    assert min(kinds.values()) >= 5


class Larger(nn.Module):
    """The larger of two numbers, the first of equal ones, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, pair: Tensor) -> Tensor:
        return pair[pair.argmax()] * self.factor


@pytest.mark.parametrize(
    ("pair", "factor", "is_a_tie"),
    [([0.3, 0.3], 1.0, True), ([0.3, 0.3], 1.1, False), ([0.3, 0.2], 1.1, False), ([0.3, 0.2], 1.0, False)],
)
def test_a_tie_is_told_from_an_error(pair: list[float], factor: float, is_a_tie: bool) -> None:
    """Another order of equal numbers is a tie. Another value is not, next to a tie either."""

    def last_of_equal_ones(module: nn.Module, pair: Tensor) -> Tensor:
        return pair[1 - pair.flip(0).argmax()]

    given = torch.tensor(pair, dtype=torch.float64, requires_grad=True)
    found = runs.measure(HOST, lambda: Larger(factor), (given,), naive=last_of_equal_ones)
    assert found.is_a_tie == is_a_tie
    assert (found.difference < runs.EXACT) == (pair == [0.3, 0.2] and factor == 1.0)


@pytest.mark.slow
def test_fits(tmp_path: Path) -> None:
    """A Trainer with all checks, batch norm, three losses, accumulation, and a restart from its checkpoint; on one rank and on two."""
    found = found_by("fits", tmp_path)
    problems = {name: beyond(found[name], bound, FITTED) for name, bound in fits.FITS.items()}
    assert not any(problems.values()), problems
    messages = {name: found[name]["forward"].get("handshakes", 0) for name in fits.FITS}
    assert all(messages[name] <= most for name, most in fits.HANDSHAKES.items()), messages
    # a loss that is judged one step later names its own step: in the last batch, at the end of training
    assert "F79, before backward of step 2: the loss is not a finite number" in str(found["late"])
    assert "nan in batch 5" in str(found["late"])


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """What a call, a window and recorded counts cost on two ranks, whose collectives carry the device's tensors or stage them."""
    problems = []
    for backend, ranks in found_by("worlds", tmp_path).items():
        for rank, found in enumerate(ranks):
            # an index beyond a rank's own rows would be a row of another
            assert "rank 1: 1 to 256 for 256 rows" in found.pop("refusal")
            # the call in which a rank leaves its list is an error that names the line; the others are exact
            departures = found.pop("departures")
            calls = [departures[place : place + 5] for place in range(0, 15, 5)]
            assert all(each[2] == "True" and len({each[0], each[1], each[3], each[4]}) == 1 for each in calls), calls
            assert set(found) == set(worlds.WORLDS)
            for name, (bound, waits_over_gloo) in worlds.WORLDS.items():
                # over gloo copies to the host and back are launches and uploads more
                if backend == "gloo":
                    bound = replace(bound, launches=10**4, uploads=9, messages=99)
                    bound = replace(bound, waits=waits_over_gloo, own_waits=waits_over_gloo)
                if text := beyond(found[name], bound, ROUNDED):
                    problems.append(f"{name}, {backend}, rank {rank}: {text}")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    """Every case of the losses on uneven ranks, and with a rank that has no rows, whose collectives carry the device's tensors."""
    ranks = found_by("parity", tmp_path)
    problems = []
    for rank, found in enumerate(ranks):
        assert len(found) > 900
        for name, (difference, error) in found.items():
            if error or not difference < runs.EXACT:
                problems.append(f"{name}, rank {rank}: {error or difference}")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_a_rank_that_fails_in_its_tiles(tmp_path: Path) -> None:
    """The peers' hosts wait for no device, so that they learn of it in their next handshake: all ranks end, and the next call is right."""
    for world_size, ranks in found_by("failures", tmp_path).items():
        for rank, found in enumerate(ranks):
            assert len(found["errors"]) == len(failures.LOSSES) * len(failures.RUNS)
            failed = rank == failures.FAILED
            words = ("OutOfMemoryError: ",) if failed else ("PeerError: ", f"(rank 1 of {world_size}, in ")
            for name, error in found["errors"].items():
                assert all(word in error for word in (*words, failures.WORDS)), (world_size, rank, name, error)
            assert max(found["off"].values()) < 1e-5, found["off"]


def beyond(found: dict[str, Any], bound: runs.Bound, rounded: float) -> str:
    """In what a run went beyond its bound, in words."""
    if found["error"]:
        return str(found["error"])
    passes = (found["forward"], found["backward"])
    found_waits = [waits_in(counts) for counts in passes]
    beside_the_bound = {
        "launches": (sum(counts.get("launches", 0) for counts in passes), bound.launches),
        "waits": (sum(sum(counts.values()) for counts in found_waits), bound.waits),
        "own waits": (sum(counts.get("own waits", 0) for counts in passes), bound.own_waits),
        "uploads": (sum(counts.get("uploads", 0) for counts in passes), bound.uploads),
        "messages": (sum(counts.get("messages", 0) for counts in passes), bound.messages),
    }
    words = [f"{count} {what}, at most {most}" for what, (count, most) in beside_the_bound.items() if count > most]
    if words:
        words.append(f"waits: {found_waits}")
    if not found["difference"] < rounded:
        words.append(f"differs by {found['difference']}")
    return ", ".join(words)


PROGRAMS: dict[str, str] = {
    # upstream gradients of a backward are compared two calls later, without a wait; those of the host in the next call
    "a loss that is called twice in a step": """
import torch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch
from tests.pretended.backend import DEVICE, catch_up, counting

watch = UpstreamGradWatch()
for call in range(4):
    with counting() as counts:
        taken = watch.take()
    assert not counts.waits, counts
    assert taken == (f"{call - 2:.1f}" if call > 1 else "none yet"), (call, taken)
    catch_up()
    watch.note(torch.tensor(float(call), device=DEVICE))
watch = UpstreamGradWatch()
watch.note(torch.tensor(0.5))
assert watch.take() == "0.5" and watch.take() == "none yet"
""",
    # whatever lies apart from the rows, of each public loss and the miner: one error that names both devices
    "rows, labels and losses apart": """
import torch
from lightning_ddp_losses import InputError
from tests.losses.test_ranks_that_differ import KINDS, PLACED, WITHOUT_TENSORS, rows as line_of_rows, second_argument
from tests.pretended.runs import join_world_of_one
join_world_of_one()

def refusal(name, place, rows, others):
    try:
        KINDS[name]().to(place)(rows, others)
    except InputError as error:
        return str(error)
    return "no error"

for name in PLACED:
    rows, others = line_of_rows(), second_argument(name)
    on_device = device.to_device(rows), device.to_device(others)
    found = [refusal(name, device.name, on_device[0], others), refusal(name, device.name, rows, on_device[1])]
    if name not in WITHOUT_TENSORS:
        found += [refusal(name, "cpu", *on_device), refusal(name, device.name, rows, others)]
    for text in found:
        assert ": devices: expected" in text and "on cpu" in text and f"on {device.name}" in text, (name, text)
""",
    # a fingerprint is read a call later, or at once
    "the first class of a shard, now and a call ago": """
import torch
from pytorch_metric_learning import losses
from lightning_ddp_losses import ClassShardedLoss
weight = torch.arange(12.0).view(4, 3)
sharded = ClassShardedLoss(losses.ArcFaceLoss(3, 4))._sharded
sharded.world_size = 2
first = sharded.fingerprint(device.to_device(weight))
other = device.to_device(weight + torch.arange(4.0)[:, None])
assert sharded.fingerprint(other) == first
assert sharded.fingerprint(other, at_once=True) != first
assert sharded.fingerprint(device.to_device(weight * torch.nan), at_once=True) == b""
""",
    # a copy or a pickle of a loss between two steps begins anew
    "fingerprints of weights that are on their way to the host": """
import copy, pickle
import torch
from unittest import mock
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints, start_fingerprints

fingerprints = WeightFingerprints(wanted=True)
fingerprints._started = start_fingerprints([device.to_device(torch.arange(3.0))])
for other in (copy.deepcopy(fingerprints), pickle.loads(pickle.dumps(fingerprints))):
    with mock.patch.object(process_groups, "world_size", lambda group=None: 2):
        assert other.take([torch.ones(3)], None)
""",
    # classes are drawn on the device, equal to those of the CPU; the optimizer waits once, to see whether the gradient was zeroed
    "sampled classes": """
import torch
from pytorch_metric_learning import losses
from lightning_ddp_losses import ClassShardedLoss
from tests.losses.harness import line_of_rows
from tests.pretended.backend import catch_up, counting

def trained(place, unbiased):
    torch.manual_seed(0)
    loss = ClassShardedLoss(losses.ArcFaceLoss(40, 6), sample_rate=0.25, unbiased=unbiased, chunk_size=4).to(place)
    optimizer = torch.optim.SGD([loss.weight], lr=0.1, momentum=0.9, weight_decay=0.1)
    loss.attach(optimizer)
    found, waits = [], []
    for step in range(4):
        rows = (line_of_rows(count=8, dtype=torch.float32) * (step + 1)).detach().to(place)
        labels = (torch.arange(8) * 5 + step).to(place)
        with counting() as counts:
            value = loss(rows, labels)
            value.backward()
            forward_and_backward = counts
        with counting() as counts:
            optimizer.step()
            optimizer.zero_grad()
        waits.append((forward_and_backward.own_waits, counts.own_waits))
        catch_up()
        found += [value.detach().cpu(), loss.sampler.sampled.cpu()]
    return [*found, loss.weight.detach().cpu()], waits

for unbiased in (False, True):
    expected, _ = trained("cpu", unbiased)
    found, waits = trained(device.name, unbiased)
    torch.testing.assert_close(found, expected)
    assert waits[1:] == [(0, 1)] * 3, waits
""",
    # `get_scale` waits; checks read it in every step
    "the scale of a gradient scaler is read later": """
from types import SimpleNamespace
import torch
from lightning_ddp_losses.callbacks.ddp_state import send_gradient_scale
from tests.pretended.backend import catch_up, counting
scaler = torch.amp.GradScaler(device.name, init_scale=1024.0)
strategy = SimpleNamespace(root_device=torch.device(device.name, 0))
trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), strategy=strategy)
scaler.scale(torch.ones((), device=device.name))
with counting() as counts:
    sent = send_gradient_scale(trainer)
    catch_up()
    assert sent.read() == [1024.0]
assert counts.waits == 0, counts
with counting() as counts:
    assert scaler.get_scale() == 1024.0
assert counts.waits == 1, counts
""",
    # what a GPU refuses is refused, what makes the host wait is counted, and early readers find rubbish
    "the device itself": """
import torch
from tests.pretended.backend import DEVICE, catch_up, counting, to_device, to_host
own, other = to_device(torch.arange(6.0)), torch.arange(6.0)

def refused(function):
    try:
        function()
    except (RuntimeError, TypeError):
        return True
    return False

assert refused(lambda: own + other) and refused(lambda: torch.cat([own, other])) and refused(lambda: other[own.long()])
assert refused(lambda: other.add_(own)) and refused(lambda: own.numpy()) and refused(lambda: torch.stack([own[0], other[0]]))
assert not refused(lambda: own + torch.tensor(2.0)) and not refused(lambda: own[torch.tensor([1, 2])])

def waits(function):
    with counting() as counts:
        function()
    return counts.waits

for waiting in (lambda: own.sum().item(), lambda: own.tolist(), lambda: bool(own.any()), lambda: own.nonzero(),
                lambda: own[own > 2], lambda: own.cpu(), lambda: float(own[0]), lambda: torch.equal(own, own),
                lambda: other.copy_(own), lambda: torch.bincount(own.long())):
    assert waits(waiting) >= 1
for free in (lambda: own * 2, lambda: own.view(2, 3).T, lambda: own.to("cpu", non_blocking=True), lambda: own.new_zeros(3)):
    assert waits(free) == 0
with counting() as counts:
    own.view(2, 3).sum(1).mul_(2)
    torch.tensor([1.0], device=DEVICE)
    other.to(DEVICE)
assert (counts.launches, counts.uploads) == (2, 2), counts

event = torch.Event(DEVICE)
copy = own.to("cpu", non_blocking=True)
event.record()
assert copy.isnan().all() and not event.query()
assert waits(event.synchronize) == 1 and copy.tolist() == [0, 1, 2, 3, 4, 5]
event, copy = torch.Event(DEVICE), own.to("cpu", non_blocking=True)
event.record()
catch_up()
assert event.query() and waits(event.synchronize) == 0 and copy.tolist() == [0, 1, 2, 3, 4, 5]

weight = to_device(torch.ones(3, 2)).requires_grad_()
(own.view(2, 3) @ weight).square().sum().backward()
host = torch.ones(3, 2, requires_grad=True)
(torch.arange(6.0).view(2, 3) @ host).square().sum().backward()
assert torch.equal(to_host(weight.grad), host.grad)
""",
}


def test_short_programs() -> None:
    """Each has its own names; they share a process, since what they import takes seconds."""
    done = run_python("-c", PROGRAM.format(EACH), json.dumps(PROGRAMS))
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == dict.fromkeys(PROGRAMS, "fine")
