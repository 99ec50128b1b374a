"""Sharded classes: what is refused, on every rank alike; sampled negatives; replicas of the shards; copies; checkpoints by hand."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, ConfigurationError, InputError
from lightning_ddp_losses.testing import RankPool
from tests.doors import shard_of
from tests.each_rank import each_rank
from tests.losses.harness import line_of_rows
from tests.losses.sharded_cases import CLASSES, DIM, Case, global_rows, hard, judge, make, net, step_rows, whole
from tests.oracle import assert_close, graded, joined
from tests.refusals import Mistake, refusals, refusals_of_one_process

ARC = Case("ArcFaceLoss")
LABELS = torch.tensor([0, 3, 6])
rows = partial(line_of_rows, count=3)


def ask(*args: Any, case: Case = ARC, **options: Any) -> Any:
    return ClassShardedLoss(make(case), **options)(*args)


def other(**options: Any) -> ClassShardedLoss:
    given = {"num_classes": CLASSES, "embedding_size": DIM, **options}
    return ClassShardedLoss(pml.ArcFaceLoss(**given).double())


def load(state: dict[str, Tensor]) -> None:
    loss = ClassShardedLoss(make(ARC))
    loss.load_state_dict(state)


def weigh(factor: float) -> None:
    loss = ClassShardedLoss(make(ARC))
    for _ in range(2):
        (loss(rows(), LABELS) * factor).backward()


def overwrite() -> None:
    loss = ClassShardedLoss(pml.ArcFaceLoss(num_classes=8, embedding_size=DIM).double())
    dist.broadcast(weight := loss.weight.detach().t().contiguous(), 0)
    loss.weight.data.copy_(weight.t())
    loss(rows(), LABELS)


def factored_step() -> None:
    loss = ClassShardedLoss(make(ARC), sample_rate=0.5)
    stepper = torch.optim.Adafactor(loss.parameters())
    loss.attach(stepper)
    loss(rows(), LABELS).backward()
    stepper.step()


class Other(pml.ArcFaceLoss):
    """Might compute anything."""


def sharded(name: str = "ArcFaceLoss", options: dict[str, Any] | None = None, **ours: Any) -> Callable[[], Any]:
    return lambda: ClassShardedLoss(make(Case(name, options or {})), **ours)


def regularized(regularizer: Any, **ours: Any) -> Callable[[], Any]:
    return sharded(options={"weight_regularizer": regularizer}, **ours)


def built(loss: Any = pml.ArcFaceLoss, **options: Any) -> Callable[[], Any]:
    return lambda: ClassShardedLoss.build(loss, num_classes=9, embedding_size=4, **options)


REFUSED: dict[str, Mistake] = {
    "a loss without classes": (lambda: ClassShardedLoss(pml.SupConLoss()), "SupConLoss"),
    "a subclass": (lambda: ClassShardedLoss(Other(num_classes=3, embedding_size=2)), "Other"),
    "no loss": (lambda: ClassShardedLoss("ArcFaceLoss"), "str"),  # type: ignore[arg-type]
    "chunk 0": (sharded(chunk_size=0), "chunk_size"),
    "chunk beyond the classes": (sharded(chunk_size=CLASSES + 1), "1 to 7"),
    "sample rate 0": (sharded(sample_rate=0.0), "sample_rate"),
    "a regulariser between classes": (regularized(regularizers.RegularFaceRegularizer()), "RegularFaceRegularizer"),
    "a regulariser that needs a mean": (
        regularized(regularizers.CenterInvariantRegularizer()),
        "CenterInvariantRegularizer",
    ),
    "a distance": (sharded("NormalizedSoftmaxLoss", {"distance": distances.SNRDistance()}), "SNRDistance"),
    "orthogonal classes": (built(weight_init_func=torch.nn.init.orthogonal_), "orthogonal_"),
    "an option that the loss has not": (built(margins=1), "margins"),
    "a loss that cannot be built": (built(pml.SupConLoss), "SupConLoss"),
    "sampling with a regulariser": (regularized(regularizers.LpRegularizer(), sample_rate=0.5), "weight_regularizer"),
    "a reducer that reduces later": (sharded(options={"reducer": reducers.DoNothingReducer()}), "DoNothingReducer"),
    "sampling with an optimizer that looks at all rows": (factored_step, "Adafactor"),
    "sampling with any optimizer": (lambda: ask(rows(), LABELS, sample_rate=0.5), "attach"),
}
test_what_cannot_work_is_refused_by_name = refusals_of_one_process(REFUSED, ConfigurationError)


# ---------------------------------------------------------------------- sampling


SCALES: dict[str, dict[str, Any]] = {"CosFaceLoss, scale 2": {"scale": 2}}
LR = 0.05


def sampled(name: str, unbiased: bool, schedule: str, optimizer: str, set_to_none: bool) -> dict[str, Any]:
    """A schedule on sampled classes; what was drawn comes along.

    Of the schedule, ``c`` calls the loss and accumulates, ``s`` calls it and steps, ``k`` calls it and skips the step, ``i`` steps without
    a call.
    """
    world = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    case = Case(name.split(",", maxsplit=1)[0], SCALES.get(name, {}))
    loss = ClassShardedLoss(make(case), sample_rate=0.4, unbiased=unbiased, chunk_size=2)
    stepper = make_optimizer(optimizer, [loss.weight])
    loss.attach(stepper)
    rows, drawn, values = global_rows([12 // world] * world), [], []
    for number, event in enumerate(schedule):
        if event != "i":
            value = loss(net()(rows["features"]).detach() * (1 + number), rows["labels"] // 3)
            drawn.append(loss.sampler.sampled + loss.shard.start)
            values.append(value.detach())
            value.backward()
        if event in "si":
            stepper.step()
        if event != "c":
            stepper.zero_grad(set_to_none=set_to_none)
    state = {key: v for key, v in stepper.state[loss.weight].items() if v.ndim}
    return {"drawn": drawn, "values": values, "weight": loss.weight.detach().clone(), **state}


def make_optimizer(name: str, parameters: list[Any]) -> torch.optim.Optimizer:
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": partial(torch.optim.Adam, lr=0.1),
        "adamw, amsgrad": partial(torch.optim.AdamW, lr=0.1, amsgrad=True, weight_decay=0.2),
        "rprop": partial(torch.optim.Rprop, lr=LR),
        "sgd": partial(torch.optim.SGD, lr=LR, momentum=0.9, weight_decay=0.1),
    }
    return makers[name](parameters)


def by_hand(
    name: str, drawn: list[list[Tensor]], unbiased: bool, schedule: str, optimizer: str, sizes: list[int]
) -> dict[str, Any]:
    """One process on the drawn classes: a small loss of their rows, and steps of these rows."""
    name, options = name.split(",", maxsplit=1)[0], SCALES.get(name, {})
    weight = next(iter(make(Case(name, options)).parameters()))
    per_class = weight.shape[1] // CLASSES
    stepper, batch = make_optimizer(optimizer, [weight]), global_rows()
    labels, values, touched = batch["labels"] // 3, [], set()
    for number, event in enumerate(schedule):
        if event == "i":
            continue
        features = net()(batch["features"]).detach() * (1 + number)
        chosen = sorted(int(c) for rank in drawn for c in rank[len(values)])
        columns = {c * per_class + i: None for c in chosen for i in range(per_class)}
        small = getattr(pml, name)(num_classes=len(chosen), embedding_size=DIM, **options).double()
        key, _ = next(small.named_parameters())
        small._parameters[key] = weight[:, list(columns)]
        place = torch.tensor([chosen.index(int(label)) for label in labels])
        if unbiased:
            value = torch.nn.functional.cross_entropy(corrected(small, features, place, labels, chosen, sizes), place)
        else:
            value = small(features, place)
        values.append(value.detach())
        value.backward()
        touched |= columns.keys()
        if event == "s":
            step_rows(stepper, weight, torch.tensor(sorted(touched)), 1, step_size=LR)
        if event != "c":
            stepper.zero_grad()
            touched = set()
    state = {key: tensor for key, tensor in stepper.state[weight].items() if tensor.ndim}
    return {"values": values, "weight": weight.detach(), **state}


def corrected(
    small: Any, features: Tensor, place: Tensor, labels: Tensor, chosen: list[int], sizes: list[int]
) -> Tensor:
    """Logits with the logarithm of one over the probability of each negative."""
    logits = small.get_logits(features).clone()
    rows = torch.arange(len(features))
    cosine = logits[rows, place] / small.scale
    logits[rows, place] = small.modify_cosine_of_target_classes(cosine) * small.scale
    start = 0
    for size in sizes:
        shard = range(start, start + size)
        targets = set(labels.tolist()) & set(shard)
        extra = [i for i, c in enumerate(chosen) if c in shard and c not in targets]
        if extra:
            logits[:, extra] -= math.log(len(extra) / (size - len(targets)))
        start += size
    return logits


SAMPLED = [  # loss, unbiased, schedule, optimizer, gradients set to None
    ("ArcFaceLoss", False, "ssssss", "sgd", True),
    ("CosFaceLoss", True, "ssssss", "sgd", True),
    ("CosFaceLoss, scale 2", True, "ssssss", "sgd", True),
    ("SubCenterArcFaceLoss", False, "cscscs", "sgd", True),
    ("SoftTripleLoss", False, "ccsccs", "sgd", True),
    ("NormalizedSoftmaxLoss", False, "cscscs", "sgd", True),
    ("ArcFaceLoss", False, "ssssss", "adam", True),
    ("SubCenterArcFaceLoss", False, "cscscs", "adam", True),
    ("CosFaceLoss", True, "ssssss", "adamw, amsgrad", True),
    ("ArcFaceLoss", False, "ssssss", "rprop", True),
    # rows without a gradient stay where they are
    *(
        ("ArcFaceLoss", False, *schedule_and_optimizer, to_none)
        for to_none in (True, False)
        for schedule_and_optimizer in itertools.product(["sis", "sksi", "skics", "ksiiks"], ["sgd", "adam", "rprop"])
    ),
]


@pytest.mark.parametrize(("name", "unbiased", "schedule", "optimizer", "to_none"), SAMPLED)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sampled_classes(
    pool: RankPool, world_size: int, name: str, unbiased: bool, schedule: str, optimizer: str, to_none: bool
) -> None:
    results = pool.run(world_size, sampled, name, unbiased, schedule, optimizer, to_none)
    sizes = [min(-(-CLASSES // world_size), CLASSES - r * -(-CLASSES // world_size)) for r in range(world_size)]
    truth = by_hand(name, [r["drawn"] for r in results], unbiased, schedule, optimizer, sizes)
    assert any(len(d) < size for r, size in zip(results, sizes, strict=True) for d in r["drawn"]), "nothing was sampled"
    for result in results:
        torch.testing.assert_close(result["values"], truth["values"], rtol=1e-9, atol=1e-12)
    keys = [key for key in results[0] if key not in ("drawn", "values")]
    assert_close({k: torch.cat([r[k] for r in results], 1) for k in keys}, {k: truth[k] for k in keys})


def sampling(rate: float) -> tuple[ClassShardedLoss, torch.optim.Optimizer]:
    loss = ClassShardedLoss(make(ARC), sample_rate=rate)
    stepper = make_optimizer("sgd", [loss.weight])
    loss.attach(stepper)
    return loss, stepper


def changed_classes(loss: ClassShardedLoss, before: Tensor) -> list[int]:
    return ((loss.weight.detach() - before).abs().sum(0) > 0).nonzero().flatten().tolist()


def of_class(label: int) -> Tensor:
    return torch.full((3,), label)


def test_touched_rows_follow_the_gradient() -> None:
    """Two calls before one backward; a gradient that is dropped without a step."""
    loss, stepper = sampling(0.1)  # the batch's own class alone
    loss(rows(), of_class(0)).backward()
    stepper.zero_grad()  # nothing was stepped
    before = loss.weight.detach().clone()
    (loss(rows(), of_class(1)) + loss(rows(), of_class(6))).backward()
    stepper.step()
    assert changed_classes(loss, before) == [1, 6]


def test_sampling_in_evaluation_and_in_a_second_fit() -> None:
    """Without gradient all classes count, and an optimizer of a second fit is attached too."""
    loss, stepper = sampling(0.1)
    with torch.no_grad():
        assert torch.equal(loss(rows(), LABELS), ClassShardedLoss(make(ARC))(rows(), LABELS))
    for _ in range(2):
        loss.attach(stepper)
        before = loss.weight.detach().clone()
        loss(rows(), of_class(0)).backward()
        stepper.step()
        stepper.zero_grad()
        assert changed_classes(loss, before) == [0]
        stepper = make_optimizer("sgd", [loss.weight])
        loss.attach(stepper)


def test_sampling_with_a_closure() -> None:
    """Lightning runs forward and backward inside the optimizer's step."""
    loss, stepper = sampling(0.3)
    before, still = loss.weight.detach().clone(), []

    def closure() -> Tensor:
        stepper.zero_grad()
        value = loss(rows(), of_class(0))
        value.backward()
        still.append({c for c in range(CLASSES) if c not in loss.sampler.sampled})
        return value

    for _ in range(2):
        stepper.step(closure)
    changed = changed_classes(loss, before)
    assert 0 in changed
    assert still[0] & still[1]
    assert not still[0] & still[1] & set(changed)


