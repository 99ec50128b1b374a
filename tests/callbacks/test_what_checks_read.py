"""What checks read in every step: rows on their way, hashes of a batch's rows, and parameters that are looked up once."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses import RankCheck
from lightning_ddp_losses.callbacks import CheckStage, Finding
from lightning_ddp_losses.errors import InputError
from tests.doors import (
    BUCKETS,
    BatchReader,
    EpochRecord,
    Fact,
    ReplicatedParameters,
    RowExchange,
    columns_of,
    row_hashes,
    user_rows,
)

EXTREMES = [0, -1, 2**63 - 1, -(2**63)]
FLOATS = [0.1, -math.inf, 5.0]
# numbers of one fact, by column
NUMBERS: list[dict[str, Any]] = [{"one": 7, "loss": 0.5, "extremes": EXTREMES}, {}, {"floats": FLOATS, "none": []}]


class Given(RankCheck):  # reads given numbers, or fails, and keeps the columns that its facts receive
    is_built_in = True

    def __init__(self, facts: Sequence[dict[str, Any] | None] | str) -> None:
        super().__init__()
        self.given, self.seen = facts, {}
        number = 1 if isinstance(facts, str) else len(facts)
        self.facts = tuple(self.fact(place) for place in range(number))  # type: ignore[misc]
        self.stages = (CheckStage.TRAIN_START,)  # type: ignore[misc]

    def fact(self, place: int) -> Fact:
        def read(_: Any) -> Any:
            if isinstance(self.given, str):
                raise ValueError(self.given)
            return self.given[place]

        def see(_: Any, columns: Any) -> None:
            self.seen[place] = columns

        return Fact(f"fact {place}", CheckStage.TRAIN_START, read, see=see)


def received(*by_rank: Sequence[dict[str, Any] | None] | str) -> tuple[dict[int, Any], list[Finding]]:
    """Return the columns of each fact on rank 0, and the findings, when each rank sends what it is given."""
    nothing: Any = None
    trainer: Any = SimpleNamespace(testing=False)
    found: list[tuple[Any, Finding]] = []
    sides = []
    for given in by_rank:
        exchange = RowExchange(trainer, nothing, [check := Given(given)], None, nothing, lambda _: None)
        exchange.report_findings = found.extend  # type: ignore[method-assign, assignment]
        due = exchange.due(CheckStage.TRAIN_START, 0)
        exchange.measure(due, 0)
        sides.append((exchange, due, exchange.pack(due), check))
    first, due, _, check = sides[0]
    first.judge(due, [note for _, _, note, _ in sides], 0, place="here")
    return check.seen, [finding for _, finding in found]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_come_back_as_they_were_read(world_size: int) -> None:
    seen, found = received(*[NUMBERS] * world_size)
    assert not found
    for place, numbers in enumerate(NUMBERS):
        assert {name: list(column) for name, column in seen[place].items()} == {
            name: [value] * world_size for name, value in numbers.items()
        }


# what three ranks send of one fact, and what is judged
APART: dict[str, tuple[list[Any], Any]] = {
    "lists of other lengths": ([{"a": [1, 2]}, {"a": []}, {"a": [3]}], {"a": ([1, 2], [], [3])}),
    "ints and floats": ([{"a": 1}, {"a": 1.5}, {"a": 2}], {"a": (1, 1.5, 2)}),
    "a column more": ([{"a": 1, "b": 2}, {"a": 3}, {"a": 4, "b": 5}], {"a": (1, 3, 4)}),
    "no numbers on a rank": ([{"a": 1}, None, {"a": 2}], None),
}


@pytest.mark.parametrize("name", APART)
def test_ranks_that_send_different_facts(name: str) -> None:
    facts, expected = APART[name]
    seen, found = received(*[[each] for each in facts])
    assert seen.get(0) == expected
    assert not found


@pytest.mark.parametrize(
    ("by_rank", "failed"),
    [(([{"a": 1}], [None], "brøke"), (2,)), (("one", "two", "six"), (0, 1, 2)), (([{"a": torch.ones(2)}],), (0,))],
)
def test_a_failure_is_sent_in_place_of_numbers(by_rank: tuple[Any, ...], failed: tuple[int, ...]) -> None:
    seen, (finding,) = received(*by_rank)
    assert not seen
    assert finding.ranks == failed
    assert all(str(given) in str(finding.values) for given in by_rank if isinstance(given, str))


def test_a_row_of_a_user_is_a_table_again() -> None:
    def table(*measured: Any) -> Any:
        rows = [user_rows.numbers_of(each, "Check") for each in measured]
        assert rows == [json.loads(json.dumps(row)) for row in rows]
        return user_rows.table_of(columns_of(rows[0], [[*row.values()] for row in rows]))

    for measured in (EXTREMES, [], [1, 2.5, math.inf]):
        assert table(measured, measured) == [measured, measured]
    for dtype, values in ((torch.int64, EXTREMES), (torch.float64, FLOATS), (torch.uint8, [0, 255])):
        tensor = torch.tensor(values, dtype=dtype)
        found = table(tensor, tensor)
        assert found.dtype == dtype
        assert torch.equal(found, torch.stack([tensor, tensor]))
    # shorter rows, and rows of ints next to rows of floats
    assert table([1, 2], [3]) == [[1, 2], [3, 0]]
    assert table(torch.ones(1).long(), torch.ones(2).long()).tolist() == [[1, 0], [1, 1]]
    assert table([1], [1.5]) == [[1], [1.5]]


class Mixed(RankCheck):  # measures a list on one rank and a tensor on the other
    stages = (CheckStage.AFTER_STEP,)

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> Any:
        return [1] if trainer.global_rank == 0 else torch.ones(1).long()


@pytest.mark.parametrize("measured", [torch.zeros(1), torch.zeros(1, 1).long(), (1, 2), None, [2**63], ["1"]])
def test_what_cannot_travel_is_refused(measured: Any) -> None:
    with pytest.raises((InputError, OverflowError, TypeError)):
        user_rows.numbers_of(measured, "Check")


def leaves(features: Tensor) -> list[Tensor]:
    return [features, torch.arange(len(features)) % 3]


@pytest.mark.parametrize("width", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_a_row_has_the_same_hash_wherever_it_is(width: int, dtype: torch.dtype) -> None:
    drawn = torch.rand(80, width, generator=torch.Generator().manual_seed(width)) * 256
    features = drawn.to(dtype) if dtype != torch.bool else drawn > 128
    hashes = row_hashes(leaves(features), 80)
    assert all(0 <= value < 1 << 63 for value in hashes)
    assert row_hashes(leaves(features), 80, 64) == hashes[:64]
    assert row_hashes([leaf[8:] for leaf in leaves(features)], 72) == hashes[8:]
    assert row_hashes(leaves(features.T.contiguous().T), 80) == hashes
    assert row_hashes(leaves(features.view(80, 1, width)), 80) == hashes
    assert row_hashes(leaves(nn.Parameter(features, requires_grad=False)), 80) == hashes
    content = [(label, *row) for label, row in zip(leaves(features)[1].tolist(), features.tolist(), strict=True)]
    assert len(set(zip(content, hashes, strict=True))) == len(set(content)) == len(set(hashes))
    assert row_hashes([torch.tensor(1.0).expand(3)], 80) == [0] * 80


def test_an_epoch_counts_labels_and_remembers_its_first_batch() -> None:
    trainer: Any = SimpleNamespace(current_epoch=0, testing=False)
    batches = BatchReader(SimpleNamespace(trainer=trainer, step=0))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(300, 3, generator=generator)
    assert batches.epoch_record() is None
    contents = []
    labels: Counter[int] = Counter()
    for index in range(20):
        chosen = torch.randint(300, (40,), generator=generator)
        batch = (pool[chosen], chosen - 20)
        batches.see_batch(trainer, trainer, batch, index)
        assert batches.distinct == len(set(row_hashes(list(batch), 40)))
        contents.append(batches.content)
        labels.update((chosen - 20).tolist())
    assert len(set(contents)) == 20
    assert batches.epoch_record() == EpochRecord(0, contents[0], contents[-1])
    assert batches.counts == [sum(n for label, n in labels.items() if label % BUCKETS == b) for b in range(BUCKETS)]
    assert batches.total_rows == 800


class GraphBatch(SimpleNamespace):
    """A batch that is no nest of tensors, as graph libraries make them."""


NODES, EDGES, OF_NODE = torch.randn(9, 3), torch.randint(9, (2, 14)), torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
GRAPH_LABELS = torch.arange(3)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((NODES, OF_NODE), 9),
        ((NODES, EDGES, OF_NODE, GRAPH_LABELS), 3),
        ((NODES, EDGES, torch.randn(14, 2), OF_NODE, GRAPH_LABELS.double()), 3),
        ({"x": NODES, "edge_index": EDGES, "batch": OF_NODE, "y": GRAPH_LABELS}, 3),
        ({"edge_index": EDGES, "x": NODES, "y": OF_NODE}, 9),
        ((NODES, EDGES), 0),
        (GraphBatch(x=NODES, edge_index=EDGES, num_graphs=3), 3),
        ((GraphBatch(x=NODES, batch_size=3), GRAPH_LABELS), 3),
        (GraphBatch(x=NODES, batch_size=torch.Size([4, 2])), 4),
        (GraphBatch(x=NODES), 0),
        ({"image": NODES, "class_weights": torch.ones(4)}, 9),
        ({"tokens": EDGES, "labels": GRAPH_LABELS[:2]}, 2),
    ],
)
def test_graphs_are_counted_as_graphs(batch: Any, samples: int) -> None:
    trainer: Any = SimpleNamespace(current_epoch=0, testing=False)
    batches = BatchReader(SimpleNamespace(trainer=trainer, step=0))  # type: ignore[arg-type]
    batches.see_batch(trainer, trainer, batch, 0)
    assert batches.samples == samples


def move(module: Any, trainer: Any) -> None:
    module.b.weight, module.a.weight = module.a.weight, module.b.weight


def hand_on(module: Any, trainer: Any) -> None:
    """The last of a's parameters becomes the first of b's: the same objects in the same order."""
    bias = module.a._parameters.pop("bias")
    module.b._parameters = {"bias": bias, **module.b._parameters}


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "move": move,
    "hand on": hand_on,
    "replace": lambda module, _: setattr(module.a, "weight", nn.Parameter(module.a.weight.detach().clone())),
    "cast": lambda module, _: setattr(module.a.weight, "data", module.a.weight.data.double()),
    "reshape": lambda module, _: setattr(module.a.weight, "data", module.a.weight.data.reshape(-1)),
    "freeze": lambda module, _: module.a.bias.requires_grad_(False),
    "add a module": lambda module, _: setattr(module.b, "more", nn.Linear(1, 1)),
    "add to an optimizer": lambda _, trainer: trainer.optimizers[0].add_param_group(
        {"params": [nn.Parameter(torch.zeros(2))]}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_parameters_are_looked_up_again_when_something_changed(name: str) -> None:
    module: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, bias=False)})
    trainer = SimpleNamespace(optimizers=[torch.optim.SGD(module.parameters(), lr=0.1)], strategy=None)
    parameters = ReplicatedParameters(trainer, module)  # type: ignore[arg-type]
    before = parameters.current()
    with torch.no_grad():
        module.a.weight.add_(1.0)
    parameters.is_current = False  # another batch
    assert parameters.current() is before, "new values are no reason"
    CHANGES[name](module, trainer)
    parameters.is_current = False
    after = parameters.current()
    assert after is not before
    assert all(after[name] is parameter for name, parameter in module.named_parameters())
    parameters.is_current = False
    assert parameters.current() is after


class Planned(RankCheck):  # measures nothing
    faults = ("F44",)
    is_built_in = True

    def __init__(self, *stages: CheckStage, **options: Any) -> None:
        super().__init__(**options)
        self.stages = stages  # type: ignore[misc]

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> list[int]:
        return []


def test_facts_of_a_stage_are_looked_up_once_and_a_late_change_is_seen() -> None:
    early, late, rare = Planned(CheckStage.TRAIN_START), Planned(CheckStage.AFTER_STEP), Planned(CheckStage.AFTER_STEP)
    nothing: Any = None
    trainer: Any = SimpleNamespace(testing=False)
    exchange = RowExchange(trainer, nothing, [early, late, rare], None, nothing, lambda check: None)

    def due(stage: CheckStage, step: int = 0) -> list[RankCheck]:
        return [facts.check for facts in exchange.due(stage, step)]  # type: ignore[misc]

    assert due(CheckStage.AFTER_STEP) == [late, rare]
    assert exchange.due(CheckStage.AFTER_STEP, step=0)[0] is exchange.due(CheckStage.AFTER_STEP, step=1)[0]
    rare.every_n_steps = 3
    assert [len(due(CheckStage.AFTER_STEP, step)) for step in range(4)] == [2, 1, 1, 2]
    # another stage of a check. What it has read stays
    (kept, _) = exchange.due(CheckStage.AFTER_STEP, 0)
    early.stages = (CheckStage.AFTER_STEP,)  # type: ignore[misc]
    assert due(CheckStage.AFTER_STEP) == [early, late, rare]
    assert due(CheckStage.TRAIN_START) == []
    assert exchange.due(CheckStage.AFTER_STEP, 0)[1] is kept
    # a check that is switched off
    exchange._failed(early, {0: "an error"})
    assert due(CheckStage.AFTER_STEP) == [late, rare]
    assert [facts.check for facts in exchange.of_all_checks(CheckStage.TRAIN_END)] == [late, rare]
