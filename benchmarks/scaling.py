"""Bytes, calls and memory of one step against the number of ranks: rank 0 of W = 2 ... 4096 on a pretended group, and real ones.

A fake process group answers every collective at once with this rank's own data, so rank 0 does what it would do among W ranks: the same
calls, the same sizes, the same buffers. Real gloo ranks (W = 2, 3, 4, 8) confirm calls and bytes. 32 rows per rank, dim 128, float32, 2^20
classes. Calls are collectives, and messages to the next rank in a ring. Bytes are what one rank sends: its own part to W - 1 peers in a
gather, all but its own part in an exchange. The law in the last columns is the closed form; a row that departs from it is WRONG. Up to 8
ranks gathered rows travel in the handshake, and up to 3 the sum of their gradients: a collective less each, and handshakes that have
grown to them. SigLIP exchanges this sum in forward, in the handshake with the sum of its loss. On an accelerator backward has no handshake.

A second table has the processor time of one handshake, beside the same gather whose headers are read and compared one by one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from pytorch_metric_learning.utils.common_functions import TorchInitWrapper
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.large import Wire
from benchmarks.memory import MIB, Resident
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.runner import parser_of, run_parts
from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss
from lightning_ddp_losses.distributed import process_groups, raw_collectives
from lightning_ddp_losses.distributed.handshake import HANDSHAKE_BYTES, all_gather, inline_capacity
from lightning_ddp_losses.distributed.raw_collectives import start_gather, wait

__all__ = ["main"]

ROWS, DIM, CLASSES, WORD = 32, 128, 1 << 20, 4
PRETENDED, REAL = (2, 4, 8, 16, 64, 256, 1024, 4096), (2, 3, 4, 8)
EMBEDDINGS, LABELS = ROWS * DIM * WORD, ROWS * 8

HANDSHAKE_WORLDS, PAYLOADS = (8, 1024), (0, 24, 400)
WARM_UP, ROUNDS = 100, 500
OPERATION, MUST_MATCH = "SupCon", {"rows": 8, "a": 1.0, "b": "x"}
HEADER = struct.Struct("<BBHII16s")
"""Header of the plain handshake: version, kind, origin, length of the text, length of the payload, hash of the text."""


def arcface(world: int) -> Any:
    """Classes divided over the ranks; equal rows, which every pretended peer also holds."""
    init = TorchInitWrapper(torch.nn.init.constant_, val=0.1)
    return ClassShardedLoss.build(
        pml.ArcFaceLoss, num_classes=CLASSES, embedding_size=DIM, weight_init_func=init, seed=0
    )


def scattered(world: int) -> int:
    """An exchange of the gradient of all rows."""
    return EMBEDDINGS * (world - 1)


def handshake_size(payload_bytes: int) -> int:
    """Bytes of each handshake of a step: grown to the longest payload and what stands before it, in eighths of a power of two."""
    eighth = 1 << (payload_bytes + 512).bit_length() >> 3
    return max(HANDSHAKE_BYTES, -(-(payload_bytes + 512) // eighth) * eighth)


@dataclass(frozen=True)
class Mode:
    """What runs, and its closed form.

    Attributes:
        make: The loss for a number of ranks.
        rows_bytes: Rows that this rank gathers.
        handshakes: Number of them, that of backward included.
        others: Collectives beside the handshakes, the gather of the rows and the exchange of their gradient.
        law: Bytes that a rank sends in them, for a number of ranks.
        largest: Number of ranks that the memory here allows.
        messages: To each other rank but one, round a ring.
        grad_bytes: Gradient of one rank's rows. Gradients of all ranks are summed in backward, by SigLIP in forward.
    """

    make: Callable[[int], Any]
    rows_bytes: int
    handshakes: int
    others: int
    law: Callable[[int], int]
    largest: int
    messages: int = 0
    grad_bytes: int = 0

    def riding(self, world: int) -> list[int]:
        """Bytes that travel in a handshake: rows with a few bytes about them, and the gradient of all ranks' rows."""
        payloads = {self.rows_bytes: self.rows_bytes + 64, world * self.grad_bytes: world * self.grad_bytes}
        return [size for size, needed in payloads.items() if needed <= inline_capacity()]

    def apart(self, world: int) -> list[int]:
        """Bytes for each peer that travel in a collective of their own."""
        riding = self.riding(world)
        gathered = [] if self.rows_bytes in riding else [self.rows_bytes]
        return gathered if world * self.grad_bytes in riding else [*gathered, self.grad_bytes]

    def calls(self, world: int) -> int:
        """Collectives and messages of a step."""
        return self.handshakes + self.others + len(self.apart(world)) + self.messages * (world - 1)

    def sent(self, world: int) -> int:
        """Bytes that a rank sends."""
        handshakes = self.handshakes * handshake_size(max(self.riding(world), default=0))
        return (handshakes + sum(self.apart(world))) * (world - 1) + self.law(world)


