"""`ClassShardedLoss`: eight losses x options x reducers x regularisers x chunks x sampled classes, on more or fewer classes than ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchMiner
from lightning_ddp_losses.sharding import ClassShard
from tests.fuzz import forms
from tests.fuzz.calls import WAYS, call_and_differentiate
from tests.fuzz.data import RowsCase, options, rows_strategy
from tests.fuzz.engine import Domain, Found, Place, zero_or
from tests.fuzz.pml_losses import LOSSES, MINERS, build, parts_of
from tests.oracle import CLASS_LOSSES

REDUCERS = ["", "", "Mean", "Sum", "AvgNonZero", "Threshold", "PerAnchor", "ClassWeighted"]
# a softmax over fewer classes is the loss itself on them (the others refuse it or normalise by the number of classes)
SAMPLED = ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "SubCenterArcFaceLoss", "SphereFaceLoss"]
# logits are one number times cosines
OF_PRODUCTS = ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss"]
ANY_DISTANCE = ("NormalizedSoftmaxLoss", "ProxyNCALoss")


@dataclass(frozen=True)
class Case(RowsCase):
    """A call of a loss.

    Attributes:
        part: Ranks over which the classes are divided, the first ones, the next ones, ...; 0: all.
    """

    loss: str
    loss_options: tuple[tuple[str, Any], ...]
    reducer: str
    distance: str
    regularizer: str
    chunk_size: int | None
    sample_rate: float
    steps: int
    part: int
    miner: str
    way: str
    dtype: str
    products: str


@st.composite
def cases(draw: Any) -> Case:
    name = draw(st.sampled_from(CLASS_LOSSES))
    sample_rate = draw(st.sampled_from([1.0, 1.0, 0.6, 0.2]))
    if name not in SAMPLED:
        sample_rate = 1.0
    distance = draw(st.sampled_from(["", "", "Cosine", "Dot", "L2", "squared"]))
    rows = draw(rows_strategy().filter(lambda rows: rows.classes >= len(rows.ranks)))
    world = len(rows.ranks)
    form = {"products": "auto", "dtype": draw(st.sampled_from(["float64", "float64", "float32"]))}
    if name in OF_PRODUCTS and distance in ("", "Cosine", "Dot"):
        form.update(forms.draw_form(draw))
    parts = [size for size in range(1, world) if world % size == 0]
    part = draw(st.sampled_from([0, 0, *parts])) if sample_rate == 1.0 else 0
    return Case(
        rows=rows,
        loss=name,
        loss_options=tuple(sorted(options(draw, LOSSES[name]).items())),
        reducer=draw(st.sampled_from(REDUCERS if sample_rate == 1.0 else REDUCERS[:-1])),
        distance=distance if name in ANY_DISTANCE else "",
        regularizer=draw(st.sampled_from(["", "", "Lp", "ZeroMean"])) if sample_rate == 1.0 else "",
        chunk_size=draw(st.sampled_from([None, 1, 2])),
        sample_rate=sample_rate,
        steps=draw(st.integers(1, 2)) if sample_rate < 1 else 1,
        part=part,
        miner=draw(st.sampled_from(["", "", "", *MINERS])) if sample_rate == 1.0 and not part else "",
        way=draw(st.sampled_from(WAYS)) if sample_rate == 1.0 else "plain",
        **form,
    )


def make_loss(case: Case, classes: int | None = None) -> nn.Module:
    given = {"num_classes": classes or case.rows.classes, "embedding_size": case.rows.dim}
    loss = build(
        case.loss, case.dtype, case.loss_options, **given, **parts_of(case, weight_regularizer=case.regularizer)
    )
    if forms.rounds_rows(case):
        for parameter in loss.parameters():
            parameter.data = forms.rounded(parameter.data)
    return loss


def class_dim(case: Case) -> int:
    return 0 if case.loss == "ProxyNCALoss" else 1


def called(loss: Any, miner: Any, x: Tensor, labels: Tensor) -> Tensor:
    tuples = miner(x, labels) if miner is not None else None
    return loss(x, labels, tuples)


def random_key(number: int, seed: int) -> int:
    """The finalizer of splitmix64 in signed numbers of 64 bits, its shifts keeping the sign."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    key = signed(number * (0x9E3779B97F4A7C15 - 2**64) + seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        key = signed((key ^ (key >> shift)) * factor)
    return key


