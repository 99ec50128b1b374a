"""What the ranks' rows of data amount to: the same batches, shared rows, other orders, other lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks

_LEAST_BATCHES, _LEAST_ROWS = 2, 8
_LEAST_SHARED = 4


class SameBatches:
    """Counts how long pairs of ranks have been given the same batches.

    Batches that do not change from step to step prove nothing (a toy, or overfitting on purpose).
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        self._before: list[int] = []

    def judge(self, contents: Sequence[int], distinct: Sequence[int], *, iterable: bool) -> list[Finding]:
        """The contents of this step's batches by rank (0: not read), and their numbers of different rows."""
        if 0 in contents:
            return []
        runs: dict[tuple[int, int], tuple[int, int]] = {}
        first: dict[int, int] = {}
        guilty: set[int] = set()
        for rank, content in enumerate(contents):
            leader = first.setdefault(content, rank)
            if leader == rank:
                continue
            batches, rows = self._runs.get((leader, rank), (0, 0))
            if not self._before or self._before[rank] != content:
                batches, rows = batches + 1, rows + distinct[rank]
            runs[leader, rank] = batches, rows
            if batches >= _LEAST_BATCHES and rows >= _LEAST_ROWS:
                guilty |= {leader, rank}
        self._runs, self._before = runs, list(contents)
        if not guilty:
            return []
        fix = (
            "An iterable dataset must give each rank its own part: use torch.distributed's rank and world size in __iter__."
            if iterable
            else "Let Lightning inject a DistributedSampler (use_distributed_sampler=True), or deal the batches with GlobalBatchSampler."
        )
        whose = "all ranks" if len(guilty) == len(contents) else "some ranks"
        return [
            Finding(
                "F71" if iterable else "F67",
                f"{whose} train on the same batches",
                "rows of its own for each rank",
                tuple(sorted(guilty)),
                name="batches",
                fix=fix,
            )
        ]


def overlap(sketches: Sequence[Sequence[int]]) -> list[Finding]:
    """Ranks that share rows of an epoch while none repeats its own: each draws from the whole data set in an order of its own.

    Drawing with replacement, and data that hold the same row twice, repeat rows within a rank as often as between ranks.

    Args:
        sketches: By rank: rows read, and the smallest of their hashes with how often each came in the low two bits.
    """
    read = [sketch[0] for sketch in sketches]
    kept = [{value & ~3: value & 3 for value in sketch[1:] if value} for sketch in sketches]
    if not all(kept):
        return []
    # up to here every rank's list is complete
    edge = min(max(own) if len(own) == len(sketch) - 1 else 1 << 62 for own, sketch in zip(kept, sketches, strict=True))
    ranks = Counter(value for own in kept for value in own if value <= edge)
    shared = sum(number > 1 for number in ranks.values())
    repeated = len({value for own in kept for value, count in own.items() if value <= edge and count > 1})
    padding = 2 * len(sketches) * len(ranks) / max(sum(read), 1)  # rows that an even division repeats
    if shared < _LEAST_SHARED + padding or shared <= 4 * repeated:
        return []
    what = f"{shared} of {len(ranks)} rows looked at were given to more than one rank in one epoch, and others to none"
    fix = "Seed alike on every rank before the sampler is made (seed_everything), or deal the batches with GlobalBatchSampler."
    return [Finding("F69", what, "each row on one rank", name="rows", fix=fix)]


def different_orders(orders: Sequence[int]) -> list[Finding]:
    """Ranks that cut their parts out of orders which should be one."""
    if 0 in orders or len(set(orders)) == 1:
        return []
    return [
        Finding(
            "F69",
            "the order that ranks cut their rows from",
            "the same on every rank, else rows come twice and others never",
            odd_ranks(orders),
            name="order",
            fix="Seed alike on every rank (seed_everything without the rank), or deal the batches with GlobalBatchSampler.",
        )
    ]


def different_ends(texts: Sequence[str], numbers: Sequence[int]) -> Finding:
    """Ranks whose epochs end at different batches."""
    return Finding(
        "F36",
        "training batches of this epoch",
        "the same number on every rank, else the others wait for ever",
        odd_ranks(numbers),
        name="number of batches",
        values=tuple(texts),
        fix="Give ranks equal parts of the data (drop_last=True, a DistributedSampler), or set limit_train_batches or max_steps.",
    )


def imbalance(counts: list[list[int]]) -> float:
    """Largest total variation between a rank's labels and those of all ranks: 0 is alike, 1 has nothing in common."""
    everyone = [sum(column) for column in zip(*counts, strict=True)]
    whole = sum(everyone)
    if not whole:
        return 0.0
    worst = 0.0
    for own in counts:
        mine = sum(own)
        if mine:
            apart = sum(abs(a / mine - b / whole) for a, b in zip(own, everyone, strict=True)) / 2
            worst = max(worst, apart)
    return worst