MODES: dict[str, Mode] = {
    "ArcFace, elements": Mode(lambda w: GlobalBatchLoss(pml.ArcFaceLoss(1000, DIM)), 0, 1, 0, lambda w: 0, 4096),
    "Circle, rows": Mode(
        lambda w: GlobalBatchLoss(pml.CircleLoss(), mode="rows"),
        EMBEDDINGS + LABELS,
        3,
        0,
        lambda w: 0,
        64,
        grad_bytes=EMBEDDINGS,
    ),
    "SupCon, replicated": Mode(
        lambda w: GlobalBatchLoss(pml.SupConLoss(), mode="replicated"), EMBEDDINGS + LABELS, 1, 0, lambda w: 0, 64
    ),
    "ArcFace, 2^20 classes divided": Mode(
        arcface,
        EMBEDDINGS + LABELS,
        2,
        1,
        lambda w: (3 * ROWS * w + 4) * WORD * (w - 1),
        4096,
        grad_bytes=EMBEDDINGS,
    ),
    "CLIP": Mode(
        lambda w: ClipLoss(),
        EMBEDDINGS + ROWS * WORD,
        2,
        1,
        lambda w: (2 * ROWS * w + 1) * WORD * (w - 1),
        4096,
        grad_bytes=EMBEDDINGS,
    ),
    "SigLIP": Mode(lambda w: SigLipLoss(), EMBEDDINGS, 2, 0, lambda w: 0, 4096, grad_bytes=EMBEDDINGS),
    "CLIP, ring": Mode(
        lambda w: ClipLoss(gather="ring"), 0, 3, 0, lambda w: 3 * scattered(w) + 3 * ROWS * WORD * (w - 1), 4096, 4
    ),
    "SigLIP, ring": Mode(lambda w: SigLipLoss(gather="ring"), 0, 2, 0, lambda w: 2 * scattered(w), 4096, 2),
}


def step(mode: str, loss: Any, rows: Tensor, other: Tensor, labels: Tensor) -> None:
    """Forward and backward."""
    second = other if mode.startswith(("CLIP", "SigLIP")) else labels
    loss(rows, second).backward()


def measure(mode: str) -> tuple[int, int, float]:
    """Calls, bytes sent and MiB of the second step of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows, other = (torch.randn(ROWS, DIM, generator=generator).requires_grad_() for _ in range(2))
    labels = torch.arange(ROWS) // 4
    torch.manual_seed(0)  # the same weights on all ranks
    loss = MODES[mode].make(process_groups.world_size())
    step(mode, loss, rows, other, labels)
    loss.zero_grad(set_to_none=True)
    rows.grad = other.grad = None
    gc.collect()
    resident = Resident()
    resident.reset()
    before = resident.now()
    with Wire() as wire:
        step(mode, loss, rows, other, labels)
    grown = resident.peak - before
    resident.close()
    return wire.calls, wire.sent, grown / MIB


def real(modes: list[str]) -> list[tuple[int, int, float]]:
    """Measurements of all modes on this rank of a real group."""
    found = []
    for mode in modes:
        for _ in range(128):
            all_gather("handshakes forget what the mode before has sent", {})
        found.append(measure(mode))
    return found


@contextlib.contextmanager
def pretended_group(world: int) -> Iterator[dist.ProcessGroup]:
    """Rank 0 of a group that is not there, as the world."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())  # type: ignore[no-untyped-call]
    group = dist.group.WORLD
    assert group is not None
    ours = process_groups.ProcessGroups(group, group, tuple(range(world)), lambda only=group: only)
    with mock.patch.object(process_groups, "internal_groups", return_value=ours):
        yield group
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def pretended(pairs: list[tuple[str, int]]) -> list[tuple[int, int, float]]:
    """The same on rank 0 of pretended groups: mode and number of ranks of each."""
    found = []
    for mode, world in pairs:
        with pretended_group(world):
            found.append(measure(mode))
    return found


def gather_bytes(message: bytes, group: dist.ProcessGroup) -> Tensor:
    """Gather a message of ``HANDSHAKE_BYTES``: the collective of a handshake."""
    own = bytearray(message.ljust(HANDSHAKE_BYTES, b"\0"))
    everyone, work = start_gather(torch.frombuffer(own, dtype=torch.uint8), group=group)
    wait(work)
    return everyone