# ---------------------------------------------------------------------- replicas, copies, states


IN_PARTS: dict[str, Case] = {
    "no regulariser": ARC,
    "mined": Case("ArcFaceLoss", mine=hard),
    "several centers": Case("SubCenterArcFaceLoss"),
    "zero mean": Case("ArcFaceLoss", {"weight_regularizer": regularizers.ZeroMeanRegularizer()}),
    "norms": Case("CosFaceLoss", {"weight_regularizer": regularizers.LpRegularizer(power=2), "weight_reg_weight": 0.4}),
    "sum of norms": Case(
        "ProxyNCALoss", {"weight_regularizer": regularizers.LpRegularizer(p=3, reducer=reducers.SumReducer())}
    ),
    "sparse centers": Case(
        "SoftTripleLoss",
        {"weight_regularizer": regularizers.SparseCentersRegularizer(CLASSES, 10), "weight_reg_weight": 2},
    ),
}


def in_parts(name: str, sizes: list[int], part_size: int = 2) -> dict[str, Tensor]:
    """Ranks in parts: each part holds all classes."""
    rank, case = dist.get_rank(), IN_PARTS[name]
    part, _ = dist.new_subgroups(part_size)
    plain = make(case)
    if rank >= part_size:  # the parts start from different weights; the first one's counts
        torch.nn.init.normal_(next(plain.parameters()))
    loss = ClassShardedLoss(plain, group=part)
    encoder, batch = net(), global_rows(sizes)
    embeddings = encoder(batch["features"])
    value = loss(embeddings, batch["labels"], case.mine and case.mine(embeddings, batch["labels"]))
    return graded(value, net=encoder, weight=loss.weight)


