"""What samplers and predictions refuse: sources that cannot be cut, states of another sampler, ranks that draw differently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_ddp_losses import ConfigurationError, GlobalBatchSampler, InputError, gather_predictions
from tests.doors import refuse_other_batches
from tests.fits import make_trainer
from tests.refusals import Mistake, Refused, refusals, refusals_of_one_process
from tests.samplers import test_predictions as predictions
from tests.samplers.cases import CASES, LABELS, ROWS, SEED
from tests.samplers.test_lightning import loader_of

pytestmark = [*predictions.pytestmark, pytest.mark.filterwarnings("ignore:predict returned None")]

DATA = TensorDataset(torch.arange(4))


class Endless(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


class Infinite(Endless):
    def __len__(self) -> Any:
        raise NotImplementedError


def shuffled(**given: Any) -> Any:
    return GlobalBatchSampler.shuffled(**{"length": 9, "global_batch_size": 3, "seed": 1} | given)  # type: ignore[arg-type]


def resumed(sampler: Any, /, **change: Any) -> list[Any]:
    """What a sampler draws from its own state with changes."""
    sampler.load_state_dict(sampler.state_dict() | change)
    return list(sampler)


def resumed_inside_the_epoch() -> list[Any]:
    """A release that draws another order would resume elsewhere without a word."""
    sampler = shuffled(length=53, global_batch_size=12)
    next(iter(sampler))
    return resumed(sampler, digest="0" * 16)


ALONE: dict[str, Mistake] = {
    "a number": (lambda: GlobalBatchSampler(7, 2), "expected a sampler with a length, got int"),
    "a data set": (lambda: GlobalBatchSampler.batches(DATA, 2), "got TensorDataset"),
    "a loader": (lambda: GlobalBatchSampler.batches(DataLoader(DATA)), "got DataLoader"),
    "no length": (lambda: GlobalBatchSampler(Endless(), 2), "got Endless without one"),
    "no usable length": (lambda: GlobalBatchSampler(Infinite(), 2), "got Infinite without one"),
    "an iterator": (lambda: GlobalBatchSampler(iter([1]), 2), "got list_iterator without one"),
    "nested": (
        lambda: GlobalBatchSampler(GlobalBatchSampler(range(4), 2), 2),
        "got GlobalBatchSampler, which is cut by rank already",
    ),
    "nested batches": (
        lambda: GlobalBatchSampler.batches(GlobalBatchSampler.batches(range(4), 2)),
        "got GlobalBatches, which is cut by rank already",
    ),
    "around a distributed sampler": (
        lambda: GlobalBatchSampler.batches(BatchSampler(DistributedSampler(DATA, 2, 0), 2, False)),
        "got DistributedSampler, which is cut by rank already",
    ),
    "deep inside": (
        lambda: GlobalBatchSampler.batches(
            type("Mine", (BatchSampler,), {})(GlobalBatchSampler(range(4), 2), 2, False)
        ),
        "got Mine around a GlobalBatchSampler, which is cut by rank already",
    ),
    "size 0": (lambda: GlobalBatchSampler(range(4), 0), "local_batch_size: expected an integer, 1 or more"),
    "size True": (lambda: GlobalBatchSampler.batches(range(4), True), "global_batch_size: expected"),
    "no size": (lambda: GlobalBatchSampler(range(4), None), "local_batch_size: expected an integer, 1 or more"),
    "seed": (lambda: GlobalBatchSampler(range(4), 2, seed=-1), "seed: expected a whole number"),
    "two sizes": (
        lambda: GlobalBatchSampler.batches(BatchSampler(range(4), 2, False), 2),
        "expected no global_batch_size or drop_last in addition to its own",
    ),
    "drop_last of batches": (
        lambda: GlobalBatchSampler.batches(CASES["by length"].make(), drop_last=True),
        "Leave it to the sampler",
    ),
    "batches as sampler=": (
        lambda: GlobalBatchSampler(BatchSampler(range(4), 2, False), 2),
        "batch_sampler=GlobalBatchSampler.batches(sampler)",
    ),
    "built by hand": (
        lambda: type(GlobalBatchSampler.batches(range(4), 2))(range(4), 2, False),
        "Write GlobalBatchSampler.batches",
    ),
    "another batch size inside": (
        lambda: list(GlobalBatchSampler.batches(MPerClassSampler(LABELS, 4, 12), 24)),
        "batch_size of the MPerClassSampler: expected 24 (global_batch_size), got 12",
    ),
    "a loader of 4 rows": (
        lambda: refuse_other_batches(loader_of(4)),
        ("batch_size of the DataLoader around GlobalBatchSampler: expected 3, ", "got 4"),
    ),
    "a loader without batches": (lambda: refuse_other_batches(loader_of(None)), ("expected 3, ", "got None")),
    "a loader that drops the last": (
        lambda: refuse_other_batches(loader_of(3, True)),
        "drop_last of the DataLoader around GlobalBatchSampler",
    ),
    "shuffled: length": (lambda: shuffled(length=0), "length"),
    "shuffled: size": (lambda: shuffled(global_batch_size=0), "global_batch_size"),
    "shuffled: no seed": (lambda: shuffled(seed=None), "seed"),
    "shuffled: seed -1": (lambda: shuffled(seed=-1), "seed"),
    "predictions of ranks that are gone": (
        lambda: gather_predictions(SimpleNamespace(world_size=2, strategy=object()), []),
        "BasePredictionWriter",
    ),
}
test_alone = refusals_of_one_process(ALONE, ConfigurationError)

# what is seen in the draw, or in a state
DRAWS: dict[str, Mistake] = {
    "batches where indices were said": (
        lambda: list(GlobalBatchSampler(CASES["hierarchical"].make(), 2)),
        "expected indices, got batches",
    ),
    "indices where batches were said": (
        lambda: list(GlobalBatchSampler.batches(SequentialSampler(range(4)))),
        ("expected batches, got indices", "GlobalBatchSampler.batches(sampler, global_batch_size)"),
    ),
    "a state of another length": (lambda: resumed(shuffled(), length=8), "expected 8, as saved, got 9"),
    "a state of another sampler": (lambda: resumed(shuffled(), sampler="RandomSampler"), "Permutation"),
    "a state inside a batch": (lambda: resumed(shuffled(), rows=4), "got row 4"),
    "a state of another order": (resumed_inside_the_epoch, "got digest 60255ba0"),
    "no state": (lambda: GlobalBatchSampler(range(8), 2).load_state_dict([1]), "got list"),
}
test_draws = refusals_of_one_process(DRAWS, InputError)


def undivided() -> Any:
    return GlobalBatchSampler(MPerClassSampler(LABELS, 4, 16, length_before_new_iter=48), 5)


def other_labels() -> Any:
    labels = LABELS.roll(dist.get_rank() // 2)
    return GlobalBatchSampler.batches(MPerClassSampler(labels, 4, 12, length_before_new_iter=48), 12)


def other_epoch() -> Any:
    sampler: Any = GlobalBatchSampler.batches(range(48), 12)
    sampler.set_epoch(dist.get_rank())
    return sampler


def too_small() -> Any:
    return GlobalBatchSampler.batches(range(50), 12)


def rows_on_one_rank() -> Any:
    return GlobalBatchSampler.batches([["a"]] * 6 if dist.get_rank() == 1 else ["a"] * 6, 3)


def other_length() -> Any:
    return GlobalBatchSampler.batches(range(48 + 12 * (dist.get_rank() == 1)), 12)


def refused(name: str, form: str, rows: int, options: dict[str, Any], change: dict[str, Any]) -> None:
    """Load the state of a run of 12 rows a batch, 24 rows into epoch 0, with changes, into another sampler."""
    saved: Any = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), 12, seed=SEED)
    reader = iter(saved)
    next(reader), next(reader)
    state = saved.state_dict() | change
    source = CASES[name].make() if name in CASES else RandomSampler(range(int(name)))
    sampler: Any = GlobalBatchSampler(source, rows, **options)
    if form == "batches":
        sampler = GlobalBatchSampler.batches(source, rows, **options)
    sampler.load_state_dict(state)
    list(sampler)


def loaded_by_one() -> None:
    sampler: Any = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), 12, seed=SEED)
    if dist.get_rank() == 1:
        sampler.load_state_dict(sampler.state_dict() | {"rows": 24})
    list(sampler)


STATES: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "global batch": (
        ("random", "indices", 6, {}, {}),
        ["global batch size: expected 12, as saved, got 18 (3 ranks * local_batch_size 6)", "local_batch_size=4"],
    ),
    "another global batch": (("random", "batches", 6, {}, {}), ["expected 12, as saved, got 6"]),
    "sampler": (("weighted", "batches", 12, {}, {}), ["sampler: expected RandomSampler, as saved, got Weighted"]),
    "length": (("60", "batches", 12, {}, {}), ["length: expected 52, as saved, got 60", "start a new epoch"]),
    "seed": (("random", "batches", 12, {"seed": 1}, {}), [f"seed: expected {SEED}, got 1", f"Give it seed={SEED}"]),
    "drop_last": (
        ("random", "batches", 12, {"drop_last": True}, {}),
        ["drop last: expected False, as saved, got True"],
    ),
    "order": (("random", "batches", 12, {}, {"digest": "ab" * 16}), ["saved (digest abababab)", "in epoch 0"]),
    "place": (("random", "batches", 12, {}, {"rows": 30}), ["the end of one of its 5 batches of 52 rows", "row 30"]),
    "no state": (("random", "batches", 12, {}, {"rows": "many"}), ["the result of its state_dict()", "many"]),
}


WRONG: dict[str, tuple[Callable[[int], Callable[[Tensor, Tensor], Any]], tuple[str, ...]]] = {
    # what each rank's predict_step returns, words of the message
    "a number per batch": (lambda r: lambda x, y: x.mean(0, keepdim=True), ("batch 0", "expected 2 rows", "got 1")),
    "no row": (lambda r: lambda x, y: x.mean(), ("0-dim",)),
    "nothing on one rank": (lambda r: lambda x, y: None if r else x, ("NoneType",)),
    "a dict of another kind": (lambda r: lambda x, y: OrderedDict(x=x), ("OrderedDict",)),
    "text": (lambda r: lambda x, y: {"x": x, "name": "seven"}, ("str",)),
    "other widths": (lambda r: lambda x, y: x[:, : 2 + r], ("rank 0", "('rows', 2)", "('rows', 3)")),
    "other names": (lambda r: lambda x, y: {f"x{r}": x}, ("x0", "x1")),
    "rows or tensors": (
        lambda r: lambda x, y: {"pair": [x[:, 0]] * len(y)},
        ("list ['pair']", "as many tensors as rows", "Return a tuple"),
    ),
    "rows of two dtypes": (
        lambda r: lambda x, y: [x[0], *(each.int() for each in x[1:])],
        ("row 1: expected as row 0: 'torch.float64 with 1", "torch.int32 with"),
    ),
    "rows that are text": (lambda r: lambda x, y: {"names": ["one"] * len(y)}, ("list ['names']", "got str")),
    "a list that is too short": (lambda r: lambda x, y: [x[0, :1]], ("expected 2 rows", "a list with one tensor")),
    "padded to the batch": (
        lambda r: lambda x, y: x[:, : 1 + int(y.max()) % 3],
        ("Pad to one shape", "a list with one tensor for each row"),
    ),
}


def predict_wrong(name: str) -> Any:
    trainer = make_trainer("ddp", use_distributed_sampler=True)
    model = predictions.Model(WRONG[name][0](dist.get_rank()))
    return gather_predictions(trainer, trainer.predict(model, predictions.LOADERS["in order"]()))


def validate_shuffled() -> None:
    trainer = make_trainer("ddp", use_distributed_sampler=False)
    trainer.validate(predictions.Model(), predictions.LOADERS["shuffled"](), verbose=False)


SIXTEEN = "expected 15 (3 ranks * local_batch_size 5), got 16"
ON_RANKS: dict[str, Refused] = {
    "16 rows for 3 ranks, at len": Refused(
        lambda _: len(undivided()),
        [SIXTEEN, "GlobalBatchSampler.batches(sampler, 16)", "unevenly"],
        "ConfigurationError",
        3,
    ),
    "16 rows for 3 ranks": Refused(lambda _: list(undivided()), [SIXTEEN], "ConfigurationError", 3),
    "2 rows left, at len": Refused(
        lambda _: len(too_small()), ["batch 4: expected at least one", "drop_last=True"], "InputError", 3
    ),
    "2 rows left for 3 ranks": Refused(
        lambda _: list(too_small()), ["batch 4: expected at least one", "got 2"], "InputError", 3
    ),
    "a small batch": Refused(
        lambda _: list(GlobalBatchSampler.batches([[0, 1, 2], [3, 4]])),
        ["batch 1: expected at least one", "got 2"],
        "InputError",
        3,
    ),
    "other labels": Refused(
        lambda _: list(other_labels()),
        ["GlobalBatchSampler(MPerClassSampler) drew in epoch 0", "rank 2: digest", "same labels"],
        "RankMismatchError",
        3,
    ),
    "other length": Refused(
        lambda _: list(other_length()),
        ["GlobalBatchSampler(range): length", "rank 1: length=60"],
        "RankMismatchError",
        3,
    ),
    "other epoch": Refused(lambda _: list(other_epoch()), ["epoch", "rank 2: epoch=2"], "RankMismatchError", 3),
    "one rank fails": Refused(
        lambda _: list(rows_on_one_rank()), ["expected indices, got batches", "rank 1 of 3"], "InputError", 3
    ),
    "other seeds": Refused(lambda rank: list(shuffled(seed=rank)), "seed", same=False),
    # states
    **{
        f"a state: {name}": Refused(lambda _, args=args: refused(*args), texts, "InputError", 3)
        for name, (args, texts) in STATES.items()
    },
    "a state on one rank": Refused(lambda _: loaded_by_one(), "rows trained on", "RankMismatchError", same=False),
    "a state in another kind of order": Refused(
        lambda _: resumed(shuffled(length=53, global_batch_size=12), sampler="ShuffledOrder", epoch=2, rows=24),
        "sampler: expected ShuffledOrder, as saved, got Permutation",
        "InputError",
        same=False,
    ),
    # predictions
    **{
        f"predictions: {name}": Refused(lambda _, name=name: predict_wrong(name), texts)
        for name, (_, texts) in WRONG.items()
    },
    **{
        f"predictions in the orders of each rank, {options}": Refused(
            lambda _, options=options: predictions.predict("shuffled", **options),
            ("rows of loader 0: expected each on one rank, cut from one order", "that came to several ranks, and"),
            ranks=3,
            same=False,
        )
        for options in ({}, {"dst": 0})
    },
    "an order that nobody knows": Refused(
        lambda _: validate_shuffled(), ("RandomSampler", "trainer.predict"), same=False
    ),
    "a rank that is not there": Refused(
        lambda rank: predictions.predict("in order", dst=rank + 1), "a rank from 0 to 1, or None, got 2", same=False
    ),
}
test_on_ranks = refusals(__name__, "ON_RANKS")
