"""Which parameters the strategy reduces by itself, by name, as the live module holds them now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.raw_collectives import host_bytes
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import RankMismatchError


@dataclass(frozen=True)
class Managed:
    """One of them.

    Attributes:
        name: In the module.
        parameter: As it is now.
        owner: Index of its loss, -1 for a parameter outside all losses.
    """

    name: str
    parameter: nn.Parameter
    owner: int


class ManagedParameters:
    """Every trainable parameter that the model's own DDP does not reduce, nor a shard, nor one the user told DDP to ignore.

    Args:
        module: The live LightningModule.
        reduced_elsewhere: Parameters that the model's DDP reduces.
        ignored: Names that the user told DDP to leave alone.
    """

    def __init__(self, module: nn.Module, reduced_elsewhere: Sequence[Tensor], ignored: Sequence[str]) -> None:
        self._module = module
        # the tensors are kept, not only their ids: an id may be taken again
        self.elsewhere = {id(p): p for p in reduced_elsewhere}
        self._ignored = frozenset(ignored)
        self._known: dict[str, nn.Parameter] = {}
        self._losses: list[str] = []
        self._owners: dict[str, int] = {}
        self._signature: tuple[object, ...] = ()
        self._digest = ""

    def watch(self, losses: Sequence[str]) -> None:
        """Say what the losses are called; what exists now counts as synchronised."""
        self._losses = list(losses)
        self._owners.clear()
        self._known.update({m.name: m.parameter for m in self.now()})

    def now(self) -> list[Managed]:
        """Sorted by name."""
        found = []
        for name, parameter in self._module.named_parameters():
            if id(parameter) in self.elsewhere or name in self._ignored or shard_of(parameter) is not None:
                continue
            if parameter.requires_grad or parameter.grad is not None:
                found.append(Managed(name, parameter, self._owner(name)))
        return sorted(found, key=lambda m: m.name)

    def fresh(self, managed: Sequence[Managed]) -> list[Managed]:
        """Those that appeared, or were replaced, since they were last known to be equal on all ranks."""
        return [m for m in managed if self._known.get(m.name) is not m.parameter]

    def _owner(self, name: str) -> int:
        if name not in self._owners:
            owner = [i for i, loss in enumerate(self._losses) if name.startswith(f"{loss}.")]
            self._owners[name] = owner[0] if owner else -1
        return self._owners[name]

    def describe(self, managed: Sequence[Managed]) -> str:
        """Names, shapes and dtypes, short."""
        signature = tuple((m.name, m.parameter.shape, m.parameter.dtype) for m in managed)
        if signature != self._signature or not self._digest:
            self._signature = signature
            text = "; ".join(f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in signature)
            self._digest = f"{text[:200]} #{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
        return self._digest

    def admit(self, fresh: list[Managed]) -> None:
        """Take parameters that appeared after the wrap, if they are equal on all ranks. Communication: one frame."""
        own = [hashlib.sha256(host_bytes(m.parameter.cpu())).hexdigest() for m in fresh]
        everyone = [json.loads(p) for p in handshake.all_gather("new parameters", {}, json.dumps(own).encode())]
        differ = [m.name for m, column in zip(fresh, zip(*everyone, strict=True), strict=True) if len(set(column)) > 1]
        if differ:
            raise RankMismatchError(
                "parameters created or replaced after the wrap",
                expected="equal values on all ranks",
                got=f"different values of {', '.join(f'`{name}`' for name in differ)}",
                fix="Create them in __init__ or configure_model, where they are broadcast, or from the same seed on every rank.",
                collective=True,
            )
        self._known.update({m.name: m.parameter for m in fresh})
