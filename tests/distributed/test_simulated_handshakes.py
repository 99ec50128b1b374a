"""Every place at which a rank can fail, skip a call or stay away, and pairs of them: the handshakes' code over a simulated wire.

Each rank runs two steps of six places, in which handshakes are short, too long for the first message, overtaken by another one, on both
channels, and carry the notes of a ledger. After an error that it gets from our code it goes on with its next step, as a loop that catches
errors would. Whatever happens on one rank or two: payloads are those that were sent, errors are equal on all ranks that get them, and who
waits in vain gets an error when the time is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from lightning_ddp_losses.errors import DDPLossError, InputError
from tests.distributed.simulated_wire import Wire, WireFault
from tests.doors import Ledger, PendingHandshake, handshake

WORLD, STEPS, SHORT, LONG = 3, 2, 20, 3000


@dataclass(frozen=True)
class Fault:
    """What one rank does at one place of the first step."""

    rank: int
    place: str
    kind: str


@dataclass
class Run:
    """What one rank lived through.

    Attributes:
        errors: Texts of the errors of our code, in order. All ranks get the same ones.
        own: Errors that only this rank has: its own, or that of a peer that did not come.
        completed: Steps that it has run to their end.
    """

    errors: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)


class Gone(Exception):
    """The process of a rank ends."""


class Program:
    """Two steps of one rank."""

    def __init__(self, wire: Wire, rank: int, faults: Mapping[str, str]) -> None:
        self.wire, self.rank, self.faults = wire, rank, faults
        self.run, self.step = Run(), 0
        self.pending: dict[str, PendingHandshake] = {}
        self.ledger = Ledger()

    def __call__(self) -> Run:
        for self.step in range(STEPS):
            if not self._take_step():
                break
        return self.run

    def _take_step(self) -> bool:
        """Run one step. Return whether the process of the rank is still there."""
        self.ledger.drop()
        self.ledger.post("start", self.text("start"))
        try:
            for place in PLACES:
                self._visit(place)
            self.run.completed.append(self.step)
        except Gone:
            return False
        except DDPLossError as error:
            is_lost = "no answer from some rank" in str(error)
            is_own = is_lost or getattr(error, "is_unheard", False)
            (self.run.own if is_own else self.run.errors).append(str(error))
        except ZeroDivisionError as error:
            self.run.own.append(str(error))
        return True

    def _visit(self, place: str) -> None:
        kind = self.faults.get(place, "") if self.step == 0 else ""
        if kind == "is gone":
            raise Gone
        if kind == "stands still":
            self.wire.stand_still()
            raise Gone
        if kind == "skips":
            return
        with handshake.raising_on_all_ranks(place):
            if kind == "refuses":
                raise InputError(f"rank {self.rank} refuses {place}")
            if kind == "crashes":
                raise ZeroDivisionError(f"rank {self.rank} crashes in {place}")
            PLACES[place](self, place, kind)

    def text(self, place: str, rank: int | None = None) -> bytes:
        return f"{self.rank if rank is None else rank} {place} {self.step} ".encode()

    def start(self, place: str, kind: str, size: int = SHORT, *, on_checks: bool = False) -> PendingHandshake:
        payload = self.text(place)
        if kind == "sends more":
            size = 2 * LONG
        option = "another" if kind == "has another value" else "one"
        must_match = {"step": self.step, "option": option}
        return handshake.start(
            place, must_match, payload.ljust(size, b"x"), channel="checks" if on_checks else "handshakes"
        )

    def read(self, place: str, pending: PendingHandshake) -> None:
        for rank, payload in enumerate(pending.finish()):
            if not payload.startswith(self.text(place, rank)) or payload.strip(b"x")[-1:] != b" ":
                raise WireFault(f"{place}: rank {self.rank} got {payload[:40]!r} of rank {rank}")

    # ------------------------------------------------------------------ the places

    def short(self, place: str, kind: str) -> None:
        pending = self.start(place, kind)
        if kind != "does not read":
            self.read(place, pending)

    def long(self, place: str, kind: str) -> None:
        pending = self.start(place, kind, LONG + self.rank)
        if kind != "does not read":
            self.read(place, pending)

    def overtaken(self, place: str, kind: str) -> None:
        early = self.start(place, kind, LONG)
        self.read("another", self.start("another", ""))
        if kind != "does not read":
            self.read(place, early)

    def notes(self, place: str, kind: str) -> None:
        size = 2 * LONG if kind == "sends more" else SHORT
        name = "another" if kind == "has another value" else place
        self.ledger.post(name, self.text(place).ljust(size, b"x"))
        notes = self.ledger.meet(place, {"step": self.step})
        if list(notes) != ["start", place]:
            raise WireFault(f"{place}: rank {self.rank} got notes {list(notes)}")
        for rank in range(WORLD):
            is_right = notes["start"][rank] == self.text("start", rank) and notes[place][rank].startswith(
                self.text(place, rank)
            )
            if not is_right:
                raise WireFault(f"{place}: rank {self.rank} got other notes of rank {rank}")

    def early(self, place: str, kind: str) -> None:
        self.pending[place] = self.start(place, kind, on_checks=True)

    def late(self, place: str, kind: str) -> None:
        row = self.pending.pop("row", None)
        if row is not None and kind != "does not read":
            self.read("row", row)
        self.read(place, self.start(place, kind))


PLACES: dict[str, Callable[[Program, str, str], None]] = {
    "loss": Program.short,
    "rows": Program.long,
    "notes": Program.notes,
    "calls": Program.overtaken,
    "row": Program.early,
    "end": Program.late,
}

ALL_WELL, ONE_ERROR, ERRORS, TIME_OUT = "values", "one error on all", "errors on all", "a time-out"


def simulate(faults: tuple[Fault, ...], order: range = range(WORLD)) -> tuple[str, list[Run]]:
    """Return how it ends, and what each rank lived through."""
    wire = Wire(WORLD)
    runs: list[Run] = wire.run(
        lambda rank: Program(wire, rank, {f.place: f.kind for f in faults if f.rank == rank})(), order=order
    )
    longest = max([run.errors for run in runs], key=len)
    # a rank that does not read a row of the checks does not get its error: ranks agree on each channel
    for on_checks in (False, True):
        by_rank = [[text for text in run.errors if text.startswith("row") == on_checks] for run in runs]
        most = max(by_rank, key=len)
        for errors in by_rank:
            assert errors == most[: len(errors)], (faults, runs)
    if any("no answer" in text for run in runs for text in run.own):
        return TIME_OUT, runs
    for run in runs:
        assert run.own or len(run.errors) + len(run.completed) == STEPS, (faults, runs)
    if len(longest) > 1:
        return ERRORS, runs
    return (ONE_ERROR if longest else ALL_WELL), runs


ENDINGS: dict[str, set[str]] = {
    "refuses": {ONE_ERROR},
    "crashes": {ONE_ERROR},
    "skips": {ONE_ERROR, TIME_OUT},  # at the last place it stays one step ahead, and ends before the others
    "is gone": {TIME_OUT},
    "stands still": {TIME_OUT},
    "does not read": {ALL_WELL},
    "has another value": {ONE_ERROR},
    "sends more": {ALL_WELL},
}
"""How a run ends in which one rank does this at one place."""


@pytest.mark.parametrize("kind", ENDINGS)
def test_one_fault_at_each_place_of_each_rank(kind: str) -> None:
    found = set()
    for rank, place in itertools.product(range(WORLD), PLACES):
        faults = (Fault(rank, place, kind),)
        ending, runs = simulate(faults)
        # whichever rank is faster, all of it is the same
        assert simulate(faults, range(WORLD - 1, -1, -1)) == (ending, runs)
        found.add(ending)
    assert found == ENDINGS[kind]


@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(ENDINGS, 2)), ids=" and ".join)
def test_two_faults_at_each_pair_of_places(kinds: tuple[str, str]) -> None:
    """On two ranks, and on one rank one after the other. That payloads and errors are equal is asserted in the run."""
    for places in itertools.product(PLACES, repeat=2):
        first, second = Fault(0, places[0], kinds[0]), Fault(1, places[1], kinds[1])
        simulate((first, second))
        if places[0] != places[1]:
            simulate((first, Fault(0, places[1], kinds[1])))
