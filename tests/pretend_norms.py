"""The plan of a model's batch norms on ranks whose collectives carry the device's tensors: what a step costs, numbers, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses import SyncBatchNorm
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from tests.counting import CountCollectives
from tests.devices import HOST, Device
from tests.pretend_forks import on_forked_ranks

WIDTH, LAYERS, STEPS = 4, 5, 5
BAD_STEP = 4  # the plan is followed in it


class Normed(pl.LightningModule):
    """Batch norms between linear layers; ``odd`` says how this rank's next forward differs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))
        self.wide = nn.BatchNorm1d(WIDTH + 1)
        self.odd = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = layer(x)
            odd = self.odd if number == 2 or self.odd == "skips the last" else ""
            if odd == "fewer rows":
                x = x[: len(x) // 2]
            elif odd == "one row":
                x = x[:1] if dist.get_rank() == 0 else x[:0]
            elif odd == "raises":
                raise KeyError("rank 1 alone")
            if odd == "another layer":
                self.wide(torch.cat([x, x[:, :1]], 1))
            elif odd == "another shape":
                norm(x[:, :3])
            elif odd == "evaluates":
                x = norm.eval()(x)
            elif odd != "skips" and (odd != "skips the last" or number < LAYERS - 1):
                x = norm(x)
        if self.odd == "one more":
            x = self.norms[0](x)
        return x


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(3 + rank, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def handshakes() -> int:
    return handshake.Channel.of(None, "handshakes").opened


def plugin_of_the_world() -> SyncBatchNorm:
    """Pairs of ranks normalise together where there are four."""
    return SyncBatchNorm(group_size=2 if dist.get_world_size() == 4 else None)


def train(place: Device, odd: Callable[[int], str]) -> dict[str, Any]:
    """Trains for some steps. Returns what each cost, outputs, gradients and averages; ``odd`` tells by step how this rank differs."""
    module, plugin = Normed(), plugin_of_the_world()
    plugin.apply(module)
    module.to(place.name)
    costs, numbers = [], []
    for step in range(STEPS):
        module.odd = odd(step)
        x = place.to_device(rows(dist.get_rank(), step)).requires_grad_()
        cost = []
        with CountCollectives() as count:
            for part in ("forward", "check", "backward"):
                before = handshakes()
                if part == "forward":
                    loss = module(x).square().mean()
                elif part == "check":
                    module.on_before_backward(loss)
                else:
                    loss.backward()
                cost.append([handshakes() - before, len(count.take())])
        place.catch_up()
        costs.append(cost)
        numbers += [loss.detach(), x.grad]
    averages = [buffer for buffer in module.buffers() if buffer.is_floating_point()]
    numbers += [*averages, *(p.grad for p in module.parameters() if p.grad is not None)]
    found = [place.to_host(number).double() for number in numbers]
    plugin.revert(module)
    return {"costs": costs, "numbers": found}


def compared(device: Device, odd: Callable[[int], str]) -> dict[str, Any]:
    """The costs on the device and on the CPU, and the largest difference between their numbers."""
    host, ours = train(HOST, odd), train(device, odd)
    off = max(float((a - b).norm()) for a, b in zip(host["numbers"], ours["numbers"], strict=True))
    return {"device": ours["costs"], "cpu": host["costs"], "off": off}


SAME: dict[str, Callable[[int], str]] = {
    "the same": lambda step: "",
    "all leave": lambda step: "skips" if step == BAD_STEP else "",
    "other rows": lambda step: "fewer rows" if step == BAD_STEP and dist.get_rank() else "",
}
ODD = ("another layer", "another shape", "skips", "skips the last", "evaluates", "one more", "raises", "one row")


def error_of(device: Device, odd: str) -> str:
    """The error of a rank where rank 1 differs in a step that follows the plan."""
    try:
        module, plugin = Normed(), plugin_of_the_world()
        plugin.apply(module)
        module.to(device.name)
        for step in range(BAD_STEP + 2):
            is_bad = step == BAD_STEP and (dist.get_rank() == 1 or odd == "one row")
            module.odd = odd if is_bad else ""
            x = device.to_device(rows(dist.get_rank(), step)).requires_grad_()
            try:
                loss = module(x).square().sum()
            except KeyError as error:  # as a strategy of ours does
                handshake.raise_on_all_ranks(error, "training_step")
            if odd in ("skips the last", "one more"):
                all_gather_with_grad(torch.zeros(2))
            module.on_before_backward(loss)
            loss.backward()
            device.catch_up()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "no error"
    dist.barrier()  # no rank is left behind
    return found


def _as_rank(device: Device, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: compared(device, odd) for name, odd in SAME.items()}
    found["errors"] = {odd: error_of(device, odd) for odd in ODD}
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything on two ranks, on three, and on two pairs; writes what each rank found."""
    results = {}
    for world_size in (2, 3, 4):
        folder = path.parent / str(world_size)
        folder.mkdir()
        results[str(world_size)] = on_forked_ranks(partial(_as_rank, device), world_size, folder, carries=True)
    path.write_text(json.dumps(results))