def one_by_one(payload: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """A plain handshake: the same gather, and each rank's header is unpacked, its text and payload copied, its hash compared."""
    text = "\n".join([OPERATION, *(f"{name}={value}" for name, value in MUST_MATCH.items())]).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    own = HEADER.pack(2, 0, 0, len(text), len(payload), digest)
    received = []
    for message in gather_bytes(own + text + payload, group).numpy():
        view = memoryview(message)
        version, kind, _, text_bytes, payload_bytes, peer_digest = HEADER.unpack_from(view)
        start = HEADER.size + text_bytes
        peer_text, peer_payload = bytes(view[HEADER.size : start]), bytes(view[start : start + payload_bytes])
        received.append((version, kind, peer_digest, peer_text, peer_payload))
    kinds = {(version, kind, peer_digest) for version, kind, peer_digest, _, _ in received}
    if len(kinds) > 1:
        raise RuntimeError(f"ranks disagree: {[peer_text for *_, peer_text, _ in received]}")
    return [peer_payload for *_, peer_payload in received]


def handshake_times(factor: float) -> list[Row]:
    """Processor time of a handshake on rank 0 of pretended groups, in turns with what it is compared with."""
    rows = []
    for world in HANDSHAKE_WORLDS:
        for payload_bytes in PAYLOADS:
            payload = bytes(payload_bytes)
            # a pretended collective never reads as completed: where there are as many processors, a rank would wait awake for it
            asleep = mock.patch.object(raw_collectives, "awake_seconds", return_value=0.0)
            with asleep, pretended_group(world) as group:
                ours = all_gather(OPERATION, MUST_MATCH, payload)
                if ours != one_by_one(payload, group) or ours != [payload] * world:
                    raise RuntimeError("the two handshakes return different payloads")
                rows.append(handshake_row(world, payload, group, max(8, round(ROUNDS * factor))))
    return rows


def handshake_row(world: int, payload: bytes, group: dist.ProcessGroup, rounds: int) -> Row:
    """Medians of one payload. A/A is our own handshake against itself."""
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: all_gather(OPERATION, MUST_MATCH, payload),
        "one by one": lambda: one_by_one(payload, group),
        "gather": lambda: gather_bytes(payload, group),
        "ours again": lambda: all_gather(OPERATION, MUST_MATCH, payload),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(WARM_UP + rounds):
        for name, run in contestants.items():
            started = time.process_time()
            run()
            times[name].append(time.process_time() - started)
    median_us = {name: statistics.median(found[WARM_UP:]) * 1e6 for name, found in times.items()}
    return {
        "table": "One handshake: own processor time of rank 0 of pretended ranks, median in microseconds",
        "W": world,
        "ranks": "pretended",
        "payload_bytes": len(payload),
        "ours_us": median_us["ours"],
        "one_by_one_us": median_us["one by one"],
        "gather_us": median_us["gather"],
        "ratio": median_us["ours"] / median_us["one by one"],
        "A/A": median_us["ours again"] / median_us["ours"],
    }


def row_of(mode: str, world: int, ranks: str, found: tuple[int, int, float]) -> Row:
    """One measurement beside the closed form."""
    with mock.patch.object(process_groups, "world_size", return_value=world):
        calls, law = MODES[mode].calls(world), MODES[mode].sent(world)
    got_calls, got_bytes, mib = found
    right = got_calls == calls and got_bytes == law
    return {
        "table": f"One step, {ROWS} rows per rank, dim {DIM}: what a rank sends and needs",
        "mode": mode,
        "W": world,
        "ranks": ranks,
        "calls": got_calls,
        "law_calls": calls,
        "sent_KiB": got_bytes / 1024,
        "law_KiB": law / 1024,
        "peak_MiB": mib,
        "verdict": "met" if right else "WRONG",
    }


def counted(modes: list[str], largest: int) -> list[Row]:
    """Rows by mode and number of ranks, up to a number of pretended ones."""
    rows = []
    for world in REAL:
        everyone = run_ranks(real, modes, world_size=world)
        rows += [
            row_of(mode, world, "real", max(column))
            for mode, column in zip(modes, zip(*everyone, strict=True), strict=True)
        ]
    pairs = [(mode, w) for mode in modes for w in PRETENDED if w <= min(largest, MODES[mode].largest)]
    answers = run_ranks(pretended, pairs, world_size=1, seconds=600.0)[0]
    rows += [row_of(*pair, "pretended", found) for pair, found in zip(pairs, answers, strict=True)]
    return sorted(rows, key=lambda row: (modes.index(row["mode"]), row["ranks"] == "pretended", row["W"]))


def main(arguments: list[str]) -> list[Row]:
    """Rows by mode and number of ranks, and those of the handshake."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "modes": lambda: counted([mode for mode in MODES if options.mode in mode], options.largest),
        "handshake": lambda: run_ranks(handshake_times, options.rounds, world_size=1)[0],
    }
    parser = parser_of("scaling", __doc__, parts)
    parser.add_argument("--mode", default="", help="modes whose name contains this")
    parser.add_argument("--largest", type=int, default=4096, help="number of pretended ranks at most")
    options = parser.parse_args(arguments)
    return run_parts(parts, options.only)
