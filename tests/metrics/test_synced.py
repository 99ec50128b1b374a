"""`synced`: updates (3, 0, 1) on three ranks equal those of one process, in one exchange; the rest is as torchmetrics has it."""

from __future__ import annotations

import pickle
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics import MetricCollection, classification, detection, retrieval, text
from torchmetrics.detection import mean_ap
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

from lightning_ddp_losses import ConfigurationError, differentiable, synced
from lightning_ddp_losses.cli.manual import find_page
from lightning_ddp_losses.metrics import exchange
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import map_tensors, process_groups
from tests.each_rank import each_rank
from tests.metrics.harness import offline
from tests.refusals import Mistake, refusals, refusals_of_one_process

UPDATES = (3, 0, 1)
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------- batches, by a number


def pair(seed: int) -> Batch:
    target = torch.randn(5, generator=seeded(seed))
    return (target + torch.randn(5, generator=seeded(seed + 50)), target), {}


def pair_of_two(seed: int) -> Batch:
    return tuple(torch.randn(5, 2, generator=seeded(seed + k)) for k in (0, 50)), {}


def binary(seed: int) -> Batch:
    rows = (6 + seed % 3,)
    return (torch.rand(rows, generator=seeded(seed)), torch.randint(2, rows, generator=seeded(seed))), {}


def classes(seed: int) -> Batch:
    return tuple(torch.randint(3, (7,), generator=seeded(seed + k)) for k in (0, 50)), {}


def queries(seed: int) -> Batch:
    indexes = torch.randint(4, (8,), generator=seeded(seed))
    return (torch.rand(8, generator=seeded(seed)), torch.arange(8) % 2 == 0), {"indexes": indexes}


def panoptic(seed: int) -> Batch:
    def one(k: int) -> Tensor:
        return torch.stack([torch.randint(2, (1, 4, 4), generator=seeded(seed + k)), torch.zeros(1, 4, 4).long()], -1)

    return (one(0), one(50)), {}


def sentences(seed: int) -> Batch:
    words = ["the", "cat", "sat", "on", "a", "mat", "by", "my", "door"]
    order = torch.randperm(len(words), generator=seeded(seed)).tolist()
    return ([" ".join(words[i] for i in order), " ".join(words[:5])], [[" ".join(words)], [" ".join(words[2:6])]]), {}


def rouge(seed: int) -> Batch:
    (found, truth), _ = sentences(seed)
    return (found[: 1 + seed % 2], [each[0] for each in truth][: 1 + seed % 2]), {}


def masks(seed: int) -> Batch:
    def one(k: int, number: int) -> dict[str, Tensor]:
        shape, scores = (
            torch.rand(number, 8, 8, generator=seeded(seed + k)) > 0.4,
            torch.rand(number, generator=seeded(seed)),
        )
        return {"masks": shape, "labels": torch.arange(number) % 2, "scores": scores}

    return ([one(0, 1 + seed % 3)], [one(0, 2)]), {}


def numbers(seed: int) -> Batch:
    return (torch.randn(4 + seed % 2, generator=seeded(seed)),), {}


# ---------------------------------------------------------------------- metrics


class Sentences(tm.Metric):
    """Lists of text, of lists of tensors, and of numbers that are summed as the metric says."""

    full_state_update = False
    texts: list[Any]
    nested: list[Any]
    sums: Any
    least: Tensor
    stacked: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("texts", [], None)
        self.add_state("nested", [], None)
        self.add_state("sums", [], lambda tensors: torch.stack(tensors).sum(0))
        self.add_state("least", torch.tensor(9.0), "min")
        self.add_state("stacked", torch.zeros(2), lambda stacked: stacked.amax(0))

    def update(self, rows: Tensor) -> None:
        self.texts.append(f"{float(rows.sum()):.3f}")
        self.nested.append([rows, [rows[:1]]])
        self.sums.append(rows[:2])
        self.least = torch.minimum(self.least, rows.min())
        self.stacked = torch.maximum(self.stacked, rows[:2])

    def compute(self) -> dict[str, Any]:
        flat = torch.cat([torch.cat([rows, *first]) for rows, first in self.nested])
        sums = self.sums if isinstance(self.sums, Tensor) else torch.stack(self.sums).sum(0)
        code = torch.tensor([float(text) * k for k, text in enumerate(self.texts)])
        return {"flat": flat, "code": code, "sums": sums, "least": self.least, "stacked": self.stacked}


