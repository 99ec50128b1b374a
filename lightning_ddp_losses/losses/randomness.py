"""The same random numbers on every rank for the length of a call; each rank's own generators go on afterwards as before."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator

import torch
from pytorch_metric_learning import distances, losses, reducers, regularizers
from pytorch_metric_learning.utils import common_functions as c_f
from torch import Tensor, nn

from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch

_DRAW = struct.Struct("<QQ")
# of pytorch-metric-learning (PML) and torch, by exact class: a subclass, a miner or a module or function of somebody else may draw
_NEVER_DRAW = {
    cls
    for package in (losses, distances, reducers, regularizers, nn.modules.loss)
    for cls in vars(package).values()
    if isinstance(cls, type) and cls not in (losses.ManifoldLoss, nn.TripletMarginWithDistanceLoss)
} | {nn.ModuleDict, nn.ModuleList, nn.Softplus}


def may_draw(loss: nn.Module) -> bool:
    """Whether a call may draw random numbers; to save and restore generators takes as long as a small loss."""
    stack = [loss]
    while stack:
        module = stack.pop()
        if type(module) not in _NEVER_DRAW or vars(module).get("triplets_per_anchor", "all") != "all":
            return True
        stack += [child for child in module._modules.values() if child is not None]
    return False


@contextlib.contextmanager
def same_draws(inner: nn.Module, seed: int, tensors: Iterable[object]) -> Iterator[None]:
    """Seed torch's generators (CPU and the tensors' devices) and PML's numpy generator, and restore them.

    Args:
        inner: What is called; generators are left alone where it never draws.
        seed: The same on every rank.
        tensors: The call's inputs; their devices' generators are seeded too.
    """
    if not may_draw(inner):
        yield
        return
    devices = {t.device for t in tensors if isinstance(t, Tensor) and t.device.type == "cuda"}
    numpy_state = c_f.NUMPY_RANDOM.get_state()
    indices = sorted(d.index or 0 for d in devices)
    with torch.random.fork_rng(devices=indices):
        # not torch.manual_seed: it seeds every device there is, and formats a stack trace for each kind that is not in use
        torch.default_generator.manual_seed(seed)
        for index in indices:
            torch.cuda.default_generators[index].manual_seed(seed)
        c_f.NUMPY_RANDOM.seed(seed % (1 << 32))
        try:
            yield
        finally:
            c_f.NUMPY_RANDOM.set_state(numpy_state)


class Draws:
    """Counts the calls of a module: each draws anew.

    Attributes:
        number: Calls so far.
    """

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> bytes:
        """This rank's seed for one more call, to ride in a frame."""
        self.number += 1
        return _DRAW.pack(torch.initial_seed() % (1 << 63), self.number)


def shared_seed(bundle: GatheredBatch) -> int:
    """Rank 0's seed for this call."""
    base, draws = _DRAW.unpack(bundle.extras[0])
    return int((base * 1_000_003 + draws) % (1 << 63))
