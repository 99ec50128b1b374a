"""Four ranks: all of them as one world, and as two groups of two whose batches have nothing to do with each other."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, regularizers
from torch import Tensor

from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.doors import process_groups
from tests.each_rank import each_rank
from tests.losses.cases import PML
from tests.losses.harness import CLASSES, DIM, Case, check, in_modes
from tests.losses.torch_cases import TORCH

WORLD = 4
FOUR = {"even": [3, 3, 3, 3], "uneven": [1, 0, 5, 6]}
MEMBERS = [(0, 2), (1, 3)]
TWO = {"even": [6, 6], "uneven": [5, 7], "a rank without rows": [12, 0]}
PICKED = ["ArcFaceLoss", "SupConLoss", "NTXentLoss", "ContrastiveLoss", "NPairsLoss", "MultiSimilarityLoss"]
CASES: dict[str, Case] = {
    **{name: PML[name] for name in PICKED},
    "nn.CrossEntropyLoss": TORCH["nn.CrossEntropyLoss"],
    **{
        f"{loss}, {type(regularizer).__name__}": Case(
            partial(getattr(pml, loss), num_classes=CLASSES, embedding_size=DIM, weight_regularizer=regularizer)
        )
        for loss, regularizer in (
            ("ArcFaceLoss", regularizers.ZeroMeanRegularizer()),
            ("ProxyAnchorLoss", regularizers.ZeroMeanRegularizer()),
            ("CosFaceLoss", regularizers.LpRegularizer(power=2)),
            ("ArcFaceLoss", regularizers.RegularFaceRegularizer()),
        )
    },
}
Results = dict[str, dict[str, Tensor]]


def in_the_world(name: str) -> Results:
    return in_modes(CASES[name], FOUR)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_are_one_process(pool: RankPool, name: str) -> None:
    check(CASES[name], pool.run(WORLD, in_the_world, name), FOUR)


def own_group() -> dist.ProcessGroup:
    made = [dist.new_group(list(members)) for members in MEMBERS]
    return next(group for group, members in zip(made, MEMBERS, strict=True) if dist.get_rank() in members)


def in_two_groups(names: Sequence[str]) -> dict[str, Results]:
    """Each group evaluates the same rows; the second in another order of modes, so that the groups never march in step."""
    group, found = own_group(), {}
    for name in names:
        case = CASES[name]
        modes = GlobalBatchLoss(case.make()).exact_modes()[:: -1 if dist.get_rank() in MEMBERS[1] else 1]
        found[name] = in_modes(case, TWO, modes, group=group)
    return found


def test_each_group_is_one_process(pool: RankPool) -> None:
    results = pool.run(WORLD, in_two_groups, list(CASES))
    for members in MEMBERS:
        for name, case in CASES.items():
            check(case, [results[rank][name] for rank in members], TWO)


@each_rank(WORLD)
def test_a_copy_is_over_the_same_group() -> None:
    """What deep copies give, beside the originals: over the same group, with weights of their own."""
    group = own_group()
    torch.manual_seed(3 + process_groups.rank(group))
    rows, labels, found = torch.randn(4, DIM), torch.tensor([0, 1, 2, 3]), []
    torch.manual_seed(0)
    arcface = pml.ArcFaceLoss(num_classes=CLASSES, embedding_size=DIM)
    tuples = GlobalBatchMiner(miners.PairMarginMiner(), group=group)
    for made in (GlobalBatchLoss(arcface, group=group), ClassShardedLoss(arcface, group=group), ClipLoss(group=group)):
        twin = copy.deepcopy(made)
        second = rows.flip(1) if isinstance(made, ClipLoss) else labels
        found += [made(rows, second).item(), twin(rows, second).item()]
        with torch.no_grad():
            next(iter(twin.parameters())).zero_()
        assert any(p.any() for p in made.parameters())
    found = [*found, len(tuples(rows, labels)[3]), len(copy.deepcopy(tuples)(rows, labels)[3])]
    assert found[::2] == found[1::2]


def disagree_in_one_group() -> str:
    """Ranks 1 and 3 differ in width; ranks 0 and 2 are not to be troubled."""
    loss = GlobalBatchLoss(CASES["SupConLoss"].make(), group=own_group())
    width = 5 + (dist.get_rank() == 3)
    try:
        loss(torch.randn(4, width), torch.tensor([0, 0, 1, 1]))
    except RankMismatchError as error:
        return str(error)
    return "fine"


def test_an_error_stays_in_its_group(pool: RankPool) -> None:
    said = pool.run(WORLD, disagree_in_one_group)
    assert said[0] == said[2] == "fine"
    assert said[1] == said[3]
    assert "(4, 5)" in said[1] or "('rows', 5)" in said[1], said[1]
    assert "6)" in said[1]