class Mean(tm.Metric):
    """The mean of means: exact as every update has as many rows."""

    full_state_update = False
    mean: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("mean", torch.tensor(0.0), "mean")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.mean = self.mean + ((preds - target).abs().mean() - self.mean) / self._update_count

    def compute(self) -> Tensor:
        return self.mean


def segmentations() -> tm.Metric:
    # asked for, and not needed for masks
    vars(mean_ap)["_TORCHVISION_AVAILABLE"] = True
    for name in ("torchvision", "torchvision.ops"):
        sys.modules.setdefault(name, MagicMock(__spec__=None))
    return mean_ap.MeanAveragePrecision(iou_type="segm")


def binned_and_others() -> MetricCollection:
    names = ("BinaryAccuracy", "BinaryPrecision", "BinaryAUROC", "BinaryAveragePrecision", "BinaryMatthewsCorrCoef")
    return MetricCollection([getattr(classification, name)() for name in names])


def mixed() -> MetricCollection:
    window = Running(tm.MeanSquaredError(), window=9)
    return MetricCollection({"a": tm.SpearmanCorrCoef(), "b": MinMaxMetric(tm.MeanAbsoluteError()), "c": window})


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Batch]]] = {
    "ConfusionMatrix": (lambda: tm.ConfusionMatrix(task="multiclass", num_classes=3), classes),
    "AUROC, exact": (lambda: tm.AUROC(task="binary"), binary),
    "AUROC, binned": (lambda: tm.AUROC(task="binary", thresholds=7), binary),
    "PearsonCorrCoef": (tm.PearsonCorrCoef, pair),
    "CatMetric": (tm.CatMetric, numbers),
    "MaxMetric": (tm.MaxMetric, numbers),
    "MeanMetric": (tm.MeanMetric, numbers),
    "SpearmanCorrCoef": (tm.SpearmanCorrCoef, pair),
    "R2Score": (lambda: tm.R2Score(multioutput="raw_values"), pair_of_two),
    "RetrievalMAP": (retrieval.RetrievalMAP, queries),
    "PanopticQuality": (lambda: detection.PanopticQuality(things={0}, stuffs={1}), panoptic),
    "BLEUScore": (lambda: text.BLEUScore(n_gram=2), sentences),
    "ROUGEScore": (lambda: text.rouge.ROUGEScore(rouge_keys=("rouge1", "rougeL")), rouge),
    "MeanAveragePrecision": (segmentations, masks),
    "Sentences": (Sentences, numbers),
    "Mean": (Mean, pair),
    "MinMaxMetric": (lambda: MinMaxMetric(tm.MeanSquaredError()), pair),
    "ClasswiseWrapper": (lambda: ClasswiseWrapper(classification.MulticlassRecall(3, average=None)), classes),
    "MultioutputWrapper": (lambda: MultioutputWrapper(tm.SpearmanCorrCoef(), 2), pair_of_two),
    "Running": (lambda: Running(tm.MeanSquaredError(), window=9), pair),
    "composition": (lambda: 2 * tm.SpearmanCorrCoef() - tm.MeanSquaredError(), pair),
    "compute groups": (binned_and_others, binary),
    "collection": (mixed, pair),
}


def updated(metric: Any, batch: Callable[[int], Batch], seeds: list[int]) -> Any:
    for seed in seeds:
        args, kwargs = batch(seed)
        metric.update(*args, **kwargs)
    return metric


def own_seeds(rank: int, more: int = 0) -> list[int]:
    return [10 * step + rank for step in range(UPDATES[rank] + more)]


def all_seeds(more: int = 0) -> list[int]:
    """In the order of one process: by update, then by rank."""
    return sorted(seed for rank in range(len(UPDATES)) for seed in own_seeds(rank, more))


def numbers_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t.detach().double().flatten()), value)
    return found


def assert_equal(ours: Any, truth: Any) -> None:
    got, wanted = numbers_in(ours), numbers_in(truth)
    assert len(got) == len(wanted) > 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