def as_one_process(results: list[dict[str, Tensor]], part: list[dict[str, Tensor]], name: str) -> dict[str, Tensor]:
    """What ranks in parts have; the weight of one part."""
    found = [{key: tensor for key, tensor in result.items() if key != "weight"} for result in results]
    return {**joined(found), "weight": whole([result["weight"] for result in part], name)}


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [1, 4, 2, 5], [0, 2, 7, 3], [5, 7, 0, 0]], ids=str)
def test_shards_with_replicas(pool: RankPool, name: str, sizes: list[int]) -> None:
    results, case = pool.run(4, in_parts, name, sizes), IN_PARTS[name]
    truth = judge(case, sizes)
    for part in (results[:2], results[2:]):
        assert_close(as_one_process(results, part, case.name), truth)


def test_parts_of_one_rank_in_one_world_after_another(pool: RankPool) -> None:
    """Ranks that were in a world before, with replicas of their own in it, meet others that were not."""
    for sizes in ([3, 4, 5], [3, 4, 2, 3]):
        results = pool.run(len(sizes), in_parts, "no regulariser", sizes, part_size=1, fresh=True)
        for result in results:
            assert_close(as_one_process(results, [result], ARC.name), judge(ARC, sizes))


def test_replicas_without_rows(pool: RankPool) -> None:
    for found in pool.run(4, in_parts, "no regulariser", [0] * 4):
        assert not any(each.any() for each in found.values())