def classes_drawn(
    classes: int, world: int, rate: float, labels: Tensor, call: int, seeds: Sequence[int] | None = None
) -> list[int]:
    """The classes that the ranks draw in a call: each rank's share, filled up from torch's seed, which is 3 or given by rank."""
    drawn: list[int] = []
    for rank, seed in enumerate(seeds or [3] * world):
        shard = ClassShard.of_rank(classes, world, rank)
        own = range(shard.start, shard.stop)
        text = f"{seed} {shard.start} {call}"
        start = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
        keys = [random_key(number, start) for number in range(len(own))]
        targets = [label for label in own if label in labels.tolist()]
        others = sorted(set(own) - set(targets), key=lambda label: -keys[label - own.start])
        wanted = max(math.ceil(rate * len(own)), len(targets))
        drawn += sorted([*targets, *others][:wanted])
    return drawn


def sampled_loss(case: Case, weight: Tensor, x: Tensor, labels: Tensor, call: int) -> Tensor:
    """The loss over the classes that the ranks draw."""
    drawn = classes_drawn(case.rows.classes, len(case.ranks), case.sample_rate, labels, call)
    # the same loss with fewer classes, whose weight is a part of the whole one
    per_class = weight.shape[class_dim(case)] // case.rows.classes
    columns = torch.tensor([label * per_class + i for label in drawn for i in range(per_class)])
    fewer = make_loss(case, len(drawn))
    name, _ = next(fewer.named_parameters())
    part = {name: weight.index_select(class_dim(case), columns)}
    places = torch.tensor([drawn.index(label) for label in labels.tolist()])
    return torch.func.functional_call(fewer, part, (x, places))


def part_of_world(size: int) -> Any:
    """This rank's group of so many; the groups of a world are made once."""
    key = (dist.group.WORLD, size)
    if key not in _parts:
        _parts[key], _ = dist.new_subgroups(size)
    return _parts[key]


_parts: dict[Any, Any] = {}


def play(case: Case, place: Place) -> Found:
    loss: Any = make_loss(case)
    miner: Any = MINERS[case.miner]() if case.miner else None
    if not place.alone:
        group = part_of_world(case.part) if case.part else None
        more = {"chunk_size": case.chunk_size, "sample_rate": case.sample_rate, "products": case.products}
        loss = ClassShardedLoss(loss, group=group, **more)
        loss.attach(torch.optim.SGD(loss.parameters(), lr=0.1))  # it refuses sampled classes without one
        miner = GlobalBatchMiner(miner) if case.miner else None
    weight = next(iter(loss.parameters())) if place.alone else loss.weight
    data = place.data()
    if forms.rounds_rows(case):
        data["view 0"] = forms.rounded(data["view 0"])
    x, labels = place.leaf("x", data["view 0"]), place.own(data["labels"])
    for step in range(case.steps):

        def call(x: Tensor, number: int = step + 1) -> Tensor:
            if place.alone and case.sample_rate < 1:
                return sampled_loss(case, weight, x, labels, number)
            return called(loss, miner, x, labels)

        value = call_and_differentiate(case.way, call, [x])
    grad: Any = zero_or(weight)
    if place.alone:
        world, dim = len(case.ranks), class_dim(case)
        per_class, part = weight.shape[dim] // case.rows.classes, case.part or world
        shards = [ClassShard.of_rank(case.rows.classes, part, rank % part) for rank in range(world)]
        grad = [grad.narrow(dim, s.start * per_class, (s.stop - s.start) * per_class) for s in shards]
    return {"value v": value.detach(), "rank weight": grad}


DOMAIN = Domain.of("class shards", cases(), play)