@each_rank(3, fresh=True)
def test_uneven_updates_equal_one_process_in_one_exchange(name: str) -> None:
    """Compute, compare with one process, and go on: what was synced is put back."""
    make, batch = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank, plain = dist.get_rank(), make()
        metric = updated(synced(plain), batch, own_seeds(rank))
        assert isinstance(metric, type(plain))
        with CountCollectives() as collectives:
            value = metric.compute()
        alone = updated(offline(make()), batch, all_seeds())
        assert_equal(value, alone.compute())
        if name != "Sentences":  # holds a lambda
            metric = pickle.loads(pickle.dumps(metric))
        updated(metric, batch, own_seeds(rank, more=1)[-1:])
        alone.reset()
        assert_equal(metric.compute(), updated(alone, batch, all_seeds(more=1)).compute())
        metric.reset()
        assert not any(each._is_synced for each in metric.modules() if isinstance(each, tm.Metric))
        # a handshake, at a size that it has not grown to yet, and a gather
        assert 1 <= len(collectives.names) <= 3
        assert not any("barrier" in each for each in collectives.names)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric", "ignore:No positive", "ignore:No negative")
@pytest.mark.parametrize("rows", [1, 4000])  # in the handshake, and in a collective of their own
@each_rank(3)
def test_members_of_a_compute_group_send_their_states_once(rows: int) -> None:
    """Bytes of the buffer that a collection's compute reads, and of one member's; ranks without updates have no groups."""
    found = []
    names = ("BinaryAUROC", "BinaryAveragePrecision", "BinaryROC")
    for thresholds in (None, 7):
        members = [getattr(classification, name)(thresholds=thresholds) for name in names]
        sizes = []
        for metric in (MetricCollection(members), members[0]):
            ours = synced(metric)
            for seed in own_seeds(dist.get_rank()):
                (preds, target), _ = binary(seed)
                ours.update(preds.repeat(rows), target.repeat(rows))
            with mock.patch.object(exchange, "plan_buffer", wraps=exchange.plan_buffer) as planned:
                ours.compute()
            arguments, _ = planned.call_args
            sizes.append(exchange.plan_buffer(*arguments).size)
        found.append(tuple(sizes))
    for of_collection, of_member in found:
        assert of_collection == of_member > 0


# ---------------------------------------------------------------------- wrappers with a window, draws, or several metrics