def in_parts_with(option: str, rank: int) -> None:
    part, _ = dist.new_subgroups(2)
    given = {"options": {option: regularizers.LpRegularizer()}} if option != "sample_rate" else {option: 0.5}
    sharded(group=part, **given)()


@each_rank(2)
def test_copies_pickles_and_new_parameters_keep_the_shard() -> None:
    loss, batch = ClassShardedLoss(make(ARC)), global_rows([6, 6])
    features = net()(batch["features"]).detach()
    value = loss(features, batch["labels"]).detach()
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(other(features, batch["labels"]).detach(), value)
        assert other.shard == loss.shard
    # moves that make a new parameter, of the loss and of a module that holds it
    before, shard = loss.weight, loss.shard
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        loss.float()
        torch.nn.Sequential(loss).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert loss.weight is not before
    assert shard_of(loss.weight) == shard_of(copy.deepcopy(loss).weight) == shard


def loads(state: dict[str, Tensor]) -> Tensor:
    loss = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=CLASSES, embedding_size=DIM).double()
    loss.load_state_dict(state)
    again = ClassShardedLoss(make(ARC))
    again.load_state_dict(loss.state_dict())  # this rank's own part
    assert torch.equal(again.weight, loss.weight)
    shard = again.shard
    again.load_state_dict({"W": state["W"].clone()}, assign=True)
    assert torch.equal(again.weight, loss.weight)
    assert shard_of(again.weight) == shard
    return loss.weight.detach().clone()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_plain_losss_weight_loads(pool: RankPool, world_size: int) -> None:
    state = dict(make(ARC).state_dict())
    parts = pool.run(world_size, loads, state)
    assert torch.equal(whole(parts, "ArcFaceLoss"), state["W"])


