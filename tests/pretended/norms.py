"""The plan of a model's batch norms on ranks whose collectives carry the device's tensors: what a step costs, numbers, and errors.

Steps by hand, and whole fits of a Lightning Trainer.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import DDPLossStrategy, SyncBatchNorm
from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.layers import forward_plan
from tests.counting import CountCollectives
from tests.doors import PlannedCall, handshake
from tests.fits import QUIET, listed
from tests.pretended import forks
from tests.pretended.devices import HOST, Device, waits_in
from tests.pretended.fits import OneNodePerRank, PretendAccelerator, PretendStrategy
from tests.pretended.forks import write_found

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
            elif odd == "waits for a peer":
                forks.get_stuck(stuck=True)
            if odd == "another layer":
                self.wide(torch.cat([x, x[:, :1]], 1))
            elif odd == "another shape":
                norm(x[:, :3])
            elif odd == "evaluates":
                x = norm.eval()(x)
            elif self.odd == "checkpointed":  # it runs again in backward
                x = checkpoint(norm, x, use_reentrant=number % 2 == 0, preserve_rng_state=False)
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
    "checkpointed": lambda step: "checkpointed",
}
ODD = ("another layer", "another shape", "skips", "skips the last", "evaluates", "one more", "raises", "one row")
ENDS = ("on_train_end", "revert")  # where the last step is judged


def error_of(device: Device, odd: str, end: str | None = None) -> str:
    """The error of a rank where rank 1 differs in a step that follows the plan.

    Args:
        device: The device.
        odd: How it differs.
        end: What comes behind that step. None: further steps.
    """
    try:
        module, plugin = Normed(), plugin_of_the_world()
        plugin.apply(module)
        module.to(device.name)
        for step in range(BAD_STEP + (2 + forward_plan._FORWARDS if end is None else 1)):
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
        if end == "on_train_end":
            module.on_train_end()
        elif end == "revert":
            plugin.revert(module)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "no error"
    dist.barrier()  # no rank is left behind
    return found


def waits_of_several_forwards(device: Device) -> int:
    """How often the host waits for the device in steps of three forwards, from the first one that follows the plan on."""
    module, plugin, waits = Normed(), plugin_of_the_world(), 0
    plugin.apply(module)
    module.to(device.name)
    for step in range(STEPS):
        x = device.to_device(rows(dist.get_rank(), step)).requires_grad_()
        with device.counting() as counts:
            loss = torch.stack([module(each).square().mean() for each in (x, x.flip(1), x * 2)]).sum()
            module.on_before_backward(loss)
            loss.backward()
        waits += sum(waits_in(counts).values()) if step > 1 else 0
        device.catch_up()
    plugin.revert(module)
    return waits


# ---------------------------------------------------------------------- whole fits


class PretendDDP(DDPStrategy):
    """Lightning's own, as ``PretendStrategy`` is ours."""

    def determine_ddp_device_ids(self) -> None:
        return None


STRATEGIES: dict[str, Callable[[], DDPStrategy]] = {
    "ddp_losses": PretendStrategy,
    "ddp_losses, check_calls=False": lambda: PretendStrategy(check_calls=False),
    "ddp": PretendDDP,
}
FAILS = ("raises", "its device fails", "one row")  # in the last step, which follows the plan


class NormedFit(Normed):
    """Trains; in its last step all ranks are odd, or rank 1 alone."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.wide.requires_grad_(False)  # it is not used
        self.fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.odd = ""
        if batch_idx == BAD_STEP and self.fails:
            self.odd = "raises" if self.fails == "its device fails" else self.fails
            if dist.get_rank() != 1 and self.fails != "one row":
                self.odd = "waits for a peer" if self.fails == "its device fails" else ""
        value: Tensor = self(batch).square().mean()
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(device: Device, strategy: DDPStrategy, fails: str = "") -> list[Tensor]:
    """Trains; returns parameters and averages."""
    module, rank = NormedFit(fails), dist.get_rank()
    trainer = pl.Trainer(
        accelerator="cpu" if device is HOST else PretendAccelerator(),
        devices=1,
        num_nodes=dist.get_world_size(),
        strategy=strategy,
        plugins=[OneNodePerRank(), SyncBatchNorm()],
        **QUIET,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, listed([rows(rank, step) for step in range(BAD_STEP + 1)]))  # type: ignore[arg-type]
    return [device.to_host(tensor).double() for tensor in module.state_dict().values()]


def error_of_fit(device: Device, strategy: str, fails: str) -> str:
    """The error of a rank in a fit, on whose device a collective may not be possible any more."""
    broken = mock.patch.object(PlannedCall, "without_rows", side_effect=RuntimeError("CUDA error: unspecified"))
    try:
        with broken if fails == "its device fails" and dist.get_rank() == 1 else contextlib.nullcontext():
            fit(device, STRATEGIES[strategy](), fails)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = "no error"
    forks.get_stuck(stuck=False)
    dist.barrier()
    return found


def fits(device: Device) -> dict[str, Any]:
    """The errors of all fits, and how far one that follows each of them ends from the CPU's."""
    found: dict[str, Any] = {}
    expected = fit(HOST, DDPLossStrategy(process_group_backend="gloo"))
    for strategy, make in STRATEGIES.items():
        for fails in FAILS:
            error = error_of_fit(device, strategy, fails)
            off = max(float((a - b).norm()) for a, b in zip(expected, fit(device, make()), strict=True))
            found[f"{strategy}, {fails}"] = {"error": error, "off": off}
    return found


def _as_rank(device: Device, rank: int) -> dict[str, Any]:
    # torch's checkpoint looks for the device's autocast, which it has not
    with mock.patch.object(torch.amp, "is_autocast_available", lambda kind: kind == "cpu"):
        found: dict[str, Any] = {name: compared(device, odd) for name, odd in SAME.items()}
    found["waits of several forwards"] = waits_of_several_forwards(device)
    found["errors"] = {odd: error_of(device, odd) for odd in ODD}
    found["errors"] |= {f"one row, {end}": error_of(device, "one row", end) for end in ENDS}
    try:
        found["fits"] = fits(device) if dist.get_world_size() < 4 else {}
    except Exception:
        found["fits"] = traceback.format_exc()
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything on two ranks, on three, and on two pairs; writes what each rank found."""
    write_found(path, partial(_as_rank, device), {"2": (2, True), "3": (3, True), "4": (4, True)})