@each_rank(3)
def test_wrappers_join_what_the_ranks_hold() -> None:
    """BootStrapper: the metric of the joined states of its draws; a tracker: each increment, and all of them in one exchange."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank = dist.get_rank()
        # Running keeps a window for each rank: the last two updates of rank 0 and the one of rank 2
        window = updated(synced(Running(tm.SumMetric(), window=2)), numbers, own_seeds(rank))
        assert_equal(window.compute(), updated(offline(tm.SumMetric()), numbers, [2, 10, 20]).compute())
        # each rank draws by itself
        drawn = synced(BootStrapper(tm.MeanSquaredError(), num_bootstraps=3, raw=True))
        torch.manual_seed(rank)
        updated(drawn, pair, own_seeds(rank))
        states = [metric.metric_state for metric in drawn.metrics]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, states)
        merged = [offline(tm.MeanSquaredError()) for _ in states]
        for of_rank in every:
            for metric, state in zip(merged, of_rank, strict=True):
                metric.merge_state(state)
        with CountCollectives() as collectives:
            value = drawn.compute()
        assert len(collectives.names) == 1
        assert_equal(value["raw"], torch.stack([metric.compute() for metric in merged]))
        # a tracker
        tracker, alone = synced(MetricTracker(tm.MeanSquaredError())), MetricTracker(offline(tm.MeanSquaredError()))
        assert isinstance(tracker, MetricTracker)
        for _ in range(3):
            tracker.increment()
            alone.increment()
            updated(tracker, pair, own_seeds(rank))
            updated(alone, pair, all_seeds())
        with CountCollectives() as collectives:
            value = tracker.compute_all()
        assert len(collectives.names) == 1
        assert_equal(value, alone.compute_all())
        assert_equal(tracker.compute(), alone.compute())
        assert tracker.best_metric() == pytest.approx(alone.best_metric())


# ---------------------------------------------------------------------- as torchmetrics has it


def semantics(ours: bool) -> list[Any]:
    """One story that torchmetrics' own metrics can tell too: as many updates on each rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rank, world = dist.get_rank(), dist.get_world_size()
        found: list[Any] = []
        as_is: Callable[[Any], Any] = synced if ours else lambda metric: metric
        user_error = partial(pytest.raises, tm.utilities.exceptions.TorchMetricsUserError)
        groups = [dist.new_group([other]) for other in range(world)]

        def told(metric: Any) -> None:
            found.append([each.tolist() for each in numbers_in(metric.metric_state)])

        for make in (tm.MeanMetric, tm.CatMetric, lambda **kw: tm.AUROC(task="binary", **kw), tm.PearsonCorrCoef):
            by_name = {"MeanMetric": numbers, "CatMetric": numbers, "PearsonCorrCoef": pair}
            batch = by_name.get(make.__name__, binary)
            for options in (
                {},
                {"sync_on_compute": False},
                {"dist_sync_on_step": True},
                {"process_group": groups[rank]},
                {"compute_with_cache": False},
                {"distributed_available_fn": lambda: False},
                {"dist_sync_fn": lambda tensor, group: [tensor, tensor]},
            ):
                metric = as_is(make(**options))
                for seed in (rank, 10 + rank):
                    args, kwargs = batch(seed)
                    found.append([each.tolist() for each in numbers_in(metric(*args, **kwargs))])
                told(metric)
                # rows of an update lie together, as in one process; torchmetrics' by rank
                found += [sorted(each.tolist()) for each in numbers_in(metric.compute())]
                found += [metric._is_synced, metric._computed is None, metric.update_count, list(metric.state_dict())]
                told(metric)
            # by hand
            metric = as_is(make())
            updated(metric, batch, [rank])
            metric.sync()
            found.append(metric._is_synced)
            found += [
                len(value) if isinstance(value, list) else list(value.shape) for value in metric.metric_state.values()
            ]
            args, _ = batch(rank)
            for wrong in (metric.sync, partial(metric, *args)):
                found.append(str(user_error(wrong).value))
            metric.unsync()
            found.append(str(user_error(metric.unsync).value))
            with metric.sync_context(should_sync=False):
                told(metric)
            # copies, merged and stored states
            other = metric.clone()
            updated(other, batch, [20 + rank])
            told(metric)
            if make is not tm.PearsonCorrCoef:
                metric.merge_state(other)
            metric.persistent(True)
            found.append(sorted(metric.state_dict()))
            found.append([sorted(each.tolist()) for each in numbers_in(metric.compute())])
            metric.reset()
            told(metric)
        return found


def test_options_and_methods_are_torchmetrics(pool: RankPool) -> None:
    for ours, theirs in zip(pool.run(2, semantics, True), pool.run(2, semantics, False), strict=True):
        assert ours == theirs


@each_rank(2)
def test_states_of_nothing_and_by_hand() -> None:
    """What the states are after a sync of nothing, and `_reductions` that were set by hand."""
    metric = synced(tm.CatMetric())
    metric.sync()
    found: list[Any] = [metric.value.shape, metric.value.dtype]
    for maker in (synced, differentiable):
        by_hand = maker(Sentences())
        by_hand._reductions = {"foo": torch.sum, "bar": torch.cat}
        by_hand.foo, by_hand.bar = torch.tensor(1), [torch.tensor([1])]
        by_hand._sync_dist()
        found += [int(by_hand.foo), by_hand.bar.tolist()]
    assert found == [(0,), torch.float32, 2, [1, 1], 2, [1, 1]]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@each_rank(3)
