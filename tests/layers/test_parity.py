"""W ranks normalise as one process does: outputs, gradients and running averages of every kind of batch norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import SyncBatchNorm
from lightning_ddp_losses.testing import RankPool
from tests.layers.cases import CASES, SPLITS, STEPS, Case, build, forwards, inputs, value
from tests.oracle import assert_close

Found = dict[str, Tensor]


def on_a_rank(rows: list[int]) -> dict[str, Found]:
    """Every case on this rank's rows."""
    return {name: run(case, rows) for name, case in CASES.items()}


def run(case: Case, rows: list[int]) -> Found:
    rank = dist.get_rank()
    layer, local, plugin = build(case), build(case), SyncBatchNorm()
    keys, kind = list(layer.state_dict()), type(layer)
    plugin.apply(layer)
    assert type(layer) is kind
    assert list(layer.state_dict()) == keys
    found: Found = {}
    for step in range(STEPS):
        xs = [feed[rank].requires_grad_(case.input_grad) for feed in inputs(case, rows, step)]
        outputs = [layer(x) for x in xs]
        loss = value(outputs)
        if loss.requires_grad:
            loss.backward()
        for k, (x, y) in enumerate(zip(xs, outputs, strict=True)):
            found[f"y {step} {k}"] = y.detach()
            assert len(x) < 2 or y.stride() == local(x).stride()
            if case.input_grad:
                found[f"dx {step} {k}"] = x.grad
    layer.eval()
    frozen = torch.linspace(-3, 3, 60, dtype=torch.float64).view(20, 3)[(...,) + (None,) * len(case.size)]
    found["evaluation mode"] = layer(frozen).detach()
    plugin.revert(layer)
    assert "forward" not in vars(layer)
    return found | of_layer(layer)


def of_layer(layer: torch.nn.Module) -> Found:
    grads = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return grads | {name: b.double() for name, b in layer.named_buffers()}


def in_one_process(case: Case, rows: list[int]) -> list[Found]:
    """By rank, what the ranks should find; gradients of parameters are the whole sum."""
    layer = build(case)
    found: list[Found] = [{} for _ in rows]
    for step in range(STEPS):
        feeds = inputs(case, rows, step)
        for feed in feeds:
            for x in feed:
                x.requires_grad_(case.input_grad)
        outputs = forwards(case, layer, feeds)
        loss = sum(value([ys[rank] for ys in outputs]) for rank in range(len(rows)))
        if loss.requires_grad:
            loss.backward()
        for rank, k in [(r, k) for r in range(len(rows)) for k in range(case.forwards)]:
            found[rank][f"y {step} {k}"] = outputs[k][rank].detach()
            if case.input_grad:
                found[rank][f"dx {step} {k}"] = feeds[k][rank].grad
    layer.eval()
    frozen = torch.linspace(-3, 3, 60, dtype=torch.float64).view(20, 3)
    shape = (20, 3, 1, 1) if isinstance(layer, torch.nn.BatchNorm2d) else (20, 3)
    own = layer(frozen.view(shape)).detach().view((20, 3) + (1,) * len(case.size))
    return [{**each, "evaluation mode": own, **of_layer(layer)} for each in found]


@pytest.mark.parametrize(("world_size", "rows"), [(w, rows) for w in SPLITS for rows in SPLITS[w]], ids=str)
def test_every_kind_of_batch_norm(pool: RankPool, world_size: int, rows: list[int]) -> None:
    by_rank: list[dict[str, Any]] = pool.run(world_size, on_a_rank, rows)
    for name, case in CASES.items():
        expected = in_one_process(case, rows)
        for key in [key for key in expected[0] if key in ("dweight", "dbias")]:  # each rank holds its share
            total = sum(found[name].pop(key) for found in by_rank)
            assert_close({f"{name}: {key}": total}, {f"{name}: {key}": expected[0][key]})
            for each in expected:
                each.pop(key, None)
        for rank, found in enumerate(by_rank):
            got = {f"{name} on rank {rank}: {k}": v for k, v in found[name].items()}
            assert_close(got, {f"{name} on rank {rank}: {k}": v for k, v in expected[rank].items()})
