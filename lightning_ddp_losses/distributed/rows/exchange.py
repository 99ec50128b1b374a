"""One exchange of several sums over ranks: small tensors on the CPU are sent in its handshake, larger ones are summed by dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.raw_collectives import (
    gather_stacked,
    host_bytes,
    sum_over_ranks,
    tensor_of_bytes,
    wide_dtype,
)
from lightning_ddp_losses.distributed.rows.call import Exchanged, Place, RowsCall
from lightning_ddp_losses.distributed.rows.listed import STACK, SUM


class Part(NamedTuple):
    """This rank's contribution to an exchange.

    Attributes:
        tensor: This rank's part.
        place: Origin of the part in the formula.
        kind: ``SUM`` or ``STACK``.
    """

    tensor: Tensor
    place: Place
    kind: str = SUM


class SharedExchange:
    """One exchange of parts, whose order is equal on all ranks.

    Args:
        call: The call that they belong to.
        parts: The parts, at least one.

    Attributes:
        parts: The parts.
        call: Their call.
    """

    def __init__(self, call: RowsCall, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.call = call
        self._riding: list[int] = []
        self._others: list[int] = []
        free = handshake.inline_capacity(call.group) // 2
        for number, part in enumerate(parts):
            if part.tensor.is_cpu and part.tensor.nbytes <= free:
                free -= part.tensor.nbytes
                self._riding.append(number)
            else:
                self._others.append(number)

    def operators(self) -> str:
        """Return the kinds and operators of the parts, as text."""
        return ", ".join(f"{part.kind} ({part.place.operator})" for part in self.parts)

    def lines(self) -> str:
        """Return the lines of the loss, each once."""
        return "; ".join(dict.fromkeys(part.place.line for part in self.parts))

    def must_match(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks."""
        tensors = [part.tensor for part in self.parts]
        forms = [f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}" for tensor in tensors]
        return {"sums": self.operators(), "of": "; ".join(forms), "exchanges before": len(self.call.exchanged)}

    def payload(self) -> bytes:
        """Return the parts that are sent in the handshake."""
        tensors = [self.parts[number].tensor for number in self._riding]
        return b"".join(host_bytes(tensor.resolve_conj().contiguous()) for tensor in tensors)

    def own(self) -> list[tuple[Tensor, str]]:
        """Return this rank's parts, and how each is combined."""
        return [(part.tensor.resolve_conj(), part.kind) for part in self.parts]

    def note(self) -> None:
        """Record the exchange in the call."""
        numbers = sum(part.tensor.numel() for part in self.parts)
        self.call.exchanged.append(Exchanged("sum", self.operators(), self.lines(), numbers))

    def values(self, payloads: Sequence[bytes]) -> list[Tensor]:
        """Return the value of each part, after the handshake.

        Args:
            payloads: The payloads of all ranks.

        Communication: one sum for each dtype and device of the parts that were not sent in the handshake.
        """
        self.note()
        found: dict[int, Tensor] = {}
        start = 0
        for number in self._riding:
            part = self.parts[number]
            stop = start + part.tensor.nbytes
            found[number] = _value_in(part, [sent[start:stop] for sent in payloads])
            start = stop
        self._sum_others(found)
        return [found[number] for number in range(len(self.parts))]

    def run(self, operations: dict[str, object] | None = None) -> list[Tensor]:
        """Return the value of each part, from a separate exchange.

        Args:
            operations: Further values that must be equal on all ranks.

        Raises:
            RankMismatchError: on every rank, if the parts differ.

        Communication: one handshake, and one sum for each dtype and device of the parts that do not fit into it. If the previous call has
        made the same exchange, only its sums.
        """
        gradient = "gradient of " if self.parts[0].place.in_backward else ""
        comparison = self.call.comparison(
            gradient + self.operators(), self.lines(), {**self.must_match(), **(operations or {})}
        )
        found = self.call.listed_sums(comparison, self.own())
        if found is None:
            return self.values(self.call.meet(comparison, self.payload(), self.own()))
        self.note()
        return found

    def _sum_others(self, found: dict[int, Tensor]) -> None:
        """Sum the parts that are on an accelerator or large."""
        group = self.call.group
        by_form: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number in self._others:
            part = self.parts[number]
            if part.kind == STACK:
                found[number] = gather_stacked(part.tensor, group)
            else:
                by_form.setdefault((part.tensor.dtype, part.tensor.device), []).append(number)
        for together in by_form.values():
            tensors = [self.parts[number].tensor for number in together]
            if len(tensors) == 1:
                found[together[0]] = sum_over_ranks(tensors[0], group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            values = torch.split(sum_over_ranks(flat, group), [tensor.numel() for tensor in tensors])
            for number, tensor, value in zip(together, tensors, values, strict=True):
                found[number] = value.view(tensor.shape)


def _value_in(part: Part, sent: Sequence[bytes]) -> Tensor:
    """Return the value of a part that was sent in the handshake. Parts are added in rank order."""
    dtype, shape = part.tensor.dtype, part.tensor.shape
    parts = tensor_of_bytes(sent).view(dtype).view(len(sent), *shape)
    if part.kind == STACK:
        return parts
    return parts.sum(0, dtype=wide_dtype(dtype)).to(dtype)