def test_classes_and_growing_collections() -> None:
    """Classes, classes that make others, copies, collections that grow, metrics that are ours already."""
    made = updated(synced(tm.AUROC)(task="binary"), binary, own_seeds(dist.get_rank()))
    classed = synced(MinMaxMetric)(tm.MeanMetric())
    plain = synced(tm.MeanMetric)()  # a class that makes nothing else
    grown = synced(MetricCollection([tm.MeanMetric()]))
    grown.add_metrics({"more": tm.SumMetric()})
    for metric in (classed, grown, plain):
        updated(metric, numbers, own_seeds(dist.get_rank()))
    with CountCollectives() as collectives:
        values = [made.compute(), classed.compute(), grown.compute(), plain.compute()]
    mean, total = (
        updated(offline(alone), numbers, all_seeds()).compute() for alone in (tm.MeanMetric(), tm.SumMetric())
    )
    truth = updated(offline(tm.AUROC(task="binary")), binary, all_seeds()).compute()
    assert_equal(values, [truth, mean, mean, mean, mean, total, mean])
    assert len(collectives.names) == 4
    for ours in (made, differentiable(tm.MeanSquaredError())):
        assert type(synced(ours)) is type(ours)
    assert isinstance(made, classification.BinaryAUROC)
    assert isinstance(classed, MinMaxMetric)
    assert synced(tm.AUROC) is synced(tm.AUROC)


# ---------------------------------------------------------------------- ranks that differ, and refusals


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@each_rank(3)
def test_empty_tensors_do_not_count() -> None:
    """Empty tensors of other dtypes beside rows: the rows, in their dtype."""
    metric, none = synced(tm.CatMetric()), torch.zeros(0)
    metric.value = [[torch.arange(3)], [none], [none.double(), torch.arange(2)]][dist.get_rank()]
    if dist.get_rank() == 2:
        metric.value = metric.value[1:]
    found = metric.compute().tolist()
    assert found == [0, 1, 2, 0, 1]


def forgot(rank: int) -> None:
    metric = updated(synced(retrieval.RetrievalMAP()), queries, [rank])
    (metric if rank else synced(tm.SumMetric())).compute()


def texts(of_rank: Any) -> None:
    metric = synced(Sentences())
    metric.texts = [of_rank]
    metric.compute()


DIFFER: dict[str, tuple[Any, ...]] = {
    "another metric": (forgot, ("RetrievalMAP", "SumMetric", "rank 0", "rank 1")),
    "objects and tensors": (
        lambda r: texts("text" if r else torch.zeros(1)),
        ("Sentences.texts", "objects", "tensors", "rank 0", "rank 1"),
    ),
    "another number of classes": (
        lambda r: updated(synced(tm.ConfusionMatrix(task="multiclass", num_classes=3 + r)), classes, [0]).compute(),
        ("Confusion", "rank 0", "rank 1"),
    ),
    "no plain value": (lambda r: texts((lambda: None) if r else "text"), ("Sentences.texts", "add_safe_globals")),
}
_warns = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
test_ranks_that_differ_raise_on_all = _warns(refusals(__name__, "DIFFER"))


def forgotten(folder: str) -> None:
    """Rank 0 does not compute. It comes back after its peer's time-out, and meets the end of the connection."""
    group, seen = dist.new_group(), Path(folder, "seen")
    metric = updated(synced(retrieval.RetrievalMAP(process_group=group)), queries, [dist.get_rank()])
    with mock.patch.object(process_groups, "_timeout", timedelta(seconds=2)):
        synced(tm.SumMetric(process_group=group)).sync()
    if dist.get_rank() == 0:
        while not seen.exists():
            time.sleep(0.01)
    try:
        metric.compute()
    finally:
        seen.touch()


def test_a_rank_that_never_computes_is_an_error_within_the_time_out(pool: RankPool, tmp_path: Path) -> None:
    for rank, error in enumerate(pool.errors(2, forgotten, str(tmp_path), fresh=True)):
        assert error.type == "PeerError"
        assert f"rank {rank} waited in metric RetrievalMAP, compute: expected every rank to come" in error.message


def none_inputs(convert: Callable[[Any], Any]) -> list[str]:
    """Errors for an input of None."""
    found = []
    for make in (tm.MeanSquaredError, tm.MeanMetric, tm.CatMetric):
        for call in ("forward", "update"):
            arguments = (None, None) if make is tm.MeanSquaredError else (None,)
            with pytest.raises((TypeError, AttributeError)) as error:
                getattr(convert(make()), call)(*arguments)
            found.append(f"{error.type.__name__}: {error.value}")
    return found


def test_a_none_input_is_the_error_of_torchmetrics() -> None:
    truth = none_inputs(lambda metric: metric)
    assert none_inputs(synced) == none_inputs(differentiable) == truth