def loads_rank_0s(path: str) -> tuple[str, bool]:
    """Save on rank 0 alone, load on every rank, as a script does that forgets that ranks differ."""
    loss = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=6, embedding_size=DIM, seed=1)
    before = loss.weight.detach().clone()
    if dist.get_rank() == 0:
        torch.save(loss.state_dict(), path)
    dist.barrier()
    message = ""
    try:
        loss.load_state_dict(torch.load(path))
    except InputError as error:
        message = str(error)
    return message, torch.equal(loss.weight, before)


def test_another_ranks_part_is_refused(pool: RankPool, tmp_path: Path) -> None:
    (own, _), (other, kept) = pool.run(2, loads_rank_0s, str(tmp_path / "part.pt"))
    assert own == ""
    assert "expected the whole, or classes 3 to 6 of 6" in other
    assert "got classes 0 to 3 of 6" in other
    assert kept


def test_one_process_and_the_plain_loss_share_their_state() -> None:
    plain, loss = make(ARC), ClassShardedLoss(make(ARC))
    assert list(loss.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(loss.state_dict())


def resized(path: str) -> Any:
    return torch.load(path, weights_only=False)(rows(), LABELS)


def save_shard(folder: str) -> str:
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(ClassShardedLoss(make(ARC)), path)
    return path


def test_a_shard_alone_is_refused(pool: RankPool, tmp_path: Any) -> None:
    path = pool.run(2, save_shard, str(tmp_path))[0]
    for error in pool.errors(1, resized, path):
        assert "divided over" in error.message


BAD: dict[str, tuple[Any, ...]] = {
    "a label beyond the classes on one rank": (
        lambda r: ask(rows(), LABELS + r),
        ("labels", "0 to 6", "1 to 7", "rank 1"),
    ),
    "a negative label on one rank": (lambda r: ask(rows(), LABELS - r), "-1 to 5"),
    "labels of a float dtype": (lambda r: ask(rows(), LABELS.double() if r else LABELS), "integer dtype"),
    "too few labels": (lambda r: ask(rows(), LABELS[r:]), "shape (3,)"),
    "no labels": (lambda r: ask(rows(), None if r else LABELS), "labels"),
    "another width on one rank": (lambda r: ask(rows(DIM + r), LABELS), ("(n, 6)", "(3, 7)")),
    "another dtype on one rank": (
        lambda r: ClassShardedLoss(make(ARC).float())(rows(dtype=torch.float64 if r else torch.float32), LABELS),
        ("float32", "float64"),
    ),
    "embeddings of integers": (lambda r: ask(torch.ones(3, DIM, dtype=torch.long), LABELS), "floating"),
    "other classes on one rank": (lambda r: other(num_classes=CLASSES + r), ("classes=7", "classes=8")),
    "another margin on one rank": (lambda r: other(margin=20 + r)(rows(), LABELS), "margin"),
    "a tuple on one rank": (lambda r: ask(rows(), LABELS, (LABELS * 0,) * 3 if r else None), "miner"),
    "a tuple of other rows": (lambda r: ask(rows(), LABELS, (LABELS + 3 * r,) * 3), ("indices_tuple", "0 to 2")),
    "fewer classes than ranks": (
        lambda r: ClassShardedLoss(pml.ArcFaceLoss(num_classes=1, embedding_size=DIM)),
        ("at least one for each of 2 ranks", "1"),
    ),
    "fewer classes than ranks, built": (
        lambda r: ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=1, embedding_size=DIM),
        "at least one for each of 2 ranks",
    ),
    "a shard of another rank's size": (lambda r: load({"W": torch.ones(DIM, 2)}), ("(6, 7) of all classes", "(6, 2)")),
    "another coefficient": (lambda r: weigh(1.0 + r), "coefficient"),
    "the same rows on all ranks": (lambda r: overwrite(), "ddp_losses"),
    **{
        f"{option} in parts": (partial(in_parts_with, option), f"{option}: expected", "ConfigurationError", 4)
        for option in ("sample_rate", "embedding_regularizer")
    },
}
test_bad_input_is_the_same_error_everywhere = refusals(__name__, "BAD")


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss", "SubCenterArcFaceLoss", "NormalizedSoftmaxLoss"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@each_rank(2)
def test_a_first_call_without_gradients_changes_nothing_later(name: str, mode: Any) -> None:
    first, second = sharded(name)(), sharded(name)()
    second.load_state_dict(first.state_dict())
    with mode():
        evaluated = first(rows(), LABELS)
    assert not evaluated.requires_grad
    embeddings = rows().requires_grad_()
    found = []
    for loss in (first, second):
        value = loss(embeddings, LABELS)
        of_rows, of_weight = torch.autograd.grad(value, [embeddings, loss.weight])
        found.append({"value": value.detach(), "rows": of_rows, "weight": of_weight})
    assert_close(*found)
    assert_close({"value": evaluated}, {"value": found[1]["value"]})
