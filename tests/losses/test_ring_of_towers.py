"""Two towers round a ring: what is trained or given on some ranks only, several calls, groups, messages, and disagreement."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses import ClipLoss, ConfigurationError, SigLipLoss
from tests.counting import CountCollectives
from tests.losses.harness import SPLITS, own_rows
from tests.losses.harness import global_rows as all_rows
from tests.losses.test_two_towers import Case, Towers, textbook
from tests.oracle import assert_close
from tests.rank_pool import RankPool

LOSSES = {"CLIP": Case(ClipLoss, {"tile_bytes": 128}), "SigLIP": Case(SigLipLoss, {"init_bias": -1.0})}
TRAINED: dict[str, Callable[[Towers], list[nn.Module]]] = {  # and what is frozen
    "all": lambda towers: [],
    "no texts": lambda towers: [towers.text],
    "no images": lambda towers: [towers.image],
    "scale and bias": lambda towers: [towers.text, towers.image],
}


def freeze(parts: list[nn.Module]) -> None:
    for part in parts:
        part.requires_grad_(False)


def gradients(towers: Towers) -> dict[str, Tensor]:
    return {name: p.grad for name, p in towers.named_parameters() if p.grad is not None}


Loss = Callable[[Towers, Tensor, Tensor], Tensor]


def two_steps(towers: Towers, rows: dict[str, Tensor], loss: Loss) -> dict[str, Tensor]:
    """Two calls a step, the towers' places changed, and two steps added up, weighed unlike each other."""
    for weight in (1.0, 0.3):
        x, y = towers.image(rows["features"] * weight), towers.text(rows["views"])
        (weight * loss(towers, x, y) + loss(towers, y, x)).backward()
    return gradients(towers)


def alone(name: str, trained: str) -> dict[str, Tensor]:
    case = LOSSES[name]
    towers = Towers(case)
    freeze(TRAINED[trained](towers))
    return two_steps(towers, all_rows(), lambda t, x, y: textbook(case, t, x, y, None, None))


def on_ranks(name: str, split: str) -> dict[str, dict[str, Tensor]]:
    rank, found = dist.get_rank(), {}
    for trained, frozen in TRAINED.items():
        towers = Towers(LOSSES[name], "ring")
        freeze(frozen(towers))
        towers = pickle.loads(pickle.dumps(copy.deepcopy(towers)))
        rows = own_rows(SPLITS[dist.get_world_size()][split], rank)
        found[trained] = two_steps(towers, rows, lambda t, x, y: t.loss(x, y))
    return found


@pytest.mark.parametrize(("world_size", "split"), [(2, "uneven"), (3, "a rank without rows")])
@pytest.mark.parametrize("name", LOSSES)
def test_several_calls_and_steps_with_parts_frozen(pool: RankPool, name: str, world_size: int, split: str) -> None:
    results = pool.run(world_size, on_ranks, name, split)
    for trained in TRAINED:
        expected = alone(name, trained)
        assert all(set(result[trained]) == set(expected) for result in results)
        assert_close({n: torch.stack([r[trained][n] for r in results]).mean(0) for n in expected}, expected)


def partly(name: str, sizes: list[int], frozen: str) -> dict[str, Tensor]:
    """The last rank's rows are constants and only towers are trained: it has nothing to train, the others wait for it all the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    towers, rows = Towers(LOSSES[name], "ring"), own_rows(sizes, rank)
    freeze([towers.loss, *TRAINED[frozen](towers)])
    with torch.set_grad_enabled(rank + 1 < world):
        x, y = towers.image(rows["features"]), towers.text(rows["views"])
    towers.loss(x, y).backward()
    with torch.no_grad():
        x, y = (torch.stack([t, -t], 2).flatten(1)[:, ::2] for t in (x, y))  # not contiguous
        return {**gradients(towers), "value": towers.loss(x, y)}


@pytest.mark.parametrize("frozen", ["all", "no texts", "no images"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_rank_that_trains_nothing_still_passes_on(pool: RankPool, name: str, frozen: str) -> None:
    for sizes in SPLITS[3].values():
        *results, last = pool.run(3, partly, name, sizes, frozen)
        towers, rows, constant = Towers(LOSSES[name]), all_rows(), sum(sizes[:2])
        freeze([towers.loss, *TRAINED[frozen](towers)])
        x, y = towers.image(rows["features"]), towers.text(rows["views"])
        x, y = (torch.cat([t[:constant], t[constant:].detach()]) for t in (x, y))
        value = textbook(LOSSES[name], towers, x, y, None, None)
        value.backward()
        expected = gradients(towers)
        ours = {n: torch.stack([r[n] for r in results]).sum(0) / 3 for n in expected}
        assert_close({**ours, "value": last["value"]}, {**expected, "value": value.detach()})
        assert set(last) == {"value"}
        assert len({float(r["value"]) for r in [*results, last]}) == 1


def in_a_group() -> dict[str, Tensor] | None:
    members = [2, 0]
    group, rank = dist.new_group(members), dist.get_rank()
    if rank not in members:
        return None
    case = LOSSES["CLIP"]
    towers = Towers(case)
    towers.loss = ClipLoss(**case.options, gather="ring", group=group).double()
    return two_steps(towers, own_rows([5, 7], dist.get_rank(group)), lambda t, x, y: t.loss(x, y))


def test_a_ring_of_some_ranks(pool: RankPool) -> None:
    first, outside, second = pool.run(3, in_a_group, fresh=True)
    assert outside is None
    expected = alone("CLIP", "all")
    assert_close({n: (first[n] + second[n]) / 2 for n in expected}, expected)


ROWS, DIM = 40, 16


class CountMessages(CountCollectives):
    """How many messages this rank sends to the next one, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._schema.name == "c10d::send":
            self.messages.append(sum(t.nbytes for t in args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def count(name: str, frozen: bool) -> list[Any]:
    """Collectives and messages, forward and backward, in single precision."""
    rows = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
    x, y = rows[0].requires_grad_(), rows[1].clone().requires_grad_(not frozen)
    loss, found = LOSSES[name].loss(gather="ring"), []
    with CountMessages() as counter:
        value = loss(x, y)
        found += [sum("alltoall" in n for n in counter.names), len(counter.take()), counter.messages]
        counter.messages = []
        value.backward()
        found += [len(counter.take()), counter.messages]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_what_travels(pool: RankPool, name: str, frozen: bool, world_size: int) -> None:
    """Texts of a rank at a time, behind them what is found out: nothing grows with the number of ranks but the number of messages."""
    texts, number, hops = 4 * ROWS * DIM, 4 * ROWS * (name == "CLIP"), world_size - 1
    forward = sorted([texts, 2 * number] * hops if number else [texts] * hops)
    backward = sorted(([texts + number] if frozen else [texts + number, texts]) * hops)
    for handshakes, operations, there, more, back in pool.run(world_size, count, name, frozen):
        assert (handshakes, sorted(there), sorted(back)) == (2, forward, backward)
        assert operations == 2 + 2 * len(there)  # each message is sent and received
        assert more == 1 + 2 * len(back)  # the handshake that says whose gradient it is


@pytest.mark.parametrize("loss", [ClipLoss, SigLipLoss])
def test_an_unknown_way_to_gather(loss: Callable[..., nn.Module]) -> None:
    with pytest.raises(ConfigurationError, match="one of 'all', 'ring'"):
        loss(gather="some")