class OwnSync(tm.SumMetric):
    def _sync_dist(self, *_: Any, **__: Any) -> None:
        raise AssertionError


class Stacked(tm.SumMetric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.zeros(2), None)


REFUSED: dict[str, Mistake] = {
    "a sync of its own": (lambda: synced(OwnSync()), ("OwnSync", "_sync_dist", "add_state")),
    "a state of no reduction": (lambda: synced(Stacked()), ("Stacked", "`kept`", "dist_reduce_fx=None")),
    "whole batches": (
        lambda: synced(tm.NormalizedRootMeanSquaredError()),
        ("NormalizedRootMeanSquaredError", "`total`"),
    ),
    "no metric": (lambda: synced(torch.nn.Linear(1, 1)), ("Linear", "metric")),
}
test_what_cannot_be_joined_is_refused_by_name = refusals_of_one_process(REFUSED, ConfigurationError)


# ---------------------------------------------------------------------- query numbers


def warned_of_queries(first_query: int, computes: int = 1, **options: Any) -> list[str]:
    """What a retrieval metric says, with 3 queries on each rank that are numbered from ``first_query`` times the rank."""
    metric = synced(retrieval.RetrievalMRR(compute_with_cache=False, **options))
    indexes = torch.arange(3).repeat_interleave(2) + first_query * dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(computes):
            metric.update(torch.rand(6), torch.arange(6) % 2 == 0, indexes=indexes)
            metric.compute()
    return [str(warning.message) for warning in caught if "on other ranks" in str(warning.message)]


@each_rank(2)
def test_query_numbers_that_ranks_share_are_said_once() -> None:
    """Not if they are apart, and not of a rank whose value is its own."""
    assert warned_of_queries(3) == []
    assert warned_of_queries(0, sync_on_compute=False) == []
    (text,) = warned_of_queries(0, computes=2)
    assert "RetrievalMRR" in text
    assert "6 rows of this rank's queries are on other ranks" in text
    assert "first_query_of_this_rank" in text
    (text,) = warned_of_queries(2)
    assert "2 rows of this rank's queries" in text


def candidates() -> tuple[Tensor, Tensor, Tensor]:
    """Scores, whether relevant, and the query of 4 candidates (8, 4) of each of 8 queries, as 2 ranks have them, 4 queries each."""
    scores = torch.rand(8, 4, generator=seeded(1414))
    return scores, torch.eye(4, dtype=torch.bool).repeat(2, 1), torch.arange(8).unsqueeze(1).expand(8, 4)


def value_of(metric: Any, rows: slice, *, shift: float = 0.0, from_zero: bool = False) -> tuple[float, bool]:
    """Value of a metric over both ranks, and whether it warned."""
    scores, relevant, queries = (column[rows].flatten() for column in candidates())
    metric = synced(metric)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metric.update(scores + shift, relevant, indexes=queries % 4 if from_zero else queries)
        value = float(metric.compute())
    return value, any("on other ranks" in str(warning.message) for warning in caught)


@each_rank(2)
def test_the_traps_of_retrieval_are_those_of_the_page() -> None:
    """The figures of `ddp-losses explain retrieval`, beside those of one process."""
    own, whole = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4), slice(None)
    recall, mrr = partial(retrieval.RetrievalRecall, top_k=1), retrieval.RetrievalMRR
    page = " ".join((find_page(["retrieval"]) or "").split())
    # every rank updates with the whole matrix
    assert value_of(recall(), own) == (0.375, False)
    assert value_of(recall(), whole) == (0.1875, True)
    assert "a recall of 0.375 is 0.1875" in page
    # query numbers that begin at 0 on each rank
    assert value_of(mrr(), own) == (pytest.approx(0.60, abs=0.005), False)
    assert value_of(mrr(), own, from_zero=True) == (pytest.approx(0.81, abs=0.005), True)
    assert "an MRR of 0.60 is 0.81" in page
    # scores of 0 and below, all of them here
    for metric in (recall(), mrr(), retrieval.RetrievalMAP(), retrieval.RetrievalPrecision(top_k=1)):
        assert value_of(metric, own, shift=-1.0) == (0.0, False)
    assert "Scores of 0 and below never count" in page
